"""The engines of a run: their sizes, their model, and how one is started."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..network.setting import Missing
from ..store.setting import silent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_PEER = Path(__file__).with_name("engine_peer.py")
_ENGINE_S = 600.0
_LOG_CHARACTERS = 3000

Executor = Literal["uni", "mp"]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a run. The defaults are the run that `docs/benchmarks.md` shows."""

    tokens: int = 4100
    prompts: int = 4
    rounds: int = 10

    @classmethod
    def quick(cls) -> Sizes:
        """Fewer rounds; an engine's start takes most of the time anyway."""
        return cls(prompts=2, rounds=3)


@dataclass(frozen=True, slots=True)
class Setting:
    """One run: its sizes, the Python that has vLLM and tiffin, and a callback for progress."""

    sizes: Sizes
    vllm: Path | None = None
    tell: Callable[[str], None] = field(default=silent)

    def python(self) -> Path:
        """The Python with vLLM. Raises Missing."""
        if self.vllm is None:
            raise Missing(
                "name the Python of an environment that has vLLM with --vllm; `make engines` makes "
                "one: .venv-engines/bin/python"
            )
        return self.vllm


@dataclass(frozen=True, slots=True)
class Times:
    """Milliseconds to the first token, by request; `cached`: tokens that were not computed."""

    cold: Sequence[float]
    loaded: Sequence[float]
    own: Sequence[float]
    cached: Sequence[int]
    tokens: Sequence[int]


@contextlib.contextmanager
def model(setting: Setting) -> Iterator[str]:
    """The folder with the model's files."""
    with tempfile.TemporaryDirectory(prefix="tiffin-bench-") as folder:
        _run(setting, ["model", folder], in_process=True)
        yield folder


def measure(
    setting: Setting,
    model_folder: str,
    transfer: dict[str, Any] | None,
    *,
    in_process: bool,
    computes: bool,
    rounds: int | None = None,
) -> Times:
    """Start an engine and measure it. `transfer`: the fields of its KVTransferConfig. `computes`:
    the prompts are computed first, once. `in_process`: the engine's core is in its caller's
    process, which vLLM's servers have apart."""
    sizes = setting.sizes
    options = {
        "model": model_folder,
        "transfer": transfer,
        "executor": "uni" if in_process else None,
        "tokens": sizes.tokens,
        "prompts": sizes.prompts,
        "rounds": sizes.rounds if rounds is None else rounds,
        "seed": 1,
        "computes": computes,
        "settle_s": 1.0,
    }
    output = _run(setting, ["measure", json.dumps(options)], in_process=in_process)
    return Times(**json.loads(output.splitlines()[-1]))


def _run(setting: Setting, arguments: Sequence[str], *, in_process: bool) -> str:
    """Run `engine_peer.py`; returns its output. Raises SubprocessError with the end of its log."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(_PEER.parent),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if in_process else "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [str(setting.python()), str(_PEER), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=_ENGINE_S,
        check=False,
    )
    if done.returncode:
        raise subprocess.SubprocessError(f"vLLM ended: {done.stderr[-_LOG_CHARACTERS:]}")
    return done.stdout
