"""Counts tokens in answers that the gateway passes on unchanged. Pure.

The counter cuts a stream only where an event ends: the client receives whole events, so that the
gateway can end a broken stream with an error event. Bytes and their order stay the same, but for
the event with the usage, if the gateway has asked for it and the client has not.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw, Struct

# The longest events are those with log probabilities of twenty alternatives: some 10 KB per token.
EVENT_BYTES_MAX = 4 << 20


class TooLong(Exception):
    """An event is longer than `EVENT_BYTES_MAX`."""


class _Delta(Struct):
    """The text that an event of a chat adds to the answer."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: Raw = Raw(b"null")


class _Choice(Struct):
    """One of the answers in an event: with `n` > 1 a request has several."""

    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _Details(Struct, frozen=True):
    cached_tokens: int | None = None


class Usage(Struct, frozen=True):
    """What an engine counts of a request."""

    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    # As a response has them.
    output_tokens: int | None = None
    input_tokens_details: _Details | None = None

    @property
    def answered_tokens(self) -> int:
        """Tokens of the answer."""
        return max(0, self.completion_tokens or self.output_tokens or 0)

    @property
    def found_tokens(self) -> int | None:
        """Tokens of the prompt that the engine had or loaded; None if it does not say. vLLM leaves
        out a zero."""
        details = self.prompt_tokens_details or self.input_tokens_details
        return None if details is None else max(0, details.cached_tokens or 0)


NO_USAGE = Usage()


class _Response(Struct):
    usage: Usage | None = None
    error: Raw = Raw(b"null")


class _Event(Struct):
    """An event of a stream, or a whole answer, which has the same fields."""

    choices: list[_Choice] = []
    usage: Usage | None = None
    error: Raw = Raw(b"null")
    # Of the events of a response (`/v1/responses`).
    type: str = ""
    response: _Response | None = None


class _Error(Struct):
    code: Any = None


_event = msgspec.json.Decoder(_Event)
_whole = msgspec.json.Decoder(_Response)
_error = msgspec.json.Decoder(_Error)


class Counter:
    """Parses a stream of server-sent events as it passes.

    `tokens` so far: one per event that adds anything to an answer, or the counts in the event
    itself (`token_ids`, `usage`). `events`: how many had tokens. `ended`: an event had a
    `finish_reason`, or [DONE] came. `failed`: an event carried an error; `error` is its JSON, and
    `error_status` its HTTP status, 0 if it has none. `found_tokens`: see `Usage`. `hides_usage`:
    the event that has nothing but the usage is read and not passed on.
    """

    __slots__ = (
        *("_hides_usage", "_tail", "ended", "error", "error_status", "events", "failed"),
        *("found_tokens", "tokens"),
    )

    def __init__(self, *, hides_usage: bool = False) -> None:
        self._hides_usage = hides_usage
        self._tail = b""
        self.found_tokens: int | None = None
        self.tokens = 0
        self.events = 0
        self.ended = False
        self.failed = False
        self.error_status = 0
        self.error = b""

    def feed(self, data: bytes) -> bytes:
        """Add received bytes, and return the complete events that were not returned before. Raises
        TooLong."""
        data = self._tail + data if self._tail else data
        end = _end_of_events(data)
        if len(data) - end > EVENT_BYTES_MAX:
            raise TooLong(f"{EVENT_BYTES_MAX} bytes in an event")
        self._tail, whole = data[end:], data[:end]
        for line in whole.splitlines():
            if line.startswith(b"data:"):
                before = self.tokens
                event = self._read(line[5:].strip())
                counts_only = event is not None and _only_usage(event)
                self.events += self.tokens > before and not counts_only
                if self._hides_usage and counts_only:
                    ahead, _, behind = whole.partition(line)
                    whole = ahead + behind.lstrip(b"\r\n")
        return whole

    def rest(self) -> bytes:
        """The bytes after the last complete event. Empties the buffer."""
        rest, self._tail = self._tail, b""
        return rest

    def _read(self, data: bytes) -> _Event | None:
        if data == b"[DONE]":
            self.ended = True
            return None
        try:
            event = _event.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self.tokens += 1  # an unknown format, which the client may understand
            return None
        if bytes(event.error) != b"null" and not self.failed:
            self.failed, self.error_status = True, _status(event.error)
            self.error = bytes(event.error)
        if event.type:
            self._read_response(event)
        for choice in event.choices:
            self.tokens += _tokens(choice)
            self.ended = self.ended or choice.finish_reason is not None
        if event.usage is not None:
            self._count(event.usage)
        return event

    def _count(self, usage: Usage) -> None:
        self.tokens = max(self.tokens, usage.answered_tokens)
        if usage.found_tokens is not None:
            self.found_tokens = usage.found_tokens

    def _read_response(self, event: _Event) -> None:
        """An event of a response: a piece of it, or its end."""
        self.tokens += event.type.endswith(".delta")
        if event.type in ("response.completed", "response.incomplete"):
            self.ended = True
        elif event.type in ("response.failed", "error") and not self.failed:
            self.failed = True
            self.error = bytes(event.error if event.response is None else event.response.error)
        if event.response is not None and event.response.usage is not None:
            self._count(event.response.usage)


def usage_in(body: bytes) -> Usage:
    """The usage in an answer that is not streamed; `NO_USAGE` if it contains none."""
    try:
        return _whole.decode(body).usage or NO_USAGE
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return NO_USAGE


def _only_usage(event: _Event) -> bool:
    """Whether this is the event before [DONE] that `stream_options.include_usage` adds."""
    plain = not event.choices and not event.type and bytes(event.error) == b"null"
    return plain and event.usage is not None


def _status(error: Raw) -> int:
    try:
        code = _error.decode(error).code
    except (msgspec.DecodeError, UnicodeDecodeError):
        return 0
    return code if isinstance(code, int) else 0


def _tokens(choice: _Choice) -> int:
    if choice.token_ids is not None:
        return len(choice.token_ids)
    delta = choice.delta
    if delta is None:
        return 1 if choice.text else 0
    texts = (delta.content, delta.reasoning, delta.reasoning_content, delta.refusal)
    return 1 if any(texts) or bytes(delta.tool_calls) not in (b"null", b"[]") else 0


def _end_of_events(data: bytes) -> int:
    """The offset where the last complete event ends; 0 if there is none. Lines end with LF, CRLF or
    CR, those of a stream alike."""
    found = ((data.rfind(end), len(end)) for end in (b"\n\n", b"\n\r\n", b"\r\r"))
    return max(at + length if at >= 0 else 0 for at, length in found)
