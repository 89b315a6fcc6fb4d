"""The store before a real server: what others wrote, what fails, and what a hang or a restart does."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio

from router.domain.errors import StoreForeign, StoreUnavailable
from router.domain.replica import Beliefs
from router.domain.session import Binding
from router.ports import Acquired, Ask, Member, View
from router.store.keys import FleetKeys
from router.store.redis import RedisStore
from tests.contracts.groups import free_port, make_certificate
from tests.contracts.servers import KINDS, serving, serving_at, serving_with
from tests.contracts.worlds import FLEET, FakeClock, Fleet, World, boundary, claim, lease, settlement

KEYS = FleetKeys("roost", FLEET)
B1, B2, B3 = boundary(1), boundary(2), boundary(3)
PATIENT_S = 30.0


@pytest.fixture(scope="module", params=KINDS)
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    with serving(request.param) as server:
        yield server.url


@asynccontextmanager
async def opened(url: str, **options: object) -> AsyncIterator[RedisStore]:
    store = RedisStore(url, **{"timeout_s": PATIENT_S, **options})  # type: ignore[arg-type]
    try:
        await store.open()
        yield store
    finally:
        await store.close()


@pytest.fixture
async def raw(url: str) -> AsyncIterator[redis.asyncio.Redis]:
    async with redis.asyncio.Redis.from_url(url) as client:
        await client.flushall()
        yield client


@pytest.fixture
async def store(url: str, raw: redis.asyncio.Redis) -> AsyncIterator[RedisStore]:
    async with opened(url) as made:
        yield made


@pytest.fixture
def fleet(store: RedisStore, raw: redis.asyncio.Redis) -> Fleet:
    return Fleet(World(store, FakeClock(), raw))


# --- what others wrote -----------------------------------------------------------------------------------------------


async def test_the_schema_is_claimed_once_and_found_again(url: str, raw: redis.asyncio.Redis) -> None:
    for _ in range(2):
        async with opened(url):
            assert await raw.get("roost:schema") == b"2"


@pytest.mark.parametrize("version", ["1", "3"])
async def test_keys_of_another_version_are_refused_with_what_to_do(
    url: str, raw: redis.asyncio.Redis, version: str
) -> None:
    """An older one's (1 had no live tokens) as well as a newer one's."""
    await raw.set("roost:schema", version)
    with pytest.raises(StoreForeign, match=rf"roost:schema says schema b'{version}', .* '2'.*key prefix, or delete"):
        async with opened(url):
            pass
    assert await raw.get("roost:schema") == version.encode()
    async with opened(url, prefix="other"):
        assert await raw.get("other:schema") == b"2"


async def test_a_schema_key_of_another_type_is_foreign(url: str, raw: redis.asyncio.Redis) -> None:
    await raw.lpush("roost:schema", "x")
    with pytest.raises(StoreForeign, match="roost:schema holds a list where Roost keeps a string"):
        async with opened(url):
            pass


@pytest.mark.parametrize("name", ["load", "leases", "held"])
async def test_a_key_of_the_wrong_type_is_named_and_nothing_is_written(
    fleet: Fleet, raw: redis.asyncio.Redis, name: str
) -> None:
    key = getattr(KEYS, name)
    await raw.set(key, "someone else's")
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: fleet.acquire(claim("l1", "b1", B1)),
        lambda: fleet.settle(settlement("l1", "b1", beliefs=Beliefs())),
        fleet.look,
    ]
    for call in (
        calls[:2] if name == "held" else calls
    ):  # without a lease that is due, a fetch does not read what they hold
        with pytest.raises(
            StoreForeign, match=rf"roost:{{m}}:v2:{name} holds a string where Roost keeps a (hash|zset)"
        ):
            await call()
    assert set(await raw.keys("roost:{m}:*")) == {key}


@pytest.mark.parametrize("name", ["members", "reports", "beliefs"])
async def test_a_wrong_type_among_the_membership_is_named(fleet: Fleet, raw: redis.asyncio.Redis, name: str) -> None:
    await raw.set(getattr(KEYS, name), "someone else's")
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "members": lambda: fleet.world.store.put_member(FLEET, Member("r1", "http://r1", "admin")),
        "reports": lambda: fleet.world.store.put_report(FLEET, "r1", b"", 1.0),
        "beliefs": lambda: fleet.world.store.remove_member(FLEET, "r1"),
    }
    with pytest.raises(StoreForeign, match=f"v2:{name} holds a string"):
        await calls[name]()


def spoilt(good: bytes) -> list[bytes]:
    """Values a hand or another version may leave in place of `good`."""
    dice = random.Random(1)
    cut = [good[:size] for size in range(0, len(good), 5)]
    flipped = [bytes((255,)) + good[1:], good + b"\0", good[:1] + b"\xff" * (len(good) - 1)]
    return [b"garbage", b"{}", *cut, *flipped, *[dice.randbytes(dice.randint(1, 90)) for _ in range(12)]]


async def everything(fleet: Fleet) -> None:
    """One call of each kind; that they return is the point."""
    await fleet.look(B2, B1, session="s1", head=B3.hash, response_id="resp_1")
    await fleet.look(session="s1", head=B3.hash)
    for asked in (claim("l8", "b1", B2, B1, version=1, head=B3.hash), claim("l9", "b1", B1, head=B3.hash)):
        await fleet.acquire(asked)
    await fleet.world.store.progress(FLEET, "l1")
    await fleet.renew(lease("l1", "b1"), lease("l7", "b1"))
    await fleet.settle(settlement("l1", "b1", tokens=5, response_id="resp_1"))
    await fleet.world.store.members(FLEET)
    await fleet.world.store.put_member(FLEET, Member("r1", "http://r1", "admin"), only_if_absent=True)


async def test_spoilt_records_count_as_absent_and_fail_no_call(fleet: Fleet, raw: redis.asyncio.Redis) -> None:
    """Every record, every cut, many bytes: whatever it says is not there, and every call returns."""

    async def begin() -> None:
        await raw.flushall()
        await fleet.win(claim("l1", "b1", B1, head=B3.hash, session_home=Binding("r1", "i1")))
        await fleet.win(claim("l2", "b1", B1, version=1))
        await fleet.settle(settlement("l2", "b1", tokens=9, beliefs=Beliefs(), response_id="resp_1"))
        await fleet.world.store.put_member(FLEET, Member("r1", "http://r1", "admin"))
        await fleet.world.store.put_report(FLEET, "r1", b"report", PATIENT_S)

    records = [KEYS.branch("b1"), KEYS.session("s1"), KEYS.response("resp_1"), KEYS.boundary(B1.hash)]
    for key in (*records, KEYS.version, KEYS.lives):
        await begin()
        good: Any = await raw.get(key)
        for bad in spoilt(good):
            await begin()
            await raw.set(key, bad)
            await everything(fleet)
    fields = [(KEYS.load, "r1"), (KEYS.beliefs, "r1"), (KEYS.held, "l1"), (KEYS.members, "r1")]
    for key, field in fields:
        await begin()
        good = await raw.hget(key, field)
        for bad in spoilt(good):
            await begin()
            await raw.hset(key, field, bad)
            await everything(fleet)


async def test_a_spoilt_branch_load_and_member_are_absent_and_made_anew(fleet: Fleet, raw: redis.asyncio.Redis) -> None:
    await fleet.win(claim("l1", "b1", B1))
    await raw.set(KEYS.branch("b1"), "garbage")
    await raw.hset(KEYS.load, "r1", "garbage")
    await raw.hset(KEYS.members, "r1", "garbage")
    await raw.hset(KEYS.reports, "r1", "garbage")
    await raw.hset(KEYS.load, b"\xff\xfe", "garbage")
    view = await fleet.look(B1)
    assert view.branch is None
    assert not view.loads
    membership = await fleet.world.store.members(FLEET)
    assert membership.members == ()
    assert membership.reports == {}
    assert await fleet.world.store.put_member(FLEET, Member("r1", "http://r1", "admin"), only_if_absent=True)
    assert await fleet.win(claim("l2", "b1", B1)) == Acquired(1, 0)
    assert (await fleet.look(B1)).loads["r1"].in_flight == 1


async def test_a_record_of_another_type_counts_as_absent(fleet: Fleet, raw: redis.asyncio.Redis) -> None:
    keys = [KEYS.branch("b1"), KEYS.session("s1"), KEYS.response("resp_1"), KEYS.boundary(B1.hash), KEYS.version]
    for key in keys:
        await raw.lpush(key, "x")
    view = await fleet.look(B1, session="s1", head=B3.hash, response_id="resp_1")
    assert (view.branch, view.session, view.response_replica, view.membership_version) == (None, None, None, 0)
    await fleet.win(claim("l1", "b1", B1, head=B3.hash))
    await fleet.settle(settlement("l1", "b1", response_id="resp_1"))
    view = await fleet.look(B1, session="s1", head=B3.hash, response_id="resp_1")
    assert None not in (view.branch, view.session, view.response_replica)


async def test_a_spoilt_lease_is_swept_and_counts_nothing(fleet: Fleet, raw: redis.asyncio.Redis) -> None:
    await fleet.win(claim("l1", "b1", B1))
    await raw.hset(KEYS.held, "l1", "garbage")
    await raw.zadd(KEYS.leases, {"l1": 1, "only here": 1})
    assert (await fleet.look()).loads["r1"].in_flight == 1
    assert not await raw.exists(KEYS.held, KEYS.leases)


# --- the server's own time -------------------------------------------------------------------------------------------


async def test_leases_and_branches_expire_by_the_servers_clock(fleet: Fleet, raw: redis.asyncio.Redis) -> None:
    await fleet.win(claim("l1", "b1", B1, lease_ttl_s=0.001, branch_ttl_s=PATIENT_S))
    while (view := await fleet.look(B1)).loads["r1"].in_flight:
        pass
    assert view.branch is not None
    assert abs(view.now_s - float(".".join(map(str, await raw.time())))) < PATIENT_S
    await fleet.settle(settlement("l1", "b1", branch_ttl_s=0.001))
    while (await fleet.look(B1)).branch is not None:
        pass


async def test_every_key_is_in_the_fleets_slot_and_only_the_fleet_itself_stays_for_good(
    fleet: Fleet, raw: redis.asyncio.Redis
) -> None:
    await everything(fleet)
    await fleet.win(claim("l1", "b7", B2, B1, head=B3.hash))
    await fleet.world.store.put_report(FLEET, "r1", b"", PATIENT_S)
    lasting = {KEYS.load, KEYS.beliefs, KEYS.lives, KEYS.leases, KEYS.held, KEYS.members, KEYS.version}
    key: Any
    for key in await raw.keys():
        if key != b"roost:schema":
            assert key.startswith(KEYS.base)
            assert (await raw.ttl(key) == -1) == (key in lasting), key


# --- what fails ------------------------------------------------------------------------------------------------------


async def test_scripts_the_server_has_forgotten_are_loaded_again(fleet: Fleet, raw: redis.asyncio.Redis) -> None:
    await fleet.win(claim("l1", "b1", B1))
    await raw.script_flush()
    assert (await fleet.look(B1)).branch is not None


async def test_many_calls_share_one_connection(fleet: Fleet, raw: redis.asyncio.Redis) -> None:
    """And each gets its own answer, also when some of the others are cancelled."""
    for number in range(50):
        await fleet.win(claim(f"l{number}", f"b{number}", boundary(number)))
    others = len(await raw.client_list())
    looks = [asyncio.create_task(fleet.look(boundary(number % 50))) for number in range(400)]
    await asyncio.sleep(0)
    for look in looks[::7]:
        look.cancel()
    views = await asyncio.gather(*looks, return_exceptions=True)
    for number, view in enumerate(views):
        if number % 7 == 0:
            assert isinstance(view, asyncio.CancelledError)
        else:
            assert not isinstance(view, BaseException)
            assert view.branch is not None
            assert view.branch.id == f"b{number % 50}"
    assert len(await raw.client_list()) == others


async def test_a_refusing_server_is_unavailable_and_says_why(fleet: Fleet, raw: redis.asyncio.Redis) -> None:
    await raw.config_set("min-replicas-to-write", 1)
    try:
        with pytest.raises(StoreUnavailable, match="NOREPLICAS"):
            await fleet.acquire(claim("l1", "b1", B1))
    finally:
        await raw.config_set("min-replicas-to-write", 0)


async def test_nothing_listening_is_unavailable(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        for url in (f"unix://{tmp_path}/none", f"redis://127.0.0.1:{closed.getsockname()[1]}"):
            with pytest.raises(StoreUnavailable, match="cannot connect"):
                async with opened(url):
                    pass


async def test_a_server_that_speaks_something_else_is_unavailable() -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(StoreUnavailable, match="protocol of Redis"):
            async with opened(f"redis://127.0.0.1:{port}"):
                pass


@pytest.mark.parametrize("url", ["http://127.0.0.1", "127.0.0.1:6379", "redis://h:1/0?nonsense=1", "redis://h:1?db=x"])
def test_a_url_of_another_kind_is_refused_at_once(url: str) -> None:
    with pytest.raises(ValueError, match=r"URL|url"):
        RedisStore(url)


async def answered(store: RedisStore) -> View:
    """The first answer, however many calls fail before it."""
    while True:
        try:
            return await store.fetch(FLEET, Ask(None, (B1.hash,)))
        except StoreUnavailable:
            await asyncio.sleep(0)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_hanging_server_costs_a_timeout_and_no_connections(kind: str) -> None:
    """While it hangs every call is unavailable; when it goes on, so does the store, by the same connection."""
    with serving(kind) as server:
        async with redis.asyncio.Redis.from_url(server.url) as raw, opened(server.url) as patient:
            assert isinstance(await patient.acquire(FLEET, claim("l1", "b1", B1)), Acquired)
            store = RedisStore(server.url, timeout_s=0.02)
            connected = len(await raw.client_list())
            try:
                await answered(store)
                os.kill(server.pid, signal.SIGSTOP)
                try:
                    for _ in range(10):
                        calls = [store.fetch(FLEET, Ask(None)) for _ in range(50)]
                        got = await asyncio.gather(*calls, return_exceptions=True)
                        assert all(isinstance(each, StoreUnavailable) for each in got)
                finally:
                    os.kill(server.pid, signal.SIGCONT)
                view = await answered(store)
                assert view.branch is not None
                assert len(await raw.client_list()) == connected + 1
            finally:
                await store.close()


async def test_after_a_restart_the_store_goes_on() -> None:
    """One call may fail; the next ones connect again, and load the scripts that the new server does not know."""
    with serving_with("valkey", "--port", "0") as (first, path):
        async with opened(f"unix://{path}") as store:
            await store.acquire(FLEET, claim("l1", "b1", B1))
            first.kill()
            first.wait()
            with pytest.raises(StoreUnavailable):
                await store.fetch(FLEET, Ask(None))
            with serving_at("valkey", path, "--port", "0"):
                view = await answered(store)
            assert view.branch is None


# --- addresses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
async def test_passwords_users_and_databases_of_the_url_are_used(kind: str) -> None:
    """And no credential is ever in a message."""
    options = ["--port", "0", "--requirepass", "hunter2", "--user", "router", "on", ">s3cret", "~*", "&*", "+@all"]
    with serving_with(kind, *options) as (_, path):
        logins = [(":hunter2@", "", False), ("router:s3cret@", "?db=3", False), (":hunter2@", "?db=3", True)]
        for login, database, written_before in logins:
            async with opened(f"unix://{login}{path}{database}") as store:
                view = await store.fetch(FLEET, Ask(None, (B1.hash,)))
                assert (view.branch is not None) == written_before
                await store.acquire(FLEET, claim("l1", "b1", B1))
        for login in ("", ":wr0ng@", "nobody:wr0ng@"):
            with pytest.raises(StoreUnavailable, match=r"WRONGPASS|NOAUTH") as caught:
                async with opened(f"unix://{login}{path}"):
                    pass
            assert "wr0ng" not in str(caught.value)


async def test_tcp_and_tls_work_too(tmp_path: Path) -> None:
    """TLS with the certificate checked by default; an unknown one is refused."""
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    make_certificate(key, certificate)
    plain, secure = free_port(), free_port()
    options = ["--bind", "127.0.0.1", "--port", str(plain), "--tls-port", str(secure), "--tls-auth-clients", "no"]
    options += ["--tls-cert-file", str(certificate), "--tls-key-file", str(key), "--tls-ca-cert-file", str(certificate)]
    with serving_with("redis", *options):
        for url in (
            f"redis://127.0.0.1:{plain}/2",
            f"rediss://127.0.0.1:{secure}/2?ssl_ca_certs={certificate}",
            f"rediss://127.0.0.1:{secure}/2?ssl_cert_reqs=none&ssl_check_hostname=false",
        ):
            async with opened(url) as store:
                await store.put_member(FLEET, Member("r1", "http://r1", "admin"))
                assert (await store.members(FLEET)).version == 1
        with pytest.raises(StoreUnavailable, match="certificate"):
            async with opened(f"rediss://127.0.0.1:{secure}"):
                pass
