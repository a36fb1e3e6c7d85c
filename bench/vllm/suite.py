"""The measurements with a real vLLM, in the order of the docs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..suite import Suite, later

if TYPE_CHECKING:
    from .setting import Setting

_FIRST_TOKEN = ("home", "remote", "layerwise", "offloading", "lmcache", "mooncake")

SUITE: Suite[Setting] = Suite(
    "vllm",
    later(
        __package__,
        {
            **{name: ("first_token", name) for name in _FIRST_TOKEN},
            "split": ("split", "split"),
            "split-stream": ("split", "split_stream"),
            "decode-gaps": ("decode_gaps", "decode_gaps"),
            "hooks": ("hooks", "hooks"),
            "fleet": ("fleet.rows", "found"),
            "fleet-refused": ("fleet.rows", "refused"),
            "fleet-hot": ("fleet.rows", "hot"),
            "fleet-ways": ("fleet.rows", "ways"),
        },
    ),
)
