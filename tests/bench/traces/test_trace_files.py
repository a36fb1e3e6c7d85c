"""Files of traces: what is written is read again, and contradictions are named by their line."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tracesupport import shipped_slice

from tiffin.bench.traces.readers import parse_mooncake, read
from tiffin.bench.traces.trace import Trace, TraceRequest
from tiffin.bench.traces.writer import lines, write
from tiffin.kvstore.errors import InvalidInput

if TYPE_CHECKING:
    from pathlib import Path

GOOD = '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [4, 5]}'


@given(
    st.lists(
        st.tuples(st.integers(0, 10**10), st.integers(1, 5_000), st.integers(0, 2_000)), max_size=20
    )
)
@settings(max_examples=50)
def test_what_is_written_is_read_again(rows: list[tuple[int, int, int]]) -> None:
    requests = [
        TraceRequest(
            microseconds / 1e6,
            prompt,
            answer,
            tuple(range(number * 100, number * 100 - (-prompt // 512))),
        )
        for number, (microseconds, prompt, answer) in enumerate(sorted(rows))
    ]
    assert parse_mooncake(lines(Trace("x", tuple(requests))), "x") == requests


def test_the_shipped_slice_is_written_as_it_was(tmp_path: Path) -> None:
    trace = shipped_slice()
    write(trace, tmp_path / "conversation_slice.jsonl")
    assert read(tmp_path / "conversation_slice.jsonl") == trace
    assert trace.requests[0].full_blocks() == trace.requests[0].prompt_tokens // 512
    assert trace.has_blocks


def test_without_ids_the_file_has_none(tmp_path: Path) -> None:
    trace = shipped_slice()
    bare = replace(trace, requests=tuple(replace(r, blocks=()) for r in trace.requests))
    write(bare, tmp_path / "conversation_slice.jsonl")
    assert "hash_ids" not in (tmp_path / "conversation_slice.jsonl").read_text()
    again = read(tmp_path / "conversation_slice.jsonl")
    assert again == bare
    assert not again.has_blocks


def test_requests_are_sorted_by_arrival() -> None:
    late = GOOD.replace('"timestamp": 0', '"timestamp": 7.5')
    assert [r.arrival_s for r in parse_mooncake([late, GOOD], "x")] == [0.0, 0.0075]


def test_azures_csv_begins_at_its_first_request(tmp_path: Path) -> None:
    path = tmp_path / "code.csv"
    path.write_bytes(
        b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        b"2023-11-16 18:17:04.0319600,3180,8\r\n"
        b"2023-11-16 18:17:03.9799600,4808,10"
    )
    trace = read(path)
    assert trace.name == "code"
    assert trace.requests == (TraceRequest(0.0, 4808, 10), TraceRequest(0.052, 3180, 8))


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (GOOD.replace("600", "1025"), "do not cover"),
        (GOOD.replace("[4, 5]", "[]"), "do not cover"),
        (GOOD.replace("[4, 5]", "[5, 4]"), "another prefix"),
        (GOOD.replace("600", "0"), "at least one token"),
        (GOOD.replace('"output_length": 1', '"output_length": -1'), "-1 tokens"),
        (GOOD.replace('"timestamp": 0', '"timestamp": -5'), "before the trace's start"),
        (GOOD.replace("600", '"many"'), "input_length"),
        ('{"timestamp": 0}', "input_length"),
        ("not JSON", "malformed"),
    ],
)
def test_a_contradiction_names_file_and_line(tmp_path: Path, bad: str, why: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(f"{GOOD}\n\n{bad}\n")
    with pytest.raises(InvalidInput, match=rf"bad\.jsonl, line 3: .*{why}"):
        read(path)


@pytest.mark.parametrize("bad", ["yesterday,1,1", "2023-11-16 18:17:03,1", "2023-11-16,x,1"])
def test_a_bad_line_of_csv_is_named(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{bad}\n")
    with pytest.raises(InvalidInput, match=r"bad\.csv, line 2"):
        read(path)


@pytest.mark.parametrize("content", [b"", b"\n", b"\xff\xfe\x00"])
def test_a_file_without_requests_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "none").write_bytes(content)
    with pytest.raises(InvalidInput, match="none"):
        read(tmp_path / "none")
