"""One of several writers of the same blocks, in a process of its own.

    shardworker.py URL NAMESPACE BLOCKS RANK RANKS [STAGE LAYERS-OF-STAGE ...]

Reserves its slice, writes half of it and prints `ready`; waits for a line; writes the rest,
commits, and prints the result of its blocks: `stored`, `pending`, `refused` or `stale`. Then it
waits again.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from kvsupport import payload_of

from tiffin.kvstore import Client, KVSchema, Prefix, Shard
from tiffin.kvstore.errors import StaleLease

SHARDED = KVSchema.gqa(
    model="sharded",
    layers=3,
    kv_heads=8,
    head_dim=16,
    dtype="float16",
    block_tokens=16,
    shards=8,
)


def say(word: str) -> None:
    print(word, flush=True)


def prefix_of(namespace: str, blocks: int, schema: KVSchema = SHARDED) -> Prefix:
    """The same prompt in every process."""
    return schema.prefix(np.arange(blocks * schema.block_tokens), namespace=namespace)


def main(
    url: str, namespace: str, blocks: str, rank: str, ranks: str, stage: str = "0", *stages: str
) -> None:
    prefix = prefix_of(namespace, int(blocks))
    shard = Shard(int(rank), int(ranks), int(stage), tuple(map(int, stages)))
    with Client.open(url, name=f"rank {rank} of stage {stage}") as client:
        slots = client.reserve(prefix, shard=shard)
        runs = slots[0].selection.ranges
        half = len(runs) // 2
        for number, part in enumerate((runs[:half], runs[half:])):
            for slot in slots:
                right = payload_of(prefix.keys[slot.index], SHARDED)
                for run in part:
                    slot.view[run.offset : run.end] = right[run.offset : run.end]
            if number == 0:
                say("ready")
                sys.stdin.readline()
        try:
            slots.commit()
        except StaleLease:
            say("stale")
        else:
            say("stored" if slots.stored else "pending" if slots.pending else "refused")
        sys.stdin.readline()


if __name__ == "__main__":
    main(*sys.argv[1:])
