"""Clients of a gateway under load: several at a time, streamed and not, and each answer compared
with the right one."""

from __future__ import annotations

import json
import random
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import httpx
from kvsupport import wait_until
from splitsupport import body_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    # A prompt, and what is right to say to it.
    Script = Sequence[tuple[list[int], list[int]]]

CLIENTS = 5
DEADLINE_S = 60.0  # of a request, on a busy machine
PATIENCE_S = 180.0  # for so many answers as a test waits for
REST_S = 0.5  # of a client that got an error


@dataclass
class Outcome:
    """The end of one request. `error`: the code of the error that the gateway or an engine answered
    with, as OpenAI's API does; `trouble`: what no client may see; `route`: the instances that
    prefilled and decoded, if the answer's head says it. Times are monotonic seconds."""

    expected: list[int]
    streamed: bool
    began_at: float = field(default_factory=time.monotonic)
    ended_at: float = 0.0
    said: list[int] = field(default_factory=list)
    error: str = ""
    trouble: str = ""
    fallback: str = ""
    route: tuple[str, str] = ("", "")

    @property
    def answered(self) -> bool:
        return not self.error and not self.trouble

    def assert_right(self, may_fail: bool) -> None:
        """In time and right; or, if that may be, it failed and what was said before is right."""
        assert not self.trouble, self
        assert self.ended_at - self.began_at < DEADLINE_S, self
        if self.error:
            assert may_fail, self
            assert self.said == self.expected[: len(self.said)], self
        else:
            assert self.said == self.expected, self


def asked(http: httpx.Client, ids: list[int], expected: list[int], stream: bool) -> Outcome:
    """Ask the gateway, however that ends."""
    outcome = Outcome(expected, stream)
    body = {**body_of(ids), "max_tokens": len(expected), "stream": stream}
    try:
        with http.stream("POST", "/v1/completions", json=body) as response:
            head = response.headers
            outcome.fallback = head.get("x-tiffin-fallback", "")
            outcome.route = head.get("x-tiffin-prefill", ""), head.get("x-tiffin-decode", "")
            if response.status_code != 200 or not stream:
                _take_whole(outcome, response)
            else:
                _take_events(outcome, response)
    except httpx.HTTPError as error:
        outcome.trouble = f"{type(error).__name__}: {error}"
    outcome.ended_at = time.monotonic()
    return outcome


def _take_whole(outcome: Outcome, response: httpx.Response) -> None:
    answer = json.loads(response.read())
    if response.status_code == 200:
        outcome.said = list(answer["choices"][0]["token_ids"])
    elif response.status_code >= 400:
        _take_error(outcome, answer)
    else:
        outcome.trouble = f"status {response.status_code}"


def _take_events(outcome: Outcome, response: httpx.Response) -> None:
    """The tokens of a stream up to its error or its [DONE]."""
    done = False
    for line in response.iter_lines():
        if line == "data: [DONE]":
            done = True
        elif line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                _take_error(outcome, event)
            for choice in event.get("choices", ()):
                outcome.said += choice["token_ids"] or []
    if not done and not outcome.error:
        outcome.trouble = "the stream ended without [DONE] and without an error"


def _take_error(outcome: Outcome, answer: dict[str, Any]) -> None:
    error = answer.get("error") or {}
    if error.get("message") and error.get("type"):
        outcome.error = str(error.get("code"))
    else:
        outcome.trouble = f"no error of OpenAI's: {answer}"


class Load:
    """Clients of one gateway, for the length of a `with` block. Each asks one prompt of the script
    after the other."""

    def __init__(self, gateway_url: str, script: Script, seed: int) -> None:
        self._url, self._script = gateway_url, script
        self._ending = threading.Event()
        self._outcomes: list[list[Outcome]] = [[] for _ in range(CLIENTS)]
        self._threads = [
            threading.Thread(target=self._work, args=(seed * 100 + number, mine))
            for number, mine in enumerate(self._outcomes)
        ]

    @property
    def outcomes(self) -> list[Outcome]:
        return [one for mine in self._outcomes for one in mine]

    def answers(self) -> int:
        """How many requests were answered."""
        return sum(one.answered for one in self.outcomes)

    def await_answers(self, count: int = 16) -> None:
        """Return when so many more requests are answered."""
        wanted = self.answers() + count
        wait_until(lambda: self.answers() >= wanted, f"{count} more answers", PATIENCE_S)

    def await_ends(self, count: int = 16) -> None:
        """Return when so many more requests have ended, with an answer or with an error."""
        wanted = len(self.outcomes) + count
        wait_until(lambda: len(self.outcomes) >= wanted, f"{count} more outcomes", PATIENCE_S)

    def assert_right(self, fails_from: float = 0.0, fails_until: float = 0.0) -> None:
        """Every request ended as it should. Those that ran between these times may have failed."""
        for one in self.outcomes:
            one.assert_right(one.ended_at >= fails_from and one.began_at < fails_until)
        assert {one.streamed for one in self.outcomes if one.answered} == {False, True}

    def _work(self, seed: int, mine: list[Outcome]) -> None:
        dice = random.Random(seed)
        with httpx.Client(base_url=self._url, trust_env=False, timeout=DEADLINE_S) as http:
            while not self._ending.is_set():
                mine.append(asked(http, *dice.choice(self._script), dice.random() < 0.5))
                if not mine[-1].answered:
                    time.sleep(REST_S)

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join()
