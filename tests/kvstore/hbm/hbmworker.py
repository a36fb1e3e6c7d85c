"""A process that reads blocks out of another one's HBM.

    python hbmworker.py DESCRIPTOR MESSAGE TOKENS NAMESPACE BLOCKS

For each line on its input it reads the prefix once and answers with one line: how many blocks are
right, and a digest of each of them.
"""

from __future__ import annotations

import sys
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch
from hbmsupport import SCHEMAS

from tiffin.kvstore.hbm import attach


def main() -> None:
    fd, message, algorithm, namespace, blocks = sys.argv[1:]
    schema = SCHEMAS[algorithm]
    prefix = schema.prefix(
        np.arange(int(blocks) * schema.block_tokens) % 50_000, namespace=namespace
    )
    exported = Path(message).read_bytes()
    with attach(exported, schema, fds=[int(fd)]) as theirs:
        into = torch.zeros((len(prefix), schema.block_bytes), dtype=torch.uint8)
        for _ in sys.stdin:
            good = theirs.read(prefix, into)
            digests = [blake2b(row.numpy(), digest_size=16).hexdigest() for row in into[:good]]
            print(good, *digests, flush=True)


if __name__ == "__main__":
    main()
