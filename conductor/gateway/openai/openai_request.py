"""Parses the part of an OpenAI request, body and headers, that scheduling depends on. Pure.

The gateway passes everything else in the body on to the engine unchanged, unknown fields included;
the engine itself refuses invalid values, with its own messages.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct

from tiffin.kvstore.text import printable

from ...records import TOKENS_MAX, Objectives
from ...state.request_ids import name_of
from ...wire.answers import Refusal, invalid_json
from ...wire.models import ID_MAX, NAME_MAX, SECONDS_MAX
from .form_fields import read_fields

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from ..config import Header

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
# Answered by one forward pass over texts: they cost a prefill, and their KV is kept nowhere.
POOLING = (
    *("/v1/embeddings", "/v1/score", "/v1/rerank"),
    *("/score", "/rerank", "/v2/rerank", "/classify", "/pooling"),  # vLLM's, and other clients'
)
SPEECH = "/v1/audio/speech"
# Their bodies are forms with a file.
LISTENING = ("/v1/audio/transcriptions", "/v1/audio/translations")
# Whisper takes a recording in windows of 30 s, and its decoder has 448 positions for each (arXiv
# 2212.04356, 2.2): vLLM counts the room that it has in these, of an answer and all that it listens
# to. 30 s are 480,000 bytes of MP3 at 128 kbit/s; of Opus they are a fifth, of WAV twice as many.
_WINDOW_BYTES, _WINDOW_TOKENS = 480_000, 448
# How ids that the gateway makes begin, by the kind of the answer.
ID_KINDS = {CHAT: "chatcmpl-", COMPLETIONS: "cmpl-", RESPONSES: "resp_"}

_TOKEN_IDS = list[Annotated[int, Meta(ge=0, lt=2**32)]]


class _Part(Struct):
    """A part of a message's content."""

    type: str = "text"
    text: str | None = None


class _Message(Struct):
    """A chat message, as far as its length depends on it."""

    content: str | list[_Part] | None = None


class _Body(Struct):
    """A request's body, as far as placement depends on it."""

    model: Annotated[str, Meta(min_length=1, max_length=NAME_MAX)]
    stream: bool | None = None
    n: int | None = None
    best_of: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    prompt: Raw = Raw(b"null")
    messages: Raw = Raw(b"null")
    prompt_logprobs: Raw = Raw(b"null")
    echo: bool | None = None
    use_beam_search: bool | None = None
    cache_salt: str | None = None
    chat_template: Raw = Raw(b"null")
    kv_transfer_params: Raw = Raw(b"null")
    vllm_xargs: Raw = Raw(b"null")
    # Of responses alone.
    input: Raw = Raw(b"null")
    instructions: str | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None


# Not strict: 5.0 for 5 and 1 for true, as pydantic has it, by which vLLM reads.
_body = msgspec.json.Decoder(_Body, strict=False)


class _Key:
    """A key that is equal to no other, so that none of an object's is lost."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


_keys = msgspec.json.Decoder(dict[_Key, Raw], dec_hook=lambda _, name: _Key(name))
_text = msgspec.json.Decoder(str)
_ids = msgspec.json.Decoder(_TOKEN_IDS)
_messages = msgspec.json.Decoder(list[_Message])
_many = msgspec.json.Decoder(list[Raw])


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt before it is tokenised.

    `token_ids` if the client sent them; else `text`, or `messages`, the JSON of a chat, which needs
    a chat template. `nbytes` of text serve to estimate the length. `several`: a batch of prompts.
    `foreign`: parts that are no text, such as images. `heard_tokens`: a recording's length for an
    engine, estimated.
    """

    token_ids: list[int] | None = None
    text: str | None = None
    messages: Raw | None = None
    nbytes: int = 0
    several: bool = False
    foreign: bool = False
    heard_tokens: int | None = None

    @property
    def tokenisable(self) -> bool:
        """Whether this is a single prompt of nothing but text."""
        return not self.several and not self.foreign


_INDIFFERENT = Objectives()


