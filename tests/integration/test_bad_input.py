"""Whatever clients, replicas, files and stores say: a clear error, and the router lives on."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import redis.asyncio

from router.domain.turn import Dialect
from router.settings import Limits, Timeouts
from tests.contracts.servers import serving, serving_with
from tests.integration.conversations import Conversation
from tests.integration.relay_rig import Client
from tests.integration.replicas import DIALECTS, PATHS, PATIENCE_S, Replica, Visit, replicas
from tests.integration.roosts import Answer, Roost, running, settings_for, shared_store


@asynccontextmanager
async def living(limits: Limits | None = None) -> AsyncIterator[tuple[Roost, Replica]]:
    """A router before one replica. After whatever was done to it a turn of each dialect succeeds, and nothing is in
    flight."""
    async with (
        replicas(1) as (replica,),
        running(settings_for([replica], limits=limits or Limits()), [replica]) as roost,
    ):
        yield roost, replica
        for dialect in DIALECTS:
            await roost.turn(Conversation(f"after {dialect}", dialect))
        await roost.idle()


def told(answer: Answer, dialect: Dialect) -> str:
    """The message of an error in the dialect's shape."""
    body = json.loads(answer.body)
    assert (body.get("type") == "error") == (dialect is Dialect.MESSAGES)
    message = body["error"]["message"]
    assert isinstance(message, str)
    assert message
    return message


# --- bodies ----------------------------------------------------------------------------------------------------------

NO_JSON = {
    "cut": b'{"model":"m","messages":[{"role":"user"',
    "two": b'{"model":"m"}{"model":"m"}',
    "words": b"hello",
    "not a number": b'{"model":"m","temperature":NaN}',
    "infinite": b'{"model":"m","temperature":Infinity}',
    "apostrophes": b"{'model':'m'}",
    "comma": b'{"model":"m",}',
    "nul": b"\0" * 50,
    "deep": b'{"model":"m","messages":' + b"[" * 10_000,
    "form": b"model=m&stream=true",
    "list": b'[{"model":"m"}]',
    "number": b"17",
    "string": b'"model"',
    "null": b"null",
    "true": b"true",
    "spaces": b"  \n ",
}


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_body_that_is_no_json_object_is_a_400_in_the_dialect(dialect: Dialect) -> None:
    """No replica sees it, and no excerpt of it comes back."""
    async with living() as (roost, replica):
        for name, body in NO_JSON.items():
            answer = await roost.request("POST", PATHS[dialect], body)
            assert (answer.status, answer.headers.get("x-roost-error")) == (400, "invalid_request"), name
            assert "JSON" in told(answer, dialect), name
        assert replica.turns == []


