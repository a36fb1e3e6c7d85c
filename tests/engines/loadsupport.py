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


class _Client:
    """Asks one server one prompt after the other, until it is told to stop or gets an error."""

    def __init__(
        self, server: Server, script: Sequence[tuple[Tokens, Tokens]], seed: int, ending: Any
    ) -> None:
        self.server = server
        self.outcomes: list[Outcome] = []
        self._script = script
        self._dice = random.Random(seed)
        self._ending: threading.Event = ending
        self.thread = threading.Thread(target=self._work, name=f"client-{seed}")
        self.thread.start()

    def _work(self) -> None:
        with client_of(self.server) as client:
            while not self._ending.is_set():
                self.outcomes.append(self._one(client))
                if self.outcomes[-1].error is not None:
                    return

    def _one(self, client: openai.OpenAI) -> Outcome:
        prompt, expected = self._dice.choice(self._script)
        stream = self._dice.random() < 0.5
        said: Tokens = []
        error = None
        began = time.monotonic()
        try:
            said = ask(client, prompt, stream)
        except Exception as caught:  # noqa: BLE001 - the test judges it
            error = caught
        return Outcome(expected, said, error, time.monotonic() - began, stream)


class Load:
    """Clients of several servers, for the length of a `with` block. `script`: prompts, and what is
    right to say to them."""

    def __init__(
        self, servers: Sequence[Server], script: Sequence[tuple[Tokens, Tokens]], seed: int
    ) -> None:
        self._ending = threading.Event()
        self._servers = list(servers)
        self._clients = [
            _Client(server, script, seed * 100 + index, self._ending)
            for index, server in enumerate(self._servers * CLIENTS)
        ]

    def outcomes(self, server: Server) -> list[Outcome]:
        """How the requests to a server ended."""
        return [one for each in self._clients if each.server is server for one in each.outcomes]

    def await_answers(self, count: int = 16, of: Sequence[Server] = ()) -> None:
        """Return when each server, or each one `of` them, has given so many more answers."""
        servers = of or self._servers
        wanted = {server.url: len(self.outcomes(server)) + count for server in servers}

        def given() -> bool:
            errors = [one.error for server in servers for one in self.outcomes(server)]
            assert not any(errors), errors  # that client has ended
            return all(len(self.outcomes(server)) >= wanted[server.url] for server in servers)

        wait_until(given, f"{count} more answers of each server", PATIENCE_S)

    def assert_right(self, *servers: Server) -> None:
        """No request to these servers, or to any, had an error, another answer or waited too
        long."""
        for server in servers or self._servers:
            outcomes = self.outcomes(server)
            assert [one.error for one in outcomes if one.error is not None] == []
            assert [one.said for one in outcomes] == [one.expected for one in outcomes]
            assert {one.streamed for one in outcomes} == {False, True}
            self.assert_in_time(server)

    def assert_in_time(self, server: Server) -> None:
        """Every request has ended, and within its deadline."""
        assert max(one.took_s for one in self.outcomes(server)) < DEADLINE_S + 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        for client in self._clients:
            client.thread.join()
