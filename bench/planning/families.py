"""Which latency profiles an instance may have: one model on one kind of GPU, at several degrees of
tensor parallelism."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from tiffin.conductor.cost import latency_profiles
from tiffin.conductor.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tiffin.conductor.cost.latency_profiles import Profile

_DEGREE = re.compile(r"\.tp\d+(?=\.|$)")


def family(texts: Iterable[str]) -> tuple[Profile, ...]:
    """The profiles that are meant, by their degree of tensor parallelism.

    Each text is a name, several with commas between, a name without its `.tpN` (all degrees), or a
    pattern with `*`. Raises InvalidRequest if nothing is meant, or if they are not one model on one
    kind of GPU.
    """
    names = [name for text in texts for part in text.split(",") for name in _named(part.strip())]
    profiles = [latency_profiles.load(name) for name in dict.fromkeys(names)]
    kinds = {(one.model, _gpu(one)) for one in profiles}
    if len(kinds) > 1:
        found = "; ".join(sorted(f"{model} on {gpu}" for model, gpu in kinds))
        raise InvalidRequest(f"profiles of one model on one kind of GPU are planned with: {found}")
    return tuple(sorted(profiles, key=lambda one: one.tensor_parallel))


def _named(text: str) -> list[str]:
    known = latency_profiles.names()
    meant = [
        name
        for name in known
        if name == text or fnmatchcase(name, text) or _DEGREE.sub("", name) == text
    ]
    if not meant:
        raise InvalidRequest(f"no profile {text!r}; there are {', '.join(known)}")
    return meant


def _gpu(profile: Profile) -> str:
    """The hardware without the number of GPUs."""
    return profile.hardware.partition(" x ")[2] or profile.hardware
