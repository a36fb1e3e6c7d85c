"""A node's publisher: its steps, and that the directory ends with the node's blocks."""

from __future__ import annotations

import hashlib
import math
import os
import random
import threading
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from directory.redisserver import RedisServer

from tiffin.kvstore.directory.embedded import EmbeddedDirectory
from tiffin.kvstore.directory.redis import RedisDirectory
from tiffin.kvstore.directory.testing import eventually, record
from tiffin.kvstore.directory.url import parse_redis
from tiffin.kvstore.errors import DirectoryUnavailable, InvalidInput
from tiffin.kvstore.node.core import messages
from tiffin.kvstore.node.core.event_log import EventLog, NodeEvents
from tiffin.kvstore.node.core.publisher_core import (
    DOUBTS_MAX,
    Check,
    Heartbeat,
    Poll,
    PublisherCore,
    PublisherOptions,
    PublishStep,
    Register,
    Step,
    TakeInventory,
    Wait,
    Withdraw,
)
from tiffin.kvstore.node.core.records import IN_DRAM, IN_NVME
from tiffin.kvstore.node.node import Node, NodeOptions
from tiffin.kvstore.node.publisher import Publisher, name_taken

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from tiffin.kvstore.directory import Directory, NodeRecord


def key(i: int) -> bytes:
    return hashlib.blake2b(str(i).encode(), digest_size=16).digest()


KEYS = [key(i) for i in range(12)]


class FakeNode:
    """A node's feed: a set of keys and its events."""

    def __init__(self, events_kept: int = 65_536) -> None:
        self.keys: dict[bytes, None] = {}
        self.log = EventLog(events_kept)
        self.lock = threading.Lock()

    def add(self, *keys: bytes) -> None:
        with self.lock:
            for added in keys:
                if added not in self.keys:
                    self.keys[added] = None
                    self.log.added(added)

    def remove(self, *keys: bytes) -> None:
        with self.lock:
            for removed in keys:
                if removed in self.keys:
                    del self.keys[removed]
                    self.log.removed(removed)

    def move(self, key: bytes, tier: int) -> None:
        with self.lock:
            if key in self.keys:
                self.log.moved(key, tier)

    def events_since(self, seq: int, limit: int) -> NodeEvents | None:
        with self.lock:
            return self.log.since(seq, limit)

    def inventory(self) -> tuple[int, bytes]:
        with self.lock:
            return self.log.seq, b"".join(self.keys)

    def exists(self, keys: bytes) -> bytes:
        with self.lock:
            return bytes(keys[i : i + 16] in self.keys for i in range(0, len(keys), 16))


class FakeDirectory:
    """A directory's content, and the ways in which it fails."""

    def __init__(self) -> None:
        self.last_number = 0
        self.located: dict[int, set[bytes]] = {}
        self.last_said: dict[int, PublishStep] = {}
        self.up = True
        self.loses_answers = False  # carries a step out, and does not answer

    def carry_out(self, step: Step) -> object:
        """Carry out a step; returns the answer. Raises DirectoryUnavailable."""
        if not self.up:
            raise DirectoryUnavailable("down")
        answer = self._carry_out(step)
        if self.loses_answers:
            raise DirectoryUnavailable("no answer")
        return answer

    def _carry_out(self, step: Step) -> object:
        match step:
            case Register():
                self.last_number += 1
                self.located[self.last_number] = set()
                self.last_said[self.last_number] = PublishStep(0, [], [], 1)
                return self.last_number
            case Heartbeat(number):
                return number in self.located
            case Withdraw(number):
                self.located.pop(number, None)
            case PublishStep(number, added, removed, first_seq):
                assert not set(added) & set(removed)
                assert added or removed
                last = self.last_said[number]
                after = last.first_seq + len(last.added) + len(last.removed)
                assert first_seq == after or step == last, "in order, or the same again"
                self.last_said[number] = step
                if number in self.located:
                    self.located[number] |= set(added)
                    self.located[number] -= set(removed)
        return None


