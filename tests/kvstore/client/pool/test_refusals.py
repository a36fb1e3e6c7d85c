"""Warnings that strangers cause in a node's log are rate-limited: they can't fill it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest

from tiffin.kvstore.credentials import Credentials
from tiffin.kvstore.errors import NotAuthenticated
from tiffin.kvstore.node.core import messages
from tiffin.messenger.log_rate_limit import Ration

if TYPE_CHECKING:
    from collections.abc import Callable

# Loggers whose warnings any connecting client can cause.
LOGGERS = [
    "tiffin.kvstore.node.server.tcp_server",
    "tiffin.kvstore.node.server.unix_server",
    "tiffin.kvstore.node.core.sharded_writes",
    "tiffin.messenger.tcp.listener",
]


@pytest.mark.parametrize("name", LOGGERS)
def test_they_are_rationed(name: str) -> None:
    assert any(isinstance(one, Ration) for one in logging.getLogger(name).filters)


def test_guessing_tokens_is_a_few_lines(
    serve: Callable[..., Any],
    connect: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    logger = logging.getLogger("tiffin.kvstore.node.server.tcp_server")
    monkeypatch.setattr(logger, "filters", [Ration(3, lambda: now[0])])
    _, address = serve(Credentials(token=b"a token of this pool"))

    def guess(count: int) -> None:
        for number in range(count):
            stranger = connect(address, Credentials(token=b"guess number %016d" % number))
            with pytest.raises(NotAuthenticated):
                stranger.call(messages.Match(0, b""), 5.0)
            stranger.close()

    with caplog.at_level(logging.WARNING):
        guess(20)
        lines = [r.getMessage() for r in caplog.records if r.name == logger.name]
        assert len(lines) == 3
        now[0] += 1.0
        guess(1)
    assert "17 more like it" in caplog.records[-1].getMessage()
