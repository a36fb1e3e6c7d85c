"""The calls of clients during faults, and their account: right answers, refused calls, and
findings, which break a promise of the store.

A `Visitor` opens clients and calls their verbs at random, checks every byte, and times every call.
"""

from __future__ import annotations

import contextlib
import math
import random
import sys
import threading
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from kvsupport import SCHEMA, payload_of
from streamworker import is_right

from tiffin.kvstore import Client
from tiffin.kvstore.errors import TiffinError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from faults.faultpool import Watch
    from numpy.typing import NDArray

    from tiffin.kvstore import Prefix

T = TypeVar("T")

TIMEOUTS_S = (0.5, 2.0, 8.0)
PROMPTS = 60
BLOCKS_MAX = 8
# The most findings of each kind that are listed.
TOLD = 10


def prompt(document: int, blocks: int) -> Prefix:
    """A prompt, the same in every run: blocks that nodes recover from NVMe are right as well."""
    tokens = np.arange(blocks * SCHEMA.block_tokens) + document
    return SCHEMA.prefix(tokens, namespace=f"document {document}")


@lru_cache(maxsize=PROMPTS * BLOCKS_MAX)
def right(key: bytes) -> NDArray[np.uint8]:
    """The right bytes of a block; made once."""
    return payload_of(key)


class Abandoned(Exception):
    """Raised by a writer to abandon its write."""


@dataclass
class Account:
    """The results of the calls of some visitors. `wrong`, `untyped` and `late` remain empty if the
    store keeps its promises; each has a line per finding, up to `TOLD`."""

    done: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    gets: int = 0
    checked_blocks: int = 0
    wrong: list[str] = field(default_factory=list)
    untyped: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)

    @property
    def findings(self) -> list[str]:
        """All findings."""
        return [*self.wrong, *self.untyped, *self.late]

    def check(self, found: Any, key: bytes) -> None:
        """Count a block that was read, and whether its bytes are right."""
        self.checked_blocks += 1
        if not np.array_equal(found, right(key)):
            self.wrong.append(f"wrong bytes for {key.hex()}")


class Visitor:
    """One thread's clients, each of one of `urls` and used for up to 100 calls."""

    def __init__(
        self, urls: Sequence[str], seed: int, watch: Watch, account: Account, *, over_s: float
    ) -> None:
        """`over_s`: how long after its deadline a call may end, not counting the time in which
        `watch` saw that this process did not run."""
        self.dice = random.Random(seed)
        self.account = account
        self._urls = urls
        self._watch = watch
        self._over_s = over_s
        self._witness = Witness()
        self._verb = ""

    def visit(self, ending: Callable[[], bool]) -> None:
        """Make calls until `ending()`; then every client is closed."""
        while not ending():
            with contextlib.suppress(TiffinError), self._open() as client:
                for _ in range(self.dice.randint(1, 100)):
                    if ending():
                        return
                    self._call(client)

    def close(self) -> None:
        self._witness.close()

    def _open(self) -> Any:
        return Client.open(self.dice.choice(self._urls), name="visitor")

    def _call(self, client: Any) -> None:
        (verb,) = self.dice.choices(list(VERBS), list(VERBS.values()))
        popular = min(int(self.dice.paretovariate(0.7)), PROMPTS)
        prefix = prompt(popular, self.dice.randint(1, BLOCKS_MAX))
        self._verb = f"{verb.__name__} of {type(client).__name__}"
        try:
            verb(self, client, prefix, self.dice.choice(TIMEOUTS_S))
            self.account.done[verb.__name__] += 1
        except TiffinError as error:
            self.account.refused[f"{verb.__name__}: {type(error).__name__}"] += 1
        except Exception as error:  # noqa: BLE001 - any other exception is a finding
            self.account.untyped.append(f"{verb.__name__}: {type(error).__name__}: {error}")

    def timed(self, call: Callable[..., T], *arguments: Any, timeout_s: float) -> T:
        """Make a call and check its duration; returns or raises what the call does."""
        began = time.monotonic()
        self._witness.expect(began + timeout_s + self._over_s)
        try:
            return call(*arguments, timeout_s=timeout_s)
        finally:
            ended = time.monotonic()
            where = self._witness.saw()
            if ended - began > timeout_s + self._over_s:
                still_s = self._watch.still_s(began, ended)
                if ended - began - still_s > timeout_s + self._over_s:
                    self.account.late.append(
                        f"{self._verb} took {ended - began:.2f} s of {timeout_s} s; this process "
                        f"stood still for {still_s:.2f} s; when it was due:\n{where}"
                    )