@dataclass(frozen=True, slots=True)
class Wishes:
    """The scheduling options in a request's headers. The request id is the gateway's own; `name` is
    that of the whole pool. `label`: the id that the client gave, which it may give to several
    requests of one task; "" if it gave none. `priority` is "" if the client names none.
    `output_class` and `output_tokens` are what the client knows of the answer's length: its kind,
    and an estimate."""

    request_id: str
    priority: str = ""
    tenant: str = ""
    objectives: Objectives = _INDIFFERENT
    urgent: bool = False
    label: str = ""
    output_class: str = ""
    output_tokens: int | None = None

    @property
    def name(self) -> str:
        return name_of(self.tenant, self.request_id)

    @property
    def shown(self) -> str:
        """What the log calls it."""
        label = printable(self.label[:ID_MAX])
        return f"{self.request_id} ({label})" if label else self.request_id

    @property
    def told(self) -> dict[str, str]:
        """The headers of its answer that name it."""
        # Header fields have no control characters, which some parsers let pass.
        label = "".join(c if (c >= " " and c != "\x7f") or c == "\t" else "?" for c in self.label)
        return {"x-request-id": label or self.request_id, "x-tiffin-request-id": self.request_id}

    def part(self, number: int) -> Wishes:
        """Those of a later part of the same answer."""
        mark = f"+{number}"
        return replace(self, request_id=self.request_id[: ID_MAX - len(mark)] + mark)


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """One request of a client.

    `raw` is its body, of the type `content_type`, `fields` the same by name, each as the client
    wrote it. `follows`: the id of the response that it continues. `whole`: the decode
    instance must compute the prompt itself, so prefill and decode can't be disaggregated. `salt`:
    the engine salts its block keys with it, so that the store's keys differ.
    """

    path: str
    raw: bytes
    fields: dict[str, Raw]
    model: str
    stream: bool
    prompt: Prompt
    output_tokens_max: int | None
    whole: bool
    salt: str
    own_template: bool
    wishes: Wishes
    follows: str = ""
    content_type: str = "application/json"

    @property
    def batch(self) -> bool:
        """Whether it may be many texts, which an engine computes one after the other, or what is no
        text."""
        return self.prompt.several or self.path not in ID_KINDS


