"""What engines say in `/metrics`: how busy they are, and of their cache. Pure.

vLLM and SGLang name the same things differently, and have renamed some; of each, the names that
were found in releases of the last two years. An engine of several data-parallel ranks has one line
per rank: requests add up, and so does what caches have.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from prometheus_client.parser import text_string_to_metric_families

from ..errors import InvalidRequest
from ..records import Load

if TYPE_CHECKING:
    from collections.abc import Mapping

Engine = Literal["vllm", "sglang"]

_CACHE = "vllm:cache_config_info"
_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs")
_WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs")
_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")
_USED_TOKENS = ("sglang:num_used_tokens",)
_CAPACITY = ("sglang:max_total_num_tokens",)
_HIT_TOKENS = ("vllm:prefix_cache_hits_total", "sglang:cached_tokens_total")
# The rest of 50 KB are histograms: with them, parsing would take 5.9 ms and not 0.3.
_READ = (_CACHE, *_RUNNING, *_WAITING, *_USAGE, *_USED_TOKENS, *_CAPACITY, *_HIT_TOKENS)
_BEGINNINGS = tuple(f"{name}{end}" for name in _READ for end in ("{", " "))


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """Requests that `running` and `waiting` are; the share `usage` of the KV cache, or the
    `used_tokens`; `cache`, labels of vLLM's configuration; `hit_tokens` of all prompts so far that
    were found in the cache. None: not told."""

    engine: Engine
    running: int | None = None
    waiting: int | None = None
    usage: float | None = None
    used_tokens: int | None = None
    capacity_tokens: int | None = None
    hit_tokens: float | None = None
    ranks: int = 1
    cache: Mapping[str, str] | None = None

    def load(self, kv_capacity_tokens: int) -> Load:
        """As a heartbeat reports it. How long the waiting prompts are, no engine tells."""
        used = self.used_tokens
        if used is None and self.usage is not None:
            used = round(self.usage * kv_capacity_tokens)
        return Load(queued=self.waiting, running=self.running, kv_used_tokens=used)


def read_metrics(text: str) -> EngineMetrics:
    """Read what `/metrics` answered. Raises InvalidRequest if it is neither vLLM's nor SGLang's."""
    # Prometheus names may have no colon for SGLang.
    kept = "\n".join(
        line.replace("sglang_", "sglang:", 1) if line.startswith("sglang_") else line
        for line in text.splitlines()
        if line.startswith(("vllm:", "sglang"))
        and line.replace("sglang_", "sglang:", 1).startswith(_BEGINNINGS)
    )
    values: defaultdict[str, list[float]] = defaultdict(list)
    labels: dict[str, str] | None = None
    try:
        for family in text_string_to_metric_families(kept + "\n"):
            for sample in family.samples:
                values[sample.name].append(sample.value)
                if sample.name == _CACHE:
                    labels = dict(sample.labels)
    except (ValueError, IndexError, KeyError) as error:
        raise InvalidRequest(f"/metrics is no text of Prometheus: {error}") from error
    running = _total(values, _RUNNING)
    if running is None:
        raise InvalidRequest(
            "/metrics has neither vllm:num_requests_running nor sglang:num_running_reqs: it is no "
            "vLLM, and no SGLang with --enable-metrics"
        )
    engine: Engine = "vllm" if _RUNNING[0] in values else "sglang"
    usage = next((values[name] for name in _USAGE if name in values), None)
    return EngineMetrics(
        engine=engine,
        running=_count(running),
        waiting=_count(_total(values, _WAITING)),
        usage=None if usage is None else min(1.0, max(0.0, sum(usage) / len(usage))),
        used_tokens=_count(_total(values, _USED_TOKENS)),
        capacity_tokens=_count(_total(values, _CAPACITY)),
        hit_tokens=_total(values, _HIT_TOKENS),
        ranks=len(values[_RUNNING[0]] or values[_RUNNING[1]]),
        cache=labels,
    )


def _total(values: Mapping[str, list[float]], names: tuple[str, ...]) -> float | None:
    return next((sum(values[name]) for name in names if name in values), None)


def _count(value: float | None) -> int | None:
    return None if value is None or not 0.0 <= value < 1 << 40 else round(value)
