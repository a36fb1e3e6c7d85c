"""Latency profiles: how fast a model runs on some hardware, as six coefficients. Data, checked.

    prefill of n tokens, p of them cached:  c0 + c1 (n - p) + c2 (n² - p²)       seconds
    one step of decoding:                   d0 + d1 batch + d2 context           seconds

Those that ship lie in `profiles/`, one JSON file each, with where they come from and some of the
points they were fitted to; `profiles/README.md` has sources and licences. Your own are made by
`fit` from what you measured, and read by `from_file` and `from_folder`: `docs/conductor/cost.md`.
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

from .cost import decode_step_s, prefill_s
from .errors import InvalidRequest
from .fitting import fit_decode, fit_prefill

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .fitting import Point

# Used if nobody says which. The one that was measured on a real service, and not composed.
DEFAULT = "llama-3-70b.a800.tp8.mooncake"

# A profile with 64 points of each kind has 8 KiB.
FILE_BYTES_MAX = 64 << 10
CHECKS_MAX = 64
# One folder's. There are some dozens of models times hardware in one company.
PROFILES_MAX = 1024

# The slowest that is believed: of a prompt's or a step's fixed part a minute, of a token a second.
# Larger numbers are milliseconds that were taken for seconds.
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
    """Points that were measured: prefill (n, p, seconds), decode (batch, context, seconds)."""

    prefill: Rows = ()
    decode: Rows = ()


@dataclass(frozen=True, slots=True)
class Error:
    """Relative errors of a profile's predictions, of measured points: 0.04 is 4%."""

    mean: float
    max: float


class Fit(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How well the coefficients meet all points of one kind that they were fitted to."""

    points: Count
    error_mean: Annotated[float, Meta(ge=0)]
    error_max: Annotated[float, Meta(ge=0)]


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One model on one kind of instance.

    `prefill` is (c0, c1, c2), `decode` (d0, d1, d2): seconds, per token, per pair of tokens, per
    request, per token of context. In JSON they are `prefill_s` and `decode_s`. `tokens_max` is the
    longest prompt that was measured; beyond it the formula is a guess. `source` says where the
    numbers come from, `licence` under which licence.
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
        """(c0, c1, c2, d0, d1, d2), as the cluster's columns take them."""
        return (*self.prefill, *self.decode)

    def prefill_error(self, points: Sequence[Point]) -> Error:
        """How far this profile is from rows of (n, p, seconds)."""
        table = np.asarray(points, np.float64)
        return _error(prefill_s(*self.prefill, table[:, 0], table[:, 1]), table[:, 2])

    def decode_error(self, points: Sequence[Point]) -> Error:
        """How far this profile is from rows of (batch, context, seconds)."""
        table = np.asarray(points, np.float64)
        return _error(decode_step_s(*self.decode, table[:, 0], table[:, 1]), table[:, 2])

    def to_json(self) -> bytes:
        """As in a file, two spaces per level."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"


def names() -> list[str]:
    """All profiles that ship, in order."""
    return sorted(_shipped())


def load(name: str) -> Profile:
    """One that ships. Raises InvalidRequest, with those that there are, if there is none such."""
    paths = _shipped()
    if name not in paths:
        raise InvalidRequest(f"no latency profile {name!r}; there are {', '.join(sorted(paths))}")
    return _load(name)


def from_file(path: str | Path) -> Profile:
    """A profile of your own. Raises InvalidRequest, naming the file and the field."""
    try:
        with open(path, "rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise InvalidRequest(f"profile {path}: {error.strerror}") from error
    return from_json(data, str(path))


def from_folder(path: str | Path) -> dict[str, Profile]:
    """Every `*.json` of a folder, by name. Raises InvalidRequest for the first one that is wrong,
    and if two have the same name."""
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
    """Finds profiles by name: those of a folder, and those that ship where it has none of that
    name. Raises InvalidRequest as `from_folder` does."""
    own = from_folder(folder) if folder is not None else {}
    return lambda name: own[name] if name in own else load(name)


def from_json(data: bytes, where: str = "<bytes>") -> Profile:
    """A profile from a file's bytes. Raises InvalidRequest, naming `where` and the field."""
    if len(data) > FILE_BYTES_MAX:
        raise InvalidRequest(f"profile {where}: more than {FILE_BYTES_MAX} bytes")
    try:
        return msgspec.json.decode(data, type=Profile)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"profile {where}: {error}; {_HINT}") from error


def validate(profile: Profile, where: str = "") -> Profile:
    """The same profile, if it could be read from a file. Raises InvalidRequest if not: a profile
    made in Python was not checked when it was made."""
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
    """A profile from measurements: rows of (n, p, seconds) of prefills, n prompt tokens of which p
    were cached, and of (batch, context, seconds) of decode steps, context tokens together.

    Least squares of relative errors, no coefficient negative. Raises InvalidRequest for rows that
    make no sense, for rows that do not tell the coefficients apart, and if the best coefficients
    are none that a profile may have.
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
    errors = made.prefill_error(prefill), made.decode_error(decode)
    fits = [
        Fit(points=len(points), error_mean=error.mean, error_max=error.max)
        for points, error in zip((prefill, decode), errors, strict=True)
    ]
    return validate(msgspec.structs.replace(made, prefill_fit=fits[0], decode_fit=fits[1]))


_HINT = "docs/conductor/cost.md has the fields, their units and limits"


def _error(
    predicted_s: np.typing.NDArray[np.float64], seconds: np.typing.NDArray[np.float64]
) -> Error:
    relative = np.abs(predicted_s / seconds - 1)
    return Error(float(relative.mean()), float(relative.max()))


@cache
def _shipped() -> dict[str, str]:
    """File names by profile names."""
    folder = resources.files(__package__ or "tiffin.conductor") / "profiles"
    found = (entry.name for entry in folder.iterdir())
    return {name.removesuffix(".json"): name for name in found if name.endswith(".json")}


@cache
def _load(name: str) -> Profile:
    file = _shipped()[name]
    data = (resources.files(__package__ or "tiffin.conductor") / "profiles" / file).read_bytes()
    profile = from_json(data, file)
    if profile.name != name:
        raise InvalidRequest(f"profile {file}: name: is {profile.name!r}, the file's is {name!r}")
    return profile
