"""The arithmetic of quantised parts: compared with ml_dtypes number by number, and its bounds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from tiffin.kernels.errors import LayoutError
from tiffin.kernels.quant.reference import dequantise, pack, quantise, unpack
from tiffin.kernels.quant.scaling import FLOAT32_MAX, FORMATS, SCALE_MIN, Scaling

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
STORED = {"float8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn), "int8": np.dtype(np.int8)}
# Half the distance between neighbours, relative, and half the smallest number there is. Numbers are
# rounded to float32 first.
ROUNDING = {"bfloat16": (2.0**-8 + 2.0**-24, 2.0**-134), "float16": (2.0**-11 + 2.0**-24, 2.0**-25)}
ROUNDING["float32"] = (2.0**-24, 2.0**-150)
TINY = 2.0**-149
PAGE = (Path(__file__).parents[2] / "docs" / "quantisation.md").read_text(encoding="utf-8")


def oracle(numbers: np.ndarray, form: str) -> tuple[np.ndarray, np.float32]:
    """The bytes (uint8) and the scale of one group of float32 numbers, by docs/quantisation.md."""
    limit = np.float32({"float8_e4m3": 448, "int8": 127}[form])
    amax = np.abs(numbers).max()
    if not np.isfinite(amax):
        return np.zeros(numbers.shape, np.uint8), np.float32(np.nan)
    if amax == 0:
        scale, scaled = np.float32(0), numbers
    else:
        largest = np.float32(FORMATS[form].scale_max)
        scale = min(max(amax / limit, np.float32(2.0**-126)), largest)
        scaled = np.clip(numbers * (np.float32(1) / scale), -limit, limit)
    if form == "int8":
        scaled = np.rint(scaled)
    return scaled.astype(STORED[form]).view(np.uint8), np.float32(scale)


def in_float32(values: list[float], dtype: str) -> np.ndarray:
    """Numbers as a cache of this dtype has them, widened."""
    with np.errstate(over="ignore"):
        narrow = torch.tensor(values, dtype=torch.float64).to(DTYPES[dtype])
    return narrow.to(torch.float32).numpy()


def bound(numbers: np.ndarray, scale: float, form: str) -> np.ndarray:
    """How far the restored numbers may be off, before they are rounded; docs/quantisation.md."""
    if form == "int8":
        return np.full(numbers.shape, scale * (0.5 + 2.0**-16))
    return np.maximum(np.abs(numbers) / 16, scale / 1024) * (1 + 2.0**-18)


SPECIAL = [0.0, -0.0, 1.0, -448.0, 65504.0, -65504.0, TINY, -TINY, SCALE_MIN, 2.0**-14, 2.0**-24]
SPECIAL += [FLOAT32_MAX, -FLOAT32_MAX, float("inf"), float("-inf"), float("nan"), 1e30, -1e-30]
ANY = st.one_of(st.sampled_from(SPECIAL), st.floats(width=32), st.floats(-8, 8, width=32))
GROUPS = st.lists(st.lists(ANY, min_size=6, max_size=6), min_size=1, max_size=4)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@given(groups=GROUPS)
@example(groups=[[FLOAT32_MAX, -FLOAT32_MAX, 1.0, 0.0, -0.0, 1e38]])
@example(groups=[[TINY, -TINY, 3 * TINY, 0.0, -0.0, 2.0**-133]])
@example(groups=[[1e9, 1.0, -1.0, 1e-3, -1e-9, 0.0]])
@settings(max_examples=150)
def test_bytes_scales_and_bounds(groups: list[list[float]], dtype: str, form: str) -> None:
    wide = np.stack([in_float32(group, dtype) for group in groups])
    numbers = torch.from_numpy(wide).to(DTYPES[dtype]).view(len(groups) * 2, 3)
    values, scales = quantise(numbers, Scaling(form, 2))
    restored = dequantise(values, scales, DTYPES[dtype]).view(len(groups), 6).double().numpy()
    for index, group in enumerate(wide):
        expected, scale = oracle(group, form)
        assert np.array_equal(values.view(torch.uint8).view(-1, 6)[index].numpy(), expected)
        assert scales[index].numpy().tobytes() == scale.tobytes()
        if np.isnan(scale):
            assert np.isnan(restored[index]).all()
            continue
        factor, smallest = ROUNDING[dtype]
        exact = group.astype(np.float64)
        allowed = bound(exact, float(scale), form)
        allowed += np.maximum((np.abs(exact) + allowed) * factor, smallest)
        assert (np.abs(restored[index] - exact) <= allowed).all()
        assert not exact.any() or scale >= SCALE_MIN


@pytest.mark.parametrize("form", FORMATS)
def test_what_is_kept_survives_being_quantised_again(form: str) -> None:
    numbers = torch.randn(64, 32, generator=torch.manual_seed(1)) * 7
    scaling = Scaling(form, 16)
    once = quantise(numbers, scaling)
    again = quantise(dequantise(*once, torch.float32), scaling)
    assert (once[0].view(torch.uint8) != again[0].view(torch.uint8)).float().mean() < 1e-3
    assert torch.allclose(once[1], again[1], rtol=1e-6)


def test_the_largest_scales_are_those_whose_products_are_finite() -> None:
    for form in FORMATS.values():
        scale, limit = np.float32(form.scale_max), np.float32(form.limit)
        assert float(scale) == form.scale_max
        with np.errstate(over="ignore"):
            assert np.isfinite(scale * limit)
            assert form.limit * float(np.nextafter(scale, np.float32(np.inf))) > FLOAT32_MAX


def test_every_byte_means_what_ml_dtypes_and_torch_say() -> None:
    every = np.arange(256, dtype=np.uint8)
    for form, dtype in STORED.items():
        values = torch.from_numpy(every.reshape(1, 256)).view(
            torch.float8_e4m3fn if form == "float8_e4m3" else torch.int8
        )
        restored = dequantise(values, torch.ones(1), torch.float32).numpy()[0]
        assert np.array_equal(restored, every.view(dtype).astype(np.float32), equal_nan=True)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("scale_tokens", [1, 4, 16])
def test_runs_have_values_and_behind_them_scales(form: str, scale_tokens: int) -> None:
    numbers = torch.randn(3, 16, 5, generator=torch.manual_seed(2))
    scaling = Scaling(form, scale_tokens)
    values, scales = quantise(numbers, scaling)
    runs = torch.zeros(3, 16 * 5 + 16 // scale_tokens * 4, dtype=torch.uint8)
    pack(values, scales, runs)
    assert runs[1, :80].numpy().tobytes() == values[1].view(torch.uint8).numpy().tobytes()
    assert runs[1, 80:].numpy().tobytes() == scales[1].numpy().astype("<f4").tobytes()
    got = unpack(runs, 5, scaling)
    assert torch.equal(got[0].view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(got[1], scales)


@pytest.mark.parametrize("form", FORMATS)
def test_the_published_example(form: str) -> None:
    published = re.search(rf"^{form} +((?:[0-9a-f]{{2}} +)*[0-9a-f]{{2}})$", PAGE, re.MULTILINE)
    assert published is not None
    numbers = torch.tensor([[[1, -0.5, 0.3, 0], [100, 0.01, -3.14159, 7]]])
    run = torch.zeros(1, 16, dtype=torch.uint8)
    pack(*quantise(numbers, Scaling(form, 1)), run)
    assert bytes(run[0].tolist()) == bytes.fromhex(published[1])


@pytest.mark.parametrize(("form", "most"), [("float8_e4m3", 0.028), ("int8", 0.011)])
def test_smaller_groups_are_no_worse_on_normal_numbers(form: str, most: float) -> None:
    numbers = torch.randn(8, 512, 128, generator=torch.manual_seed(3))
    errors = []
    for tokens in (512, 64, 16):
        values, scales = quantise(numbers, Scaling(form, tokens))
        wrong = dequantise(values, scales, torch.float32) - numbers
        errors.append(float(wrong.square().mean().sqrt() / numbers.square().mean().sqrt()))
    assert max(errors) < most
    if form == "int8":
        assert errors == sorted(errors, reverse=True)


def _wrong() -> list[tuple[Any, str]]:
    half, scaling = torch.zeros(4, 6, dtype=torch.float16), Scaling("int8", 2)
    values, scales = quantise(half, scaling)
    return [
        (lambda: Scaling("float8_e5m2", 2), "quantised to float8_e4m3 or int8, not"),
        (lambda: Scaling("int8", 0), "a scale for 0 tokens"),
        (lambda: quantise(half.double(), scaling), "not torch.float64"),
        (lambda: quantise(half[:3], scaling), "does not divide 3"),
        (lambda: quantise(half[:0], scaling), "does not divide 0"),
        (lambda: dequantise(half, scales, torch.float16), "no quantised part"),
        (lambda: dequantise(values, scales.double(), torch.float16), "no quantised part"),
        (lambda: dequantise(values, scales, torch.int8), "not torch.int8"),
        (lambda: dequantise(values, scales[:0], torch.float16), "for values"),
        (lambda: dequantise(values[:3], scales, torch.float16), "for values"),
        (lambda: dequantise(values[None], scales, torch.float16), "for values"),
        (lambda: unpack(torch.zeros(2, 31, dtype=torch.uint8), 6, scaling), "no runs of groups"),
        (lambda: unpack(torch.zeros(2, 32), 6, scaling), "no runs of groups of 16"),
    ]


@pytest.mark.parametrize(("call", "why"), _wrong())
def test_what_does_not_fit_is_refused(call: Any, why: str) -> None:
    with pytest.raises(LayoutError, match=why):
        call()
