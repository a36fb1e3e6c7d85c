"""What each worker may grant a client, so that all of them together grant what the operator allows.

Rates, places and quotas are divided: connections are spread evenly over workers, and so are the
requests of a client with many. Daily quotas are divided only if no file shares them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from ..clients.client_settings import ClientSettings
    from ..config import GatewayConfig

_RATES = ("requests_per_minute", "tokens_per_minute", "concurrent_requests")
_QUOTAS = ("requests_per_day", "tokens_per_day")


def part_of(config: GatewayConfig, workers: int) -> GatewayConfig:
    """The configuration of one of `workers` workers."""
    if workers == 1:
        return config
    fields = _RATES if config.quota_file else _RATES + _QUOTAS
    return msgspec.structs.replace(
        config,
        clients={name: _part(one, fields, workers) for name, one in config.clients.items()},
        client_default=_part(config.client_default, fields, workers),
    )


def _part(settings: ClientSettings, fields: tuple[str, ...], workers: int) -> ClientSettings:
    given = {name: getattr(settings, name) for name in fields}
    parts = {name: math.ceil(one / workers) for name, one in given.items() if one is not None}
    return msgspec.structs.replace(settings, **parts)
