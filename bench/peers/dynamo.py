"""Rows beside Dynamo: events into its prefix index, look-ups there, memory, keys, and its
selection of a worker."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import time
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from tiffin.conductor.events.index_updates import Announced
from tiffin.conductor.events.node_cursor import NodeCursor
from tiffin.conductor.events.routed_blocks import Holdings
from tiffin.conductor.state.prefix_index import PrefixIndex
from tiffin.kvstore.node.core import messages

from ..conductor import setting as conductor_setting
from ..conductor.decision import HOT, PRIVATE, Traffic, scene
from ..conductor.dynamo import selection_service
from ..conductor.index import keys_of
from ..store.rows import MICROSECONDS, timed
from ..vllm.engine_process import GroupProcess
from .hashing import hashed
from .setting import BLOCK_TOKENS
from .turns import PeerRow, Turns, in_turns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ..conductor.processes.peer import PeerProcess
    from ..store.rows import Row
    from .setting import Setting, Sizes

_PEER = "dynamo"
_KINDS = {
    "private": "all but the shared blocks on one instance",
    "hot": "all on all instances",
    "miss": "on none",
}
_WARM_DECISIONS = 100


def dynamo(setting: Setting) -> list[Row]:
    """All rows. Raises Missing, NodeUnavailable."""
    sizes = setting.sizes
    numbers = (sizes.workers, sizes.prompt_blocks, sizes.shared_blocks)
    command = setting.command(_PEER, "dynamo_index.py", *numbers)
    with _process(command) as theirs:
        # Memory first: later, its allocator has pages to spare.
        rows: list[Row] = [
            _memory(setting, theirs),
            _applied(setting, theirs),
            *_matched(setting, theirs),
        ]
        what = "Dynamo's compute_block_hash_for_seq of the same list"
        rows.append(hashed(setting, _PEER, theirs, what, block_tokens=BLOCK_TOKENS))
    return [*rows, *_selected(setting)]


@contextlib.contextmanager
def _process(command: list[str]) -> Iterator[GroupProcess]:
    process = GroupProcess("Dynamo", command)
    try:
        process.ready()
        yield process
    finally:
        process.end()


# -- the index -------------------------------------------------------------------------------------


def _applied(setting: Setting, theirs: GroupProcess) -> PeerRow:
    sizes = setting.sizes
    setting.tell(f"{sizes.events} events")

    def other() -> list[float]:
        return [theirs.tell("apply", events=sizes.events, blocks=sizes.event_blocks)]

    def ours() -> list[float]:
        return [_apply(sizes)]

    turns = in_turns(ours, other, sizes.rounds)
    return turns.row(
        _PEER,
        "index-apply",
        f"an event of {sizes.event_blocks} new blocks, from its bytes to the index; "
        f"{sizes.workers} holders take turns",
        "RadixTree.apply_event of the same, until a look-up answers",
        "us",
        MICROSECONDS / sizes.events,
        "ours come as msgpack, as nodes send them; theirs as JSON, as the binding takes them",
    )


def _apply(sizes: Sizes) -> float:
    """Seconds until a new index has the events of as many nodes, from their answers' bytes."""
    holdings = Holdings(PrefixIndex())
    cursors = [NodeCursor(f"node-{n}", 0.0, random.Random(n)) for n in range(sizes.workers)]
    for cursor in cursors:
        cursor.answered(messages.KeyPage(0, 0, b"", more=False), 0.0)
    blocks = sizes.event_blocks
    batch = [
        messages.encoder.encode(
            messages.EventPage(
                0,
                first=1 + number // sizes.workers * blocks,
                added=bytes([1]) * blocks,
                keys=b"".join(keys_of(blocks)),
            )
        )
        for number in range(sizes.events)
    ]
    decode = messages.reply_decoder.decode
    start_s = time.perf_counter()
    for number, raw in enumerate(batch):
        for update in cursors[number % sizes.workers].answered(decode(raw), 0.0):
            assert not isinstance(update, Announced)  # events were answered
            holdings.apply(update, 0.0)
    return time.perf_counter() - start_s


