"""The columns of all instances: rows are allocated, reused, and grow together."""

from __future__ import annotations

import numpy as np
import pytest
from coresupport import conductor, nothing_is_promised, prompt, spec

from tiffin.conductor.errors import UnknownInstance
from tiffin.conductor.records import Decision, Load, Role, Status
from tiffin.conductor.state.instance_table import _COLUMNS, _ROWS_MIN, Cluster

LATENCY = (0.1, 1e-4, 1e-9, 0.02, 1e-4, 1e-8)


def test_all_columns_grow_together() -> None:
    cluster = Cluster()
    for number in range(5 * _ROWS_MIN + 1):
        assert cluster.register(spec(f"i{number}"), LATENCY, 0.0) == number
    assert {len(getattr(cluster, name)) for name in _COLUMNS} == {8 * _ROWS_MIN}
    assert cluster.used.sum() == len(cluster) == 5 * _ROWS_MIN + 1
    for name, (_, empty) in _COLUMNS.items():
        assert (getattr(cluster, name)[len(cluster) :] == empty).all(), name


def test_a_large_cluster_decides_and_ticks() -> None:
    made = conductor(*(spec(f"i{number}") for number in range(200)))
    assert isinstance(made.schedule(prompt("x"), 1.0), Decision)
    made.tick(100.0)
    assert {view.status for view in made.instances(100.0)} == {Status.LOST}
    assert made.tick(200.0) == ["x"]
    assert nothing_is_promised(made)


def test_rows_are_given_again_empty() -> None:
    cluster = Cluster()
    for name in "abc":
        cluster.register(spec(name), LATENCY, 0.0)
    cluster.heard("b", Load(queued=7, running=8, kv_used_tokens=9), 1.0)
    cluster.remove("b")
    with pytest.raises(UnknownInstance):
        cluster.row("b")
    assert cluster.rows_for("m", prefill=True).tolist() == [0, 2]
    assert cluster.register(spec("d", Role.DECODE), LATENCY, 2.0) == 1
    assert (cluster.queued[1], cluster.batch[1], cluster.kv_used_tokens[1]) == (0, 0, 0)
    assert cluster.rows_for("m", prefill=True).tolist() == [0, 2]
    assert cluster.rows_for("m", prefill=False).tolist() == [0, 1, 2]
    assert len(cluster.rows_for("another", prefill=True)) == 0


def test_reports_count_only_beyond_what_was_promised() -> None:
    cluster = Cluster()
    row = cluster.register(spec("a"), LATENCY, 0.0)
    cluster.promise(row, 0.0, batch=3, queued_tokens=1000)
    cluster.heard("a", Load(running=2, queued_prefill_tokens=4000), 1.0)
    assert (cluster.batch[row], cluster.queued_tokens[row]) == (3, 4000)
    assert cluster.others_s[row] == pytest.approx(LATENCY[1] * 3000)
    cluster.promise(row, 0.0, batch=-3, queued_tokens=-1000)
    assert (cluster.batch[row], cluster.queued_tokens[row]) == (0, 3000)
    cluster.heard("a", Load(), 0.5)
    assert cluster.heard_at[row] == 1.0
    assert not np.any(cluster.own_batch)
