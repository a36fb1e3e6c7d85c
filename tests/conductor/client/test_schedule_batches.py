"""Calls of `schedule` that are under way together go as one: to a conductor that takes its time."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from tiffin.conductor.client import schedule_batches
from tiffin.conductor.client.schedule_batches import ScheduleBatches
from tiffin.conductor.errors import ConductorLate, ConductorUnavailable, UnknownModel

if TYPE_CHECKING:
    from tiffin.conductor.client.calls import RestCall


class Conductor:
    """Notes the prompts of each call, and answers it when it is told to."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []
        self.answers: list[asyncio.Future[None]] = []
        self.error: BaseException | None = None

    async def do(self, call: RestCall[Any]) -> Any:
        assert call.body is not None
        body = json.loads(call.body)
        many = call.path == "/v1/schedules"
        self.asked.append(body["requests"] if many else body)
        answer = asyncio.get_running_loop().create_future()
        self.answers.append(answer)
        await answer
        if self.error is not None:
            raise self.error
        if not many:
            return f"at {body}"
        return [UnknownModel(one) if one == "unknown" else f"at {one}" for one in body["requests"]]

    def answer(self) -> None:
        self.answers.pop(0).set_result(None)


async def turn() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def ask(batches: ScheduleBatches, *names: str) -> list[asyncio.Task[Any]]:
    return [asyncio.create_task(batches.place(json.dumps(one).encode())) for one in names]


def test_one_alone_goes_at_once_and_those_that_come_meanwhile_together() -> None:
    async def scenario() -> None:
        conductor = Conductor()
        it = ScheduleBatches(conductor.do)
        tasks = []
        for name in "abcde":
            tasks += ask(it, name)
            await turn()
        assert conductor.asked == ["a"]
        conductor.answer()
        await turn()
        assert conductor.asked == ["a", ["b", "c", "d", "e"]]
        conductor.answer()
        assert await asyncio.gather(*tasks) == [f"at {name}" for name in "abcde"]
        assert not it._waiting
        assert not it._under_way

    asyncio.run(scenario())


def test_a_full_call_does_not_wait_for_the_one_before() -> None:
    """Else the client would have nothing to do until the conductor is done with all."""

    async def scenario() -> None:
        conductor = Conductor()
        it = ScheduleBatches(conductor.do)
        tasks = ask(it, "first")
        await turn()
        tasks += ask(it, *"abcdefg")
        await turn()
        assert conductor.asked == ["first"], "these are not enough"
        for names in ("h", "ijklmnop", "qrstuvwx", "y"):
            tasks += ask(it, *names)
            await turn()
        assert conductor.asked == ["first", [*"abcdefgh"], [*"ijklmnop"]]
        conductor.answer()
        await turn()
        assert conductor.asked[3:] == [[*"qrstuvwx"]]
        for _ in range(3):
            conductor.answer()
            await turn()
        assert conductor.asked[4:] == ["y"]
        conductor.answer()
        found = await asyncio.gather(*tasks)
        assert found == [f"at {name}" for name in ("first", *"abcdefghijklmnopqrstuvwxy")]

    asyncio.run(scenario())


def test_those_of_one_turn_go_together() -> None:
    async def scenario() -> None:
        conductor = Conductor()
        tasks = ask(ScheduleBatches(conductor.do), *"abc")
        await turn()
        assert conductor.asked == [["a", "b", "c"]]
        conductor.answer()
        await asyncio.gather(*tasks)

    asyncio.run(scenario())


def test_an_error_of_one_is_its_own() -> None:
    async def scenario() -> None:
        conductor = Conductor()
        tasks = ask(ScheduleBatches(conductor.do), "a", "unknown", "b")
        await turn()
        conductor.answer()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert (found[0], found[2]) == ("at a", "at b")
        assert isinstance(found[1], UnknownModel)

    asyncio.run(scenario())


@pytest.mark.parametrize("failure", [ConductorLate("in 5 s"), RuntimeError("a defect")])
def test_a_call_without_an_answer_is_one_for_none_of_them(failure: Exception) -> None:
    async def scenario() -> None:
        conductor = Conductor()
        it = ScheduleBatches(conductor.do)
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        tasks = ask(it, "a", "b")
        await turn()
        conductor.error = failure
        conductor.answer()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        expected = ConductorLate if isinstance(failure, ConductorLate) else ConductorUnavailable
        assert [type(one) for one in found] == [expected, expected]
        assert found[0] is not found[1]
        conductor.error = None
        (again,) = ask(it, "c")
        await turn()
        conductor.answer()
        assert await again == "at c"

    asyncio.run(scenario())


def test_who_has_left_is_not_sent_and_harms_no_other() -> None:
    async def scenario() -> None:
        conductor = Conductor()
        it = ScheduleBatches(conductor.do)
        first, second = ask(it, "a", "b")
        await turn()
        first.cancel()
        await turn()
        assert not first.done(), "it is on its way: nothing overtakes it"
        more = ask(it, "c") + ask(it, "d") + ask(it, "e")
        await turn()
        more[1].cancel()
        conductor.answer()
        await turn()
        waiting = ask(it, "f", "g")
        await turn()
        waiting[0].cancel()
        conductor.answer()
        await turn()
        conductor.answer()
        assert await second == "at b"
        assert first.cancelled()
        assert await asyncio.gather(more[0], more[2], waiting[1]) == ["at c", "at e", "at g"]
        assert conductor.asked == [["a", "b"], ["c", "e"], "g"]

    asyncio.run(scenario())


def test_a_call_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        conductor = Conductor()
        it = ScheduleBatches(conductor.do)
        long = "x" * 100
        tasks = ask(it, "a", "b", "c", "d", long, long, "e")
        await turn()
        assert conductor.asked == [["a", "b", "c"], ["d", long]], (
            "as many calls as may be under way"
        )
        for _ in range(3):
            conductor.answer()
            await turn()
        await asyncio.gather(*tasks)
        assert conductor.asked[2:] == [[long, "e"]]

    monkeypatch.setattr(schedule_batches, "FULL", 3)
    monkeypatch.setattr(schedule_batches, "CALLS_MAX", 2)
    monkeypatch.setattr(schedule_batches, "BATCH_BYTES_MAX", 110)
    asyncio.run(scenario())
