"""What the gateway decides without anybody else: reading, counting, rewriting, taking turns."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import typer
from gatewaysupport import until
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw
from typer.main import get_command

from tiffin.conductor.errors import (
    ConductorError,
    ConductorLate,
    ConductorUnavailable,
    InvalidRequest,
    UnknownRequest,
)
from tiffin.conductor.gateway.cli import commands
from tiffin.conductor.gateway.config import (
    GatewayConfig,
    GatewayLimits,
    GatewayTimeouts,
    ModelConfig,
    read_config,
)
from tiffin.conductor.gateway.engines.instance_cache import EMPTY_S, Known
from tiffin.conductor.gateway.engines.rendered import Tokens
from tiffin.conductor.gateway.metrics import GatewayMetrics
from tiffin.conductor.gateway.openai import engine_bodies
from tiffin.conductor.gateway.openai.openai_request import (
    CHAT,
    COMPLETIONS,
    ClientRequest,
    Wishes,
    read_ask,
)
from tiffin.conductor.gateway.openai.token_counter import (
    EVENT_BYTES_MAX,
    Counter,
    TooLong,
    usage_in,
)
from tiffin.conductor.gateway.openai.tokenizing import LocalTokenizer, Tokenizing
from tiffin.conductor.gateway.requests import event_outbox
from tiffin.conductor.gateway.requests.conductor_reports import Health, Reporter
from tiffin.conductor.gateway.requests.event_outbox import REST_S
from tiffin.conductor.gateway.server import GatewayOptions
from tiffin.conductor.records import RequestEvent
from tiffin.conductor.state.part_keys import part_keys
from tiffin.conductor.wire.answers import Refusal
from tiffin.conductor.wire.models import InstanceReply
from tiffin.kvstore import KVSchema
from tiffin.kvstore.errors import InvalidInput
from tiffin.kvstore.format.media import Media

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MODEL = "llama-3-8b"
SCHEMA = KVSchema.gqa(
    model=MODEL, layers=2, kv_heads=2, head_dim=8, dtype="float16", block_tokens=4
)


def ask(body: dict[str, Any], path: str = COMPLETIONS) -> ClientRequest:
    raw = json.dumps({"model": MODEL, **body}).encode()
    return read_ask(path, raw, Wishes("r-1"))


# -- counting --------------------------------------------------------------------------------------


def event(**fields: Any) -> bytes:
    return f"data: {json.dumps(fields)}\n\n".encode()


def text(token: str, **more: Any) -> dict[str, Any]:
    return {"index": 0, "text": token, **more}


def delta(**fields: Any) -> dict[str, Any]:
    return {"index": 0, "delta": fields}


STREAM = b"".join(
    (
        event(choices=[delta(role="assistant", content="")]),
        event(choices=[delta(reasoning_content="hm")]),
        b": a comment\n\n",
        event(choices=[delta(content="\u00e9\n\ndata: no event")]),
        event(choices=[delta(tool_calls=[{"index": 0}])]),
        event(choices=[delta(content="a"), {"index": 1, "delta": {"content": "b"}}]),
        event(choices=[delta(content="")]),
        b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\r\n\r\n',
        b"data: [DONE]\n\n",
    )
)


CR_ALONE = STREAM.replace(b"\r\n", b"\n").replace(b"\n", b"\r")


@given(cuts=st.lists(st.integers(0, len(STREAM))), stream=st.sampled_from([STREAM, CR_ALONE]))
def test_however_a_stream_is_cut_it_passes_whole_events(cuts: list[int], stream: bytes) -> None:
    counter = Counter()
    passed = b""
    edges = [0, *sorted(cuts), len(STREAM)]
    for start, stop in pairwise(edges):
        piece = counter.feed(stream[start:stop])
        assert piece == b"" or piece.endswith((b"\n\n", b"\n\r\n", b"\r\r"))
        passed += piece
    assert passed + counter.rest() == stream
    assert counter.tokens == 5
    assert counter.ended
    assert not counter.failed


def test_tokens_that_the_engine_counts_itself() -> None:
    counter = Counter()
    counter.feed(event(choices=[text("abc", token_ids=[1, 2, 3])]))
    assert counter.tokens == 3
    counter.feed(event(choices=[], usage={"completion_tokens": 40}))
    assert counter.tokens == 40
    counter.feed(event(choices=[text("d")], usage={"completion_tokens": 7}))
    assert counter.tokens == 41, "it never goes back"


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r"])
def test_usage_that_the_client_did_not_ask_for_is_not_passed_on(end: bytes) -> None:
    usage = {"completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 512}}
    events = [event(choices=[text("a")]), event(choices=[], usage=usage), b"data: [DONE]\n\n"]
    stream = [one.replace(b"\n\n", end) for one in events]
    for hides, passed in ((True, stream[0] + stream[2]), (False, b"".join(stream))):
        counter = Counter(hides_usage=hides)
        assert counter.feed(b"".join(stream)) == passed
        assert counter.found_tokens == 512


def test_an_event_of_an_unknown_form_is_a_token() -> None:
    counter = Counter()
    assert counter.feed(b"data: {not json}\n\n") == b"data: {not json}\n\n"
    counter.feed(b'data: {"choices": 7}\n\n')
    assert counter.tokens == 2


def test_an_error_in_a_stream() -> None:
    counter = Counter()
    counter.feed(event(error={"message": "out of memory"}))
    assert counter.failed
    assert counter.error_status == 0
    assert counter.tokens == 0


@pytest.mark.parametrize(("code", "status"), [(500, 500), ("engine_failed", 0), (None, 0)])
def test_the_status_of_an_error_in_a_stream(code: object, status: int) -> None:
    counter = Counter()
    counter.feed(event(error={"message": "no", "code": code}))
    assert counter.error_status == status
    odd = Counter()
    odd.feed(b'data: {"error": "out of memory"}\n\n')
    assert (odd.failed, odd.error_status) == (True, 0)


def test_an_event_without_an_end() -> None:
    counter = Counter()
    with pytest.raises(TooLong):
        counter.feed(b"data: " + b"x" * EVENT_BYTES_MAX)


def test_an_answer_in_one_piece() -> None:
    assert usage_in(b'{"usage": {"completion_tokens": 12}}').answered_tokens == 12
    for odd in (b"", b"{}", b'{"usage": null}', b'{"usage": {"completion_tokens": -3}}', b"\xff"):
        assert usage_in(odd).answered_tokens == 0
        assert usage_in(odd).found_tokens is None
    said = b'{"usage": {"input_tokens_details": {"cached_tokens": 64}}}'
    assert usage_in(said).found_tokens == 64


# -- asking ----------------------------------------------------------------------------------------


def test_prompts_in_all_their_forms() -> None:
    assert ask({"prompt": "caf\u00e9"}).prompt.nbytes == 5
    assert ask({"prompt": [1, 2, 3]}).prompt.token_ids == [1, 2, 3]
    assert ask({"prompt": ["one"]}).prompt.text == "one"
    assert ask({"prompt": [[4, 5]]}).prompt.token_ids == [4, 5]
    several = ask({"prompt": ["one", "two"]})
    assert several.prompt.several
    assert several.whole
    for odd in (None, 7, {"a": 1}):
        assert not ask({"prompt": odd}).prompt.tokenisable


def test_chats_in_all_their_forms() -> None:
    plain = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": None}]
    assert ask({"messages": plain}, CHAT).prompt.tokenisable
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    assert ask({"messages": parts}, CHAT).prompt.tokenisable
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]
    assert ask({"messages": image}, CHAT).prompt.foreign
    assert ask({"messages": "hello"}, CHAT).prompt.foreign


@pytest.mark.parametrize(
    "body", [{"n": 2}, {"best_of": 3}, {"echo": True}, {"prompt_logprobs": 0},
             {"use_beam_search": True}],
)  # fmt: skip
def test_what_can_not_be_split(body: dict[str, Any]) -> None:
    assert ask({"prompt": "a", **body}).whole
    assert not ask({"prompt": "a"}).whole


def test_lengths_of_answers() -> None:
    assert ask({"prompt": "a"}).output_tokens_max is None
    assert ask({"prompt": "a", "max_tokens": 5}).output_tokens_max == 5
    assert ask({"prompt": "a", "max_tokens": 5, "max_completion_tokens": 3}).output_tokens_max == 3
    assert ask({"prompt": "a", "max_tokens": 0}).output_tokens_max == 1, (
        "0 is the engine's to refuse"
    )


def test_a_deep_body_is_refused() -> None:
    raw = b'{"model": "m", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    with pytest.raises(Refusal) as refused:
        read_ask(COMPLETIONS, raw, Wishes("r"))
    assert refused.value.status == 400


# -- bodies ----------------------------------------------------------------------------------------


def test_what_stays_is_spliced_as_it_came() -> None:
    """Numbers that Python would write otherwise, escapes, and big integers."""
    raw = (
        b'{"model":"m","prompt":"a","temperature":1.0e-0,"seed":12345678901234567890,"x":"\\u00e9"}'
    )
    one = read_ask(COMPLETIONS, raw, Wishes("r"))
    assert engine_bodies.answer_body(one, None) is one.raw
    sent = engine_bodies.answer_body(one, 9, {"remote_port": msgspec.Raw(b"1")})
    for piece in (b"1.0e-0", b"12345678901234567890", b'"\\u00e9"', b'"max_tokens":9'):
        assert piece in sent
    assert json.loads(sent)["kv_transfer_params"] == {"remote_port": 1}


def test_a_limit_goes_by_both_names() -> None:
    one = ask({"messages": [], "max_completion_tokens": 50}, CHAT)
    sent = json.loads(engine_bodies.answer_body(one, 9))
    assert (sent["max_tokens"], sent["max_completion_tokens"]) == (9, 9)
    told = engine_bodies.being_fetched((3, 0.25))
    sent = json.loads(engine_bodies.answer_body(one, None, told))
    assert sent["kv_transfer_params"] == {"tiffin": {"fetched": 3, "within_s": 0.25}}
    first = json.loads(engine_bodies.prefill_body(one, "pool", fetched=(3, 0.25)))
    assert first["kv_transfer_params"] == {"tiffin": {"fetched": 3, "within_s": 0.25, "tell": True}}
    first = json.loads(engine_bodies.prefill_body(one, "vllm", fetched=(3, 0.25)))
    assert "tiffin" not in first["kv_transfer_params"]
    first = json.loads(engine_bodies.prefill_body(one, "pool"))
    assert (first["max_tokens"], first["max_completion_tokens"]) == (1, 1)
    assert first["kv_transfer_params"] == {"tiffin": {}}


def test_of_what_a_prefill_tells_the_pool_hands_no_addresses_on() -> None:
    told = {"tiffin": Raw(b'{"blocks":8}'), "remote_host": Raw(b'"10.0.0.1"')}
    assert engine_bodies.handed_on(told, "vllm") == told
    assert engine_bodies.handed_on(told, "pool") == {"tiffin": told["tiffin"]}
    assert engine_bodies.handed_on({"remote_host": Raw(b"1")}, "pool") is None
    assert engine_bodies.handed_on(None, "pool") is None


def test_what_the_engine_tokenises() -> None:
    one = ask({"prompt": ["a"], "temperature": 1, "add_special_tokens": False})
    sent = json.loads(engine_bodies.tokenize_body(one))
    assert sent == {"model": MODEL, "prompt": "a", "add_special_tokens": False}
    chat = ask({"messages": [{"role": "user", "content": "a"}], "tools": []}, CHAT)
    assert set(json.loads(engine_bodies.tokenize_body(chat))) == {"model", "messages", "tools"}


# -- instances -------------------------------------------------------------------------------------


def instance(name: str, role: Any = "mixed", status: Any = "ready", **more: Any) -> InstanceReply:
    fields = {
        "model": MODEL, "profile": "p", "url": f"http://{name}", "node": "", "block_tokens": 16,
        "block_bytes": 0, "kv_capacity_tokens": 1, "batch_max": 1, "labels": {}, "heard_s": 0.0,
        "load": {},
    }  # fmt: skip
    return InstanceReply(id=name, role=role, status=status, **{**fields, **more})


class TestKnown:
    def names(self, known: Known, count: int, avoid: Sequence[str] = ()) -> list[str]:
        found = []
        for _ in range(count):
            route = known.turn(MODEL, avoid)
            assert route is not None
            assert not route.uses(avoid)
            found.append(f"{route.prefill.name} {route.decode.name}" if route.split
                         else route.decode.name)  # fmt: skip
        return found

    def test_everybody_has_a_turn(self) -> None:
        known = Known()
        known.update([instance(name) for name in "abc"], 0.0)
        assert sorted(self.names(known, 6)) == ["a", "a", "b", "b", "c", "c"]
        assert set(self.names(known, 6, avoid=["b"])) == {"a", "c"}

    def test_prefill_and_decode_have_turns_of_their_own(self) -> None:
        known = Known()
        roles = {"p": "prefill", "q": "prefill", "d": "decode", "e": "decode"}
        known.update([instance(name, role) for name, role in roles.items()], 0.0)
        assert len(set(self.names(known, 8))) == 2
        assert {part for pair in self.names(known, 8) for part in pair.split()} == set(roles)
        assert known.turn(MODEL, ["d", "e"]) is None

    def test_lost_ones_if_there_are_no_others(self) -> None:
        known = Known()
        known.update([instance("a", status="lost"), instance("b")], 0.0)
        assert self.names(known, 2) == ["b", "b"]
        known.update([instance("a", status="lost"), instance("b", status="draining")], 0.0)
        assert self.names(known, 2) == ["a", "a"]

    def test_who_has_not_said_where_it_is(self) -> None:
        known = Known()
        known.update([instance("a", url="")], 0.0)
        assert known.turn(MODEL, ()) is None
        assert known.any("another model") is None
        assert known.url("a") == known.url("nobody") == ""

    def test_a_conductor_that_has_forgotten_all_is_believed_later(self) -> None:
        known = Known()
        known.update([instance("a")], 0.0)
        known.update([], 1.0)
        assert known.models() == [MODEL]
        known.update([], EMPTY_S + 1.0)
        assert known.models() == []

    def test_that_moment_begins_with_its_first_empty_list(self) -> None:
        """However long it was silent before."""
        known = Known()
        known.update([instance("a")], 0.0)
        known.update([], 1000.0)
        assert known.models() == [MODEL]
        known.update([], 1000.0 + EMPTY_S - 1)
        assert known.models() == [MODEL]
        known.update([instance("a")], 1000.0 + EMPTY_S)
        known.update([], 2000.0)
        assert known.models() == [MODEL]
        known.update([], 2000.0 + EMPTY_S)
        assert known.models() == []

    def test_who_is_forgotten_is_remembered_for_a_moment(self) -> None:
        known = Known()
        known.update([instance("p", "prefill"), instance("d", "decode")], 0.0)
        assert known.turn_forgotten(MODEL, ()) is None, "all are listed"
        known.update([instance("p", "prefill")], 1.0)
        route = known.turn_forgotten(MODEL, ())
        assert route is not None
        assert route.names == ("p", "d")
        assert known.turn(MODEL, ()) is known.turn_forgotten(MODEL, ["d"]) is None
        known.update([instance("p", "prefill")], EMPTY_S + 1.0)
        assert known.turn_forgotten(MODEL, ()) is None, "for too long"

    def test_who_drained_before_it_left_is_not_remembered(self) -> None:
        known = Known()
        known.update([instance("p", "prefill"), instance("d", "decode", status="draining")], 0.0)
        known.update([instance("p", "prefill")], 1.0)
        assert known.turn_forgotten(MODEL, ()) is None


# -- reports ---------------------------------------------------------------------------------------


def test_health_asks_once_for_all() -> None:
    health = Health()
    assert health.up
    assert health.try_again(0.0)
    health.failed(0.0, ConductorUnavailable("gone"))
    assert not health.up
    assert health.rests(REST_S / 2)
    assert [health.try_again(at) for at in (0.5, REST_S, REST_S, 1.5 * REST_S)] == [
        False, True, False, False,
    ]  # fmt: skip
    health.answered(0.0)
    assert health.try_again(1.5 * REST_S)


class Listener:
    """A conductor that listens, for as long as `go` lets it."""

    def __init__(self) -> None:
        self.heard: list[RequestEvent] = []
        self.ages_s: list[float] = []
        self.go = asyncio.Event()
        self.go.set()
        self.gone = False
        self.deaf = 0  # for so many calls
        self.error: ConductorError | None = None
        self.calls = 0

    async def observe_many(self, events: list[RequestEvent]) -> list[ConductorError | None]:
        self.calls += 1
        if self.error is not None:
            return [self.error] * len(events)
        if self.gone or self.calls <= self.deaf:
            return [ConductorUnavailable("gone")] * len(events)
        await self.go.wait()
        self.heard += [msgspec.structs.replace(event, age_s=0.0) for event in events]
        self.ages_s += [event.age_s for event in events]
        return [None] * len(events)


def reporter(
    listener: Any,
    tokens: int = 4,
    interval_s: float = 60.0,
    batch_s: float = 0.0,
    now: Callable[[], float] = lambda: 0.0,
    wait_s: float = 60.0,
) -> Reporter:
    return Reporter(
        listener, Health(), now, tokens=tokens, interval_s=interval_s, batch_s=batch_s,
        wait_s=wait_s,
    )  # fmt: skip


class TestReports:
    def test_in_order_and_added_up(self) -> None:
        async def scenario() -> None:
            listener = Listener()
            listener.go.clear()
            reports = reporter(listener)
            report = reports.begin("r", 60.0)
            report.first_token()
            for _ in range(10):
                report.tokens(1)
                await asyncio.sleep(0)
            report.end("finished")
            report.end("cancelled")
            listener.go.set()
            await reports.close(5.0)
            told = [(e.kind, e.total_tokens) for e in listener.heard]
            assert (told[0], told[-1]) == (("first_token", None), ("finished", 11))
            assert len(told) < 5, "what happens during a call goes with the next one"
            assert len(reports) == 0

        asyncio.run(scenario())

    def test_tokens_that_came_with_the_first_wait_for_more(self) -> None:
        """Told at once, they would look as if each had taken a microsecond."""

        async def scenario() -> None:
            listener = Listener()
            reports = reporter(listener)
            report = reports.begin("r", 60.0)
            report.first_token()
            report.tokens(2)
            await until(lambda: bool(listener.heard))
            assert [e.kind for e in listener.heard] == ["first_token"]
            report.tokens(2)
            report.end("finished")
            await reports.close(5.0)
            assert [(e.kind, e.total_tokens) for e in listener.heard[1:]] == [
                ("tokens", 5), ("finished", None),
            ]  # fmt: skip

        asyncio.run(scenario())

    def test_one_of_which_nothing_is_heard_is_said_to_live(self) -> None:
        async def scenario() -> None:
            listener = Listener()
            reports = reporter(listener)
            report = reports.begin("r", 0.001)
            report.running()
            await until(lambda: len(listener.heard) >= 2)
            assert {(e.kind, e.tokens) for e in listener.heard} == {("alive", 0)}
            report.first_token()
            await until(lambda: "first_token" in [e.kind for e in listener.heard])
            said = len(listener.heard)
            await until(lambda: len(listener.heard) > said)
            assert listener.heard[-1].kind == "alive", "so it is between tokens"
            report.end("finished")
            await reports.close(5.0)

        asyncio.run(scenario())

    def test_an_answer_in_one_piece_is_taken_to_have_begun_when_that_was_predicted(self) -> None:
        async def scenario() -> None:
            now = 0.0
            listener = Listener()
            reports = reporter(listener, now=lambda: now)
            report = reports.begin("r", 0.001)
            report.running(answers_in_s=5.0)
            await until(lambda: bool(listener.heard))
            assert {e.kind for e in listener.heard} == {"alive"}
            now = 5.0
            await until(lambda: listener.heard[-1] == RequestEvent("r", "tokens", total_tokens=0))
            report.end("finished")
            await reports.close(5.0)

        asyncio.run(scenario())

    def test_events_of_all_requests_go_in_one_call(self) -> None:
        async def scenario() -> None:
            listener = Listener()
            reports = reporter(listener, batch_s=0.02)
            begun = [reports.begin(f"r{number}", 60.0) for number in range(50)]
            for report in begun:
                report.first_token()
            for report in begun:
                report.end("finished")
            assert len(reports) == 100
            await until(lambda: not len(reports))
            assert (listener.calls, len(listener.heard)) == (1, 100)
            of_one = [event.kind for event in listener.heard if event.request_id == "r7"]
            assert of_one == ["first_token", "finished"]
            assert min(listener.ages_s) > 0.01, "how long they waited is told"

        asyncio.run(scenario())

    def test_a_slow_conductor_gets_fewer_events_and_not_more(self) -> None:
        async def scenario() -> None:
            listener = Listener()
            listener.go.clear()
            reports = reporter(listener, tokens=2)
            report = reports.begin("r", 60.0)
            report.first_token()
            await until(lambda: listener.calls == 1)
            for _ in range(1000):
                report.tokens(1)
            assert len(reports) == 2, "the one under way, and the last total"
            listener.go.set()
            report.end("finished")
            await reports.close(5.0)
            assert listener.heard[-1] == RequestEvent("r", "finished", total_tokens=1001) or (
                listener.heard[-2] == RequestEvent("r", "tokens", total_tokens=1001)
            )

        asyncio.run(scenario())

    def test_each_conductor_gets_its_own(self) -> None:
        async def scenario() -> None:
            listener = Listener()
            reports = reporter(listener)
            for number in range(4):
                reports.cancelled(f"r{number}", conductor=f"http://{number % 2}")
            await reports.close(5.0)
            assert listener.calls == 2
            by = [(event.conductor, event.request_id) for event in listener.heard]
            assert sorted(by) == [
                ("http://0", "r0"), ("http://0", "r2"), ("http://1", "r1"), ("http://1", "r3"),
            ]  # fmt: skip

        asyncio.run(scenario())

    def test_what_waits_for_an_answer_does_not_wait_for_the_batch(self) -> None:
        async def scenario() -> None:
            listener = Listener()
            reports = reporter(listener, batch_s=60.0)
            reports.begin("q", 60.0).first_token()
            assert await reports.say(RequestEvent("r", "prefill_done")) is None
            assert [event.kind for event in listener.heard] == ["first_token", "prefill_done"]
            listener.gone = True
            with pytest.raises(ConductorUnavailable):
                await reports.say(RequestEvent("r", "prefill_done"))
            await reports.close(0.0)

        asyncio.run(scenario())

    def test_an_answer_does_not_wait_for_as_long_as_a_batch(self) -> None:
        async def scenario() -> None:
            listener = Listener()
            listener.go.clear()
            reports = reporter(listener, wait_s=0.01)
            with pytest.raises(ConductorLate):
                await reports.say(RequestEvent("r", "prefill_done"))
            assert len(reports) == 1, "it is still under way"
            listener.go.set()
            await reports.close(5.0)
            assert [event.kind for event in listener.heard] == ["prefill_done"]

        asyncio.run(scenario())

    def test_what_is_dropped_is_not_told(self) -> None:
        async def scenario() -> None:
            listener = Listener()
            reports = reporter(listener)
            running, fresh = reports.begin("r", 60.0), reports.begin("q", 60.0)
            running.running()
            for report in (running, fresh):
                report.drop()
                report.end("cancelled")
                report.first_token()
            await reports.close(5.0)
            assert listener.heard == []

        asyncio.run(scenario())

    @pytest.mark.parametrize("known", [True, False])
    def test_the_end_is_told_until_it_was_heard(
        self, known: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nothing after it would say that the request is over."""
        monkeypatch.setattr(event_outbox, "REST_S", 0.001)

        async def scenario() -> None:
            listener = Listener()
            listener.deaf = 3
            reports = reporter(listener)
            if known:
                report = reports.begin("r", 60.0)
                report.running()
                report.end("cancelled")
            else:
                reports.cancelled("r")
            await until(lambda: not len(reports))
            assert listener.heard == [RequestEvent("r", "cancelled", 0)]

        asyncio.run(scenario())

    def test_a_request_that_the_conductor_does_not_know_is_told_once(self) -> None:
        async def scenario() -> None:
            listener = Listener()
            listener.error = UnknownRequest("r")
            reports = reporter(listener)
            reports.cancelled("r")
            await until(lambda: not len(reports))
            assert listener.calls == 1

        asyncio.run(scenario())

    def test_a_conductor_that_is_gone_costs_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(event_outbox, "REST_S", 0.001)

        async def scenario() -> None:
            listener = Listener()
            listener.gone = True
            reports = reporter(listener)
            report = reports.begin("r", 60.0)
            report.first_token()
            report.tokens(100)
            report.end("finished")
            await reports.close(5.0)
            assert len(reports) == 0

        asyncio.run(scenario())

    def test_closing_does_not_wait_for_a_silent_one(self) -> None:
        async def scenario() -> None:
            listener = Listener()
            listener.go.clear()
            reports = reporter(listener)
            reports.cancelled("r")
            await reports.close(0.01)
            assert len(reports) == 0

        asyncio.run(scenario())


