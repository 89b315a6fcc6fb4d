"""Several routers, one truth: what one of them does every other one knows at once, and whoever dies leaves nothing."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import redis.asyncio

from router.domain.turn import Dialect
from router.settings import Auth, Settings
from router.store import codec
from router.store.keys import FleetKeys
from tests.integration.conversations import Conversation, prose
from tests.integration.replicas import DIALECTS, PATHS, PATIENCE_S, Gate, Replica, replicas, speak
from tests.integration.roosts import Roost, running, settings_for, shared_store
from tests.integration.supervised import SERVING, Supervised, command, supervised
from tests.integration.supervised import settings_for as yaml_for
from tests.integration.test_auth import ACME, OTHER, keys_file

LEASE_TTL_S = 1.5
"""Of routers that are killed here. The default is in the bench."""
RENEW_S = 0.4
SLACK_S = 5.0
"""What a busy machine may add to a lease's time."""
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes by /proc and pidfd")


@asynccontextmanager
async def two_routers(
    fleet: Sequence[Replica], url: str, prefix: str, **groups: Any
) -> AsyncIterator[tuple[Roost, Roost]]:
    """Two routers that share a store."""
    settings = sharing(fleet, url, prefix, **groups)
    async with running(settings, fleet) as one, running(settings, fleet) as other:
        yield one, other


def sharing(fleet: Sequence[Replica], url: str, prefix: str, **groups: Any) -> Settings:
    return settings_for(fleet, shared_store(url, prefix), **groups)


def hold(fleet: Sequence[Replica]) -> Gate:
    """All replicas answer nobody before the gate opens."""
    gate = Gate()
    for replica in fleet:
        replica.script = gate
    return gate


async def in_flight(roost: Roost) -> dict[str, int]:
    """Turns under way at each replica, as this router reads them from the store."""
    return {name: each["load"]["in_flight"] for name, each in (await roost.replicas()).items()}


@dataclass(frozen=True)
class Records:
    """What the store holds of one installation."""

    url: str
    prefix: str

    async def count(self, kind: bytes) -> int:
        """Records of a kind: `n` branches, `s` sessions."""
        async with redis.asyncio.Redis.from_url(self.url) as raw:
            pattern = FleetKeys(self.prefix, "default").base.replace(b"{", b"\\{") + kind + b":*"
            return len([name async for name in raw.scan_iter(match=pattern)])

    async def in_flight(self) -> dict[str, int]:
        """Each replica's turns under way, read beside all routers."""
        async with redis.asyncio.Redis.from_url(self.url) as raw:
            told: Any = await raw.hgetall(FleetKeys(self.prefix, "default").load)
        loads = {name.decode(): codec.unpack_load(value) for name, value in told.items()}
        return {name: load[0].in_flight for name, load in loads.items() if load is not None}


# --- affinity --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_twenty_first_turns_of_a_session_at_once_through_two_routers_are_one_binding(
    valkey_url: str, dialect: Dialect
) -> None:
    """One branch and one session in the store, and from then on one replica, whichever router is asked."""
    prefix = f"twenty-{dialect.value}"
    async with replicas(3) as fleet, two_routers(fleet, valkey_url, prefix) as routers:
        gate = hold(fleet)
        asked = Conversation("racing", dialect, header=("x-session-id", "racing"))
        racing = [asyncio.create_task(routers[n % 2].turn(asked)) for n in range(20)]
        await gate.waiting(20)
        gate.open()
        answers = await asyncio.gather(*racing)
        assert len({answer.session for answer in answers}) == 1
        records = Records(valkey_url, prefix)
        assert (await records.count(b"n"), await records.count(b"s")) == (1, 1)
        homes = set()
        for number in range(4):
            asked.grow()
            answer = await routers[number % 2].turn(asked)
            homes.add(answer.replica)
            assert answer.reason == "home"
        assert len(homes) == 1
        assert await records.count(b"n") == 1


