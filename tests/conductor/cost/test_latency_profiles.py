"""Shipped profiles have the errors that they state; a wrong profile gets a precise error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from tiffin.bench.profiles import fit_profiles
from tiffin.conductor.cost import latency_profiles
from tiffin.conductor.cost.latency_model import decode_step_s, prefill_s
from tiffin.conductor.cost.latency_profiles import (
    DEFAULT,
    Profile,
    from_file,
    from_folder,
    load,
    names,
)
from tiffin.conductor.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable

DOCS = Path(__file__).parents[3] / "docs" / "conductor" / "cost.md"
README = Path(__file__).parents[3] / "conductor" / "cost" / "profiles" / "README.md"

# Of each fit, mean and largest relative error in percent: prefill, then decode. Independent fits of
# the same tables gave the same.
ERRORS = {
    "llama-3-70b.a800.tp8.mooncake": (4.6, 10, 0.4, 1),
    "llama-3.1-70b.a100.tp2.vllm": (2.4, 17, 2.8, 11),
    "llama-3.1-70b.a100.tp4.vllm": (2.2, 14, 2.2, 9),
    "llama-3.1-70b.a100.tp8.vllm": (4.3, 15, 3.2, 8.7),
    "llama-3.1-70b.h100.tp8.vllm": (2.9, 11, 2.5, 11),
    "llama-3.1-70b.h100.tp4.vllm": (5.4, 18, 1.4, 4),
    "llama-3.1-70b.h100.tp2.vllm": (7.9, 25, 1.7, 5),
    "llama-3.1-70b.h200.tp8.vllm": (3.3, 13, 2.3, 13),
    "llama-3.1-70b.b200.tp8.vllm": (2.6, 19, 7.7, 23),
    "llama-3.1-70b.h100.tp8.sglang": (2.1, 9, 1.6, 4.5),
    "llama-3.1-70b.h100.tp8.trtllm": (1.9, 6, 2.7, 9),
    "llama-3.1-8b.a100.tp1.vllm": (2.5, 13, 2.7, 12),
    "llama-3.1-8b.h100.tp1.vllm": (6.2, 21.5, 2.8, 9),
    "llama-3.1-8b.h200.tp1.vllm": (5.9, 21, 2.2, 9),
    "qwen3-32b.h200.tp2.vllm": (5.1, 19, 1.9, 7),
}

# (name, n, p, milliseconds) from the tables and papers.
POINTS = (
    ("llama-3.1-70b.a100.tp8.vllm", 8192, 0, 832),
    ("llama-3.1-70b.a100.tp8.vllm", 131072, 0, 28190),
    ("llama-3.1-70b.a100.tp8.vllm", 131072, 124518, 2180),
    ("llama-3.1-70b.h100.tp8.vllm", 512, 0, 27),
    ("llama-3.1-70b.h100.tp8.vllm", 32768, 0, 1536),
    ("llama-3.1-70b.h100.tp8.vllm", 32768, 31129, 96),
    ("llama-3-70b.a800.tp8.mooncake", 65536, 0, 10593),
    ("llama-3-70b.a800.tp8.mooncake", 16384, 15564, 226),
    ("opt-13b.a100.tp1.distserve", 1024, 0, 18.10 + 0.10191 * 1024 + 7.12e-6 * 1024**2),
    ("llama-2-70b.a100.tp8.splitwise", 2048, 0, 274),
)

GOOD: dict[str, Any] = {
    "name": "mine",
    "model": "m",
    "hardware": "h",
    "source": "measured",
    "licence": "",
    "prefill_s": [0.01, 1e-4, 1e-9],
    "decode_s": [0.02, 1e-4, 1e-8],
}


@pytest.mark.parametrize("name", names())
def test_what_ships_meets_its_own_points(name: str) -> None:
    profile = load(name)
    assert profile.name == name
    assert profile.source
    assert profile.licence
    assert len(profile.checks.prefill) == 6
    assert len(profile.checks.decode) >= 5
    assert profile.prefill_fit is not None
    assert profile.decode_fit is not None
    prefill, decode = profile.checks.prefill, profile.checks.decode
    assert profile.prefill_error(prefill).max <= profile.prefill_fit.error_max + 1e-3
    assert profile.decode_error(decode).max <= profile.decode_fit.error_max + 1e-3
    assert max(n for n, _, _ in prefill) <= profile.tokens_max


@pytest.mark.parametrize("name", ERRORS)
def test_fits_are_as_good_as_published(name: str) -> None:
    prefill, decode = load(name).prefill_fit, load(name).decode_fit
    assert prefill is not None
    assert decode is not None
    found = [prefill.error_mean, prefill.error_max, decode.error_mean, decode.error_max]
    # Half a unit of the last printed digit, of means and of maxima.
    allowed = (0.06, 0.6, 0.06, 0.6)
    for value, expected, slack in zip(found, ERRORS[name], allowed, strict=True):
        assert 100 * value == pytest.approx(expected, abs=slack)


@pytest.mark.parametrize(("name", "n", "p", "milliseconds"), POINTS)
def test_points_that_papers_print(name: str, n: int, p: int, milliseconds: float) -> None:
    assert prefill_s(*load(name).prefill, n, p) == pytest.approx(milliseconds / 1e3, rel=0.16)


def test_the_service_that_was_measured() -> None:
    """Mooncake, figure 14: 26.5 ms per token at 8k, 30.8 at 128k."""
    decode = load(DEFAULT).decode
    assert decode_step_s(*decode, 1, 8192 + 64) == pytest.approx(0.0265, rel=0.01)
    assert decode_step_s(*decode, 1, 131072 + 64) == pytest.approx(0.0308, rel=0.01)


def test_faster_hardware_is_faster() -> None:
    order = ["a100", "h100", "h200", "b200"]
    step_s = [load(f"llama-3.1-70b.{gpu}.tp8.vllm").decode[0] for gpu in order]
    assert step_s == sorted(step_s, reverse=True)


def test_every_profile_is_in_the_documentation_and_has_an_owner() -> None:
    table, owners = DOCS.read_text(encoding="utf-8"), README.read_text(encoding="utf-8")
    for name in names():
        assert fit_profiles.row(load(name)) in table
        assert f"*.{name.rsplit('.', 1)[1]}`" in owners or name in owners


def test_points_of_a_paper_make_the_same_profile_again() -> None:
    assert fit_profiles.mooncake() == load(DEFAULT)


def test_no_such_profile_names_those_that_there_are() -> None:
    with pytest.raises(InvalidRequest, match=rf"'\.\./cluster'; there are .*{DEFAULT}"):
        load("../cluster")


def test_a_file_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    for name in names():
        path.write_bytes(load(name).to_json())
        assert from_file(path) == load(name)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "../../etc/passwd"),
        ("name", ""),
        ("name", "x" * 101),
        ("prefill_s", [-0.01, 1e-4, 1e-9]),
        ("prefill_s", [0.01, 0, 1e-9]),
        ("prefill_s", [0.01, -1e-4, 1e-9]),
        ("prefill_s", [0.01, 1e-4, -1e-9]),
        ("prefill_s", [98.2, 0.10428, 9.2e-7]),  # milliseconds
        ("prefill_s", [0.01, 1.5, 1e-9]),
        ("prefill_s", [0.01, 1e-4, 1]),
        ("prefill_s", [0.01, 1e-4]),
        ("prefill_s", [0.01, 1e-4, "fast"]),
        ("prefill_s", [0.01, 1e-4, None]),
        ("decode_s", [0, 1e-4, 1e-8]),
        ("decode_s", [0.02, -1e-4, 1e-8]),
        ("decode_s", [0.02, 1e-4, -1e-8]),
        ("decode_s", [61, 1e-4, 1e-8]),
        ("decode_s", None),
        ("tensor_parallel", 0),
        ("tokens_max", -1),
        ("checks", {"prefill": [[1, 0, 0.0]]}),
        ("checks", {"prefill": [[1, 0, 0.1]] * 65}),
        ("model", "m" * 1001),
        ("kernel", "unknown"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, field: str, value: object) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps({**GOOD, field: value}))
    with pytest.raises(InvalidRequest, match=rf"wrong\.json.*{field}"):
        from_file(path)


@pytest.mark.parametrize("missing", GOOD)
def test_a_missing_field_is_named(missing: str) -> None:
    data = json.dumps({name: value for name, value in GOOD.items() if name != missing})
    with pytest.raises(InvalidRequest, match=f"<bytes>.*{missing}"):
        latency_profiles.from_json(data.encode())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{",
        b"\xff\xfe",
        json.dumps(GOOD).replace("0.01", "NaN").encode(),
        json.dumps(GOOD).replace("0.01", "Infinity").encode(),
        json.dumps(GOOD).replace("0.01", "1e999").encode(),
        b"[" * 100_000,
        b" " * (64 << 10) + json.dumps(GOOD).encode(),
    ],
)
def test_what_is_no_profile_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "wrong.json"
    path.write_bytes(data)
    with pytest.raises(InvalidRequest, match=r"wrong\.json"):
        from_file(path)


def test_a_file_has_a_largest_size(tmp_path: Path) -> None:
    path = tmp_path / "large.json"
    room = latency_profiles.FILE_BYTES_MAX - len(json.dumps(GOOD))
    path.write_text(json.dumps(GOOD) + " " * room)
    assert from_file(path).name == "mine"
    path.write_text(json.dumps(GOOD) + " " * (room + 1))
    with pytest.raises(InvalidRequest, match="more than 64 KiB"):
        from_file(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="No such file"):
        from_file(tmp_path / "none.json")
    with pytest.raises(InvalidRequest, match="directory"):
        from_file(tmp_path)


def test_a_folder_of_profiles(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.json").write_text(json.dumps({**GOOD, "name": name}))
    (tmp_path / "README.md").write_text("not a profile")
    assert sorted(from_folder(tmp_path)) == ["one", "two"]
    (tmp_path / "three.json").write_text(json.dumps({**GOOD, "name": "one"}))
    with pytest.raises(InvalidRequest, match=r"three\.json: name: 'one' is another"):
        from_folder(tmp_path)
    with pytest.raises(InvalidRequest, match="not a folder"):
        from_folder(tmp_path / "none")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_a_profile_made_in_python_is_checked_too(bad: float) -> None:
    made = msgspec.convert(GOOD, Profile)
    assert latency_profiles.validate(made) == made
    for field in ("prefill", "decode"):
        wrong = msgspec.structs.replace(made, **{field: (0.1, bad, 0.1e-9)})
        with pytest.raises(InvalidRequest, match=f"mine.*{field}_s"):
            latency_profiles.validate(wrong)


def test_a_profile_of_what_a_user_measured() -> None:
    """Times of another model's formula with a few percent of noise: the fit predicts the lengths
    in between."""
    truth = load("llama-3.1-8b.h100.tp1.vllm")
    wobble: Callable[[int], float] = lambda at: 1 + 0.02 * (-1) ** at  # noqa: E731
    lengths = ((n, p) for n in (512, 2048, 8192, 32768) for p in (0, n // 2))
    prefill = [
        (n, p, float(prefill_s(*truth.prefill, n, p)) * wobble(at))
        for at, (n, p) in enumerate(lengths)
    ]
    batches = ((batch, batch * each) for batch in (1, 8, 64) for each in (512, 4096))
    decode = [
        (batch, context, float(decode_step_s(*truth.decode, batch, context)) * wobble(at))
        for at, (batch, context) in enumerate(batches)
    ]
    mine = latency_profiles.fit("mine", prefill, decode, model="8B", hardware="H100")
    assert mine.tokens_max == 32768
    assert mine.prefill_fit is not None
    assert mine.prefill_fit.points == len(prefill)
    assert 0 < mine.prefill_fit.error_mean <= mine.prefill_fit.error_max < 0.06
    for n, p in ((1024, 512), (16384, 0), (16384, 12000)):
        expected = float(prefill_s(*truth.prefill, n, p))
        assert prefill_s(*mine.prefill, n, p) == pytest.approx(expected, rel=0.06)
    assert latency_profiles.from_json(mine.to_json()) == mine
    assert mine.latency == (*mine.prefill, *mine.decode)


def test_a_fit_in_milliseconds_is_refused() -> None:
    prefill = [(n, 0, 100.0 + 0.1e3 * n) for n in (512, 1024, 2048, 4096)]
    decode = [(b, c, 26.0 + b + c) for b, c in ((1, 512), (8, 512), (8, 4096), (64, 64))]
    with pytest.raises(InvalidRequest, match=r"profile mine.*prefill_s"):
        latency_profiles.fit("mine", prefill, decode)
