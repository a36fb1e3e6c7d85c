"""The core under random, seeded events: clients start, write, read, stop, wake and die; disks fail.

The simulation replaces the shell, with one word of memory per granule. A writer writes its block's
name into every granule of its extent, in any order, as late and as often as it likes until it has
acknowledged or died: that is what a process that maps shared memory can do. The promise under
test: a reader that holds a lease sees the bytes of the key it asked for, from its first look to
its last, whatever else happens.

A failure prints its seed; `Simulation(seed).run(steps)` repeats it.
"""

import contextlib
import random

import pytest

from tiffin.kvstore.errors import InvalidInput, StaleLease
from tiffin.kvstore.format.header import BlockState
from tiffin.kvstore.memory.arena import Arena
from tiffin.kvstore.memory.eviction import POLICIES, make_policy
from tiffin.kvstore.node.core import messages
from tiffin.kvstore.node.core.node_core import CoreOptions, NodeCore, split_keys
from tiffin.kvstore.node.core.precommit_reads import publish
from tiffin.kvstore.node.core.records import Move, MoveOutcome, PinLevel, Wipe
from tiffin.kvstore.node.core.tier_ledger import TierSpace
from tiffin.kvstore.node.core.windows import SHARE
from tiffin.kvstore.tiers.base import TierName

GRANULE = 4096
CHAINS, DEPTH = 6, 7
ROOT = bytes(16)


def key(chain: int, index: int) -> bytes:
    return bytes([chain + 1, index]).ljust(16, b"\0")


def length_of(chain: int) -> int:
    """Three schemas of different block sizes share the pool."""
    return (1, 2, 5)[chain % 3] * GRANULE


def longest(pieces) -> int:
    """The longest run of bytes that these (offset, length) make together."""
    best = run = end = 0
    for offset, length in sorted(pieces):
        run, end = length + (run if offset == end else 0), offset + length
        best = max(best, run)
    return best


class Process:
    """A client process: its session, what it believes it may touch, and whether it is alive."""

    def __init__(self, session) -> None:
        self.session = session
        self.writing = {}  # lease id -> replicas it may still scribble on
        self.reading = {}  # lease id -> [(replica, key, granule name it must keep seeing)]
        self.following = {}  # lease id -> [(replica, names that each granule may have)]
        self.stopped = False


