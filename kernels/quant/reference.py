"""Quantisation in torch, on any device: tests compare the kernels with it, and CPUs run it.

The arithmetic is that of scaling.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from ..errors import LayoutError
from .scaling import SCALE_BYTES, SCALE_MIN

if TYPE_CHECKING:
    from .scaling import ByteFormat, Scaling

_STORED: Final = {"float8_e4m3": torch.float8_e4m3fn, "int8": torch.int8}
# The dtypes of numbers before quantising and after dequantising.
NUMBERS: Final = (torch.bfloat16, torch.float16, torch.float32)


def quantise(numbers: Any, scaling: Scaling) -> tuple[Any, Any]:
    """Bytes and scales of `numbers` [..., tokens, dim], bfloat16, float16 or float32.

    Returns the values [..., tokens, dim] as float8_e4m3fn or int8, and the scales
    [..., tokens / scale_tokens], float32. Raises LayoutError for another dtype and for tokens that
    `scale_tokens` does not divide.
    """
    _check_dtype(numbers.dtype)
    tokens = int(numbers.shape[-2])
    if not tokens or tokens % scaling.scale_tokens:
        raise LayoutError(f"a scale for {scaling.scale_tokens} tokens does not divide {tokens}")
    grouped = numbers.unflatten(-2, (-1, scaling.scale_tokens)).to(torch.float32)
    form = scaling.byte_format
    scales = _scales(grouped.abs().amax(dim=(-2, -1)), form)
    # A tensor by a tensor: torch's CUDA kernels divide by a plain number as a product with its
    # inverse.
    inverse = torch.where(scales == 0, 0, torch.ones_like(scales) / scales)
    scaled = (grouped * inverse[..., None, None]).nan_to_num_(nan=0.0)  # a NaN spoils its group
    scaled.clamp_(-form.limit, form.limit)
    if form.name == "int8":
        scaled = scaled.round_()  # ties to even; the cast alone would truncate
    return scaled.to(_STORED[form.name]).flatten(-3, -2), scales


def dequantise(values: Any, scales: Any, dtype: Any) -> Any:
    """The numbers [..., tokens, dim], as `dtype`, of what `quantise` gave.

    `values`: float8_e4m3fn or int8 [..., tokens, dim]; `scales`: float32 [..., groups],
    one for each tokens / groups tokens. Raises LayoutError for anything else.
    """
    if values.dtype not in _STORED.values() or scales.dtype != torch.float32:
        raise LayoutError(f"{values.dtype} with scales of {scales.dtype} is no quantised part")
    _check_dtype(dtype)
    groups = scales.shape[-1]
    if values.shape[:-2] != scales.shape[:-1] or not groups or values.shape[-2] % groups:
        raise LayoutError(f"scales {tuple(scales.shape)} for values {tuple(values.shape)}")
    grouped = _widened(values.unflatten(-2, (groups, -1)))
    return grouped.mul_(scales[..., None, None]).flatten(-3, -2).to(dtype)


def pack(values: Any, scales: Any, out: Any) -> None:
    """Write heads in a block's format: `out` uint8 [..., run_bytes], one run per head, each its
    values followed by its scales."""
    stored = values.flatten(-2).view(torch.uint8)
    out[..., : stored.shape[-1]] = stored
    out[..., stored.shape[-1] :] = scales.contiguous().view(torch.uint8)


def unpack(runs: Any, dim: int, scaling: Scaling) -> tuple[Any, Any]:
    """The values [..., tokens, dim] and scales [..., groups] of runs, uint8 [..., run_bytes].

    Raises LayoutError if runs of this dim and scaling can't have that length.
    """
    group_bytes = scaling.scale_tokens * dim + SCALE_BYTES
    groups, over = divmod(int(runs.shape[-1]), group_bytes)
    if over or not groups or runs.dtype != torch.uint8:
        raise LayoutError(
            f"{tuple(runs.shape)} of {runs.dtype} are no runs of groups of {group_bytes}"
        )
    value_bytes = groups * scaling.scale_tokens * dim
    values = runs[..., :value_bytes].unflatten(-1, (-1, dim)).view(_STORED[scaling.format])
    # contiguous: a run may begin at any byte, a float32 tensor may not
    return values, runs[..., value_bytes:].contiguous().view(torch.float32)


def _check_dtype(dtype: Any) -> None:
    if dtype not in NUMBERS:
        raise LayoutError(f"numbers are bfloat16, float16 or float32, not {dtype}")


def _widened(values: Any) -> Any:
    """int8 or float8_e4m3fn as float32, always a copy."""
    if values.dtype == torch.int8:
        return values.to(torch.float32)
    # torch's own conversion takes ten times as long on a CPU. The same bits are 2**-8 times the
    # value in float16: one exponent bit more, a bias higher by 8. Bit 14 is a copy of the sign.
    half = values.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~(1 << 14))
    wide = half.view(torch.float16).to(torch.float32).mul_(256)
    nan = values.view(torch.int8).bitwise_and(0x7F) == 0x7F
    return wide.masked_fill_(nan, torch.nan) if bool(nan.any()) else wide


def _scales(amax: Any, form: ByteFormat) -> Any:
    scales = (amax / torch.full_like(amax, form.limit)).clamp(SCALE_MIN, form.scale_max)
    scales = torch.where(amax == 0, 0, scales)
    return torch.where(amax.isfinite(), scales, torch.nan)
