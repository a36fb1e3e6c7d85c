"""The index's measurements give rows; properties that don't depend on the machine hold."""

from __future__ import annotations

from tiffin.bench.conductor import index
from tiffin.bench.conductor.setting import Setting, Sizes


def test_a_block_of_the_index_takes_less_than_250_bytes() -> None:
    (of_index, of_parts) = index.memory(Setting(Sizes(index_blocks=100_000)))
    assert of_index.met
    assert 64 < of_index.value.p50 <= 250
    assert 64 < of_parts.value.p50 <= 400


def test_every_measurement_is_a_row() -> None:
    rows = [
        *index.events(Setting(Sizes(index_blocks=3200, instances=20, index_rounds=1))),
        *index.resync(Setting(Sizes(index_blocks=10_000, index_rounds=1))),
        *index.walk(Setting(Sizes(instances=50, rounds=3))),
        *index.folding(Setting(Sizes(folded_blocks=64, index_rounds=1))),
    ]
    assert [row.name for row in rows] == [
        "index-events",
        "index-resync",
        "index-walk-private",
        "index-walk-hot",
        "folding-events",
    ]
    assert all(row.value.p50 > 0 and row.limit.p50 > 0 for row in rows)
