"""Where the store's servers are: what Sentinels say, how a cluster's slots move, and logins that do not fit."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import hiredis
import pytest
from redis.crc import key_slot

from router.domain.errors import StoreUnavailable
from router.ports import Acquired, Ask, Member
from router.store.keys import FleetKeys, schema_key
from router.store.redis import RedisStore, load_scripts
from tests.contracts.groups import (
    GROUP,
    ClusterGroup,
    Group,
    Node,
    SentinelGroup,
    cluster,
    free_port,
    group,
    make_certificate,
    until,
)
from tests.contracts.rights import CLUSTER_RIGHTS, ON_SENTINELS_RIGHTS, RIGHTS, SENTINEL_RIGHTS
from tests.contracts.worlds import FLEET, boundary, claim

KEYS = FleetKeys("roost", FLEET)
SLOT = key_slot(KEYS.load)
PATIENT_S = 30.0


@asynccontextmanager
async def opened(
    url: str, timeout_s: float = PATIENT_S, password_file: Path | None = None
) -> AsyncIterator[RedisStore]:
    store = RedisStore(url, timeout_s=timeout_s, password_file=password_file)
    try:
        await store.open()
        yield store
    finally:
        await store.close()


async def refusal(url: str, password_file: Path | None = None) -> str:
    """What a store that cannot be opened says."""
    with pytest.raises(StoreUnavailable) as caught:
        async with opened(url, password_file=password_file):
            pass
    return str(caught.value)


# --- what Sentinels say ----------------------------------------------------------------------------------------------


@dataclass
class Scripted:
    """A Sentinel that says what a test wants."""

    port: int = 0
    master: tuple[int, int] | None = None
    """Configuration epoch and port."""
    asked: int = 0
    _writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        commands = hiredis.Reader()
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                commands.feed(data)
                while (command := commands.gets()) is not False:
                    writer.write(self.answer(command[1]))
        writer.close()

    def answer(self, about: bytes) -> bytes:
        if self.master is None:
            return b"-ERR No such master with that name\r\n" if about == b"MASTER" else b"*-1\r\n"
        epoch, port = self.master
        words = ["config-epoch", str(epoch)] if about == b"MASTER" else ["127.0.0.1", str(port)]
        self.asked += about == b"MASTER"
        return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word.encode()) for word in words)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


@asynccontextmanager
async def scripted(*masters: tuple[int, Node] | None) -> AsyncIterator[list[Scripted]]:
    """As many Sentinels, each of its own opinion."""
    made = []
    async with contextlib.AsyncExitStack() as stack:
        for each in masters:
            sentinel = Scripted(master=None if each is None else (each[0], each[1].port))
            server = await stack.enter_async_context(await asyncio.start_server(sentinel.serve, "127.0.0.1", 0))
            stack.callback(sentinel.close)
            sentinel.port = server.sockets[0].getsockname()[1]
            made.append(sentinel)
        yield made


def url_of(*sentinels: Scripted) -> str:
    return f"redis+sentinel://{','.join(f'127.0.0.1:{each.port}' for each in sentinels)}/main"


@pytest.fixture(scope="module")
def servers() -> Iterator[Group]:
    with group("valkey") as made:
        made.start()
        made.start()
        yield made


@pytest.fixture
def pair(servers: Group) -> tuple[Node, Node]:
    one, other, *_ = servers.nodes
    for node in (one, other):
        node.client.flushall()
    return one, other


async def put(store: RedisStore, name: str) -> None:
    await store.put_member(FLEET, Member(name, f"http://{name}", "admin"))


def put_at(node: Node) -> set[str]:
    return {name.decode() for name in node.say("HKEYS", KEYS.members)}


async def test_of_several_opinions_the_newest_counts(pair: tuple[Node, Node]) -> None:
    """A Sentinel that was cut off still names the old master, and so does the old master."""
    old, new = pair
    async with scripted((1, old), (2, new), (1, old), None) as opinions, opened(url_of(*opinions)) as store:
        await put(store, "a")
    assert (put_at(old), put_at(new)) == (set(), {"a"})


async def test_the_master_is_left_when_another_is_elected_though_it_still_answers(pair: tuple[Node, Node]) -> None:
    old, new = pair
    async with scripted((1, old), (1, old)) as opinions, opened(url_of(*opinions)) as store:
        await put(store, "a")
        opinions[0].master = (2, new.port)  # one is enough: it knows of a later election
        number = 0
        while not put_at(new):
            number += 1
            with contextlib.suppress(StoreUnavailable):  # those under way when the connection is given up
                await put(store, f"b{number}")
            await asyncio.sleep(0.01)
        before = put_at(old)
        for number in range(20):
            await put(store, f"c{number}")
        assert put_at(old) == before


async def test_an_older_opinion_moves_nobody(pair: tuple[Node, Node]) -> None:
    old, new = pair
    async with scripted((2, new), (1, old)) as (right, wrong), opened(url_of(right, wrong)) as store:
        await put(store, "a")
        right.master = None
        seen = wrong.asked
        while wrong.asked < seen + 3:
            await asyncio.sleep(0.01)
            await put(store, "b")
    assert (put_at(old), put_at(new)) == (set(), {"a", "b"})


async def test_a_replica_is_not_taken_for_the_master(pair: tuple[Node, Node]) -> None:
    one, other = pair
    other.say("REPLICAOF", "127.0.0.1", one.port)
    try:
        async with scripted((1, other)) as opinions:
            said = await refusal(url_of(*opinions))
            assert f"127.0.0.1:{other.port} is a replica, not the master" in said
    finally:
        other.say("REPLICAOF", "NO", "ONE")


async def test_a_master_that_becomes_a_replica_is_asked_for_again(pair: tuple[Node, Node]) -> None:
    """Writes fail there, and the next one goes to whom the Sentinels name then."""
    one, other = pair
    async with scripted((1, one)) as opinions, opened(url_of(*opinions)) as store:
        await put(store, "a")
        opinions[0].master = (1, other.port)
        one.say("REPLICAOF", "127.0.0.1", other.port)
        try:
            with pytest.raises(StoreUnavailable, match=r"READONLY|no longer the master|connection lost"):
                await put(store, "b")
            await put(store, "c")
        finally:
            one.say("REPLICAOF", "NO", "ONE")
    assert put_at(other) == {"c"}


async def test_sentinels_that_hang_or_are_gone_do_not_matter_while_one_answers(pair: tuple[Node, Node]) -> None:
    with socket.socket() as silent, socket.socket() as closed:
        for each in (silent, closed):
            each.bind(("127.0.0.1", 0))
        silent.listen()
        others = ",".join(f"127.0.0.1:{each.getsockname()[1]}" for each in (silent, closed))
        async with (
            scripted((1, pair[0])) as (sentinel,),
            opened(f"redis+sentinel://{others},127.0.0.1:{sentinel.port}/main") as store,
        ):
            await put(store, "a")
    assert put_at(pair[0]) == {"a"}


async def test_what_is_wrong_with_sentinels_is_told(pair: tuple[Node, Node]) -> None:
    async with scripted(None, None) as opinions:
        assert "the Sentinels know no master named 'main'" in await refusal(url_of(*opinions))
    said = await refusal(url_of(*opinions))
    for sentinel in opinions:
        assert f"Sentinel 127.0.0.1:{sentinel.port}: cannot connect" in said
    assert "no Sentinel answers" in said
    plain = f"redis+sentinel://127.0.0.1:{pair[0].port}/main"
    assert re.search(r"no Sentinel answers: .* refused: ERR unknown command", await refusal(plain))


# --- logins ----------------------------------------------------------------------------------------------------------

LOGIN = ("router", "s3cret")


def user(rights: str, password: str = LOGIN[1]) -> list[str]:
    """A server's options: besides the router's user only the default one, for the test."""
    return ["--user", LOGIN[0], "on", f">{password}", *rights.split()]


@pytest.fixture(scope="module")
def guarded() -> Iterator[SentinelGroup]:
    """Redis behind Sentinels, each with a user who may do only what a router must."""
    with group("redis") as servers:
        theirs = f"user asker on >ask-s3cret {ON_SENTINELS_RIGHTS}"
        made = SentinelGroup(servers, theirs, *user(f"{RIGHTS} {SENTINEL_RIGHTS}"))
        made.ready()
        yield made


async def test_the_least_rights_are_enough_behind_sentinels(guarded: SentinelGroup) -> None:
    url = guarded.url_of(GROUP, "router:s3cret@", "?sentinel_username=asker&sentinel_password=ask-s3cret")
    async with opened(url) as store:
        await store.acquire(FLEET, claim("l1", "b1", boundary(1)))
        assert (await store.fetch(FLEET, Ask(None, (boundary(1).hash,)))).branch is not None


@pytest.mark.parametrize(
    ("login", "query", "why"),
    [
        ("router:wr0ng@", "", r"cannot connect to 127.0.0.1:\d+: WRONGPASS"),
        ("nobody:wr0ng@", "", r"cannot connect to 127.0.0.1:\d+: WRONGPASS"),
        ("router:s3cret@", "?sentinel_password=wr0ng", r"no Sentinel answers: .*(WRONGPASS|AUTH <password> called)"),
        ("router:s3cret@", "?sentinel_username=asker&sentinel_password=wr0ng", "no Sentinel answers: .*WRONGPASS"),
    ],
)
async def test_a_wrong_login_behind_sentinels_is_told_without_it(
    guarded: SentinelGroup, login: str, query: str, why: str
) -> None:
    said = await refusal(guarded.url_of(GROUP, login, query))
    assert re.search(why, said), said
    assert "wr0ng" not in said


async def test_a_wrong_name_is_told(guarded: SentinelGroup) -> None:
    said = await refusal(guarded.url_of("nobody", "router:s3cret@"))
    assert "the Sentinels know no master named 'nobody'" in said


async def test_the_least_rights_are_enough_in_a_cluster() -> None:
    with cluster("redis", options=user(f"{RIGHTS} {CLUSTER_RIGHTS}")) as nodes:
        url = nodes.url.replace("://", "://router:s3cret@")
        async with opened(url) as store:
            await store.acquire(FLEET, claim("l1", "b1", boundary(1)))
            assert (await store.fetch(FLEET, Ask(None, (boundary(1).hash,)))).branch is not None
        said = await refusal(url.replace("s3cret", "wr0ng"))
        assert "WRONGPASS" in said
        assert "wr0ng" not in said


def test_the_rights_are_those_that_the_scripts_need() -> None:
    """More would not be the least, fewer would stop a script half-way."""
    named = {word.removeprefix("+") for word in RIGHTS.split() if word.startswith("+")}
    text = "".join(script.text for script in load_scripts().values())
    called = {name.lower() for name in re.findall(r"redis\.p?call\('(\w+)'", text)}
    assert named == called | {"evalsha", "eval", "get", "set", "type"}


async def outcome(store: RedisStore) -> str:
    """What a write fails with; nothing where it does not."""
    await asyncio.sleep(0.01)
    try:
        await put(store, "a")
    except StoreUnavailable as error:
        return str(error)
    return ""


async def test_a_password_may_be_rotated_under_a_router(tmp_path: Path) -> None:
    """The file is read at every connection; the old password's connection goes on until the server ends it."""
    file = tmp_path / "password"
    file.write_text("one\n")
    with group("valkey") as servers:
        node = servers.start(*user(RIGHTS, "one"))
        url = f"redis://router@127.0.0.1:{node.port}"
        async with opened(url, password_file=file) as store:
            await put(store, "a")
            node.say("ACL", "SETUSER", "router", "resetpass", ">two")
            node.say("CLIENT", "KILL", "USER", "router")
            said = ""
            while "WRONGPASS" not in said:
                said = await outcome(store)
            file.write_text("two\n")
            while said:
                said = await outcome(store)
        file.unlink()
        said = await refusal(url, password_file=file)
        assert f"cannot read the password file {file}: No such file or directory" in said