class Witness:
    """Records the stack of the thread that made it at the time when a call should have ended."""

    _NAP_S = 0.02

    def __init__(self) -> None:
        self._whose = threading.get_ident()
        self._due = math.inf
        self._seen = ""
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._work, name="witness", daemon=True)
        self._thread.start()

    def expect(self, due: float) -> None:
        """Set the time at which the call that begins now is due, on the monotonic clock."""
        self._seen = ""
        self._due = due

    def saw(self) -> str:
        """The stack at the due time, if the call had not ended then."""
        self._due = math.inf
        return self._seen

    def _work(self) -> None:
        while not self._ending.wait(self._NAP_S):
            if time.monotonic() > self._due:
                frame = sys._current_frames().get(self._whose)
                self._seen = "".join(traceback.format_stack(frame)[-12:])
                self._due = math.inf

    def close(self) -> None:
        self._ending.set()
        self._thread.join()


# -- calls -----------------------------------------------------------------------------------------


def get(visitor: Visitor, client: Any, prefix: Prefix, timeout_s: float) -> None:
    with visitor.timed(client.get, prefix, timeout_s=timeout_s) as blocks:
        for block, key in zip(blocks, prefix.keys, strict=False):
            visitor.account.check(block.bytes, key)
    visitor.account.gets += 1


def get_into(visitor: Visitor, client: Any, prefix: Prefix, timeout_s: float) -> None:
    into = [np.zeros(SCHEMA.block_bytes, np.uint8) for _ in range(len(prefix))]
    blocks = visitor.timed(partial(client.get, into=into), prefix, timeout_s=timeout_s)
    for target, key in zip(into[: len(blocks)], prefix.keys, strict=False):
        visitor.account.check(target, key)
    visitor.account.gets += 1


def stream(visitor: Visitor, client: Any, prefix: Prefix, timeout_s: float) -> None:
    with client.stream(prefix, timeout_s=timeout_s) as layers:
        for layer in layers:
            if not is_right(layer, prefix):
                visitor.account.wrong.append(f"wrong layer of {prefix.keys[0].hex()}")


def put(visitor: Visitor, client: Any, prefix: Prefix, timeout_s: float) -> None:
    payloads = [right(key) for key in prefix.keys]
    more = {"replicas": visitor.dice.choice((1, 1, 2))} if has_several(client) else {}
    visitor.timed(partial(client.put, **more), prefix, payloads, timeout_s=timeout_s)


def reserve(visitor: Visitor, client: Any, prefix: Prefix, timeout_s: float) -> None:
    with (
        contextlib.suppress(Abandoned),
        visitor.timed(client.reserve, prefix, timeout_s=timeout_s) as slots,
    ):
        for slot in slots:
            slot.view[:] = right(prefix.keys[slot.index])
        if visitor.dice.random() < 0.5:
            raise Abandoned


def replicate(visitor: Visitor, client: Any, prefix: Prefix, timeout_s: float) -> None:
    if has_several(client):
        to = [visitor.dice.choice(list(client.nodes()))]
        visitor.timed(partial(client.replicate, to=to), prefix, timeout_s=timeout_s)


def look(visitor: Visitor, client: Any, prefix: Prefix, timeout_s: float) -> None:
    visitor.timed(client.match, prefix, timeout_s=timeout_s)
    visitor.timed(client.exists, prefix, timeout_s=timeout_s)
    visitor.timed(partial(client.pin, ttl_s=0.5), prefix, timeout_s=timeout_s)


def remove(visitor: Visitor, client: Any, prefix: Prefix, timeout_s: float) -> None:
    visitor.timed(client.remove, prefix, timeout_s=timeout_s)


def has_several(client: Any) -> bool:
    """Whether the client knows several nodes: with a single node, a put would wait in vain for one
    that takes the second replica."""
    return hasattr(client, "nodes") and len(client.nodes()) > 1


VERBS: dict[Callable[[Visitor, Any, Prefix, float], None], int] = {
    get: 6, get_into: 6, put: 6, stream: 4, reserve: 2, replicate: 1, look: 1, remove: 1,
}  # fmt: skip
