"""A client in a process of its own, with one connection and nothing else to do. Where the system
allows it, it runs before all others: else it would be late on a busy machine, and measure that.

    python streamclient.py HOST:PORT < bodies > times

Each line of the input is the body of a streamed completion. Each line of the output is a list of
seconds: when each event with a token of that answer arrived, from before the request was sent.
"""

from __future__ import annotations

import contextlib
import gc
import http.client
import json
import os
import sys
import time


def streamed(connection: http.client.HTTPConnection, body: bytes) -> list[float]:
    """Send a request; returns the arrivals of its tokens."""
    arrivals: list[float] = []
    pending = b""
    began = time.perf_counter()
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200, response.read()
    while piece := response.read1(1 << 16):
        now = time.perf_counter() - began
        *events, pending = (pending + piece).split(b"\n\n")
        arrivals += [now for event in events if b'"token_ids":[' in event.replace(b" ", b"")]
        assert not any(b'"error"' in event for event in events), events
    assert not pending
    return arrivals


def main() -> None:
    bodies = [line.strip() for line in sys.stdin.buffer]
    connection = http.client.HTTPConnection(sys.argv[1], timeout=120)
    gc.disable()
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    found = [streamed(connection, body) for body in bodies]
    for arrivals in found:
        print(json.dumps(arrivals))


if __name__ == "__main__":
    main()
