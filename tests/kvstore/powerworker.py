"""A process whose disk loses power: `python powerworker.py DIRECTORY`, a separate file system.

It puts BLOCKS blocks to the disk, removes the first REMOVED of them, and then the file system of
DIRECTORY stops as at a power cut: what was not flushed is gone. Needs root, and ext4.
"""

from __future__ import annotations

import fcntl
import os
import struct
import sys
from pathlib import Path

import numpy as np
from kvsupport import EXTENT, SCHEMA, payloads_of

from tiffin.kvstore import Client, Prefix
from tiffin.kvstore.node.node import Node, NodeOptions

BLOCKS, REMOVED = 20, 10
_SHUTDOWN, _WITHOUT_FLUSHING_THE_LOG = 0x8004587D, struct.pack("I", 2)  # ext4, linux/fs.h


def prefix_of(number: int) -> Prefix:
    return SCHEMA.prefix(np.arange(SCHEMA.block_tokens) + number, namespace="power")


def open_node(directory: Path) -> Node:
    return Node(
        NodeOptions(dram_bytes=8 * EXTENT, nvme_path=directory / "slab", nvme_bytes=64 * EXTENT)
    )


def main() -> None:
    directory = Path(sys.argv[1])
    prefixes = [prefix_of(number) for number in range(BLOCKS)]
    node = open_node(directory)
    with Client.attach(node) as client:
        for prefix in prefixes:
            assert client.put(prefix, payloads_of(prefix)).complete
    node.close()
    client = Client.attach(open_node(directory))
    assert all(client.match(prefix).blocks for prefix in prefixes)
    for prefix in prefixes[:REMOVED]:
        assert client.remove(prefix) == 1
    fcntl.ioctl(os.open(directory, os.O_RDONLY), _SHUTDOWN, _WITHOUT_FLUSHING_THE_LOG)
    os._exit(0)


if __name__ == "__main__":
    main()