# -- tokenizers ------------------------------------------------------------------------------------

TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'fail' %}{{ raise_exception('no') }}{% endif %}"
    "<{{ m.role }}> {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{% if loud %} !{% endif %}"
)
WORDS = ["[UNK]", "who", "carries", "lunch", "<user>", "<assistant>", "!"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's tokenizer of seven words."""
    tokenizers = pytest.importorskip("tokenizers")
    path = tmp_path_factory.mktemp("tokenizer")
    model = tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.enable_truncation(2)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def size(
    config: GatewayConfig,
    one: ClientRequest,
    remote: list[int] | Tokens | None = None,
    *,
    keyed: bool = False,
) -> Any:
    async def scenario() -> Any:
        asked: list[ClientRequest] = []

        async def tokens(which: ClientRequest, media: bool) -> Tokens | None:
            asked.append(which)
            if isinstance(remote, Tokens):
                return remote if media else Tokens(remote.ids)
            return None if remote is None else Tokens(remote)

        tokenizing = Tokenizing(config, tokens)
        try:
            return await tokenizing.size(one, one.model, keyed=keyed), len(asked)
        finally:
            tokenizing.close()

    return asyncio.run(scenario())


class TestTokenizing:
    def test_text_here(self, folder: Path) -> None:
        config = GatewayConfig(default=ModelConfig(tokenizer=str(folder)))
        sized, asked = size(config, ask({"prompt": "who carries lunch"}))
        assert (sized.prompt_tokens, sized.how, asked) == (3, "local", 0), "and nothing is cut off"

    def test_keys_of_a_prompt_shorter_than_a_block(self, folder: Path, tmp_path: Path) -> None:
        schema = KVSchema.gqa(model=MODEL, layers=2, kv_heads=2, head_dim=8, dtype="float16")
        (tmp_path / "schema").write_bytes(schema.canonical_bytes())
        (tmp_path / "secret").write_text("0123456789abcdef")
        (tmp_path / "secret").chmod(0o600)
        model = ModelConfig(
            tokenizer=str(folder),
            schema_file=str(tmp_path / "schema"),
            secret_file=str(tmp_path / "secret"),
            namespace="acme",
        )
        sized, _ = size(GatewayConfig(default=model), ask({"prompt": "who carries lunch " * 12}))
        prefix = schema.prefix([1, 2, 3] * 12, "acme", b"0123456789abcdef")
        assert sized.keys == ()
        assert sized.part_keys == part_keys(prefix, b"0123456789abcdef")
        assert len(sized.part_keys) == 2

    def test_keys_by_a_schema(self, folder: Path, tmp_path: Path) -> None:
        (tmp_path / "schema").write_bytes(SCHEMA.canonical_bytes())
        (tmp_path / "secret").write_text("0123456789abcdef")
        (tmp_path / "secret").chmod(0o600)
        schema_file, secret_file = str(tmp_path / "schema"), str(tmp_path / "secret")
        model = ModelConfig(tokenizer=str(folder), schema_file=schema_file, namespace="acme")
        prompt = ask({"prompt": "who carries lunch who carries"})
        sized, _ = size(GatewayConfig(models={MODEL: model}), prompt)
        assert sized.keys == SCHEMA.prefix([1, 2, 3, 1, 2], "acme").keys
        secretly = msgspec.structs.replace(model, secret_file=secret_file)
        sized, _ = size(GatewayConfig(models={MODEL: secretly}), prompt)
        assert sized.keys == SCHEMA.prefix([1, 2, 3, 1, 2], "acme", b"0123456789abcdef").keys
        for keys in ("none", "conductor"):
            other = msgspec.structs.replace(model, keys=keys)
            sized, _ = size(GatewayConfig(models={MODEL: other}), prompt)
            assert sized.keys == ()
            assert (sized.token_ids is not None) == (keys == "conductor")

    def test_without_a_schema_here_the_conductor_makes_them_if_it_can(self, folder: Path) -> None:
        config = GatewayConfig(default=ModelConfig(tokenizer=str(folder)))
        prompt = ask({"prompt": "who carries lunch"})
        sized, _ = size(config, prompt, keyed=True)
        assert (sized.token_ids, sized.keys) == ([1, 2, 3], ())
        sized, _ = size(config, prompt, keyed=False)
        assert (sized.token_ids, sized.prompt_tokens) == (None, 3)
        here = GatewayConfig(default=ModelConfig(tokenizer=str(folder), keys="gateway"))
        sized, _ = size(here, prompt, keyed=True)
        assert sized.token_ids is None

    def test_a_salt_makes_other_keys_than_ours(self, folder: Path, tmp_path: Path) -> None:
        (tmp_path / "schema").write_bytes(SCHEMA.canonical_bytes())
        model = ModelConfig(tokenizer=str(folder), schema_file=str(tmp_path / "schema"))
        salted = ask({"prompt": [1, 2, 3, 4], "cache_salt": "s"})
        sized, _ = size(GatewayConfig(default=model), salted)
        assert (sized.prompt_tokens, sized.keys, sized.token_ids) == (4, (), None)
        model = ModelConfig(tokenizer=str(folder))
        sized, _ = size(GatewayConfig(default=model), salted, keyed=True)
        assert (sized.token_ids, sized.cache_salt) == ([1, 2, 3, 4], "s")
        long = ask({"prompt": [1, 2, 3, 4], "cache_salt": "s" * 2000})
        sized, _ = size(GatewayConfig(default=model), long, keyed=True)
        assert (sized.token_ids, sized.cache_salt) == (None, "")

    def test_chats_by_the_models_template(self, folder: Path) -> None:
        pytest.importorskip("transformers")
        tokenizer = LocalTokenizer(folder)
        assert tokenizer.chats
        config = GatewayConfig(default=ModelConfig(tokenizer=str(folder), keys="conductor"))
        parts = [{"type": "text", "text": "who"}, {"type": "text", "text": "carries"}]
        for content in ("who carries", parts):
            messages = [{"role": "user", "content": content}]
            sized, _ = size(config, ask({"messages": messages}, CHAT))
            assert (sized.token_ids, sized.how) == ([4, 1, 2, 5], "local")
        extras = {"loud": True, "tokenize": True, "return_tensors": "pt"}
        body = {"messages": messages, "chat_template_kwargs": extras}
        sized, _ = size(config, ask(body, CHAT))
        assert sized.token_ids == [4, 1, 2, 5, 6]

    def test_a_template_of_the_client_is_not_rendered(self, folder: Path) -> None:
        config = GatewayConfig(default=ModelConfig(tokenizer=str(folder)))
        messages = [{"role": "user", "content": "who"}]
        body = {"messages": messages, "chat_template": "{{ 10 ** 10 ** 10 }}"}
        sized, asked = size(config, ask(body, CHAT), remote=[1, 2])
        assert (sized.prompt_tokens, sized.how, asked) == (2, "engine", 1)

    @pytest.mark.parametrize(
        "odd",
        [
            {"continue_final_message": True, "add_generation_prompt": True},
            {"chat_template_kwargs": ["loud"]},
            {"messages": [{"role": "user", "content": "fail"}]},
        ],
    )
    def test_what_can_not_be_rendered_is_the_engines_to_judge(
        self, folder: Path, odd: dict[str, Any]
    ) -> None:
        pytest.importorskip("transformers")
        config = GatewayConfig(default=ModelConfig(tokenizer=str(folder)))
        chat = ask({"messages": [{"role": "user", "content": "who"}], **odd}, CHAT)
        sized, _ = size(config, chat, remote=[7])
        assert (sized.prompt_tokens, sized.how) == (1, "engine")

    def test_a_guess_as_the_last_resort(self) -> None:
        sized, asked = size(GatewayConfig(), ask({"prompt": "x" * 400}))
        assert (sized.prompt_tokens, sized.how, asked) == (100, "estimated", 1)
        never = GatewayConfig(default=ModelConfig(tokenizer="estimate", bytes_per_token=2.0))
        sized, asked = size(never, ask({"prompt": "x" * 400}))
        assert (sized.prompt_tokens, asked) == (200, 0)
        sized, _ = size(GatewayConfig(), ask({"prompt": ""}))
        assert sized.prompt_tokens == 1

    def test_images_have_a_length_and_no_keys(self) -> None:
        image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
        sized, asked = size(GatewayConfig(), ask({"messages": image}, CHAT), remote=[1] * 600)
        assert (sized.prompt_tokens, sized.how, sized.keys, asked) == (600, "engine", (), 1)

    def test_images_that_the_engine_names_make_keys_at_the_conductor(self) -> None:
        image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
        media = (Media("cat", 1, 598),)
        named, unnamed = Tokens([1] * 600, media), Tokens([1] * 600)
        chat = ask({"messages": image, "cache_salt": "s"}, CHAT)
        sized, asked = size(GatewayConfig(), chat, named, keyed=True)
        assert (sized.token_ids, sized.media, sized.how, asked) == ([1] * 600, media, "engine", 1)
        assert (sized.prompt_tokens, sized.cache_salt) == (600, "s")
        embeds = [{"role": "user", "content": [{"type": "prompt_embeds", "data": "x"}]}]
        here = GatewayConfig(default=ModelConfig(keys="none"))
        for config, one, told, keyed in (
            (GatewayConfig(), image, unnamed, True),
            (GatewayConfig(), image, named, False),
            (GatewayConfig(), embeds, named, True),
            (here, image, named, True),
        ):
            sized, _ = size(config, ask({"messages": one}, CHAT), told, keyed=keyed)
            assert (sized.prompt_tokens, sized.token_ids, sized.media) == (600, None, ())

    def test_other_threads_run_while_a_long_text_is_tokenised(self, folder: Path) -> None:
        """The event loop of the gateway is one of them."""
        tokenizer = LocalTokenizer(folder)
        ended, turns = threading.Event(), []

        def take_turns() -> None:
            while not ended.wait(0.001):
                turns.append(len(turns))

        other = threading.Thread(target=take_turns)
        other.start()
        before = len(turns)
        tokenizer.text("who carries lunch " * 100_000)
        during = len(turns) - before
        ended.set()
        other.join()
        assert during > 3, "no other thread ran meanwhile"

    def test_folders_that_can_not_be_used(self, tmp_path: Path) -> None:
        pytest.importorskip("tokenizers")
        with pytest.raises(InvalidInput, match=r"there is no .*tokenizer\.json"):
            LocalTokenizer(tmp_path)
        (tmp_path / "tokenizer.json").write_text("{}")
        with pytest.raises(InvalidInput, match="can't load"):
            LocalTokenizer(tmp_path)

    def test_schemas_that_can_not_be_used(self, tmp_path: Path) -> None:
        for content in (b"", b'["tiffin-schema-1"]', b"\xff", b"x" * (2 << 20)):
            (tmp_path / "schema").write_bytes(content)
            config = GatewayConfig(default=ModelConfig(schema_file=str(tmp_path / "schema")))
            with pytest.raises(InvalidInput, match="schema"):
                size(config, ask({"prompt": "a"}))

    def test_ids_that_are_none(self, tmp_path: Path) -> None:
        """An engine may say what it likes."""
        (tmp_path / "schema").write_bytes(SCHEMA.canonical_bytes())
        config = GatewayConfig(default=ModelConfig(schema_file=str(tmp_path / "schema")))
        with pytest.raises(InvalidRequest, match="token_ids"):
            size(config, ask({"prompt": "a"}), remote=[-1] * 8)


# -- configuration ---------------------------------------------------------------------------------


class TestConfiguration:
    def test_a_file(self, tmp_path: Path) -> None:
        path = tmp_path / "gateway.toml"
        path.write_text('[models."a/b"]\ntokenizer = "estimate"\n[timeouts]\nidle_s = 9\n')
        config = read_config(path)
        assert config.model("a/b").tokenizer == "estimate"
        assert config.model("another").tokenizer == "engine"
        assert config.timeouts.idle_s == 9

    @pytest.mark.parametrize(
        ("content", "named"),
        [
            ("fallbak = true", "fallbak"),
            ("[timeouts]\nidle_s = 0", "timeouts.idle_s"),
            ('honour = ["everything"]', "honour"),
            ('[default]\nsecret_file = "x"', "schema_file"),
            ("reschedules = 100", "reschedules"),
            ("= 1", "can't read"),
        ],
    )
    def test_what_is_wrong_is_named(self, tmp_path: Path, content: str, named: str) -> None:
        path = tmp_path / "gateway.toml"
        path.write_text(content)
        with pytest.raises(InvalidInput, match=named):
            read_config(path)

    def test_beyond_this_machine_only_with_keys(self) -> None:
        with pytest.raises(InvalidInput, match="token-file"):
            GatewayOptions(listen=("0.0.0.0", 0))
        with pytest.raises(InvalidInput, match="certificate"):
            GatewayOptions(tls_cert=Path("x"))


# -- documentation ---------------------------------------------------------------------------------


def test_everything_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs/conductor/gateway.md").read_text()
    groups = (GatewayConfig, GatewayTimeouts, GatewayLimits, ModelConfig)
    fields = {name for group in groups for name in group.__struct_fields__}
    for name in fields - {"models", "default", "timeouts", "limits"}:
        assert f"`{name}`" in page, name
    app = typer.Typer()
    commands(app)
    for parameter in get_command(app).params:
        for option in parameter.opts:
            assert f"`{option}`" in page or option.endswith("-completion"), option
    for family in GatewayMetrics().registry.collect():
        suffix = "_total" if family.type == "counter" else ""
        assert f"`{family.name}{suffix}`" in page, family.name
    source = Path(read_ask.__code__.co_filename).parent
    for module in source.glob("*.py"):
        text = module.read_text()
        for header in re.findall(r'"(x-[a-z-]+)"', text):
            assert f"`{header}`" in page or header == "x-accel-buffering", header
        for code in re.findall(r'(?:Refusal|error)\(\s*\d{3},\s*"(\w+)"', text):
            assert f"`{code}`" in page, code
