"""All nodes of a pool at a glance: what `tiffin status URL` shows.

It asks every node for its numbers, the directory for the membership and the nodes' own measurements
of their ways to each other, and counts replicas in a bounded sample of blocks. Nothing here is in
the way of a reader: a node that does not answer costs `ASK_S`, once, for all of them together.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..client.pool.members import FixedMembers
from ..client.pool.pool_verbs import ask_all
from ..client.pool.verb_driver import VerbDriver
from ..credentials import load_credentials
from ..directory import open_directory
from ..directory.base import unreadable
from ..errors import TiffinError
from ..format.header import KEY_BYTES
from ..node.core import messages
from ..node.core.node_core import split_keys

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..directory.base import Directory, NodeRecord
    from ..url import Pool

# How long one node may take to give its numbers.
ASK_S = 2.0

# Replicas are counted in a sample: so many blocks of so many nodes, 256 KiB of keys and one
# question to the directory. An inventory's page is 1 MiB.
SAMPLE_KEYS_MAX = 16_384
SAMPLE_NODES_MAX = 32
# How old the count may be when the overview is drawn again and again.
COUNT_AGE_S = 10.0

_TIER_FIELDS = ("capacity_bytes", "used_bytes", "free_bytes", "blocks", "healthy", "writable")


@dataclass(frozen=True, slots=True)
class Sample:
    """Keys taken from one node's inventory, of so many that it has."""

    node: int
    keys: Sequence[bytes]
    blocks: int


def count_replicas(
    samples: Sequence[Sample], holders: Mapping[bytes, set[int]], blocks: int
) -> dict[str, Any]:
    """How many blocks of a pool are on one node, on two, on three or more. Pure.

    `blocks` is how many all nodes have together, replicas counted each. A block on r nodes is r
    times as likely to be in a sample, so each find counts for 1/r; with that, and each sample
    scaled to its node, the estimate has no bias. It is exact where the samples are complete.
    """
    counts = {"1": 0.0, "2": 0.0, "3+": 0.0}
    seen = sum(sample.blocks for sample in samples)
    for sample in samples:
        if not sample.keys:
            continue
        weight = sample.blocks / len(sample.keys) * (blocks / seen)
        for key in sample.keys:
            number = len(holders.get(key, set()) | {sample.node})
            counts["3+" if number > 2 else str(number)] += weight / number
    exact = seen == blocks and all(len(sample.keys) == sample.blocks for sample in samples)
    taken = sum(len(sample.keys) for sample in samples)
    return {"blocks": {name: round(n) for name, n in counts.items()}, "of": taken, "exact": exact}


def open_driver(target: Pool, name: str) -> VerbDriver:
    """What asks the nodes of a pool, and knows its members. Raises InvalidInput."""
    credentials = load_credentials(**target.credentials)
    members: Directory | FixedMembers
    if target.directory:
        members = open_directory(target.directory, pool=target.pool, token=credentials.token)
    else:
        members = FixedMembers(target.addresses)
    return VerbDriver(members, credentials, name)


