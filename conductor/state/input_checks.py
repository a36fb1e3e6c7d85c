"""Validation of requests, instances and heartbeats, before any state is changed. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import Conflict, InvalidRequest
from ..records import KEY_BYTES, KEYS_MAX, TOKENS_MAX
from .part_keys import PART_KEYS_MAX, PART_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..records import InstanceSpec, Load, Request


def check_request(request: Request) -> None:
    """Raises InvalidRequest for a request with values out of range."""
    if not 1 <= request.prompt_tokens <= TOKENS_MAX:
        raise InvalidRequest(f"prompt_tokens is {request.prompt_tokens}: give 1 to {TOKENS_MAX}")
    if len(request.keys) > KEYS_MAX or not set(map(len, request.keys)) <= {KEY_BYTES}:
        raise InvalidRequest(f"give at most {KEYS_MAX} keys of {KEY_BYTES} bytes each")
    if len(request.keys) > request.prompt_tokens:
        raise InvalidRequest(
            f"{len(request.keys)} full blocks in a prompt of {request.prompt_tokens} tokens"
        )
    parts = request.part_keys
    if len(parts) > PART_KEYS_MAX or not set(map(len, parts)) <= {KEY_BYTES}:
        raise InvalidRequest(f"give at most {PART_KEYS_MAX} part keys of {KEY_BYTES} bytes each")
    if len(parts) * PART_TOKENS > request.prompt_tokens:
        raise InvalidRequest(
            f"{len(parts)} parts of {PART_TOKENS} in a prompt of {request.prompt_tokens} tokens"
        )
    if request.first_token_from not in ("prefill", "decode"):
        raise InvalidRequest(f"first_token_from is {request.first_token_from!r}: prefill or decode")
    for name in ("output_tokens", "output_tokens_max"):
        value = getattr(request, name)
        if value is not None and not 1 <= value <= TOKENS_MAX:
            raise InvalidRequest(f"{name} is {value}: give 1 to {TOKENS_MAX}, or nothing")


def check_instance(spec: InstanceSpec) -> None:
    """Raises InvalidRequest for an instance with values out of range."""
    for name in ("block_tokens", "part_tokens", "kv_capacity_tokens", "batch_max"):
        value = getattr(spec, name)
        if not 1 <= value <= 1 << 40:
            raise InvalidRequest(f"instance {spec.id!r}: {name} is {value}: give 1 or more")
    if not 0 <= spec.block_bytes <= 1 << 40:
        raise InvalidRequest(f"instance {spec.id!r}: block_bytes is {spec.block_bytes}")


def check_load(load: Load) -> None:
    """Raises InvalidRequest for a load with negative or absurdly large values."""
    for name in ("queued_prefill_tokens", "queued", "running", "context_tokens", "kv_used_tokens"):
        value = getattr(load, name)
        if value is not None and not 0 <= value <= 1 << 40:
            raise InvalidRequest(f"load: {name} is {value}: give 0 or more")
    if load.age_s is not None and not 0.0 <= load.age_s <= 3600.0:
        raise InvalidRequest(f"load: age_s is {load.age_s}: give 0 to 3,600 seconds")


def check_alike(spec: InstanceSpec, others: Iterable[InstanceSpec | None]) -> None:
    """Raises Conflict for an instance whose block size differs from that of other instances of
    its model."""
    for other in others:
        if other is not None and other.model == spec.model and other.id != spec.id:
            if other.block_tokens != spec.block_tokens:
                raise Conflict(
                    f"block_tokens of {spec.id!r} is {spec.block_tokens}, and of {other.id!r}, "
                    f"which serves {spec.model!r} as well, {other.block_tokens}"
                )
            return
