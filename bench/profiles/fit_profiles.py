"""Makes the latency profiles that ship with the conductor, from published tables of measurements.

    python -m tiffin.bench.profiles.fit_profiles FOLDER conductor/cost/profiles

`FOLDER` has `aiconfigurator/`, `distserve/` and `splitwise/`, as
`conductor/cost/profiles/README.md` names them; the tables themselves are not part of Tiffin.
Mooncake's points are in this file: they are printed in a paper.
"""

from __future__ import annotations

import csv
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tiffin.conductor.cost import latency_profiles
from tiffin.conductor.cost.latency_profiles import Checks, Fit, Profile
from tiffin.conductor.cost.profile_fit import fit_prefill

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiffin.conductor.cost.profile_fit import Point

# The range that matters for scheduling: prompts of at least a block, contexts that fit into HBM.
# Below it, times are those of kernel launches, and have steps.
TOKENS_MIN = 512
CONTEXT_MAX = 2_000_000
CHECKS = 6

_HARDWARE = {
    "a100_sxm": "A100 SXM 80 GB",
    "h100_sxm": "H100 SXM 80 GB",
    "h200_sxm": "H200 SXM 141 GB",
    "b200_sxm": "B200 SXM 192 GB",
    "a100-80gb": "A100 80 GB",
    "h100-80gb": "H100 80 GB",
}
_ENGINE = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM"}

# Mooncake, FAST '25, figure 14: LLaMA3-70B (dummy) on 8 A800 with vLLM 0.5.1; seconds.
_MOONCAKE_TOKENS = (8192, 16384, 32768, 65536, 131072)
_MOONCAKE_COLD = (1.003, 2.057, 4.482, 10.593, 27.527)
_MOONCAKE_CACHED = (0.135, 0.226, 0.407, 0.881, 2.329)  # 95% of the tokens
_MOONCAKE_128_STEPS = (3.396, 3.435, 3.523, 3.661, 3.941)
# The figure has batches of one only. Figure 2 of arXiv 2407.00079 has up to 16 requests of 8k:
# 0.44 ms more each, of which their context takes 0.30.
_MOONCAKE_DECODE = (0.0262, 0.00014, 3.6e-8)


def main(source: Path, target: Path) -> None:
    """Write all profiles, and print how well they fit."""
    target.mkdir(parents=True, exist_ok=True)
    for profile in every(source):
        latency_profiles.validate(profile)
        (target / f"{profile.name}.json").write_bytes(profile.to_json())
        print(row(profile))


def row(profile: Profile) -> str:
    """One line of the table in docs/conductor/cost.md."""
    milli = [1e3 * profile.prefill[0], 1e3 * profile.prefill[1], 1e9 * profile.prefill[2]]
    milli += [1e3 * profile.decode[0], 1e3 * profile.decode[1], 1e6 * profile.decode[2]]
    errors = [
        f"{fit.error_mean:.1%} / {fit.error_max:.0%}" if fit else "–"
        for fit in (profile.prefill_fit, profile.decode_fit)
    ]
    numbers = " | ".join(f"{value:.4g}" for value in milli)
    return f"| `{profile.name}` | {numbers} | {errors[0]} | {errors[1]} |"


def every(source: Path) -> Iterator[Profile]:
    """All profiles, those of one source after another."""
    yield mooncake()
    for prefill in sorted((source / "aiconfigurator").glob("*.prefill.csv")):
        yield aiconfigurator(prefill)
    yield from distserve(source / "distserve" / "profiler-a100-80g.distserve.json")
    yield from splitwise(source / "splitwise" / "perf_model.csv")


def mooncake() -> Profile:
    """The profile of the service for which the KVCache-centric policy was made."""
    cold = zip(_MOONCAKE_TOKENS, (0,) * 5, _MOONCAKE_COLD, strict=True)
    cached_tokens = (int(0.95 * n) for n in _MOONCAKE_TOKENS)
    cached = zip(_MOONCAKE_TOKENS, cached_tokens, _MOONCAKE_CACHED, strict=True)
    prefill: list[Point] = [*cold, *cached]
    # The context grows by 128 tokens during a measurement; its mean is used.
    decode: list[Point] = [
        (1, n + 64, seconds / 128)
        for n, seconds in zip(_MOONCAKE_TOKENS, _MOONCAKE_128_STEPS, strict=True)
    ]
    base = Profile(
        name=latency_profiles.DEFAULT,
        model="Llama-3-70B",
        hardware="8 x A800 SXM 80 GB",
        engine="vLLM 0.5.1",
        tensor_parallel=8,
        source="R. Qin et al., Mooncake, FAST '25, figure 14; d1 from arXiv 2407.00079, figure 2",
        licence="figures of a paper, facts",
        prefill=fit_prefill(prefill),
        decode=_MOONCAKE_DECODE,
        tokens_max=max(_MOONCAKE_TOKENS),
    )
    return judged(base, prefill, decode)


def aiconfigurator(path: Path) -> Profile:
    """Two tables of one sweep: prefill milliseconds over (isl, prefix), decode over (batch,
    context of each request)."""
    model, hardware, engine, parallel = _parts(path.name.removesuffix(".prefill.csv"))
    prefill: list[Point] = [
        (float(line["isl"]), float(line["prefix"]), float(line["prefill_ms"]) / 1e3)
        for line in _lines(path)
        if int(line["isl"]) >= TOKENS_MIN
    ]
    table = _lines(path.with_name(path.name.replace(".prefill.", ".decode.")))
    decode: list[Point] = []
    for line in table:
        batch, each = int(line["batch"]), int(line["ctx_per_seq"])
        if batch * each <= CONTEXT_MAX:
            decode.append((batch, batch * each, float(line["decode_step_ms"]) / 1e3))
    backend, _, version = engine.partition("-")
    return judged(
        latency_profiles.fit(
            f"{model.lower()}.{hardware.split('_')[0]}.tp{parallel}.{backend}",
            prefill,
            decode,
            model=model,
            hardware=f"{parallel} x {_HARDWARE[hardware]}",
            engine=f"{_ENGINE[backend]} {version}",
            tensor_parallel=parallel,
            source="aiconfigurator 0.12.0 (NVIDIA), bf16, swept by operator tables",
            licence="Apache-2.0",
        ),
        prefill,
        decode,
    )


