"""The five dialects over HTTP: read, run in the model, say."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Final

import msgspec
from aiohttp import web

from simulations.engine import tokens
from simulations.engine.anthropic import Messages
from simulations.engine.asked import CHAT, COMPLETIONS, GENERATE, MESSAGES, RESPONSES, Asked, decoded, read
from simulations.engine.native import Generate
from simulations.engine.openai import Chat, Completions
from simulations.engine.prompts import Fault
from simulations.engine.responses import Responses
from simulations.engine.voice import QUEUE_FULL, Outcome, Prompted, Voice
from simulations.engine_server.driver import Run
from simulations.replica_model import Aborted, Finished, Refused, Request, keys_of_bytes

if TYPE_CHECKING:
    from simulations.engine_server.server import Engine

__all__ = ["VOICES", "json_response", "turn"]

VOICES: Final[dict[str, type[Voice]]] = {
    CHAT: Chat,
    COMPLETIONS: Completions,
    MESSAGES: Messages,
    RESPONSES: Responses,
    GENERATE: Generate,
}
LENGTH_HEADER: Final = "x-simulate-output-tokens"
"""Of this simulation alone: how long the answer would be if nothing cut it, where a dialect has no `ignore_eos`."""
_ID_PREFIX: Final = {MESSAGES: "msg_", RESPONSES: "resp_"}
_REFUSALS: Final = {
    "queue_full": (503, QUEUE_FULL),
    "displaced": (503, "The request is aborted by a higher priority request."),
    "too_long": (400, "The prompt does not fit into the KV cache."),
}


def json_response(body: object, status: int = 200) -> web.Response:
    """Compact JSON, as SGLang writes it."""
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")


async def turn(engine: Engine, request: web.Request) -> web.StreamResponse:
    """Answer one turn."""
    try:
        return await _turn(engine, request)
    except ConnectionResetError:  # the client left while it was being written to, and this task is about to be told
        return web.Response()


async def _turn(engine: Engine, request: web.Request) -> web.StreamResponse:
    path = request.path
    voice_of = VOICES[path]
    try:
        asked = await _asked(engine, request)
    except Fault as fault:
        status, body = voice_of.fault(fault.status, fault.message)
        return json_response(body, status)
    rid = _rid(asked, request, uuid.uuid4().hex)
    reply_id = rid if asked.rid is not None else _ID_PREFIX.get(path, "") + rid
    voice = voice_of(asked, reply_id, int(time.time()), cache_report=engine.me.cache_report)
    if (excess := _excess(engine, asked)) and (voice.holds_head or not asked.stream):
        status, body = voice.fault(400, excess)
        return json_response(body, status)
    if excess:
        response = await _head(request)
        await response.write(voice.opening() + voice.broken(400, excess))
        return response
    text, job, finish = _job(engine, asked, request, rid)
    with engine.driver.running(job, stream=asked.stream) as run:
        if asked.stream:
            return await _stream(engine, request, voice, run, text, finish)
        while run.end is None:
            await run.news()
        if isinstance(run.end, Finished | Aborted):
            return json_response(voice.whole(_outcome(engine, run, run.end, text, finish)))
        status, body = voice.fault(*_reason(run))
        return json_response(body, status)


async def _asked(engine: Engine, request: web.Request) -> Asked:
    if request.content_type != "application/json":
        raise Fault("Unsupported Media Type: Only 'application/json' is allowed")
    asked = read(request.path, decoded(await request.read()), engine.me.served_model)
    rid = _rid(asked, request, "")
    if engine.driver.knows(rid):
        raise Fault(f"Duplicate request ID detected: {rid}")
    return asked


def _rid(asked: Asked, request: web.Request, otherwise: str) -> str:
    """The engine's own id of a turn; headers override it as with SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES=1."""
    override = request.headers.get("x-override-rid") if asked.path not in {COMPLETIONS, RESPONSES} else None
    return override or asked.rid or otherwise


