"""The latency columns of all instances: their profiles' coefficients times what was observed. Pure.

A profile is what an instance registers with; `cost/calibration.py` has the factors. This is where
observations of requests become observations of factors, and factors become columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..cost.calibration import Calibration
    from ..state.instance_table import Cluster
    from .inflight_requests import InflightRequest

    Latency = tuple[float, ...]

_COLUMNS = ("c0", "c1", "c2", "d0", "d1", "d2")


class CalibratedProfiles:
    """Latency of the instances of a cluster, before and after calibration. Not thread-safe."""

    def __init__(self, cluster: Cluster, calibration: Calibration) -> None:
        self._cluster = cluster
        self._calibration = calibration
        self._latency: dict[str, Latency] = {}  # by instance, before calibration

    def register(self, instance: str, latency: Latency) -> None:
        """Take the profile of a registered instance: (c0, c1, c2, d0, d1, d2)."""
        self._latency[instance] = latency
        self.correct(instance)

    def forget(self, instance: str) -> None:
        """Drop an instance that is removed."""
        self._calibration.forget(instance)
        self._latency.pop(instance, None)

    def latency(self, instance: str) -> Latency:
        """(c0, c1, c2, d0, d1, d2) of a registered instance, before calibration."""
        return self._latency[instance]

    def first_token(self, flight: InflightRequest, now: float) -> None:
        """Observe the prefill of a request that has its first token by its decision's route."""
        if flight.prefill_row < 0:
            return
        predicted_s, observed_s = flight.decision.predicted_ttft_s, now - flight.decided_at
        for key in self._keys(flight.prefill_row):
            self._calibration.observe_ttft(key, predicted_s, observed_s, flight.factor)
        self.correct(self._cluster.name(flight.prefill_row))

    def tokens(
        self, flight: InflightRequest, count: int, last: float | None, before_s: float, now: float
    ) -> None:
        """Observe the steps of `count` tokens of a request since `last`, when a step by the profile
        took `before_s`."""
        if not count or last is None or flight.decode_row < 0 or now <= last:
            return
        # By the load that was there, not by the forecast of it that the decision was made with:
        # the factor is of the hardware, and errors of a forecast are not.
        profile_s, observed_s = (before_s + flight.step_s) / 2, (now - last) / count
        for key in self._keys(flight.decode_row):
            self._calibration.observe_tbt(key, profile_s, observed_s, 1.0)
        self.correct(self._cluster.name(flight.decode_row))

    def step_s(self, flight: InflightRequest) -> float:
        """Seconds of a decode step now where a request decodes, by the profile; 0 if its instances
        were removed."""
        steps = [0.0]
        for row in flight.shares:
            d0, d1, d2 = self._latency[self._cluster.name(row)][3:]
            batch, context = self._cluster.batch.item(row), self._cluster.context_tokens.item(row)
            steps.append(d0 + d1 * batch + d2 * context)
        return max(steps)

    def correct(self, instance: str) -> None:
        """Set an instance's latency columns to its profile's coefficients times the calibration
        factors."""
        row = self._cluster.row(instance)
        keys = self._keys(row)
        prefill, decode = self._calibration.factor(*keys), self._calibration.tbt_factor(*keys)
        factors = (prefill, prefill, prefill, decode, decode, decode)
        values = zip(_COLUMNS, self._latency[instance], factors, strict=True)
        for name, value, factor in values:
            getattr(self._cluster, name)[row] = value * factor

    def _keys(self, row: int) -> tuple[str, str]:
        """The calibration keys of a row: its instance, and its profile for future instances."""
        spec = self._cluster.specs[row]
        assert spec is not None
        return spec.id, spec.profile
