"""LoRA adapters, whose files may change while an engine runs.

vLLM reads an adapter's files when it first uses the adapter, when it has dropped it in between, and
when it is told to reload it in place; it tells a connector nothing of that. Its own prefix cache
knows an adapter by name and path only, so after a reload a request may begin with pages of the
weights before. So an adapter whose files have changed is not the old one, and not the new one.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ....errors import InvalidInput
from .model_files import files_fingerprint, files_state

if TYPE_CHECKING:
    from .model_files import FileState


class _Adapter(NamedTuple):
    """What vLLM's prefix cache knows of an adapter."""

    name: str
    path: str


class Adapters:
    """The adapters that one engine's requests have named."""

    def __init__(self) -> None:
        self._first: dict[_Adapter, tuple[tuple[FileState, ...], str]] = {}
        self._paths: dict[str, str] = {}  # where each name was last loaded from
        self._changed: set[_Adapter] = set()

    def known(self) -> dict[str, str]:
        """By name, the fingerprints of the adapters whose files are as they were."""
        return {
            adapter.name: fingerprint
            for adapter, (_, fingerprint) in list(self._first.items())  # another thread asks
            if adapter not in self._changed
        }

    def fingerprint(self, lora_request: Any) -> str:
        """The fingerprint of an adapter's files, which are read at its first request.

        Raises InvalidInput if they can't be read, if they have changed since, or if its name had
        another path in between: which weights the engine has is not known then, for good.
        """
        adapter = _Adapter(str(lora_request.lora_name), str(lora_request.lora_path))
        before = self._paths.get(adapter.name, adapter.path)
        if before != adapter.path:  # reloaded in place: the requests of before have its weights too
            self._changed.add(_Adapter(adapter.name, before))
        self._paths[adapter.name] = adapter.path
        if adapter not in self._first:
            folder = Path(adapter.path)
            self._first[adapter] = files_state(folder), files_fingerprint(folder)
        if not self.unchanged(lora_request):
            raise InvalidInput(
                f"the files of adapter {adapter.name} have changed, or it was loaded from another "
                f"path than {adapter.path}; load changed weights from a new path"
            )
        return self._first[adapter][1]

    def unchanged(self, lora_request: Any) -> bool:
        """Whether an adapter's files are, and always were, as at its first request."""
        adapter = _Adapter(str(lora_request.lora_name), str(lora_request.lora_path))
        if adapter in self._changed or adapter not in self._first:
            return False
        try:
            same = files_state(Path(adapter.path)) == self._first[adapter][0]
        except InvalidInput:
            same = False
        if not same:
            self._changed.add(adapter)
        return same
