"""The HBM tier's benchmark runs and gives the rows that it promises. No timing is asserted."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import typer
from typer.testing import CliRunner

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from rowsupport import check  # noqa: E402

from tiffin.bench.hbm import cli, transfers, verbs  # noqa: E402
from tiffin.bench.hbm.setting import Setting, Sizes  # noqa: E402
from tiffin.bench.hbm.suite import SUITE  # noqa: E402
from tiffin.bench.kernels.device import machine  # noqa: E402
from tiffin.bench.store.setting import KIB, MIB  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

    from tiffin.bench.kernels.device import Machine

TINY = Sizes(
    rounds=2,
    block_bytes=1 * MIB,
    blocks=2,
    layers=2,
    kv_heads=2,
    head_dim=16,
    block_tokens=64,
    paged_blocks=3,
    piece_bytes=(4 * KIB, 16 * KIB),
    pieces_bytes=256 * KIB,
    decode_shape=(16, 32),
    decode_layers=2,
    decode_steps=2,
    transfer_bytes=256 * KIB,
    busy_edge=16,
)
VERBS = {
    "publish": ["publish", "publish-block"],
    "lease": ["lease-verified", "lease-verified-block", "lease"],
    "promote": ["promote", "promote-block", "promote-rehashed", "promote-rehashed-block"],
    "demote": ["demote", "demote-block"],
}
ON_A_GPU = {
    "paged": {
        f"paged-{way}{kind}": bound
        for way in ("down", "up")
        for kind, bound in (("", 0.9), ("-kernel", 0), ("-busy", 0.8), ("-kernel-busy", 0))
    },
    "pieces": {f"pieces-{way}-{size}": 0.9 for size in ("4KiB", "16KiB") for way in ("down", "up")},
    "decode": {f"decode-{way}{size}": 1.05 for size in ("", "-16KiB") for way in ("down", "up")},
}


def on_cpu() -> Setting:
    return Setting(TINY, machine("cpu"))


@pytest.mark.parametrize("name", VERBS)
def test_verbs_give_rows_with_limits(name: str) -> None:
    found = SUITE.run(on_cpu(), [name], lambda _: None)
    assert not found.crashed, found.traces
    assert [row.name for row in found.rows] == VERBS[name]
    check(found.rows)


def test_what_needs_a_gpu_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = SUITE.run(Setting(TINY, machine(None)), list(ON_A_GPU), lambda _: None)
    assert not found.rows
    assert not found.crashed
    assert found.missing == dict.fromkeys(ON_A_GPU, "needs a GPU: --device cuda:0")


def test_a_block_that_is_not_there_is_no_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verbs._Tier, "demote", lambda tier: None)  # the pool stays empty
    found = SUITE.run(on_cpu(), ["promote", "publish"], lambda _: None)
    assert "not all blocks are there" in found.crashed["promote"]
    assert [row.name for row in found.rows] == VERBS["publish"]


def test_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sizes, "quick", classmethod(lambda cls: TINY))
    app = typer.Typer()
    cli.commands(app)
    always = ["bench", "hbm", "--quick", "--device", "cpu", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, [*always, "--row", "publish", "--row", "decode", "--json"])
    assert done.exit_code == 0, done.output
    report: dict[str, Any] = json.loads((tmp_path / "bench-hbm.json").read_text())
    assert [row["name"] for row in report["rows"]] == VERBS["publish"]
    assert {row["environment"]["device"] for row in report["rows"]} == {"cpu"}
    assert list(report["missing"]) == ["decode"]
    assert json.loads(done.stdout) == report
    assert "left out decode: needs a GPU" in done.stderr

    done = CliRunner().invoke(app, [*always, "--row", "lease", "--markdown"])
    assert "| `lease-verified` |" in done.stdout
    assert CliRunner().invoke(app, [*always, "--row", "nothing"]).exit_code == 2
    assert CliRunner().invoke(app, ["bench", "hbm", "--device", "cuda:99"]).exit_code == 2


# -- measuring a GPU, with a double of torch.cuda --------------------------------------------------


@pytest.mark.parametrize("name", ON_A_GPU)
def test_the_rows_of_a_gpu(name: str, fake_gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    from fakegpu import FakeEvent

    from tiffin.messenger.gpu.copier import DeviceTransfer

    monkeypatch.setattr(FakeEvent, "ended", False)
    monkeypatch.setattr(DeviceTransfer, "done", lambda transfer: False)
    monkeypatch.setattr(DeviceTransfer, "wait", lambda transfer, timeout_s: None)
    found = SUITE.run(Setting(TINY, fake_gpu), [name], lambda _: None)
    assert not found.crashed, found.traces
    check(found.rows)
    bounds = {row.name: row.targets[0].bound if row.targets else 0 for row in found.rows}
    assert bounds == ON_A_GPU[name]


@pytest.mark.parametrize("name", ["paged", "decode"])
def test_what_was_not_beside_a_load_to_its_end_is_not_judged(name: str, fake_gpu: Machine) -> None:
    found = SUITE.run(Setting(TINY, fake_gpu), [name], lambda _: None)
    beside = [row for row in found.rows if "busy" in row.name or name == "decode"]
    assert len(beside) == 4
    for row in beside:
        assert not row.targets
        assert "not judged: the load ended before" in row.note


@pytest.mark.parametrize("verb", ["gather", "scatter"])
def test_ways_down_and_up_that_differ_are_not_shown(
    verb: str, fake_gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, verb, lambda *_, **__: None)
    found = SUITE.run(Setting(TINY, fake_gpu), ["paged"], lambda _: None)
    assert not found.rows
    assert "ways down give" in found.crashed["paged"] or "went up" in found.crashed["paged"]


def test_pieces_go_there_and_back() -> None:
    where = machine("cpu")
    near, host = where.bytes_of(64 * KIB), where.pinned(64 * KIB)
    there, back = transfers.scattered(where, near, host, 4 * KIB)
    for target, source, to, come in (
        (host, near, there.target_offsets, there.source_offsets),
        (near, host, back.target_offsets, back.source_offsets),
    ):
        assert (target is host) == (to.tolist() == sorted(to))
        assert sorted(to) == sorted(come) == list(range(0, 64 * KIB, 4 * KIB))
        assert source is not target
    assert list(there.source_offsets) == list(back.target_offsets)