class Driver:
    """Does what a `Publisher` does, one step at a time, in virtual time."""

    def __init__(self, options: PublisherOptions, events_kept: int = 65_536) -> None:
        self.node = FakeNode(events_kept)
        self.directory = FakeDirectory()
        self.core = PublisherCore(options, jitter=lambda: 1.0)
        self.now = 100.0
        self.done: list[Step] = []

    def step(self) -> Step:
        step = self.core.next(self.now)
        self.done.append(step)
        core, now = self.core, self.now
        try:
            match step:
                case Wait():
                    pass
                case Poll(seq, limit):
                    core.polled(self.node.events_since(seq, limit), now)
                case TakeInventory():
                    core.inventoried(*self.node.inventory(), now)
                case Check(keys):
                    core.checked(keys, self.node.exists(keys))
                case _:
                    assert isinstance(step, Register | Withdraw) or step.number == core.number
                    answer = self.directory.carry_out(step)
                    if isinstance(step, Register):
                        assert isinstance(answer, int)
                        core.registered(answer, now)
                    elif isinstance(step, Heartbeat):
                        core.heard(bool(answer), now)
                    elif isinstance(step, Withdraw):
                        core.withdrawn()
                    else:
                        core.published(now)
        except DirectoryUnavailable:
            core.failed(now)
        return step

    def run_until_idle(self, steps_max: int = 10_000) -> float:
        """Steps until there is nothing to do now; returns when to come back."""
        for _ in range(steps_max):
            step = self.step()
            if isinstance(step, Wait):
                assert step.until > self.now, "a wait that is over"
                return step.until
        raise AssertionError("never idle")

    def run_for(self, seconds: float) -> None:
        end = self.now + seconds
        while True:
            until = self.run_until_idle()
            if until > end:
                self.now = end
                return
            self.now = until

    def run_until(self, kind: type, seconds: float = 1000.0) -> bool:
        """Stop just before a step of this kind; False if none comes."""
        end = self.now + seconds
        while not isinstance(self.core.next(self.now), kind):
            step = self.step()
            if isinstance(step, Wait):
                if step.until > end:
                    return False
                self.now = step.until
        return True

    def kinds(self, *kinds: type) -> list[Step]:
        return [step for step in self.done if isinstance(step, kinds)]

    @property
    def told(self) -> set[bytes]:
        """The keys of this node in the directory."""
        return self.directory.located.get(self.core.number, set())


@pytest.fixture
def driver() -> Driver:
    return Driver(PublisherOptions())


# -- the core, case by case ------------------------------------------------------------------------


def test_it_registers_and_publishes_the_inventory(driver: Driver) -> None:
    driver.node.add(*KEYS)
    driver.run_until_idle()
    assert driver.told == set(KEYS)
    assert driver.core.healthy
    assert driver.core.lag == 0
    kinds = [type(step) for step in driver.done]
    assert kinds[:2] == [Register, TakeInventory]
    assert len(driver.kinds(PublishStep)) == 1, (
        "what is in the inventory is not said again as events"
    )


def test_events_follow_within_a_poll(driver: Driver) -> None:
    driver.run_until_idle()
    driver.node.add(KEYS[0], KEYS[1])
    driver.run_for(0.1)
    assert driver.told == {KEYS[0], KEYS[1]}
    driver.node.remove(KEYS[0])
    driver.node.add(KEYS[2])
    driver.run_for(0.1)
    assert driver.told == {KEYS[1], KEYS[2]}


def test_first_seq_numbers_all_keys_of_a_registration(driver: Driver) -> None:
    driver.node.add(*KEYS[:3])
    driver.run_until_idle()
    driver.node.remove(KEYS[0])
    driver.node.add(KEYS[5])
    driver.run_for(1.0)
    expected = 1
    for step in driver.kinds(PublishStep):
        assert isinstance(step, PublishStep)
        assert step.first_seq == expected
        expected += len(step.added) + len(step.removed)
    assert expected == 6


def test_what_came_and_went_is_never_mentioned(driver: Driver) -> None:
    driver.run_until_idle()
    driver.node.add(KEYS[0])
    driver.node.remove(KEYS[0])
    driver.run_for(1.0)
    assert driver.kinds(PublishStep) == []
    # A published location is withdrawn, however often the block comes and goes.
    driver.node.add(KEYS[1])
    driver.run_for(1.0)
    for _ in range(3):
        driver.node.remove(KEYS[1])
        driver.node.add(KEYS[1])
    driver.node.remove(KEYS[1])
    driver.run_for(1.0)
    assert driver.told == set()


