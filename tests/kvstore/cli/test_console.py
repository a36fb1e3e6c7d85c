"""Output that is no terminal: a log is read by programs, so each record is one line. And Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tiffin.kvstore.cli.interruptible import interruptible

LOGS = """
import logging
from tiffin.kvstore.cli.console import log_to_stderr
log_to_stderr("info")
logging.getLogger("tiffin.kvstore.node").warning("refusing %s", "x" * 500)
logging.getLogger("tiffin.kvstore.node").debug("not this one")
"""


def test_a_log_that_is_no_terminals_is_not_wrapped() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOGS],
        env={"COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    (line,) = done.stderr.splitlines()
    assert re.fullmatch(r"\S+ \S+ WARNING tiffin\.kvstore\.node: refusing x{500}", line)


def test_an_interrupt_that_somebody_swallows_ends_the_command_all_the_same() -> None:
    def swallow() -> None:
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), interruptible():
        swallow()
    assert signal.getsignal(signal.SIGINT) is before
