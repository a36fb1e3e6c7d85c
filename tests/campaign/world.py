"""Shared by campaigns: nodes as processes, contents derived from keys, and checks of promises."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING, Any

import kvsupport
import numpy as np
from directory.ports import free_port
from kvsupport import Daemon, assert_conserved, wait_until

from tiffin.kvstore import KVSchema, Prefix

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray

SCHEMA = KVSchema.gqa(
    model="campaign", layers=2, kv_heads=2, head_dim=8, dtype="bfloat16", block_tokens=16
)
# The requested blocks never fit: they are evicted, and readers and writers wait for each other.
DRAM_BLOCKS = 16
PROMPTS, PROMPT_BLOCKS = 10, 4
# On a machine with two cores some calls are slow; longer than this is a hang.
SETTLE_S = 10.0

_numbers = itertools.count(1)


class Broken(AssertionError):
    """A promise of the store is broken."""


class WrongBytes(Broken):
    """A get returned bytes that were not put."""


class Late(Broken):
    """A call did not end in time."""


def prompts(seed: int) -> list[Prefix]:
    """The prompts of one run, which share no blocks with those of other runs."""
    tokens = np.arange(PROMPT_BLOCKS * SCHEMA.block_tokens) % 50_000
    run = f"{os.getpid()}-{seed}-{next(_numbers)}"
    return [SCHEMA.prefix(tokens, namespace=f"{run}-{i}") for i in range(PROMPTS)]


def payload_of(key: bytes) -> NDArray[np.uint8]:
    """The only right bytes of the block with this key."""
    return kvsupport.payload_of(key, SCHEMA)


def check_bytes(found: Any, key: bytes) -> None:
    """Raises Broken unless these are the bytes that belong to the key."""
    if not np.array_equal(found, payload_of(key)):
        raise WrongBytes(f"wrong bytes for {key.hex()}")


class NodeProcess(Daemon):
    """`tiffin node` with a socket and a port."""

    def __init__(self) -> None:
        self.port = free_port()
        options = ["--listen", f"127.0.0.1:{self.port}", "--no-prefault"]
        super().__init__(dram=DRAM_BLOCKS * SCHEMA.extent_bytes, options=options)


def held(numbers: dict[str, Any]) -> int:
    """The number of leases that clients hold, and of requests that wait."""
    kinds = ("read_leases", "write_leases", "zombie_leases")
    leases = sum(session[kind] for session in numbers["sessions"] for kind in kinds)
    return int(leases + numbers["waiting_requests"])


def check_at_rest(ask: Callable[[], Iterable[dict[str, Any]]]) -> None:
    """Within SETTLE_S no lease is held, no request waits, and nothing was lost."""
    numbers: list[dict[str, Any]] = []

    def quiet() -> bool:
        numbers[:] = ask()
        return not sum(map(held, numbers))

    try:
        wait_until(quiet, "no lease is held", SETTLE_S)
        for one in numbers:
            assert_conserved(one)
            dram = one["tiers"]["dram"]
            assert not dram["reserved_bytes"] + dram["quarantined_bytes"], "kept for nobody"
    except AssertionError as error:
        raise Broken(f"{error}: {[(one['sessions'], one['tiers']) for one in numbers]}") from None
