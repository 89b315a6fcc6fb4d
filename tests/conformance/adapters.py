"""What the suite must know of a router: how it is started for which kind of case, and what it offers.

A router is tried in the configuration that its own documentation recommends for the kind of case: with sessions named
by a header ("sessions"), with conversations that nothing names ("keyless"), several routers beside each other
("several"). Health checks are set to once a second, so that waiting for them is bounded; how many must fail, and how
long each may take, is the router's own default.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import quote

from prometheus_client.parser import text_string_to_metric_families

from tests.conformance.case import Can, Failed
from tests.conformance.routers import Launch, Router

Variant = Literal["sessions", "keyless", "several"]


class Members(Protocol):
    """How a router's replicas are listed and changed while it runs."""

    async def known(self, router: Router) -> set[str]:
        """URLs of the replicas that it would send turns to."""

    async def add(self, router: Router, url: str) -> None:
        """Take a further replica."""

    async def drain(self, router: Router, url: str) -> None:
        """Send no new turns there."""

    async def remove(self, router: Router, url: str) -> None:
        """Forget a replica."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """One router."""

    name: str
    launches: Mapping[Variant, Launch]
    can: frozenset[Can]
    session_header: str = ""
    """Header that names a session; empty: none is known."""
    members: Members | None = None
    metrics_path: str = "/metrics"
    """On the admin port."""
    in_flight: str = ""
    """Metric whose samples sum up to the turns in flight."""
    ready_path: str = "/readyz"
    """On the port for clients: answers 200 when the router wants traffic."""
    body_limit_bytes: int = 0
    """Above this a body is refused; 0: not known."""
    loses: Mapping[str, str] = field(default_factory=dict)
    """Case → why it does not apply to this router, where no capability says so."""

    async def turns_in_flight(self, router: Router) -> float:
        """By its own metrics."""
        _, _, text = await router.admin("GET", self.metrics_path)
        families = text_string_to_metric_families(text)
        return sum(sample.value for family in families for sample in family.samples if sample.name == self.in_flight)


def _accepted(status: int, text: str, what: str) -> None:
    if not 200 <= status < 300:
        raise Failed(f"{what} was answered {status} {text[:200]}")


class RoostMembers:
    """`/admin/replicas` of the admin listener."""

    async def known(self, router: Router) -> set[str]:
        status, told, _ = await router.admin("GET", "/admin/replicas")
        replicas: list[dict[str, Any]] = told["replicas"] if status == 200 and isinstance(told, dict) else []
        return {each["url"] for each in replicas if each["healthy"] and each["incarnation"]}

    async def add(self, router: Router, url: str) -> None:
        status, _, text = await router.admin("POST", "/admin/replicas", {"url": url, "fleet": "default"})
        _accepted(status, text, "adding a replica")

    async def drain(self, router: Router, url: str) -> None:
        status, _, text = await router.admin("POST", f"/admin/replicas/{_id(url)}/drain")
        _accepted(status, text, "draining a replica")

    async def remove(self, router: Router, url: str) -> None:
        status, _, text = await router.admin("DELETE", f"/admin/replicas/{_id(url)}")
        _accepted(status, text, "removing a replica")


class WorkersMembers:
    """`/workers` of sglang-router and SMG, on the port for clients."""

    async def _list(self, router: Router) -> list[dict[str, Any]]:
        status, told, _ = await router.admin("GET", "/workers", port=router.port)
        return told.get("workers", []) if status == 200 and isinstance(told, dict) else []

    async def known(self, router: Router) -> set[str]:
        return {each["url"].rstrip("/") for each in await self._list(router) if each.get("is_healthy", True)}

    async def add(self, router: Router, url: str) -> None:
        status, _, text = await router.admin("POST", "/workers", {"url": url}, port=router.port)
        _accepted(status, text, "adding a replica")

    async def drain(self, router: Router, url: str) -> None:
        raise NotImplementedError

    async def remove(self, router: Router, url: str) -> None:
        for each in await self._list(router):
            if each["url"].rstrip("/") == url:
                status, _, text = await router.admin("DELETE", f"/workers/{each['id']}", port=router.port)
                _accepted(status, text, "removing a replica")


class QueryMembers:
    """`/add_worker?url=` of vllm-router."""

    async def known(self, router: Router) -> set[str]:
        status, told, _ = await router.admin("GET", "/list_workers", port=router.port)
        urls = told.get("urls", []) if status == 200 and isinstance(told, dict) else []
        return {str(each).rstrip("/") for each in urls}

    async def add(self, router: Router, url: str) -> None:
        status, _, text = await router.admin("POST", f"/add_worker?url={quote(url)}", port=router.port)
        _accepted(status, text, "adding a replica")

    async def drain(self, router: Router, url: str) -> None:
        raise NotImplementedError

    async def remove(self, router: Router, url: str) -> None:
        status, _, text = await router.admin("POST", f"/remove_worker?url={quote(url)}", port=router.port)
        _accepted(status, text, "removing a replica")


def _id(url: str) -> str:
    return url.removeprefix("http://")


def _launches(
    base: str, policies: Mapping[Variant, str], env: Mapping[str, str] | None = None
) -> dict[Variant, Launch]:
    return {variant: Launch(f"{base} {more}".strip(), env or {}) for variant, more in policies.items()}


def roost() -> Adapter:
    """Roost from this environment; several routers share a Redis. It is told to pass clients' keys on, as the others do
    by themselves: unless asked, it shows replicas none.
    """
    command = shlex.quote(str(Path(sys.executable).with_name("roost")))
    base = f"{command} router --host {{host}} --port {{port}} --admin-port {{admin_port}} {{replicas:--replica}}"
    passing = {"ROOST_AUTH__CLIENT_CREDENTIALS": "pass"}
    return Adapter(
        name="roost",
        launches={
            **_launches(base, {"sessions": "", "keyless": ""}, passing),
            # A machine that runs mocks, clients and routers on two cores is no slow store.
            **_launches(base, {"several": "--redis {redis}"}, {**passing, "ROOST_STORE__TIMEOUT_S": "0.25"}),
        },
        can=frozenset(Can),
        session_header="modal-session-id",
        members=RoostMembers(),
        in_flight="roost_in_flight",
        body_limit_bytes=128 << 20,
    )


_PEERS = Path(os.environ.get("PEERS_DIR") or Path.home() / ".cache" / "roost-peers")
"""Where `make conformance-peers` installs other routers, each in an environment of its own."""
_RUST = (
    "--host {host} --port {port} --worker-urls {replicas} --prometheus-host {host} --prometheus-port {admin_port} "
    "--worker-startup-check-interval 1 --max-payload-size 134217728 --health-check-interval-secs 1"
)
_RUST_CAN = frozenset(
    {Can.SESSIONS, Can.KEYLESS, Can.ADD, Can.REMOVE, Can.METRICS, Can.READINESS, Can.BOUNDED_BODY, Can.IN_FLIGHT}
)


def sglang_router() -> Adapter:
    """sglang-router 0.3: `manual` keeps sessions; no policy of it agrees between routers without keys kept apart."""
    base = f"{_PEERS}/sglang-router/bin/python -m sglang_router.launch_router {_RUST}"
    return Adapter(
        name="sglang-router",
        launches=_launches(
            base, {"sessions": "--policy manual --assignment-mode min_load", "keyless": "--policy cache_aware"}
        ),
        can=_RUST_CAN,
        session_header="x-smg-routing-key",
        members=WorkersMembers(),
        in_flight="smg_worker_requests_active",
        ready_path="/readiness",
        body_limit_bytes=128 << 20,
    )


def smg() -> Adapter:
    """SMG 1.13: `manual` keeps sessions; several routers agree by `consistent_hashing`."""
    base = f"{_PEERS}/smg/bin/smg launch {_RUST} --load-monitor-interval 1"
    return Adapter(
        name="smg",
        launches=_launches(
            base,
            {
                "sessions": "--policy manual --assignment-mode min_load",
                "keyless": "--policy cache_aware",
                "several": "--policy consistent_hashing",
            },
        ),
        can=_RUST_CAN | {Can.SEVERAL},
        session_header="x-smg-routing-key",
        members=WorkersMembers(),
        in_flight="smg_worker_requests_active",
        ready_path="/readiness",
        body_limit_bytes=128 << 20,
    )


def vllm_router() -> Adapter:
    """vllm-router 0.1: `sticky_least_loaded` keeps sessions; several routers agree by `consistent_hash`."""
    base = f"{_PEERS}/vllm-router/bin/vllm-router {_RUST}"
    return Adapter(
        name="vllm-router",
        launches=_launches(
            base,
            {
                "sessions": "--policy sticky_least_loaded",
                "keyless": "--policy cache_aware",
                "several": "--policy consistent_hash",
            },
        ),
        can=_RUST_CAN | {Can.SEVERAL},
        session_header="x-session-id",
        members=QueryMembers(),
        in_flight="vllm_router_running_requests",
        ready_path="/readiness",
        body_limit_bytes=128 << 20,
    )


ADAPTERS = {"roost": roost, "sglang-router": sglang_router, "smg": smg, "vllm-router": vllm_router}
"""By the name that `--adapter` takes."""


def plain(template: str, *, name: str, session_header: str, keyless: bool, metrics: bool) -> Adapter:
    """Any router, by the command that starts it; what is not told it is not taken to offer."""
    can = set()
    if session_header:
        can.add(Can.SESSIONS)
    if keyless:
        can.add(Can.KEYLESS)
    if metrics:
        can.add(Can.METRICS)
    if "{redis}" in template:
        can |= {Can.SEVERAL, Can.STORE}
    launch = Launch(template, {})
    return Adapter(
        name=name,
        launches={"sessions": launch, "keyless": launch, "several": launch},
        can=frozenset(can),
        session_header=session_header,
    )
