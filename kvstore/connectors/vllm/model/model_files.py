"""A fingerprint of a model's files: engines share blocks only if they compute the same numbers.

A model's name does not show that: a checkpoint may be retrained under its old name, and the same
checkpoint may lie at two paths.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

from ....errors import InvalidInput

if TYPE_CHECKING:
    from pathlib import Path

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
ADAPTER = "adapter_config.json"
SAMPLES = 64  # pieces of each file, at even distances, the first and the last included
SAMPLE_BYTES = 4096


class FileState(NamedTuple):
    """A file's name, and what changes with its content."""

    name: str
    size: int
    inode: int
    modified_ns: int
    changed_ns: int


def files_state(folder: Path) -> tuple[FileState, ...]:
    """The state of the files of `files_fingerprint`, without reading them. Raises InvalidInput as
    it does."""
    found = []
    try:
        for path in _files(folder):
            stat = path.stat()
            # The time of change as well: who packs files may give all of them the same other time.
            times = stat.st_mtime_ns, stat.st_ctime_ns
            found.append(FileState(path.name, stat.st_size, stat.st_ino, *times))
    except OSError as error:
        raise _unreadable(error) from error
    return tuple(found)


def files_fingerprint(folder: Path) -> str:
    """32 hexadecimal digits over the weights' files of `folder`, by name, size and samples, and an
    adapter's configuration, which scales its weights.

    A training step changes almost every number, so samples show it; an edit of a few numbers
    between the samples does not show. Takes about 1 ms per file. Raises InvalidInput if there are
    no such files, or if one can't be read.
    """
    digest = blake2b(digest_size=16)
    try:
        for path in _files(folder):
            size = path.stat().st_size
            digest.update(f"\n{path.name} {size}\n".encode())
            with path.open("rb") as file:
                for sample in range(SAMPLES):
                    file.seek(max(0, size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
                    digest.update(file.read(SAMPLE_BYTES))
    except OSError as error:
        raise _unreadable(error) from error
    return digest.hexdigest()


def _files(folder: Path) -> list[Path]:
    """The files that decide what is computed. Raises OSError, and InvalidInput if no weights are
    there."""
    found = sorted(path for path in folder.iterdir() if path.suffix in WEIGHTS)
    if not found:
        raise InvalidInput(
            f'no weights ({", ".join(WEIGHTS)}) in {folder}; name them by "model_fingerprint" in '
            "kv_connector_extra_config, the same for every engine with the same weights"
        )
    return [*found, *folder.glob(ADAPTER)]


def _unreadable(error: OSError) -> InvalidInput:
    return InvalidInput(f"the model's files can't be read: {error}")
