"""Makes the file with a pool's shared token, as `credentials.read_token` wants it."""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING

from ...errors import InvalidInput

if TYPE_CHECKING:
    from pathlib import Path

# 256 bits: nobody who recorded a handshake guesses it.
_RANDOM_BYTES = 32


def make_secret_file(path: Path, what: str = "the token") -> Path:
    """A new file of mode 0600 with 64 random hex digits. Raises InvalidInput.

    An existing file is never touched: whoever still uses the old token would be locked out.
    """
    try:
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        raise InvalidInput(
            f"{path} is there already and is not overwritten; choose another name, or delete it "
            "when nobody uses it any more"
        ) from None
    except OSError as error:
        raise InvalidInput(f"can't write {what} to {path}: {error.strerror}") from error
    with open(opened, "w", encoding="ascii") as file:
        os.fchmod(opened, 0o600)  # whatever the umask is
        file.write(secrets.token_hex(_RANDOM_BYTES) + "\n")
    return path