def read_ask(path: str, raw: bytes, wishes: Wishes) -> ClientRequest:
    """Parse a request. Raises Refusal for an invalid body, or for one that sets
    `kv_transfer_params` itself."""
    try:
        body, fields = _body.decode(raw), _once(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        refusal = invalid_json(error)
        refusal.status = 400  # as OpenAI has it
        raise refusal from error
    except UnicodeDecodeError as error:
        raise Refusal(400, "invalid_json", "the body is not UTF-8") from error
    _refuse_transfers(body)
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if path == CHAT:
        prompt = _chat(body.messages)
    elif path == COMPLETIONS:
        prompt = _completion(body.prompt)
    elif path == RESPONSES:
        prompt, limit = _response(body), body.max_output_tokens
    else:
        return _one_pass(path, raw, body.model, wishes, fields)
    several = prompt.several or any((count or 1) != 1 for count in (body.n, body.best_of))
    return ClientRequest(
        path=path,
        raw=raw,
        fields=fields,
        model=body.model,
        stream=bool(body.stream),
        prompt=prompt,
        output_tokens_max=None if limit is None else min(max(limit, 1), TOKENS_MAX),
        whole=several or body.use_beam_search is True or body.echo is True
        or not _is_null(body.prompt_logprobs),
        salt=body.cache_salt or "",
        own_template=not _is_null(body.chat_template),
        wishes=wishes,
        follows=body.previous_response_id or "",
    )  # fmt: skip


def read_form(path: str, raw: bytes, content_type: str, wishes: Wishes) -> ClientRequest:
    """A request whose body is a form with a recording. Raises Refusal."""
    form = read_fields(raw, content_type)
    windows = max(1, math.ceil(form.file_bytes / _WINDOW_BYTES))
    return replace(
        _one_pass(path, raw, form.model, wishes, {}),
        content_type=content_type,
        stream=form.stream,
        prompt=Prompt(heard_tokens=windows * _WINDOW_TOKENS, foreign=True),
    )


def _one_pass(
    path: str, raw: bytes, model: str, wishes: Wishes, fields: dict[str, Raw]
) -> ClientRequest:
    """A request without an answer of tokens that a cache could help: its cost is that of its
    length."""
    return ClientRequest(
        path, raw, fields, model, stream=False, prompt=Prompt(nbytes=len(raw), foreign=True),
        output_tokens_max=1, whole=True, salt="", own_template=False, wishes=wishes,
    )  # fmt: skip


def read_wishes(
    headers: Mapping[str, str], request_id: str, owner: str, honour: Collection[Header]
) -> Wishes:
    """Parse the headers that `honour` lists. `owner` identifies the client's API key, "" without
    keys: it is the tenant if the client names no other; and the tenant is the output class if the
    client names none: the answers of one application are alike. Raises Refusal for invalid
    values."""
    tenant = _name(headers, "x-tiffin-tenant", owner) if "tenant" in honour else owner
    priority, urgent, objectives = "", False, _INDIFFERENT
    if "priority" in honour:
        priority = _name(headers, "x-tiffin-priority", priority)
    if "urgent" in honour:
        urgent = _flag(headers, "x-tiffin-urgent")
    if "objectives" in honour:
        objectives = Objectives(
            _milliseconds(headers, "x-tiffin-ttft-ms"), _milliseconds(headers, "x-tiffin-tbt-ms")
        )
    output_class, output_tokens = tenant, None
    if "output" in honour:
        output_class = _name(headers, "x-tiffin-output-class", tenant)
        output_tokens = _count(headers, "x-tiffin-output-tokens")
    return Wishes(
        request_id,
        priority,
        tenant,
        objectives,
        urgent,
        label=headers.get("x-request-id", ""),
        output_class=output_class,
        output_tokens=output_tokens,
    )


def _once(raw: bytes | Raw) -> dict[str, Raw]:
    """An object's fields. Raises Refusal if one of them stands there twice: an engine may take the
    one that was not checked here."""
    fields: dict[str, Raw] = {}
    for key, value in _keys.decode(raw).items():
        if key.name in fields:
            name = printable(key.name[:NAME_MAX])
            raise Refusal(400, "invalid_json", f"{name!r} is there twice: leave one", param=name)
        fields[key.name] = value
    return fields


def _refuse_transfers(body: _Body) -> None:
    """Raise Refusal if the client sets `kv_transfer_params`: it could make an instance connect to
    any address, and read what that address answers."""
    in_extras = False
    if not _is_null(body.vllm_xargs):
        try:
            in_extras = "kv_transfer_params" in _once(body.vllm_xargs)
        except msgspec.DecodeError:
            in_extras = False  # not an object, which the engine refuses
    if in_extras or not _is_null(body.kv_transfer_params):
        raise Refusal(
            400, "not_allowed", "kv_transfer_params are the gateway's: leave them out",
            param="kv_transfer_params",
        )  # fmt: skip


def _completion(raw: Raw) -> Prompt:
    """Parse the prompt of a completion: text, token ids, or a batch of either."""
    nbytes = len(bytes(raw))
    text = _decoded(_text, raw)
    if text is not None:
        return Prompt(text=text, nbytes=len(text.encode("utf-8", "surrogatepass")))
    ids = _decoded(_ids, raw)
    if ids is not None:
        return Prompt(token_ids=ids)
    several = _decoded(_many, raw)
    if several is not None and len(several) == 1:
        return _completion(several[0])
    return Prompt(nbytes=nbytes, several=several is not None, foreign=several is None)


def _response(body: _Body) -> Prompt:
    """The prompt of a response, as the chat that engines make of it; its length alone if it is more
    than instructions and one text."""
    text = _decoded(_text, body.input)
    if text is None or body.previous_response_id:
        return Prompt(nbytes=len(bytes(body.input)), foreign=True)
    messages = [{"role": "user", "content": text}]
    if body.instructions:
        messages.insert(0, {"role": "system", "content": body.instructions})
    return _chat(Raw(msgspec.json.encode(messages)))


def _chat(raw: Raw) -> Prompt:
    """Parse the messages of a chat. `nbytes` is the length of their texts plus
    `_BYTES_PER_MESSAGE` each, for the template."""
    messages = _decoded(_messages, raw)
    if messages is None:
        return Prompt(nbytes=len(bytes(raw)), foreign=True)
    nbytes, foreign = 0, False
    for message in messages:
        content = message.content
        parts = [_Part(text=content)] if isinstance(content, str) else content or []
        for part in parts:
            foreign = foreign or part.type != "text"
            nbytes += len((part.text or "").encode("utf-8", "surrogatepass"))
        nbytes += _BYTES_PER_MESSAGE
    return Prompt(messages=raw, nbytes=nbytes, foreign=foreign)


# A message's role and its marks are four to six tokens in the templates of Llama 3 and Qwen 3.
_BYTES_PER_MESSAGE = 20


def _decoded(decoder: msgspec.json.Decoder[Any], raw: Raw) -> Any:
    """Decode `raw`; None if it does not have the decoder's type."""
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _is_null(raw: Raw) -> bool:
    return bytes(raw) == b"null"


def _name(headers: Mapping[str, str], header: str, default: str) -> str:
    # Starlette gives the bytes of a header as Latin-1; people's names are UTF-8.
    with contextlib.suppress(UnicodeError):
        value = headers.get(header, "")
        value = value.encode("latin-1").decode("utf-8")
    if len(value) > ID_MAX or not value.isprintable():
        raise Refusal(
            400, "invalid_header", f"{header} is at most {ID_MAX} printable characters",
            param=header,
        )  # fmt: skip
    return value or default


def _flag(headers: Mapping[str, str], header: str) -> bool:
    value = headers.get(header, "false")
    if value not in ("true", "false"):
        raise Refusal(400, "invalid_header", f"{header} is true or false", param=header)
    return value == "true"


def _count(headers: Mapping[str, str], header: str) -> int | None:
    """A header with a number of tokens; None without the header. Raises Refusal."""
    text = headers.get(header)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and 0 < int(text) <= TOKENS_MAX):
        raise Refusal(
            400, "invalid_header", f"{header} is a number of tokens, 1 to {TOKENS_MAX}",
            param=header,
        )  # fmt: skip
    return int(text)


def _milliseconds(headers: Mapping[str, str], header: str) -> float | None:
    """A header in milliseconds, converted to seconds; None without the header. Raises Refusal."""
    text = headers.get(header)
    if text is None:
        return None
    try:
        seconds = float(text) / 1e3
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= SECONDS_MAX:
        raise Refusal(
            400, "invalid_header",
            f"{header} is a number of milliseconds, more than 0 and at most a day",
            param=header,
        )  # fmt: skip
    return seconds
