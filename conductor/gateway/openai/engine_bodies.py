"""Request bodies for the engines: the client's body with the fields that have to differ. Pure.

Unchanged fields are spliced in as the client wrote them, never decoded and encoded again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
from msgspec import Raw

from .openai_request import CHAT, COMPLETIONS, RESPONSES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..config import Handoff
    from ..engines.instance_cache import Shard
    from .openai_request import ClientRequest

_encoder = msgspec.json.Encoder()

# The parameters that vLLM's NIXL connector expects from a proxy: vLLM's `toy_proxy_server.py` sends
# the same.
_REMOTE_DECODE = Raw(
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
    b'"remote_block_ids":null,"remote_host":null,"remote_port":null}'
)
# What Tiffin's connector for vLLM expects: its answer tells which blocks it has stored
# (docs/vllm.md).
_TELL_STORED = Raw(b'{"tiffin":{}}')
_HANDOFFS = {"vllm": _REMOTE_DECODE, "pool": _TELL_STORED, "stream": _TELL_STORED}
_POOL_PARAMS = ("tiffin",)
_ONE = Raw(b"1")
_USAGE = Raw(b'{"include_usage":true}')
# Fields that a prefill request drops: useless for its one token, which no client sees, or, like
# `min_tokens`, in conflict with it.
_PREFILL_DROPS = ("stream_options", "min_tokens", "logprobs", "top_logprobs", "best_of", "n")
_TOKENIZE_FIELDS = (
    "model", "add_special_tokens", "add_generation_prompt", "continue_final_message", "tools",
    "chat_template_kwargs", "chat_template", "mm_processor_kwargs",
)  # fmt: skip


def answer_body(
    ask: ClientRequest,
    output_tokens_max: int | None,
    transfer: Mapping[str, Raw] | None = None,
    shards: Sequence[Shard] = (),
    response_id: str = "",
    *,
    asks_usage: bool = False,
) -> bytes:
    """The body for the decode instance: the client's, byte by byte, unless the conductor has cut
    the answer's length, or the instance needs to know where its blocks are (`transfer`) and will
    be (`shards`), is told the id of its response, or asked for a stream's usage (`asks_usage`)."""
    changes: dict[str, Raw] = {}
    if asks_usage and lacks_usage(ask):
        changes["stream_options"] = _USAGE
    if ask.path == RESPONSES:
        changes["request_id"] = Raw(_encoder.encode(response_id))
    if output_tokens_max is not None and _exceeds(ask.output_tokens_max, output_tokens_max):
        changes |= _limit(ask, Raw(str(output_tokens_max).encode()))
    if transfer is not None or shards:
        told = {"shards": Raw(_encoder.encode(shards))} if shards else {}
        changes["kv_transfer_params"] = Raw(_encoder.encode({**(transfer or {}), **told}))
    return _encoder.encode(ask.fields | changes) if changes else ask.raw


def lacks_usage(ask: ClientRequest) -> bool:
    """Whether this is a stream that would end without its usage, which its client did not ask
    for."""
    return ask.stream and ask.path in (CHAT, COMPLETIONS) and "stream_options" not in ask.fields


def asked_of(ask: ClientRequest, model: str) -> ClientRequest:
    """The same request to another model."""
    fields = ask.fields | {"model": Raw(_encoder.encode(model))}
    return replace(ask, model=model, fields=fields, raw=_encoder.encode(fields))


def last_events(ask: ClientRequest, degraded: str) -> bytes:
    """The end of a stream that the gateway ends before the engine does."""
    chat = ask.path == CHAT
    nothing: dict[str, object] = {"delta": {}} if chat else {"text": ""}
    choice = {"index": 0, **nothing, "finish_reason": "length"}
    event = {
        "id": ask.wishes.request_id,
        "object": "chat.completion.chunk" if chat else "text_completion",
        "model": ask.model,
        "choices": [choice],
        "tiffin": {"degraded": [degraded]},
    }
    return b"data: " + _encoder.encode(event) + b"\n\ndata: [DONE]\n\n"