def test_the_directory_is_not_told_of_tiers(driver: Driver) -> None:
    """A demotion is not published; a demoted block that leaves is withdrawn all the same."""
    driver.node.add(KEYS[0])
    driver.run_until_idle()
    driver.node.move(KEYS[0], IN_NVME)
    driver.run_for(1.0)
    assert (len(driver.kinds(PublishStep)), driver.core.lag) == (1, 0)
    driver.node.move(KEYS[0], IN_DRAM)
    driver.node.remove(KEYS[0])
    driver.run_for(1.0)
    assert driver.kinds(PublishStep)[1:] == [PublishStep(driver.core.number, [], [KEYS[0]], 2)]
    assert driver.told == set()


def test_batches_are_bounded() -> None:
    driver = Driver(PublisherOptions(batch_keys=10, pending_max=20))
    driver.run_until_idle()
    driver.node.add(*map(key, range(95)))
    driver.run_for(1.0)
    sizes = [len(step.added) for step in driver.kinds(PublishStep)]  # type: ignore[union-attr]
    assert sizes == [10] * 9 + [5]
    assert len(driver.told) == 95


def test_heartbeats_go_on_during_a_long_round() -> None:
    driver = Driver(PublisherOptions(batch_keys=10, republish_keys_s=10.0))
    driver.node.add(*map(key, range(300)))
    driver.run_for(40.0)
    assert len(driver.told) == 300
    assert 12 <= len(driver.kinds(Heartbeat)) <= 14


def test_rounds_keep_to_their_rate() -> None:
    driver = Driver(PublisherOptions(batch_keys=10, republish_keys_s=100.0))
    driver.node.add(*map(key, range(1000)))
    driver.run_for(5.0)
    assert 490 <= len(driver.told) <= 520
    # Events do not wait for the round.
    driver.node.add(key(5000))
    driver.run_for(0.1)
    assert key(5000) in driver.told
    driver.run_for(5.2)
    assert len(driver.told) == 1001


def test_a_slow_directory_is_asked_less_often() -> None:
    driver = Driver(PublisherOptions(batch_keys=10))
    driver.node.add(*map(key, range(30)))
    sent = []
    for _ in range(200):
        step = driver.core.next(driver.now)
        if isinstance(step, PublishStep):
            sent.append(driver.now)
            driver.core.next(driver.now)
            driver.now += 0.2  # how long it takes
            driver.core.published(driver.now)
        elif isinstance(step, Wait):
            driver.now = step.until
        else:
            driver.step()
        if len(sent) == 3:
            break
    assert [round(b - a, 6) for a, b in pairwise(sent)] == [2.0, 2.0]


def test_everything_is_said_again_every_ten_minutes(driver: Driver) -> None:
    driver.node.add(*KEYS)
    driver.run_until_idle()
    driver.directory.located[driver.core.number].clear()  # a loss without an error
    driver.run_for(599.0)
    assert driver.told == set()
    driver.run_for(2.0)
    assert driver.told == set(KEYS)


def test_calm_rounds_are_spread_over_half_of_their_time() -> None:
    driver = Driver(PublisherOptions(batch_keys=10))
    driver.node.add(*map(key, range(600)))
    driver.run_until_idle()
    driver.run_for(590.0)
    driver.directory.located[driver.core.number].clear()
    driver.run_for(160.0)
    assert 250 <= len(driver.told) <= 350
    driver.run_for(160.0)
    assert len(driver.told) == 600


def test_a_block_that_left_during_a_round_is_not_said(driver: Driver) -> None:
    driver = Driver(PublisherOptions(batch_keys=10, republish_keys_s=10.0))
    driver.node.add(*map(key, range(30)))
    driver.run_for(0.5)
    driver.node.remove(*map(key, range(30)))
    driver.run_for(10.0)
    assert driver.told == set()


def test_a_round_that_was_ahead_of_the_events(driver: Driver) -> None:
    """A round publishes a block before its event is read: its removal must be published too."""
    driver.node.add(KEYS[0])
    driver.run_until_idle()
    driver.done.clear()
    assert driver.run_until(TakeInventory)
    driver.node.add(KEYS[1])
    assert driver.run_until(PublishStep)
    driver.node.remove(KEYS[1])
    driver.run_for(1.0)
    assert driver.told == {KEYS[0]}


def test_a_round_that_was_ahead_by_more_than_one_answer() -> None:
    driver = Driver(PublisherOptions(batch_keys=3))
    driver.run_until_idle()
    assert driver.run_until(TakeInventory)
    driver.node.add(*KEYS[:4])
    driver.node.keys = dict.fromkeys(reversed(driver.node.keys))  # no order is promised
    driver.run_until_idle()
    assert driver.told == set(KEYS[1:4])
    driver.node.remove(KEYS[3])
    driver.run_for(1.0)
    assert driver.told == set(KEYS[:3])


