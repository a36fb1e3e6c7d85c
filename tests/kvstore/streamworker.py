"""A writer, or a reader, of streamed blocks in a process of its own.

    streamworker.py write URL NAMESPACE BLOCKS
    streamworker.py read URL NAMESPACE BLOCKS

`write` reserves, prints `ready`, and carries out lines: `layer N` writes and publishes one,
`commit`, `abort`; it answers `done` to each. `read` prints `blocks N`, then `layer N right` (or
`wrong`) for each layer it gets, and in the end `end`, or the name of the error.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from kvsupport import payload_of

from tiffin.kvstore import Client, KVSchema, Prefix, StreamedLayer
from tiffin.kvstore.errors import TiffinError

STREAMED = KVSchema.gqa(
    model="streamed", layers=4, kv_heads=4, head_dim=32, dtype="float16", block_tokens=16
)
LAYERS = len(STREAMED.layers)


def say(word: str) -> None:
    print(word, flush=True)


def prefix_of(namespace: str, blocks: int) -> Prefix:
    """The same prompt in every process."""
    return STREAMED.prefix(np.arange(blocks * STREAMED.block_tokens), namespace=namespace)


def fill(slots: Any, layer: int) -> None:
    """Write the right bytes of one layer of all slots."""
    for slot in slots:
        right = payload_of(slots.prefix.keys[slot.index], slots.prefix.schema)
        for index in slots.prefix.schema.layer_segments(layer):
            span = slots.prefix.schema.segments[index]
            slot.view[span.offset : span.end] = right[span.offset : span.end]


def is_right(layer: StreamedLayer, prefix: Prefix) -> bool:
    """Whether a layer of every block has the bytes of its key."""
    schema = prefix.schema
    for block, key in zip(layer.blocks, prefix.keys, strict=False):
        right = payload_of(key, schema)
        for part in schema.layers[layer.index].parts:
            where = schema.range(layer.index, part.name)
            found = np.ascontiguousarray(block.part(part.name)).reshape(-1).view(np.uint8)
            if not np.array_equal(found, right[where.offset : where.end]):
                return False
    return True


def write(client: Client, prefix: Prefix) -> None:
    slots = client.reserve(prefix)
    say("ready")
    for line in sys.stdin:
        word, _, number = line.strip().partition(" ")
        if word == "layer":
            fill(slots, int(number))
            slots.publish(int(number))
        else:
            getattr(slots, word)()
        say("done")


def read(client: Client, prefix: Prefix) -> None:
    try:
        with client.stream(prefix, timeout_s=30) as stream:
            say(f"blocks {stream.blocks}")
            for layer in stream:
                say(f"layer {layer.index} {'right' if is_right(layer, prefix) else 'wrong'}")
        say("end")
    except TiffinError as error:
        say(type(error).__name__)


def main(role: str, url: str, namespace: str, blocks: str) -> None:
    with Client.open(url, name=role) as client:
        {"write": write, "read": read}[role](client, prefix_of(namespace, int(blocks)))


if __name__ == "__main__":
    main(*sys.argv[1:])