def stored_tokens(ask: ClientRequest, handoff: Handoff, block_tokens: int) -> int | None:
    """How many of the prompt's tokens a pool can take over, which has whole blocks only; None if
    that is not known."""
    ids = ask.prompt.token_ids
    if (
        handoff == "vllm"
        or ids is None
        or not block_tokens
        or "truncate_prompt_tokens" in ask.fields
    ):
        return None
    return len(ids) // block_tokens * block_tokens


def prefill_body(
    ask: ClientRequest,
    handoff: Handoff,
    block_tokens: int = 0,
    fetched: tuple[int, float] | None = None,
) -> bytes:
    """The body for a prefill instance, which computes the prompt and one token. It keeps the blocks
    for the decode instance ("vllm") or stores them ("pool"), and answers where they are. What is
    behind the last whole block of `block_tokens` the decode instance computes. `fetched`: see
    `Placement`."""
    fields = {name: value for name, value in ask.fields.items() if name not in _PREFILL_DROPS}
    fields |= {"stream": Raw(b"false"), **_limit(ask, _ONE)}
    stored = stored_tokens(ask, handoff, block_tokens)
    ids = ask.prompt.token_ids
    if stored and ids is not None and stored < len(ids):
        fields["prompt"] = Raw(_encoder.encode(ids[:stored]))
    fields["kv_transfer_params"] = _HANDOFFS[handoff]
    if fetched is not None and handoff != "vllm":
        fields["kv_transfer_params"] = Raw(_encoder.encode(being_fetched(fetched, tell=True)))
    return _encoder.encode(fields)


def being_fetched(fetched: tuple[int, float], **more: bool) -> dict[str, Raw]:
    """The `kv_transfer_params` of an instance at whose node blocks are about to arrive."""
    blocks, within_s = fetched
    told = {"fetched": blocks, "within_s": round(within_s, 3), **more}
    return {"tiffin": Raw(_encoder.encode(told))}


def handed_on(told: dict[str, Raw] | None, handoff: Handoff) -> dict[str, Raw] | None:
    """The `kv_transfer_params` of a prefill's answer that the decode instance gets: of the pool no
    addresses."""
    if told is None or handoff == "vllm":
        return told
    return {name: told[name] for name in _POOL_PARAMS if name in told} or None


class _Stored(msgspec.Struct):
    node: int | None = None


_stored = msgspec.json.Decoder(_Stored)


def writes_at(told: Mapping[str, Raw] | None) -> int | None:
    """The number of the node at which a prefill instance writes, if its answer says so."""
    try:
        return _stored.decode(told["tiffin"]).node if told else None
    except (KeyError, msgspec.DecodeError):
        return None


def beside_prefill(node: int | None) -> dict[str, Raw]:
    """The `kv_transfer_params` of a decode instance that is asked together with the prefill, which
    writes at this node if that is known."""
    told = {"prefilling": True} | ({} if node is None else {"node": node})
    return {"tiffin": Raw(_encoder.encode(told))}


def tokenize_body(ask: ClientRequest) -> bytes:
    """The body for vLLM's `POST /tokenize`: the prompt, and the fields its template depends on."""
    fields = {name: ask.fields[name] for name in _TOKENIZE_FIELDS if name in ask.fields}
    if ask.path == RESPONSES:
        assert ask.prompt.messages is not None
        return _encoder.encode(fields | {"messages": ask.prompt.messages})
    name = "messages" if ask.path == CHAT else "prompt"
    fields[name] = ask.fields[name]
    if name == "prompt" and ask.prompt.text is not None:
        fields[name] = Raw(_encoder.encode(ask.prompt.text))  # unwraps a list of one text
    return _encoder.encode(fields)


def render_body(ask: ClientRequest) -> bytes:
    """The body for vLLM's `POST /v1/chat/completions/render`: the chat; its images stay there."""
    return _encoder.encode(ask.fields | {"mm_payload": Raw(b'"none"')})


def _limit(ask: ClientRequest, tokens: Raw) -> dict[str, Raw]:
    """The fields that limit the answer's length: both names if the client used the newer one, since
    engines differ in which of them they prefer."""
    if ask.path == RESPONSES:
        return {"max_output_tokens": tokens}
    fields = {"max_tokens": tokens}
    if "max_completion_tokens" in ask.fields:
        fields["max_completion_tokens"] = tokens
    return fields


def _exceeds(asked: int | None, limit: int) -> bool:
    return asked is None or asked > limit
