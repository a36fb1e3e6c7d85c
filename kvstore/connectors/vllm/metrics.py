"""The connector's counts as vLLM's statistics and Prometheus metrics, through vLLM's own hooks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from .transfer_counters import LABELS, PLAIN, joined, split

if TYPE_CHECKING:
    from collections.abc import Mapping

_WHAT = {
    "hit_tokens": "Tokens to be loaded from the KV pool, by the tier that had them; hbm: of the "
    "loaded tokens, those that the tier in the GPU's memory had.",
    "loaded_tokens": "Tokens loaded from the KV pool.",
    "streamed_tokens": "Of these, tokens of blocks that another engine was writing.",
    "load_seconds": "Seconds that loads from the KV pool took.",
    "load_failures": "Loads from the KV pool that did not get all blocks, by reason.",
    "saved_tokens": "Tokens stored in the KV pool.",
    "save_seconds": "Seconds that saves to the KV pool took, in the background.",
    "save_failures": "Saves to the KV pool that failed, by reason.",
    "lookups": "Prompts looked up in the KV pool.",
    "lookup_seconds": "Seconds that lookups in the KV pool took.",
    "lookup_failures": "Lookups in the KV pool that failed, by reason.",
}


class Statistics(KVConnectorStats):  # type: ignore[misc]
    """`data` has the counts of `TransferCounters`."""

    def reset(self) -> None:
        """Begin anew."""
        self.data: dict[str, float] = {}

    def aggregate(self, other: Statistics) -> Statistics:
        """Add another's counts."""
        self.data = joined(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """The counts, rounded for vLLM's log line."""
        return {name: round(amount, 4) for name, amount in sorted(self.data.items())}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class PromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """A counter `vllm:tiffin_NAME` for each count, with vLLM's labels and `tier` or `reason`."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        make = metric_types[Counter]
        self._counters = {
            name: make(
                name=f"vllm:tiffin_{name}",
                documentation=_WHAT[name],
                labelnames=[*labelnames, *((LABELS[name],) if name in LABELS else ())],
            )
            for name in (*PLAIN, *LABELS)
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add counts of one engine."""
        values = self.per_engine_labelvalues[engine_idx]
        for key, amount in transfer_stats_data.items():
            name, label = split(key)
            labels = [*values, label] if name in LABELS else values
            self._counters[name].labels(*labels).inc(amount)
