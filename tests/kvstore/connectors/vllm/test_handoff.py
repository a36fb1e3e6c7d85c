"""A prompt that one instance prefills and another decodes, through the pool."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from fakepool import BLOCK, PAGE, SCHEMA
from kvsupport import payloads_of, wait_until

from tiffin.kvstore.connectors.vllm import handoff
from tiffin.kvstore.connectors.vllm.model.request_identity import Identity
from tiffin.kvstore.connectors.vllm.orders import StepReport
from tiffin.kvstore.connectors.vllm.pool_link import PoolLink
from tiffin.kvstore.connectors.vllm.request_tracker import RequestTracker, TrackerOptions
from tiffin.kvstore.connectors.vllm.scheduler_side import SchedulerSide
from tiffin.kvstore.connectors.vllm.settings import Settings
from tiffin.kvstore.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

URL = "embedded:?dram=1MiB&prefault=false"
PROMPT = list(range(40))
PATIENT_S = 60.0


class TestParameters:
    def test_who_prefills_is_asked_and_its_answer_is_what_the_other_waits_for(self) -> None:
        assert handoff.to_be_told({"tiffin": {}})
        assert handoff.promised_blocks({"tiffin": {}}) == 0
        told = handoff.promise(8)
        assert not handoff.to_be_told(told)
        assert handoff.promised_blocks(told) == 8

    @pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": True}, {"tiffin": None}])
    def test_others_parameters_mean_nothing_here(self, params: Any) -> None:
        assert not handoff.to_be_told(params)
        assert handoff.promised_blocks(params) == 0

    @pytest.mark.parametrize("blocks", [-1, 1 << 20, "8", 8.0, True, None, [8]])
    def test_what_is_no_number_of_blocks_is_refused(self, blocks: Any) -> None:
        with pytest.raises(InvalidInput, match="number of blocks"):
            handoff.promised_blocks({"tiffin": {"blocks": blocks}})


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


class TestWaiting:
    """What the instance that decodes does."""

    @pytest.fixture
    def link(self) -> Iterator[PoolLink]:
        link = PoolLink.shared(URL, "always")
        link.call(lambda client: None, wait_s=30.0)
        yield link
        link.close()

    def side(self, handoff_timeout_s: float = PATIENT_S) -> SchedulerSide:
        settings = Settings(
            url=URL,
            block_tokens=BLOCK,
            lookup_timeout_s=PATIENT_S,
            handoff_timeout_s=handoff_timeout_s,
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

    def test_it_waits_until_all_promised_blocks_are_there(self, link: PoolLink) -> None:
        self.store(link, 1)
        side = self.side()
        side.add("r", PROMPT, Identity("", {}), promised_blocks=3)
        self.await_lookups(side, 3)
        self.store(link, 3)
        wait_until(lambda: self.ask(side) == 3 * BLOCK, "all are found")
        side.close()

    def test_it_takes_what_there_is_when_the_time_is_over(self, link: PoolLink) -> None:
        self.store(link, 1)
        side = self.side(handoff_timeout_s=0.05)
        side.add("r", PROMPT, Identity("", {}), promised_blocks=3)
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
        side.add("r", PROMPT, Identity("", {}), promised_blocks=9)
        wait_until(lambda: self.ask(side) == len(PROMPT) - PAGE, "a token is left to compute")
        side.close()

    def test_a_request_that_is_given_up_waits_no_more(self, link: PoolLink) -> None:
        side = self.side()
        side.add("r", PROMPT, Identity("", {}), promised_blocks=3)
        self.await_lookups(side, 1)
        side.finished("r", 0, Engine())
        assert side.matched("r", 0, len(PROMPT)) == (0, False)
        side.close()
