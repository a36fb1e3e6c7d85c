"""Latency profiles: the speed of a model on some hardware, as six coefficients. Validated data.

    prefill of n tokens, p of them cached:  c0 + c1 (n - p) + c2 (n² - p²)       seconds
    one step of decoding:                   d0 + d1 batch + d2 context           seconds

The profiles that ship with the package are in `profiles/`, one JSON file each, with their source
and some of the points they were fitted to; `profiles/README.md` has sources and licences. `fit`
makes a custom profile from measurements, `from_file` and `from_folder` read them:
`docs/conductor/cost.md`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np
from msgspec import Meta

from tiffin.kvstore.sizes import format_bytes

from ..errors import InvalidRequest
from .latency_model import decode_step_s, prefill_s
from .profile_fit import fit_decode, fit_prefill, outliers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from .profile_fit import Point

# The default profile: the one that was measured on a real service, not composed.
DEFAULT = "llama-3-70b.a800.tp8.mooncake"

# A profile with 64 points of each kind has 8 KiB.
FILE_BYTES_MAX = 64 << 10
CHECKS_MAX = 64
# Limit of one folder. A company has some dozens of combinations of model and hardware.
PROFILES_MAX = 1024

# Upper bounds of coefficients: a minute for the fixed part of a prompt or a step, a second for a
# token. Larger numbers are milliseconds entered as seconds.
_FIXED_S_MAX, _TOKEN_S_MAX, _PAIR_S_MAX, _REQUEST_S_MAX = 60.0, 1.0, 1e-3, 10.0
_TOKENS_MAX = 1 << 31

Name = Annotated[str, Meta(max_length=100, pattern=r"^[a-z0-9][a-z0-9._-]*$")]
Text = Annotated[str, Meta(max_length=1000)]
Fixed = Annotated[float, Meta(ge=0, le=_FIXED_S_MAX)]
PerToken = Annotated[float, Meta(gt=0, le=_TOKEN_S_MAX)]
PerPair = Annotated[float, Meta(ge=0, le=_PAIR_S_MAX)]
PerRequest = Annotated[float, Meta(ge=0, le=_REQUEST_S_MAX)]
PerContext = Annotated[float, Meta(ge=0, le=_TOKEN_S_MAX)]
Step = Annotated[float, Meta(gt=0, le=_FIXED_S_MAX)]
Count = Annotated[int, Meta(ge=0, le=_TOKENS_MAX)]
Seconds = Annotated[float, Meta(gt=0, le=1e6)]
Rows = Annotated[tuple[tuple[Count, Count, Seconds], ...], Meta(max_length=CHECKS_MAX)]


class Checks(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Measured points: prefill (n, p, seconds), decode (batch, context, seconds)."""

    prefill: Rows = ()
    decode: Rows = ()


@dataclass(frozen=True, slots=True)
class Error:
    """Relative errors of a profile's predictions for measured points: 0.04 is 4%."""

    mean: float
    max: float


class Fit(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The errors of the coefficients over the points of one kind that they were fitted to. Beside
    these `points`, `left_out` were outliers."""

    points: Count
    left_out: Count = 0
    error_mean: Annotated[float, Meta(ge=0)]
    error_max: Annotated[float, Meta(ge=0)]


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One model on one kind of instance.

    `prefill` is (c0, c1, c2), `decode` (d0, d1, d2): seconds, per token, per pair of tokens, per
    request, per token of context. In JSON they are `prefill_s` and `decode_s`. `tokens_max` is the
    longest prompt that was measured; beyond it the formula is an extrapolation. `source` is the
    origin of the numbers, `licence` their licence.
    """

    name: Name
    model: Text
    hardware: Text
    engine: Text = ""
    tensor_parallel: Annotated[int, Meta(ge=1, le=4096)] = 1
    source: Text
    licence: Text
    prefill: tuple[Fixed, PerToken, PerPair] = msgspec.field(name="prefill_s")
    decode: tuple[Step, PerRequest, PerContext] = msgspec.field(name="decode_s")
    tokens_max: Count = _TOKENS_MAX
    prefill_fit: Fit | None = None
    decode_fit: Fit | None = None
    checks: Checks = Checks()

    @property
    def latency(self) -> tuple[float, float, float, float, float, float]:
        """(c0, c1, c2, d0, d1, d2), in the order of the cluster's columns."""
        return (*self.prefill, *self.decode)

    def prefill_error(self, points: Sequence[Point]) -> Error:
        """The errors of this profile against rows of (n, p, seconds)."""
        return _error(self.prefill_s_of(points), np.asarray(points, np.float64)[:, 2])

    def prefill_s_of(self, points: Sequence[Point]) -> NDArray[np.float64]:
        """The predicted seconds of rows of (n, p, seconds)."""
        table = np.asarray(points, np.float64)
        return np.asarray(prefill_s(*self.prefill, table[:, 0], table[:, 1]))

    def decode_error(self, points: Sequence[Point]) -> Error:
        """The errors of this profile against rows of (batch, context, seconds)."""
        return _error(self.decode_s_of(points), np.asarray(points, np.float64)[:, 2])

    def decode_s_of(self, points: Sequence[Point]) -> NDArray[np.float64]:
        """The predicted seconds of rows of (batch, context, seconds)."""
        table = np.asarray(points, np.float64)
        return np.asarray(decode_step_s(*self.decode, table[:, 0], table[:, 1]))

    def to_json(self) -> bytes:
        """The content of a profile file: JSON, indented by two spaces per level."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"


def names() -> list[str]:
    """The names of all profiles that ship with the package, sorted."""
    return sorted(_shipped())


def load(name: str) -> Profile:
    """Load a profile that ships with the package. Raises InvalidRequest, with the names of those,
    for an unknown name."""
    paths = _shipped()
    if name not in paths:
        raise InvalidRequest(f"no latency profile {name!r}; there are {', '.join(sorted(paths))}")
    return _load(name)


def from_file(path: str | Path) -> Profile:
    """Read a custom profile. Raises InvalidRequest, naming the file and the field."""
    try:
        with open(path, "rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise InvalidRequest(f"profile {path}: {error.strerror}") from error
    return from_json(data, str(path))


def from_folder(path: str | Path) -> dict[str, Profile]:
    """Read every `*.json` of a folder. Returns profiles by name. Raises InvalidRequest if `path` is
    not a folder or has more than `PROFILES_MAX` files, for the first invalid file, and if two
    profiles have the same name."""
    if not Path(path).is_dir():
        raise InvalidRequest(f"profiles {path}: not a folder")
    files = sorted(Path(path).glob("*.json"))
    if len(files) > PROFILES_MAX:
        raise InvalidRequest(f"profiles {path}: {len(files)} files; {PROFILES_MAX} is the limit")
    found: dict[str, Profile] = {}
    for file in files:
        profile = from_file(file)
        if profile.name in found:
            raise InvalidRequest(f"profile {file}: name: {profile.name!r} is another file's too")
        found[profile.name] = profile
    return found


def own_or_shipped(folder: Path | None) -> Callable[[str], Profile]:
    """A function that finds profiles by name: in a folder, else among those that ship with the
    package. Raises InvalidRequest as `from_folder` does."""
    own = from_folder(folder) if folder is not None else {}
    return lambda name: own[name] if name in own else load(name)


def from_json(data: bytes, where: str = "<bytes>") -> Profile:
    """Decode a profile from a file's bytes. Raises InvalidRequest, naming `where` and the field."""
    if len(data) > FILE_BYTES_MAX:
        raise InvalidRequest(f"profile {where}: more than {format_bytes(FILE_BYTES_MAX)}")
    try:
        return msgspec.json.decode(data, type=Profile)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"profile {where}: {error}; {_HINT}") from error


