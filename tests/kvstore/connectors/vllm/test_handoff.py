"""A prompt that one instance prefills and another decodes, through the pool."""

from __future__ import annotations

import time
from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from fakepool import BLOCK, PAGE, SCHEMA
from kvsupport import payloads_of, wait_until

from tiffin.kvstore.client.pool.many_nodes import IN_PEER
from tiffin.kvstore.client.verbs.block_verbs import Hit
from tiffin.kvstore.connectors.vllm import handoff, scheduler_side
from tiffin.kvstore.connectors.vllm.handoff import Promise
from tiffin.kvstore.connectors.vllm.model.request_identity import Identity
from tiffin.kvstore.connectors.vllm.orders import StepReport
from tiffin.kvstore.connectors.vllm.pool_link import PoolLink
from tiffin.kvstore.connectors.vllm.request_tracker import RequestTracker, TrackerOptions
from tiffin.kvstore.connectors.vllm.scheduler_side import SchedulerSide
from tiffin.kvstore.connectors.vllm.settings import Settings
from tiffin.kvstore.errors import InvalidInput
from tiffin.kvstore.node.core.records import IN_DRAM

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tiffin.kvstore.connectors.vllm.orders import LoadOrder

URL = "embedded:?dram=1MiB&prefault=false"
PROMPT = list(range(40))
PATIENT_S = 60.0


class TestParameters:
    def test_who_prefills_is_asked_and_its_answer_is_what_the_other_waits_for(self) -> None:
        assert handoff.to_be_told({"tiffin": {}})
        assert handoff.promised({"tiffin": {}}) == handoff.NOTHING
        for node in (None, 0, 3):
            told = handoff.promise(8, node)
            assert not handoff.to_be_told(told)
            assert handoff.promised(told) == Promise(8, node=node)

    def test_what_is_asked_together_with_the_prefill_waits_for_all_of_it(self) -> None:
        told = {"tiffin": {"prefilling": True, "node": 3}}
        assert handoff.promised(told) == Promise(prefilling=True, node=3)

    @pytest.mark.parametrize("tells", [{}, {"tell": True}])
    def test_what_is_being_fetched_is_waited_for(self, tells: dict[str, bool]) -> None:
        told = {"tiffin": {"fetched": 8, "within_s": 0.2, **tells}}
        assert handoff.promised(told) == Promise(fetched=8, within_s=0.2)
        assert handoff.to_be_told(told) == bool(tells)

    @pytest.mark.parametrize("within_s", [-1, "1", True, None, float("nan")])
    def test_what_is_no_time_is_refused(self, within_s: Any) -> None:
        with pytest.raises(InvalidInput, match="is no time"):
            handoff.promised({"tiffin": {"fetched": 8, "within_s": within_s}})

    @pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": True}, {"tiffin": None}])
    def test_others_parameters_mean_nothing_here(self, params: Any) -> None:
        assert not handoff.to_be_told(params)
        assert handoff.promised(params) == handoff.NOTHING

    @pytest.mark.parametrize("number", [-1, 1 << 33, "8", 8.0, True, [8]])
    @pytest.mark.parametrize("name", ["blocks", "fetched", "node"])
    def test_what_is_no_number_is_refused(self, name: str, number: Any) -> None:
        with pytest.raises(InvalidInput, match=r"is no (number of blocks|node)"):
            handoff.promised({"tiffin": {name: number}})

    def test_what_is_neither_true_nor_false_is_refused(self) -> None:
        with pytest.raises(InvalidInput, match="prefilling is 'yes'"):
            handoff.promised({"tiffin": {"prefilling": "yes"}})


