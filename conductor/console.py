"""What the commands of this package share: errors in one line."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from tiffin.kvstore.cli.console import errors_console
from tiffin.kvstore.errors import InvalidInput
from tiffin.kvstore.text import printable

from .errors import ConductorError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .client.client import ConductorClient

# What the extra `conductor` brings, and commands import when they run.
_EXTRA = (
    "aiohttp",
    "fastapi",
    "httpx",
    "prometheus_client",
    "starlette",
    "statsmodels",
    "uvicorn",
    "zmq",
)

OtlpOption = Annotated[
    str,
    typer.Option(
        help="Send spans of requests to this collector, as http://HOST:4318/v1/traces.",
        metavar="URL",
    ),
]


URL = "http://127.0.0.1:7800"

UrlOption = Annotated[str, typer.Option("--url", help="Where the conductor answers.")]
TokenOption = Annotated[
    Path | None,
    typer.Option(
        help="File with a token, alone; else the one TIFFIN_CONDUCTOR_TOKEN_FILE names.",
        show_default=False,
    ),
]
CaOption = Annotated[Path | None, typer.Option(help="CA of its certificate, for https.")]


@contextlib.contextmanager
def explained(program: str) -> Iterator[None]:
    """Errors as one line, and what to install if the extra is missing."""
    try:
        yield
    except ConductorError as error:
        errors_console.print(
            f"[bold red]{type(error).__name__}:[/] {escape(printable(str(error)))}", soft_wrap=True
        )
        raise typer.Exit(2) from error
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _EXTRA:
            raise
        raise InvalidInput(
            f'the {program} needs the library {error.name}: pip install "tiffin[conductor]"'
        ) from error


@contextlib.contextmanager
def asking(url: str, token_file: Path | None, tls_ca: Path | None) -> Iterator[ConductorClient]:
    """A client of the conductor at `url`, with errors as one line."""
    with explained("conductor"):
        from .client.client import ConductorClient

        with ConductorClient(url, token_file=token_file, tls_ca=tls_ca) as client:
            yield client
