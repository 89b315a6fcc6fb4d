"""Response bodies, read in passing.

The relay hands each chunk of a body to a reader and to the client; the reader never delays, changes or keeps it. It
knows no I/O and no clock: `feed` takes bytes, attributes tell what they meant, and the caller stamps the time when
`first_output` flips. Any re-chunking of a body leaves the same attributes, and no bytes whatever make a reader raise.

How it stays cheap: only events that can matter are decoded. In the dialects that name their events a delta is known by
its first line, in the others by how SGLang ends it. A text that looks like `"usage":{`, `[DONE]` or `event: error`
stands escaped inside a JSON string and is never taken for one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from router.domain.outcome import Usage
from router.domain.turn import Dialect
from router.upstream.body import UNREADABLE, BodyReader, Reader
from router.upstream.event_stream import EVENT_MAX_BYTES, StreamReader, fields
from router.upstream.usage import add, merge, usage_shape

__all__ = ["ChatStream", "GenerateStream", "MessagesStream", "ResponsesStream", "reader_for", "stream_reader"]


def reader_for(dialect: Dialect, content_type: bytes | None, content_encoding: bytes | None = None) -> Reader:
    """The reader for a body with these response headers; one that only counts where it is compressed or no JSON."""
    if content_encoding is not None and content_encoding.strip().lower() not in (b"", b"identity"):
        return Reader()
    media = (content_type or b"").partition(b";")[0].strip().lower()
    if media == b"text/event-stream":
        return stream_reader(dialect)
    if media == b"application/json" or (media.startswith(b"application/") and media.endswith(b"+json")):
        return BodyReader(dialect)
    return Reader()


def stream_reader(dialect: Dialect, event_max_bytes: int = EVENT_MAX_BYTES) -> StreamReader:
    """The reader for an event stream of `dialect`; of an unknown path it is read as chat is."""
    return _STREAMS.get(dialect, ChatStream)(event_max_bytes)


# --- chat and completions: entrypoints/openai/serving_chat.py, serving_completions.py ---------------------------------

_NULL: Final = msgspec.Raw(b"null")
_EMPTY: Final = msgspec.Raw(b'""')


class _Choice(msgspec.Struct, gc=False):
    delta: msgspec.Raw = _NULL
    text: msgspec.Raw = _NULL
    finish_reason: msgspec.Raw = _NULL


class _Chunk(msgspec.Struct, gc=False):
    choices: list[_Choice] | None = None
    usage: Any = None
    error: Any = None


_chunk = msgspec.json.Decoder(_Chunk).decode
_delta = msgspec.json.Decoder(dict[str, Any]).decode
_openai_usage = usage_shape(Dialect.CHAT)
# How SGLang ends a chunk that brings output: nothing comes after its choices (openai/sse_utils.py `StreamChunk`;
# openai/protocol.py `CompletionStreamResponse`, and tool calls in chat).
_PLAIN_ENDS: Final = (
    b'"finish_reason":null,"matched_stop":null}]}\n\n',
    b'"finish_reason":null,"matched_stop":null}],"usage":null}\n\n',
)


class ChatStream(StreamReader):
    """Chat, completions, and event streams of unknown paths."""

    __slots__ = ()

    def _event(self, event: bytes) -> None:
        if self.output_events and event.endswith(_PLAIN_ENDS) and event.startswith(b"data: {"):
            self.output_events += 1
            return
        _, data = fields(event)
        if data is None:
            return
        if data == b"[DONE]":
            self.terminal = True
            return
        chunk = self._decode(_chunk, data)
        if chunk is None:
            return
        if chunk.usage is not None:
            self.usage = merge(self.usage, _openai_usage(chunk.usage))
        if chunk.error is not None:
            self._fail(chunk.error)
        elif chunk.choices:
            # SGLang sends the chunk that holds only the role when the first token is there, not before.
            self.first_output = True
            for choice in chunk.choices:
                if self._carries(choice):
                    self.output_events += 1
                    return

    def _carries(self, choice: _Choice) -> bool:
        """Whether a choice brings output; once some came, all do that follow but the one with the finish reason."""
        if choice.text != _NULL:
            return choice.text != _EMPTY
        if choice.finish_reason != _NULL:
            return False
        if self.output_events:
            return choice.delta != _NULL
        try:
            return any(value for key, value in _delta(choice.delta).items() if key != "role")
        except UNREADABLE:
            return False


# --- generate: entrypoints/http_server.py, serve_generate_request -----------------------------------------------------


class _Generated(msgspec.Struct, gc=False):
    meta_info: Any = None
    error: Any = None


_generated = msgspec.json.Decoder(_Generated).decode
_meta_usage = usage_shape(Dialect.GENERATE)


class GenerateStream(StreamReader):
    """SGLang's own stream.

    Every event repeats all the text so far, so that decoding each would cost the square of the reply: only the first is
    decoded, for its prompt, and the end of each item of a batch, for its counts.
    """

    __slots__ = ()

    def _event(self, event: bytes) -> None:
        if self.first_output and event.rfind(b'"finish_reason":null') > 0:
            self.output_events += 1
            return
        _, data = fields(event)
        if data is None:
            return
        if data == b"[DONE]":
            self.terminal = True
            return
        generated = self._decode(_generated, data)
        if generated is None:
            return
        if generated.error is not None:
            self._fail(generated.error)
        meta = generated.meta_info
        if not isinstance(meta, dict):
            return
        reason = meta.get("finish_reason")
        if isinstance(reason, dict) and reason.get("status_code") is not None:
            self._fail(reason)  # an abort (managers/schedule_batch.py, FINISH_ABORT); without a status, one asked for
        else:
            self.first_output = True
            self.output_events += 1
            self._count(_meta_usage(meta), item_ended=reason is not None)

    def _count(self, usage: Usage, *, item_ended: bool) -> None:
        if not item_ended:
            if self.usage.output_tokens is None:
                self.usage = Usage(usage.prompt_tokens, usage.cached_tokens)
        elif self.usage.output_tokens is None:
            self.usage = usage
        else:
            self.usage = add(self.usage, usage)


# --- messages: entrypoints/anthropic/serving.py, _generate_anthropic_stream -------------------------------------------


class _Message(msgspec.Struct, gc=False):
    usage: Any = None


class _MessageEvent(msgspec.Struct, gc=False):
    type: Any = None
    message: _Message | None = None
    usage: Any = None
    error: Any = None


_message_event = msgspec.json.Decoder(_MessageEvent).decode
_anthropic_usage = usage_shape(Dialect.MESSAGES)


class MessagesStream(StreamReader):
    """Anthropic's stream: named events, the prompt's counts in the first, the output's in the last but one."""

    __slots__ = ()

    _LINES = 3

    def _event(self, event: bytes) -> None:
        if event.startswith(b"event: content_block_delta\ndata: "):
            self.first_output = True
            self.output_events += 1
            return
        name, data = fields(event)
        if data is None:
            return
        if not name:
            named = self._decode(_message_event, data)
            name = named.type.encode("utf-8", "replace") if named is not None and isinstance(named.type, str) else b""
        if name == b"message_stop":
            self.terminal = True
        elif name in (b"content_block_start", b"content_block_delta", b"content_block_stop"):
            self.first_output = True
            self.output_events += name == b"content_block_delta"
        elif name in (b"message_start", b"message_delta", b"error"):
            self._tell(name, data)

    def _tell(self, name: bytes, data: bytes) -> None:
        told = self._decode(_message_event, data)
        if name == b"error":
            self._fail(None if told is None else told.error)
        elif told is None:
            return
        elif name == b"message_delta":
            self.first_output = True
            self.usage = merge(self.usage, _anthropic_usage(told.usage))
        elif told.message is not None:
            start = _anthropic_usage(told.message.usage)
            # The output count here says nothing yet.
            self.usage = merge(self.usage, Usage(start.prompt_tokens, start.cached_tokens))


