"""Makes helpers of these tests importable: pagedsupport.py, a name that is used nowhere else."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session", autouse=True)
def whole_numbers() -> Iterator[None]:
    """The interpreter of Triton 3.6 makes ints of arrays with one element and one axis; NumPy 2.5
    refuses that."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    patch = getattr(interpreter, "_patch_lang_tensor", None)

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    with pytest.MonkeyPatch.context() as patches:
        if patch is not None:
            patches.setattr(interpreter, "_patch_lang_tensor", patched)
        yield
