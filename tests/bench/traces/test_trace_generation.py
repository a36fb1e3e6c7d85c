"""Generated traces: the same for the same seed, valid, and like what they should be like."""

from __future__ import annotations

import pytest
from tracesupport import shipped_slice

from tiffin.bench.traces.bursts import Bursts, with_bursts
from tiffin.bench.traces.comparison import compare
from tiffin.bench.traces.generator import KINDS, generate
from tiffin.bench.traces.look_alike import look_alike
from tiffin.bench.traces.readers import parse_mooncake
from tiffin.bench.traces.statistics import describe
from tiffin.bench.traces.trace import Trace, TraceRequest
from tiffin.bench.traces.writer import lines
from tiffin.kvstore.errors import InvalidInput


def check(trace: Trace) -> None:
    """Its lines contradict nothing, and it is read as it is."""
    assert tuple(parse_mooncake(lines(trace), trace.name)) == trace.requests


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_valid_and_follows_from_its_seed(kind: str) -> None:
    trace = generate(kind, 400, seed=3)
    check(trace)
    assert len(trace.requests) == 400
    assert list(lines(trace)) == list(lines(generate(kind, 400, seed=3)))
    assert list(lines(trace)) != list(lines(generate(kind, 400, seed=4)))


def test_kinds_are_as_far_apart_as_their_names() -> None:
    described = {kind: describe(generate(kind, 3000, seed=1)) for kind in KINDS}
    chat, agents, documents = (described[kind] for kind in KINDS)
    assert chat.sharing is not None
    assert agents.sharing is not None
    assert documents.sharing is not None
    assert chat.sharing.infinite_hit < agents.sharing.infinite_hit < documents.sharing.infinite_hit
    assert agents.output_tokens.p50 < chat.output_tokens.p50
    assert documents.prompt_tokens.p50 > 2 * chat.prompt_tokens.p50
    # A few prefixes carry the agents' hits, so that a small cache is nearly as good as any.
    assert agents.sharing.lru_hit[1000] > 0.8 * agents.sharing.infinite_hit
    assert all(0.9 < one.gap_variation < 1.1 for one in described.values())


@pytest.mark.slow
def test_bursts_keep_order_lengths_and_nearly_the_rate() -> None:
    calm = generate("multi-turn", 20_000, seed=1)
    bursts = with_bursts(calm, Bursts(8), seed=1)
    check(bursts)
    assert [r.blocks for r in bursts.requests] == [r.blocks for r in calm.requests]
    assert describe(bursts).gap_variation > 1.3
    assert bursts.rate == pytest.approx(calm.rate, rel=0.2)
    assert bursts == with_bursts(calm, Bursts(8), seed=1)


def test_bursts_that_are_none_change_nothing() -> None:
    calm = generate("multi-turn", 100, seed=1)
    arrivals = [r.arrival_s for r in with_bursts(calm, Bursts(1), seed=1).requests]
    assert arrivals == pytest.approx([r.arrival_s for r in calm.requests])


def test_a_look_alike_of_the_slice_is_near_it() -> None:
    original = shipped_slice()
    for seed in range(5):
        made = look_alike(original, seed)
        check(made)
        ratios = {one.label: one.ratio for one in compare(original, made)}
        for label in ("prompt, mean", "prompt, p50", "output, mean", "distinct blocks"):
            assert ratios[label] == pytest.approx(1, abs=0.25), (seed, label)
        for label in ("rate", "hit without limit", "variation of gaps"):
            assert ratios[label] == pytest.approx(1, abs=0.25), (seed, label)


def test_a_look_alike_of_a_generated_trace_shares_alike() -> None:
    original = generate("tool-agent", 2000, seed=1)
    ratios = {one.label: one.ratio for one in compare(original, look_alike(original, 2))}
    assert ratios["hit without limit"] == pytest.approx(1, abs=0.1)
    assert ratios["hit by LRU of 1,000 blocks"] == pytest.approx(1, abs=0.15)
    assert ratios["turn, mean"] == pytest.approx(1, abs=0.2)


def test_a_look_alike_follows_from_its_seed_and_is_no_copy() -> None:
    original = shipped_slice()
    made = list(lines(look_alike(original, 1)))
    assert made == list(lines(look_alike(original, 1)))
    assert made != list(lines(look_alike(original, 2)))
    assert made != list(lines(original))


def test_a_look_alike_of_a_trace_without_ids_has_none() -> None:
    original = Trace("x", tuple(TraceRequest(float(at), 9 + at, 1) for at in range(50)))
    made = look_alike(original, 1)
    assert not made.has_blocks
    assert len(compare(original, made)) == 14


def test_what_cannot_be_generated_is_refused() -> None:
    with pytest.raises(InvalidInput, match="multi-turn"):
        generate("unknown", 1, seed=0)
    with pytest.raises(InvalidInput, match="at least one request"):
        generate("multi-turn", 0, seed=0)
    with pytest.raises(InvalidInput, match="above 0"):
        with_bursts(generate("multi-turn", 1, seed=0), Bursts(0), seed=0)
