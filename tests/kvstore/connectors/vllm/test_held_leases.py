"""Who keeps a lease, from the lookup until all workers have read the blocks."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from tiffin.kvstore.client.blocks.block_places import BlockPlaces, RegionId
from tiffin.kvstore.connectors.vllm.held_leases import HOLD_S, HeldBlocks, HeldLeases

REGION, OTHER = RegionId(0, 1), RegionId(0, 2)


class Lease:
    def __init__(self) -> None:
        self.releases = 0

    def release(self) -> None:
        self.releases += 1


def held(region: RegionId = REGION, blocks: int = 2) -> HeldBlocks:
    return HeldBlocks(Lease(), BlockPlaces(region, tuple(range(blocks)), 100))  # type: ignore[arg-type]


def released(one: HeldBlocks) -> bool:
    lease: Any = one.leased
    assert lease.releases <= 1, "released twice"
    return bool(lease.releases)


def load(number: int, request_id: str = "r", *, is_held: bool = True) -> Any:
    return SimpleNamespace(number=number, request_id=request_id, held=is_held or None)


@pytest.fixture
def leases() -> HeldLeases:
    """Of an engine with two workers, both of which can read REGION."""
    leases = HeldLeases(2)
    leases.mapped(Counter({REGION: 2}))
    return leases


def test_a_lease_is_kept_until_both_workers_have_ended_the_load(leases: HeldLeases) -> None:
    one = held()
    assert leases.keep("r", one, now=0.0)
    assert leases.held_bytes == 200
    leases.ordered([load(7), load(8, "unheld", is_held=False)])
    leases.drop("r")  # the request is aborted: workers may still read
    assert leases.expire(now=100.0) == []
    leases.ended({7: 1})
    assert not released(one)
    leases.ended({7: 1})
    assert released(one)
    assert leases.held_bytes == 0


def test_both_reports_may_come_together(leases: HeldLeases) -> None:
    one = held()
    leases.keep("r", one, now=0.0)
    leases.ordered([load(7)])
    leases.ended({7: 2})
    assert released(one)


def test_nothing_is_kept_that_a_worker_can_not_read(leases: HeldLeases) -> None:
    leases.mapped(Counter({OTHER: 1}))
    one = held(OTHER)
    assert not leases.keep("r", one, now=0.0)
    assert released(one)
    leases.mapped(Counter({OTHER: 1}))
    assert leases.keep("r", held(OTHER), now=0.0)


def test_without_any_memory_that_all_can_read_no_lease_is_worth_asking_for() -> None:
    leases = HeldLeases(2)
    assert not leases.readable()
    leases.mapped(Counter({REGION: 1}))
    assert not leases.readable()
    leases.mapped(Counter({REGION: 1}))
    assert leases.readable()


def test_a_request_that_leaves_or_asks_anew_gives_its_lease_back(leases: HeldLeases) -> None:
    first, second = held(), held()
    leases.keep("r", first, now=0.0)
    leases.keep("r", second, now=0.0)
    assert released(first)
    leases.drop("r")
    assert released(second)
    leases.drop("r")
    leases.drop("unknown")


def test_a_lease_waits_only_so_long_for_the_engine_to_have_pages(leases: HeldLeases) -> None:
    early, late = held(), held()
    leases.keep("early", early, now=0.0)
    leases.keep("late", late, now=1.0)
    assert leases.expire(now=HOLD_S - 0.1) == []
    assert leases.expire(now=HOLD_S) == ["early"]
    assert released(early)
    assert not released(late)


def test_memory_of_a_node_that_is_gone_is_left_once_nothing_is_held_in_it(
    leases: HeldLeases,
) -> None:
    old, new = held(), held(OTHER)
    assert leases.leave_regions() == []
    leases.keep("old", old, now=0.0)
    leases.mapped(Counter({OTHER: 2}))
    leases.keep("new", new, now=0.0)
    assert leases.leave_regions() == []
    leases.ordered([load(1, "old")])
    assert leases.leave_regions() == []
    leases.ended({1: 2})
    assert leases.leave_regions() == [REGION]
    assert leases.leave_regions() == []
    assert not leases.keep("late", held(), now=0.0)  # nobody can read it any more


def test_closing_releases_all(leases: HeldLeases) -> None:
    waiting, loading = held(), held()
    leases.keep("a", loading, now=0.0)
    leases.ordered([load(1, "a")])
    leases.keep("b", waiting, now=0.0)
    leases.close()
    assert released(waiting)
    assert released(loading)
