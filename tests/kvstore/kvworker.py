"""Clients in processes of their own, for tests that stop and kill them.

    kvworker.py write SOCKET NAMESPACE BLOCKS     reserves, writes half of each block, says `ready`
    kvworker.py read SOCKET NAMESPACE BLOCKS      leases, says `ready`
    kvworker.py fuzz SOCKET SEED COUNT            sends invalid frames
    kvworker.py nursery SOCKET FILE SEED          forks workers on command; see `Nursery`

`write` and `read` then wait for lines: `scribble` overwrites what was reserved, `commit` commits it
and says `stored` or `stale`, anything else ends them.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import signal
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from kvsupport import SCHEMA, payload_of

from tiffin.kvstore import Client, KVSchema, Prefix
from tiffin.kvstore.errors import StaleLease, TiffinError
from tiffin.kvstore.node.core import messages
from tiffin.messenger.wire.framing import encode_frame

# Blocks of the kill campaign: large enough that a write has a middle.
CAMPAIGN = KVSchema.gqa(
    model="campaign", layers=4, kv_heads=2, head_dim=32, dtype="bfloat16", block_tokens=32
)
PROMPTS = 24
PROMPT_BLOCKS = 6
PIECES = 8
COUNTERS = struct.Struct("<QQQ")  # gets, blocks checked, blocks wrong


def say(word: str) -> None:
    print(word, flush=True)


def prefix_of(namespace: str, blocks: int) -> Prefix:
    """The same prompt in every process."""
    return SCHEMA.prefix(np.arange(blocks * SCHEMA.block_tokens), namespace=namespace)


def write(path: str, namespace: str, blocks: str) -> None:
    prefix = prefix_of(namespace, int(blocks))
    client = Client.open(f"unix:{path}", name="writer")
    slots = client.reserve(prefix)
    for slot in slots:
        half = SCHEMA.block_bytes // 2
        slot.view[:half] = payload_of(prefix.keys[slot.index])[:half]
    say("ready")
    for line in sys.stdin:
        if line == "scribble\n":
            for slot in slots:
                slot.view[:] = 0xEE
            say("done")
        elif line == "commit\n":
            try:
                slots.commit()
                say("stored")
            except StaleLease:
                say("stale")
        else:
            break


def read(path: str, namespace: str, blocks: str) -> None:
    client = Client.open(f"unix:{path}", name="reader")
    found = client.get(prefix_of(namespace, int(blocks)))
    say("ready" if found.complete else "missing")
    sys.stdin.readline()


# -- invalid frames --------------------------------------------------------------------------------


def fuzz(path: str, seed: str, count: str) -> None:
    dice = random.Random(int(seed))
    sock: socket.socket | None = None
    for _ in range(int(count)):
        if sock is None:
            sock = _connected(path, dice)
        try:
            sock.sendall(_frame(dice))
            while sock.recv(1 << 16):
                pass
            sock.close()
            sock = None
        except BlockingIOError:
            continue  # no answer yet, which is allowed
        except OSError:
            sock.close()
            sock = None
    say("done")


def _connected(path: str, dice: random.Random) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(path)
    if dice.random() < 0.9:
        hello = messages.Hello(1, messages.PROTOCOL_VERSION, "fuzz", 0)
        sock.sendall(encode_frame(messages.encoder.encode(hello)))
        sock.settimeout(10)
        with contextlib.suppress(OSError):
            sock.recv(1 << 16)
    sock.setblocking(False)
    return sock


def _frame(dice: random.Random) -> bytes:
    kind = dice.random()
    if kind < 0.1:
        return dice.randbytes(dice.randrange(1, 64))
    if kind < 0.2:
        return encode_frame(dice.randbytes(dice.randrange(0, 64)))
    body = bytearray(msgspec.msgpack.encode(_request(dice)))
    if kind < 0.4:
        for _ in range(dice.randrange(1, 4)):
            body[dice.randrange(len(body))] = dice.randrange(256)
    if kind < 0.45:
        body = body[: dice.randrange(len(body))]
    return encode_frame(bytes(body))


def _request(dice: random.Random) -> list[Any]:
    keys = dice.randbytes(16 * dice.randrange(0, 5) + (dice.random() < 0.1))
    small = dice.choice([0, 1, 2, 3, dice.randrange(50), 1 << 62, -1, "x", None])
    time_s = dice.choice([0, 0.0, 0.01, 0.05, -1.0, 1e9, float("nan"), "x"])
    number = dice.choice([1, dice.randrange(1000), -5, "id"]) if dice.random() < 0.1 else 7
    return dice.choice(
        [
            ["match", number, keys],
            ["exists", number, keys],
            ["reserve", number, keys, dice.randbytes(16), small, 8192, time_s],
            ["reserve", number, keys, keys[:16], 0, dice.choice([0, 1, 8192, 1 << 40]), 0.0],
            ["commit", number, small, [0, 1, 5]],
            ["commit", number, small],
            ["abort", number, small],
            ["lease", number, keys, time_s],
            ["lease", number, keys, time_s, True],
            ["publish", number, small, [0, small], [1], [4096, small], dice.randbytes(16)],
            ["await", number, small, dice.choice([[], [0], [small, 1 << 20]]), time_s],
            ["release", number, small],
            ["report", number, keys[:16], small],
            ["pin", number, keys, dice.randrange(-1, 4), time_s],
            ["remove", number, keys],
            ["statistics", number],
            ["statistics"],
            ["hello", number, 1, "again", 0],
            ["goodbye", number],
            ["unknown", number],
            [small],
        ]
    )


# -- the kill campaign -----------------------------------------------------------------------------


def prompts() -> list[Prefix]:
    """All prompts; each two of them share their first two blocks."""
    found = []
    for number in range(PROMPTS):
        tokens = np.arange(PROMPT_BLOCKS * CAMPAIGN.block_tokens)
        tokens[2 * CAMPAIGN.block_tokens :] += 10_000 * number
        tokens[: 2 * CAMPAIGN.block_tokens] += 1_000_000 * (number // 2)
        found.append(CAMPAIGN.prefix(tokens, namespace="campaign"))
    return found


class Worker:
    """Writes and reads prompts until it is killed; every byte that it gets is compared."""

    def __init__(self, path: str, counters: mmap.mmap, place: int, seed: int, fate: int) -> None:
        self._path = path
        self._counters = counters
        self._place = place * COUNTERS.size
        self._dice = random.Random(seed)
        self._fate = fate  # pieces to write until it kills itself; 0: it waits to be killed
        self._client: Client | None = None

    def run(self) -> None:
        known = prompts()
        while True:
            try:
                if self._client is None:
                    self._client = Client.open(f"unix:{self._path}", name="worker")
                self._act(self._client, self._dice.choice(known))
            except TiffinError:
                time.sleep(0.01)  # the node was killed, or is full; both pass

    def _act(self, client: Client, prefix: Prefix) -> None:
        choice = self._dice.random()
        part = prefix[: self._dice.randrange(1, len(prefix) + 1)]
        if choice < 0.15 and not self._fate:
            client.put(part, [payload_of(key, CAMPAIGN) for key in part.keys], timeout_s=1)
        elif choice < 0.45 or self._fate:
            with client.reserve(part, timeout_s=1) as slots:
                for slot in slots:
                    self._fill(slot, payload_of(part.keys[slot.index], CAMPAIGN))
        elif choice < 0.75:
            with client.get(part, timeout_s=1) as blocks:
                self._note([block.bytes for block in blocks], part)
        else:
            buffer = np.zeros((len(part), CAMPAIGN.block_bytes), np.uint8)
            with client.get(part, into=buffer, timeout_s=1) as blocks:
                self._note(list(buffer[: len(blocks)]), part)

    def _fill(self, slot: Any, payload: Any) -> None:
        size = -(-CAMPAIGN.block_bytes // PIECES)
        for start in range(0, CAMPAIGN.block_bytes, size):
            slot.view[start : start + size] = payload[start : start + size]
            if self._fate:
                self._fate -= 1
                if not self._fate:
                    os.kill(os.getpid(), signal.SIGKILL)

    def _note(self, found: list[Any], prefix: Prefix) -> None:
        gets, checked, wrong = COUNTERS.unpack_from(self._counters, self._place)
        right = [payload_of(key, CAMPAIGN) for key in prefix.keys]
        bad = sum(not np.array_equal(a, b) for a, b in zip(found, right, strict=False))
        COUNTERS.pack_into(self._counters, self._place, gets + 1, checked + len(found), wrong + bad)


def nursery(path: str, file: str, _: str) -> None:
    """For each line `PLACE SEED FATE`, fork a worker and say its pid. Forking costs a millisecond
    where starting Python and its imports costs half a second."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the workers
    with open(file, "r+b") as counters_file:
        counters = mmap.mmap(counters_file.fileno(), 0)
    say("ready")
    for line in sys.stdin:
        place, seed, fate = map(int, line.split())
        pid = os.fork()
        if pid == 0:
            os.close(0)
            Worker(path, counters, place, seed, fate).run()
        say(str(pid))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    {"write": write, "read": read, "fuzz": fuzz, "nursery": nursery}[sys.argv[1]](*sys.argv[2:])
