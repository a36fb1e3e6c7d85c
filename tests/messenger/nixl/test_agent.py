"""A process's NIXL agent: its cost, its absence, its end."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from contextlib import closing

import numpy as np
import pytest
from nixlsupport import neighbour, require_nixl

from tiffin.messenger.errors import PeerLost, RangeError
from tiffin.messenger.nixl import bindings
from tiffin.messenger.nixl.agent import NixlAgent
from tiffin.messenger.nixl.bindings import NixlUnavailable, load

require_nixl(__file__)


def test_a_missing_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bindings, "_WHEELS", ("no_such_wheel",))
    with pytest.raises(NixlUnavailable, match="pip install --no-deps nixl-cu12"):
        load.__wrapped__()


def test_lanes_that_cannot_work_say_where_to_look() -> None:
    with pytest.raises(NixlUnavailable, match="UCX_TLS"):
        NixlAgent(lanes="sm")


def test_tcp_is_not_used_unless_somebody_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX emulates one-sided transfers over TCP: any memory can be read, and a client that dies
    during a read ends the process that it reads from. Without TCP or RDMA, NIXL has no path."""
    if os.path.isdir("/sys/class/infiniband"):
        pytest.skip("this machine has RDMA devices")
    monkeypatch.delenv("UCX_TLS", raising=False)
    with pytest.raises(NixlUnavailable):
        NixlAgent()
    monkeypatch.setenv("UCX_TLS", "tcp")
    NixlAgent().close()


def test_tests_without_the_library_are_skipped_unless_required(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import nixlsupport

    def missing() -> None:
        raise NixlUnavailable("NIXL is not installed")

    monkeypatch.setattr(nixlsupport, "load", missing)
    monkeypatch.delenv("TIFFIN_REQUIRE_NIXL", raising=False)
    with pytest.raises(pytest.skip.Exception, match="not installed"):
        require_nixl()
    monkeypatch.setenv("TIFFIN_REQUIRE_NIXL", "1")
    with pytest.raises(pytest.fail.Exception, match="not installed"):
        require_nixl()


def test_a_process_that_used_nixl_ends_well_and_prints_nothing() -> None:
    """With UCX's InfiniBand module and no InfiniBand, the process would end with SIGSEGV."""
    program = """
import numpy as np
from tiffin.messenger.nixl.agent import NixlAgent
agent = NixlAgent(lanes="all")
agent.register(np.zeros(4096, np.uint8))
agent.staging()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_loading_changes_no_setting_of_the_process() -> None:
    load()
    assert logging.raiseExceptions


def test_an_idle_agent_sleeps() -> None:
    """NIXL's own Python wrapper keeps a core busy for as long as the agent lives."""
    with neighbour("tcp") as other:
        before_s = float(other.ask("processor seconds"))
        time.sleep(1.0)
        assert float(other.ask("processor seconds")) - before_s < 0.5


def test_two_agents_of_a_name_are_two() -> None:
    with closing(NixlAgent("a", lanes="all")) as one, closing(NixlAgent("a", lanes="all")) as other:
        assert one.name != other.name


def test_what_cannot_be_registered_is_refused() -> None:
    with closing(NixlAgent(lanes="all")) as agent:
        with pytest.raises(RangeError):
            agent.register(np.zeros(0, np.uint8))
        with pytest.raises(RangeError):
            agent.register(np.zeros(8, np.uint8)[::2])
    with pytest.raises(RangeError):
        NixlAgent(lanes="all", staging_bytes=4096, piece_bytes=8192)


def test_memory_is_described_by_its_place() -> None:
    array = np.zeros(8192, np.uint8)
    with closing(NixlAgent(lanes="all")) as agent:
        assert agent.register(array).description()[1:] == (array.ctypes.data, 8192)


def test_the_metadata_of_one_memory_says_nothing_of_another() -> None:
    with closing(NixlAgent(lanes="all")) as agent:
        shared, private = np.zeros(4096, np.uint8), np.zeros(12288, np.uint8)
        description = agent.register(shared).description()
        agent.register(private)
        agent.staging()
        address = private.ctypes.data.to_bytes(8, "little")
        assert address not in description.metadata


def test_a_closed_or_inherited_agent_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = NixlAgent(lanes="all")
    registered = agent.register(np.zeros(8, np.uint8))
    child = os.getpid() + 1
    monkeypatch.setattr("tiffin.messenger.nixl.agent.os.getpid", lambda: child)
    with pytest.raises(PeerLost, match="fork"):
        registered.description()
    monkeypatch.undo()
    agent.close()
    agent.close()
    with pytest.raises(PeerLost, match="closed"):
        registered.description()
