"""Tokens: the rights of each, and configurations that are refused at start."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import pytest

from tiffin.conductor.errors import NotAuthorized
from tiffin.conductor.web.auth import (
    ALL_RIGHTS,
    Grant,
    MissingRight,
    Right,
    Tokens,
    check_listen,
    load_tokens,
)
from tiffin.kvstore.cli.local.token_file import make_secret_file
from tiffin.kvstore.errors import InvalidInput

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
    assert tokens.grant(A.encode()) == Grant(frozenset({Right.SCHEDULE, Right.READ}))
    assert tokens.grant(B.encode()) == Grant(ALL_RIGHTS)
    assert tokens.grant(b"c" * 32) is None


def test_the_file_that_tiffin_token_makes_is_one(tmp_path: Path) -> None:
    path = make_secret_file(tmp_path / "token")
    assert load_tokens(path).grant(path.read_bytes().strip()) == Grant(ALL_RIGHTS)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "0 tokens"),
        ("# nothing\n", "0 tokens"),
        (f"root {A}", "line 1: write RIGHTS TOKEN"),
        (f"read {A} {B}", "line 1: one token"),
        (f"{A}\nread short", "line 2: the token has 5 bytes"),
        (f"read {'ä' * 20}", "line 1: one token"),
        ("\n".join(secrets.token_hex(16) for _ in range(1089)), "1089 tokens"),
        (f"instance {A}", "line 1: write RIGHTS TOKEN, .*instance:ID"),
        (f"instance: {A}", "line 1: write RIGHTS TOKEN"),
        (f"read:i1 {A}", "line 1: write RIGHTS TOKEN"),
        (f"read: {A}", "line 1: write RIGHTS TOKEN"),
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


def test_who_speaks_for_an_instance_does_so_for_that_one_only(tmp_path: Path) -> None:
    lines = f"instance:i1,instance:vllm-* {A}\nread,instance:i2 {B}"
    tokens = load_tokens(write(tmp_path / "tokens", lines))

    def allowed(token: str, instance: str | None, right: Right = Right.OPERATE) -> bool:
        try:
            tokens.check(f"Bearer {token}".encode(), right, instance)
        except MissingRight:
            return False
        return True

    for name in ("i1", "vllm-", "vllm-7"):
        assert allowed(A, name)
    for name in ("i2", "i10", "vllm", ""):
        assert not allowed(A, name)
    assert not any(allowed(A, None, right) for right in Right)
    assert allowed(B, "i2")
    assert allowed(B, None, Right.READ)
    assert not allowed(B, "i1")
    with pytest.raises(
        MissingRight, match=r"allows read, instance:i2, and .* operate or instance:i1"
    ):
        tokens.check(f"Bearer {B}".encode(), Right.OPERATE, "i1")


def test_without_tokens_everything_is_allowed_on_loopback_only() -> None:
    Tokens().check(b"", Right.OPERATE)
    check_listen("127.0.0.1", Tokens())
    check_listen("::1", Tokens())
    with pytest.raises(InvalidInput, match="--token-file"):
        check_listen("0.0.0.0", Tokens())
    check_listen("0.0.0.0", Tokens({b"digest": Grant(ALL_RIGHTS)}))


def test_no_repr_shows_a_token(tmp_path: Path) -> None:
    assert A not in repr(load_tokens(write(tmp_path / "tokens", A)))
