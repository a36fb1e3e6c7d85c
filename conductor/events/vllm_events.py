"""Decodes vLLM's KV cache events from bytes into events for `block_regrouper.py`. Pure.

    payload   [time, [event, ...], rank], or a map of the same
    event     a map with "type" (from 0.26 on, and SGLang), or an array that begins with the type

Hashes are integers of 64 bits, signed or not, or raw bytes of which the last 8 are the integer. The
fields differ between versions; a missing field counts as null.

Models with several kinds of layers publish each group's blocks with the same hashes. Only the
groups that keep every token are followed, since all others depend on them; windows and states come
and go with them. So a prompt in the index may be missing in some groups: the index is an upper
bound.
"""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from tiffin.kvstore.errors import InvalidInput
from tiffin.kvstore.format.keys import namespace_fingerprint

from ..errors import ConductorError
from .block_regrouper import EngineRemoved, EngineStored

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# A batch has the changes of one step of the scheduler, some thousand blocks; this limit is enough
# for a whole cache.
PAYLOAD_BYTES_MAX = 64 << 20
_EVENTS_MAX = 65_536
_HASHES_MAX = 1 << 20
_TOKENS_MAX = 16 << 20

_MASK = (1 << 64) - 1
# Of vLLM, SGLang (CPU_PINNED) and Mooncake (DISK), in capitals. What is outside of the engine
# (EXTERNAL, SHARED_STORAGE) leaves without an event: it is not believed.
_TIERS = {
    "GPU": "hbm",
    "CPU": "dram",
    "CPU_PINNED": "dram",
    "STORAGE": "nvme",
    "DISK": "nvme",
}
# How many kinds of what is left out have a count of their own.
_LEFT_OUT_MAX = 32
# Kinds of groups that keep every token.
_FULL_KINDS = frozenset({None, "full_attention", "mla_attention", "sink_full_attention", "unknown"})

Hash: TypeAlias = Annotated[int, Meta(ge=-(1 << 63))] | Annotated[bytes, Meta(max_length=256)]
Hashes = Annotated[list[Hash], Meta(max_length=_HASHES_MAX)]
Tokens = Annotated[list[int], Meta(max_length=_TOKENS_MAX)]
Word = Annotated[str, Meta(max_length=1024)]


class BadEvents(ConductorError):
    """A malformed batch of an engine's events; its contents are lost."""


class BlockStored(msgspec.Struct, tag="BlockStored"):
    """Blocks were stored, and a prefix match can find them."""

    block_hashes: Hashes
    parent_block_hash: Hash | None
    token_ids: Tokens
    block_size: Annotated[int, Meta(ge=0, le=1 << 20)]
    lora_id: int | None = None
    medium: Word | None = None
    lora_name: Word | None = None
    extra_keys: Annotated[list[Any], Meta(max_length=_HASHES_MAX)] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: Word | None = None


class BlockRemoved(msgspec.Struct, tag="BlockRemoved"):
    """Blocks, or a copy of each, were evicted."""

    block_hashes: Hashes
    medium: Word | None = None
    group_idx: int | None = None
    remaining_copy_counts: Annotated[list[int], Meta(max_length=_HASHES_MAX)] | None = None


class AllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared"):
    """The cache was reset."""


class _StoredRow(BlockStored, tag="BlockStored", array_like=True):
    pass


class _RemovedRow(msgspec.Struct, tag="BlockRemoved", array_like=True):
    block_hashes: Hashes
    medium: Word | None = None
    group_idx: int | None = None


class _ClearedRow(AllBlocksCleared, tag="AllBlocksCleared", array_like=True):
    pass


_Raws = Annotated[list[msgspec.Raw], Meta(max_length=_EVENTS_MAX)]


class _Batch(msgspec.Struct):
    ts: float
    events: _Raws
    data_parallel_rank: int | None = None


class _BatchRow(_Batch, array_like=True):
    pass


_batch_decoder = msgspec.msgpack.Decoder(_Batch)
_row_batch_decoder = msgspec.msgpack.Decoder(_BatchRow)
_event_decoder = msgspec.msgpack.Decoder(BlockStored | BlockRemoved | AllBlocksCleared)
_row_decoder = msgspec.msgpack.Decoder(_StoredRow | _RemovedRow | _ClearedRow)
_KNOWN = frozenset(("BlockStored", "BlockRemoved", "AllBlocksCleared"))


class _Kind(msgspec.Struct):
    type: Word


_kind_decoder = msgspec.msgpack.Decoder(_Kind)
_first_decoder = msgspec.msgpack.Decoder(list[Any])
_NOT_EVENTS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """The engine no longer has any blocks."""


Event: TypeAlias = EngineStored | EngineRemoved | CacheCleared


def lora_namespace(lora_name: str) -> str:
    """The default namespace of an adapter's blocks: "lora:" and its name; "" without one."""
    return f"lora:{lora_name}" if lora_name else ""


def unsalted(adapter: str, salt: str) -> str | None:
    """The default namespace of blocks; of those with a salt nothing is known."""
    return None if salt else lora_namespace(adapter)


