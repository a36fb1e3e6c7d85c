"""How long the prefill of one prompt takes on the GPUs of an instance, by the latency profile."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

if TYPE_CHECKING:
    from tiffin.conductor.cost.latency_profiles import Profile


class PrefillWork(NamedTuple):
    """Seconds. `occupied_s`: until the instance can begin with the next prompt; `done_s`: until the
    first token is there; `gpu_s`: of all its nodes together."""

    occupied_s: float
    done_s: float
    gpu_s: float


def prefill_work(
    profile: Profile, tokens: int, cached_tokens: int, chunk_tokens: int, stages: int
) -> PrefillWork:
    """Of `tokens`, the first `cached_tokens` of which are there, in chunks of `chunk_tokens` (0:
    one) by a pipeline of `stages` nodes.

    A chunk from q to r takes c0 + c1 (r - q) + c2 (r² - q²), and each node a `stages`-th of it. The
    first node goes on with the next chunk, or the next prompt, while the others finish this one
    (Mooncake, FAST '25, section 4.1: chunked pipeline parallelism).
    """
    c0, c1, c2 = profile.prefill
    size = chunk_tokens or tokens
    begins = range(cached_tokens, tokens, size)
    # The sum over all chunks telescopes.
    gpu_s = len(begins) * c0 + c1 * (tokens - cached_tokens)
    gpu_s += c2 * (tokens * tokens - cached_tokens * cached_tokens)
    last = begins[-1]
    last_s = c0 + c1 * (tokens - last) + c2 * (tokens * tokens - last * last)
    occupied_s = gpu_s / stages
    return PrefillWork(occupied_s, occupied_s + last_s * (stages - 1) / stages, gpu_s)


def pipelined(profile: Profile, stages: int) -> Profile:
    """The profile of an instance of `stages` nodes, for a conductor that knows of no pipelines:
    what grows with the prompt takes a `stages`-th."""
    c0, c1, c2 = profile.prefill
    return msgspec.structs.replace(profile, prefill=(c0, c1 / stages, c2 / stages))


def slowed(profile: Profile, factor: float, decode_factor: float | None = None) -> Profile:
    """The profile of hardware that takes `factor` times as long; for decode steps `decode_factor`,
    if it is given."""
    c0, c1, c2 = (factor * seconds for seconds in profile.prefill)
    more = factor if decode_factor is None else decode_factor
    d0, d1, d2 = (more * seconds for seconds in profile.decode)
    return msgspec.structs.replace(profile, prefill=(c0, c1, c2), decode=(d0, d1, d2))