ODD_TYPES: list[dict[str, object]] = [
    {"model": 5},
    {"model": ["m"]},
    {"model": {"m": 1}},
    {"model": None},
    {"stream": "yes"},
    {"stream": 1},
    {"messages": {}},
    {"messages": "hi"},
    {"messages": 3},
    {"messages": [1, None, "x", [], {}, {"role": 5}, {"role": "user", "content": {"a": 1}}]},
    {"messages": [{"role": "user", "content": [1, None, "x", [], {"type": 5}, {"text": 7}, {"content": [{}]}]}]},
    {"input": 3},
    {"input": [3, {"type": None}]},
    {"prompt": {"a": 1}},
    {"prompt": [["a"], "b", 3]},
    {"prompt": [1, 2, 10**30, -5]},
    {"text": ["a", "b"]},
    {"input_ids": "ids"},
    {"input_ids": [[1, 2], [3]]},
    {"input_ids": [1, 2.5]},
    {"tools": 3},
    {"tools": "x"},
    {"tools": [None]},
    {"tool_choice": {"type": 5}},
    {"system": 5},
    {"system": [5]},
    {"instructions": {"a": []}},
    {"metadata": 5},
    {"metadata": {"user_id": {"a": 1}}},
    {"metadata": {"user_id": "{not json"}},
    {"prompt_cache_key": [1]},
    {"prompt_cache_key": ""},
    {"session_id": True},
    {"user": 10**40},
    {"max_tokens": "many"},
    {"max_tokens": -1},
    {"max_tokens": 10**30},
    {"sampling_params": [1]},
    {"sampling_params": {"max_new_tokens": True}},
    {"sampling_params": {"max_new_tokens": -7}},
    {"previous_response_id": 5},
    {"previous_response_id": "x" * 100_000},
    {"store": "no"},
    {"": "", "model\u0000": "x"},
    {},
]


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_odd_types_are_the_engines_to_judge(dialect: Dialect) -> None:
    """A field of an unexpected type counts as absent; the body goes through as it is."""
    async with living() as (roost, replica):
        for odd in ODD_TYPES:
            for stream in (False, True):
                body = json.dumps({"stream": stream, **odd}).encode()
                answer = await roost.request("POST", PATHS[dialect], body)
                assert answer.status == 200, (odd, answer.body)
                assert replica.seen[-1].body == body


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_odd_but_valid_json_passes(dialect: Dialect) -> None:
    """Lone surrogates, deep nests where nobody looks, huge numbers, names twice."""
    odd = [
        b'{"model":"m","messages":[{"role":"user","content":"\\ud800 \\udfff"}],"prompt":"\\ud800","text":"\\ud800"}',
        b'{"model":"m","user":"\\ud800","prompt_cache_key":"\\udc00"}',
        b'{"model":"m","x":' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"model":"m","messages":[{"role":"user","content":' + b"[" * 900 + b"]" * 900 + b"}]}",
        b'{"model":"m","n":' + b"9" * 5000 + b',"f":1e99999}',
        b'{"model":"other","model":"m","messages":1,"messages":[]}',
        b'{"model":"m","x":"caf\xe9 \xff"}',
        b'{"\\u006dodel":"m","str\\u0065am":true}',
    ]
    async with living() as (roost, replica):
        for body in odd:
            answer = await roost.request("POST", PATHS[dialect], body)
            assert answer.status == 200, body[:80]
            assert replica.seen[-1].body == body


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_no_body_is_the_engines_to_judge(dialect: Dialect) -> None:
    async with living() as (roost, replica):
        for method in ("POST", "GET"):
            assert (await roost.request(method, PATHS[dialect])).status == 200
        assert [seen.body for seen in replica.seen] == [b"", b""]


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_body_beyond_the_limit_is_a_413_in_the_dialect(dialect: Dialect) -> None:
    """Announced or in chunks: the replica sees nothing, and the client gets to read why."""
    async with living(Limits(body_max_bytes=10_000)) as (roost, replica):
        answer = await roost.request("POST", PATHS[dialect], b"x" * 10_001)
        assert (answer.status, answer.headers["x-roost-error"]) == (413, "request_too_large")
        assert "10000" in told(answer, dialect)
        async with Client.to(roost.port) as client:
            head = f"POST {PATHS[dialect]} HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\n"
            client.writer.write(head.encode() + b"1000\r\n" + b"x" * 4096 + b"\r\n")
            client.writer.write((b"1000\r\n" + b"x" * 4096 + b"\r\n") * 3)
            refused = await client.answer()
        assert (refused.status, json.loads(refused.body)["error"]["message"] != "") == (413, True)
        assert replica.seen == []
        full = json.dumps({"model": "m", "pad": ""}).encode()
        assert (await roost.request("POST", PATHS[dialect], full + b" " * (10_000 - len(full)))).status == 200


# --- heads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_headers_beyond_the_limit_are_a_431_in_the_dialect(dialect: Dialect) -> None:
    async with living() as (roost, replica):
        body = Conversation("headers", dialect).body()
        answer = await roost.request("POST", PATHS[dialect], body, {"x-big": "a" * 40_000})
        assert (answer.status, answer.headers["x-roost-error"]) == (431, "headers_too_large")
        assert "32768" in told(answer, dialect)
        for wild in ({f"x-{n}": "v" for n in range(300)}, {"x-huge": "a" * 200_000}):
            async with Client.to(roost.port) as client:
                await client.post(body, path=PATHS[dialect], headers="".join(f"{k}: {v}\r\n" for k, v in wild.items()))
                refused = await client.answer()
                assert refused.status == 431
                assert json.loads(refused.body)["error"]["message"]
        assert replica.seen == []


BAD_HTTP = [
    b"hello\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"POST / HTTP/1.1\r\nHost: r\r\nContent-Length: many\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: r\r\nContent-Length: -5\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: r\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    b"POST / HTTP/1.1\r\nHost: r\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"GET / HTTP/1.1\r\nHost: r\r\nbad header\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: r\r\nX: a\x00b\r\n\r\n",
    b"GET http://[::1 HTTP/1.1\r\nHost: r\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: r\r\nX-Long: " + b"a" * 300_000 + b"\r\n\r\n",
    b"GET /" + b"a" * 300_000 + b" HTTP/1.1\r\nHost: r\r\n\r\n",
]


async def test_what_is_no_http_is_answered_with_an_error_or_a_close() -> None:
    async with living() as (roost, replica):
        for raw in BAD_HTTP:
            async with Client.to(roost.port) as client:
                client.writer.write(raw)
                if client.writer.can_write_eof():
                    client.writer.write_eof()
                answered = await client.reader.read()
                if answered:
                    status = int(answered.split(b" ", 2)[1])
                    assert 400 <= status < 505, (raw[:60], answered[:200])
                    assert json.loads(answered.split(b"\r\n\r\n", 1)[1])["error"]["message"], raw[:60]
        assert [seen.target for seen in replica.seen if seen.body] == []


async def test_clients_that_leave_half_a_request_leave_nothing_behind() -> None:
    async with living() as (roost, replica):
        whole = b"POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\nContent-Length: 500\r\n\r\n" + b'{"model":"m"'
        for cut in (0, 4, 30, len(whole) - 14, len(whole)):
            async with Client.to(roost.port) as client:
                client.writer.write(whole[:cut])
                await client.writer.drain()
        assert replica.seen == []


@pytest.mark.parametrize(
    "path", ["/v1/unknown", "/v2/chat/completions", "/api/chat", "/v1beta/models/m:generateContent"]
)
async def test_an_unknown_dialect_is_the_replicas_to_answer(path: str) -> None:
    """Its errors are said in OpenAI's words, for want of others."""
    async with living() as (roost, replica):
        assert (await roost.request("POST", path, b"anything at all")).status == 200
        assert replica.seen[-1].body == b"anything at all"
        lost = await roost.request("POST", path, b'{"model":"lost"}')
        assert lost.status == 404
        assert told(lost, Dialect.CHAT)


# --- replicas that speak nonsense ------------------------------------------------------------------------------------

Nonsense = Callable[[Visit], Awaitable[None]]


def says(data: bytes, *, then: str = "close") -> Nonsense:
    async def script(visit: Visit) -> None:
        try:
            await visit.send(data)
        except ConnectionError:
            visit.reset()
            return
        if then == "close":
            visit.close()

    return script


OK = b"HTTP/1.1 200 OK\r\n"
NO_HEAD: dict[str, Nonsense] = {
    "garbage": says(b"\x00\xff\xfe garbage \r\n\r\n" * 20),
    "http/0.9": says(b"<html>hello</html>"),
    "tls": says(b"\x15\x03\x01\x00\x02\x02\x28"),
    "closes at once": says(b""),
    "half a head": says(OK + b"Content-Ty"),
    "no status": says(b"HTTP/1.1 \r\n\r\n"),
    "odd status": says(b"HTTP/1.1 2x0 OK\r\n\r\n"),
    "endless head": says(OK + b"X-A: " + b"a" * 4_000_000),
    "many headers": says(OK + b"".join(b"X-%d: v\r\n" % n for n in range(100_000))),
    "odd length": says(OK + b"Content-Length: ten\r\n\r\n"),
    "two lengths": says(OK + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd"),
    "header without a colon": says(OK + b"nonsense\r\n\r\n"),
    "nul in a header": says(OK + b"X: a\0b\r\nContent-Length: 0\r\n\r\n"),
}


@pytest.mark.parametrize("name", NO_HEAD)
async def test_a_replica_whose_head_is_nonsense_is_a_502(name: str) -> None:
    """In the dialect asked, without a word of what it said."""
    async with living() as (roost, replica):
        healthy, replica.script = replica.script, NO_HEAD[name]
        for dialect in DIALECTS:
            asked = Conversation(f"{name} {dialect}", dialect)
            answer = await roost.request("POST", PATHS[dialect], asked.body(), asked.headers)
            assert (answer.status, answer.headers.get("x-roost-error")) == (502, "upstream_broken")
            message = told(answer, dialect)
            assert "html" not in message
            assert "garbage" not in message
        passed = await roost.request("GET", "/anything")
        assert passed.status == 502
        replica.script = healthy


BROKEN_BODY: dict[str, Nonsense] = {
    "wrong chunk size": says(OK + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n"),
    "chunk without its end": says(OK + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabcdef\r\n"),
    "chunks without the last": says(OK + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n"),
    "short body": says(OK + b"Content-Length: 10\r\n\r\nabc"),
}


@pytest.mark.parametrize("name", BROKEN_BODY)
async def test_a_replica_whose_body_is_nonsense_never_looks_complete(name: str) -> None:
    async with living() as (roost, replica):
        healthy, replica.script = replica.script, BROKEN_BODY[name]
        for dialect in DIALECTS:
            answer = await roost.watch(Conversation(f"{name} {dialect}", dialect))
            assert (answer.status, answer.complete) in ((200, False), (502, True))
        replica.script = healthy


ODD_ANSWERS: dict[str, tuple[Nonsense, bytes]] = {
    "html": (says(OK + b"Content-Type: text/html\r\nContent-Length: 5\r\n\r\n<html", then="stay"), b"<html"),
    "until close": (says(OK + b"Content-Type: text/event-stream\r\n\r\ndata: x\n\n"), b"data: x\n\n"),
    "http/1.0": (says(b"HTTP/1.0 200 OK\r\n\r\n{}"), b"{}"),
    "more than promised": (says(OK + b"Content-Length: 2\r\n\r\n{}EXTRA"), b"{}"),
    "a hint first": (says(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + OK + b"Content-Length: 2\r\n\r\n{}"), b"{}"),
    "json that is none": (
        says(OK + b"Content-Type: application/json\r\nContent-Length: 4\r\n\r\n{\xff\x00}"),
        b"{\xff\x00}",
    ),
    "stream of noise": (
        says(
            OK
            + b"Content-Type: text/event-stream\r\nContent-Length: 40\r\n\r\n"
            + b"data: [[[[\xff\n\n\x00\r\r" * 2
            + b"datadata"
        ),
        b"data: [[[[\xff\n\n\x00\r\r" * 2 + b"datadata",
    ),
}


@pytest.mark.parametrize("name", ODD_ANSWERS)
async def test_odd_answers_that_are_http_pass(name: str) -> None:
    script, body = ODD_ANSWERS[name]
    async with living() as (roost, replica):
        healthy, replica.script = replica.script, script
        for dialect in DIALECTS:
            answer = await roost.watch(Conversation(f"{name} {dialect}", dialect))
            assert (answer.status, answer.body) == (200, body)
        replica.script = healthy


async def test_a_replica_that_says_nothing_is_a_504() -> None:
    async def silent(visit: Visit) -> None:
        await visit.until_closed()

    async with replicas(1, script=silent) as (replica,):
        patience = Timeouts(first_byte_s=0.2, ready_lag_s=0.0)
        async with running(settings_for([replica], timeouts=patience), [replica]) as roost:
            for dialect in DIALECTS:
                asked = Conversation("silence", dialect)
                answer = await roost.request("POST", PATHS[dialect], asked.body(), asked.headers)
                assert (answer.status, answer.headers["x-roost-error"]) == (504, "upstream_timeout")
                assert told(answer, dialect)


# --- files and stores ------------------------------------------------------------------------------------------------

ROOST = (sys.executable, "-c", "from router.cli import main; main()")


async def command(*arguments: str, **env: str) -> tuple[int, str]:
    """Run `roost`: its exit code and what it wrote."""
    process = await asyncio.create_subprocess_exec(
        *ROOST, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env={**os.environ, **env}
    )
    try:
        async with asyncio.timeout(3 * PATIENCE_S):
            out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode is not None
    return process.returncode, out.decode()


async def test_a_typo_in_a_file_is_named_with_what_is_allowed(tmp_path: Path) -> None:
    """All typos at once, without starting anything."""
    file = tmp_path / "roost.yaml"
    file.write_text("listn: {port: 1}\nstore: {kind: redsi}\nfleets: [{name: a, policy: best}]\n")
    code, said = await command("config", "check", str(file))
    assert code == 2
    assert re.search(r"listn.*listen", said)
    assert re.search(r"store\.kind.*redis", said)
    assert re.search(r"policy.*round_robin", said)
    assert "Traceback" not in said
    assert (await command("router", "--config", str(file)))[0] == 2


async def test_a_redis_with_another_versions_keys_ends_the_router_with_a_word() -> None:
    with serving("valkey") as server:
        raw = redis.asyncio.Redis.from_url(server.url)
        await raw.set("roost:schema", "999")
        await raw.aclose()
        code, said = await command(
            "router", "--redis", server.url, "--port", "0", "--admin-port", "0", "--replica", "http://127.0.0.1:9"
        )
        assert code == 1
        last = said.strip().splitlines()[-1]
        assert last.startswith("roost: ")
        assert "999" in last
        assert "Traceback" not in said


async def test_a_port_in_use_ends_the_router_with_a_word() -> None:
    async with replicas(1) as (replica,):
        code, said = await command("router", "--store", "memory", "--port", str(replica.port), "--admin-port", "0")
        assert code == 1
        assert str(replica.port) in said
        assert "Traceback" not in said


async def test_a_redis_that_is_away_at_the_start_is_no_reason_to_wait() -> None:
    """Turns are placed blind, a session on one replica all the same; when the store comes, they are bound."""
    with serving_with("valkey") as (process, socket):
        moved = socket.with_name("later")
        store = shared_store(f"unix://{moved}", timeout_s=0.5)
        async with replicas(3) as fleet, running(settings_for(fleet, store)) as roost:

            async def ready() -> bool:
                return (await roost.request("GET", "/readyz")).status == 200

            await roost.until(ready)
            asked = Conversation("blind", header=("x-session-id", "blind"))

            async def all_there() -> bool:
                asked.grow()
                return (await roost.turn(asked)).status == 200

            await roost.until(all_there)
            status, listed = await roost.admin("GET", "/admin/replicas")
            assert status == 200
            assert {each["from_memory"] for each in listed["replicas"]} == {True}
            homes = set()
            for _ in range(4):
                asked.grow()
                homes.add((await roost.turn(asked)).replica)
            assert (await roost.decisions())[0]["blind"] is True
            assert len(homes) <= 2  # a replica that is found later may take over, once
            moved.symlink_to(socket)

            async def seeing() -> bool:
                asked.grow()
                await roost.turn(asked)
                return not (await roost.decisions())[0]["blind"]

            await roost.until(seeing)
            await roost.knows(fleet)
            last = (await roost.turn(asked)).replica
            for _ in range(3):
                asked.grow()
                assert (await roost.turn(asked)).replica == last
            await roost.idle()
        assert process.poll() is None


async def test_a_redis_that_hangs_costs_a_turn_little_and_comes_back() -> None:
    """C46: stopped, not refusing: turns go on blind, and are bound again when it goes on."""
    with serving_with("valkey") as (process, socket):
        store = shared_store(f"unix://{socket}", timeout_s=0.3)
        async with replicas(2) as fleet, running(settings_for(fleet, store), fleet) as roost:
            asked = Conversation("hang", header=("x-session-id", "hang"))
            await roost.turn(asked)
            await roost.idle()
            os.kill(process.pid, signal.SIGSTOP)
            try:
                for _ in range(3):
                    asked.grow()
                    await roost.turn(asked)
                assert (await roost.decisions())[0]["blind"] is True
            finally:
                os.kill(process.pid, signal.SIGCONT)

            async def seeing() -> bool:
                asked.grow()
                await roost.turn(asked)
                return not (await roost.decisions())[0]["blind"]

            await roost.until(seeing)


async def test_a_redis_that_forgets_everything_is_told_again() -> None:
    """FLUSHALL, or a restart without its data: members come back, added ones too, and sessions are bound anew."""
    with serving("valkey") as server:
        async with replicas(3) as fleet, running(settings_for(fleet[:2], shared_store(server.url)), fleet[:2]) as roost:
            await roost.admin("POST", "/admin/replicas", {"url": fleet[2].url})
            await roost.admin("POST", f"/admin/replicas/{fleet[1].id}/cordon")
            await roost.knows(fleet)
            asked = Conversation("forgotten", header=("x-session-id", "forgotten"))
            await roost.turn(asked)
            await roost.idle()
            raw = redis.asyncio.Redis.from_url(server.url)
            await raw.flushall()
            await raw.aclose()
            asked.grow()
            home = (await roost.turn(asked)).replica
            await roost.knows(fleet)
            assert (await roost.replicas())[fleet[1].id]["standing"] == "cordoned"
            for _ in range(3):
                asked.grow()
                assert (await roost.turn(asked)).replica == home
