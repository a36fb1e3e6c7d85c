"""Opening a pool of nodes from its URL."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import deadlines
from ...credentials import load_credentials
from ...deadlines import until_s
from ...directory import host_id, open_directory
from ...errors import (
    ClientClosed,
    DeadlineExceeded,
    InvalidInput,
    NodeUnavailable,
    TiffinError,
)
from ...node.core import messages
from ..connection.connection import HANDSHAKE_S
from ..connection.node_link import SocketLink
from .many_nodes import ManyNodes
from .members import FixedHomeNumber, FixedMembers, HomeNumber
from .peers import PoolOptions
from .pool_verbs import ask_all
from .verb_driver import VerbDriver

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...directory.base import NodeRecord
    from ...url import Pool
    from .members import Members

log = logging.getLogger(__name__)

GREETING_S = 5.0
# How long to wait for the statistics by which home is found in a fixed list.
LISTED_S = 1.0
# The timeout of the whole opening: for the directory, and the nodes of this host that may be home.
OPENING_S = HANDSHAKE_S


def open_pool(target: Pool, name: str) -> ManyNodes:
    """The nodes of the pool that `target` names.

    Raises InvalidInput, DirectoryUnavailable; NodeUnavailable or NotAuthenticated when no node of a
    fixed list answers.
    """
    credentials = load_credentials(**target.credentials)
    credentials.client_context()  # raises wrong TLS settings now, not at the first connection
    numbers: dict[str, Any] = target.numbers
    options = PoolOptions(**numbers)
    if options.nixl and credentials.of_bytes:
        raise InvalidInput("nixl and authenticate=bytes: one-sided reads have no tags; choose")
    members: Members
    if target.directory:
        members = open_directory(target.directory, pool=target.pool, token=credentials.token)
    else:
        members = FixedMembers(target.addresses)
    driver = VerbDriver(members, credentials, name, options)
    home: SocketLink | None = None
    try:
        call = deadlines.Within(OPENING_S)
        home, number = call.run(lambda: _reach(driver, target, name))
        return ManyNodes(driver, home=home, home_number=number, admission=target.admission)
    except BaseException:
        driver.close()
        if home is not None:
            home.close()
        raise


def _reach(
    driver: VerbDriver, target: Pool, name: str
) -> tuple[SocketLink | None, Callable[[], int | None]]:
    if not target.directory:
        _greet(driver)
    return _find_home(driver, target, name)


def _greet(driver: VerbDriver) -> None:
    """Connect to a node of a fixed list, the first that answers, so that a wrong address or token
    raises at once."""
    failure: TiffinError | None = None
    deadline, numbers = time.monotonic() + GREETING_S, list(driver.nodes())
    for position, number in enumerate(numbers):
        left_s = until_s(deadline)
        try:
            driver.ask(number, messages.Match(0, b""), left_s / (len(numbers) - position))
        except ClientClosed:
            raise
        except TiffinError as error:
            failure = failure or error
        else:
            return
    if failure is not None:
        raise failure


def _find_home(
    driver: VerbDriver, target: Pool, name: str
) -> tuple[SocketLink | None, Callable[[], int | None]]:
    """A link to the home node, if there is a node on this host that accepts this process, and the
    function that returns its number."""
    here = host_id()
    if target.home not in ("auto", "none"):
        path = target.home.removeprefix("unix:")
        link = SocketLink(Path(path), name)
        if not target.directory:
            return link, _home_in_list(driver, link)
        return link, HomeNumber(driver.nodes, here, os.path.realpath(path))
    if target.home == "auto" and target.directory:
        for _, record in sorted(_nodes(driver).items()):
            if record.host != here or not record.socket:
                continue
            if not os.access(record.socket, os.R_OK | os.W_OK):
                continue
            try:
                link = SocketLink(Path(record.socket), name)
            except TiffinError as error:
                log.info("not a home: %s", error)
            else:
                return link, HomeNumber(driver.nodes, here, record.socket)
    return None, lambda: None


def _home_in_list(driver: VerbDriver, link: SocketLink) -> FixedHomeNumber:
    number = FixedHomeNumber()
    try:
        own, _ = link.call(messages.Statistics(0), LISTED_S)
    except (ConnectionError, DeadlineExceeded) as error:
        log.info("home is not looked for in the list: %s", error)
        return number
    asked = ask_all(sorted(driver.nodes()), lambda: messages.Statistics(0), LISTED_S)
    replies = driver.run(asked).items()
    listed = {n: reply.numbers for n, reply in replies if isinstance(reply, messages.Numbers)}
    number.find(own.numbers, listed)
    return number


def _nodes(driver: VerbDriver) -> dict[int, NodeRecord]:
    try:
        return driver.nodes()
    except NodeUnavailable as error:
        log.warning("%s", error)
        return {}
