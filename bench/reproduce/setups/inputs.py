"""The traces that ship with Tiffin (`bench/data/README.md`), and the one hardware profile."""

from __future__ import annotations

import lzma
from functools import cache
from importlib import resources

from ...traces.readers import parse_azure, parse_mooncake
from ...traces.trace import Trace


@cache
def conversation() -> Trace:
    """Mooncake's conversation trace: 12,031 requests in an hour."""
    name = "conversation_trace"
    return Trace(name, tuple(parse_mooncake(_lines(f"{name}.jsonl.xz"), name)))


@cache
def azure_code() -> Trace:
    """Azure's code trace of 2023: 8,819 requests in an hour, without blocks."""
    name = "azure2023_code"
    return Trace(name, tuple(parse_azure(_lines(f"{name}.csv.xz"), name)))


def _lines(name: str) -> list[str]:
    packed = (resources.files("tiffin.bench.data") / name).read_bytes()
    return lzma.decompress(packed).decode().splitlines()