# --- responses: entrypoints/openai/serving_responses.py, responses_stream_generator* ----------------------------------


class _Response(msgspec.Struct, gc=False):
    id: Any = None
    usage: Any = None
    error: Any = None


class _ResponseEvent(msgspec.Struct, gc=False):
    type: Any = None
    sequence_number: Any = None
    response: _Response | None = None
    error: Any = None
    code: Any = None
    message: Any = None


_response_event = msgspec.json.Decoder(_ResponseEvent).decode
_responses_usage = usage_shape(Dialect.RESPONSES)
_BEFORE_OUTPUT: Final = frozenset((b"response.created", b"response.queued", b"response.in_progress"))
_ENDS: Final = frozenset((b"response.completed", b"response.incomplete", b"response.failed", b"response.cancelled"))


class ResponsesStream(StreamReader):
    """OpenAI's typed stream: the id in the first event, the counts in the last, all numbered in between."""

    __slots__ = ()

    _LINES = 3

    def _event(self, event: bytes) -> None:
        if event.startswith(b"event: response."):
            first_line = event.find(b"\n")
            if event.endswith(b".delta", 0, first_line) and event.startswith(b"data: ", first_line + 1):
                self._output(is_delta=True)
                return
        name, data = fields(event)
        if data is None or data == b"[DONE]":
            return
        if not name:
            named = self._decode(_response_event, data)
            name = named.type.encode("utf-8", "replace") if named is not None and isinstance(named.type, str) else b""
        if name in {b"response.created", b"error"} or name in _ENDS:
            self._tell(name, data)
        elif name in _BEFORE_OUTPUT:
            self._number(None)
        elif name.startswith(b"response."):
            self._output(is_delta=name.endswith(b".delta"))

    def _output(self, *, is_delta: bool) -> None:
        self.first_output = True
        self.output_events += is_delta
        if self.next_sequence is not None:
            self.next_sequence += 1

    def _number(self, told: object) -> None:
        if type(told) is int and 0 <= told < 2**53:
            self.next_sequence = told + 1
        elif self.next_sequence is not None:
            self.next_sequence += 1

    def _skip(self) -> None:
        super()._skip()
        self._number(None)

    def _tell(self, name: bytes, data: bytes) -> None:
        self.terminal = self.terminal or name in _ENDS
        told = self._decode(_response_event, data)
        self._number(None if told is None else told.sequence_number)
        response = None if told is None else told.response
        if name == b"error":
            flat = None if told is None else {"code": told.code, "message": told.message}
            self._fail(told.error if told is not None and told.error is not None else flat)
        elif name == b"response.failed":
            self._fail(None if response is None else response.error)
        elif name not in {b"response.created", b"response.cancelled"}:
            self.first_output = True
        if response is not None:
            self._name(response.id)
            self.usage = merge(self.usage, _responses_usage(response.usage))


_STREAMS: Final[Mapping[Dialect, type[StreamReader]]] = {
    Dialect.GENERATE: GenerateStream,
    Dialect.MESSAGES: MessagesStream,
    Dialect.RESPONSES: ResponsesStream,
}
