"""From an engine's URL to its latency profile."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..client.http_session import HttpSession
from ..cost import latency_profiles
from ..cost.latency_profiles import CHECKS_MAX, Checks
from .engine_facts import chosen_model
from .engine_questions import EngineQuestions, key_headers, tls_of
from .profiler import Profiler, limits_of
from .settings import DiscoverySettings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from ..cost.latency_profiles import Profile
    from ..cost.profile_fit import Point

# Of questions about the engine, while it computes a long prompt.
_QUESTION_S = 30.0


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """What to measure; empty: as the engine tells. `repeats`: points of each kind."""

    url: str
    name: str = ""
    model: str = ""
    hardware: str = ""
    tokens_max: int = 32_768
    batch_max: int = 64
    kv_capacity_tokens: int | None = None
    repeats: int = 3
    timeout_s: float = 600.0
    api_key_file: Path | None = None
    tls_ca: Path | None = None


async def measure(options: ProfileOptions, say: Callable[[str], None]) -> Profile:
    """Measure an engine and fit its profile; `say` gets lines of progress. Raises
    ConductorUnavailable if it does not answer, InvalidRequest for what can't be measured."""
    settings = DiscoverySettings(
        timeout_s=_QUESTION_S,
        api_key_file=str(options.api_key_file or ""),
        tls_ca=str(options.tls_ca or ""),
    )
    questions = EngineQuestions(settings)
    http = HttpSession(key_headers(settings), tls_of(settings), _QUESTION_S)
    url = options.url.rstrip("/")
    try:
        facts = await questions.facts(url)
        model = chosen_model(facts, options.model)
        limits = limits_of(facts, options.tokens_max, options.batch_max, options.kv_capacity_tokens)
        profiler = Profiler(
            url, model, questions, http, say,
            dice=random.Random(), timeout_s=options.timeout_s,
        )  # fmt: skip
        await profiler.check()
        prefill = await profiler.prefill(limits, options.repeats)
        decode = await profiler.decode(limits, options.repeats)
    finally:
        await http.close()
        await questions.close()
    engine = {"vllm": "vLLM", "sglang": "SGLang"}[facts.metrics.engine]
    return latency_profiles.fit(
        options.name or _name(model),
        prefill,
        decode,
        model=model,
        hardware=options.hardware,
        engine=f"{engine} {facts.version}".strip(),
        source="measured by tiffin profile",
        checks=Checks(prefill=_some(prefill), decode=_some(decode)),
    )


def _name(model: str) -> str:
    """A profile's name, from the model's: `Qwen/Qwen3-32B` is `qwen3-32b.measured`."""
    plain = re.sub(r"[^a-z0-9._-]+", "-", model.rpartition("/")[2].lower()).strip(".-_")
    return f"{plain[:80] or 'model'}.measured"


def _some(points: Sequence[Point]) -> tuple[tuple[int, int, float], ...]:
    """As many points as a profile keeps, spread over all."""
    every = -(-len(points) // CHECKS_MAX)
    return tuple((int(a), int(b), float(seconds)) for a, b, seconds in points[::every])
