"""Clients of `vllm serve`, by the library that most of its users have: several at a time, streams
and not, and each answer compared."""

from __future__ import annotations

import random
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import httpx
import openai
from generationsupport import SAID, Tokens
from kvsupport import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from serversupport import Server

CLIENTS = 4  # of each server
DEADLINE_S = 30.0  # of a request
PATIENCE_S = 120.0  # for so many answers as a test waits for


@dataclass(frozen=True)
class Outcome:
    """The end of one request: what was said, or why nothing was."""

    expected: Tokens
    said: Tokens
    error: Exception | None
    took_s: float
    streamed: bool

    @property
    def failed(self) -> bool:
        """Whether the server said that it could not answer, as vLLM does when a load fails and
        `kv_load_failure_policy` is `fail`."""
        return type(self.error) in (openai.InternalServerError, openai.APIError)

    def assert_right(self, may_fail: bool) -> None:
        """In time, and right, or failed if that may be."""
        assert self.took_s < DEADLINE_S + 1
        if not (may_fail and self.failed):
            assert (self.error, self.said) == (None, self.expected)


@contextmanager
def client_of(server: Server) -> Iterator[openai.OpenAI]:
    """A client that asks once: it does not hide a failure by a second try."""
    with httpx.Client(trust_env=False, timeout=DEADLINE_S) as http:
        yield openai.OpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, http_client=http
        )


def begin(client: openai.OpenAI, prompt: Tokens, stream: bool, max_tokens: int = SAID) -> Any:
    """The library's answer, or its stream of parts of one."""
    return client.completions.create(
        model="tiny",
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=0,
        stream=stream,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )


def leave(server: Server, prompt: Tokens) -> None:
    """Ask for a long answer, and go away after its first part."""
    with client_of(server) as client, begin(client, prompt, True, max_tokens=1000) as parts:
        next(iter(parts))


def ask(client: openai.OpenAI, prompt: Tokens, stream: bool) -> Tokens:
    """A greedy answer."""
    answer = begin(client, prompt, stream)
    parts = answer if stream else [answer]
    return [token for part in parts for choice in part.choices for token in choice.token_ids or ()]


def try_to_ask(client: openai.OpenAI, prompt: Tokens, expected: Tokens, stream: bool) -> Outcome:
    """`ask`, however it ends."""
    said: Tokens = []
    error = None
    began = time.monotonic()
    try:
        said = ask(client, prompt, stream)
    except Exception as caught:  # noqa: BLE001 - the test judges it
        error = caught
    return Outcome(expected, said, error, time.monotonic() - began, stream)


def ask_once(server: Server, prompt: Tokens, expected: Tokens, stream: bool = False) -> Outcome:
    """One request by a client of its own."""
    with client_of(server) as client:
        return try_to_ask(client, prompt, expected, stream)


class _Client:
    """Asks one server one prompt after the other, until it is told to stop or gets an error that
    may not be."""

    def __init__(
        self,
        server: Server,
        script: Sequence[tuple[Tokens, Tokens]],
        seed: int,
        ending: threading.Event,
        may_fail: bool,
    ) -> None:
        self.server = server
        self.outcomes: list[Outcome] = []
        self._script = script
        self._dice = random.Random(seed)
        self._ending = ending
        self._may_fail = may_fail
        self.thread = threading.Thread(target=self._work, name=f"client-{seed}")
        self.thread.start()

    def _work(self) -> None:
        with client_of(self.server) as client:
            while not self._ending.is_set():
                prompt, expected = self._dice.choice(self._script)
                stream = self._dice.random() < 0.5
                outcome = try_to_ask(client, prompt, expected, stream)
                self.outcomes.append(outcome)
                if outcome.error is not None and not (self._may_fail and outcome.failed):
                    return


class Load:
    """Clients of several servers, for the length of a `with` block. `script`: prompts, and what is
    right to say to them. `may_fail`: whether a request may end with the server's error."""

    def __init__(
        self,
        servers: Sequence[Server],
        script: Sequence[tuple[Tokens, Tokens]],
        seed: int,
        may_fail: bool = False,
    ) -> None:
        self._ending = threading.Event()
        self._servers = list(servers)
        self._may_fail = may_fail
        self._clients = [
            _Client(server, script, seed * 100 + index, self._ending, may_fail)
            for index, server in enumerate(self._servers * CLIENTS)
        ]

    def outcomes(self, server: Server) -> list[Outcome]:
        """How the requests to a server ended."""
        return [one for each in self._clients if each.server is server for one in each.outcomes]

    def await_answers(self, count: int = 16, of: Sequence[Server] = ()) -> None:
        """Return when each server, or each one `of` them, has given so many more answers."""
        servers = of or self._servers
        wanted = {server.url: len(self._answers(server)) + count for server in servers}

        def given() -> bool:
            ends = [one for server in servers for one in self.outcomes(server)]
            errors = [one.error for one in ends if not (self._may_fail and one.failed)]
            assert not any(errors), errors  # that client has ended
            return all(len(self._answers(server)) >= wanted[server.url] for server in servers)

        wait_until(given, f"{count} more answers of each server", PATIENCE_S)

    def _answers(self, server: Server) -> list[Outcome]:
        return [one for one in self.outcomes(server) if one.error is None]

    def assert_right(self, *servers: Server) -> None:
        """Every request to these servers, or to any, ended as it should."""
        for server in servers or self._servers:
            for outcome in self.outcomes(server):
                outcome.assert_right(self._may_fail)
            assert {one.streamed for one in self._answers(server)} == {False, True}

    def assert_ended(self, server: Server) -> None:
        """A server was ended: each of its clients had an error then, and right answers before."""
        for client in (each for each in self._clients if each.server is server):
            *before, last = client.outcomes
            for outcome in before:
                outcome.assert_right(may_fail=False)
            assert isinstance(last.error, openai.APIError), last
            assert last.took_s < DEADLINE_S + 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        for client in self._clients:
            client.thread.join()
