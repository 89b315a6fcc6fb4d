"""API keys that name tenants: who comes in, what a key opens, and which key a replica is shown."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from router.api.keys import KeysFileError, hash_of
from router.domain.turn import Dialect
from router.placement.identity import session_token
from router.placement.scope import named_scope
from router.settings import Auth, Fleet, Settings
from tests.integration.conversations import Conversation
from tests.integration.relay_rig import Client
from tests.integration.replicas import DIALECTS, PATHS, Replica, Visit, replicas
from tests.integration.roosts import PROBE_INTERVAL_S, Answer, Roost, running, settings_for, shared_store
from tests.integration.supervised import supervised
from tests.integration.test_gateway_secrets import written

ACME, ACME_NEXT, OTHER, OPERATOR = "roost-acme-1", "roost-acme-2", "roost-other-1", "roost-operator"
TENANTS: dict[str, dict[str, Any]] = {
    "acme": {"keys": [ACME, ACME_NEXT]},
    "other": {"keys": [OTHER]},
    "operators": {"keys": [OPERATOR], "engine_control": True},
}


def keys_file(folder: Path, tenants: Mapping[str, Mapping[str, Any]] = TENANTS) -> Path:
    """A keys file with the hashes of these keys, put in place at once as an editor does."""
    hashed = {
        name: {**entry, "keys": [hash_of(key.encode()) for key in entry["keys"]]} for name, entry in tenants.items()
    }
    file, fresh = folder / "keys.yaml", folder / "keys.new"
    fresh.write_text(yaml.safe_dump({"secret": "s" * 32, "tenants": hashed}))
    return fresh.replace(file)


def keyed(fleet: list[Replica], folder: Path, **more: Any) -> Settings:
    return settings_for(fleet, auth=Auth(keys_file=str(keys_file(folder)), **more))


@asynccontextmanager
async def guarded(folder: Path, count: int = 1, **more: Any) -> AsyncIterator[tuple[Roost, list[Replica]]]:
    """A router that asks for keys, before so many replicas."""
    async with replicas(count) as fleet, running(keyed(fleet, folder, **more), fleet) as roost:
        yield roost, fleet


def asks(key: str | None, dialect: Dialect = Dialect.CHAT, name: str = "q", **more: Any) -> Conversation:
    return Conversation(name, dialect, header=("x-session-id", "same"), key=key, **more)


async def ask(roost: Roost, asked: Conversation, **headers: str) -> Answer:
    return await roost.request("POST", PATHS[asked.dialect], asked.body(), {**asked.headers, **headers})


# --- who comes in ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("key", [None, "roost-unknown", "", ACME + "x", ACME[:-1], hash_of(ACME.encode())])
async def test_without_a_known_key_nothing_reaches_a_replica(tmp_path: Path, dialect: Dialect, key: str | None) -> None:
    """401 in the dialect's shape, with the scheme that is wanted. The hash of a key is no key."""
    async with guarded(tmp_path) as (roost, (replica,)):
        answer = await ask(roost, asks(key, dialect))
        assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
        told = json.loads(answer.body)
        assert (told.get("type") == "error") == (dialect is Dialect.MESSAGES)
        assert told["error"]["type"] == "authentication_error"
        assert not replica.turns


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {ACME}"},
        {"authorization": f"bearer {ACME} "},
        {"x-api-key": ACME},
        {"authorization": "Bearer", "x-api-key": ACME},
        {"authorization": "Basic eDp5", "x-api-key": ACME},
        {"authorization": "Bearer placeholder", "x-api-key": ACME},
    ],
)
async def test_a_key_is_known_in_either_header(tmp_path: Path, headers: dict[str, str]) -> None:
    """OpenAI's clients send the one, Anthropic's the other, and some both with a placeholder in one."""
    async with guarded(tmp_path) as (roost, _):
        assert (await ask(roost, asks(None), **headers)).status == 200