class TestPromise:
    """What the instance that prefills says."""

    def tracker(self, **options: Any) -> RequestTracker:
        tracker = RequestTracker(TrackerOptions(BLOCK, PAGE, **options))
        tracker.add("r", SCHEMA.prefix(PROMPT), 0.0)
        tracker.answered("r", 0)
        tracker.allocated("r", range(10), 0, 0)
        return tracker

    def begin(self, tracker: RequestTracker, confirmed: int = 0) -> None:
        tracker.plan([("r", confirmed)], Engine())

    def test_the_blocks_of_confirmed_tokens(self) -> None:
        tracker = self.tracker()
        self.begin(tracker)
        assert tracker.promise("r", 39) == 4
        tracker.finished("r", 39, Engine())
        (save,) = tracker.plan([], Engine()).saves
        assert len(save.prefix) == 4, "as was promised"

    def test_nothing_of_what_it_did_not_compute_itself(self) -> None:
        tracker = self.tracker()
        assert tracker.promise("r", 39) == 0, "before its first step"
        self.begin(tracker, confirmed=39)
        assert tracker.promise("r", 39) == 0, "nothing behind what it began with"

    @pytest.mark.parametrize(
        "options", [{"saves": False}, {"save": "second"}, {"save_tokens_min": 100}]
    )
    def test_nothing_that_is_not_surely_saved(self, options: dict[str, Any]) -> None:
        tracker = self.tracker(**options)
        self.begin(tracker)
        assert tracker.promise("r", 39) == 0
        assert tracker.promise("unknown", 39) == 0

    def test_nothing_while_saves_fail(self) -> None:
        """Who decodes would wait for `handoff_timeout_s`."""
        tracker = self.tracker()
        self.begin(tracker)
        tracker.reported(StepReport(ended_saves=Counter([7]), failed_saves=frozenset({7})))
        assert tracker.promise("r", 39) == 0
        tracker.reported(StepReport(mapped=Counter()))
        assert tracker.promise("r", 39) == 0, "no other save has ended"
        tracker.reported(StepReport(ended_saves=Counter([8])))
        assert tracker.promise("r", 39) == 4


class Engine:
    def pages_of(self, _: str) -> Sequence[int]:
        return range(10)

    def tokens_of(self, _: str) -> Sequence[int]:
        return PROMPT

    def holds(self, _: str) -> bool:
        return True


class Waiting:
    """An instance that decodes."""

    @pytest.fixture
    def link(self) -> Iterator[PoolLink]:
        link = PoolLink.shared(URL, "always")
        link.call(lambda client: None, wait_s=30.0)
        yield link
        link.close()

    def side(
        self, handoff_timeout_s: float = PATIENT_S, prefill_timeout_s: float = PATIENT_S
    ) -> SchedulerSide:
        settings = Settings(
            url=URL,
            block_tokens=BLOCK,
            lookup_timeout_s=PATIENT_S,
            handoff_timeout_s=handoff_timeout_s,
            prefill_timeout_s=prefill_timeout_s,
        )
        return SchedulerSide(settings, SCHEMA, PAGE, 1, PoolLink.shared(URL, "always"))

    def store(self, link: PoolLink, blocks: int) -> None:
        prefix = SCHEMA.prefix(PROMPT)[:blocks]
        link.call(lambda client: client.put(prefix, payloads_of(prefix)))

    def ask(self, side: SchedulerSide) -> int | None:
        return side.matched("r", 0, len(PROMPT))[0]

    def await_lookups(self, side: SchedulerSide, count: int) -> None:
        """Until so many lookups have been answered."""
        answered = 0

        def enough() -> bool:
            nonlocal answered
            assert self.ask(side) is None, "answered with less than was promised"
            answered += side.counters.take().get("lookups", 0)
            return answered >= count

        wait_until(enough, f"{count} lookups")

    def pausing(self, monkeypatch: pytest.MonkeyPatch, sleep: Callable[[float], None]) -> None:
        """Have the side call `sleep` in place of the real one."""
        clock = SimpleNamespace(monotonic=time.monotonic, sleep=sleep)
        monkeypatch.setattr(scheduler_side, "time", clock)