async def test_the_turns_of_twenty_sessions_alternate_between_routers_and_never_move(valkey_url: str) -> None:
    """All sessions speak at once, each through the other router every turn; their first turns race through both."""
    async with replicas(4) as fleet, two_routers(fleet, valkey_url, "twenty-sessions") as routers:
        sessions = [
            Conversation(f"s{n}", DIALECTS[n % 5], header=("x-session-id", f"s{n}") if n % 3 else None)
            for n in range(20)
        ]
        homes: dict[str, set[str]] = {each.name: set() for each in sessions}

        async def talk(number: int, each: Conversation) -> None:
            for answer in await asyncio.gather(*(router.turn(each) for router in routers)):
                homes[each.name].add(answer.replica)
            for turn in range(6):
                each.grow()
                homes[each.name].add((await routers[(number + turn) % 2].turn(each)).replica)

        await asyncio.gather(*(talk(number, each) for number, each in enumerate(sessions)))
        assert {len(home) for home in homes.values()} == {1}
        assert len(set.union(*homes.values())) == 4


async def test_a_load_that_one_router_adds_the_other_counts_at_once(valkey_url: str) -> None:
    """Six sessions of one replica speak through one router. Before any answer has come the other router shows them,
    and sends its next sessions elsewhere.
    """
    async with replicas(2) as fleet, two_routers(fleet, valkey_url, "at-once") as (one, other):
        sessions = [Conversation(f"here {n}", header=("x-session-id", str(n)), size_bytes=9000) for n in range(12)]
        homes = [(await one.turn(each)).replica for each in sessions]
        busy, free = fleet[0].id, fleet[1].id
        here = [each for each, home in zip(sessions, homes, strict=True) if home == busy]
        assert len(here) == 6
        gate = hold(fleet[:1])
        for each in here:
            each.grow()
        turns = [asyncio.create_task(one.turn(each)) for each in here]
        await gate.waiting(6)
        assert await in_flight(other) == {busy: 6, free: 0}
        new = [await other.turn(Conversation(f"new {n}")) for n in range(4)]
        assert {answer.replica for answer in new} == {free}
        gate.open()
        assert {answer.replica for answer in await asyncio.gather(*turns)} == {busy}
        await one.idle()
        assert await in_flight(other) == {busy: 0, free: 0}


# --- spreading -------------------------------------------------------------------------------------------------------


def subagents(seed: int) -> list[Conversation]:
    """32 first turns with one session's id, one system prompt and each a task of its own."""
    system = prose(f"subagent {seed}", 12_000)
    header = ("x-session-id", f"parent {seed}")
    return [Conversation(f"task {seed}.{n}", system=system, header=header) for n in range(32)]


def forks(seed: int) -> list[Conversation]:
    """32 turns that continue one context, each in its own way. It is short: a long one costs more to prefill anew than
    a crowd costs, so its forks rightly stay where it is.
    """
    said = [prose(f"context {seed}.{n}", 800) for n in range(6)]
    header = ("x-session-id", f"forked {seed}")
    return [Conversation("", said=[*said, prose(f"way {seed}.{n}", 800)], header=header) for n in range(32)]


@pytest.mark.parametrize("routers", [1, 2])
@pytest.mark.parametrize("kind", [subagents, forks], ids=lambda kind: kind.__name__)
async def test_32_turns_at_once_over_equal_replicas_differ_by_two(
    valkey_url: str, kind: Callable[[int], list[Conversation]], routers: int
) -> None:
    """Subagents of one session, and forks of its context, which one of the replicas holds. The load reports are frozen
    and wrong: one replica is idle and the others run a turn, for ever. Four bursts, each in an order of its own and
    before routers that have learned nothing: what a burst whose answers are held back teaches them is no rule of this.
    """
    async with replicas(4) as fleet:
        for number, replica in enumerate(fleet):
            replica.loads = {"num_running_reqs": min(number, 1), "num_waiting_reqs": 0}
        for seed in range(4):
            async with two_routers(fleet, valkey_url, f"burst-{kind.__name__}-{routers}-{seed}") as both:
                asked = kind(seed)
                if kind is forks:
                    await both[0].turn(Conversation("", said=asked[0].said[:5], header=asked[0].header))
                random.Random(seed).shuffle(asked)
                gate = hold(fleet)
                turns = [asyncio.create_task(both[n % routers].turn(each)) for n, each in enumerate(asked)]
                await gate.waiting(32)
                gate.open()
                counts = Counter(answer.replica for answer in await asyncio.gather(*turns))
                assert sum(counts.values()) == 32
                assert max(counts.values()) - min(counts[each.id] for each in fleet) <= 2, (seed, counts)
                for replica in fleet:
                    replica.script = speak