def validate(profile: Profile, where: str = "") -> Profile:
    """Return the profile as read back from its JSON. Raises InvalidRequest if it is not valid: a
    profile made in Python is not validated when it is made."""
    where = where or profile.name
    for field in ("prefill", "decode"):
        if not all(math.isfinite(value) for value in getattr(profile, field)):
            raise InvalidRequest(
                f"profile {where}: {field}_s: every coefficient is a finite number"
            )
    return from_json(msgspec.json.encode(profile), where)


def fit(
    name: str,
    prefill: Sequence[Point],
    decode: Sequence[Point],
    *,
    model: str = "",
    hardware: str = "",
    engine: str = "",
    tensor_parallel: int = 1,
    source: str = "measured",
    licence: str = "",
    checks: Checks | None = None,
) -> Profile:
    """Fit a profile to measurements: rows of (n, p, seconds) of prefills, n prompt tokens of which
    p were cached, and of (batch, context, seconds) of decode steps, context tokens together.

    Least squares of relative errors without outliers, no coefficient negative. Raises
    InvalidRequest for invalid rows, for rows from which the coefficients can not be told apart, and
    if the best coefficients are outside the limits of a profile.
    """
    made = Profile(
        name=name,
        model=model,
        hardware=hardware,
        engine=engine,
        tensor_parallel=tensor_parallel,
        source=source,
        licence=licence,
        prefill=fit_prefill(prefill),
        decode=fit_decode(decode),
        tokens_max=int(max(point[0] for point in prefill)),
        checks=checks or Checks(),
    )
    fits = [
        _fit_of(predicted_s, np.asarray(points, np.float64)[:, 2])
        for predicted_s, points in (
            (made.prefill_s_of(prefill), prefill),
            (made.decode_s_of(decode), decode),
        )
    ]
    return validate(msgspec.structs.replace(made, prefill_fit=fits[0], decode_fit=fits[1]))


_HINT = "docs/conductor/cost.md has the fields, their units and limits"


def _fit_of(predicted_s: NDArray[np.float64], seconds: NDArray[np.float64]) -> Fit:
    kept = ~outliers(predicted_s, seconds)
    error, count = _error(predicted_s[kept], seconds[kept]), int(kept.sum())
    return Fit(points=count, left_out=len(kept) - count, error_mean=error.mean, error_max=error.max)


def _error(predicted_s: NDArray[np.float64], seconds: NDArray[np.float64]) -> Error:
    relative = np.abs(predicted_s / seconds - 1)
    return Error(float(relative.mean()), float(relative.max()))


@cache
def _shipped() -> dict[str, str]:
    """File names of the profiles that ship with the package, by profile name."""
    folder = resources.files("tiffin.conductor.cost") / "profiles"
    found = (entry.name for entry in folder.iterdir())
    return {name.removesuffix(".json"): name for name in found if name.endswith(".json")}


@cache
def _load(name: str) -> Profile:
    file = _shipped()[name]
    data = (resources.files("tiffin.conductor.cost") / "profiles" / file).read_bytes()
    profile = from_json(data, file)
    if profile.name != name:
        raise InvalidRequest(f"profile {file}: name: is {profile.name!r}, the file's is {name!r}")
    return profile
