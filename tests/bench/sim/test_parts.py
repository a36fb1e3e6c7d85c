"""The parts of a simulated cluster, each beside what can be computed by hand."""

from __future__ import annotations

import pytest

from tiffin.bench.sim.clock import VirtualClock
from tiffin.bench.sim.instances.decode_instance import DecodeInstance
from tiffin.bench.sim.instances.sim_request import SimRequest
from tiffin.bench.sim.nodes.block_cache import BlockCache
from tiffin.bench.sim.nodes.network import Network
from tiffin.bench.traces.ideal_cache import IdealCache
from tiffin.bench.traces.trace import TraceRequest
from tiffin.conductor.cost import latency_profiles

PROFILE = latency_profiles.load(latency_profiles.DEFAULT)


def forever() -> bool:
    return True


def job(name: str, prompt: int, output: int, first_token_s: float = 0.0) -> SimRequest:
    one = SimRequest(name, TraceRequest(0.0, prompt, output), ())
    one.first_token_s = first_token_s
    return one


class TestClock:
    def test_what_is_asked_for_first_happens_first_at_one_time(self) -> None:
        clock, said = VirtualClock(), list[str]()
        clock.at(2.0, lambda: said.append("late"))
        clock.at(1.0, lambda: said.append("first"))
        clock.at(1.0, lambda: said.append("second"))
        clock.at(1.5, lambda: said.append("never")).cancel()
        clock.run(forever)
        assert said == ["first", "second", "late"]
        assert clock.now_s == 2.0

    def test_nothing_happens_before_now(self) -> None:
        clock, times = VirtualClock(), list[float]()
        clock.at(5.0, lambda: clock.at(1.0, lambda: times.append(clock.now_s)) and None)
        clock.run(forever)
        assert times == [5.0]


class TestNetwork:
    """Cards of 100 bytes per second, with a latency of one second."""

    @staticmethod
    def ends(*sends: tuple[str, str, float, float]) -> list[float]:
        """When each of (source, target, bytes, seconds of its begin) has arrived."""
        clock = VirtualClock()
        network = Network(clock, 100.0, 1.0)
        arrived = [0.0] * len(sends)

        def begin(number: int, source: str, target: str, nbytes: float) -> None:
            def done() -> None:
                arrived[number] = clock.now_s

            network.send(source, target, nbytes, done)

        for number, (source, target, nbytes, at_s) in enumerate(sends):
            clock.at(at_s, lambda args=(number, source, target, nbytes): begin(*args))  # type: ignore[misc]
        clock.run(forever)
        return arrived

    def test_one_has_the_card_alone(self) -> None:
        assert self.ends(("a", "b", 500.0, 0.0)) == pytest.approx([6.0], abs=1e-4)

    def test_within_a_node_nothing_takes_time(self) -> None:
        assert self.ends(("a", "a", 500.0, 0.0)) == [0.0]

    @pytest.mark.parametrize("second", [("a", "c"), ("c", "b")])
    def test_two_share_a_senders_card_and_a_receivers(self, second: tuple[str, str]) -> None:
        """The second one comes when the first has sent half, and goes on alone."""
        ends = self.ends(("a", "b", 400.0, 0.0), (*second, 400.0, 2.0))
        assert ends == pytest.approx([7.0, 9.0], abs=1e-4)

    def test_two_that_share_no_card_do_not_meet(self) -> None:
        ends = self.ends(("a", "b", 400.0, 0.0), ("b", "a", 400.0, 0.0), ("c", "d", 400.0, 0.0))
        assert ends == pytest.approx([5.0] * 3, abs=1e-4)


class TestBlockCache:
    @staticmethod
    def keys(*blocks: int) -> tuple[bytes, ...]:
        return tuple(block.to_bytes(16) for block in blocks)

    def test_chains_leave_from_their_tail(self) -> None:
        cache = BlockCache(4)
        assert cache.put(self.keys(1, 2, 3)) == (list(self.keys(1, 2, 3)), [])
        added, removed = cache.put(self.keys(1, 4, 5))
        assert added == list(self.keys(4, 5))
        assert removed == list(self.keys(3))
        assert cache.match(self.keys(1, 2, 3)) == 2

    def test_of_a_prompt_that_is_too_long_the_head_is_kept(self) -> None:
        cache = BlockCache(2)
        cache.put(self.keys(1, 2, 3))
        assert len(cache) == cache.match(self.keys(1, 2, 3)) == 2

    def test_it_hits_what_the_ideal_cache_hits(self) -> None:
        chains = [(n % 7, 100 + n % 3, 200 + n % 5, 300 + n) for n in range(200)]
        cache, ideal = BlockCache(24), IdealCache(24)
        for chain in chains:
            hits = cache.match(self.keys(*chain))
            cache.put(self.keys(*chain))
            assert hits == ideal.serve(chain)


class TestDecoding:
    def decode(self, *jobs: SimRequest, capacity: int = 1_000_000, batch_max: int = 256) -> float:
        """Decode them, all there at 0; returns when the last one has ended."""
        clock = VirtualClock()
        one = DecodeInstance("d", clock, PROFILE, capacity, batch_max, lambda job: None)
        clock.at(0.0, lambda: [one.join(job) for job in jobs] and None)
        clock.run(forever)
        assert (one.batch, one.context_tokens) == (0, 0)
        return clock.now_s

    def test_each_gap_is_a_step_over_the_context_of_then(self) -> None:
        d0, d1, d2 = PROFILE.decode
        alone = job("a", 1000, 4)
        self.decode(alone)
        expected = [d0 + d1 + d2 * (1001 + step) for step in range(3)]
        assert alone.gaps_s == pytest.approx(expected)

    def test_a_batch_shares_its_steps(self) -> None:
        """The second one joins after a step; the first one ends, and leaves it alone."""
        d0, d1, d2 = PROFILE.decode
        first, second = job("a", 1000, 3), job("b", 500, 3)
        self.decode(first, second)
        alone = d0 + d1 + d2 * 1001
        both = d0 + 2 * d1 + d2 * (1002 + 501)
        assert first.gaps_s == pytest.approx([alone, both])
        assert second.gaps_s == pytest.approx([alone + both, d0 + d1 + d2 * 502])

    def test_who_does_not_fit_waits(self) -> None:
        jobs = [job(name, 1000, 11) for name in "abc"]
        apart = self.decode(*jobs, capacity=1500)
        jobs = [job(name, 1000, 11) for name in "abc"]
        assert self.decode(*jobs, batch_max=1) == pytest.approx(apart)
        jobs = [job(name, 1000, 11) for name in "abc"]
        assert self.decode(*jobs) < apart / 2

    def test_an_answer_of_one_token_needs_no_step(self) -> None:
        assert self.decode(job("a", 1000, 1)) == 0.0