# --- deaths ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Short paths: Unix sockets lie in them."""
    return (tmp_path_factory.mktemp("p") for _ in range(9))


@asynccontextmanager
async def process(
    folder: Path, fleet: Sequence[Replica], url: str, prefix: str, **groups: Any
) -> AsyncIterator[tuple[Roost, Supervised]]:
    """A router in a process of its own, once it is ready, and a client of it."""
    store = {"url": url, "prefix": prefix, "timeout_s": 10.0, "lease_ttl_s": LEASE_TTL_S, "lease_renew_s": RENEW_S}
    given = yaml_for(fleet, workers=1, listen={"port": 0}, store=store, **groups)
    async with AsyncExitStack() as stack:
        run = await stack.enter_async_context(command(folder, given))
        serving_on = await run.log.line(SERVING)
        await run.log.line("is ready")
        connector = aiohttp.TCPConnector(limit=0)
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=connector, auto_decompress=False))
        roost = Roost(int(serving_on[1]), int(serving_on[2]), http)
        await roost.knows(fleet)
        yield roost, run


async def killed(run: Supervised) -> None:
    run.process.kill()
    await run.process.wait()


async def none_left(roost: Roost, records: Records) -> None:
    """Until nothing is in flight, for routers and in the store; no count is below zero meanwhile."""

    async def nothing() -> bool:
        told = [*(await in_flight(roost)).values(), *(await records.in_flight()).values()]
        assert min(told) >= 0, told
        return not any(told)

    await roost.until(nothing)


@linux_only
async def test_turns_of_a_killed_router_are_forgotten_within_its_leases_time(
    valkey_url: str, folders: Iterator[Path]
) -> None:
    """kill -9 with thirty turns in flight, twice: the other router counts them, then none, and never less. Those that
    it has itself under way stay counted all the while, for it renews them.
    """
    prefix = "killed"
    records = Records(valkey_url, prefix)
    async with replicas(3) as fleet, process(next(folders), fleet, valkey_url, prefix) as (other, _):
        mine = hold(fleet)
        own = [asyncio.create_task(other.turn(Conversation(f"own {n}"))) for n in range(3)]
        await mine.waiting(3)
        for life in range(2):
            async with process(next(folders), fleet, valkey_url, prefix) as (doomed, run):
                gate = hold(fleet)
                lost = [asyncio.create_task(doomed.turn(Conversation(f"lost {life} {n}"))) for n in range(30)]
                await gate.waiting(30)
                assert sum((await in_flight(other)).values()) == 33
                await killed(run)
                ended = await asyncio.gather(*lost, return_exceptions=True)
                assert all(isinstance(each, aiohttp.ClientError) for each in ended)
                began_s = time.monotonic()

                async def only_mine() -> bool:
                    told = [*(await in_flight(other)).values(), *(await records.in_flight()).values()]
                    assert min(told) >= 0, told
                    return sum(told) == 2 * 3

                await other.until(only_mine)
                assert time.monotonic() - began_s < LEASE_TTL_S + SLACK_S
                gate.open()
        mine.open()
        await asyncio.gather(*own)
        await none_left(other, records)
        for replica in fleet:
            replica.script = speak
        async with process(next(folders), fleet, valkey_url, prefix) as (again, _):
            await again.turn(Conversation("after"))
            await none_left(again, records)


