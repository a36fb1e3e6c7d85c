"""Time to first token and gaps between tokens of one stream, as its client sees them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..latency_histogram import Labels
from .execution import handed_over

if TYPE_CHECKING:
    from ..engines.instance_cache import InstanceRoute
    from ..metrics import GatewayMetrics
    from ..openai.openai_request import ClientRequest


class StreamLatencies:
    """Counts the latencies of a stream: the first token's for the instance that prefills, the gaps
    for the one that decodes. An event is a token, or several that the engine sends at once; of
    events that arrive together all but one have no gap."""

    def __init__(self, metrics: GatewayMetrics, ask: ClientRequest, route: InstanceRoute) -> None:
        self._metrics = metrics
        split = handed_over(ask, route)
        prefill = route.prefill if split else route.decode
        self._prefill = Labels("prefill" if split else "mixed", ask.model, prefill.name)
        self._decode = Labels("decode" if split else "mixed", ask.model, route.decode.name)
        self._events = 0
        self._last_at = 0.0

    def first(self, events: int, started_at: float, now: float) -> None:
        """The first `events` events have arrived, for a request that arrived at `started_at`."""
        if not events:  # an empty answer, or an error
            return
        self._metrics.ttft_s.observe(self._prefill, now - started_at)
        self._metrics.itl_s.observe(self._decode, 0.0, events - 1)
        self._events, self._last_at = events, now

    def more(self, events: int, now: float) -> None:
        """There are now `events` events."""
        new = events - self._events
        if not new:
            return
        if self._events:
            self._metrics.itl_s.observe(self._decode, now - self._last_at)
            self._metrics.itl_s.observe(self._decode, 0.0, new - 1)
        self._events, self._last_at = events, now
