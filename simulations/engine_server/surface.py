"""All of SGLang's paths that are no turns, and `/simulate/…`, which is this simulation's own.

POST /simulate/crash {"restart_after_s": seconds | null}   die now: connections break, nobody listens, KV is gone
"""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from aiohttp import web

from simulations.engine import tokens, told
from simulations.engine.anthropic import Messages
from simulations.engine.asked import MESSAGES, chat_prompt, decoded
from simulations.engine.openai import openai_fault
from simulations.engine.prompts import Fault
from simulations.engine_server.turns import VOICES, json_response, turn
from simulations.replica_model import Request

if TYPE_CHECKING:
    from simulations.engine_server.server import Engine

__all__ = ["routes"]

_HEALTH_POLL_S = 1.0
"""`/health` looks once a second whether its token has come (entrypoints/http_server.py)."""
_HEALTH_TIMEOUT_S = 20.0
_FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. "
    "(When there are running or waiting requests, the operation will not be performed.)\n"
)


class _Surface:
    """Handlers of one engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def turn(self, request: web.Request) -> web.StreamResponse:
        return await turn(self.engine, request)

    async def ready(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self.engine.draining else 200)

    async def health(self, _: web.Request) -> web.Response:
        """One token, generated: never cached, and slow when the engine is."""
        engine = self.engine
        if engine.draining:
            return web.Response(status=503)
        rid = f"HEALTH_CHECK_{time.time_ns()}"
        job = Request(rid, (), prompt_tokens=1, output_tokens=1, max_tokens=1)
        due_s = engine.driver.now_s() + _HEALTH_POLL_S / engine.me.time_scale
        with engine.driver.running(job, stream=False) as run:
            try:
                async with asyncio.timeout(_HEALTH_TIMEOUT_S / engine.me.time_scale):
                    while run.end is None:
                        await run.news()
                    await asyncio.sleep(due_s - engine.driver.now_s())
            except TimeoutError:
                return web.Response(status=503)
        return web.Response(status=200)

    async def root(self, _: web.Request) -> web.Response:
        return json_response("SGLang is running")

    async def server_info(self, _: web.Request) -> web.Response:
        return json_response(told.server_info(self.engine.me, self.engine.driver.snapshot()))

    async def model_info(self, _: web.Request) -> web.Response:
        return json_response(told.model_info(self.engine.me))

    async def models(self, _: web.Request) -> web.Response:
        card = told.model_card(self.engine.me, int(time.time()))
        return json_response({"object": "list", "data": [card]})

    async def model(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name == self.engine.me.served_model:
            return json_response(told.model_card(self.engine.me, int(time.time())))
        message = f"The model '{name}' does not exist"
        error = {"message": message, "type": "invalid_request_error", "param": "model", "code": "model_not_found"}
        return json_response({"error": error}, 404)

    async def loads(self, request: web.Request) -> web.Response:
        engine = self.engine
        load = told.loads(engine.me, engine.driver.snapshot(), time.time())
        if request.query.get("format") == "prometheus":
            return web.Response(text=told.loads_text(load), content_type="text/plain", charset="utf-8")
        accelerator = engine.me.profile.accelerator
        head = {
            "timestamp": datetime.now(UTC).isoformat(),
            "version": told.VERSION,
            "accelerator": accelerator or None,
            "num_accelerators": engine.me.profile.tp_size,
        }
        return json_response({**head, "loads": [load]})

    async def metrics(self, _: web.Request) -> web.Response:
        engine = self.engine
        text = told.metrics(engine.me, engine.driver.snapshot(), engine.ledger)
        return web.Response(text=text, content_type="text/plain", charset="utf-8")

    async def flush_cache(self, _: web.Request) -> web.Response:
        if self.engine.driver.flush():
            return web.Response(text=_FLUSHED)
        return web.Response(text="Flush cache failed.\n", status=400)

    async def abort_request(self, request: web.Request) -> web.Response:
        """By the beginning of ids; always 200."""
        body = decoded(await request.read())
        if body.get("abort_all") is True:
            self.engine.driver.abort("")
        elif isinstance(body.get("rid"), str) and body["rid"]:
            self.engine.driver.abort(body["rid"])
        return web.Response(status=200)

    async def tokenize(self, request: web.Request) -> web.Response:
        body = decoded(await request.read())
        given = body.get("prompt")
        texts = given if isinstance(given, list) else [given]
        if isinstance(body.get("messages"), list):
            found = [tokens.ids(chat_prompt("", body))]
        elif all(isinstance(text, str) for text in texts):
            found = [tokens.ids(str(text).encode("utf-8", "surrogatepass")) for text in texts]
        else:
            raise Fault(f"Invalid prompt type: {type(given)}. Expected str or List[str].")
        counts = [len(each) for each in found]
        several = isinstance(given, list)
        reply = {"tokens": found if several else found[0], "count": counts if several else counts[0]}
        return json_response({**reply, "max_model_len": self.engine.me.profile.context_tokens})

    async def detokenize(self, request: web.Request) -> web.Response:
        body = decoded(await request.read())
        given = body.get("tokens")
        if not isinstance(given, list) or not all(type(each) is int for each in given):
            raise Fault("tokens: a list of token ids is needed")
        return json_response({"text": tokens.bytes_of_ids(given).rstrip(b"\0").decode(errors="replace")})

    async def count_tokens(self, request: web.Request) -> web.Response:
        try:
            prompt = chat_prompt(MESSAGES, decoded(await request.read()))
        except Fault as fault:
            status, body = Messages.fault(fault.status, fault.message)
            return json_response(body, status)
        return json_response({"input_tokens": tokens.count(prompt)})

    async def crash(self, request: web.Request) -> web.Response:
        body = decoded(await request.read()) if request.can_read_body else {}
        after_s = body.get("restart_after_s")
        self.engine.crash(after_s if isinstance(after_s, int | float) else None)
        return web.Response(status=202)


def routes(engine: Engine) -> list[web.RouteDef]:
    """All of an engine's paths."""
    here = _Surface(engine)
    get = {
        "/": here.root,
        "/ready": here.ready,
        "/health": here.health,
        "/health_generate": here.health,
        "/server_info": here.server_info,
        "/get_server_info": here.server_info,
        "/model_info": here.model_info,
        "/get_model_info": here.model_info,
        "/v1/models": here.models,
        "/v1/models/{name:.+}": here.model,
        "/v1/loads": here.loads,
        "/metrics": here.metrics,
        "/metrics/": here.metrics,
        "/flush_cache": here.flush_cache,
    }
    post = {
        **dict.fromkeys(VOICES, here.turn),
        "/v1/messages/count_tokens": here.count_tokens,
        "/tokenize": here.tokenize,
        "/v1/tokenize": here.tokenize,
        "/detokenize": here.detokenize,
        "/flush_cache": here.flush_cache,
        "/abort_request": here.abort_request,
        "/simulate/crash": here.crash,
    }
    heads = {path: path == "/" for path in get}
    return [
        *(web.get(path, handler, allow_head=heads[path]) for path, handler in get.items()),
        *(web.post(path, handler) for path, handler in post.items()),
        web.put("/generate", here.turn),
    ]


@web.middleware
async def errors(request: web.Request, handler: object) -> web.StreamResponse:
    """Faults and unknown paths, in SGLang's words."""
    assert callable(handler)
    try:
        response: web.StreamResponse = await handler(request)
        return response
    except Fault as fault:
        status, body = openai_fault(fault.status, fault.message)
        return json_response(body, status)
    except web.HTTPNotFound:
        return json_response({"detail": "Not Found"}, 404)
    except web.HTTPMethodNotAllowed as refused:
        response = json_response({"detail": "Method Not Allowed"}, 405)
        response.headers["Allow"] = ", ".join(sorted(refused.allowed_methods))
        return response
