"""The kernels' benchmark runs and says what it claims to say. No timing is asserted."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import types
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from rowsupport import check  # noqa: E402

from tiffin.bench.environment import environment_lines  # noqa: E402
from tiffin.bench.kernels import calls, case, cli, device  # noqa: E402
from tiffin.bench.kernels.case import Case, head_slice, latents, llama  # noqa: E402
from tiffin.bench.kernels.device import Machine, machine  # noqa: E402
from tiffin.bench.kernels.setting import Setting, Sizes  # noqa: E402
from tiffin.bench.kernels.suite import SUITE  # noqa: E402
from tiffin.bench.store.rows import Side  # noqa: E402
from tiffin.bench.suite import Missing  # noqa: E402
from tiffin.kvstore.errors import MissingExtra  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

TINY = Sizes(
    rounds=2,
    blocks=2,
    block_tokens=64,
    page_tokens=(16, 32),
    layers=2,
    kv_heads=8,
    head_dim=16,
    latent_layers=2,
    latent_dim=24,
    scale_tokens=16,
    quantised_blocks=1,
    calls=3,
    call_blocks=4,
)
BOTH = ("", "-naive")
WHOLE = [f"{order}-{size}{end}" for size in (16, 32) for order in ("nhd", "hnd") for end in BOTH]
FORMS = ("float8-head", "float8-16", "int8-head", "int8-16")
NAMES = {
    "gather": [f"gather-{name}" for name in WHOLE],
    "scatter": [f"scatter-{name}" for name in WHOLE],
    "parts": [
        f"{verb}-{model}-16{end}"
        for model in ("slice", "mla")
        for verb in ("gather", "scatter")
        for end in BOTH
    ],
    "quantise": [f"{verb}-{form}" for form in FORMS for verb in ("quantise", "dequantise")],
    "reshard": ["reshard-2-4"],
    "checksum": ["checksum"],
    "launches": ["launches-gqa", "launches-mla"],
    "host": ["host-plan-4"],
}
ON_A_CPU = {
    **{f"{verb}-{name}": "ratio >= 0.5" for verb in ("gather", "scatter") for name in WHOLE[::2]},
    **dict.fromkeys(NAMES["launches"], "p50 <= 2 launches"),
    "host-plan-4": "p50 <= 100 us",
}


def on_cpu() -> Setting:
    return Setting(TINY, machine("cpu"))


@pytest.mark.parametrize("name", NAMES)
def test_measurements_give_rows_with_limits(name: str) -> None:
    found = SUITE.run(on_cpu(), [name], lambda _: None)
    assert not found.crashed, found.traces
    assert not found.missing
    assert [row.name for row in found.rows] == NAMES[name]
    check(found.rows)
    judged = {row.name: row.target_text for row in found.rows if row.targets}
    assert judged == {row: text for row, text in ON_A_CPU.items() if row in NAMES[name]}


def test_what_needs_a_gpu_is_left_out_and_named() -> None:
    found = SUITE.run(on_cpu(), ["lmcache", "launches"], lambda _: None)
    assert found.missing == {"lmcache": "needs a GPU: --device cuda:0"}
    assert {row.note.partition(";")[0] for row in found.rows} == {"1 planned"}
    assert all("planned, not run" in row.what for row in found.rows)


def test_each_row_says_where_it_was_measured(tmp_path: Path) -> None:
    report = SUITE.run(on_cpu(), ["checksum", "lmcache", "launches"], lambda _: None)
    plain = json.loads(report.write(tmp_path).read_text())
    assert len(plain["rows"]) == 3
    for row in plain["rows"]:
        assert row["environment"]["device"] == "cpu"
        assert row["environment"]["torch"] == torch.__version__
    lines = environment_lines(plain["environment"])
    assert len(lines) == 4
    assert "no kernel runs on a CPU" in lines[2]


# -- what is moved ---------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["nhd", "hnd"])
@pytest.mark.parametrize("model", [llama, head_slice, latents])
def test_the_naive_way_is_the_oracles(model: Any, order: Any) -> None:
    """A loop over blocks, tokens and heads, against what both ways give."""
    made = Case(machine("cpu"), model(TINY), blocks=2, block_tokens=64, page_tokens=16, order=order)
    made.check()
    made.blocks.zero_()
    made.naive_gather()
    found = made.blocks.view(torch.bfloat16).view(2, TINY.layers, -1, 64, made.model.dim)
    for block, token in ((0, 0), (0, 17), (1, 63)):
        page = int(made.page_ids[(block * 64 + token) // 16])
        for layer in range(TINY.layers):
            pages = made.storage[layer, :, page]
            at = pages[:, token % 16] if order == "nhd" else pages[:, :, token % 16]
            assert torch.equal(found[block, layer, :, token], at.reshape(-1, made.model.dim))


def test_rows_of_different_bytes_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(case, "gather", lambda *_: None)
    found = SUITE.run(on_cpu(), ["gather"], lambda _: None)
    assert "different blocks" in found.crashed["gather"]
    assert not found.rows


def test_what_the_device_refuses_ends_one_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr(case, "gather", refuse)
    found = SUITE.run(on_cpu(), ["gather", "checksum"], lambda _: None)
    assert "the device refused: RuntimeError: CUDA error" in found.crashed["gather"]
    assert [row.name for row in found.rows] == ["checksum"]


# -- devices ---------------------------------------------------------------------------------------


def test_without_a_gpu_the_cpu_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert str(machine(None).device) == "cpu"
    with pytest.raises(ValueError, match="no device 'cuda:0' here"):
        machine("cuda:0")
    with pytest.raises(ValueError, match="is no device"):
        machine("toaster")
    with pytest.raises(ValueError, match="no device 'meta'"):
        machine("meta")
    with pytest.raises(Missing, match="needs a GPU"):
        machine("cpu").need_gpu()


def test_without_torch_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtra, match=r"tiffin\[torch\]"):
        machine(None)


def test_what_nvidia_smi_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(
        '#!/bin/sh\ntest "$1" = --id=GPU-12 || exit 9\n'
        "echo '570.1, 1980 MHz, 2619 MHz, 1980 MHz, 700.00 W, 5, 16'\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    found = device._from_smi("12")
    assert found["driver_version"] == "570.1"
    assert found["clocks.max.sm"] == "1980 MHz"
    assert set(device._from_smi("another").values()) == {"unknown"}


# -- the program -----------------------------------------------------------------------------------


def test_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sizes, "quick", classmethod(lambda cls: TINY))
    app = typer.Typer()
    cli.commands(app)
    always = ["bench", "kernels", "--quick", "--device", "cpu", "--out", str(tmp_path)]
    chosen = ["--row", "reshard", "--row", "lmcache"]
    done = CliRunner().invoke(app, [*always, *chosen, "--json"])
    assert done.exit_code == 0, done.output
    report: dict[str, Any] = json.loads((tmp_path / "bench-kernels.json").read_text())
    assert [row["name"] for row in report["rows"]] == ["reshard-2-4"]
    assert list(report["missing"]) == ["lmcache"]
    assert json.loads(done.stdout) == report
    assert "left out lmcache: needs a GPU" in done.stderr

    done = CliRunner().invoke(app, [*always, "--row", "launches", "--markdown"])
    assert "| `launches-gqa` |" in done.stdout

    assert CliRunner().invoke(app, [*always, "--row", "nothing"]).exit_code == 2
    assert CliRunner().invoke(app, ["bench", "kernels", "--device", "cuda:99"]).exit_code == 2


# -- the way a GPU is measured, with a double of torch.cuda ----------------------------------------


def test_events_are_in_order_and_what_is_flushed_is_not_timed(fake_gpu: Machine) -> None:
    order: list[str] = []

    def note(what: str) -> Any:
        return lambda: order.append(what)

    sides = [Side(note("a"), note("reset"), note("prepare")), Side(note("b"))]
    with fake_gpu.torch.cuda.noting(order):
        seconds = fake_gpu.turns(sides, rounds=2)
    once = ["prepare", "record", "a", "record", "synchronize", "reset"]
    once += ["record", "b", "record", "synchronize"]
    assert order == once * 4  # two passes before, two that count
    assert [len(taken) for taken in seconds] == [2, 2]
    assert all(taken > 0 for taken in seconds[0] + seconds[1])


@pytest.mark.parametrize("name", ["gather", "parts", "quantise", "checksum", "launches", "host"])
def test_the_rows_of_a_gpu(name: str, fake_gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_profiled", lambda where, action: (action(), (1, 2))[1])
    found = SUITE.run(Setting(TINY, fake_gpu), [name], lambda _: None)
    assert not found.crashed, found.traces
    check(found.rows)
    judged = {row.name: row.target_text for row in found.rows if row.targets}
    assert (
        judged
        == {
            "gather": {f"gather-{name}": "ratio >= 0.85" for name in WHOLE if "naive" not in name},
            "parts": {n: "ratio >= 0.7" for n in NAMES["parts"] if "naive" not in n},
            "quantise": {f"quantise-float8-{g}": "ratio >= 0.8" for g in ("head", "16")},
            "checksum": {},
            "launches": dict.fromkeys(NAMES["launches"], "p50 <= 2 launches"),
            "host": {f"host-{n}-4": "p50 <= 100 us" for n in ("plan", "gather", "scatter")},
        }[name]
    )


def test_kernels_and_copies_are_counted_apart(fake_gpu: Machine) -> None:
    cuda, cpu = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU
    events = [
        SimpleNamespace(name=name, device_type=kind)
        for name, kind in (
            ("aten::to", cpu),
            ("Memcpy HtoD (Pinned -> Device)", cuda),
            ("move_lanes", cuda),
        )
    ]
    profile = SimpleNamespace(events=lambda: events)
    fake_gpu.torch.profiler = SimpleNamespace(
        ProfilerActivity=torch.profiler.ProfilerActivity,
        profile=lambda activities: contextlib.nullcontext(profile),
    )
    assert calls._profiled(fake_gpu, lambda: None) == (1, 1)


class PlainLmcache:
    """What LMCache's extension does, in torch, token by token; for its calls, not its speed."""

    def __init__(self, layers: Any) -> None:
        self.layers = {layer.data_ptr(): layer for layer in layers}

    def multi_layer_kv_transfer(
        self, chunk: Any, layers: Any, slots: Any, where: Any, slot_count: int, direction: str,
        form: str, *, block_size: int, head_size: int,
    ) -> None:  # fmt: skip
        assert form == "a format"
        for number, address in enumerate(layers.tolist()):
            rows = self.layers[address].flatten(1, 2).flatten(-2)  # [2, slots, heads * dim]
            assert rows.shape[1] == slot_count
            assert rows.shape[2] % head_size == 0 == slot_count % block_size
            if direction == "D2H":
                chunk[:, number] = rows[:, slots]
            else:
                rows[:, slots] = chunk[:, number]