class _Index:
    """Our index with the same holdings as the peer's tree."""

    def __init__(self, sizes: Sizes) -> None:
        self._sizes, self._dice, self._index = sizes, random.Random(0), PrefixIndex()
        shared = keys_of(sizes.shared_blocks)
        tail = sizes.prompt_blocks - sizes.shared_blocks
        self._prompts = [shared + keys_of(tail) for _ in range(sizes.workers)]
        self._hot = keys_of(sizes.prompt_blocks)
        for at, prompt in enumerate(self._prompts):
            number = self._index.holder(f"instance-{at}", "hbm")
            self._index.add(number, prompt, 0.0)
            self._index.add(number, self._hot, 0.0)

    def match(self, kind: str, calls: int, *, scores: bool) -> list[float]:
        """Seconds of each look-up; `scores`: as a dict of the instances that have any block."""
        left = iter([self._prompt(kind) for _ in range(calls)])
        return timed(
            lambda: self._scores(next(left)) if scores else self._lengths(next(left)), calls
        )

    def _lengths(self, keys: list[bytes]) -> object:
        return self._index.match(keys).lengths(self._index.width)

    def _scores(self, keys: list[bytes]) -> dict[int, int]:
        lengths = self._index.match(keys).lengths(self._index.width)
        found = np.flatnonzero(lengths)
        return dict(zip(found.tolist(), lengths[found].tolist(), strict=True))

    def _prompt(self, kind: str) -> list[bytes]:
        """A prompt as it comes with a request: in new objects, without a cached hash."""
        if kind == "miss":
            return keys_of(self._sizes.prompt_blocks)
        keys = self._hot if kind == "hot" else self._dice.choice(self._prompts)
        return [bytes(bytearray(key)) for key in keys]


def _matched(setting: Setting, theirs: GroupProcess) -> Iterator[PeerRow]:
    sizes = setting.sizes
    index = _Index(sizes)
    for kind, where in _KINDS.items():
        for scores in (False, True):
            setting.tell(f"look-ups of blocks {where}")
            calls = 10 * sizes.calls
            asked = partial(theirs.tell, "match", kind=kind, calls=calls, scores=scores)
            turns = in_turns(partial(index.match, kind, calls, scores=scores), asked, sizes.rounds)
            yield turns.row(
                _PEER,
                f"index-match-{kind}{'-scores' if scores else ''}",
                f"leading blocks of {sizes.prompt_blocks} on each of {sizes.workers} instances, "
                f"{where}{', as a dict' if scores else ''}",
                f"RadixTree.find_matches{' and its scores, a dict' if scores else ''}",
                "us",
                MICROSECONDS,
                "" if scores else "theirs stays in Rust, ours is an array",
            )


def _memory(setting: Setting, theirs: GroupProcess) -> PeerRow:
    blocks, each = setting.sizes.resident_blocks, setting.sizes.event_blocks
    setting.tell(f"memory of {blocks} blocks")
    # Once each: what a process grows by hardly differs from one run to the next.
    turns = Turns([[_resident(blocks)]], [[theirs.tell("resident", blocks=blocks, each=each)]])
    return turns.row(
        _PEER,
        "index-memory",
        f"memory of the index per block, at {blocks} blocks",
        f"RadixTree's, of as many in events of {each}",
        "B",
        1.0,
        "measured once each, as the growth of a process",
    )


def _resident(blocks: int) -> float:
    program = [sys.executable, "-m", "tiffin.bench.conductor.index", "index"]
    done = subprocess.run([*program, str(blocks)], capture_output=True, text=True, check=True)
    found: float = json.loads(done.stdout)["per_block"]
    return found


# -- the selection of a worker ---------------------------------------------------------------------


def _selected(setting: Setting) -> Iterator[PeerRow]:
    sizes = setting.sizes
    scenes = conductor_setting.Sizes(
        instances=sizes.workers,
        prompt_blocks=sizes.prompt_blocks,
        shared_blocks=sizes.shared_blocks,
    )
    there = conductor_setting.Setting(scenes, setting.python(_PEER))
    with selection_service(there) as theirs:
        for kind in (PRIVATE, HOT):
            setting.tell(f"decisions: {scene(scenes, kind)}")
            traffic = Traffic(scenes, kind)
            theirs.ask(f"hold {traffic.in_flight}")
            for word, act, title, call in (
                ("select", traffic.decide, "a decision", "select"),
                ("reserve", traffic.schedule, "a decision, reserved", "select_and_reserve"),
            ):
                theirs.ask(f"{word} {_WARM_DECISIONS}")
                after = traffic.go_on if word == "select" else traffic.next
                ours = partial(_decide, act, after, sizes.decisions)
                other = partial(_ask, theirs, word, sizes.decisions)
                turns = in_turns(ours, other, sizes.rounds)
                yield turns.row(
                    _PEER,
                    f"{word}-{kind}",
                    f"{title}: {scene(scenes, kind)}",
                    f"SelectionService.{call} of as many blocks and workers",
                    "us",
                    MICROSECONDS,
                    "its index is empty, ours is not",
                )


def _decide(act: Callable[[], object], after: Callable[[], object], calls: int) -> list[float]:
    """Seconds of each; `after` makes the next request, and is not timed."""
    seconds = []
    for _ in range(calls):
        seconds += timed(act, 1)
        after()
    return seconds


def _ask(theirs: PeerProcess, word: str, calls: int) -> list[float]:
    seconds: list[float] = theirs.ask(f"{word} {calls}")
    return seconds