def test_a_vanished_registration_begins_anew(driver: Driver) -> None:
    driver.node.add(*KEYS)
    driver.run_until_idle()
    before = driver.core.number
    driver.directory.located.clear()
    driver.run_for(3.5)
    assert driver.core.number > before
    assert driver.told == set(KEYS)
    assert driver.kinds(Withdraw) == [], "nobody knows the old number any more"


def test_after_an_outage_all_is_said_again(driver: Driver) -> None:
    driver.node.add(*KEYS)
    driver.run_until_idle()
    number = driver.core.number
    driver.directory.up = False
    driver.node.add(key(100))
    driver.run_for(0.5)
    assert not driver.core.healthy
    driver.directory.up = True
    driver.directory.located[number].clear()  # it came back with less
    driver.done.clear()
    driver.run_for(1.1)
    asked = [step for step in driver.done if not isinstance(step, Wait | Poll)]
    assert isinstance(asked[0], Heartbeat), "the first question is whether the number is known"
    assert driver.core.healthy
    assert driver.core.number == number
    assert driver.told == {*KEYS, key(100)}


def test_retries_back_off_to_a_second(driver: Driver) -> None:
    driver.directory.up = False
    driver.run_for(20.0)
    assert 20 <= len(driver.kinds(Register)) <= 26


def test_during_an_outage_changes_are_gathered(driver: Driver) -> None:
    driver.node.add(KEYS[0])
    driver.run_until_idle()
    driver.directory.up = False
    driver.node.add(KEYS[1], KEYS[2])
    driver.run_for(2.0)
    driver.node.remove(KEYS[0], KEYS[1])
    driver.run_for(2.0)
    # Two in a batch that is tried again and again, and the two that left.
    assert driver.core.lag == 4
    driver.directory.up = True
    driver.run_for(2.0)
    assert driver.told == {KEYS[2]}
    assert driver.core.lag == 0


def test_a_long_outage_is_forgotten_and_all_said_anew() -> None:
    driver = Driver(PublisherOptions(batch_keys=10, pending_max=40))
    driver.node.add(*map(key, range(100)))
    driver.run_until_idle()
    before = driver.core.number
    driver.directory.up = False
    for i in range(100, 200):
        driver.node.add(key(i))
        driver.node.remove(key(i - 100))
        driver.run_for(0.1)
        assert driver.core.lag <= 40, "memory is bounded"
    driver.directory.up = True
    driver.run_for(5.0)
    assert driver.core.number != before
    assert before not in driver.directory.located, "what can't be taken back was made void"
    assert driver.told == set(map(key, range(100, 200)))


def test_a_gap_in_the_events_begins_anew() -> None:
    driver = Driver(PublisherOptions(), events_kept=16)
    driver.run_until_idle()
    before = driver.core.number
    driver.node.add(*map(key, range(50)))
    driver.node.remove(*map(key, range(10)))
    driver.run_for(1.0)
    assert driver.core.number != before
    assert before not in driver.directory.located, "withdrawn, not left to expire"
    assert driver.told == set(map(key, range(10, 50)))


def test_a_batch_without_an_answer_is_repeated_as_it_was(driver: Driver) -> None:
    driver.run_until_idle()
    driver.directory.loses_answers = True
    driver.node.add(KEYS[0])
    driver.run_for(0.06)
    driver.node.remove(KEYS[0])
    driver.run_for(1.0)
    driver.directory.loses_answers = False
    driver.run_for(3.0)
    said = driver.kinds(PublishStep)
    assert len(said) >= 3
    assert set(map(repr, said[:-1])) == {repr(said[0])}
    assert said[-1] == PublishStep(driver.core.number, [], [KEYS[0]], 2)
    assert driver.told == set()


def test_a_doubt_is_settled_by_the_node(driver: Driver) -> None:
    driver.node.add(KEYS[0])
    driver.run_until_idle()
    driver.directory.located[driver.core.number].add(KEYS[1])  # a rolled back Redis
    driver.core.doubt([KEYS[0], KEYS[1]])
    driver.run_for(0.1)
    assert driver.told == {KEYS[0]}


