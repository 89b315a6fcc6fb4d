"""Clients as harnesses are: sessions of growing turns, subagents, leaving early, trying again as `Retry-After` says.

What comes back is judged here, byte by byte and without the router's own readers: what is no clean end, no honest error
and no break that a fault explains is a violation.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp

from router.domain.turn import Dialect
from tests.integration.conversations import Conversation, prose
from tests.integration.replicas import PATHS
from tests.soak.faults import Ledger
from tests.soak.stage import HOST, Router, Stage

__all__ = ["Clients", "Turn"]

TURN_S: Final = 120.0
"""Within this every turn must have been answered, whatever went wrong."""
LINGER_S: Final = 25.0
"""A silent connection is noticed this late (`timeouts.idle_s`, and a first byte's)."""
DIALECTS: Final = (Dialect.CHAT, Dialect.CHAT, Dialect.MESSAGES, Dialect.RESPONSES, Dialect.COMPLETIONS)
MODEL: Final = "kimi-k2.6"
TERMINAL: Final = {
    Dialect.CHAT: re.compile(rb"^data: \[DONE\]$", re.MULTILINE),
    Dialect.COMPLETIONS: re.compile(rb"^data: \[DONE\]$", re.MULTILINE),
    Dialect.MESSAGES: re.compile(rb"^event: message_stop$", re.MULTILINE),
    Dialect.RESPONSES: re.compile(rb"^event: response\.(completed|incomplete)$", re.MULTILINE),
}
TAIL_BYTES: Final = 1 << 18
"""Of a stream, kept to judge its end: the last event of a Responses stream repeats the instructions."""


@dataclass(slots=True)
class Turn:
    """One attempt of one turn, from its send on."""

    router: str
    sent_s: float
    replica: str | None = None


@dataclass(slots=True)
class Tally:
    """What clients saw."""

    turns: int = 0
    retries: Counter[str] = field(default_factory=Counter)
    left: int = 0
    broken: int = 0
    """Streams that broke after their first byte, each explained by a fault."""
    cached_tokens: int = 0
    prompt_tokens: int = 0
    moves: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    waits_s: list[float] = field(default_factory=list)
    """From the first send of a turn to its first byte."""


class Unfinished(Exception):
    """An attempt that must be made again, and why."""

    def __init__(self, why: str, after_s: float) -> None:
        super().__init__(why)
        self.why = why
        self.after_s = after_s


class Clients:
    """Sessions that come and go until told to stop."""

    def __init__(self, stage: Stage, ledger: Ledger, seed: int, violate: Callable[[str], None]) -> None:
        self.tally = Tally()
        self.open: dict[int, Turn] = {}
        """Attempts under way."""
        self._stage = stage
        self._ledger = ledger
        self._random = random.Random(seed)
        self._violate = violate
        self._stopping = asyncio.Event()
        self._numbers = iter(range(1 << 62))

    def stop(self) -> None:
        """Begin no further turn."""
        self._stopping.set()

    async def run(self, sessions: int) -> None:
        """`sessions` at once; one that ends is followed by another. Returns when all have ended after `stop`."""
        async with asyncio.TaskGroup() as group:
            for _ in range(sessions):
                group.create_task(self._seat(random.Random(self._random.random())))

    async def _seat(self, dice: random.Random) -> None:
        while not await self._think(dice, 3.0):
            await self._session(dice)

    async def _think(self, dice: random.Random, mean_s: float) -> bool:
        try:
            async with asyncio.timeout(min(20.0, dice.expovariate(1 / mean_s))):
                await self._stopping.wait()
        except TimeoutError:
            return False
        return True

    async def _session(self, dice: random.Random) -> None:
        number = next(self._numbers)
        header = None if dice.random() < 0.2 else ("modal-session-id", f"session-{number}")
        system = prose(f"harness {dice.randrange(4)}", dice.randrange(4_000, 40_000))
        dialect = dice.choice(DIALECTS)

        def begin(name: str) -> Conversation:
            size = dice.randrange(500, 6_000)
            return Conversation(name, dialect, system, MODEL, size_bytes=size, header=header)

        talk = begin(f"main {number}")
        for turn in range(dice.randrange(2, 25)):
            await self._turn(talk, dice)
            if self._stopping.is_set():
                return
            if dice.random() < 0.1:
                async with asyncio.TaskGroup() as subagents:
                    for each in range(dice.randrange(2, 6)):
                        child = begin(f"child {number}.{turn}.{each}")
                        subagents.create_task(self._child(child, random.Random(dice.random())))
            talk.grow()
            if await self._think(dice, 1.5):
                return

    async def _child(self, talk: Conversation, dice: random.Random) -> None:
        for _ in range(dice.randrange(1, 4)):
            await self._turn(talk, dice)
            talk.grow()
            if await self._think(dice, 0.3):
                return

    async def _turn(self, talk: Conversation, dice: random.Random) -> None:
        """Until it is answered."""
        asked = json.loads(talk.body())
        limit = dice.randrange(20, 400)
        asked["max_output_tokens" if talk.dialect is Dialect.RESPONSES else "max_tokens"] = limit
        body = json.dumps(asked).encode()
        leave = dice.random() < 0.04
        began_s = time.monotonic()
        why = "never sent"
        while time.monotonic() - began_s < TURN_S:
            try:
                await self._attempt(talk, body, leave=leave, dice=dice, began_s=began_s)
            except Unfinished as unfinished:
                why = unfinished.why
                self.tally.retries[why] += 1
                await asyncio.sleep(unfinished.after_s)
                continue
            self.tally.turns += 1
            return
        self._violate(f"turn lost: {talk.name} was not answered within {TURN_S:g} s; last: {why}")

    def _router(self, dice: random.Random) -> Router:
        """As a balancer chooses: among those that are up."""
        return dice.choice([router for router in self._stage.routers if router.up])

    async def _attempt(
        self, talk: Conversation, body: bytes, *, leave: bool, dice: random.Random, began_s: float
    ) -> None:
        router = self._router(dice)
        turn = Turn(router.program.name, time.monotonic())
        number = next(self._numbers)
        self.open[number] = turn
        url = f"http://{HOST}:{router.port}{PATHS[talk.dialect]}"
        tail = b""
        try:
            async with (
                asyncio.timeout(TURN_S),
                self._stage.http.post(url, data=body, headers=talk.headers) as response,
            ):
                if response.status != 200:
                    raise self._refused(talk, response, await response.read())
                turn.replica = response.headers["x-roost-replica"]
                self._undrained(talk, turn, response.headers)
                async for piece in response.content.iter_any():
                    if not tail:
                        self.tally.waits_s.append(time.monotonic() - began_s)
                    tail = (tail + piece)[-TAIL_BYTES:]
                    if leave and dice.random() < 0.2:
                        self.tally.left += 1
                        return
        except (aiohttp.ClientError, ConnectionError) as error:
            raise self._broken(talk, turn, tail, type(error).__name__) from error
        except TimeoutError:
            self._violate(f"hung: {talk.name} at {turn.router}, {turn.replica} was silent for {TURN_S:g} s")
            raise Unfinished("hung", 0.0) from None
        finally:
            del self.open[number]
        self._ended(talk, turn, tail, response.headers)

    def _refused(self, talk: Conversation, response: aiohttp.ClientResponse, body: bytes) -> Unfinished:
        """An honest error: one of the server's, in JSON, worth another try."""
        if response.status not in (429, 500, 502, 503, 504, 529):
            self._violate(f"{talk.name} got {response.status}: {body[:200]!r}")
        try:
            told: Any = json.loads(body)
        except ValueError:
            told = None
        if not isinstance(told, dict) or "error" not in told:
            self._violate(f"{talk.name} got {response.status} without a JSON error: {body[:200]!r}")
        after_s = float(response.headers.get("retry-after", "1"))
        code = told.get("error", {}) if isinstance(told, dict) else {}
        named = code.get("code") or code.get("type") if isinstance(code, dict) else None
        return Unfinished(f"{response.status} {named}", min(after_s, 5.0))

    def _broken(self, talk: Conversation, turn: Turn, tail: bytes, error: str) -> Unfinished:
        """The connection broke: before a byte it may be the router's death, after one the replica's."""
        now = time.monotonic()
        router_died = self._ledger.explains(turn.router, turn.sent_s, now, 2.0)
        replica_died = turn.replica is not None and self._ledger.explains(turn.replica, turn.sent_s, now, LINGER_S)
        if TERMINAL[talk.dialect].search(tail) and not router_died:
            self._violate(f"{talk.name}: cut after its terminal event ({error})")
        if not (router_died or replica_died):
            when = "after its first byte" if tail else "before its head" if turn.replica is None else "before a byte"
            self._violate(
                f"{talk.name} at {turn.router} and {turn.replica} broke {when} after {now - turn.sent_s:.2f} s "
                f"({error}), and no fault explains it"
            )
        if tail:
            self.tally.broken += 1
        return Unfinished("broken", 0.3)

    def _ended(self, talk: Conversation, turn: Turn, tail: bytes, headers: Any) -> None:
        """The response ended cleanly: then it must be whole."""
        if not TERMINAL[talk.dialect].search(tail):
            self._violate(f"{talk.name} at {turn.replica}: a clean end without its terminal event: {tail[-200:]!r}")
        self._count_usage(talk, tail)

    def _count_usage(self, talk: Conversation, tail: bytes) -> None:
        lines = [line[5:] for line in tail.split(b"\n") if line.startswith(b"data:") and b"usage" in line]
        for line in reversed(lines):
            try:
                told = json.loads(line)
            except ValueError:
                continue
            usage = told.get("usage") or (told.get("response") or {}).get("usage")
            if not isinstance(usage, dict):
                continue
            prompt = usage.get("prompt_tokens") or usage.get("input_tokens")
            details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
            if isinstance(prompt, int) and talk.dialect in (Dialect.CHAT, Dialect.COMPLETIONS, Dialect.RESPONSES):
                self.tally.prompt_tokens += prompt
                self.tally.cached_tokens += int(details.get("cached_tokens") or 0)
                return

    def _undrained(self, talk: Conversation, turn: Turn, headers: Any) -> None:
        """No new turn at a drained replica. The head may be late, so only turns sent after the drain count."""
        reason = headers.get("x-roost-reason", "")
        self.tally.reasons[reason] += 1
        for drained in self._ledger.drains:
            late = drained.since_s + 1.0 < turn.sent_s
            before = drained.until_s is None or turn.sent_s < drained.until_s
            if drained.replica == turn.replica and late and before and self._told(drained.since_s):
                self._violate(f"{talk.name} was sent to {turn.replica}, which is drained ({reason})")

    def _told(self, since_s: float) -> bool:
        """Whether every router could know by now: the store has been well since, and all routers too."""
        quiet_s = self._ledger.quiet_since(("store", "router"))
        return quiet_s <= since_s
