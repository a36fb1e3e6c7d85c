"""The gateway's benchmark runs and gives the rows that it promises. No timing is asserted."""

from __future__ import annotations

import shutil
from importlib.util import find_spec

import pytest
from rowsupport import check

from tiffin.bench.conductor import service
from tiffin.bench.gateway.fleet import TEXT, fleet, short_body, stream_body
from tiffin.bench.gateway.setting import Setting, Sizes
from tiffin.bench.gateway.suite import SUITE

pytestmark = pytest.mark.skipif(
    any(find_spec(name) is None for name in service.NEEDED), reason="needs the extra conductor"
)

TINY = Sizes(
    at_once=(1, 4), turns=1, requests=40, alone=10, streams=(4,), stream_tokens=5, gap_s=0.001,
    held=10,
)  # fmt: skip
NAMES = {
    "requests": ["requests-1", "requests-4"],
    "cpu": ["cpu", "cpu-conductor"],
    "workers": ["cpu-workers"],
    "latency": ["added-ids", "added-text", "added-loaded"],
    "streams": ["tokens-4", "cpu-token-4"],
    "memory": ["stream-memory"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_measurements_give_rows_with_limits(name: str) -> None:
    found = SUITE.run(Setting(TINY), [name], lambda _: None)
    assert not found.traces
    assert not found.missing
    assert [row.name for row in found.rows] == NAMES[name]
    if name != "memory":  # so few streams may not make it grow at all
        check(found.rows)


def test_requests_and_streams_go_all_the_way() -> None:
    """What the clients count is what the engine sent, through every side; refusals are told from
    failures, and streams that are dropped leave nothing behind."""
    with fleet(Setting(TINY), {"limits": {"requests": 4}}) as it:
        assert ("nginx" in it.sides) == (
            shutil.which("nginx", path="/usr/sbin:/usr/bin") is not None
        )
        for port in it.sides.values():
            outcome = it.ask(port, short_body(TEXT), requests=20, at_once=2)
            assert (outcome.statuses, len(outcome.seconds)) == ({"200": 20}, 20)
            assert outcome.fallbacks == 0
            streamed = it.ask(port, stream_body(7, 0.001), requests=8, rate=200.0 / 50)
            assert streamed.tokens == 7 * 8
        busy = it.ask(it.gateway, short_body(gap_s=0.5), requests=12, at_once=12)
        assert busy.statuses == {"200": 4, "503": 8}
        assert len(busy.refused_s) == 8
        held = it.ask(it.gateway, stream_body(2, 3600.0), hold=4)
        assert held.tokens == 4
        it.drop()
        assert it.resident_bytes("gateway") > 1 << 20
        while it.ask(it.gateway, short_body(), requests=1, at_once=1).statuses == {"503": 1}:
            pass  # until the gateway has noticed
