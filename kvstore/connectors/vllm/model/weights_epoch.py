"""Which weights the blocks of an engine are of, where these may change while it runs.

vLLM tells a connector nothing of new weights, but resets its caches (`reset_cache`). With that an
epoch ends: blocks from before are not found any more, as the epoch is part of the keys.
"""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

from ....errors import InvalidInput

# Of the file: a version is a name, and goes into a hash for every request.
_VERSION_BYTES = 1024


class WeightsEpoch:
    """The epoch of one engine. `name`: what its keys have of it; "" for the weights in the model's
    files, until the first reset. Engines with the same name share blocks.

    `file`: has the name of the version (UTF-8, 1,024 bytes at most), and is read here and at each
    reset. Raises InvalidInput if it can't be read or is empty.
    """

    def __init__(self, version: str = "", file: str | None = None) -> None:
        self._file = Path(file) if file is not None else None
        self._said = version if self._file is None else _read(self._file)
        self.name = _named(self._said)

    def reset(self) -> None:
        """Begin an epoch: of the version that the file has now. If it has the same as before, or
        can't be read, or there is none, the epoch has a name that no other engine has. Raises
        InvalidInput for a file that can't be read, once the epoch has begun."""
        self.name = f"reset {uuid4().hex}"
        if self._file is None:
            return
        said = _read(self._file)
        if said != self._said:
            self._said, self.name = said, _named(said)


def _named(version: str) -> str:
    return f"version {version}" if version else ""


def _read(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            content = opened.read(_VERSION_BYTES + 1)
        if len(content) > _VERSION_BYTES:
            raise InvalidInput(f"weights_version_file: more than {_VERSION_BYTES} bytes in {file}")
        version = content.decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"weights_version_file: {error}") from error
    if not version:
        raise InvalidInput(f"weights_version_file: {file} is empty; write the version's name there")
    return version
