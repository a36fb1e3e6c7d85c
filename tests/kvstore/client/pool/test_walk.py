"""The way that a get takes through the files, as docs/architecture.md tells it."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsupport import fresh_prefix

if TYPE_CHECKING:
    from types import FrameType

    from poolsupport import Cluster

ROOT = Path(__file__).parents[4]
FILE = re.compile(r"/((?:kvstore|messenger)/[\w/]+\.py)$")


def test_a_get_from_another_node_goes_through_the_files_of_the_table(cluster: Cluster) -> None:
    """In a thread, which carries the call out itself."""
    one = cluster.start("one")
    prefix = one.put(fresh_prefix(4))
    cluster.settle()
    client = cluster.open()
    client.get(prefix).release()  # connects
    walked: dict[str, None] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        found = FILE.search(frame.f_code.co_filename)
        if event == "call" and found and "/tests/" not in found.string:
            walked[found[1]] = None

    def walk() -> None:
        sys.setprofile(note)
        try:
            blocks = client.get(prefix)
        finally:
            sys.setprofile(None)
        assert blocks.complete
        blocks.release()

    thread = threading.Thread(target=walk)
    thread.start()
    thread.join()
    text = (ROOT / "docs" / "architecture.md").read_text()
    table = text.partition("**A get from another machine**")[2].partition("In the node,")[0]
    rows = dict(re.findall(r"^\| `([\w/]+\.py)` \| (.*) \|$", table, re.MULTILINE))
    certain = {file for file, what in rows.items() if "if it has to wait" not in what}
    assert certain <= set(walked) <= set(rows)
