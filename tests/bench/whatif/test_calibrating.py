"""Hardware that is slower than its profile says: by how much is learnt from the requests."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
from whatifsupport import TRUTH

from tiffin.bench.traces.recordings import Recording, read_recording
from tiffin.bench.whatif.calibrating import Memory, calibrated, decode_points, prefill_points
from tiffin.bench.whatif.cli import learnt_from
from tiffin.bench.whatif.setup import in_force
from tiffin.conductor.cost.latency_model import prefill_s
from tiffin.conductor.recording.lines import RequestLine
from tiffin.kvstore.errors import InvalidInput

if TYPE_CHECKING:
    from pathlib import Path

    from tiffin.bench.sim.cluster.simulation import SimulationOutcome

    Truth = tuple[Path, SimulationOutcome]


MEMORY = Memory(TRUTH.cache_tokens, 512)


def request(arrival_s: float, ttft_s: float, **more: object) -> RequestLine:
    known = {"id": "r", "model": "m", "outcome": "finished", "prefill": "p", "decode": "d"}
    line = RequestLine(arrival_s=arrival_s, ttft_s=ttft_s, prompt_tokens=1000, **known)
    return msgspec.structs.replace(line, **more)


@pytest.fixture(scope="module")
def recording(truth: Truth) -> Recording:
    return read_recording(truth[0])


def test_a_prefill_begins_when_the_one_before_it_ends() -> None:
    """The second waited for 1.5 s of its 2.5 s; another instance has a queue of its own."""
    ones = [
        request(0.0, 2.0, cached_tokens=512),
        request(0.5, 2.5),
        request(0.6, 0.4, prefill="other"),
        request(9.0, 1.0, cached_tokens=1000),
    ]
    found = dict(prefill_points(ones, MEMORY))
    assert found[0] == pytest.approx((1000, 512, 2.0))
    assert found[1] == pytest.approx((1000, 0, 1.0))
    assert found[2] == pytest.approx((1000, 0, 0.4))
    assert found[3] == pytest.approx((1000, 999, 1.0)), "the last token is always computed"


def test_a_prompt_uses_what_was_computed_while_it_waited() -> None:
    """Its decision knew of no block; when its turn comes, one is there, and of another none."""
    ones = [
        request(0.0, 1.0, blocks=[7]),
        request(0.1, 1.5, blocks=[7, 8]),
        request(0.2, 2.0, blocks=[9]),
    ]
    assert [cached for _, (_, cached, _) in prefill_points(ones, MEMORY)] == [0, 512, 0]


def test_a_batch_is_the_mean_over_an_answer() -> None:
    """One answer takes from 1 to 5 s, the other from 3 to 5: half of the first's time is shared."""
    ones = [
        request(0.0, 1.0, tbt_s=1.0, output_tokens=5),
        request(2.0, 1.0, tbt_s=0.5, output_tokens=5),
        request(2.0, 1.0, tbt_s=0.5, output_tokens=5, decode="other"),
    ]
    found = dict(decode_points(ones))
    context = 1000 + 2.5
    assert found[0] == pytest.approx((1.5, 1.5 * context, 1.0))
    assert found[1] == pytest.approx((2.0, 2 * context, 0.5))
    assert found[2] == pytest.approx((1.0, context, 0.5))


def test_points_of_a_simulation_lie_on_its_profile(recording: Recording) -> None:
    profile = in_force(recording).profile
    errors = [
        seconds / prefill_s(*profile.prefill, n, p) - 1
        for _, (n, p, seconds) in prefill_points(recording.requests, MEMORY)
    ]
    assert len(errors) == len(recording.requests)
    assert np.median(np.abs(errors)) < 0.01
    near = [error for error in errors if abs(error) < 0.01]
    assert len(near) > 0.7 * len(errors), "loading takes time, too, and some fetches are in vain"


@pytest.mark.parametrize("claimed", [0.5, 1.0, 1.6])
def test_the_factor_is_found_whatever_the_profile_claims(
    recording: Recording, claimed: float
) -> None:
    """The instances claim to be `claimed` times as slow as they are."""
    true = in_force(recording).profile
    wrong = msgspec.structs.replace(
        true,
        prefill=tuple(c * claimed for c in true.prefill),
        decode=tuple(d * claimed for d in true.decode),
    )
    found = calibrated(wrong, recording.requests, MEMORY, learnt_from)
    for learnt, real in zip(found.prefill, true.prefill, strict=True):
        assert learnt == pytest.approx(real, rel=0.05)
    assert found.decode[0] == pytest.approx(true.decode[0], rel=0.1)


def test_who_learns_of_nobody_says_so(recording: Recording) -> None:
    nobody = [msgspec.structs.replace(one, ttft_s=None) for one in recording.requests]
    profile = in_force(replace(recording, requests=tuple(nobody))).profile
    with pytest.raises(InvalidInput, match="nothing to learn from"):
        calibrated(profile, nobody, MEMORY)
