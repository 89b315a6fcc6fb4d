"""A replica in virtual time: a `ReplicaModel`, one timer, and the responses under way.

As SGLang seen from outside: a stream is answered with a head before the scheduler has seen it, a full queue is told by
a 503 or inside the stream, a crash resets connections, a stopped process accepts and says nothing. Reads are handed
over from the timer that makes them, as a socket's are from the loop, and no task wakes up for them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Final

from router.domain.errors import RoostError, UpstreamBroken
from router.ports import ResponseHead
from simulations.replica_model import (
    Aborted,
    Event,
    Failed,
    Finished,
    FirstToken,
    Refused,
    ReplicaModel,
    ReplicaProfile,
    Request,
    Started,
    faster,
)

__all__ = ["Response", "SimulatedReplica"]

_STREAM: Final = ((b"content-type", b"text/event-stream"),)
_JSON: Final = ((b"content-type", b"application/json"),)
_DONE: Final = b"data: [DONE]\n\n"
_FULL_STATUS: Final = 503


@dataclass(slots=True)
class _Read:
    """Bytes on their way, or an end: an error, or None for a clean one."""

    data: bytes = b""
    last: bool = False
    error: RoostError | None = None


class Response:
    """One request at a replica and what comes of it. `head`, then reads, then an end; any may fail to come."""

    def __init__(self, job: Request) -> None:
        self.job = job
        self.head: ResponseHead | None = None
        self.headed = asyncio.Event()
        """Set when there is a head, or an error instead of one."""
        self.error: RoostError | None = None
        self.ended = asyncio.get_running_loop().create_future()
        self.held_back = False
        """Whether the network keeps what the replica says."""
        self.over = False
        """Whether the replica will say nothing more."""
        self.said_at_s = 0.0
        self._reads: list[_Read] = []
        self._receive: Callable[[bytes], None] | None = None

    def begin(self, status: int, headers: tuple[tuple[bytes, bytes], ...]) -> None:
        """The head."""
        self.head = ResponseHead(status, b"OK" if status == 200 else b"Service Unavailable", headers, None)
        if not self.held_back:
            self.headed.set()

    def say(self, data: bytes, *, last: bool = False) -> None:
        """Body bytes."""
        self.over = self.over or last
        self._reads.append(_Read(data, last))
        self._pass_on()

    def fail(self, error: RoostError) -> None:
        """The connection breaks; what it had not delivered is lost."""
        if self.over and not self._reads:
            return
        self.over = True
        self._reads = [_Read(last=True, error=error)]
        if self.head is None:
            self.error = error
            self.headed.set()
        self._pass_on()

    def take(self, receive: Callable[[bytes], None]) -> None:
        """From now on reads go there."""
        self._receive = receive
        self._pass_on()

    def leave(self) -> None:
        """Nobody reads on: what would is let go of, and with it the whole turn, without a garbage collector."""
        self._receive = None

    def let_go(self) -> None:
        """The network passes on what it kept."""
        self.held_back = False
        if self.head is not None or self.error is not None:
            self.headed.set()
        self._pass_on()

    def _pass_on(self) -> None:
        receive = self._receive
        if receive is None or self.held_back:
            return
        while self._reads and not self.ended.done():
            read = self._reads.pop(0)
            self.said_at_s = self.ended.get_loop().time()
            try:
                if read.data:
                    receive(read.data)
            except Exception as error:  # noqa: BLE001 (whatever a reader raises ends its relay, as in the real adapter)
                self.ended.set_exception(error)
                return
            if read.error is not None:
                self.ended.set_exception(read.error)
            elif read.last:
                self.ended.set_result(None)


class SimulatedReplica:
    """One URL and whatever lives there."""

    def __init__(self, name: str, profile: ReplicaProfile, seed: int) -> None:
        self.name = name
        self.url = f"http://{name}"
        self.profile = profile
        self.life = 0
        self.up = True
        self.hung = False
        self.refusing = False
        self.full = False
        self._seed = seed
        self._loop = asyncio.get_running_loop()
        self._model = ReplicaModel(profile, seed, self._loop.time())
        self._responses: dict[str, Response] = {}
        self._left: list[str] = []
        """Turns whose connection was closed while it was stopped."""
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = inf
        self._count = 0

    @property
    def incarnation(self) -> str:
        """Of the present life."""
        return f"{self.name}-life{self.life}"

    @property
    def answers(self) -> bool:
        """Whether somebody listens."""
        return self.up and not self.refusing

    def load(self) -> tuple[int, int, int]:
        """Turns that run, turns that wait, and their tokens to prefill."""
        load = self._model.load(self._loop.time())
        self._advance()
        return load

    # --- turns ---

    def accept(self, response: Response) -> None:
        """A request arrives."""
        self._responses[response.job.rid] = response
        if not self.hung:
            self._submit(response)

    def abort(self, response: Response) -> None:
        """Its connection was closed from the other side."""
        if self._responses.pop(response.job.rid, None) is None or not self.up:
            return
        if self.hung:
            self._left.append(response.job.rid)
            return
        self._model.abort(self._loop.time(), response.job.rid)
        self._advance()

    def _submit(self, response: Response) -> None:
        self._count += 1
        if self.full:
            self._refuse(response)
            return
        self._model.submit(self._loop.time(), response.job)
        self._advance()
        if response.head is None:
            response.begin(200, _STREAM)

    def _refuse(self, response: Response) -> None:
        """A full queue, told in one of its two forms in turn."""
        self._responses.pop(response.job.rid, None)
        fault = {"object": "error", "message": "The request queue is full.", "type": "SERVICE_UNAVAILABLE", "code": 503}
        if self._count % 2:
            response.begin(_FULL_STATUS, _JSON)
            response.say(json.dumps(fault).encode(), last=True)
        else:
            response.begin(200, _STREAM)
            response.say(b"data: " + json.dumps({"error": fault}).encode() + b"\n\n" + _DONE, last=True)

    # --- time ---

    def _advance(self) -> None:
        if self.hung:
            return
        for event in self._model.advance(self._loop.time()):
            self._take(event)
        due_s = self._model.next_event_s()
        if due_s != self._due_s:
            if self._timer is not None:
                self._timer.cancel()
            self._due_s = due_s
            self._timer = self._loop.call_at(due_s, self._wake) if due_s < inf else None

    def _wake(self) -> None:
        self._due_s, self._timer = inf, None
        self._advance()

    def _take(self, event: Event) -> None:
        response = self._responses.get(event.rid)
        if response is None or isinstance(event, Started):
            return
        if response.head is None and not (isinstance(event, Refused) and event.reason == "queue_full"):
            response.begin(200, _STREAM)
        match event:
            case FirstToken():
                response.say(_word(event.rid))
            case Finished():
                del self._responses[event.rid]
                response.say(_end(event), last=True)
            case Refused() if response.head is None:
                self._refuse(response)
            case Aborted() | Failed() | Refused():
                del self._responses[event.rid]
                fault = {"message": "The request was aborted.", "type": "BAD_REQUEST", "code": 400}
                response.say(b"data: " + json.dumps({"error": fault}).encode() + b"\n\n" + _DONE, last=True)
            case _:
                pass

    # --- what goes wrong ---

    def crash(self) -> None:
        """The process is gone."""
        self.up = self.hung = False
        self._left.clear()
        self._stop_timer()
        self.reset()

    def start(self) -> None:
        """A new life."""
        if self.up:
            return
        self.up = True
        self.life += 1
        self._model = ReplicaModel(self.profile, self._seed + self.life, self._loop.time())

    def hang(self) -> None:
        """Stopped."""
        if self.up:
            self.hung = True
            self._stop_timer()

    def go_on(self) -> None:
        """No longer stopped: what came in meanwhile is read now."""
        if not self.hung:
            return
        self.hung = False
        held = list(self._responses.values())
        left, self._left = self._left, []
        for rid in left:
            self._model.abort(self._loop.time(), rid)
        self._advance()
        for response in held:
            if response.head is None and response.job.rid in self._responses:
                self._submit(response)

    def slow(self, times: float) -> None:
        """Everything it begins from now on takes so many times as long."""
        self._model.profile = faster(self.profile, 1 / times)

    def reset(self) -> None:
        """Every connection breaks."""
        broken, self._responses = self._responses, {}
        for response in broken.values():
            if self.up and not self.hung:
                self._model.abort(self._loop.time(), response.job.rid)
            response.fail(UpstreamBroken("connection reset", answered=response.head is not None))
        if self.up:
            self._advance()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._due_s, self._timer = inf, None

    def close(self) -> None:
        """Never wake again."""
        self.up = False
        self._stop_timer()


def _word(rid: str) -> bytes:
    """The first output, like no other turn's."""
    return f'data: {{"choices":[{{"index":0,"delta":{{"content":"{rid}"}},"finish_reason":null}}]}}\n\n'.encode()


def _end(event: Finished) -> bytes:
    """The end of a chat stream with its usage, as SGLang writes it."""
    usage = (
        f'{{"prompt_tokens":{event.prompt_tokens},"completion_tokens":{event.output_tokens},'
        f'"total_tokens":{event.prompt_tokens + event.output_tokens},'
        f'"prompt_tokens_details":{{"cached_tokens":{event.device_tokens + event.host_tokens}}}}}'
    )
    return (
        'data: {"choices":[{"index":0,"delta":{},"finish_reason":"length"}]}\n\n'
        f'data: {{"choices":[],"usage":{usage}}}\n\n'
    ).encode() + _DONE