@pytest.mark.parametrize("name", ["Authorization: Bearer", "X-Api-Key:"])
async def test_two_copies_of_a_key_header_are_refused(tmp_path: Path, name: str) -> None:
    """A proxy before Roost may have checked the other one."""
    async with guarded(tmp_path) as (roost, (replica,)), Client.to(roost.port) as client:
        await client.post(asks(None).body(), headers=f"{name} {ACME}\r\n{name} {OTHER}\r\n", path=PATHS[Dialect.CHAT])
        assert (await client.answer()).status == 401
        assert not replica.turns


async def test_keys_of_two_tenants_are_refused(tmp_path: Path) -> None:
    """For the same reason; two keys of one tenant are one tenant's."""
    async with guarded(tmp_path) as (roost, (replica,)):
        refused = await ask(roost, asks(None), **{"authorization": f"Bearer {ACME}", "x-api-key": OTHER})
        assert refused.status == 401
        assert not replica.turns
        assert (
            await ask(roost, asks(None), **{"authorization": f"Bearer {ACME}", "x-api-key": ACME_NEXT})
        ).status == 200


async def test_who_asks_what_it_may_not_is_counted_by_name(tmp_path: Path) -> None:
    """An operator has to know which tenant tries to flush caches."""
    async with guarded(tmp_path) as (roost, _):
        refused = await roost.request("POST", "/flush_cache", headers={"x-api-key": ACME})
        assert refused.status == 403
        assert "engine_control" in json.loads(refused.body)["error"]["message"]
        assert 'roost_tenant_requests_refused_total{code="not_allowed",tenant="acme"} 1.0' in await roost.metrics()


