"""Routers of others before engines, each a process: for all measurements beside them.

Each is started as its own documentation does it, before a fixed list of engines, by its default
policy, and without a bound on the requests at a time. That of the production stack has no default.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from tiffin.kvstore.cli.local.local_redis import free_port

from ..network.setting import LOOPBACK, await_answer
from ..vllm.engine_process import GroupProcess, service
from .conversations import Http, raw_request
from .environments import PEERS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

# By name, and where each says that it serves.
ROUTERS = {"sglang": "/readiness", "vllm-router": "/readiness", "production-stack": "/health"}
# vLLM's router has no "unlimited"; this is more than there are ports.
_UNBOUNDED = {"sglang": "-1", "vllm-router": "65536"}
_MODULES = {"sglang": "sglang_router.launch_router", "vllm-router": "vllm_router.launch_router"}


@contextlib.contextmanager
def router(
    name: str, python: Path, urls: Sequence[str], model: str
) -> Iterator[tuple[GroupProcess, int]]:
    """The running router of this name, by the Python of its environment, before the engines at
    `urls`, which all serve `model`; and its port. Raises NodeUnavailable."""
    port, title = free_port(LOOPBACK), PEERS[name].title
    options = _fastapi(urls, model) if name == "production-stack" else _rust(name, urls)
    command = [str(python), "-m", *options, "--host", LOOPBACK, "--port", str(port)]
    with service(title, [*command, "--log-level", "error"]) as process:
        await_answer(process.popen, lambda: answers(port, ROUTERS[name]), title)
        yield process, port


def _rust(name: str, urls: Sequence[str]) -> list[str]:
    """SGLang's router, and that of vLLM, which began as a copy of it."""
    return [
        *(_MODULES[name], "--policy", "cache_aware", "--worker-urls", *urls),
        *("--prometheus-host", LOOPBACK, "--prometheus-port", str(free_port(LOOPBACK))),
        *("--max-concurrent-requests", _UNBOUNDED[name]),
    ]


def _fastapi(urls: Sequence[str], model: str) -> list[str]:
    return [
        *("vllm_router.app", "--service-discovery", "static", "--routing-logic", "roundrobin"),
        *("--static-backends", ",".join(urls), "--static-models", ",".join([model] * len(urls))),
    ]


def answers(port: int, path: str) -> bool:
    """Whether a service says that all is well."""
    with contextlib.suppress(OSError), Http(port) as http:
        http.ask(raw_request("GET", path, b""))
        return True
    return False
