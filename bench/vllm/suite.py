"""The measurements with a real vLLM, in the order of the docs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..network.setting import Missing
from ..suite import Suite
from .decode_gaps import decode_gaps
from .first_token import home, layerwise, lmcache, mooncake, offloading, remote
from .hooks import hooks
from .split import split, split_stream

if TYPE_CHECKING:
    from .setting import Setting

SUITE: Suite[Setting] = Suite(
    "vllm",
    {
        "home": home,
        "remote": remote,
        "layerwise": layerwise,
        "offloading": offloading,
        "lmcache": lmcache,
        "mooncake": mooncake,
        "split": split,
        "split-stream": split_stream,
        "decode-gaps": decode_gaps,
        "hooks": hooks,
    },
    lack=Missing,
)
