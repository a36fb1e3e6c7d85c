"""`tiffin drain` and `tiffin token`: what an operator does to a pool now and then."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path  # noqa: TC003 - typer reads annotations
from typing import TYPE_CHECKING, Annotated

import typer

from ..client.verbs.block_verbs import DEFAULT_TIMEOUT_S
from ..errors import InvalidInput
from ..node.core import messages
from ..url import Pool, parse_url
from .console import JsonFlag, errors_console, say
from .local.token_file import make_secret_file
from .pool_status import open_driver

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..directory.base import NodeRecord


def token(
    path: Annotated[Path, typer.Argument(help="The file to make.", show_default=False)],
) -> None:
    """Make a pool's token: a new file that only you can read. Nothing is ever overwritten.

    Nodes and clients of one pool have the same token: give each its own copy of the file.

    **Examples**

    `tiffin token /etc/tiffin/token`
    """
    make_secret_file(path)
    say(
        f"{path} made. Give it to each node (--token-file) and each client (token_file= in its URL,"
    )
    say(f"or TIFFIN_TOKEN_FILE={path.absolute()}), with mode 0600.")


def drain(
    url: Annotated[str, typer.Argument(help="The pool: redis://... or tiffin://HOST:PORT,...")],
    node: Annotated[str, typer.Argument(help="Its name, or its number; see `tiffin status URL`.")],
    timeout_s: Annotated[
        float, typer.Option(help="Seconds that handing over may take.", min=0.0, max=3600.0)
    ] = 600.0,
    undo: Annotated[
        bool, typer.Option("--undo", help="Let the node take new blocks again instead.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Empty a node before it stops: it takes nothing new, and hands over what no other node has.

    It goes on serving what it has until it is stopped. Exits with 1 if blocks are left that nobody
    else has, for lack of time or of room elsewhere; run it again to go on.

    **Examples**

    `tiffin drain "redis://10.0.0.1?token_file=/etc/tiffin/token" rack2-node7`
    """
    target = parse_url(url)
    if not isinstance(target, Pool):
        raise InvalidInput(f"{url}: draining hands blocks to other nodes; give the URL of a pool")
    with closing(open_driver(target, "tiffin drain")) as driver:
        number = find_node(driver.members.nodes(), node)
        driver.ask(number, messages.Drain(0, not undo), DEFAULT_TIMEOUT_S)
        if undo:
            say(f"{node} takes new blocks again")
            return
        numbers = driver.ask(number, messages.Statistics(0), DEFAULT_TIMEOUT_S).numbers
        with errors_console.status(f"{node} hands over its blocks", spinner="line"):
            request = messages.Evacuate(0, timeout_s)
            elsewhere = int(driver.ask(number, request, timeout_s).count)
    left = max(0, numbers["blocks"] - elsewhere)
    if as_json:
        outcome = {"node": node, "number": number, "elsewhere": elsewhere, "left": left}
        typer.echo(json.dumps(outcome))
    else:
        say(
            f"{node} takes nothing new; {elsewhere} of its {numbers['blocks']} blocks are elsewhere"
        )
        say(_advice(node, left))
    raise typer.Exit(1 if left else 0)


def _advice(node: str, left: int) -> str:
    if left:
        return (
            f"{left} are not, for lack of time or of room on other nodes: run this again, or stop "
            f"{node} and lose them"
        )
    return f"nothing is lost when {node} is stopped now: send it SIGTERM"


def find_node(nodes: Mapping[int, NodeRecord], wanted: str) -> int:
    """The number of the node with this name, or with this number. Raises InvalidInput."""
    found = sorted(number for number, record in nodes.items() if record.name == wanted)
    if len(found) > 1:
        numbers = ", ".join(map(str, found))
        raise InvalidInput(f"several nodes are called {wanted}; say which number: {numbers}")
    if found:
        return found[0]
    if wanted.isdecimal() and int(wanted) in nodes:
        return int(wanted)
    known = ", ".join(sorted(record.name for record in nodes.values())) or "none"
    raise InvalidInput(f"no node is called {wanted}; there are: {known}")
