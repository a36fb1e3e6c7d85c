"""How a stream whose instance breaks off goes on at another one. Pure.

    ask, with `return_token_ids`  ->  instance A: events with token ids, which are seen here
                                      A breaks off
    prompt + tokens so far        ->  instance B, as a completion: events, made to look like A's

What the client has is a text, and what has to be continued are tokens; an engine withholds text
that is not complete (half a character), so that the last tokens that were seen may not be in the
text yet. `settled` finds how many are, by an engine's own `/detokenize`: nothing is continued that
does not match to the last character.

Answers must not differ from those of an instance that had not broken off, so a request has to be
greedy, or its operator has to allow otherwise; and it must not have any state beside its tokens: no
grammar, no penalties, no stop strings, no tools, no log probabilities.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from msgspec import Raw

from ..openai.openai_request import CHAT, COMPLETIONS, Prompt

if TYPE_CHECKING:
    from ..openai.openai_request import ClientRequest

Mode = Literal["off", "greedy", "always"]

# Fields that an answer depends on beyond its tokens, and the values with which it does not.
_STATEFUL: dict[str, tuple[Any, ...]] = {
    "stop": (None, [], ""),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "prompt_logprobs": (None,),
    "tools": (None, []),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None,),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "min_tokens": (None, 0),
    "bad_words": (None, []),
    "logits_processors": (None, []),
    "prompt_embeds": (None,),
    "suffix": (None, ""),
    "truncate_prompt_tokens": (None,),
}
# Fields of a chat that make its prompt, which is tokens from now on.
_CHAT_ONLY = frozenset(
    {
        *("messages", "add_generation_prompt", "continue_final_message", "chat_template"),
        *("chat_template_kwargs", "documents", "tools", "tool_choice", "parallel_tool_calls"),
        *("reasoning_effort", "include_reasoning", "max_completion_tokens", "echo", "modalities"),
        *("functions", "function_call"),
    }
)
# vLLM's limit of a completion that names none, as the OpenAI API has it.
_COMPLETION_TOKENS = 16
# The first event has the ids of the prompt, up to seven bytes for each; it must stay an event that
# is passed (token_counter.EVENT_BYTES_MAX).
_PROMPT_BYTES_MAX = 2 << 20
# Tokens of which the text may be withheld: a character has at most four bytes, so tokens.
_WITHHELD_MAX = 8
_encoder = msgspec.json.Encoder()


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Seen(msgspec.Struct):
    id: str = ""
    created: int = 0
    choices: list[_Choice] = []
    prompt_token_ids: list[int] | None = None


_seen = msgspec.json.Decoder(_Seen)
_any = msgspec.json.Decoder()


def continuable(ask: ClientRequest, mode: Mode) -> bool:
    """Whether the answer to a request may go on at another instance."""
    if mode == "off" or not ask.stream or ask.whole or ask.path not in (CHAT, COMPLETIONS):
        return False
    if (
        ask.prompt.foreign
        or len(ask.raw) > _PROMPT_BYTES_MAX
        or not all(map(_stateless, _STATEFUL, (ask,) * len(_STATEFUL)))
    ):
        return False
    return mode == "always" or _value(ask, "temperature") == 0


def with_ids(ask: ClientRequest) -> ClientRequest:
    """The request with which an engine tells the token ids of its answer."""
    fields = ask.fields | {"return_token_ids": Raw(b"true")}
    return replace(ask, fields=fields, raw=_encoder.encode(fields))


class Continuation:
    """One answer as far as it has come."""

    def __init__(self, ask: ClientRequest, *, asks_ids: bool = False) -> None:
        self._ask, self._asks_ids = ask, asks_ids
        self.prompt: list[int] = []
        self.ids: list[int] = []  # of the answer
        self.text = ""
        self._silent: set[int] = set()  # places of tokens that came without a text
        self._id, self._created = "", 0
        self._before = 0  # tokens of the answer that other instances have computed
        self._lost = False  # something came that is no text with token ids

    @property
    def possible(self) -> bool:
        """Whether all that is needed is known."""
        return bool(self.prompt and self._id) and not self._lost

    def seen(self, events: bytes) -> bytes:
        """Take note of whole events; returns what the client gets of them: not the ids of its
        prompt, if it has not asked for them."""
        before = len(self.prompt)
        for line in events.split(b"\n"):
            if line.startswith(b"data:") and not line.startswith(b"data: [DONE]"):
                try:
                    self._see(_seen.decode(line[5:]))
                except msgspec.DecodeError:
                    self._lost = True
        if len(self.prompt) == before or self._asks_ids:
            return events
        return b"\n".join(map(_without_prompt, events.split(b"\n")))

    def _see(self, event: _Seen) -> None:
        if not self._id:
            self._id, self._created = event.id, event.created
        if event.prompt_token_ids and not self.prompt:
            self.prompt = event.prompt_token_ids
        for choice in event.choices:
            if choice.prompt_token_ids and not self.prompt:
                self.prompt = choice.prompt_token_ids
            delta = choice.delta or _Delta()
            text = choice.text or delta.content or ""
            if delta.reasoning or delta.reasoning_content or (text and not choice.token_ids):
                self._lost = True
            ids = choice.token_ids or []
            if not text:
                self._silent.update(range(len(self.ids), len(self.ids) + len(ids)))
            self.text += text
            self.ids += ids

    def candidates(self) -> list[tuple[list[int], list[int]]]:
        """How far the client's text may reach: the tokens so far, then without the last, ...; and
        of each those that have a text: all, or but those that came without, as special ones do. The
        last one of these may be half a character, so it is computed again."""
        counts = range(len(self.ids), max(0, len(self.ids) - _WITHHELD_MAX) - 1, -1)
        found = [(self.ids[:count], self.ids[:count]) for count in counts]
        if self._silent:
            for count in counts:
                if count - 1 in self._silent:
                    continue
                loud = [one for at, one in enumerate(self.ids[:count]) if at not in self._silent]
                found.append((self.ids[:count], loud))
        return found

    def matches(self, text: str) -> bool:
        """Whether these tokens, whose text this is, are those of the client's text. Behind a prompt
        it may begin with a space that it has not alone."""
        return text in (self.text, self.text.removeprefix(" "))

    def rest(self, ids: list[int]) -> ClientRequest | None:
        """The request for what comes after these tokens; None if nothing may come."""
        ask, done = self._ask, len(ids)
        limit = ask.output_tokens_max
        if limit is None and ask.path == COMPLETIONS and "max_tokens" not in ask.fields:
            limit = _COMPLETION_TOKENS
        if limit is not None and limit <= done:
            return None
        fields = {name: value for name, value in ask.fields.items() if name not in _CHAT_ONLY}
        prompt = [*self.prompt, *ids]
        fields["prompt"] = Raw(_encoder.encode(prompt))
        fields["add_special_tokens"] = Raw(b"false")
        fields["return_token_ids"] = Raw(b"true")
        fields["max_tokens"] = Raw(_encoder.encode(None if limit is None else limit - done))
        self.ids, self._before = ids, done
        self._silent = {place for place in self._silent if place < done}
        return replace(
            ask,
            path=COMPLETIONS,
            fields=fields,
            raw=_encoder.encode(fields),
            prompt=Prompt(token_ids=prompt),
            output_tokens_max=None if limit is None else limit - done,
        )

    def rewritten(self, events: bytes) -> bytes:
        """Events of the rest as events of the answer."""
        return b"\n".join(self._line(line) for line in events.split(b"\n"))

    def _line(self, line: bytes) -> bytes:
        if not line.startswith(b"data:") or line.startswith(b"data: [DONE]"):
            return line
        try:
            event: dict[str, Any] = _any.decode(line[5:])
        except msgspec.DecodeError:
            return line
        if "id" not in event:
            return line  # an error
        event |= {"id": self._id, "created": self._created}
        for choice in event.get("choices", ()):
            choice.pop("prompt_token_ids", None)
            if self._ask.path == CHAT:
                choice["delta"] = {"content": choice.pop("text", "")}
        if self._ask.path == CHAT:
            event["object"] = "chat.completion.chunk"
        usage = event.get("usage")
        if usage:
            usage["prompt_tokens"] -= self._before
            usage["completion_tokens"] += self._before
        return b"data: " + _encoder.encode(event)


def _without_prompt(line: bytes) -> bytes:
    if b'"prompt_token_ids"' not in line:
        return line
    event: dict[str, Any] = _any.decode(line[5:])
    for one in (event, *event.get("choices", ())):
        one.pop("prompt_token_ids", None)
    return b"data: " + _encoder.encode(event)


def _stateless(name: str, ask: ClientRequest) -> bool:
    return name not in ask.fields or _value(ask, name) in _STATEFUL[name]


def _value(ask: ClientRequest, name: str) -> Any:
    """A field's value; None without one."""
    return _any.decode(ask.fields[name]) if name in ask.fields else None
