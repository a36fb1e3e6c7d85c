"""Synchronous drivers: run a verb's steps one after the other. Asyncio's: `async_client.drive`."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from .. import deadlines
from .block_verbs import Call, Post

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from ..connection.node_link import NodeLink
    from .block_verbs import Step, Verb

T = TypeVar("T")


def driven(verb: Generator[Any, Any, T], do: Callable[[Any], Any]) -> T:
    """Run the verb's steps through `do` and return the verb's result. The verb gets an exception of
    `do`, cleans up and raises it again."""
    outcome: Any = None
    failure: BaseException | None = None
    try:
        while True:
            try:
                step = verb.send(outcome) if failure is None else verb.throw(failure)
            except StopIteration as stop:
                return stop.value  # type: ignore[no-any-return]
            outcome = failure = None
            try:
                outcome = do(step)
            except BaseException as error:  # noqa: BLE001 - raised by the verb
                failure = error
    finally:
        # The exception's traceback refers to this frame: the cycle would keep a lease alive.
        del failure, outcome


def drive(verb: Verb[T], link: NodeLink) -> T:
    """Run the verb's steps over a link to one node and return the verb's result."""
    return driven(verb, partial(_do, link))


def _do(link: NodeLink, step: Step) -> Any:
    if isinstance(step, Call):
        return link.call(step.request, step.timeout_s)
    if isinstance(step, Post):
        link.post(step.request)
        return None
    began = time.monotonic()
    outcome = link.gate.run(step.action)
    deadlines.worked(time.monotonic() - began)
    return outcome