def test_a_doubt_about_a_block_that_has_come_since(driver: Driver) -> None:
    driver.run_until_idle()
    driver.node.add(KEYS[1])
    driver.core.doubt([KEYS[1]])
    driver.run_for(0.1)
    assert driver.told == {KEYS[1]}


def test_a_doubt_about_a_block_that_came_and_is_going(driver: Driver) -> None:
    driver.run_until_idle()
    driver.directory.located[driver.core.number].add(KEYS[1])  # a rolled back Redis
    driver.node.add(KEYS[1])
    driver.now += 1.0
    assert isinstance(driver.step(), Poll)
    driver.node.remove(KEYS[1])
    driver.core.doubt([KEYS[1]])
    assert isinstance(driver.step(), Check)
    driver.now += 1.0
    driver.run_for(1.0)
    assert driver.told == set(), "what is read as come and gone was known to the directory"


def test_doubts_are_bounded(driver: Driver) -> None:
    driver.core.doubt([KEYS[0]])
    driver.run_until_idle()
    assert driver.kinds(Check) == [], "before the registration nobody can have been sent here"
    driver.core.doubt([key(i) for i in range(DOUBTS_MAX + 5)])
    driver.core.doubt([KEYS[0]])
    driver.run_for(1.0)
    checked = sum(len(step.keys) // 16 for step in driver.kinds(Check))  # type: ignore[union-attr]
    assert checked == DOUBTS_MAX


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"batch_keys": 0}, "batch_keys"),
        ({"batch_keys": 5000}, "batch_keys"),
        ({"pending_max": 100}, "pending_max"),
        ({"heartbeat_s": 0.0}, "heartbeat_s"),
        ({"republish_keys_s": -1.0}, "republish_keys_s"),
        ({"republish_s": math.nan}, "republish_s"),
    ],
)
def test_options_that_can_not_work(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        PublisherOptions(**wrong)  # type: ignore[arg-type]


# -- the core against a model ----------------------------------------------------------------------


FEW = KEYS[:4]  # so that things happen to the same ones
STEPS = (Poll, TakeInventory, Check, PublishStep, Heartbeat)


class Life:
    """A random life of a node and a directory, the same for the same seed.

    Whatever happens: when both have been at rest for a while, the directory has exactly the node's
    blocks. In every second life the directory is rolled back now and then, and has withdrawn
    locations again; these are corrected by readers.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.rolls_back = seed % 2 == 1
        options = PublisherOptions(
            batch_keys=2, pending_max=8, poll_s=1.0, republish_keys_s=1.0, republish_s=20.0
        )
        self.driver = Driver(options, events_kept=self.random.choice([4, 64, 1000]))
        self.driver.node.add(*FEW[:3])
        self.driver.run_until_idle()

    def live(self, turns: int) -> None:
        happenings = [
            *[self.come, self.go] * 6,
            *[self.work_until] * 8,
            *[self.work, self.time_passes] * 3,
            self.come_and_go,
            self.change_tiers,
            self.a_reader_does_not_find,
            self.outage,
            self.forgets,
            self.rest,
        ]
        for _ in range(turns):
            self.random.choice(happenings)()
            if self.rolls_back and self.random.random() < 0.1:
                self.remembers()
            assert len(self.driver.core._pending) <= self.driver.core.options.pending_max
        self.rest()

    def come(self) -> None:
        self.driver.node.add(self.random.choice(FEW))

    def go(self) -> None:
        self.driver.node.remove(self.random.choice(FEW))

    def come_and_go(self) -> None:
        key = self.random.choice(FEW)
        self.driver.node.add(key)
        self.driver.node.remove(key)

    def change_tiers(self) -> None:
        for tier in (IN_NVME, IN_DRAM):
            self.driver.node.move(self.random.choice(FEW), tier)

    def work_until(self) -> None:
        """Run until just before a step of a random kind, where the next event happens."""
        self.driver.run_until(self.random.choice(STEPS), seconds=25.0)

    def work(self) -> None:
        for _ in range(self.random.randint(1, 4)):
            self.driver.step()

    def time_passes(self) -> None:
        self.driver.now += self.random.choice([0.1, 1.1, 4.0, 25.0])

    def outage(self) -> None:
        """Steps are refused, or carried out without an answer, for long or for one call; or the
        directory is emptied."""
        directory = self.driver.directory
        directory.loses_answers = self.random.random() < 0.5
        directory.up = directory.loses_answers
        for _ in range(self.random.choice([1, 3, 20])):
            self.random.choice([self.come, self.go, self.work_until, self.work])()
        directory.up, directory.loses_answers = True, False
        if self.random.random() < 0.3:
            directory.located.clear()

    def forgets(self) -> None:
        self.driver.told.discard(self.random.choice(FEW))

    def remembers(self) -> None:
        located = self.driver.directory.located.get(self.driver.core.number)
        if located is not None:
            located.add(self.random.choice(FEW))

    def a_reader_does_not_find(self) -> None:
        key = self.random.choice(FEW)
        if key in self.driver.told and key not in self.driver.node.keys:
            self.driver.core.doubt([key])

    def rest(self) -> None:
        driver = self.driver
        driver.run_for(60.0)  # the longest backoff, a heartbeat, and two rounds
        if self.rolls_back:
            driver.core.doubt(sorted(driver.told - driver.node.keys.keys()))
            driver.run_for(2.0)
        assert driver.told == driver.node.keys.keys()
        assert driver.core.healthy
        assert driver.core.lag == 0


def live(seeds: range, turns: int) -> None:
    for seed in seeds:
        try:
            Life(seed).live(turns)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error


def test_any_life() -> None:
    live(range(400), turns=30)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 5000, 2000))
def test_thousands_of_lives(first: int) -> None:
    live(range(first, first + 2000), turns=60)


# -- the thread ------------------------------------------------------------------------------------

FAST = PublisherOptions(heartbeat_s=0.1, poll_s=0.01, retry_first_s=0.02, retry_max_s=0.1)


def describe() -> NodeRecord:
    return record("node-a")


@pytest.fixture
def node() -> FakeNode:
    return FakeNode()


@pytest.fixture
def directory() -> Iterator[EmbeddedDirectory]:
    opened = EmbeddedDirectory()
    yield opened
    opened.close()


@pytest.fixture
def publish(node: FakeNode) -> Iterator[Callable[[Directory], Publisher]]:
    """A function that starts publishers; at the end none of their threads may be left."""
    started = []

    def start(directory: Directory) -> Publisher:
        publisher = Publisher(node, directory, describe, FAST)
        publisher.start()
        started.append(publisher)
        return publisher

    yield start
    for publisher in started:
        publisher.close()
    assert not [t for t in threading.enumerate() if t.name == "tiffin-publisher"]


def told(directory: Directory, publisher: Publisher, keys: Sequence[bytes]) -> set[bytes]:
    located = directory.locate(keys)
    return {k for k, n in zip(keys, located, strict=True) if publisher.number in n}


def test_a_node_is_published_and_withdrawn(
    node: FakeNode,
    directory: EmbeddedDirectory,
    publish: Callable[[Directory], Publisher],
) -> None:
    node.add(*KEYS[:6])
    publisher = publish(directory)
    eventually(lambda: told(directory, publisher, KEYS) == set(KEYS[:6]), "the inventory is told")
    node.add(KEYS[7])
    node.remove(KEYS[0])
    expected = {*KEYS[1:6], KEYS[7]}
    eventually(lambda: told(directory, publisher, KEYS) == expected, "the events are told")
    (listed,) = directory.nodes().values()
    assert listed.name == "node-a"
    assert listed.number == publisher.number
    assert listed.started_at > 0
    eventually(lambda: publisher.lag == 0 and publisher.healthy, "all is told")
    publisher.close()
    publisher.close()
    assert directory.nodes() == {}


def test_doubts_reach_the_directory(
    node: FakeNode,
    directory: EmbeddedDirectory,
    publish: Callable[[Directory], Publisher],
) -> None:
    node.add(KEYS[0])
    publisher = publish(directory)
    eventually(lambda: told(directory, publisher, KEYS) == {KEYS[0]}, "the block is told")
    directory.publish(publisher.number, [KEYS[1]], [], 99)
    publisher.not_mine([KEYS[0], KEYS[1]])
    eventually(lambda: told(directory, publisher, KEYS) == {KEYS[0]}, "it is corrected")
    with pytest.raises(InvalidInput, match="3 bytes"):
        publisher.not_mine([b"abc"])


def test_a_closed_publisher_that_never_started(directory: EmbeddedDirectory) -> None:
    publisher = Publisher(FakeNode(), directory, describe)
    publisher.close()
    assert publisher.number == 0
    assert not publisher.healthy


def test_a_mistake_in_the_description_does_not_end_it(
    node: FakeNode, directory: EmbeddedDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    descriptions: list[Callable[[], NodeRecord]] = [describe]

    def describe_badly() -> NodeRecord:
        raise ZeroDivisionError

    descriptions[0] = describe_badly
    node.add(*KEYS)
    publisher = Publisher(node, directory, lambda: descriptions[0](), FAST)
    publisher.start()
    try:
        eventually(lambda: "ZeroDivisionError" in caplog.text, "it is logged")
        descriptions[0] = describe
        eventually(lambda: told(directory, publisher, KEYS) == set(KEYS), "it goes on")
    finally:
        publisher.close()


@pytest.mark.slow
def test_redis_dies_comes_back_and_is_emptied(
    node: FakeNode, publish: Callable[[Directory], Publisher], tmp_path: Path
) -> None:
    with RedisServer(tmp_path) as server:
        options = parse_redis(server.url + "?timeout=0.2")
        directory, reader = RedisDirectory(options), RedisDirectory(options, membership_age_s=0.05)
        try:
            node.add(*KEYS)
            publisher = publish(directory)

            def all_is_told() -> bool:
                try:
                    return told(reader, publisher, [*KEYS, key(100)]) == set(node.keys)
                except DirectoryUnavailable:
                    return False

            eventually(all_is_told, "the inventory is told")
            before = publisher.number
            server.kill()
            eventually(lambda: not publisher.healthy, "the outage is noticed")
            node.remove(KEYS[0])
            node.add(key(100))
            server.start()
            eventually(all_is_told, "all is told again")
            assert publisher.number != before
            before = publisher.number
            server.client().flushall()
            node.remove(KEYS[1])
            eventually(lambda: publisher.number != before and all_is_told(), "and again")
            server.pause()
            eventually(lambda: not publisher.healthy, "the stopped server is noticed")
            node.remove(KEYS[2])
            server.resume()
            eventually(all_is_told, "and once more")
            server.pause()
            publisher.close()  # returns, and the registration expires
            server.resume()
        finally:
            directory.close()
            reader.close()


def test_a_real_node(directory: EmbeddedDirectory) -> None:
    host = Node(NodeOptions(dram_bytes=1 << 20, prefault=False), name="real")
    try:
        publisher = Publisher(host, directory, describe, FAST)
        publisher.start()
        session = host.connect("test", os.getpid())
        eventually(lambda: publisher.number > 0, "it is registered")
        made = host.core.reserve(session, KEYS[:4], bytes(16), 0, 8192, 0.0)
        assert made.lease is not None
        host.core.commit(made.lease, [True, True, True, False])
        eventually(lambda: told(directory, publisher, KEYS) == set(KEYS[:3]), "commits are told")
        replies: list[messages.AnyReply] = []
        host.submit(session, messages.Remove(1, KEYS[0]), replies.append)
        eventually(lambda: told(directory, publisher, KEYS) == set(KEYS[1:3]), "removals too")
        publisher.close()
        host.disconnect(session, fenced=True)
    finally:
        host.close()


# -- what does not fit -----------------------------------------------------------------------------


def test_a_name_that_another_node_has_is_said_once_and_taken_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    directory, other = EmbeddedDirectory.named("taken"), EmbeddedDirectory.named("taken")
    number = other.register(record(address="10.0.0.2:7700", socket="/run/other.sock"))
    options = PublisherOptions(heartbeat_s=0.01)
    publisher = Publisher(FakeNode(), directory, record, options)
    try:
        publisher.start()
        eventually(lambda: "called node-a too, at 10.0.0.2:7700" in publisher.reason, "it is said")
        other.withdraw(number)
        eventually(lambda: not publisher.reason, "it is taken back")
    finally:
        publisher.close()
        directory.close()
        other.close()
    said = [line.getMessage() for line in caplog.records if line.levelname == "WARNING"]
    assert [("give each its own" in line, "fit together again" in line) for line in said] == [
        (True, False),
        (False, True),
    ]


def test_the_last_run_of_a_node_does_not_take_its_name() -> None:
    own = record(number=2)
    assert not name_taken(own, [own, record(number=1), record(address="h:2")])
    assert not name_taken(own, [record("node-b", address="h:2", socket="/x")])
    assert name_taken(own, [record(address="h:2", socket="/x")])