def _excess(engine: Engine, asked: Asked) -> str:
    """Why a prompt is too long; empty if it is not."""
    context, given = engine.me.profile.context_tokens, asked.prompt_tokens
    if given >= context:
        return f"The input ({given} tokens) is longer than the model's context length ({context} tokens)."
    if given > engine.me.input_tokens_max:
        return (
            f"Input length ({given} tokens) exceeds the maximum allowed length ({engine.me.input_tokens_max} tokens)."
        )
    return ""


def _job(engine: Engine, asked: Asked, request: web.Request, rid: str) -> tuple[str, Request, str]:
    """What will be said, the model's request for it, and why it will end."""
    room = engine.me.profile.context_tokens - asked.prompt_tokens
    limit = room if asked.max_tokens is None else min(asked.max_tokens, room)
    wish = request.headers.get(LENGTH_HEADER, "")
    if asked.exact:
        natural = limit
    elif wish.isascii() and wish.isdigit():
        natural = max(1, int(wish))
    else:
        natural = tokens.natural_output_tokens(engine.me.seed, asked.prompt)
    output = min(natural, limit)
    text = tokens.said(engine.me.seed, asked.prompt, output)
    page_bytes = engine.me.profile.page_tokens * tokens.TOKEN_BYTES
    override = request.headers.get("x-override-priority", "")
    job = Request(
        rid=rid,
        pages=keys_of_bytes(asked.prompt + text, page_bytes, asked.namespace),
        prompt_tokens=asked.prompt_tokens,
        output_tokens=output,
        max_tokens=limit,
        priority=int(override) if override.lstrip("-").isdigit() else asked.priority,
    )
    return text.decode(), job, "stop" if natural < limit or (natural == limit and not asked.exact) else "length"


async def _head(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    return response


async def _stream(
    engine: Engine, request: web.Request, voice: Voice, run: Run, text: str, finish: str
) -> web.StreamResponse:
    """Say a turn as it comes."""
    response = None
    if not voice.holds_head:
        response = await _head(request)
        if opening := voice.opening():
            await response.write(opening)
    sent = 0
    while True:
        await run.news()
        end = run.end
        well = end is None or isinstance(end, Finished | Aborted)
        said = end.output_tokens if isinstance(end, Finished | Aborted) else run.said
        chunk = []
        if said > sent and well:
            if not sent:
                voice.prompted = _prompted(run)
                chunk.append(voice.first())
            chunk.append(voice.delta(text[sent * tokens.TOKEN_BYTES : said * tokens.TOKEN_BYTES]))
            sent = said
        if isinstance(end, Finished | Aborted):
            chunk.append(voice.closing(_outcome(engine, run, end, text, finish)))
        elif end is not None:
            chunk.append(voice.broken(*_reason(run)))
        if chunk:
            response = response or await _head(request)
            for piece in chunk:
                if piece:
                    await response.write(piece)
        if end is not None:
            return response or await _head(request)


def _prompted(run: Run) -> Prompted:
    started = run.started
    if started is None:
        return Prompted(run.prompt_tokens, 0, 0)
    return Prompted(run.prompt_tokens, started.device_tokens, started.host_tokens)


def _outcome(engine: Engine, run: Run, end: Finished | Aborted, text: str, finish: str) -> Outcome:
    """What became of a turn; one that was aborted ends like any other, with what it had said, as in SGLang."""
    done = isinstance(end, Finished)
    since = run.arrived_s
    started_s = end.at_s if run.started is None else run.started.at_s
    first_s = end.at_s if run.first_s is None else run.first_s
    outcome = Outcome(
        prompted=_prompted(run),
        text=text[: end.output_tokens * tokens.TOKEN_BYTES],
        output_tokens=end.output_tokens,
        finish=finish if done else "abort",
        retractions=end.retractions if isinstance(end, Finished) else 0,
        times_s=(started_s - since, first_s - since, end.at_s - since),
    )
    if done:
        engine.ledger.ended(outcome, stream=run.stream)
    return outcome


def _reason(run: Run) -> tuple[int, str]:
    """Status and words for a turn that did not end well."""
    match run.end:
        case Refused(reason=reason):
            return _REFUSALS[reason]
        case _:
            return 500, "Out of memory even after retracting all other requests in the decode batch."