def test_lmcache_is_asked_as_its_connectors_ask(
    fake_gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    class Remembered(Case):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            made.append(PlainLmcache(self.storage))

    from tiffin.bench.kernels import lmcache

    monkeypatch.setattr(lmcache, "Case", Remembered)
    module = types.ModuleType("lmcache.cuda_ops")
    module.multi_layer_kv_transfer = lambda *a, **o: made[0].multi_layer_kv_transfer(*a, **o)  # type: ignore[attr-defined]
    module.TransferDirection = SimpleNamespace(D2H="D2H", H2D="H2D")  # type: ignore[attr-defined]
    module.EngineKVFormat = SimpleNamespace(NL_X_TWO_NB_BS_NH_HS="a format")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lmcache", types.ModuleType("lmcache"))
    monkeypatch.setitem(sys.modules, "lmcache.cuda_ops", module)
    found = SUITE.run(Setting(TINY, fake_gpu), ["lmcache"], lambda _: None)
    assert not found.crashed, found.traces
    assert [row.name for row in found.rows] == ["lmcache-gather", "lmcache-scatter"]

    monkeypatch.setitem(sys.modules, "lmcache.cuda_ops", None)
    found = SUITE.run(Setting(TINY, fake_gpu), ["lmcache"], lambda _: None)
    assert "needs LMCache for CUDA" in (found.missing or {})["lmcache"]


def test_page_ids_are_all_of_the_pages_once() -> None:
    made = Case(machine("cpu"), llama(TINY), blocks=2, block_tokens=64, page_tokens=16)
    assert sorted(made.page_ids) == list(range(8))
    assert made.nbytes == 2 * TINY.layers * 2 * 8 * 64 * 16 * 2
    assert np.array_equal(made.pages.pages.ravel(), made.page_ids)
