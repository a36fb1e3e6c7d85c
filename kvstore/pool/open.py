"""Opening a client of many nodes from its URL."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..credentials import load_credentials
from ..directory import host_id, open_directory
from ..errors import DirectoryUnavailable, NodeUnavailable
from ..link import SocketLink
from .client import PoolClient
from .engine import Engine, PoolOptions
from .members import FixedMembers

if TYPE_CHECKING:
    from ..directory.base import NodeRecord
    from ..url import Pool
    from ..verbs import Verify
    from .members import Members

log = logging.getLogger(__name__)


def open_pool(target: Pool, verify: Verify, name: str) -> PoolClient:
    """A client of the pool that `target` names.

    Raises InvalidInput, DirectoryUnavailable; NodeUnavailable or NotAuthenticated when no node of a
    fixed list answers.
    """
    credentials = load_credentials(**target.credentials)
    numbers: dict[str, Any] = target.numbers
    members: Members
    if target.directory:
        members = open_directory(target.directory, pool=target.pool)
    else:
        members = FixedMembers(target.addresses)
    engine = Engine(members, credentials, name, PoolOptions(**numbers))
    try:
        if not target.directory:
            _greet(engine)
        home, number = _find_home(members, target, name)
        return PoolClient(engine, verify, home=home, home_number=number, admission=target.admission)
    except BaseException:
        engine.close()
        raise


def _greet(engine: Engine) -> None:
    """Say hello to the nodes of a fixed list, so that a wrong address or token shows at once."""
    from ..node import messages

    failure: Exception | None = None
    for number in engine.members.nodes():
        try:
            engine.ask(number, messages.Match(0, b""), 5.0)
        except NodeUnavailable as error:
            failure = error
        else:
            return
    if failure is not None:
        raise failure


def _find_home(members: Members, target: Pool, name: str) -> tuple[SocketLink | None, int | None]:
    """The node on this host to read in place, if there is one that lets us."""
    if target.home == "none":
        return None, None
    if target.home != "auto":
        path = Path(target.home.removeprefix("unix:"))
        return SocketLink(path, name), _number_of(members, str(path))
    if not target.directory:
        return None, None
    here = host_id()
    for number, record in sorted(_nodes(members).items()):
        if record.host == here and record.socket and os.access(record.socket, os.R_OK | os.W_OK):
            try:
                return SocketLink(Path(record.socket), name), number
            except NodeUnavailable as error:
                log.info("not a home: %s", error)
    return None, None


def _number_of(members: Members, socket: str) -> int | None:
    here = host_id()
    for number, record in _nodes(members).items():
        if record.host == here and os.path.realpath(record.socket) == os.path.realpath(socket):
            return number
    return None


def _nodes(members: Members) -> dict[int, NodeRecord]:
    try:
        return members.nodes()
    except DirectoryUnavailable as error:
        log.warning("%s", error)
        return {}
