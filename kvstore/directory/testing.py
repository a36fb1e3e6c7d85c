"""The contract of a directory as a test suite, for this package's and third-party directories.

    class TestMyDirectory(DirectoryContract):
        @pytest.fixture
        def open_handle(self):
            ...  # yield a function: registration_ttl_s -> a handle of one directory, at first empty

Nothing here imports pytest: the suite is plain methods that ask for a fixture named `open_handle`,
called with different times only in different tests. The fixture closes what it opened.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from typing import TYPE_CHECKING, Protocol

from ..errors import ClientClosed, InvalidInput
from .base import (
    EVENTS_MAX,
    LOCATE_KEYS_MAX,
    PUBLISH_KEYS_MAX,
    REGISTRATION_TTL_S,
    DirectoryEvent,
    NodeRecord,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .base import Directory

    class OpenHandle(Protocol):
        """A handle of the directory under test."""

        def __call__(self, registration_ttl_s: float = REGISTRATION_TTL_S) -> Directory: ...


# A TTL for a registration to expire while a test waits; one that heartbeats of a busy machine keep.
BRIEF_TTL_S = 0.5
KEPT_TTL_S = 2.0

# Far more than `MEMBERSHIP_AGE_S`, so that a slow machine fails no test.
_PATIENCE_S = 20.0


def keys_of(seed: str, count: int) -> list[bytes]:
    """Random keys, the same for the same seed."""
    names = (f"{seed}/{i}".encode() for i in range(count))
    return [hashlib.blake2b(name, digest_size=16).digest() for name in names]


def record(name: object = "node-a", **fields: object) -> NodeRecord:
    """A node's record with every field filled in."""
    filled: dict[str, object] = {
        "address": f"{name}.example:7700",
        "host": "0123456789abcdef",
        "socket": f"/run/tiffin/{name}.sock",
        "capacity_bytes": 1 << 40,
        "free_bytes": 1 << 39,
        "started_at": 1_700_000_000.25,
        "links": {"node-z": [1.25e9, 0.0001]},
    }
    return NodeRecord(name=name, **{**filled, **fields})  # type: ignore[arg-type]


# Invalid records, by which an attacker that can write to the directory may try to harm its readers.
BAD_RECORDS: list[dict[str, object]] = [
    {"name": "\x1b[2J"},
    {"name": "two\nlines"},
    {"name": "\x9b31m"},
    {"name": "n" * 201},
    {"address": "host\r:1"},
    {"address": "h" * 400},
    {"host": "\0"},
    {"socket": "/run/\x1b]0;title\a"},
    {"socket": "/" * 5000},
    {"capacity_bytes": -1},
    {"free_bytes": 1 << 63},
    {"links": {"\x7f": [1.0, 1.0]}},
    {"links": {"other": [1.0]}},
    {"links": {"other": [1.0, -1.0]}},
    {"links": {"other": [float("nan"), 1.0]}},
]


def eventually(holds: Callable[[], bool], what: str) -> None:
    """Wait until `holds()` is true; fails after `_PATIENCE_S`."""
    give_up = time.monotonic() + _PATIENCE_S
    while not holds():
        assert time.monotonic() < give_up, f"never: {what}"
        time.sleep(0.02)


@contextlib.contextmanager
def refused(kind: type[Exception], *words: str) -> Iterator[None]:
    """Assert that the block raises `kind`, with a message that has `words` in it."""
    message = None
    try:
        yield
    except kind as error:
        message = str(error)
    assert message is not None, f"{kind.__name__} was not raised"
    assert all(word in message for word in words), (words, message)


