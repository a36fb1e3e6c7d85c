"""The arena against a list of booleans, and `cheapest_window` against an exhaustive search."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tiffin.bench import fragmentation
from tiffin.kvstore.errors import InvalidInput
from tiffin.kvstore.memory.arena import Arena, Extent, ExtentConflict, cheapest_window

GRANULES = 24
GRANULE_BYTES = 16
lengths = st.integers(1, 8 * GRANULE_BYTES)


class ArenaModel(RuleBasedStateMachine):
    """One boolean per granule says the same as the arena, whatever is called."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(GRANULES * GRANULE_BYTES, GRANULE_BYTES)
        self.taken = [False] * GRANULES
        self.extents: list[tuple[int, int]] = []

    def granules(self, offset: int, length: int) -> slice:
        first = offset // GRANULE_BYTES
        return slice(first, first - (-length // GRANULE_BYTES))

    def free_runs(self) -> list[Extent]:
        text = "".join("x" if taken else "." for taken in self.taken)
        runs, at = [], 0
        for part in text.replace("x", " x ").split(" "):
            if part and part != "x":
                runs.append(Extent(at * GRANULE_BYTES, len(part) * GRANULE_BYTES))
            at += len(part)
        return runs

    def mark(self, offset: int, length: int) -> None:
        where = self.granules(offset, length)
        assert not any(self.taken[where]), "given out twice"
        self.taken[where] = [True] * (where.stop - where.start)
        self.extents.append((offset, length))

    @rule(length=lengths)
    def allocate(self, length: int) -> None:
        fitting = [run for run in self.free_runs() if run.length >= length]
        assert self.arena.fits(length) == bool(fitting)
        offset = self.arena.allocate(length)
        if not fitting:
            assert offset is None
            return
        best = min(fitting, key=lambda run: (run.length, run.offset))
        assert offset == best.offset
        self.mark(best.offset, length)

    @precondition(lambda self: self.extents)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        extent = data.draw(st.sampled_from(self.extents))
        self.extents.remove(extent)
        self.arena.free(*extent)
        where = self.granules(*extent)
        self.taken[where] = [False] * (where.stop - where.start)
        with pytest.raises(ExtentConflict):
            self.arena.free(*extent)

    @rule(offset=st.integers(-1, GRANULES).map(lambda n: n * GRANULE_BYTES), length=lengths)
    def claim(self, offset: int, length: int) -> None:
        where = self.granules(offset, length)
        if offset >= 0 and where.stop <= GRANULES and not any(self.taken[where]):
            self.arena.claim(offset, length)
            self.mark(offset, length)
        else:
            with pytest.raises(ExtentConflict):
                self.arena.claim(offset, length)

    @rule(offset=st.integers(0, GRANULES - 1).map(lambda n: n * GRANULE_BYTES), length=lengths)
    def free_what_is_partly_free(self, offset: int, length: int) -> None:
        where = self.granules(offset, length)
        if where.stop > GRANULES or not all(self.taken[where]):
            with pytest.raises(ExtentConflict):
                self.arena.free(offset, length)

    @invariant()
    def same_as_the_model(self) -> None:
        self.arena.check()
        assert list(self.arena.free_runs) == self.free_runs()
        assert self.arena.used_bytes == sum(self.taken) * GRANULE_BYTES
        assert self.arena.free_bytes + self.arena.used_bytes == self.arena.capacity_bytes
        longest = max((run.length for run in self.free_runs()), default=0)
        assert self.arena.largest_free_bytes == longest


ArenaModel.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestArenaModel = ArenaModel.TestCase


def test_lengths_are_rounded_up_to_the_granule() -> None:
    arena = Arena(4 * 4096)
    assert [arena.round_up(n) for n in (1, 4096, 4097)] == [4096, 4096, 8192]
    assert arena.allocate(1) == 0
    assert arena.allocate(4097) == 4096
    assert arena.used_bytes == 3 * 4096
    arena.free(4096, 4097)
    assert arena.used_bytes == 4096


def test_a_hole_is_filled_by_its_own_size_before_a_longer_run_is_broken() -> None:
    arena = Arena(100, granule_bytes=1)
    offsets = [arena.allocate(10) for _ in range(5)]
    assert offsets == [0, 10, 20, 30, 40]
    arena.free(10, 10)
    assert arena.allocate(10) == 10
    assert arena.largest_free_bytes == 50


def test_everything_returns_to_one_run() -> None:
    arena = Arena(64, granule_bytes=1)
    for start in range(64):
        arena.claim(start, 1)
    assert (arena.free_bytes, arena.largest_free_bytes, arena.fits(1)) == (0, 0, False)
    for start in [*range(0, 64, 2), *range(1, 64, 2)]:
        arena.free(start, 1)
    assert list(arena.free_runs) == [Extent(0, 64)]


@pytest.mark.parametrize(("capacity", "granule"), [(0, 4096), (-4096, 4096), (4097, 4096), (8, 0)])
def test_a_capacity_that_cannot_work_is_refused(capacity: int, granule: int) -> None:
    with pytest.raises(InvalidInput):
        Arena(capacity, granule)


@pytest.mark.parametrize("length", [0, -1])
def test_an_extent_has_bytes(length: int) -> None:
    arena = Arena(4096)
    for call in (arena.allocate, arena.fits, arena.round_up):
        with pytest.raises(InvalidInput):
            call(length)


@pytest.mark.parametrize("offset", [-4096, 1, 4096 * 4])
def test_an_offset_that_was_never_given_out_is_refused(offset: int) -> None:
    arena = Arena(4 * 4096)
    arena.claim(0, 4 * 4096)
    with pytest.raises(ExtentConflict, match="no extent of this arena"):
        arena.free(offset, 4096)


def test_repr_tells_the_state() -> None:
    arena = Arena(3 * 4096)
    arena.claim(4096, 1)
    assert repr(arena) == "<Arena 4096 of 12288 bytes used, 2 free runs, longest 4096>"


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[Extent], list[Extent]]:
    """Free runs and evictable extents, with obstacles between some of them."""
    free: list[Extent] = []
    evictable: list[Extent] = []
    at = 0
    for kind, length in draw(
        st.lists(st.tuples(st.sampled_from("feo"), st.integers(1, 5)), max_size=9)
    ):
        if kind != "o":
            (free if kind == "f" else evictable).append(Extent(at, length))
        at += length
    return free, draw(st.permutations(evictable))


def longest_run(pieces: list[Extent]) -> int:
    longest = length = 0
    end = -1
    for piece in sorted(pieces):
        length = length + piece.length if piece.offset == end else piece.length
        end = piece.end
        longest = max(longest, length)
    return longest


@given(layout=layouts(), need=st.integers(1, 16), more=st.lists(st.integers(0, 3), min_size=9))
@settings(max_examples=300, deadline=None)
def test_cheapest_window_finds_what_trying_everything_finds(
    layout: tuple[list[Extent], list[Extent]], need: int, more: list[int]
) -> None:
    free, extents = layout
    evictable = [(*e, e.length + extra) for e, extra in zip(extents, more, strict=False)]
    costs = [
        sum(cost for _, _, cost in chosen)
        for count in range(len(evictable) + 1)
        for chosen in combinations(evictable, count)
        if longest_run([*free, *(Extent(*e[:2]) for e in chosen)]) >= need
    ]
    window = cheapest_window(free, evictable, need)
    if not costs:
        assert window == []
        return
    assert sum(evictable[index][2] for index in window) == min(costs)
    assert longest_run([*free, *(extents[index] for index in window)]) >= need


def test_cheapest_window_stops_at_obstacles() -> None:
    free = [(0, 2), (10, 2)]
    evictable = [(2, 4, 4), (7, 3, 3)]  # [6, 7) is leased
    assert cheapest_window(free, evictable, 5) == [1]
    assert cheapest_window(free, evictable, 6) == [0]
    assert cheapest_window(free, evictable, 7) == []
    assert cheapest_window(free, evictable, 2) == []
    with pytest.raises(InvalidInput):
        cheapest_window(free, evictable, 0)


@pytest.mark.parametrize("name", fragmentation.SIZES)
def test_sizes_that_share_an_arena_do_not_fragment_it(name: str) -> None:
    result = fragmentation.run(40_000, sizes=fragmentation.SIZES[name], blocks=2000)
    assert result["failed_share"] < 0.001
    assert result["fill_mean"] > 0.94


@pytest.mark.parametrize("placement", fragmentation.PLACEMENTS)
def test_every_placement_of_the_comparison_runs(placement: str) -> None:
    result = fragmentation.run(3_000, placement=placement, blocks=200)
    assert result["operations"] >= 3_000


@pytest.mark.parametrize("drifting", [False, True])
def test_a_window_costs_less_than_random_victims(drifting: bool) -> None:
    """In a small arena, and when the mix changes, placement alone fails."""
    price = {
        evict: fragmentation.run(20_000, drifting=drifting, evict=evict, blocks=500)["price_share"]
        for evict in ("random", "window")
    }
    assert 0 < price["window"] < price["random"] * 0.65
