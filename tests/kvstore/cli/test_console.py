"""Output that is no terminal: a log is read by programs, so each record is one line."""

from __future__ import annotations

import re
import subprocess
import sys

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
