"""Rows about the cost of a token: tags of frames, and of blocks' bytes."""

from __future__ import annotations

import contextlib
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tiffin.kvstore.cli.local.token_file import make_secret_file
from tiffin.kvstore.client.client import Client
from tiffin.messenger.wire.frame_tags import can_tag_bytes

from ..limits import touched
from ..store.rows import MICROSECONDS, Row, Side, interleave, times
from ..store.setting import prefix_of, room_for, schema_of, size_text
from .setting import apart, remote_node
from .transfer import get

if TYPE_CHECKING:
    from .setting import Setting

_WARM_CALLS = 50


def tags(setting: Setting) -> list[Row]:
    """The same get from nodes with a token and without, in turns."""
    sizes = (setting.sizes.small_block_bytes, setting.sizes.block_bytes[0])
    return [row for nbytes in sizes for row in _tags(setting, nbytes)]


def _tags(setting: Setting, nbytes: int) -> list[Row]:
    setting.tell(f"one block of {size_text(nbytes)}")
    schema = schema_of(nbytes)
    prefix, target = prefix_of(schema, 1), touched(nbytes)
    room = room_for(schema, 4)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tiffin-bench-"))
        token = make_secret_file(Path(folder) / "token")
        plain = stack.enter_context(remote_node(room))
        guarded = stack.enter_context(remote_node(room, token_file=token))
        urls = {"no token": plain.url, "frames": guarded.url}
        if can_tag_bytes():
            urls["bytes"] = f"{guarded.url}&authenticate=bytes"
        sides = {}
        for name, url in urls.items():
            client = stack.enter_context(Client.open(url, name="bench"))
            client.put(prefix, [target], timeout_s=60.0)
            sides[name] = Side(partial(get, client, prefix, [target], "off"))
        stack.enter_context(apart([], [plain.pid, guarded.pid]))
        for side in sides.values():
            for _ in range(_WARM_CALLS):
                side.action()
        calls = max(1, setting.sizes.calls * setting.sizes.small_block_bytes // nbytes)
        limit, *found = interleave(
            list(sides.values()), rounds=2 * setting.sizes.rounds, batch=calls
        )
    return [
        Row(
            name=f"tags-{name}-{size_text(nbytes)}",
            what=f"get(into=) of one block of {size_text(nbytes)} over TCP, with tags of {what}",
            unit="us",
            value=times(seconds, MICROSECONDS),
            limit_what="the same without a token",
            limit=times(limit, MICROSECONDS),
        )
        for (name, what), seconds in zip(
            (("frames", "frames"), ("bytes", "frames and bytes")), found, strict=False
        )
    ]
