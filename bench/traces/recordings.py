"""Recordings of a conductor (docs/conductor/recording.md): what came, and what came of it.

A recording is a trace, too: `trace_of`. Its blocks are full ones only, of the recorded block size.
"""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from tiffin.conductor.recording.lines import (
    VERSION,
    HeaderLine,
    InstanceLine,
    LeftLine,
    RequestLine,
    SettingsLine,
    decoder,
)
from tiffin.kvstore.errors import InvalidInput

from .trace import Trace, TraceRequest

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from tiffin.conductor.recording.lines import Line

# What the first line has, of all formats of this folder only in this one.
_MARK = '"tiffin_recording":'


@dataclass(frozen=True, slots=True)
class Recording:
    """The requests of one model, by arrival, and what served them.

    Times are seconds since the first of them arrived. `settings`: of the conductor, with the times
    from which on they were in force; the first have 0 or less. `instances`: those of the model that
    were there when the last request came. `changed`: whether others were there before.
    `others`: requests of other models, which are left out.
    """

    name: str
    model: str
    began_at: float
    settings: tuple[tuple[float, dict[str, Any]], ...]
    instances: tuple[InstanceLine, ...]
    changed: bool
    requests: tuple[RequestLine, ...]
    others: int = 0

    @property
    def block_tokens(self) -> int:
        """Tokens of a block: all instances of a model have the same."""
        return self.instances[0].block_tokens


def is_recording(first_line: str) -> bool:
    """Whether a file that begins so is a recording."""
    return _MARK in first_line


def read_recording(path: Path, model: str = "") -> Recording:
    """A recording's requests of one model, by default the one of most requests. Raises InvalidInput
    for what is no recording, naming the line, or has no request that was served; OSError."""
    try:
        with path.open(encoding="utf-8") as file:
            return _recording(path.stem, parse_lines(file, str(path)), model, str(path))
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path} is no recording: it is no text") from error


def parse_lines(lines: Iterable[str], source: str) -> list[Line]:
    """The lines of a recording. The last one may be cut off, as that of a conductor that was
    killed. Raises InvalidInput; `source` is for it."""
    found: list[Line] = []
    broken = ""
    for number, text in enumerate(lines, start=1):
        if broken:
            raise InvalidInput(broken)
        try:
            found.append(decoder.decode(text))
        except msgspec.DecodeError as error:
            broken = f"{source}, line {number}: {error}"
            if text.endswith("\n"):
                raise InvalidInput(broken) from error
    if not found or not isinstance(found[0], HeaderLine):
        raise InvalidInput(f"{source} is no recording: its first line is no header")
    if found[0].tiffin_recording > VERSION:
        raise InvalidInput(
            f"{source} is of version {found[0].tiffin_recording}; this reads up to {VERSION}"
        )
    return found


def _recording(name: str, lines: list[Line], model: str, source: str) -> Recording:
    requests = [line for line in lines if isinstance(line, RequestLine)]
    by_model = Counter(line.model for line in requests)
    if not by_model:
        raise InvalidInput(f"{source} has no requests")
    model = model or by_model.most_common(1)[0][0]
    if model not in by_model:
        raise InvalidInput(f"{source} has no requests of {model!r}; of {', '.join(by_model)}")
    ours = sorted((r for r in requests if r.model == model), key=lambda line: line.arrival_s)
    start_s, last_s = ours[0].arrival_s, ours[-1].arrival_s
    header = lines[0]
    assert isinstance(header, HeaderLine), "parse_lines has seen to it"
    changes = [line for line in lines if isinstance(line, SettingsLine) and line.at_s <= last_s]
    settings = [(0.0, header.settings), *((c.at_s - start_s, c.settings) for c in changes)]
    instances, changed = _instances(lines, model, start_s, last_s)
    if not instances:
        raise InvalidInput(f"{source} has no instances of {model!r}")
    shifted = (msgspec.structs.replace(r, arrival_s=r.arrival_s - start_s) for r in ours)
    return Recording(
        name,
        model,
        header.began_at + start_s,
        tuple(settings),
        instances,
        changed,
        tuple(shifted),
        len(requests) - len(ours),
    )


def _instances(
    lines: Iterable[Line], model: str, start_s: float, last_s: float
) -> tuple[tuple[InstanceLine, ...], bool]:
    """Those at the last request, and whether any came, went or changed after the first."""
    there: dict[str, InstanceLine] = {}
    changed = False
    for line in lines:
        if not isinstance(line, InstanceLine | LeftLine) or line.at_s > last_s:
            continue
        if isinstance(line, LeftLine):
            changed |= there.pop(line.id, None) is not None and line.at_s > start_s
        elif line.model == model:
            there[line.id] = line
            changed |= line.at_s > start_s
        else:
            there.pop(line.id, None)
    return tuple(there.values()), changed


def trace_of(recording: Recording) -> Trace:
    """The recording as a trace. The answer of a request that was not served is as long as its
    caller expected it, or else as the median of those that were."""
    lengths = [r.output_tokens for r in recording.requests if r.outcome == "finished"]
    usual = int(statistics.median(lengths)) if lengths else 1
    found = (
        TraceRequest(
            r.arrival_s,
            r.prompt_tokens,
            r.output_tokens or r.output_tokens_expected or usual,
            tuple(r.blocks),
        )
        for r in recording.requests
    )
    return Trace(recording.name, tuple(found), recording.block_tokens)
