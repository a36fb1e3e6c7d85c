"""Numbers as one byte and a shared scale: the arithmetic of quantised blocks.

A group of numbers (consecutive tokens of one head) shares a float32 scale; a number is its byte
times that scale. The kernels (quant/kernel.py) and their reference in torch (quant/reference.py)
compute the same bits:

    amax    = the group's largest magnitude, in float32
    scale   = min(max(amax / limit, SCALE_MIN), scale_max);  0 if amax is 0
    byte    = round(x * (1 / scale)), to the nearest, ties to even, saturating at ±limit
    x'      = float32(byte) * scale, rounded once more to the target's dtype

Every operation is one of IEEE 754 float32, rounded to nearest; nothing is fused. `limit` is the
format's largest number: 448 (OCP OFP8 E4M3, as `float8_e4m3fn`) or 127 (int8 without -128, so that
both signs reach equally far).

- A group with a NaN or an infinity gets scale NaN and bytes 0: all of it reads as NaN. Plausible
  numbers instead could not be distinguished from right ones.
- A group of zeros gets scale 0.
- SCALE_MIN, the smallest normal float32, keeps 1 / scale finite and scales exact where a GPU might
  flush subnormals; it matters for groups below 1e-35 only. `scale_max` keeps limit * scale finite.

Error of a finite number x of a group with this scale, besides the rounding to the target's dtype:

    float8_e4m3   |x - x'| <= max(|x| / 16, scale / 1024) * (1 + 2**-18)
    int8          |x - x'| <= scale * (1/2 + 2**-16)

docs/quantisation.md derives both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ..errors import LayoutError

SCALE_BYTES: Final = 4
SCALE_MIN: Final = 2.0**-126
FLOAT32_MAX: Final = (2.0 - 2.0**-23) * 2.0**127


@dataclass(frozen=True, slots=True)
class ByteFormat:
    """A dtype of one byte that values are rounded to. `scale_max`: the largest float32 whose
    product with `limit` does not exceed the range of float32."""

    name: str
    limit: float
    scale_max: float


FORMATS: Final = {
    # 448 * scale_max is FLOAT32_MAX itself, rounded
    "float8_e4m3": ByteFormat("float8_e4m3", 448.0, float.fromhex("0x1.2492480000000p+119")),
    "int8": ByteFormat("int8", 127.0, float.fromhex("0x1.0204060000000p+121")),
}


@dataclass(frozen=True, slots=True)
class Scaling:
    """How a part is quantised: the format of its bytes, and how many tokens of a head share a
    scale.

    Raises LayoutError for an unknown format.
    """

    format: str
    scale_tokens: int

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise LayoutError(
                f"values are quantised to {' or '.join(FORMATS)}, not {self.format!r}"
            )
        if self.scale_tokens < 1:
            raise LayoutError(f"a scale for {self.scale_tokens} tokens")

    @property
    def byte_format(self) -> ByteFormat:
        return FORMATS[self.format]