class Overview:
    """Looks at one pool, as often as asked. Raises InvalidInput for a URL that can't work.

    `look` raises DirectoryUnavailable when there is a directory and it does not answer.
    """

    def __init__(self, target: Pool, name: str = "tiffin status") -> None:
        self._pool = target.pool
        self._driver = open_driver(target, name)
        members: Any = self._driver.members
        self._directory: Directory | None = None if isinstance(members, FixedMembers) else members
        self._counted: dict[str, Any] = {}
        self._counted_at = float("-inf")

    def close(self) -> None:
        """Hang up."""
        self._driver.close()

    def look(self, *, replicas: bool = True) -> dict[str, Any]:
        """The pool now, as plain nested values; docs/operations.md explains each."""
        records = dict(self._driver.members.nodes())
        replies = self._ask(list(records), messages.Statistics)
        nodes = [_node(records[n], replies.get(n)) for n in sorted(records)]
        nodes.sort(key=lambda node: (node["name"], node["number"]))
        found: dict[str, Any] = {
            "pool": self._pool,
            "directory": self._directory_numbers(),
            "nodes": nodes,
            "links": {r.name: r.links for r in records.values() if r.links},
        }
        found["reasons"] = self._reasons(found["nodes"], found["directory"])
        if replicas:
            found["replicas"] = self._replicas(
                {n: reply.numbers["blocks"] for n, reply in replies.items() if _good(reply)}
            )
        return found

    def _ask(self, numbers: Sequence[int], make: type[messages.Request]) -> dict[int, Any]:
        return self._driver.run(ask_all(numbers, lambda: make(0), ASK_S)) if numbers else {}

    def _directory_numbers(self) -> dict[str, Any] | None:
        if self._directory is None:
            return None
        started = time.monotonic()
        self._directory.locate([bytes(KEY_BYTES)])
        round_trip_s = time.monotonic() - started
        return {**self._directory.statistics(), "round_trip_s": round_trip_s}

    def _reasons(
        self, nodes: Sequence[Mapping[str, Any]], numbers: Mapping[str, Any] | None
    ) -> list[str]:
        """What is wrong with the pool as a whole."""
        reasons = clashes(nodes)
        if self._directory is None or numbers is None or nodes:
            return reasons
        if why := unreadable(numbers):
            return [why]
        others = [name for name in self._directory.pools() if name != self._pool]
        known = f"; the directory has: {', '.join(others)}" if others else ""
        return [f"no node is registered in pool {self._pool}{known}"]

    # -- replicas --------------------------------------------------------------------------------

    def _replicas(self, blocks: Mapping[int, int]) -> dict[str, Any]:
        if time.monotonic() < self._counted_at + COUNT_AGE_S:
            return self._counted
        asked = [node for node, count in blocks.items() if count]
        asked = random.sample(asked, min(SAMPLE_NODES_MAX, len(asked)))
        share = SAMPLE_KEYS_MAX // max(1, len(asked))
        pages = self._ask(asked, messages.Inventory)
        samples = []
        for node, page in pages.items():
            if isinstance(page, messages.KeyPage):
                keys = split_keys(page.keys)
                # Blocks beyond the first page are left out: 65,536 are terabytes of them.
                total = max(blocks[node], len(keys)) if page.more else len(keys)
                samples.append(Sample(node, random.sample(keys, min(share, len(keys))), total))
        missed = sum(count for node, count in blocks.items() if node not in pages)
        total = missed + sum(sample.blocks for sample in samples)
        self._counted = count_replicas(samples, self._holders(samples, list(blocks)), total)
        self._counted_at = time.monotonic()
        return self._counted

    def _holders(self, samples: Sequence[Sample], nodes: Sequence[int]) -> dict[bytes, set[int]]:
        keys = list({key for sample in samples for key in sample.keys})
        if not keys:
            return {}
        if self._directory is not None:
            located = self._directory.locate(keys)
            return dict(zip(keys, map(set, located), strict=True))
        holders: dict[bytes, set[int]] = {key: set() for key in keys}
        joined = b"".join(keys)
        assert len(joined) == len(keys) * KEY_BYTES
        replies = self._driver.run(ask_all(nodes, lambda: messages.Exists(0, joined), ASK_S))
        for node, reply in replies.items():
            if isinstance(reply, messages.Flags):
                for key, flag in zip(keys, reply.flags, strict=True):
                    if flag:
                        holders[key].add(node)
        return holders


def clashes(nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names that nodes at several addresses have. Pure."""
    addresses: dict[str, set[str]] = {}
    for node in nodes:
        addresses.setdefault(node["name"], set()).add(node["address"])
    return [
        f"several nodes are called {name}, at {', '.join(sorted(at))}: give each its own --name"
        for name, at in addresses.items()
        if len(at) > 1
    ]


def _good(reply: object) -> bool:
    return isinstance(reply, messages.Numbers)


def _node(record: NodeRecord, reply: Any) -> dict[str, Any]:
    """One node's row. What it does not say itself is what the directory knew last."""
    row: dict[str, Any] = {
        "number": record.number,
        "name": record.name,
        "address": record.address,
        "host": record.host,
        "socket": record.socket,
        "state": "up",
        "error": None,
        "uptime_s": None,
        "blocks": None,
        "clients": None,
        "lag_events": None,
        "tiers": {},
    }
    if isinstance(reply, messages.Numbers):
        numbers = reply.numbers
        row["name"] = numbers["node"]
        row["uptime_s"] = numbers["uptime_s"]
        if numbers.get("draining", record.draining):
            row["state"] = "draining"
        row["blocks"] = numbers["blocks"]
        row["clients"] = len(numbers["sessions"])
        row["lag_events"] = numbers.get("directory", {}).get("lag_events")
        row["tiers"] = {
            name: {field: tier[field] for field in _TIER_FIELDS}
            for name, tier in numbers["tiers"].items()
        }
        return row
    row["state"] = "unreachable"
    row["error"] = str(reply) if isinstance(reply, TiffinError) else "it did not answer"
    if record.capacity_bytes:
        used = record.capacity_bytes - record.free_bytes
        known = {"capacity_bytes": record.capacity_bytes, "used_bytes": used}
        row["tiers"] = {"dram": {**known, "free_bytes": record.free_bytes}}
    return row
