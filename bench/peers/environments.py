"""The peers' environments: where each is looked for, its version, and how to install it.

A folder has one environment per peer, `FOLDER/mooncake/bin/python` and so on, as
`bench/peers/install.sh` makes them. Ours needs none of their libraries.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..environment import UNKNOWN
from ..suite import Missing

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_ASK_S = 120.0


@dataclass(frozen=True, slots=True)
class Peer:
    """A system to compare with: its name in `install.sh` and for people, its package, the version
    that was run, and the module that has to be importable. `source`: where pip finds it, if its
    package is not on PyPI."""

    name: str
    title: str
    package: str
    tested: str
    module: str
    source: str = ""

    @property
    def requirement(self) -> str:
        """What `install.sh` gives to pip."""
        return (
            f"{self.package} @ {self.source}" if self.source else f"{self.package}=={self.tested}"
        )


PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "mooncake",
            "Mooncake Store",
            "mooncake-transfer-engine-non-cuda",
            "0.3.13.post1",
            "mooncake.store",
        ),
        Peer("lmcache", "LMCache", "lmcache", "0.5.6", "lmcache.v1.storage_backend"),
        Peer("dynamo", "Dynamo", "ai-dynamo-runtime", "1.6.1", "dynamo._core"),
        Peer(
            "sglang",
            "SGLang's router",
            "sglang-router",
            "0.3.2",
            "sglang_router.sglang_router_rs",
        ),
        Peer("vllm-router", "vLLM's router", "vllm-router", "0.1.17", "vllm_router_rs"),
        # Another program than the one above, whose package has the same name.
        Peer(
            "production-stack",
            "production-stack's router",
            "vllm-router",
            "0.1.12",
            "vllm_router.log",
            "git+https://github.com/vllm-project/production-stack@vllm-stack-0.1.12",
        ),
    )
}


def python_of(folder: Path, name: str) -> Path:
    """The Python of a peer's environment, which imports the peer. Raises Missing."""
    peer, python = PEERS[name], folder / name / "bin" / "python"
    if not python.exists():
        raise Missing(_how(folder, peer, "not installed"))
    asked = _ask(python, f"import {peer.module}")
    if asked.returncode:
        said = asked.stderr.strip().splitlines() or ["no message"]
        raise Missing(_how(folder, peer, f"{python} can't import {peer.module}: {said[-1]}"))
    return python


def version_of(folder: Path, name: str) -> str:
    """The version of the peer's package in its environment, or "not installed"."""
    python = folder / name / "bin" / "python"
    if not python.exists():
        return "not installed"
    ask = f"from importlib.metadata import version; print(version({PEERS[name].package!r}))"
    return _ask(python, ask).stdout.strip() or UNKNOWN


def versions(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """The versions of these peers."""
    return {name: version_of(folder, name) for name in names}


def in_words(found: dict[str, str]) -> str:
    """The versions as a line."""
    return ", ".join(f"{PEERS[name].title} {version}" for name, version in found.items())


def _how(folder: Path, peer: Peer, lack: str) -> str:
    return (
        f"{lack}: make bench-peers installs it, and this it alone: "
        f"bench/peers/install.sh python3 {folder} {peer.name}"
    )


def _ask(python: Path, code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(python), "-c", code], capture_output=True, text=True, check=False, timeout=_ASK_S
    )
