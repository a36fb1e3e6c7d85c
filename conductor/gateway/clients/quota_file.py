"""Daily quotas in a SQLite file, which the processes of one machine share and which outlives them.

    CREATE TABLE used (day INTEGER, client TEXT, requests INTEGER, tokens INTEGER,
                       PRIMARY KEY (day, client))

Every process adds what it has granted since the last time, and reads the sum of all: a quota can be
exceeded by what they grant between two of these, one second apart.
"""

from __future__ import annotations

import contextlib
import sqlite3
from typing import TYPE_CHECKING

from tiffin.kvstore.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

# How long another process may hold the file: it writes a few lines.
_BUSY_S = 5.0


class QuotaFile:
    """See the module. Its methods block for a disk write, so they are for a thread; raises
    InvalidInput for a file that can't be used, and sqlite3.Error later."""

    def __init__(self, path: Path) -> None:
        try:
            self._db = sqlite3.connect(path, timeout=_BUSY_S, check_same_thread=False)
        except sqlite3.Error as error:
            raise InvalidInput(f"quota_file {path}: {error}") from error
        try:
            with self._db:
                self._db.execute("PRAGMA journal_mode=WAL")
                self._db.execute(
                    "CREATE TABLE IF NOT EXISTS used (day INTEGER, client TEXT, requests INTEGER,"
                    " tokens INTEGER, PRIMARY KEY (day, client)) WITHOUT ROWID"
                )
        except sqlite3.Error as error:
            self._db.close()
            raise InvalidInput(f"quota_file {path}: {error}") from error

    def add(self, day: int, spent: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
        """Add requests and tokens by client; returns the sums of the day. Older days are gone."""
        with self._db:
            self._db.execute("DELETE FROM used WHERE day < ?", (day,))
            self._db.executemany(
                "INSERT INTO used VALUES (?, ?, ?, ?) ON CONFLICT (day, client) DO UPDATE SET"
                " requests = requests + excluded.requests, tokens = tokens + excluded.tokens",
                [(day, client, *used) for client, used in spent.items()],
            )
            found = self._db.execute(
                "SELECT client, requests, tokens FROM used WHERE day = ?", (day,)
            )
            return {client: (requests, tokens) for client, requests, tokens in found}

    def close(self) -> None:
        """Close the file; idempotent."""
        with contextlib.suppress(sqlite3.Error):
            self._db.close()
