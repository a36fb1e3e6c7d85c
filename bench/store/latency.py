"""Rows about latency: leased get, match, keys. None of them copies payload bytes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from tiffin.kvstore.client.client import Client

from ..limits import RoundTrip, chained_digests
from .rows import MICROSECONDS, MILLISECONDS, Row, Side, Target, interleave, times
from .setting import (
    BLOCK_TOKENS,
    daemon,
    one_core,
    prefix_of,
    prompt,
    room_for,
    schema_of,
    size_text,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tiffin.kvstore.client.verbs.arguments import Verify
    from tiffin.kvstore.format.keys import Prefix

    from .setting import NodeDaemon, Setting

_ROUND_TRIP = "64 bytes over a unix socket to another process and back"
# Warm-up calls of each kind before the first measured one: the daemon and the echo process have
# only just started.
WARM_CALLS = 200
_PLACEMENTS = {"": "", "-one-core": "; all processes on one core"}


def store(client: Client, prefix: Prefix) -> None:
    """Put zeros under every block of `prefix`."""
    payload = np.zeros(prefix.schema.block_bytes, np.uint8)
    result = client.put(prefix, [payload] * len(prefix), timeout_s=60.0)
    assert result.complete, result


# -- leased get ------------------------------------------------------------------------------------


def leased_get(setting: Setting) -> list[Row]:
    """Lease a prefix at a node in another process, view it, release it; two sizes of blocks."""
    sizes = setting.sizes
    rows = _leased_get(setting, sizes.small_block_bytes, ("off", "always"))
    return rows + _leased_get(setting, sizes.large_block_bytes, ("off",))


def _leased_get(setting: Setting, block_bytes: int, policies: tuple[Verify, ...]) -> list[Row]:
    sizes = setting.sizes
    schema = schema_of(block_bytes)
    setting.tell(f"{sizes.get_blocks} blocks of {size_text(block_bytes)}")
    with daemon(room_for(schema, sizes.get_blocks)) as node, RoundTrip() as plain:
        with Client.open(node.url, name="bench writer") as writer:
            store(writer, prefix_of(schema, sizes.get_blocks))
        with Client.open(node.url, name="bench reader") as reader:
            prefix = prefix_of(schema, sizes.get_blocks)
            actions = [partial(_cycle, reader, prefix, policy) for policy in policies]
            placed = _placed(setting, actions, plain, node)
    return [
        _leased_row(setting, block_bytes, policy, placement, seconds, limit)
        for placement, (limit, *found) in zip(_PLACEMENTS, placed, strict=True)
        for policy, seconds in zip(policies, found, strict=True)
    ]


def _placed(
    setting: Setting, actions: Sequence[Callable[[], object]], plain: RoundTrip, node: NodeDaemon
) -> list[list[list[float]]]:
    """Seconds of the round trip and of `actions`: placed by the scheduler, and all on one core.

    The scheduler may wake a process on the waker's core or on another core, which costs 40 us more
    if that is an idle virtual CPU, and it may choose differently for the two sides compared.
    """
    sides = [Side(plain), *(Side(action) for action in actions)]
    rounds, calls = setting.sizes.rounds, setting.sizes.calls
    for side in sides:
        for _ in range(WARM_CALLS):
            side.action()
    free = interleave(sides, rounds=rounds, batch=calls)
    with one_core(plain.pid, node.pid):
        return [free, interleave(sides, rounds=rounds, batch=calls)]


def _cycle(client: Client, prefix: Prefix, verify: Verify) -> None:
    with client.get(prefix, verify=verify) as blocks:
        assert len(blocks) == len(prefix), blocks


def _leased_row(
    setting: Setting,
    block_bytes: int,
    verify: Verify,
    placement: str,
    seconds: list[float],
    limit: list[float],
) -> Row:
    verified = verify == "always"
    size, blocks = size_text(block_bytes), setting.sizes.get_blocks
    return Row(
        name=f"leased-get-{size}{'-verified' if verified else ''}{placement}",
        what=f"get and release of {blocks} blocks of {size}, in place, verify={verify}"
        f"{_PLACEMENTS[placement]}",
        unit="us",
        value=times(seconds, MICROSECONDS),
        limit_what=_ROUND_TRIP,
        limit=times(limit, MICROSECONDS),
        targets=() if verified else (Target("p50", "<=", 150), Target("ratio", "<=", 12)),
        note=f"hashes {size_text(blocks * block_bytes)}" if verified else "",
    )


# -- match -----------------------------------------------------------------------------------------


def match(setting: Setting) -> list[Row]:
    """How many blocks of a long prompt are resident, in this process and through the socket."""
    blocks = setting.sizes.prompt_tokens // BLOCK_TOKENS
    schema = schema_of(setting.sizes.small_block_bytes)
    prefix = prefix_of(schema, blocks)
    dram_bytes = room_for(schema, blocks)
    setting.tell(f"{blocks} blocks")
    with Client.open(f"embedded:?dram={dram_bytes}") as client:
        embedded = _match_embedded(setting, client, prefix)
    with daemon(dram_bytes) as node, RoundTrip() as plain, Client.open(node.url) as client:
        store(client, prefix)
        placed = _placed(setting, [partial(_match, client, prefix)], plain, node)
    pairs = zip(_PLACEMENTS, placed, strict=True)
    return [embedded, *(_match_row(blocks, placement, *seconds) for placement, seconds in pairs)]


def _match_row(blocks: int, placement: str, limit: list[float], found: list[float]) -> Row:
    return Row(
        name=f"match-socket{placement}",
        what=f"match of {blocks} blocks, node in another process{_PLACEMENTS[placement]}",
        unit="us",
        value=times(found, MICROSECONDS),
        limit_what=_ROUND_TRIP,
        limit=times(limit, MICROSECONDS),
        targets=(Target("p50", "<=", 130), Target("ratio", "<=", 10)),
    )


def _match_embedded(setting: Setting, client: Client, prefix: Prefix) -> Row:
    store(client, prefix)
    index = dict.fromkeys(prefix.keys, 1)
    keys = prefix.keys
    sides = [Side(partial(_match, client, prefix)), Side(lambda: list(map(index.get, keys)))]
    found, limit = interleave(sides, rounds=setting.sizes.rounds, batch=setting.sizes.calls)
    return Row(
        name="match-embedded",
        what=f"match of {len(prefix)} blocks, node in this process",
        unit="us",
        value=times(found, MICROSECONDS),
        limit_what=f"{len(prefix)} look-ups in a bare dict",
        limit=times(limit, MICROSECONDS),
        targets=(Target("p50", "<=", 50),),
    )


def _match(client: Client, prefix: Prefix) -> None:
    assert client.match(prefix).blocks == len(prefix)


# -- keys ------------------------------------------------------------------------------------------


def keys(setting: Setting) -> list[Row]:
    """Validate a prompt's token ids and hash them into keys; three kinds of input."""
    schema = schema_of(setting.sizes.small_block_bytes)
    tokens = prompt(setting.sizes.prompt_tokens)
    raw, root = tokens.astype("<u4").tobytes(), schema.prefix([]).root
    inputs: dict[str, object] = {
        "int64": tokens,
        "uint32": tokens.astype(np.uint32),
        "list": tokens.tolist(),
    }
    assert schema.prefix(tokens).keys[-1] == chained_digests(root, raw, 4 * schema.block_tokens)
    setting.tell(f"{len(tokens)} tokens")

    def build(token_ids: object) -> Callable[[], object]:
        return lambda: schema.prefix(token_ids).keys  # type: ignore[arg-type]

    sides = [Side(lambda: chained_digests(root, raw, 4 * schema.block_tokens))]
    sides += [Side(build(token_ids)) for token_ids in inputs.values()]
    limit, *found = interleave(sides, rounds=setting.sizes.rounds, batch=setting.sizes.calls)
    return [
        Row(
            name=f"keys-{kind}",
            what=f"keys of {len(tokens)} tokens from {kind}, validation included",
            unit="ms",
            value=times(seconds, MILLISECONDS),
            limit_what=f"{len(raw) // (4 * schema.block_tokens)} chained XXH3-128 and nothing else",
            limit=times(limit, MILLISECONDS),
            targets=(Target("p50", "<=", 0.25),) if kind == "int64" else (),
        )
        for kind, seconds in zip(inputs, found, strict=True)
    ]