@linux_only
async def test_turns_of_a_killed_worker_are_forgotten_within_their_leases_time(folders: Iterator[Path]) -> None:
    """kill -9 of one of two workers with turns in flight at both: the store's count becomes the living one's."""
    store = {"timeout_s": 10.0, "lease_ttl_s": LEASE_TTL_S, "lease_renew_s": RENEW_S}
    async with (
        replicas(2) as fleet,
        supervised(next(folders), fleet, store=store) as roost,
        roost.connection(only=1) as living,
        AsyncExitStack() as stack,
    ):
        doomed = [await stack.enter_async_context(roost.connection(only=0)) for _ in range(5)]
        gate = hold(fleet)
        lost = [asyncio.create_task(each.turn(Conversation(f"lost {n}"))) for n, each in enumerate(doomed)]
        own = asyncio.create_task(living.turn(Conversation("own")))
        await gate.waiting(6)

        async def counted() -> int:
            _, told = await roost.admin("GET", "/admin/replicas")
            loads = [int(each["load"]["in_flight"]) for each in told["replicas"]]
            assert min(loads) >= 0
            return sum(loads)

        assert await counted() == 6
        os.kill(roost.workers()[0], signal.SIGKILL)
        began_s = time.monotonic()
        await asyncio.gather(*lost, return_exceptions=True)
        async with asyncio.timeout(PATIENCE_S):
            while await counted() != 1:  # noqa: ASYNC110 (no event tells it)
                await asyncio.sleep(0.02)
        assert time.monotonic() - began_s < LEASE_TTL_S + SLACK_S
        gate.open()
        await own
        async with asyncio.timeout(PATIENCE_S):
            while await counted():  # noqa: ASYNC110
                await asyncio.sleep(0.02)


@linux_only
async def test_a_router_that_was_killed_and_started_again_moves_nobody_nor_does_a_newcomer(
    valkey_url: str, folders: Iterator[Path]
) -> None:
    """200 live sessions on three replicas: after the router's death each is at home, and when a fourth replica joins
    too. Of a burst of new ones the newcomer gets its slow start's share, and then most of what comes one by one.
    """
    prefix = "restarted"
    slow = {"ramp_s": 1e6}  # as it is in a newcomer's first moments, however long they take here
    async with replicas(4) as fleet:
        old, newcomer = fleet[:3], fleet[3]
        sessions = [
            Conversation(f"live {n}", DIALECTS[n % 5], header=("x-session-id", f"live {n}") if n % 3 else None)
            for n in range(200)
        ]
        homes: dict[str, str] = {}

        async def all_at_home(roost: Roost) -> None:
            for start in range(0, len(sessions), 8):
                batch = sessions[start : start + 8]
                for each in batch:
                    each.grow()
                for each, answer in zip(batch, await asyncio.gather(*map(roost.turn, batch)), strict=True):
                    assert (answer.replica, answer.reason) == (homes[each.name], "home")

        async with process(next(folders), old, valkey_url, prefix, placement=slow) as (first, run):
            for each in sessions:
                homes[each.name] = (await first.turn(each)).replica
            assert max(Counter(homes.values()).values()) <= 68
            await killed(run)
        async with process(next(folders), old, valkey_url, prefix, placement=slow) as (again, _):
            await all_at_home(again)
            assert (await again.admin("POST", "/admin/replicas", {"url": newcomer.url}))[0] == 201
            await again.knows(fleet)
            await all_at_home(again)
            gate = hold(fleet)
            burst = [asyncio.create_task(again.turn(Conversation(f"burst {n}"))) for n in range(24)]
            await gate.waiting(24)
            gate.open()
            counts = Counter(answer.replica for answer in await asyncio.gather(*burst))
            assert 2 <= counts[newcomer.id] <= 12  # without a slow start: 21
            fresh = [(await again.turn(Conversation(f"new {n}"))).replica for n in range(20)]
            assert fresh.count(newcomer.id) >= 18


# --- lives of replicas -----------------------------------------------------------------------------------------------


