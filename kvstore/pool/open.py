"""Opening a client of many nodes from its URL."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..credentials import load_credentials
from ..directory import host_id, open_directory
from ..errors import ClientClosed, DirectoryUnavailable, TiffinError
from ..link import SocketLink
from ..node import messages
from .client import PoolClient
from .engine import Engine, PoolOptions
from .members import FixedMembers, HomeNumber

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..directory.base import NodeRecord
    from ..url import Pool
    from ..verbs import Verify
    from .members import Members

log = logging.getLogger(__name__)

GREETING_S = 5.0


def open_pool(target: Pool, verify: Verify, name: str) -> PoolClient:
    """A client of the pool that `target` names.

    Raises InvalidInput, DirectoryUnavailable; NodeUnavailable or NotAuthenticated when no node of a
    fixed list answers.
    """
    credentials = load_credentials(**target.credentials)
    credentials.client_context()  # raises now what would be raised with the first connection
    numbers: dict[str, Any] = target.numbers
    options = PoolOptions(**numbers)
    members: Members
    if target.directory:
        members = open_directory(target.directory, pool=target.pool)
    else:
        members = FixedMembers(target.addresses)
    engine = Engine(members, credentials, name, options)
    home: SocketLink | None = None
    try:
        if not target.directory:
            _greet(engine)
        home, number = _find_home(engine, target, name)
        return PoolClient(engine, verify, home=home, home_number=number, admission=target.admission)
    except BaseException:
        engine.close()
        if home is not None:
            home.close()
        raise


def _greet(engine: Engine) -> None:
    """Say hello to the nodes of a fixed list, so that a wrong address or token shows at once."""
    failure: TiffinError | None = None
    for number in engine.nodes():
        try:
            engine.ask(number, messages.Match(0, b""), GREETING_S)
        except ClientClosed:
            raise
        except TiffinError as error:
            failure = failure or error
        else:
            return
    if failure is not None:
        raise failure


def _find_home(
    engine: Engine, target: Pool, name: str
) -> tuple[SocketLink | None, Callable[[], int | None]]:
    """The node on this host to read in place, if there is one that lets us, and what tells its
    number."""
    here = host_id()
    if target.home not in ("auto", "none"):
        path = target.home.removeprefix("unix:")
        link = SocketLink(Path(path), name)
        return link, HomeNumber(engine.nodes, here, os.path.realpath(path))
    if target.home == "auto" and target.directory:
        for _, record in sorted(_nodes(engine).items()):
            if record.host != here or not record.socket:
                continue
            if not os.access(record.socket, os.R_OK | os.W_OK):
                continue
            try:
                link = SocketLink(Path(record.socket), name)
            except TiffinError as error:
                log.info("not a home: %s", error)
            else:
                return link, HomeNumber(engine.nodes, here, record.socket)
    return None, lambda: None


def _nodes(engine: Engine) -> dict[int, NodeRecord]:
    try:
        return engine.nodes()
    except DirectoryUnavailable as error:
        log.warning("%s", error)
        return {}
