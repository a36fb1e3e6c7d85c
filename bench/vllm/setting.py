"""A run: its sizes, and where vLLM and the peers are."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ..store.setting import silent
from ..suite import Missing

if TYPE_CHECKING:
    from collections.abc import Callable

_IMPORT_S = 120.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a run. The defaults are the run that `docs/benchmarks.md` shows."""

    tokens: int = 4100
    prompts: int = 4
    rounds: int = 10
    # Of one turn of `decode-gaps`; there are so many turns.
    gaps: int = 200
    gap_turns: int = 10
    hook_turns: int = 10
    # Of the fleet: conversations, each node's DRAM, with room for all that they say and without,
    # loads, as shares of what it can serve, in so many runs by turns, prompts that are hot, and
    # that are refused.
    users: int = 50
    turns: int = 4
    dram: str = "1GiB"
    tight_dram: str = "128MiB"
    loads: tuple[float, ...] = (0.5, 0.9, 1.5)
    runs: int = 5
    hot: int = 10
    refused: int = 200

    @classmethod
    def quick(cls) -> Sizes:
        """Fewer rounds; an engine's start takes most of the time anyway."""
        return cls(
            prompts=2,
            rounds=3,
            gap_turns=5,
            hook_turns=3,
            users=8,
            turns=3,
            hot=2,
            loads=(0.5,),
            runs=1,
            refused=20,
        )


@dataclass(frozen=True, slots=True)
class Setting:
    """One run: its sizes, the Python that has vLLM and tiffin, the folder of the peers, if it is
    not that Python that has them, and a callback for progress."""

    sizes: Sizes
    vllm: Path | None = None
    peers: Path | None = None
    tell: Callable[[str], None] = field(default=silent)

    def python(self) -> Path:
        """The Python with vLLM. Raises Missing."""
        if self.vllm is None:
            raise Missing(
                "name the Python of an environment that has vLLM with --vllm; `make engines` makes "
                "one: .venv-engines/bin/python"
            )
        return self.vllm

    def peer(self, name: str, module: str) -> Peer:
        """The installed peer `name`, a folder in `peers`. Raises Missing, with the reason, if its
        `module` can't be imported."""
        python = self.python()
        environment = {"PYTHONPATH": str(self.peers / name)} if self.peers else {}
        done = subprocess.run(
            [str(python), "-c", f"import {module}, {name}; print(*{name}.__path__)"],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=_IMPORT_S,
            check=False,
        )
        if done.returncode:
            reason = (done.stderr.strip() or f"exit {done.returncode}").splitlines()[-1]
            raise Missing(
                f"{module} can't be imported: {reason}; bench/vllm/install_peers.sh installs the "
                "peers in a folder, for --peers, and names the libraries that they need"
            )
        return Peer(python, Path(done.stdout.splitlines()[-1]), environment)


@dataclass(frozen=True, slots=True)
class Peer:
    """An installed peer: the Python that runs it, its package's folder, and the environment
    variables of all processes that import it."""

    python: Path
    package: Path
    environment: dict[str, str]
