"""Log lines that strangers cause are limited: enough to see them, never enough to fill the log."""

from __future__ import annotations

import logging

import pytest

from tiffin.messenger.log_rate_limit import Ration


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def log(clock: Clock) -> logging.Logger:
    logger = logging.Logger("of this test")
    logger.addFilter(Ration(3, clock))
    return logger


@pytest.fixture
def lines(log: logging.Logger) -> list[str]:
    written: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: written.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    return written


def test_a_flood_is_counted(log: logging.Logger, lines: list[str], clock: Clock) -> None:
    for peer in range(1000):
        log.warning("refusing %s", peer)
    assert lines == ["refusing 0", "refusing 1", "refusing 2"]
    clock.now += 1.0
    for peer in range(1000, 1004):
        log.warning("refusing %s", peer)
    assert lines[3:] == ["refusing 1000 (and 997 more like it before)"] + [
        f"refusing {peer}" for peer in (1001, 1002)
    ]
    clock.now += 60.0
    log.warning("refusing %s", "100%")
    assert lines[6:] == ["refusing 100% (and 1 more like it before)"]


def test_one_kind_does_not_hide_another(log: logging.Logger, lines: list[str]) -> None:
    for _ in range(10):
        log.warning("refusing %s: %s", "peer", ValueError("of one class"))
        log.warning("refusing %s: %s", "peer", KeyError("of another"))
        log.warning("something else")
        log.warning("with %(names)s", {"names": "a mapping"})
    assert len(lines) == 4 * 3


def test_what_was_asked_for_passes(log: logging.Logger, lines: list[str]) -> None:
    for _ in range(10):
        log.info("information")
        log.debug("details")
    assert len(lines) == 20


def test_a_clock_that_jumps_does_not_silence_it(
    log: logging.Logger, lines: list[str], clock: Clock
) -> None:
    for _ in range(5):
        log.warning("refusing")
    clock.now += 1e9
    log.warning("refusing")
    assert len(lines) == 4


class Costly:
    """A log argument that takes long to format."""

    written = 0

    def __str__(self) -> str:
        self.written += 1
        return "peer"


def test_what_is_left_out_is_not_put_into_words(
    log: logging.Logger, lines: list[str], clock: Clock
) -> None:
    peer = Costly()
    for _ in range(1000):
        log.warning("refusing %s", peer)
    clock.now += 1.0
    log.warning("refusing %s", peer)
    assert peer.written == len(lines) == 4
