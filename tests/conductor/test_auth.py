"""Tokens: who may do what, and what is refused at start."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import pytest

from tiffin.conductor.auth import ALL_RIGHTS, MissingRight, Right, Tokens, check_listen, load_tokens
from tiffin.conductor.errors import NotAuthorized
from tiffin.kvstore.errors import InvalidInput
from tiffin.kvstore.tokenfile import make_secret_file

if TYPE_CHECKING:
    from pathlib import Path

A, B = "a" * 32, "b" * 32


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_line_gives_rights_to_a_token(tmp_path: Path) -> None:
    lines = f"# of the gateway\nschedule,read {A}\n\n{B} # everything\n"
    tokens = load_tokens(write(tmp_path / "tokens", lines))
    assert tokens.rights(A.encode()) == {Right.SCHEDULE, Right.READ}
    assert tokens.rights(B.encode()) == ALL_RIGHTS
    assert tokens.rights(b"c" * 32) == frozenset()


def test_the_file_that_tiffin_token_makes_is_one(tmp_path: Path) -> None:
    path = make_secret_file(tmp_path / "token")
    assert load_tokens(path).rights(path.read_bytes().strip()) == ALL_RIGHTS


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "0 tokens"),
        ("# nothing\n", "0 tokens"),
        (f"root {A}", "line 1: write RIGHTS TOKEN"),
        (f"read {A} {B}", "line 1: one token"),
        (f"{A}\nread short", "line 2: the token has 5 bytes"),
        (f"read {'ä' * 20}", "line 1: one token"),
        ("\n".join(secrets.token_hex(16) for _ in range(65)), "65 tokens"),
    ],
)
def test_what_is_no_token_file_is_said(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(InvalidInput, match=why) as refused:
        load_tokens(write(tmp_path / "tokens", text))
    assert A not in str(refused.value), "a secret in a message ends in a log"


def test_a_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="chmod 600"):
        load_tokens(write(tmp_path / "tokens", A, 0o640))
    with pytest.raises(InvalidInput, match="can't read"):
        load_tokens(tmp_path / "none")


def test_a_header_is_checked(tmp_path: Path) -> None:
    tokens = load_tokens(write(tmp_path / "tokens", f"read {A}"))
    tokens.check(f"Bearer {A}".encode(), Right.READ)
    tokens.check(f"bearer  {A}".encode(), Right.READ)
    with pytest.raises(MissingRight, match="allows read, and this takes operate"):
        tokens.check(f"Bearer {A}".encode(), Right.OPERATE)
    for header in (b"", b"Bearer", b"Bearer ", f"Basic {A}".encode(), b"Bearer " + b"\xff" * 32):
        with pytest.raises(NotAuthorized):
            tokens.check(header, Right.READ)


def test_without_tokens_everything_is_allowed_on_loopback_only() -> None:
    Tokens().check(b"", Right.OPERATE)
    check_listen("127.0.0.1", Tokens())
    check_listen("::1", Tokens())
    with pytest.raises(InvalidInput, match="--token-file"):
        check_listen("0.0.0.0", Tokens())
    check_listen("0.0.0.0", Tokens(((b"digest", ALL_RIGHTS),)))


def test_no_repr_shows_a_token(tmp_path: Path) -> None:
    assert A not in repr(load_tokens(write(tmp_path / "tokens", A)))