class TestWaiting(Waiting):
    """What the instance that decodes does."""

    def test_it_waits_until_all_promised_blocks_are_there(self, link: PoolLink) -> None:
        self.store(link, 1)
        side = self.side()
        side.add("r", PROMPT, Identity("", {}), promise=Promise(3))
        self.await_lookups(side, 3)
        self.store(link, 3)
        wait_until(lambda: self.ask(side) == 3 * BLOCK, "all are found")
        side.close()

    def test_it_takes_what_there_is_when_the_time_is_over(self, link: PoolLink) -> None:
        self.store(link, 1)
        side = self.side(handoff_timeout_s=0.05)
        side.add("r", PROMPT, Identity("", {}), promise=Promise(3))
        wait_until(lambda: self.ask(side) == BLOCK, "the only one is found")
        side.close()

    def test_without_a_promise_it_takes_what_there_is(self, link: PoolLink) -> None:
        self.store(link, 1)
        side = self.side()
        side.add("r", PROMPT, Identity("", {}))
        wait_until(lambda: self.ask(side) == BLOCK, "the only one is found")
        side.close()

    def test_more_than_the_prompt_has_is_not_waited_for(self, link: PoolLink) -> None:
        self.store(link, 5)
        side = self.side()
        side.add("r", PROMPT, Identity("", {}), promise=Promise(9))
        wait_until(lambda: self.ask(side) == len(PROMPT) - 1, "a token is left to compute")
        side.close()

    def test_a_request_that_is_given_up_waits_no_more(self, link: PoolLink) -> None:
        side = self.side()
        side.add("r", PROMPT, Identity("", {}), promise=Promise(3))
        self.await_lookups(side, 1)
        side.finished("r", 0, Engine())
        assert side.matched("r", 0, len(PROMPT)) == (0, False)
        side.close()

    def test_an_engine_with_nothing_else_to_do_asks_again_at_leisure(
        self, link: PoolLink, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pauses: list[float] = []
        self.pausing(monkeypatch, pauses.append)
        side = self.side()
        side.add("r", PROMPT, Identity("", {}), promise=Promise(3))

        while len(pauses) < 3:  # steps come one right after the other
            side.idle = True
            assert self.ask(side) is None
        assert all(0 < pause <= scheduler_side._AGAIN_S for pause in pauses)
        side.close()

    def test_a_busy_engine_does_not_pause(
        self, link: PoolLink, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def never(_: float) -> None:
            raise AssertionError("a step paused")

        self.pausing(monkeypatch, never)
        side = self.side()
        side.idle = False
        side.add("r", PROMPT, Identity("", {}), promise=Promise(3))
        self.await_lookups(side, 3)
        side.close()


class TestBeingFetched:
    """What an engine does whose own node fetches what the conductor counts on."""

    def ask(self, within_s: float, *found: bytes) -> tuple[SchedulerSide, list[int]]:
        """The prompt's first lookups find the blocks at these places, the rest as the last."""
        lookups: list[int] = []

        def match(*_: Any, **__: Any) -> Hit:
            where = found[min(len(lookups), len(found) - 1)]
            lookups.append(len(where))
            return Hit(len(where), len(where) * BLOCK, where)

        link = SimpleNamespace(call=match, close=lambda: None)
        settings = Settings(url=URL, block_tokens=BLOCK, lookup_timeout_s=PATIENT_S)
        side = SchedulerSide(settings, SCHEMA, PAGE, 1, cast("PoolLink", link))
        promise = Promise(fetched=3, within_s=within_s)
        side.add("r", PROMPT, Identity("", {}), promise=promise)
        wait_until(lambda: side.matched("r", 0, len(PROMPT))[0] == 3 * BLOCK, "it has waited")
        return side, lookups

    def tiers(self, side: SchedulerSide) -> dict[str, int]:
        return dict(side.tracker.hit_tokens("r", 3 * BLOCK))

    def test_it_waits_until_all_is_at_its_node(self) -> None:
        far, near = bytes([IN_PEER]), bytes([IN_DRAM])
        side, lookups = self.ask(PATIENT_S, 3 * far, near + 2 * far, 3 * near)
        assert (len(lookups), self.tiers(side)) == (3, {"dram": 3 * BLOCK})

    def test_it_takes_what_is_elsewhere_when_the_time_is_over(self) -> None:
        side, _ = self.ask(0.02, 3 * bytes([IN_PEER]))
        assert self.tiers(side) == {"peer": 3 * BLOCK}


class TestBesideThePrefill(Waiting):
    """What the instance that decodes does while the other one computes."""

    PROMISE = Promise(prefilling=True)

    def order(self, side: SchedulerSide, tokens: int) -> LoadOrder:
        side.allocated("r", range(10), tokens, 0)
        (order,) = side.plan([], Engine(), []).loads
        return order

    def test_it_streams_the_whole_prompt_once_the_first_block_is_being_written(
        self, link: PoolLink
    ) -> None:
        side, prefix = self.side(), SCHEMA.prefix(PROMPT)
        self.store(link, 1)
        side.add("r", PROMPT, Identity("", {}), promise=self.PROMISE)
        self.await_lookups(side, 3)
        slots = link.call(lambda client: client.reserve(prefix[1:2]))
        wait_until(lambda: self.ask(side) == len(PROMPT) - 1, "a token is left to compute")
        assert side.matched("r", 0, len(PROMPT)) == (len(PROMPT) - 1, True), "asynchronously"
        order = self.order(side, len(PROMPT) - 1)
        assert (order.streamed, order.held, order.synchronous) == (True, None, False)
        assert len(order.prefix) == len(prefix)
        slots.abort()
        side.close()

    def test_what_is_all_there_is_held_as_any_other(self, link: PoolLink) -> None:
        self.store(link, 5)
        side = self.side()
        side.add("r", PROMPT, Identity("", {}), promise=self.PROMISE)
        wait_until(lambda: self.ask(side) is not None, "it is found")
        order = self.order(side, len(PROMPT) - 1)
        assert not order.streamed
        side.close()

    def test_a_writer_that_does_not_come_is_not_waited_for(self, link: PoolLink) -> None:
        self.store(link, 1)
        side = self.side(prefill_timeout_s=0.05)
        side.add("r", PROMPT, Identity("", {}), promise=self.PROMISE)
        wait_until(lambda: self.ask(side) == BLOCK, "what is stored is taken")
        assert not self.order(side, BLOCK).streamed
        side.close()

    def test_workers_that_can_not_stream_wait_until_all_is_stored(self, link: PoolLink) -> None:
        settings = Settings(
            url=URL, block_tokens=BLOCK, lookup_timeout_s=PATIENT_S, prefill_timeout_s=PATIENT_S
        )
        pool, prefix = PoolLink.shared(URL, "always"), SCHEMA.prefix(PROMPT)
        side = SchedulerSide(settings, SCHEMA, PAGE, 1, pool, streams=False)
        slots = link.call(lambda client: client.reserve(prefix))
        side.add("r", PROMPT, Identity("", {}), promise=self.PROMISE)
        self.await_lookups(side, 3)
        slots.abort()
        self.store(link, 5)
        wait_until(lambda: self.ask(side) is not None, "all are stored")
        assert not self.order(side, len(PROMPT) - 1).streamed
        side.close()

    def test_after_a_preemption_it_takes_what_there_is(self, link: PoolLink) -> None:
        side, prefix = self.side(), SCHEMA.prefix(PROMPT)
        slots = link.call(lambda client: client.reserve(prefix))
        side.add("r", PROMPT, Identity("", {}), promise=self.PROMISE)
        wait_until(lambda: self.ask(side) is not None, "it is being written")
        assert self.order(side, len(PROMPT) - 1).streamed
        slots.abort()
        self.store(link, 2)
        side.plan([], Engine(), ["r"])
        wait_until(lambda: self.ask(side) == 2 * BLOCK, "what is stored is found")
        assert not self.order(side, 2 * BLOCK).streamed
        side.close()
