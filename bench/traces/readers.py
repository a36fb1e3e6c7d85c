"""Traces from files: in the formats of Mooncake and of Azure, and recordings (`recordings.py`).

Mooncake's is one JSON object per line: `timestamp` (arrival, milliseconds), `input_length` and
`output_length` (tokens), `hash_ids` (one per 512 tokens of the prompt, the last may be partial).
Source: https://github.com/kvcache-ai/Mooncake, FAST25-release/traces. Other fields are skipped.

Azure's is CSV with `TIMESTAMP` (date and time of day), `ContextTokens` and `GeneratedTokens`; it
does not say what prompts share. Source: https://github.com/Azure/AzurePublicDataset.
"""

from __future__ import annotations

import csv
from datetime import datetime
from typing import TYPE_CHECKING

import msgspec

from tiffin.kvstore.errors import InvalidInput

from .recordings import is_recording, read_recording, trace_of
from .trace import BLOCK_TOKENS, Trace, TraceRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
MICROSECONDS = 6  # digits of an arrival in seconds: finer than any trace, and exact in a round trip


class _MooncakeLine(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] | None = None


def read(path: Path) -> Trace:
    """The trace in a file, whichever its format. Raises InvalidInput, naming the line, for one that
    contradicts itself; OSError for a file that cannot be read."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            first = file.readline()
            if is_recording(first):
                return trace_of(read_recording(path))
            file.seek(0)
            parse = parse_azure if first.strip() == AZURE_HEADER else parse_mooncake
            requests = parse(file, str(path))
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path} is no text: a trace is JSON lines or CSV") from error
    if not requests:
        raise InvalidInput(f"{path} has no requests")
    return Trace(path.stem, tuple(requests))


def parse_mooncake(lines: Iterable[str], source: str) -> list[TraceRequest]:
    """Requests of Mooncake's JSON lines, by arrival. Raises InvalidInput; `source` is for it."""
    found: list[TraceRequest] = []
    places: dict[int, tuple[int | None, int]] = {}
    for where, line in _numbered(lines, source):
        try:
            fields = msgspec.json.decode(line, type=_MooncakeLine)
        except (msgspec.DecodeError, UnicodeEncodeError) as error:
            raise InvalidInput(f"{where}: {error}") from error
        arrival_s = round(fields.timestamp / 1000, MICROSECONDS)
        lengths = (fields.input_length, fields.output_length)
        request = TraceRequest(arrival_s, *lengths, fields.hash_ids or ())
        _check(request, where)
        if fields.hash_ids is not None:
            _check_blocks(request.blocks, request.prompt_tokens, where)
            _check_chain(request.blocks, places, where)
        found.append(request)
    return _by_arrival(found)


def parse_azure(lines: Iterable[str], source: str) -> list[TraceRequest]:
    """Requests of Azure's CSV, by arrival, the first one at 0. Raises InvalidInput."""
    numbered = _numbered(lines, source)
    next(numbered, None)  # the header
    rows = [_azure_row(line, where) for where, line in numbered]
    start = min((time for time, _, _ in rows), default=datetime.min)
    return _by_arrival(
        [TraceRequest((time - start).total_seconds(), prompt, out) for time, prompt, out in rows]
    )


def _azure_row(line: str, where: str) -> tuple[datetime, int, int]:
    try:
        ((time, prompt, output),) = csv.reader([line])
        row = (datetime.fromisoformat(time), int(prompt), int(output))
    except ValueError as error:
        raise InvalidInput(f"{where}: not {AZURE_HEADER}: {line!r}") from error
    _check(TraceRequest(0.0, *row[1:]), where)
    return row


def _numbered(lines: Iterable[str], source: str) -> Iterator[tuple[str, str]]:
    """The lines that are not empty, each with its place for error messages."""
    for number, line in enumerate(lines, start=1):
        if text := line.strip():
            yield f"{source}, line {number}", text


def _by_arrival(requests: list[TraceRequest]) -> list[TraceRequest]:
    return sorted(requests, key=lambda request: request.arrival_s)  # stable: ties keep their order


# -- contradictions --------------------------------------------------------------------------------


def _check(request: TraceRequest, where: str) -> None:
    if request.arrival_s < 0:
        raise InvalidInput(f"{where}: it arrives {-request.arrival_s} s before the trace's start")
    if request.prompt_tokens < 1:
        raise InvalidInput(f"{where}: a prompt has at least one token, not {request.prompt_tokens}")
    if request.output_tokens < 0:
        raise InvalidInput(f"{where}: an answer cannot have {request.output_tokens} tokens")


def _check_blocks(blocks: tuple[int, ...], prompt_tokens: int, where: str) -> None:
    needed = -(-prompt_tokens // BLOCK_TOKENS)
    if len(blocks) != needed:
        raise InvalidInput(
            f"{where}: its {len(blocks)} hash ids do not cover its input length: "
            f"{prompt_tokens} tokens are {needed} blocks of {BLOCK_TOKENS}"
        )


def _check_chain(
    blocks: tuple[int, ...], places: dict[int, tuple[int | None, int]], where: str
) -> None:
    """Ids are chained over the prefix, so one id has the same id before it wherever it occurs."""
    before = None
    for position, block in enumerate(blocks):
        place = (before, position)
        if places.setdefault(block, place) != place:
            raise InvalidInput(f"{where}: id {block} had another prefix on an earlier line")
        before = block