def distserve(path: Path) -> Iterator[Profile]:
    """Coefficients of its simulator: prefill a + b n + c n², and decode a + b context + c batch in
    two regimes of the batch; one fit covers both."""
    for model, parallels in json.loads(path.read_text(encoding="utf-8")).items():
        for parallel, one in parallels.items():
            a, b, c = one["prefill"]
            prefill: list[Point] = [
                (n, 0, (a + b * n + c * n * n) / 1e3) for n in (128, 256, 512, 1024, 1536, 2048)
            ]
            decode: list[Point] = []
            for batch in (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256):
                small = batch < one["decoding_large_small_bs_threshold"]
                d, of_context, of_batch = one["decoding_smallbs" if small else "decoding_largebs"]
                for each in (128, 512, 1024, 2048):
                    step_ms = d + of_context * batch * each + of_batch * batch
                    decode.append((batch, batch * each, step_ms / 1e3))
            short = model.removeprefix("facebook/")
            fitted = latency_profiles.fit(
                f"{short}.a100.tp{parallel}.distserve",
                prefill,
                decode,
                model=short.upper(),
                hardware=f"{parallel} x A100 80 GB",
                engine="DistServe (SwiftTransformer)",
                tensor_parallel=int(parallel),
                source="LLMServe/DistServe, simdistserve, profiler-a100-80g.distserve.json",
                licence="Apache-2.0",
            )
            yield judged(fitted, prefill, decode)


def splitwise(path: Path) -> Iterator[Profile]:
    """Medians of its measurements: prompts one at a time, tokens in batches of 512-token prompts
    (and of one longer prompt)."""
    prompts: dict[tuple[str, str, str], dict[int, list[float]]] = defaultdict(dict)
    steps: dict[tuple[str, str, str], dict[tuple[int, int], list[float]]] = defaultdict(dict)
    for line in _lines(path):
        # Left out: capped power; and two GPUs, whose memory has no room for the larger batches, so
        # that their times are not comparable (the table gives 64 prompts less time than 8).
        if line["hardware"] not in _HARDWARE or line["tensor_parallel"] == "2":
            continue
        key = line["model"], line["hardware"], line["tensor_parallel"]
        size, batch = int(line["prompt_size"]), int(line["batch_size"])
        if batch == 1:
            prompts[key].setdefault(size, []).append(float(line["prompt_time"]) / 1e3)
        context = batch * (size + int(line["token_size"]) // 2)
        steps[key].setdefault((batch, context), []).append(float(line["token_time"]) / 1e3)
    for (model, hardware, parallel), sizes in prompts.items():
        prefill: list[Point] = [(n, 0, statistics.median(all_s)) for n, all_s in sizes.items()]
        measured = steps[model, hardware, parallel].items()
        decode: list[Point] = [(b, context, statistics.median(s)) for (b, context), s in measured]
        title = {"llama2-70b": "Llama-2-70B", "bloom-176b": "BLOOM-176B"}[model]
        fitted = latency_profiles.fit(
            f"{title.lower()}.{hardware.split('-')[0]}.tp{parallel}.splitwise",
            sorted(prefill),
            sorted(decode),
            model=title,
            hardware=f"{parallel} x {_HARDWARE[hardware]}",
            engine="vLLM (Splitwise)",
            tensor_parallel=int(parallel),
            source="mutinifni/splitwise-sim, perf_model.csv, medians",
            licence="MIT",
        )
        yield judged(fitted, sorted(prefill), sorted(decode))


def judged(profile: Profile, prefill: list[Point], decode: list[Point]) -> Profile:
    """The profile, rounded to the precision of a measurement, with its errors and some points."""
    rounded = msgspec.structs.replace(
        profile,
        prefill=tuple(_rounded(value) for value in profile.prefill),
        decode=tuple(_rounded(value) for value in profile.decode),
        checks=Checks(prefill=_some(prefill), decode=_some(decode)),
    )
    fits = [
        Fit(points=count, error_mean=round(error.mean, 4), error_max=round(error.max, 4))
        for count, error in (
            (len(prefill), rounded.prefill_error(prefill)),
            (len(decode), rounded.decode_error(decode)),
        )
    ]
    return msgspec.structs.replace(rounded, prefill_fit=fits[0], decode_fit=fits[1])


def _some(points: list[Point]) -> tuple[tuple[int, int, float], ...]:
    """Six of the points, from the shortest time to the longest, evenly spaced in that order."""
    ranked = sorted(points, key=lambda point: point[2])
    count = min(CHECKS, len(ranked))
    picked = (ranked[round(at * (len(ranked) - 1) / (count - 1))] for at in range(count))
    return tuple((int(a), int(b), _rounded(seconds)) for a, b, seconds in picked)


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def _parts(name: str) -> tuple[str, str, str, int]:
    """Model, hardware, engine and parallelism of a name such as
    "Llama-3.1-70B.a100_sxm.vllm-0.14.0.tp2"."""
    for hardware in _HARDWARE:
        model, found, rest = name.partition(f".{hardware}.")
        if found:
            engine, _, parallel = rest.rpartition(".tp")
            return model, hardware, engine, int(parallel)
    raise SystemExit(f"{name}: of which hardware is it?")


def _lines(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
