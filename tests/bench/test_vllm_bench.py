"""The benchmark of vLLM, without a vLLM: what it says then, and how it makes rows of times."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiffin.bench.vllm import first_token
from tiffin.bench.vllm.first_token import Times
from tiffin.bench.vllm.setting import Setting, Sizes
from tiffin.bench.vllm.suite import SUITE

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_without_a_vllm_every_row_is_left_out_and_says_how_to_get_one() -> None:
    report = SUITE.run(Setting(Sizes.quick()), ["remote"], started=lambda _: None)
    assert (report.rows, report.crashed) == ([], {})
    assert report.missing is not None
    assert "make engines" in report.missing["remote"]


def test_an_engine_that_ends_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no such module >&2\nexit 3\n")
    python.chmod(0o755)
    report = SUITE.run(Setting(Sizes.quick(), python), ["remote"], started=lambda _: None)
    assert "no such module" in report.crashed["remote"]


def test_a_row_compares_with_the_engines_own_cache_and_names_the_cold_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = Times([900.0, 1000.0, 1100.0], [30.0, 32.0, 34.0], [20.0, 20.0, 20.0], [4096], [1])
    monkeypatch.setattr(first_token, "_second_engine", lambda *_, **__: times)
    monkeypatch.setattr(first_token, "model", lambda _: _Folder())
    (row,) = first_token.remote(Setting(Sizes.quick()))
    assert (row.value.p50, row.limit.p50, row.ratio) == (32.0, 20.0, 1.6)
    assert row.note == "computed: 1000 ms"
    assert row.met


class _Folder:
    def __enter__(self) -> str:
        return "model"

    def __exit__(self, *_: object) -> None:
        pass
