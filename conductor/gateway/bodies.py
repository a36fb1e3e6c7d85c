"""Bodies for the engines: the client's own, with what has to differ. Pure.

Fields that stay are spliced in as the client wrote them, never decoded and encoded again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec import Raw

from .asking import CHAT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .asking import Ask
    from .known import Shard

_encoder = msgspec.json.Encoder()

# What NIXL's connector in vLLM takes from a proxy: `toy_proxy_server.py` of vLLM sends the same.
_REMOTE_DECODE = Raw(
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
    b'"remote_block_ids":null,"remote_host":null,"remote_port":null}'
)
_ONE = Raw(b"1")
# Of no use for one token that nobody sees, or, as `min_tokens`, a contradiction.
_PREFILL_DROPS = ("stream_options", "min_tokens", "logprobs", "top_logprobs", "best_of", "n")
_TOKENIZE_FIELDS = (
    "model", "add_special_tokens", "add_generation_prompt", "continue_final_message", "tools",
    "chat_template_kwargs", "chat_template", "mm_processor_kwargs",
)  # fmt: skip


def answer_body(
    ask: Ask,
    output_tokens_max: int | None,
    transfer: Mapping[str, Raw] | None = None,
    shards: Sequence[Shard] = (),
) -> bytes:
    """For the instance that answers: the client's body, byte by byte, unless the conductor has cut
    its answer, or it is told where its blocks are (`transfer`) and will be (`shards`)."""
    changes: dict[str, Raw] = {}
    if output_tokens_max is not None and _exceeds(ask.output_tokens_max, output_tokens_max):
        changes |= _limit(ask, Raw(str(output_tokens_max).encode()))
    if transfer is not None or shards:
        told = {"shards": Raw(_encoder.encode(shards))} if shards else {}
        changes["kv_transfer_params"] = Raw(_encoder.encode({**(transfer or {}), **told}))
    return _encoder.encode(ask.fields | changes) if changes else ask.raw


def prefill_body(ask: Ask, *, remote_decode: bool) -> bytes:
    """For the instance that computes the prompt and nothing else. With `remote_decode` it keeps the
    blocks for another, and says where they are."""
    fields = {name: value for name, value in ask.fields.items() if name not in _PREFILL_DROPS}
    fields |= {"stream": Raw(b"false"), **_limit(ask, _ONE)}
    if remote_decode:
        fields["kv_transfer_params"] = _REMOTE_DECODE
    return _encoder.encode(fields)


def tokenize_body(ask: Ask) -> bytes:
    """For vLLM's `POST /tokenize`: the prompt, and what its template depends on."""
    fields = {name: ask.fields[name] for name in _TOKENIZE_FIELDS if name in ask.fields}
    name = "messages" if ask.path == CHAT else "prompt"
    fields[name] = ask.fields[name]
    if name == "prompt" and ask.prompt.text is not None:
        fields[name] = Raw(_encoder.encode(ask.prompt.text))  # a list of one is sent as one
    return _encoder.encode(fields)


def _limit(ask: Ask, tokens: Raw) -> dict[str, Raw]:
    """Both names, where the client used the newer one: engines prefer either."""
    fields = {"max_tokens": tokens}
    if "max_completion_tokens" in ask.fields:
        fields["max_completion_tokens"] = tokens
    return fields


def _exceeds(asked: int | None, limit: int) -> bool:
    return asked is None or asked > limit
