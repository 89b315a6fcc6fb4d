"""The error tree. Foreign errors become these at the boundary where they arise, and nowhere else.

RoostError
├── RequestError            the client's doing; carries an HTTP status
│   ├── MalformedRequest    400
│   ├── UnknownKey          401: no API key, or none that is known
│   ├── NotAllowed          403: the key does not go that far
│   ├── UnknownModel        404
│   ├── UnknownResponse     404: no stored response of this tenant has that id
│   ├── TooSlow             408: its bytes stopped coming, or come too slowly
│   ├── RequestTooLarge     413
│   ├── ExpectationFailed   417: `Expect` asks for something else than 100-continue
│   ├── HeadersTooLarge     431
│   ├── Unsupported         501: HTTP that this gateway does not speak, such as WebSocket
│   └── UnsupportedVersion  505: neither HTTP/1.0 nor HTTP/1.1
├── OverLimit               429, with Retry-After: the tenant's own rate or number of turns
├── NotPlaced               503, with Retry-After: no replica may take the turn
│   ├── FleetFull           503, with Retry-After: no room for a new session, and none came while it waited
│   └── RouterBusy          503: this process holds as much as it may
├── UpstreamError           a replica's doing
│   ├── UpstreamUnreachable 502: connection refused or timed out; nothing was sent
│   ├── UpstreamBroken      502: died, reset or spoke nonsense (before or after its head)
│   └── UpstreamSilent      504: no head, or no byte, for longer than the timeout
└── StoreError
    ├── StoreUnavailable    the store did not answer in time
    └── StoreForeign        the store holds keys of another version
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "ExpectationFailed",
    "FleetFull",
    "HeadersTooLarge",
    "MalformedRequest",
    "NotAllowed",
    "NotPlaced",
    "OverLimit",
    "RequestError",
    "RequestTooLarge",
    "RoostError",
    "RouterBusy",
    "StoreError",
    "StoreForeign",
    "StoreUnavailable",
    "TooSlow",
    "UnknownKey",
    "UnknownModel",
    "UnknownResponse",
    "Unsupported",
    "UnsupportedVersion",
    "UpstreamBroken",
    "UpstreamError",
    "UpstreamSilent",
    "UpstreamUnreachable",
]


class RoostError(Exception):
    """Root of all errors that Roost raises on purpose. `status` is what a client is told."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"


class RequestError(RoostError):
    """The client's request cannot be served as it is."""

    status = 400
    code = "invalid_request"


class MalformedRequest(RequestError):
    """The body is not what its path asks for."""


class UnknownKey(RequestError):
    """The request has no API key, or none that is known."""

    status = 401
    code = "invalid_api_key"


class NotAllowed(RequestError):
    """The request's API key does not go that far."""

    status = 403
    code = "not_allowed"


class UnknownModel(RequestError):
    """No fleet serves that model."""

    status = 404
    code = "model_not_found"


class UnknownResponse(RequestError):
    """The tenant has no stored response of that id."""

    status = 404
    code = "response_not_found"


class RequestTooLarge(RequestError):
    """The body exceeds `limits.body_max_bytes`."""

    status = 413
    code = "request_too_large"


class HeadersTooLarge(RequestError):
    """The headers exceed `limits.header_max_bytes`."""

    status = 431
    code = "headers_too_large"


class TooSlow(RequestError):
    """The request's bytes come too slowly to wait for."""

    status = 408
    code = "request_timeout"


class ExpectationFailed(RequestError):
    """`Expect` names something that cannot be met."""

    status = 417
    code = "expectation_failed"


class Unsupported(RequestError):
    """HTTP of a kind that this gateway does not speak."""

    status = 501
    code = "not_implemented"


class UnsupportedVersion(RequestError):
    """Another HTTP than 1.0 and 1.1."""

    status = 505
    code = "http_version_not_supported"


class OverLimit(RoostError):
    """The tenant has used up its turns for now."""

    status = 429
    code = "rate_limit_exceeded"

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NotPlaced(RoostError):
    """No replica may take the turn now."""

    status = 503
    code = "no_replica"

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RouterBusy(NotPlaced):
    """This process holds as many connections or request bodies as it may."""

    code = "router_busy"


class FleetFull(NotPlaced):
    """The fleet holds as many live sessions as it can, and the new one waited in vain or found the queue full."""

    code = "fleet_full"


class UpstreamError(RoostError):
    """A replica failed a turn."""

    status = 502
    code = "upstream_error"


class UpstreamUnreachable(UpstreamError):
    """No connection: nothing was sent, another replica may be tried."""

    code = "upstream_unreachable"

    def __init__(self, message: str, *, refused: bool = True) -> None:
        """`refused`: nobody listens, or there is no way; False: nobody answered in time."""
        super().__init__(message)
        self.refused = refused


class UpstreamBroken(UpstreamError):
    """The connection died or spoke nonsense."""

    code = "upstream_broken"

    def __init__(self, message: str, *, answered: bool = True) -> None:
        """`answered`: whether any byte of the response had come."""
        super().__init__(message)
        self.answered = answered


class UpstreamSilent(UpstreamError):
    """The replica sent nothing for longer than the timeout."""

    status = 504
    code = "upstream_timeout"


class StoreError(RoostError):
    """The shared state cannot be used."""

    status = 503
    code = "store_unavailable"


class StoreUnavailable(StoreError):
    """The store did not answer in time, or refused."""


class StoreForeign(StoreError):
    """The store holds keys that another version of Roost wrote."""
