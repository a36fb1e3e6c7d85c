"""Tests with a real vLLM on the CPU: `make test-engines`, in an environment of its own. Where vLLM
is not installed, this folder has no tests."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from kvsupport import Daemon

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from schedulersupport import Engine

HERE = Path(__file__).parent
# A folder of tests of that name may be on the path: it has no origin.
_VLLM = find_spec("vllm")
VLLM_IS_HERE = _VLLM is not None and _VLLM.origin is not None
collect_ignore_glob = [] if VLLM_IS_HERE else ["test_*.py"]
sys.path.insert(0, str(HERE))

# Read when vLLM is imported, here and in processes of the tests.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",  # engines in this process: seconds instead of a minute
    VLLM_CPU_OMP_THREADS_BIND="nobind",  # the tests' nodes need a core too
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="WARNING",
    HF_HUB_OFFLINE="1",
)

NODE_BYTES = 256 << 20


def pytest_configure(config: pytest.Config) -> None:
    if VLLM_IS_HERE:  # neither it nor what it imports is free of warnings
        config.addinivalue_line("filterwarnings", "default")


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny models of random weights (`tinymodels.py`): llama, llama-other, qwen2."""
    from tinymodels import make_models

    folder = tmp_path_factory.mktemp("models")
    make_models(folder)
    return folder


@pytest.fixture(scope="module")
def shared_node() -> Iterator[Daemon]:
    """A node for all tests of a module that only store and load; each has its own namespace."""
    node = Daemon(dram=NODE_BYTES)
    yield node
    node.close()


@pytest.fixture
def node() -> Iterator[Daemon]:
    """A node for a test that harms it."""
    node = Daemon(dram=NODE_BYTES)
    yield node
    node.close()


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> str:
    """A namespace that no other test has."""
    return str(request.node.nodeid)


@pytest.fixture
def start(
    shared_node: Daemon, model_folders: Path, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Engine]]:
    """A function that starts engines without weights, all with one pool."""
    from schedulersupport import Engine, Options

    from tiffin.kvstore.connectors.vllm import TiffinConnector

    # vLLM's groups of tensor-parallel workers need processes.
    monkeypatch.setattr(TiffinConnector, "_place", lambda self: (0, 0))
    with ExitStack() as stack:

        def start(**changes: Any) -> Engine:
            engine = Engine(Options(shared_node.url, namespace, model_folders / "llama", **changes))
            stack.callback(engine.close)
            return engine

        yield start
