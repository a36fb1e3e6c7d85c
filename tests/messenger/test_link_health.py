"""A link's health and measured speed after some transfers."""

from __future__ import annotations

import random

import pytest

from tiffin.messenger.link_health import LinkHealth, LinkStatistics, order_paths

MIB = 1 << 20


def test_unknown_links_are_taken_for_fast() -> None:
    numbers = [LinkStatistics(name) for name in ("nixl", "tcp")]
    assert all(0 < one.latency_s <= 50e-6 for one in numbers)
    assert all(one.bandwidth_bytes_s >= 3e9 for one in numbers)
    assert LinkStatistics("nixl").predicted_s(MIB) < LinkStatistics("tcp").predicted_s(MIB)


@pytest.mark.parametrize("name", ["tcp", "nixl"])
@pytest.mark.parametrize(("latency_s", "bandwidth"), [(5e-3, 1e8), (30e-6, 2e9), (1e-6, 20e9)])
def test_transfers_teach_latency_and_bandwidth(
    name: str, latency_s: float, bandwidth: float
) -> None:
    chance, numbers = random.Random(3), LinkStatistics(name)
    total = 0
    for _ in range(200):
        nbytes = chance.choice((0, 4096, 16 * MIB, 64 * MIB))
        seconds = (latency_s + nbytes / bandwidth) * chance.uniform(0.8, 1.2)
        numbers.observe(nbytes, seconds)
        total += nbytes
    assert numbers.bandwidth_bytes_s == pytest.approx(bandwidth, rel=0.3)
    assert numbers.latency_s == pytest.approx(latency_s, rel=0.3, abs=4096 / bandwidth)
    predicted_s = numbers.predicted_s(256 * MIB)
    assert predicted_s == pytest.approx(latency_s + 256 * MIB / bandwidth, rel=0.3)
    assert numbers.as_dict() == {
        "latency_s": numbers.latency_s,
        "bandwidth_bytes_s": numbers.bandwidth_bytes_s,
        "transfers": 200,
        "bytes": total,
        "errors": 0,
    }


def test_the_first_transfer_counts_most() -> None:
    numbers = LinkStatistics("nixl")
    numbers.observe(64 * MIB, 1.0)
    assert numbers.bandwidth_bytes_s < 0.6 * LinkStatistics("nixl").bandwidth_bytes_s


@pytest.mark.parametrize("seconds", [0.0, -1.0])
@pytest.mark.parametrize("nbytes", [0, 100 * MIB])
def test_impossible_measurements_give_possible_numbers(nbytes: int, seconds: float) -> None:
    numbers = LinkStatistics("tcp")
    for _ in range(100):
        numbers.observe(nbytes, seconds)
    assert numbers.latency_s > 0
    assert 0 < numbers.bandwidth_bytes_s <= 1e12


def test_sizes_between_teach_nothing_but_count() -> None:
    numbers = LinkStatistics("tcp")
    before = numbers.latency_s, numbers.bandwidth_bytes_s
    numbers.observe(512 << 10, 9.0)
    assert (numbers.latency_s, numbers.bandwidth_bytes_s) == before
    assert numbers.bytes == 512 << 10


def test_a_link_that_fails_rests_longer_each_time_and_recovers() -> None:
    link = LinkHealth("tcp")
    assert not link.health.rests(0.0)
    rests = []
    for now in range(0, 100_000, 1000):
        link.failed(now)
        assert link.health.rests(now)
        rests.append(link.health.retry_at - now)
    assert rests[:4] == pytest.approx([0.1, 0.2, 0.4, 0.8])
    assert rests[-1] == 10.0
    link.succeeded(100, 1e-3)
    assert not link.health.rests(99_000.5)
    assert link.statistics.errors == 100
    link.failed(200_000)
    assert link.health.retry_at == pytest.approx(200_000.1)


def test_paths_by_predicted_time_and_health() -> None:
    links = tcp, nixl = LinkHealth("tcp"), LinkHealth("nixl")
    tcp.statistics.latency_s = 1e-6
    assert order_paths(links, 100, 0.0) == [0, 1]  # latency decides
    assert order_paths(links, 1 << 30, 0.0) == [1, 0]  # bandwidth decides
    nixl.failed(10.0)
    assert order_paths(links, 1 << 30, 10.05) == [0, 1]
    tcp.failed(10.0)
    tcp.failed(10.0)
    assert order_paths(links, 1 << 30, 10.05) == [1, 0]  # both rest: the one that rests less long
    assert order_paths(links, 1 << 30, 99.0) == [1, 0]
