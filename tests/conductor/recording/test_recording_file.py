"""The file of a recording: bounded, only its owner's, and without what would tell of prompts."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING

import msgspec
import pytest

from tiffin.conductor.core.settings import Settings, patched
from tiffin.conductor.recording import recording_file
from tiffin.conductor.recording.lines import (
    HeaderLine,
    InstanceLine,
    LeftLine,
    RequestLine,
    SettingsLine,
    block_ids,
    decoder,
)
from tiffin.conductor.recording.recording_file import RecordingFile
from tiffin.kvstore.errors import InvalidInput

if TYPE_CHECKING:
    from pathlib import Path

    from tiffin.conductor.recording.lines import Line

HEADER = HeaderLine(began_at=1e9, settings={"policy": {"name": "random"}})
KEYS = tuple(bytes([number]) * 16 for number in range(4))


def instance(name: str) -> InstanceLine:
    return InstanceLine(
        at_s=0.0,
        id=name,
        model="m",
        role="prefill",
        node="",
        profile="p",
        latency=(1.0,) * 6,
        block_tokens=512,
        block_bytes=0,
        kv_capacity_tokens=1,
        batch_max=1,
        fetches=True,
    )


def request(name: str, arrival_s: float = 0.0) -> RequestLine:
    return RequestLine(
        arrival_s=arrival_s, id=name, model="m", prompt_tokens=2048, outcome="finished"
    )


def lines(path: Path) -> list[Line]:
    return [decoder.decode(line) for line in path.read_bytes().splitlines()]


def test_what_is_put_is_there_after_closing(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    with RecordingFile(path) as file:
        file.put(HEADER)
        file.put(request("a"), KEYS)
        file.put(request("b"), KEYS[:2])
    header, a, b = lines(path)
    assert header == HEADER
    assert isinstance(a, RequestLine)
    assert isinstance(b, RequestLine)
    assert a.blocks[:2] == b.blocks, "equal keys have equal ids"
    assert len(set(a.blocks)) == 4
    assert file.written == 3
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_ids_tell_nothing_of_keys_to_who_lacks_the_salt(tmp_path: Path) -> None:
    found = []
    for name in ("one", "two"):
        with RecordingFile(tmp_path / name) as file:
            file.put(request("a"), KEYS)
        (line,) = lines(tmp_path / name)
        assert isinstance(line, RequestLine)
        found.append(line.blocks)
    assert set(found[0]).isdisjoint(found[1]), "each recording has a salt of its own"
    assert all(0 <= one < 1 << 63 for one in block_ids(KEYS, b"s" * 16))


def test_a_full_file_makes_way_and_the_next_is_whole(tmp_path: Path) -> None:
    """The new file begins with what is in force: settings and instances as they have become."""
    path = tmp_path / "r.jsonl"
    changed = {"policy": {"name": "preble"}}
    with RecordingFile(path, bytes_max=2000) as file:
        for line in (HEADER, instance("stays"), instance("goes")):
            file.put(line)
        file.put(SettingsLine(at_s=1.0, settings=changed))
        file.put(LeftLine(at_s=1.0, id="goes"))
        for number in range(30):
            file.put(request(f"r{number}"))
    old = tmp_path / "r.jsonl.1"
    assert path.stat().st_size <= 2000
    assert old.stat().st_size <= 2000
    header, one, *rest = lines(path)
    assert header == HeaderLine(began_at=1e9, settings=changed)
    assert one == instance("stays")
    names = [
        line.id for part in (lines(old), rest) for line in part if isinstance(line, RequestLine)
    ]
    assert names[-1] == "r29"
    assert names == sorted(names, key=lambda name: int(name[1:])), "none is lost between them"
    assert len(names) == int(names[-1][1:]) - int(names[0][1:]) + 1


def test_an_earlier_recording_is_kept_once(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    for name in "abc":
        with RecordingFile(path) as file:
            file.put(request(name))
    kept = [lines(tmp_path / one)[0] for one in ("r.jsonl.1", "r.jsonl")]
    assert [line.id for line in kept if isinstance(line, RequestLine)] == ["b", "c"]


def test_more_than_may_wait_is_lost_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording_file, "FLUSH_S", 60.0)
    with RecordingFile(tmp_path / "r.jsonl", waiting_max=3) as file:
        for name in "abcde":
            file.put(request(name))
        assert file.lost == 2
    assert len(lines(tmp_path / "r.jsonl")) == 3


def test_a_disk_that_takes_nothing_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: RecordingFile, text: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RecordingFile, "_append", full)
    monkeypatch.setattr(recording_file, "FLUSH_S", 0.01)
    with RecordingFile(tmp_path / "r.jsonl") as file:
        for name in "abc":
            file.put(request(name))
    assert (file.written, file.lost) == (0, 3)
    assert caplog.text.count("No space left on device") == 1


def test_a_file_that_can_not_be_written_is_said_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="can't record to"):
        RecordingFile(tmp_path / "none" / "r.jsonl")


def test_all_settings_go_through_the_file(tmp_path: Path) -> None:
    tree = msgspec.to_builtins(Settings())
    with RecordingFile(tmp_path / "r.jsonl") as file:
        file.put(HeaderLine(began_at=0.0, settings=tree))
    (header,) = lines(tmp_path / "r.jsonl")
    assert isinstance(header, HeaderLine)
    assert patched(Settings(), header.settings) == Settings()