class EventReader:
    """Decodes one engine's batches. `namespace_of` gives the namespace of the blocks of an adapter
    and of a request's salt, each "" without one, or None for blocks that have no keys in the pool;
    an invalid namespace counts as None."""

    def __init__(self, namespace_of: Callable[[str, str], str | None] = unsalted) -> None:
        self._namespace_of = namespace_of
        self._groups: set[int] = set()  # followed groups; removals only have the group's number
        # Events of kinds and of media that are not known, by what they are.
        self.left_out: Counter[str] = Counter()

    def read(self, payload: bytes) -> list[Event]:
        """The events of a batch, in order; events of groups that are not followed are left out, and
        those of unknown kinds and media, which are counted. Raises BadEvents."""
        events: list[Event] = []
        try:
            for raw in _raws(payload):
                is_map = _is_map(bytes(memoryview(raw)[:1]))
                decoder = _event_decoder if is_map else _row_decoder
                try:
                    event = decoder.decode(raw)
                except msgspec.ValidationError:
                    kind = _kind_of(raw, is_map)
                    if kind in _KNOWN:
                        raise
                    self._leave_out(f"events of the kind {kind}")
                    continue
                events += self._translate(event)
        except _NOT_EVENTS as error:
            raise BadEvents(f"not a batch of KV events: {error}") from error
        except (OverflowError, ValueError) as error:
            raise BadEvents(f"tokens that are none: {error}") from error
        return events

    def _translate(self, event: Any) -> Sequence[Event]:
        if isinstance(event, BlockStored):
            return self._stored(event)
        if isinstance(event, BlockRemoved | _RemovedRow):
            tier = self._tier(event.medium)
            if tier is None or not self._follows(event.group_idx):
                return ()
            copies = getattr(event, "remaining_copy_counts", None) or ()
            return (EngineRemoved([_number(one) for one in event.block_hashes], tier, copies),)
        return (CacheCleared(),)

    def _tier(self, medium: str | None) -> str | None:
        if medium is None:
            return "hbm"
        tier = _TIERS.get(medium.upper())
        if tier is None:
            self._leave_out(f"blocks in {medium}")
        return tier

    def _leave_out(self, what: str) -> None:
        if what not in self.left_out and len(self.left_out) >= _LEFT_OUT_MAX:
            what = "others"
        self.left_out[what] += 1

    def _follows(self, group: int | None) -> bool:
        return group is None or group in self._groups

    def _stored(self, event: BlockStored) -> Sequence[Event]:
        tier = self._tier(event.medium)
        if tier is None or event.kv_cache_spec_kind not in _FULL_KINDS or not event.block_hashes:
            return ()
        if event.group_idx is not None:
            self._groups.add(event.group_idx)
        hashes = [_number(one) for one in event.block_hashes]
        parent = None if event.parent_block_hash is None else _number(event.parent_block_hash)
        if not event.token_ids:
            return (EngineStored(hashes, parent, b"", 0, tier),)
        size = event.block_size
        if len(event.token_ids) != len(hashes) * size:
            raise BadEvents(
                f"{len(hashes)} blocks of {size} tokens with {len(event.token_ids)} tokens"
            )
        tokens = array("I", event.token_ids).tobytes()
        salt = _salt(event)
        plain = _plain_blocks(event, salt)
        cut = plain * size * 4
        parts: list[Event] = []
        if plain:
            namespace = self._namespace(event, salt)
            parts.append(EngineStored(hashes[:plain], parent, tokens[:cut], size, tier, namespace))
        if plain < len(hashes):
            before = hashes[plain - 1] if plain else parent
            parts.append(EngineStored(hashes[plain:], before, tokens[cut:], size, tier, None))
        return parts

    def _namespace(self, event: BlockStored, salt: str) -> str | None:
        adapter = event.lora_name or ("" if event.lora_id is None else str(event.lora_id))
        namespace = self._namespace_of(adapter, salt)
        if namespace is None:
            return None
        try:
            namespace_fingerprint(namespace)
        except InvalidInput:  # an adapter's name may be too long: no request can match its blocks
            return None
        return namespace


def _salt(event: BlockStored) -> str:
    """The salt of a prompt that begins with the event's first block: the only text beside the
    adapter's name among what that block depends on; images are pairs, embeddings bytes."""
    extra = event.extra_keys[0] if event.extra_keys and event.parent_block_hash is None else None
    texts = [one for one in extra or () if isinstance(one, str)]
    if event.lora_name in texts:
        texts.remove(event.lora_name)
    return texts[0] if len(texts) == 1 else ""


def _plain_blocks(event: BlockStored, salt: str) -> int:
    """How many leading blocks depend on the tokens, the adapter and the salt alone."""
    allowed = (event.lora_name, event.lora_id, salt)
    for at, extra in enumerate(event.extra_keys or ()):
        if extra is not None and not _all_in(extra, allowed):
            return at
    return len(event.block_hashes)


def _raws(payload: bytes) -> list[msgspec.Raw]:
    decoder = _batch_decoder if _is_map(payload[:1]) else _row_batch_decoder
    return decoder.decode(payload).events


def _kind_of(raw: msgspec.Raw, is_map: bool) -> str:
    """The type that an event says it has. Raises DecodeError for what is no event."""
    if is_map:
        return _kind_decoder.decode(raw).type
    row = _first_decoder.decode(raw)
    if not row or not isinstance(row[0], str):
        raise msgspec.ValidationError("an event without a type")
    return row[0][:64]


def _is_map(first: bytes) -> bool:
    """Whether the first byte of a msgpack value is that of a map: fixmap, map 16, map 32."""
    return bool(first) and (first[0] >> 4 == 0x8 or first[0] in (0xDE, 0xDF))


def _all_in(extra: Any, allowed: tuple[object, ...]) -> bool:
    return isinstance(extra, list | tuple) and all(one in allowed for one in extra)


def _number(name: int | bytes) -> int:
    return (int.from_bytes(name, "big") if isinstance(name, bytes) else name) & _MASK