async def test_health_is_open_and_models_need_a_key(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (roost, _):
        for path in ("/livez", "/readyz"):
            assert (await roost.request("GET", path)).status == 200
        for path in ("/v1/models", "/v1/models/m"):
            assert (await roost.request("GET", path)).status == 401
            assert (await roost.request("GET", path, headers={"x-api-key": ACME})).status == 200


async def test_a_stranger_is_refused_before_his_body_is_read(tmp_path: Path) -> None:
    """The answer comes though the announced body never does."""
    async with guarded(tmp_path) as (roost, _), Client.to(roost.port) as client:
        client.writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99000000\r\n\r\n")
        assert (await client.answer()).status == 401


async def test_without_a_keys_file_everybody_comes_in() -> None:
    async with replicas(1) as fleet, running(settings_for(fleet), fleet) as roost:
        for key in (None, "anything"):
            assert (await ask(roost, asks(key))).status == 200


# --- whose session ---------------------------------------------------------------------------------------------------


async def test_sessions_belong_to_the_tenant_and_outlive_its_keys(tmp_path: Path) -> None:
    """Two keys of one tenant are in one session; another tenant with the same id, and the same prompt, is not."""
    async with guarded(tmp_path, 3) as (roost, _):
        mine = asks(ACME)
        first = await roost.turn(mine)
        mine.grow()
        mine.key = ACME_NEXT
        second = await roost.turn(mine)
        assert (second.session, second.replica, second.reason) == (first.session, first.replica, "home")
        theirs = await roost.turn(asks(OTHER))
        assert theirs.session != first.session
        assert theirs.reason == "new"
        branches = {each["branch"] for each in await roost.decisions()}
        assert len(branches) == 2


async def test_a_session_with_a_forged_seal_is_not_met(tmp_path: Path, valkey_url: str) -> None:
    """Whoever knows how seals are made can make one for a session whose name he saw. He gets a session of that name of
    his own: he neither lands where it lives nor moves it, under the policy that binds whole sessions too."""
    async with replicas(4) as fleet:
        sticky = Fleet(
            name="default",
            replicas=(fleet[0].url,),
            policy="session_sticky",
            probe_interval_s=PROBE_INTERVAL_S,
        )
        auth = Auth(keys_file=str(keys_file(tmp_path)))
        settings = settings_for([sticky], shared_store(valkey_url, "forged"), auth=auth)
        async with running(settings, fleet[:1]) as roost:
            homes = []
            for number in range(12):
                mine = Conversation(f"m{number}", header=("x-session-id", f"s{number}"), key=ACME)
                homes.append((mine, await roost.turn(mine)))
            for each in fleet[1:]:  # from now on the hash of a session leads elsewhere, mostly
                await roost.admin("POST", "/admin/replicas", {"url": each.url})
            await roost.knows(fleet)
            landed = []
            for _, answer in homes:
                session = answer.session.partition("-")[0]
                forged = session_token(named_scope("other", b"s" * 32), session)
                stolen = await roost.turn(Conversation(f"x {session}", header=("x-roost-session", forged), key=OTHER))
                landed.append(stolen.replica == answer.replica)
            assert not all(landed), "each of them where the other tenant's session lives: one in 16 million by chance"
            for mine, answer in homes:
                mine.said = [f"anew {mine.name}"]  # nothing but the session leads home
                again = await roost.turn(mine)
                assert (again.replica, again.session) == (answer.replica, answer.session)


# --- stored responses ------------------------------------------------------------------------------------------------


async def stored(roost: Roost, key: str) -> tuple[str, Answer]:
    """A stored response of the key's tenant: its id, and the answer that made it."""
    answer = await roost.turn(asks(key, Dialect.RESPONSES, stream=False))
    return json.loads(answer.body)["id"], answer


@pytest.mark.parametrize(
    ("method", "below"), [("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")]
)
async def test_a_stored_response_is_its_tenants_only(tmp_path: Path, method: str, below: str) -> None:
    """To all others it does not exist, whatever they know of its id; no replica is asked."""
    async with guarded(tmp_path, 3) as (roost, fleet):
        response_id, made = await stored(roost, ACME)
        path = f"/v1/responses/{response_id}{below}"
        await roost.idle()
        before = [len(each.seen) for each in fleet]
        for key in (OTHER, OPERATOR):
            refused = await roost.request(method, path, headers={"x-api-key": key})
            assert (refused.status, refused.headers["x-roost-error"]) == (404, "response_not_found")
        unknown = await roost.request(method, f"/v1/responses/resp_unknown{below}", headers={"x-api-key": ACME})
        assert unknown.status == 404
        assert [len(each.seen) for each in fleet] == before
        got = await roost.request(method, path, headers={"x-api-key": ACME_NEXT})
        assert (got.status, got.replica, got.reason) == (200, made.replica, "stored")


async def test_a_stored_response_is_continued_by_its_tenant_only(tmp_path: Path) -> None:
    """`previous_response_id` of another's would put his conversation into the prompt."""
    async with guarded(tmp_path, 3) as (roost, fleet):
        response_id, made = await stored(roost, ACME)
        await roost.idle()
        before = sum(len(each.seen) for each in fleet)
        for key, given in ((OTHER, response_id), (ACME, "resp_unknown")):
            asked = asks(key, Dialect.RESPONSES, field_given=("previous_response_id", given))
            refused = await ask(roost, asked)
            assert (refused.status, refused.headers["x-roost-error"]) == (404, "response_not_found")
        assert sum(len(each.seen) for each in fleet) == before
        asked = asks(ACME_NEXT, Dialect.RESPONSES, field_given=("previous_response_id", response_id))
        assert (await roost.turn(asked)).replica == made.replica


# --- engines as a whole ----------------------------------------------------------------------------------------------

OF_ENGINES = [
    ("POST", "/flush_cache"),
    ("GET", "/flush_cache"),
    ("POST", "/abort_request"),
    ("POST", "/update_weights_from_disk"),
    ("POST", "/release_memory_occupation"),
    ("POST", "/start_profile"),
    ("POST", "/pause_generation"),
    ("POST", "/open_session"),
    ("POST", "/close_session"),
    ("PUT", "/hicache/storage-backend"),
    ("POST", "/load_lora_adapter"),
    ("GET", "/server_info"),
    ("GET", "/get_server_info"),
    ("GET", "/metrics"),
    ("GET", "/v1/loads"),
    ("GET", "/health"),
    ("GET", "/health_generate"),
    ("POST", "/api/chat"),
    ("POST", "/anything/new"),
    # Spellings of the first that Starlette reads as such, or might.
    ("POST", "/%66lush_cache"),
    ("POST", "//flush_cache"),
    ("POST", "/v1/responses/..%2F..%2Fflush_cache"),
    ("POST", "/v1/models/../../flush_cache"),
    ("POST", "/flush_cache/"),
    ("POST", "/flush_cache?timeout=1"),
    # Methods that make no turn of a turn's path.
    ("GET", "/generate"),
    ("PATCH", "/v1/chat/completions"),
    ("DELETE", "/v1/models/m"),
]


@pytest.mark.parametrize(("method", "path"), OF_ENGINES)
async def test_what_acts_on_an_engine_as_a_whole_needs_a_tenant_who_may(tmp_path: Path, method: str, path: str) -> None:
    async with guarded(tmp_path) as (roost, (replica,)):
        body = b"{}" if method in ("POST", "PUT", "PATCH") else None
        refused = await roost.request(method, path, body, {"x-api-key": ACME})
        assert (refused.status, refused.headers["x-roost-error"]) == (403, "not_allowed")
        assert not replica.seen
        passed = await roost.request(method, path, body, {"x-api-key": OPERATOR})
        assert passed.status == 200
        assert len(replica.seen) + replica.probes > 0


async def test_engine_paths_may_be_opened_to_all_tenants(tmp_path: Path) -> None:
    async with guarded(tmp_path, engine_paths="pass") as (roost, _):
        assert (await roost.request("POST", "/flush_cache", b"{}", {"x-api-key": ACME})).status == 200
        assert (await roost.request("POST", "/flush_cache", b"{}")).status == 401


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/messages/count_tokens"),
        ("POST", "/v1/embeddings"),
        ("POST", "/tokenize"),
        ("POST", "/v1/score"),
        ("GET", "/model_info"),
        ("HEAD", "/v1/models"),
        ("OPTIONS", "/v1/chat/completions"),
    ],
)
async def test_what_concerns_nobody_else_passes(tmp_path: Path, method: str, path: str) -> None:
    async with guarded(tmp_path) as (roost, _):
        body = b"{}" if method == "POST" else None
        assert (await roost.request(method, path, body, {"x-api-key": ACME})).status in (200, 204)


