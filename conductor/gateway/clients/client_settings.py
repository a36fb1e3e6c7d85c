"""The settings that protect clients, and others from them, as groups of the configuration file.

    [models."llama-3-8b".objectives]        # of all requests for this model
    ttft_s = 2
    tbt_s = 0.05

    [clients.mobile-app]                    # of the keys that the token file gives this name
    tokens_per_minute = 2_000_000
    concurrent_requests = 64
    priorities = ["high", "normal"]

Stock clients send no objectives, so a default is what protects them; the bounds keep a client from
giving up its protection, or from asking for what takes it from others.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from ...records import Objectives
from ...wire.answers import Refusal

Bound = Annotated[float, Meta(gt=0, le=86_400)]
Count = Annotated[int, Meta(ge=1, le=1 << 50)]
Class = Annotated[str, Meta(min_length=1, max_length=64)]


class ObjectiveBounds(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Default objectives in seconds, and the strictest and loosest that a request may name."""

    ttft_s: Bound | None = None
    """The time to the first token of requests that name none; without it, `ttft_max_s`."""

    ttft_min_s: Bound | None = None
    ttft_max_s: Bound | None = None

    tbt_s: Bound | None = None
    """The time between tokens of requests that name none; without it, `tbt_max_s`."""

    tbt_min_s: Bound | None = None
    tbt_max_s: Bound | None = None

    def __post_init__(self) -> None:
        for name in ("ttft", "tbt"):
            least, default, most = (getattr(self, f"{name}{x}_s") for x in ("_min", "", "_max"))
            given = [value for value in (least, default, most) if value is not None]
            if given != sorted(given):
                raise ValueError(f"{name}_min_s <= {name}_s <= {name}_max_s does not hold")

    def within(self, wished: Objectives) -> Objectives:
        """The objectives of a request that wishes for these."""
        return Objectives(
            _within(wished.ttft_s, self.ttft_min_s, self.ttft_s, self.ttft_max_s),
            _within(wished.tbt_s, self.tbt_min_s, self.tbt_s, self.tbt_max_s),
        )


class ClientSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the API keys of one client may use together. None: no limit."""

    objectives: ObjectiveBounds = ObjectiveBounds()
    """They apply before those of the model."""

    priorities: tuple[Class, ...] = ()
    """The classes that it may name; the first one is that of requests that name none. Empty: any,
    and `normal`."""

    requests_per_minute: Count | None = None

    tokens_per_minute: Count | None = None
    """Of prompts and answers. A prompt counts when its length is known, an answer when it has
    ended: what is overdrawn then is waited for by the requests behind it."""

    burst_s: Annotated[float, Meta(ge=1, le=86_400)] = 60.0
    """A client that was quiet may use what its rates allow in this time at once."""

    concurrent_requests: Count | None = None

    requests_per_day: Count | None = None
    tokens_per_day: Count | None = None
    """Days are those of UTC. Kept in `quota_file`, if there is one."""

    def priority(self, wished: str) -> str:
        """The class of a request that names this one, or "". Raises Refusal if it may not."""
        if not wished:
            return self.priorities[0] if self.priorities else "normal"
        if self.priorities and wished not in self.priorities:
            raise Refusal(
                403, "not_allowed", f"x-tiffin-priority of this key is one of {self.priorities}",
                param="x-tiffin-priority",
            )  # fmt: skip
        return wished


def _within(
    wished: float | None, least: float | None, default: float | None, most: float | None
) -> float | None:
    value = next((one for one in (wished, default, most) if one is not None), None)
    if value is None:
        return None
    if most is not None:
        value = min(value, most)
    return value if least is None else max(value, least)
