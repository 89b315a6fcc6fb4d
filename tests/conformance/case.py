"""A case: one rule in one sentence, where it came from, what a router must offer for it to apply, and how it is tried.

A case is an async function with the decorator `case`. It passes by returning, fails by `check` or any error, and
tells that it does not apply by `skip`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

from tests.conformance.dialects import Dialect

if TYPE_CHECKING:
    from tests.conformance.rig import Rig


class Can(StrEnum):
    """What a router may offer or not. The value completes "n/a: it does not …"."""

    SESSIONS = "keep a session that a header names"
    KEYLESS = "keep a conversation that nothing names"
    SEVERAL = "act as one with other routers"
    STORE = "keep shared state in Redis"
    ADD = "take further replicas while it runs"
    DRAIN = "drain a replica"
    REMOVE = "remove a replica while it runs"
    METRICS = "tell metrics"
    IN_FLIGHT = "tell how many turns are in flight"
    READINESS = "tell whether it is ready"
    AGENTS = "know the session headers of coding agents"
    FIRST_FRAME = "read a stream before passing its head on"
    INCARNATIONS = "tell a restarted replica from its former life"
    REPLICA_KEY = "send a replica a key of the replica's own"
    BOUNDED_BODY = "bound the size of bodies"


class Verdict(StrEnum):
    """How a case ended."""

    PASS = "pass"
    FAIL = "fail"
    NA = "n/a"


class Failed(AssertionError):
    """The rule is broken; the text is what was seen."""


class NotApplicable(Exception):
    """The router does not offer what the rule is about; the text says what."""


def check(true: object, seen: str) -> None:
    """Fail with what was seen unless it is so."""
    if not true:
        raise Failed(seen)


def skip(why: str) -> None:
    """Say that the case does not apply, and why."""
    raise NotApplicable(why)


Body = Callable[..., Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Case:
    """One rule, ready to be tried."""

    id: str
    """`subject.name`, with `[dialect]` where the rule is tried in each."""
    rule: str
    sources: tuple[str, ...]
    """Public reports, standards and documents that ask for it; "Roost" where it is Roost's own guarantee."""
    needs: frozenset[Can]
    dialect: Dialect | None
    limit_s: float
    waits: bool
    body: Body

    @property
    def subject(self) -> str:
        return self.id.partition(".")[0]

    async def run(self, rig: Rig) -> None:
        """Try it."""
        await (self.body(rig) if self.dialect is None else self.body(rig, self.dialect))

    def matches(self, patterns: Sequence[str]) -> bool:
        """Whether one of the patterns names it: its id, its subject, its name in all dialects, or a glob."""
        plain = self.id.partition("[")[0]
        return not patterns or any(
            each in (self.id, plain, self.subject) or fnmatch(self.id, each) for each in patterns
        )


CASES: list[Case] = []
"""All cases, in the order in which their modules are imported."""


def case(
    rule: str,
    *sources: str,
    needs: Sequence[Can] = (),
    each: Sequence[Dialect] = (),
    limit_s: float = 30.0,
    waits: bool = False,
) -> Callable[[Body], Body]:
    """Register a function of `tests.conformance.cases.SUBJECT` as the case `SUBJECT.function`.

    `each` makes one case of every dialect and gives it to the function. `waits` marks a case that does little but
    wait: it runs beside the others. `limit_s` is the time it may take, the start of its router included.
    """

    def register(body: Body) -> Body:
        subject = body.__module__.rpartition(".")[2]
        name = f"{subject}.{body.__name__}"
        for dialect in each or (None,):
            found: dict[str, Any] = {"id": name if dialect is None else f"{name}[{dialect}]"}
            if any(known.id == found["id"] for known in CASES):
                raise ValueError(f"two cases are called {found['id']}")
            CASES.append(
                Case(
                    **found,
                    rule=rule,
                    sources=sources,
                    needs=frozenset(needs),
                    dialect=dialect,
                    limit_s=limit_s,
                    waits=waits,
                    body=body,
                )
            )
        return body

    return register
