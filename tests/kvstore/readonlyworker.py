"""A reader in a process of its own, which prints its mappings, or writes where it must not.

    readonlyworker.py URL NAMESPACE BLOCKS VERB

The prompt's blocks are read by the synchronous and the asyncio client, as leases and as a stream.
Then `look` prints this process's mappings of the node's memory, stores another prompt, and prints
them again. `native`, `numpy`, `torch` and `stream` write to a block through its view: they do not
return if that memory can't be written. `poor` has no free descriptors when it starts to write.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import os
import resource
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from kvsupport import SCHEMA, assert_right, payloads_of

from tiffin.kvstore import AsyncClient, Client, Prefix
from tiffin.kvstore.errors import TierUnavailable

_MODES = {os.O_RDONLY: "r", os.O_RDWR: "rw"}


def prompt(namespace: str, blocks: int) -> Prefix:
    """The same in every process."""
    return SCHEMA.prefix(np.arange(blocks * SCHEMA.block_tokens), namespace=namespace)


def show() -> None:
    """The permissions of all mappings and descriptors of shared memory, without repetition."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    mapped = {line.split()[1] for line in maps if "memfd:" in line}
    opened = set()
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        if os.path.islink(path) and "memfd:" in os.readlink(path):
            opened.add(_MODES[fcntl.fcntl(int(name), fcntl.F_GETFL) & os.O_ACCMODE])
    print(*sorted(mapped), *sorted(opened), flush=True)


async def read_asynchronously(url: str, prefix: Prefix) -> None:
    async with AsyncClient.open(url, populate=True) as client:
        async with client.get(prefix) as blocks:
            assert_right(blocks, prefix)
        async with client.stream(prefix) as stream:
            async for layer in stream:
                assert len(layer.blocks) == len(prefix)


def read(client: Client, prefix: Prefix) -> None:
    with client.get(prefix) as blocks:
        assert_right(blocks, prefix)
    assert client.get(prefix, into=np.empty(len(prefix) * SCHEMA.block_bytes, np.uint8)).complete
    with client.stream(prefix) as stream:
        for layer in stream:
            assert len(layer.blocks) == len(prefix)


def scribble(view: Any, verb: str) -> None:
    """One operation in place on a leased block."""
    if verb == "torch":
        import torch

        warnings.simplefilter("ignore")
        torch.from_numpy(view).zero_()
    elif verb == "numpy":
        interface = view.__array_interface__ | {"data": (view.ctypes.data, False)}
        memory = type("Memory", (), {"__array_interface__": interface})
        np.asarray(memory())[...] = 0
    else:
        ctypes.memset(view.ctypes.data, 0, view.nbytes)


def write_without_descriptors(client: Client, prefix: Prefix, another: Prefix) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        client.put(another, payloads_of(another))
        print("stored")
    except TierUnavailable:
        print("TierUnavailable", len(client.get(prefix)))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    print(client.put(another, payloads_of(another)).complete, flush=True)


def main() -> None:
    url, namespace, blocks, verb = sys.argv[1:]
    prefix, another = prompt(namespace, int(blocks)), prompt(namespace + "-other", 1)
    asyncio.run(read_asynchronously(url, prefix))
    with Client.open(url, populate=True) as client:
        read(client, prefix)
        if verb == "look":
            show()
            assert client.put(another, payloads_of(another)).complete
            show()
        elif verb == "poor":
            write_without_descriptors(client, prefix, another)
        elif verb == "stream":
            with client.stream(prefix) as stream:
                scribble(next(iter(stream)).blocks[0].k, "native")
        else:
            with client.get(prefix) as leased:
                scribble(leased[0].bytes, verb)
        print("written" if verb not in ("look", "poor") else "", flush=True)


if __name__ == "__main__":
    main()
