"""`tiffin node`, ending when its standard input does: the demo's node must not outlive the demo.

python -m tiffin.bench.demo.daemon node --socket PATH --dram SIZE --nvme DIR:SIZE
"""

from __future__ import annotations

import os
import signal
import sys
import threading

import typer

from tiffin.kvstore.cli import commands


def main() -> None:
    """Run the store's commands; a closed stdin is a SIGTERM."""
    threading.Thread(target=_stop_at_eof, daemon=True).start()
    app = typer.Typer()
    commands(app)
    app()


def _stop_at_eof() -> None:
    # os.read, because a daemon thread inside sys.stdin's lock makes interpreters abort at exit
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
