"""An attacker between clients and their node, without the pool's token: a relay that changes,
drops, repeats, delays and adds frames, and tries to have blocks removed.
"""

from __future__ import annotations

import random
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from attacks.attacked import Attacked
from attacks.relay import TO_NODE, Frame, flipped, message
from kvsupport import fresh_prefix

from tiffin.kvstore import Client
from tiffin.kvstore.node.core import messages

from .processes import Configuration, Tally, Visitors, parse, report
from .visitor import BLOCKS_MAX, PROMPTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiffin.kvstore import Prefix

PROCESSES = 2
WAYS = ("flip", "flip", "repeat", "remove")
# A frame that is missing or late costs a call all its time up to the deadline, so these are rare.
SILENT_WAYS = ("drop", "swap", "shorten")
MEDDLED, WAITED_FOR = 0.02, 0.0002
# Blocks that no client with the token removes.
PINNED_BLOCKS = 4
# Room for twice all requested blocks: the reservations of a connection that was cut are free again
# only after their lease.
BLOCKS = 2 * PROMPTS * BLOCKS_MAX


class Meddling:
    """Tampers with one frame in fifty. Called by one thread per connection."""

    def __init__(self, dice: random.Random, wanted: Prefix) -> None:
        self.done: Counter[str] = Counter()
        self._dice = dice
        self._lock = threading.Lock()
        self._held: dict[tuple[int, str], bytes] = {}
        self._removal = message(messages.encoder.encode(messages.Remove(0, wanted.key_bytes)))

    def __call__(self, frame: Frame) -> Sequence[bytes]:
        way = frame.connection, frame.direction
        with self._lock:
            held = self._held.pop(way, b"")
            if held:
                return [frame.whole, held]
            chance = self._dice.random()
            if chance > MEDDLED:
                return [frame.whole]
            how = self._dice.choice(WAYS if chance > WAITED_FOR else SILENT_WAYS)
            self.done[how] += 1
            return self._meddled(how, frame, way)

    def _meddled(self, how: str, frame: Frame, way: tuple[int, str]) -> Sequence[bytes]:
        whole = frame.whole
        match how:
            case "flip":  # a bit of the head, the tag or the bytes after it
                return [flipped(whole, self._dice.randrange(len(whole)))]
            case "repeat":
                return [whole, whole]
            case "remove" if frame.direction == TO_NODE:
                return [self._removal, whole]
            case "shorten":
                return [whole[: self._dice.randrange(len(whole))]]
            case "swap":
                self._held[way] = whole
                return []
            case "drop":
                return []
        return [whole]


def run(gets: int, seed: int) -> tuple[Tally, Counter[str]]:
    """Run until `gets` gets are checked; returns the account of the clients, and the counts of the
    relay's faults."""
    dice = random.Random(seed)
    tally = Tally()
    pinned = fresh_prefix(PINNED_BLOCKS)
    meddling = Meddling(dice, pinned)
    with tempfile.TemporaryDirectory() as folder:
        attacked = Attacked(Path(folder), meddling, blocks=BLOCKS, keep=False)
        try:
            attacked.put_inside(pinned)
            with Client.attach(attacked.node) as client:
                client.pin(pinned, hard=True)
            port = attacked.middle.address[1]
            url = f"tiffin://127.0.0.1:{port}?token_file={attacked.token_file}"
            crowds = [
                Visitors(Configuration([url], dice.randrange(1 << 30))) for _ in range(PROCESSES)
            ]
            while sum(crowd.gets for crowd in crowds) < gets:
                if any(crowd.ended for crowd in crowds):
                    break
                time.sleep(0.2)
            for crowd in crowds:
                tally.add(crowd.finish())
            if attacked.has(pinned) != PINNED_BLOCKS:
                tally.wrong.append("blocks were removed by somebody without the token")
        finally:
            attacked.close()
    return tally, meddling.done


def main(arguments: list[str]) -> int:
    """See `__main__`."""
    chosen = parse("relay", arguments, gets=50_000)
    began = time.monotonic()
    tally, done = run(chosen.gets, chosen.seed)
    return report("relay", chosen.seed, began, tally, done)