async def test_a_binding_holds_to_its_replicas_life_whichever_router_sees_the_new_one(valkey_url: str) -> None:
    """A replica dies with turns in flight and comes back at its address: for both routers it starts from nothing, its
    sessions are placed anew by load, and nobody else moves.
    """
    async with replicas(2) as fleet, two_routers(fleet, valkey_url, "lives") as (one, other):
        sessions = [Conversation(f"life {n}", header=("x-session-id", str(n))) for n in range(16)]
        homes = {each.name: (await one.turn(each)).replica for each in sessions}
        reborn = fleet[0]
        was = (await other.replicas())[reborn.id]
        assert was["load"]["admitted_tokens"] > 0
        gate = hold([reborn])
        there = [each for each in sessions if homes[each.name] == reborn.id]
        lost = [asyncio.create_task(one.watch(each)) for each in there[:4]]
        await gate.waiting(4)
        reborn.script = speak
        await reborn.restart()
        homes |= {each.name: answer.replica for each, answer in zip(there, await asyncio.gather(*lost), strict=False)}

        async def another_life() -> bool:
            told = [(await roost.replicas())[reborn.id] for roost in (one, other)]
            return all(each["healthy"] and each["incarnation"] != was["incarnation"] for each in told)

        await one.until(another_life)
        for roost in (one, other):
            now = (await roost.replicas())[reborn.id]
            assert now["joined_at_s"] > was["joined_at_s"]
            empty = ("in_flight", "prefill_tokens", "locked_tokens", "admitted_tokens", "crowd")
            assert [now["load"][name] for name in empty] == [0] * 5
        for number, each in enumerate(sessions):
            each.grow()
            answer = await (one, other)[number % 2].turn(each)
            if each in there[4:]:
                assert answer.reason == "home_gone"
                homes[each.name] = answer.replica
            assert answer.replica == homes[each.name]
        assert reborn.id in {homes[each.name] for each in there[4:]}  # it has room again


# --- tenants ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_two_tenants_with_one_id_and_one_prompt_share_nothing_over_two_routers(
    valkey_url: str, dialect: Dialect
) -> None:
    """Each goes on at home through either router; neither's turns are known under the other's key."""
    prefix = f"tenants-{dialect.value}"
    async with replicas(3) as fleet, two_routers(fleet, valkey_url, prefix) as routers:
        tenants = [Conversation("same", dialect, header=("x-session-id", "same"), key=key) for key in ("k1", "k2")]
        first = [await routers[n].turn(each) for n, each in enumerate(tenants)]
        records = Records(valkey_url, prefix)
        assert (await records.count(b"n"), await records.count(b"s")) == (2, 2)
        for turn in range(1, 4):
            for number, each in enumerate(tenants):
                each.grow()
                answer = await routers[(number + turn) % 2].turn(each)
                assert (answer.replica, answer.session) == (first[number].replica, first[number].session)
        assert first[0].session != first[1].session
        decided = [each for roost in routers for each in await roost.decisions()]
        assert len({each["branch"] for each in decided}) == 2
        assert [each["reason"] for each in decided].count("new") == 2
        assert {each["shared_tokens"] for each in decided if each["reason"] == "new"} == {0}


async def test_a_stored_response_is_its_tenants_through_any_router(valkey_url: str, tmp_path: Path) -> None:
    """Made through one router, continued through the other at its holder; for another tenant neither knows it, and no
    replica is asked.
    """
    auth = Auth(keys_file=str(keys_file(tmp_path)))
    async with replicas(3) as fleet, two_routers(fleet, valkey_url, "stored", auth=auth) as (one, other):

        def asked(key: str, **given: Any) -> Conversation:
            said = "goes on" if given else "begins"
            return Conversation(said, Dialect.RESPONSES, stream=False, key=key, **given)

        made = await one.turn(asked(ACME))
        goes_on = {"field_given": ("previous_response_id", json.loads(made.body)["id"])}
        await one.idle()
        before = sum(len(each.seen) for each in fleet)
        for roost in (one, other):
            stolen = asked(OTHER, **goes_on)
            refused = await roost.request("POST", PATHS[stolen.dialect], stolen.body(), stolen.headers)
            assert (refused.status, refused.headers["x-roost-error"]) == (404, "response_not_found")
        assert sum(len(each.seen) for each in fleet) == before
        for roost in (other, one):
            mine = await roost.turn(asked(ACME, **goes_on))
            assert mine.replica == made.replica
            assert mine.reason == ("stored" if roost is other else "home")