@pytest.mark.parametrize(
    "given",
    [
        ("session_params", {"id": "someone-elses", "rid": None}),
        ("bootstrap_host", "10.6.6.6"),
        ("bootstrap_room", 5),
        ("bootstrap_port", 8998),
    ],
)
@pytest.mark.parametrize("dialect", [Dialect.GENERATE, Dialect.CHAT])
async def test_a_turn_does_not_reach_into_an_engines_sessions(
    tmp_path: Path, dialect: Dialect, given: tuple[str, Any]
) -> None:
    async with guarded(tmp_path) as (roost, (replica,)):
        refused = await ask(roost, asks(ACME, dialect, field_given=given))
        assert (refused.status, refused.headers["x-roost-error"]) == (403, "not_allowed")
        assert not replica.turns
        assert (await ask(roost, asks(OPERATOR, dialect, field_given=given))).status == 200
        assert (await ask(roost, asks(ACME, dialect, field_given=(given[0], None)))).status == 200


async def test_a_body_that_cannot_be_looked_into_is_refused(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (roost, (replica,)):
        assert (await ask(roost, asks(ACME), **{"content-encoding": "zstd"})).status == 400
        assert not replica.turns


# --- the keys file ---------------------------------------------------------------------------------------------------


async def test_keys_change_without_a_restart(tmp_path: Path) -> None:
    """Rotation: both keys, then the new one alone; the session stays where it is."""
    async with guarded(tmp_path, 3) as (roost, _):
        mine = asks(ACME)
        first = await roost.turn(mine)
        keys_file(tmp_path, {"acme": {"keys": [ACME_NEXT, "roost-acme-3"]}})

        async def gone() -> bool:
            return (await roost.request("GET", "/v1/models", headers={"x-api-key": ACME})).status == 401

        await roost.until(gone)
        mine.key = "roost-acme-3"
        mine.grow()
        assert (await roost.turn(mine)).session == first.session


async def test_a_broken_file_keeps_the_keys_and_is_told_once(tmp_path: Path) -> None:
    """Also one that has gone. The line shows no key and no hash."""
    async with guarded(tmp_path) as (roost, _):
        with written() as log:
            for broken in ("tenants: [", f"tenants: {{acme: {{keys: ['{ACME}']}}}}", None):
                told = log.getvalue().count("stay in force")
                file = tmp_path / "keys.yaml"
                file.unlink() if broken is None else file.write_text(broken)

                async def complained(before: int = told) -> bool:
                    return log.getvalue().count("stay in force") > before

                await roost.until(complained)
                assert (await ask(roost, asks(ACME))).status == 200
            await asyncio.sleep(1.2)  # one more look at what has not changed
            keys_file(tmp_path)

            async def read() -> bool:
                return "keys read anew: 3 tenants, 4 keys" in log.getvalue()

            await roost.until(read)
        assert log.getvalue().count("stay in force") == 3
        assert ACME not in log.getvalue()
        assert hash_of(ACME.encode())[7:] not in log.getvalue()


# --- which key a replica is shown ------------------------------------------------------------------------------------

CLIENTS: dict[str, dict[str, str]] = {
    "none": {},
    "bearer": {"authorization": "Bearer sk-client"},
    "x-api-key": {"x-api-key": "sk-client"},
    "azure": {"api-key": "sk-client"},
    "all": {"authorization": "Bearer sk-client", "X-API-Key": "sk-client", "Proxy-Authorization": "Basic sk-client"},
    "cookie": {"cookie": "session=sk-client"},
}


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("replica_key", [None, "sk-replica"])
@pytest.mark.parametrize("path", ["turn", "passage", "broadcast"])
async def test_a_replica_sees_its_own_key_or_none(client: str, replica_key: str | None, path: str) -> None:
    """Exactly one right header in the whole matrix, and nothing of what the client brought."""
    async with replicas(2) as fleet:
        auth = Auth(replica_key=replica_key)
        async with running(settings_for(fleet, auth=auth), fleet) as roost:
            headers = CLIENTS[client]
            if path == "turn":
                answer = await ask(roost, asks(None), **headers)
            else:
                target = "/flush_cache" if path == "broadcast" else "/v1/embeddings"
                answer = await roost.request("POST", target, b"{}", headers)
            assert answer.status == 200
            seen = [each for replica in fleet for each in replica.seen]
            assert len(seen) == (2 if path == "broadcast" else 1)
            for each in seen:
                right = [b"Bearer sk-replica"] if replica_key else []
                assert each.header(b"authorization") == right
                assert not [value for _, value in each.headers if b"sk-client" in value]


@pytest.mark.parametrize("client", ["bearer", "x-api-key", "azure", "cookie"])
async def test_the_clients_key_reaches_replicas_when_that_is_asked_for(client: str) -> None:
    passing = Auth(client_credentials="pass")
    async with replicas(1) as fleet, running(settings_for(fleet, auth=passing), fleet) as roost:
        assert (await ask(roost, asks(None), **CLIENTS[client])).status == 200
        ((name, value),) = CLIENTS[client].items()
        assert fleet[0].seen[0].header(name.encode()) == [value.encode()]


async def test_each_fleet_has_its_key_and_probes_send_it(tmp_path: Path) -> None:
    """Replicas that answer nobody without their key are found ready; a fleet without a key of its own
    has that of all."""
    file = tmp_path / "replica.key"
    file.write_text("sk-one\n")

    async def shows(visit: Visit) -> None:
        await visit.answer(body=json.dumps([value.decode() for value in visit.seen.header(b"authorization")]).encode())

    async with replicas(3, script=shows) as fleet:
        fleet[1].model, fleet[2].model = "n", "o"
        for replica, key in zip(fleet, ("sk-one", "sk-all", None), strict=True):
            replica.api_key = key
        specs = [
            Fleet(name=f"f{number}", replicas=(replica.url,), probe_interval_s=PROBE_INTERVAL_S, **more)
            for number, (replica, more) in enumerate(
                zip(fleet, ({"replica_key_file": str(file)}, {}, {"client_credentials": "drop"}), strict=True)
            )
        ]
        auth = Auth(replica_key="sk-all")
        async with running(settings_for(specs, auth=auth), fleet) as roost:
            for model, key in (("m", "sk-one"), ("n", "sk-all"), ("o", "sk-all")):
                answer = await ask(roost, asks("sk-client", model=model, stream=False))
                assert json.loads(answer.body) == [f"Bearer {key}"]


# --- headers of Roost's own ------------------------------------------------------------------------------------------


async def test_what_roost_says_of_a_turn_is_roosts_word(tmp_path: Path) -> None:
    """Neither side can put an `x-roost-…` header past it."""

    async def lies(visit: Visit) -> None:
        await visit.answer(headers=[("X-Roost-Replica", "elsewhere"), ("x-roost-error", "none"), ("X-Own", "1")])

    async with replicas(1, script=lies) as fleet, running(settings_for(fleet), fleet) as roost:
        answer = await ask(roost, asks(None, stream=False), **{"x-roost-reason": "home", "x-roost-replica": "there"})
        assert answer.replica == fleet[0].id
        assert "x-roost-error" not in answer.headers
        assert answer.headers["x-own"] == "1"
        assert not [name for name, _ in fleet[0].seen[0].headers if name.lower().startswith(b"x-roost-")]


# --- several workers -------------------------------------------------------------------------------------------------


async def test_every_worker_asks_for_keys_and_shows_the_replicas_key(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Secrets reach workers though no rendering of settings shows them; the limit is one for all workers."""
    tenants = {"acme": {"keys": [ACME], "rate_per_minute": 3}}
    auth = {"keys_file": str(keys_file(tmp_path, tenants)), "replica_key": "sk-replica"}
    folder = tmp_path_factory.mktemp("w")
    async with replicas(1) as fleet:
        fleet[0].api_key = "sk-replica"
        async with (
            supervised(folder, fleet, auth=auth) as roost,
            roost.connection(only=0) as first,
            roost.connection(only=1) as second,
        ):
            statuses = []
            for number in range(6):
                asked = asks(ACME, name=f"q{number}")
                worker = (first, second)[number % 2]
                async with worker.http.post("/v1/chat/completions", data=asked.body(), headers=asked.headers) as answer:
                    await answer.read()
                    statuses.append(answer.status)
                async with worker.http.get("/v1/models") as answer:
                    assert answer.status == 401
            assert statuses == [200] * 3 + [429] * 3
            assert {each.header(b"authorization")[0] for each in fleet[0].turns} == {b"Bearer sk-replica"}
        log = "".join(roost.log.lines)
        assert "sk-replica" not in log
        assert ACME not in log


async def test_a_keys_file_that_cannot_be_used_ends_the_start(tmp_path: Path) -> None:
    """A router that let everybody in, or nobody, would be the worse."""
    absent = settings_for([], auth=Auth(keys_file=str(tmp_path / "absent")))
    with pytest.raises(KeysFileError, match="absent"):
        async with running(absent):
            pytest.fail("it started")
