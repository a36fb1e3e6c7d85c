"""Carries out the pool's verbs over real connections, with threads for what runs in parallel."""

from __future__ import annotations

import contextvars
import time
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from ...errors import ClientClosed, DirectoryUnavailable, TiffinError
from . import pool_verbs
from .peers import CLOSED, Peers
from .pool_verbs import HOME, AskNode, Context, CopyHome, Locate, Read, Together
from .remote.remote_node import RemoteNode

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from ...directory.base import NodeRecord
    from .pool_verbs import ReadOutcome, Verb
    from .read_results import HomeNode, Reader, ReplicaNode

T = TypeVar("T")


class VerbDriver(Peers):
    """Carries out the steps of verbs at these nodes. Thread-safe."""

    @property
    def context(self) -> Context:
        """What plans depend on."""
        return Context(time.monotonic, self.links, self.links.may_hedge)

    def node(self, number: int, home: HomeNode | None) -> ReplicaNode:
        """The node of a plan: `home` for HOME, else the one with this number in the directory."""
        if number == HOME:
            assert home is not None
            return home
        return RemoteNode(number, self)

    def get(self, reader: Reader, deadline: float) -> pool_verbs.Outcome:
        """Carry out `pool_verbs.get` of the reader's prefix."""
        return self.run(pool_verbs.get(reader.prefix, deadline, self.context, reader.home), reader)

    def read(
        self, reader: Reader, deadline: float, located: Sequence[tuple[int, ...]]
    ) -> pool_verbs.Outcome:
        """Carry out `pool_verbs.read` of the reader's prefix, whose holders are `located`."""
        return self.run(pool_verbs.read(reader.prefix, 0, deadline, self.context, located), reader)

    def run(self, verb: Verb[T], reader: Reader | None = None) -> T:
        """Carry out a verb's steps. `reader` is where its `Read` steps go."""
        return driven(verb, lambda step: self._do(step, reader))

    def _do(self, step: Any, reader: Reader | None) -> Any:
        if isinstance(step, Read):
            assert reader is not None
            return self._read(step, reader)
        if isinstance(step, Locate):
            assert reader is not None
            return self._located(reader.prefix.keys[step.start :])
        if isinstance(step, CopyHome):
            assert reader is not None
            assert reader.home is not None
            part = reader.prefix[step.start : step.start + len(step.located)]
            return reader.home.copy_here(part, step.located, self.read, step.deadline) > 0
        if isinstance(step, Together):
            return self.together(step.steps, reader)
        assert isinstance(step, AskNode)
        return self.ask(step.node, step.request, step.timeout_s, step.record)

    def _located(self, keys: Sequence[bytes]) -> list[tuple[int, ...]] | None:
        try:
            return self.locate(keys)
        except DirectoryUnavailable:
            return None

    def together(self, steps: list[Any], reader: Reader | None = None) -> list[Any]:
        """Run the steps in parallel; their outcomes, a TiffinError for each failure, once no step
        is running any more."""
        began = time.monotonic()

        def attempt(step: Any) -> Any:
            if isinstance(step, AskNode):  # it may have waited for a worker thread
                left_s = max(0.0, step.timeout_s - (time.monotonic() - began))
                step = replace(step, timeout_s=left_s)
            try:
                return self._do(step, reader)
            except TiffinError as error:
                return error

        others: list[Future[Any]] = []
        outcomes: list[Any] = []
        try:
            others += [self._submit(attempt, step) for step in steps[1:]]
            outcomes += map(attempt, steps[:1])
            for step, future in zip(steps[1:], others, strict=True):
                # This thread runs the steps that no worker has begun because all are busy.
                outcomes.append(attempt(step) if future.cancel() else future.result())
        finally:
            _wait_for(others)
        return outcomes

    def _submit(self, attempt: Callable[[Any], Any], step: Any) -> Future[Any]:
        try:
            # In the same context: a caller that gives up the call gives up all its threads.
            return self._workers.submit(contextvars.copy_context().run, attempt, step)
        except RuntimeError as error:  # it was shut down
            raise ClientClosed(CLOSED) from error

    def ask(
        self, number: int, request: Any, timeout_s: float, record: NodeRecord | None = None
    ) -> Any:
        """See `RemoteNode.ask`."""
        return RemoteNode(number, self, record).ask(request, timeout_s)

    def _read(self, step: Read, reader: Reader) -> ReadOutcome:
        stall_s = None if step.patience is None else step.patience * self.options.hedge_s
        node = self.node(step.run.node, reader.home)
        return node.read(step.run, reader, step.deadline, stall_s)


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


def _wait_for(futures: list[Future[Any]]) -> None:
    """Cancel the futures and wait until none is running, Ctrl-C or not: they write into the
    caller's memory."""
    interruption: BaseException | None = None
    pending = {future for future in futures if not future.cancel()}
    while pending:
        try:
            pending = wait(pending).not_done
        except BaseException as error:  # noqa: BLE001 - raised again below
            interruption = error
    if interruption is not None:
        raise interruption