class DirectoryContract:
    """The tests that every directory passes."""

    # -- membership ------------------------------------------------------------------------------

    def test_an_empty_directory_knows_nobody(self, open_handle: OpenHandle) -> None:
        directory = open_handle()
        assert directory.nodes() == {}
        assert directory.locate(keys_of("any", 3)) == [(), (), ()]
        assert directory.locate([]) == []
        assert directory.events("0") == ("0", [])

    def test_a_registered_node_is_listed_as_it_described_itself(
        self, open_handle: OpenHandle
    ) -> None:
        directory = open_handle()
        number = directory.register(record(draining=True))
        assert number > 0
        assert directory.nodes() == {number: record(draining=True, number=number)}

    def test_numbers_are_never_given_twice(self, open_handle: OpenHandle) -> None:
        one, other = open_handle(), open_handle()
        numbers = []
        for directory in (one, other) * 10:
            numbers.append(directory.register(record()))
            directory.withdraw(numbers[-1])
        assert len(set(numbers)) == len(numbers)

    def test_what_nobody_would_show_or_use_is_no_record(self, open_handle: OpenHandle) -> None:
        directory = open_handle()
        number = directory.register(record("rack 2, n\u00f6de 7"))
        for bad in BAD_RECORDS:
            with refused(InvalidInput, "shorten"):
                directory.register(record(**bad))
            with refused(InvalidInput, "shorten"):
                directory.heartbeat(record(**{**bad, "number": number}))
        assert list(directory.nodes()) == [number]

    def test_a_heartbeat_replaces_the_record(self, open_handle: OpenHandle) -> None:
        directory, reader = open_handle(), open_handle()
        number = directory.register(record())
        eventually(lambda: number in reader.nodes(), "the node is seen")
        assert directory.heartbeat(record(number=number, free_bytes=7, draining=True))
        eventually(lambda: reader.nodes()[number].free_bytes == 7, "the new record is seen")
        assert reader.nodes()[number].draining

    def test_a_heartbeat_without_a_registration_is_told_so(self, open_handle: OpenHandle) -> None:
        directory = open_handle()
        assert not directory.heartbeat(record(number=12345))
        number = directory.register(record())
        directory.withdraw(number)
        assert not directory.heartbeat(record(number=number))
        assert directory.nodes() == {}

    def test_without_heartbeats_a_registration_ends(self, open_handle: OpenHandle) -> None:
        directory, reader = open_handle(BRIEF_TTL_S), open_handle(BRIEF_TTL_S)
        (key,) = keys_of("brief", 1)
        number = directory.register(record())
        directory.publish(number, [key], [], 1)
        eventually(lambda: not reader.nodes(), "the node is gone")
        eventually(lambda: reader.locate([key]) == [()], "its locations are void")
        assert not directory.heartbeat(record(number=number))

    def test_heartbeats_keep_a_registration(self, open_handle: OpenHandle) -> None:
        directory, reader = open_handle(KEPT_TTL_S), open_handle(KEPT_TTL_S)
        number = directory.register(record())
        stop = threading.Event()

        def beat() -> None:
            while not stop.wait(KEPT_TTL_S / 20):
                directory.heartbeat(record(number=number))

        beating = threading.Thread(target=beat)
        beating.start()
        try:
            # Longer than the TTL.
            time.sleep(1.5 * KEPT_TTL_S)
            assert number in reader.nodes()
        finally:
            stop.set()
            beating.join()

    # -- locations -------------------------------------------------------------------------------

    def test_what_was_published_is_located(self, open_handle: OpenHandle) -> None:
        directory = open_handle()
        keys = keys_of("prompt", 300)
        number = directory.register(record())
        directory.publish(number, keys[:200], [], 1)
        assert directory.locate(keys) == [(number,)] * 200 + [()] * 100
        shuffled = [keys[250], keys[7], keys[250], keys[7], keys[0]]
        assert directory.locate(shuffled) == [(), (number,), (), (number,), (number,)]

    def test_every_holder_is_named(self, open_handle: OpenHandle) -> None:
        directory = open_handle()
        both, one, none = keys_of("shared", 3)
        first = directory.register(record("first"))
        second = directory.register(record("second"))
        directory.publish(first, [both, one], [], 1)
        directory.publish(second, [both], [], 1)
        located = directory.locate([both, one, none])
        assert [set(numbers) for numbers in located] == [{first, second}, {first}, set()]
        assert len(located[0]) == 2

    def test_what_was_removed_is_not_located(self, open_handle: OpenHandle) -> None:
        directory = open_handle()
        kept, gone, fresh = keys_of("removal", 3)
        first = directory.register(record("first"))
        second = directory.register(record("second"))
        directory.publish(first, [kept, gone], [], 1)
        directory.publish(second, [gone], [], 1)
        directory.publish(first, [fresh], [gone], 3)
        assert directory.locate([kept, gone, fresh]) == [(first,), (second,), (first,)]

    def test_repeating_a_batch_changes_nothing(self, open_handle: OpenHandle) -> None:
        directory = open_handle()
        kept, gone = keys_of("again", 2)
        number = directory.register(record())
        directory.publish(number, [gone], [], 1)
        for _ in range(3):
            directory.publish(number, [kept], [gone], 2)
        assert directory.locate([kept, gone]) == [(number,), ()]

    def test_removing_what_was_never_there_is_no_error(self, open_handle: OpenHandle) -> None:
        directory = open_handle()
        (key,) = keys_of("never", 1)
        number = directory.register(record())
        directory.publish(number, [], [key], 1)
        assert directory.locate([key]) == [()]

    def test_a_withdrawn_node_is_named_no_more(self, open_handle: OpenHandle) -> None:
        directory, reader = open_handle(), open_handle()
        shared, own = keys_of("withdrawn", 2)
        leaving = directory.register(record("leaving"))
        staying = directory.register(record("staying"))
        directory.publish(leaving, [shared, own], [], 1)
        directory.publish(staying, [shared], [], 1)
        directory.withdraw(leaving)
        directory.withdraw(leaving)  # again: no error
        assert directory.locate([shared, own]) == [(staying,), ()]
        eventually(lambda: reader.locate([shared, own]) == [(staying,), ()], "others see it")

    def test_a_new_number_begins_with_nothing(self, open_handle: OpenHandle) -> None:
        directory = open_handle()
        (key,) = keys_of("restart", 1)
        before = directory.register(record())
        directory.publish(before, [key], [], 1)
        directory.withdraw(before)
        after = directory.register(record())
        assert directory.locate([key]) == [()]
        directory.publish(after, [key], [], 1)
        assert directory.locate([key]) == [(after,)]

    def test_what_an_ended_registration_says_is_not_heard(self, open_handle: OpenHandle) -> None:
        directory = open_handle()
        (key,) = keys_of("ghost", 1)
        number = directory.register(record())
        directory.withdraw(number)
        directory.publish(number, [key], [], 1)
        assert directory.locate([key]) == [()]

    def test_the_largest_batch_and_the_largest_question(self, open_handle: OpenHandle) -> None:
        directory = open_handle()
        number = directory.register(record())
        keys = keys_of("large", PUBLISH_KEYS_MAX)
        directory.publish(number, keys, [], 1)
        question = keys * (LOCATE_KEYS_MAX // len(keys))
        assert directory.locate(question) == [(number,)] * len(question)
        directory.publish(number, [], keys, 1 + len(keys))
        assert directory.locate(keys) == [()] * len(keys)

    # -- events ----------------------------------------------------------------------------------

    def test_batches_are_events_in_their_order(self, open_handle: OpenHandle) -> None:
        directory, reader = open_handle(), open_handle()
        a, b, c = keys_of("events", 3)
        number = directory.register(record())
        directory.publish(number, [a, b], [], 1)
        position, events = reader.events("0")
        assert events == [DirectoryEvent(number, 1, [a, b], [])]
        assert reader.events(position) == (position, [])
        directory.publish(number, [c], [a], events[0].next_seq)
        after, events = reader.events(position)
        assert events == [DirectoryEvent(number, 3, [c], [a])]
        assert after != position
        assert reader.events("0")[1][1:] == events

    def test_events_come_in_bounded_answers(self, open_handle: OpenHandle) -> None:
        directory = open_handle()
        number = directory.register(record())
        count = EVENTS_MAX + 10
        keys = keys_of("many", count)
        for i, key in enumerate(keys):
            directory.publish(number, [key], [], 1 + i)
        position, first = directory.events("0")
        position, second = directory.events(position)
        assert len(first) == EVENTS_MAX
        assert [event.first_seq for event in first + second] == list(range(1, count + 1))
        assert [key for event in first + second for key in event.added] == keys
        assert directory.events(position) == (position, [])

    # -- bad input, closing, threads ---------------------------------------------------------------

    def test_what_can_never_work_is_refused(self, open_handle: OpenHandle) -> None:
        directory = open_handle()
        number = directory.register(record())
        keys = keys_of("bad", PUBLISH_KEYS_MAX + 1)
        for wrong in (b"", b"short", b"x" * 17):
            with refused(InvalidInput, f"{len(wrong)} bytes"):
                directory.locate([keys[0], wrong])
            with refused(InvalidInput, f"{len(wrong)} bytes"):
                directory.publish(number, [], [wrong], 1)
        with refused(InvalidInput, "at most"):
            directory.publish(number, keys, [], 1)
        with refused(InvalidInput, "at most"):
            directory.publish(number, keys[:1500], keys[1500:], 1)
        with refused(InvalidInput, "at most"):
            directory.locate(keys[:1] * (LOCATE_KEYS_MAX + 1))
        with refused(InvalidInput, "counts from 1"):
            directory.publish(number, keys[:1], [], 0)
        for wrong_number in (0, -1, 1 << 32):
            with refused(InvalidInput, "no registration"):
                directory.publish(wrong_number, keys[:1], [], 1)
            with refused(InvalidInput, "no registration"):
                directory.withdraw(wrong_number)
        for position in ("", "-1", "x", "0 0", "$", "1" * 100):
            with refused(InvalidInput, "position"):
                directory.events(position)
        assert directory.locate(keys[:1]) == [()]

    def test_a_closed_handle_says_so(self, open_handle: OpenHandle) -> None:
        directory, other = open_handle(), open_handle()
        number = directory.register(record())
        directory.close()
        directory.close()
        calls: list[Callable[[], object]] = [
            lambda: directory.register(record()),
            lambda: directory.heartbeat(record(number=number)),
            lambda: directory.withdraw(number),
            lambda: directory.publish(number, [], [], 1),
            directory.nodes,
            lambda: directory.locate([]),
            lambda: directory.events("0"),
        ]
        for call in calls:
            with refused(ClientClosed, "closed"):
                call()
        assert number in other.nodes()

    def test_statistics_are_plain(self, open_handle: OpenHandle) -> None:
        directory = open_handle()
        directory.register(record())
        directory.nodes()
        numbers = directory.statistics()
        assert numbers["healthy"] is True
        assert numbers["nodes"] == 1
        assert numbers["kind"]

    def test_many_threads_at_once(self, open_handle: OpenHandle) -> None:
        directory = open_handle()
        wrong: list[object] = []

        def work(name: str) -> None:
            number = directory.register(record(name))
            mine, shared = keys_of(name, 20), keys_of("shared", 5)
            for turn in range(10):
                directory.publish(number, [*mine, *shared], [], 1 + 50 * turn)
                located = directory.locate([*mine, *shared])
                if not all(number in numbers for numbers in located):
                    wrong.append(located)
                directory.publish(number, [], [*mine, *shared], 26 + 50 * turn)
                if any(number in numbers for numbers in directory.locate([*mine, *shared])):
                    wrong.append(name)

        threads = [threading.Thread(target=work, args=(f"node-{i}",)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert len(directory.nodes()) == 8