# --- TLS -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Secured:
    """A server that is a whole cluster, or a master, by TLS."""

    node: Node
    port: int
    certificate: Path
    key: Path


@pytest.fixture(scope="module", params=["cluster", "sentinel"])
def secured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder, port = tmp_path_factory.mktemp("tls"), free_port()
    key, certificate = folder / "key.pem", folder / "cert.pem"
    make_certificate(key, certificate)
    options = ["--tls-port", str(port), "--tls-auth-clients", "no", "--tls-ca-cert-file", str(certificate)]
    options += ["--tls-cert-file", str(certificate), "--tls-key-file", str(key)]
    with group("redis") as servers:
        if request.param == "cluster":
            options += ["--cluster-enabled", "yes", "--tls-cluster", "yes", "--cluster-port", str(free_port())]
        node = servers.start(*options)
        if request.param == "cluster":
            node.say("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            until(lambda: "cluster_state:ok" in ClusterGroup.info(node), "it serves")
        yield Secured(node, port, certificate, key)


async def test_tls_holds_for_sentinels_nodes_and_master_alike(secured: Secured) -> None:
    """A certificate that nobody vouches for is refused at the first connection. A node tells its port for TLS."""
    async with contextlib.AsyncExitStack() as stack:
        if "cluster" in str(secured.node.client.info("server")["redis_mode"]):
            url = f"rediss+cluster://127.0.0.1:{secured.port}"
        else:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(secured.certificate, secured.key)
            sentinel = Scripted(master=(1, secured.port))
            server = await asyncio.start_server(sentinel.serve, "127.0.0.1", 0, ssl=context)
            await stack.enter_async_context(server)
            stack.callback(sentinel.close)
            url = f"rediss+sentinel://127.0.0.1:{server.sockets[0].getsockname()[1]}/main"
        async with opened(f"{url}?ssl_ca_certs={secured.certificate}") as store:
            await put(store, "a")
        assert put_at(secured.node) == {"a"}
        assert "certificate" in await refusal(url)


# --- how slots move --------------------------------------------------------------------------------------------------


class Move:
    """The fleet's slot on its way from its master to another."""

    def __init__(self, nodes: ClusterGroup) -> None:
        self.nodes = nodes
        self.source = nodes.owner(SLOT)
        self.target = next(node for node in nodes.masters if node is not self.source)

    def begin(self) -> None:
        self.target.say("CLUSTER", "SETSLOT", SLOT, "IMPORTING", self.nodes.id(self.source))
        self.source.say("CLUSTER", "SETSLOT", SLOT, "MIGRATING", self.nodes.id(self.target))

    def carry(self, *keys: bytes) -> None:
        """These keys, or all."""
        keys = keys or tuple(self.source.say("CLUSTER", "GETKEYSINSLOT", SLOT, 100_000))
        self.source.say("MIGRATE", "127.0.0.1", self.target.port, "", 0, 5000, "KEYS", *keys)

    def end(self) -> None:
        for node in (self.target, self.source):
            node.say("CLUSTER", "SETSLOT", SLOT, "NODE", self.nodes.id(self.target))

    def back(self) -> None:
        self.source, self.target = self.target, self.source
        self.begin()
        self.carry()
        self.end()


@pytest.fixture(scope="module", params=["redis", "valkey"])
def nodes(request: pytest.FixtureRequest) -> Iterator[ClusterGroup]:
    with cluster(request.param) as made:
        yield made


def asked(node: Node) -> int:
    """How many commands came to a node by ASK."""
    about = node.client.info("commandstats")
    return int(about.get("cmdstat_asking", {}).get("calls", 0))


async def test_a_slot_on_its_way_is_asked_for_where_its_keys_are(nodes: ClusterGroup) -> None:
    """ASK sends one call on, MOVED all that follow; a call that no node can serve waits within its time."""
    move = Move(nodes)
    async with opened(nodes.url) as store:
        await store.acquire(FLEET, claim("l1", "b1", boundary(1)))
        move.begin()
        await store.progress(FLEET, "l1")  # its keys are all at the source still
        before = asked(move.target)
        waiting = asyncio.create_task(store.acquire(FLEET, claim("l2", "b2", boundary(2))))  # names keys not there yet
        move.carry(KEYS.held)
        asking = asyncio.create_task(store.progress(FLEET, "l1"))  # one key is there, one here
        await asyncio.sleep(0.05)
        assert not asking.done()
        move.carry()
        await asking
        assert asked(move.target) > before
        assert not waiting.done()
        move.end()
        await waiting
        view = await store.fetch(FLEET, Ask(None, (boundary(1).hash,)))
        assert view.branch is not None
        assert view.loads["r1"].in_flight == 2
    move.back()


@asynccontextmanager
async def loaded(store: RedisStore) -> AsyncIterator[list[str]]:
    """Turns without end, several at a time; the list grows by the leases that were won. No call may fail."""
    leases: list[str] = []
    done = asyncio.Event()

    async def turns(number: int) -> None:
        turn = 0
        while not done.is_set():
            turn += 1
            lease, prompt = f"l{number}.{turn}", boundary((number + 1) * 100_000 + turn)
            assert isinstance(await store.acquire(FLEET, claim(lease, f"b{lease}", prompt)), Acquired)
            leases.append(lease)
            assert (await store.fetch(FLEET, Ask(None, (prompt.hash,)))).branch is not None

    async with asyncio.TaskGroup() as tasks:
        for number in range(8):
            tasks.create_task(turns(number))
        try:
            yield leases
        finally:
            done.set()


async def more(leases: list[str]) -> None:
    """Wait for 50 further turns."""
    enough = len(leases) + 50
    async with asyncio.timeout(PATIENT_S):
        while len(leases) < enough:  # noqa: ASYNC110 (a list gives no sign)
            await asyncio.sleep(0)


async def test_slots_that_move_under_load_lose_no_call(nodes: ClusterGroup) -> None:
    """There and back. Each turn names keys that exist and keys that do not, which waits until the move is over."""
    move = Move(nodes)
    async with opened(nodes.url) as store, loaded(store) as leases:
        for _ in range(2):
            await more(leases)
            await asyncio.to_thread(move.begin)
            await asyncio.to_thread(move.carry)
            await asyncio.sleep(0.02)  # turns wait at both nodes
            await asyncio.to_thread(move.end)
            move.source, move.target = move.target, move.source
        await more(leases)
    assert set(leases) <= kept(move.source)


async def test_a_slot_that_moves_as_a_whole_loses_no_call() -> None:
    """Valkey 9 moves slots atomically, so there is nothing to wait for but the redirection."""
    with cluster("valkey") as nodes:
        move = Move(nodes)
        async with opened(nodes.url) as store, loaded(store) as leases:
            await more(leases)
            target = nodes.id(move.target)
            move.source.say("CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", SLOT, SLOT, "NODE", target)
            await asyncio.to_thread(until, lambda: move.target.client.exists(KEYS.load), "the slot has moved")
            await more(leases)
        assert set(leases) <= kept(move.target)


def kept(node: Node) -> set[str]:
    return {lease.decode() for lease in node.say("ZRANGE", KEYS.leases, 0, -1)}


async def test_schema_and_fleets_lie_where_their_slots_are(nodes: ClusterGroup) -> None:
    async with opened(nodes.url) as store:
        for name in ("m", "n", "o", "p"):
            await store.put_member(name, Member("r1", "http://r1", "admin"))
    for key in (schema_key("roost"), *(FleetKeys("roost", name).members for name in ("m", "n", "o", "p"))):
        assert nodes.owner(key_slot(key)).client.exists(key)


async def test_one_node_is_enough_to_find_the_others(nodes: ClusterGroup) -> None:
    """And nodes named that are gone do not matter."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        gone = f"127.0.0.1:{closed.getsockname()[1]}"
        async with opened(f"redis+cluster://{gone},127.0.0.1:{nodes.masters[0].port}") as store:
            for name in ("m", "n", "o"):
                await store.put_member(name, Member("r1", "http://r1", "admin"))
        assert "no node tells the slots: " in await refusal(f"redis+cluster://{gone}")


async def test_a_server_that_is_no_cluster_is_told(pair: tuple[Node, Node]) -> None:
    said = await refusal(f"redis+cluster://127.0.0.1:{pair[0].port}")
    assert "cluster support disabled" in said


async def test_a_cluster_that_is_taken_for_one_server_is_told(nodes: ClusterGroup) -> None:
    other = next(node for node in nodes.masters if node is not nodes.owner(key_slot(schema_key("roost"))))
    said = await refusal(f"redis://127.0.0.1:{other.port}")
    assert re.search(r"refused: MOVED .* \(a cluster: write redis\+cluster://\)", said)


async def test_a_cluster_that_is_not_formed_is_told() -> None:
    with group("redis") as servers:
        # Its bus would take the port 10,000 above its own, which there need not be.
        node = servers.start("--cluster-enabled", "yes", "--cluster-port", str(free_port()))
        assert "it knows of no slots" in await refusal(f"redis+cluster://127.0.0.1:{node.port}")


async def test_slots_that_nobody_serves_are_unavailable_and_the_rest_is_not(nodes: ClusterGroup) -> None:
    """With `cluster-require-full-coverage no`, as one who has several fleets wants it."""
    for node in nodes.masters:
        node.client.config_set("cluster-require-full-coverage", "no")
    owner = nodes.owner(SLOT)
    names = (f"f{number}" for number in range(99))
    other = next(name for name in names if nodes.owner(key_slot(FleetKeys("roost", name).load)) is not owner)
    async with opened(nodes.url, timeout_s=1.0) as store:
        owner.process.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(StoreUnavailable, match="no answer in time"):
                await put(store, "a")
            await store.put_member(other, Member("r1", "http://r1", "admin"))
        finally:
            owner.process.send_signal(signal.SIGCONT)
        until(lambda: "cluster_state:ok" in nodes.info(owner), "it is back")