class Simulation:
    def __init__(self, seed: int, policy: str = "lru") -> None:
        self.random = random.Random(seed)
        self.seed = seed
        self.now = 0.0
        arenas = {TierName.DRAM: Arena(40 * GRANULE), TierName.NVME: Arena(70 * GRANULE)}
        self.memory = {tier: [None] * (a.capacity_bytes // GRANULE) for tier, a in arenas.items()}
        nvme = TierSpace(TierName.NVME, arenas[TierName.NVME], make_policy(policy))
        options = CoreOptions(write_lease_s=5.0, demote_on_second_use=self.random.random() < 0.3)
        self.core = NodeCore(
            TierSpace(TierName.DRAM, arenas[TierName.DRAM], make_policy(policy)),
            nvme if self.random.random() < 0.8 else None,
            options,
        )
        self.processes = [self.connect() for _ in range(4)]
        self.moves: list[Move] = []
        self.wipes: list[Wipe] = []
        self.tickets = []
        self.followed: dict[bytes, int] = {}  # the tiers of blocks, by events alone
        self.events_seen = 0
        self.tiers_changed = 0
        self.reads_checked = 0
        self.follows_checked = 0
        self.windows_checked = 0
        self.open_window = self.core.residency._open_window
        self.core.residency._open_window = self.open_window_checked

    def connect(self) -> Process:
        return Process(self.core.connect("simulated", 0))

    # -- memory ----------------------------------------------------------------------------------

    def granules(self, replica) -> range:
        return range(replica.offset // GRANULE, (replica.offset + replica.length) // GRANULE)

    def scribble(self, replica, share: float) -> None:
        for place in self.granules(replica):
            if self.random.random() < share:
                self.memory[replica.tier][place] = replica.block.key, replica.generation

    def intact(self, replica) -> bool:
        name = replica.block.key, replica.generation
        return all(self.memory[replica.tier][place] == name for place in self.granules(replica))

    # -- which blocks leave ----------------------------------------------------------------------

    def open_window_checked(self, space, length, priority) -> bool:
        """What leaves is among the oldest eighth; or no run could be opened by half of what is as
        old as the youngest that leaves."""
        order, runs = list(space.candidates()), list(space.arena.free_runs)
        childless = {r for r in order if not r.holds and not r.block.children}
        opened = self.open_window(space, length, priority)
        left = [at for at, r in enumerate(order) if r.state is not BlockState.COMMITTED]
        if left:
            self.windows_checked += 1
            looks = left[-1] + 1
            if looks > max(1, len(order) // SHARE):
                older = [(r.offset, r.length) for r in order[: looks // 2] if r in childless]
                assert longest(runs + older) < length, (self.seed, looks, len(order))
        return opened

    # -- what clients do -------------------------------------------------------------------------

    def process(self) -> Process | None:
        awake = [p for p in self.processes if not p.stopped and not p.session.gone]
        return self.random.choice(awake) if awake else None

    def reserve(self, process: Process) -> None:
        chain = self.random.randrange(CHAINS)
        first = self.random.choice([0, 0, self.random.randrange(DEPTH)])
        keys = [key(chain, i) for i in range(first, self.random.randint(first + 1, DEPTH))]
        parent = key(chain, first - 1) if first else ROOT
        made = self.core.reserve(process.session, keys, parent, first, length_of(chain), self.now)
        if made.lease is not None:
            process.writing[made.lease.id] = list(made.lease.replicas)

    def write(self, process: Process) -> None:
        for replicas in process.writing.values():
            for replica in replicas:
                self.scribble(replica, 0.5)

    def commit(self, process: Process) -> None:
        if not process.writing:
            return
        lease_id = self.random.choice(list(process.writing))
        for replica in process.writing[lease_id]:
            self.scribble(replica, 1.0)
        del process.writing[lease_id]  # it has acknowledged that it writes there no more
        try:
            lease = self.core.write_lease(process.session, lease_id)
        except StaleLease:
            return
        good = [self.random.random() < 0.9 for _ in lease.replicas]
        self.core.commit(lease, good)

    def abort(self, process: Process) -> None:
        if process.writing:
            lease_id, _ = process.writing.popitem()
            with contextlib.suppress(StaleLease):
                self.core.abort(process.session, lease_id)

    def read(self, process: Process) -> None:
        chain = self.random.randrange(CHAINS)
        first = self.random.choice([0, 0, 0, self.random.randrange(DEPTH)])
        keys = [key(chain, i) for i in range(first, DEPTH)]
        follows = self.random.random() < 0.3
        ticket = self.core.lease(process.session, keys, follows=follows)
        self.tickets.append((process, keys, ticket))

    def advance(self, process: Process) -> None:
        for _, _, ticket in self.tickets:
            if ticket.blocked:
                self.core.advance(ticket)

    def settle(self, process: Process) -> None:
        if self.tickets:
            self.finish_ticket(self.random.randrange(len(self.tickets)))

    def finish_ticket(self, position: int) -> None:
        process, keys, ticket = self.tickets.pop(position)
        lease, _ = self.core.settle(ticket)
        if lease is not None and ticket.follows:
            # Of a block that is being written: what was there before, or its own bytes.
            process.following[lease.id] = [
                (replica, [{self.memory[replica.tier][place], (k, replica.generation)}
                           for place in self.granules(replica)])
                for replica, k in zip(lease.replicas, keys, strict=False)
            ]  # fmt: skip
        elif lease is not None:
            seen = list(zip(lease.replicas, keys, strict=False))
            process.reading[lease.id] = [(replica, k, replica.generation) for replica, k in seen]

    def publish(self, process: Process) -> None:
        for lease_id, replicas in process.writing.items():
            spans, sums = [GRANULE, 8], bytes(8 * len(replicas))
            segment, slots = self.random.randrange(1 << 20), list(range(len(replicas)))
            request = messages.Publish(1, lease_id, slots, [segment], spans, sums)
            with contextlib.suppress(StaleLease, InvalidInput):  # expired; or a block of one page
                publish(self.core, process.session, request)

    def release(self, process: Process) -> None:
        if process.following:
            lease_id, _ = process.following.popitem()
            self.core.release(process.session, lease_id)
        if process.reading:
            lease_id, _ = process.reading.popitem()
            self.core.release(process.session, lease_id)

    def pin(self, process: Process) -> None:
        keys = [key(self.random.randrange(CHAINS), i) for i in range(self.random.randrange(3))]
        level = self.random.choice([PinLevel.NONE, PinLevel.SOFT, PinLevel.HARD])
        self.core.pin(keys, level, self.now + self.random.uniform(0, 10))

    def remove(self, process: Process) -> None:
        self.core.remove([key(self.random.randrange(CHAINS), self.random.randrange(DEPTH))])

    # -- failures of clients ---------------------------------------------------------------------

    def stop_or_wake(self, _: Process) -> None:
        process = self.random.choice(self.processes)
        process.stopped = not process.stopped

    def kill(self, _: Process) -> None:
        """The kernel unmaps first: from now on the process writes and reads nothing."""
        process = self.random.choice(self.processes)
        self.tickets = [t for t in self.tickets if t[0] is not process or self.give_up(t)]
        at_once = self.random.random() < 0.5
        if not process.session.gone:
            self.core.disconnect(process.session, fenced=at_once)
        if process.session.gone or not at_once:
            self.core.fence(process.session)
        self.processes.remove(process)
        self.processes.append(self.connect())

    def break_connection(self, _: Process) -> None:
        """The process lives on and still has the region mapped."""
        process = self.random.choice(self.processes)
        if process.session.gone:
            return
        self.tickets = [t for t in self.tickets if t[0] is not process or self.give_up(t)]
        self.core.disconnect(process.session, fenced=False)
        process.stopped = True
        if len(self.processes) < 8:
            self.processes.append(self.connect())

    def give_up(self, ticket) -> bool:
        self.core.settle(ticket[2])
        return False

    def scribble_of_the_stopped(self, _: Process) -> None:
        for process in self.processes:
            for replicas in process.writing.values():
                for replica in replicas:
                    self.scribble(replica, 0.3)

    def time_passes(self, _: Process) -> None:
        self.now += self.random.uniform(0, 3)
        self.core.tick(self.now)

    # -- the shell -------------------------------------------------------------------------------

    def act(self) -> None:
        for action in self.core.residency.actions:
            if isinstance(action, Move) and action not in self.moves:
                self.moves.append(action)
            elif isinstance(action, Wipe):
                self.wipes.append(action)
        self.core.residency.actions.clear()

    def finish_wipes(self, _: Process) -> None:
        """Finish all waiting wipes together, as the shell does: their headers are erased."""
        wipes, self.wipes = self.wipes, []
        for wipe in wipes:
            if wipe.replica is not None:
                self.memory[TierName.NVME][self.granules(wipe.replica)[0]] = None
        if wipes:
            self.core.residency.wiped(wipes, failed=False)

    def finish_move(self, _: Process) -> None:
        if not self.moves:
            return
        move = self.moves.pop(self.random.randrange(len(self.moves)))
        outcome = self.carry_out(move)
        ready = self.core.moved(move, outcome)
        for position in reversed(range(len(self.tickets))):
            if self.tickets[position][2] in ready:
                self.finish_ticket(position)

    def carry_out(self, move: Move) -> MoveOutcome:
        luck = self.random.random()
        if luck < 0.03:
            to_nvme = move.target.tier is TierName.NVME
            # Writes fail rarely: a dead disk would end most activity.
            if to_nvme and luck < 0.001:
                return MoveOutcome.WRITE_FAILED
            return MoveOutcome.CORRUPT if to_nvme else MoveOutcome.READ_FAILED
        if not self.intact(move.source):
            assert move.cancelled or move.source.state is BlockState.QUARANTINED
            return MoveOutcome.CORRUPT
        for here, there in zip(self.granules(move.source), self.granules(move.target), strict=True):
            self.memory[move.target.tier][there] = self.memory[move.source.tier][here]
        return MoveOutcome.DONE

    # -- the promise -----------------------------------------------------------------------------

    def check(self) -> None:
        self.core.check()
        self.follow_events()
        for process in self.processes:
            for held in process.reading.values():
                for replica, wanted, generation in held:
                    self.reads_checked += 1
                    assert replica.block.key == wanted
                    for place in self.granules(replica):
                        seen = self.memory[replica.tier][place]
                        assert seen == (wanted, generation), (replica, seen)
            for followed in process.following.values():
                for replica, allowed in followed:
                    for place, names in zip(self.granules(replica), allowed, strict=True):
                        self.follows_checked += 1
                        assert self.memory[replica.tier][place] in names, replica

    def follow_events(self) -> None:
        """The events alone give the resident blocks, and the tier from which each is read."""
        events = self.core.residency.events.since(self.events_seen, 1000)
        keys = split_keys(events.keys)
        for tier, is_news, name in zip(events.tiers, events.news, keys, strict=True):
            before = self.followed.pop(name, 0)
            assert tier != before, "every event changes something"
            assert bool(is_news) == (not before or not tier)
            self.tiers_changed += not is_news
            if tier:
                self.followed[name] = tier
        self.events_seen = events.last_seq
        assert self.followed == dict(zip(self.core.index, self.core.tiers(), strict=True))
        assert all(self.core.index[name].tier == tier for name, tier in self.followed.items())

    def run(self, steps: int) -> None:
        verbs = {
            self.reserve: 12, self.write: 6, self.commit: 12, self.abort: 2, self.read: 14,
            self.publish: 4, self.settle: 4, self.advance: 6, self.release: 12, self.pin: 2,
            self.remove: 2,
            self.stop_or_wake: 2, self.kill: 3, self.break_connection: 1,
            self.scribble_of_the_stopped: 3,
            self.time_passes: 5, self.finish_move: 14, self.finish_wipes: 2,
        }  # fmt: skip
        choices = self.random.choices(list(verbs), list(verbs.values()), k=steps)
        for verb in choices:
            verb(self.process() or self.connect_another())
            self.act()
            self.check()
        self.end()

    def connect_another(self) -> Process:
        self.processes.append(self.connect())
        return self.processes[-1]

    def end(self) -> None:
        """All clients die and all moves end: nothing may be held or pending."""
        while self.moves:
            self.finish_move(None)
            self.act()
        while self.tickets:
            self.finish_ticket(0)
        for process in self.processes:
            if not process.session.gone:
                self.core.disconnect(process.session, fenced=True)
            else:
                self.core.fence(process.session)
        self.act()
        while self.moves or self.wipes:
            self.finish_move(None)
            self.finish_wipes(None)
            self.act()
        self.core.check()
        assert not self.core.residency.removals
        for space in (self.core.residency.dram, self.core.residency.nvme):
            if space is not None:
                numbers = space.statistics()
                assert numbers.reserved_bytes == 0
                assert numbers.quarantined_bytes == 0
        assert self.core.sessions == {}


@pytest.mark.parametrize("seed", range(30))
def test_a_lease_shows_the_bytes_of_its_key_whatever_happens(seed):
    simulation = Simulation(seed, policy=sorted(POLICIES)[seed % len(POLICIES)])
    simulation.run(600)
    assert simulation.reads_checked > 0


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_what_leaves_for_another_size_is_old(policy):
    simulations = [Simulation(seed, policy) for seed in range(100, 106)]
    for simulation in simulations:
        simulation.run(500)
    assert sum(simulation.windows_checked for simulation in simulations) > 10


def test_blocks_change_tiers_and_followers_know() -> None:
    simulation = Simulation(seed=3)
    simulation.run(1500)
    assert simulation.tiers_changed > 20


def test_a_follower_sees_what_was_there_before_or_bytes_of_its_key():
    simulation = Simulation(seed=7)
    simulation.run(1500)
    assert simulation.follows_checked > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1100))
def test_the_same_for_many_seeds(seed):
    Simulation(seed, policy=sorted(POLICIES)[seed % len(POLICIES)]).run(1500)
