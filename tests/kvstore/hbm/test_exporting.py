"""Blocks that another process reads out of this one's memory: right, or a miss."""

from __future__ import annotations

import os
import subprocess
import sys
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

torch = pytest.importorskip("torch")

from hbmsupport import BLOCK, HBM_BLOCKS, SCHEMA, SCHEMAS, assert_quiet, hbm_store, publish
from hypothesis import given, settings
from hypothesis import strategies as st
from kvsupport import fresh_prefix, payload_of

from tiffin.kvstore.errors import (
    ClientClosed,
    InvalidInput,
    ProtocolError,
    SchemaError,
    TierUnavailable,
    TiffinError,
    VersionMismatch,
)
from tiffin.kvstore.hbm import attach
from tiffin.kvstore.hbm.exporting import Export
from tiffin.messenger.device_region import DeviceRegion

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiffin.kvstore import Client
    from tiffin.kvstore.hbm import HbmStore
    from tiffin.kvstore.keys import Prefix

HERE = Path(__file__).parent


@pytest.fixture
def store(client: Client) -> Iterator[HbmStore]:
    with hbm_store(client, "cpu") as store:
        yield store


class Worker:
    """Another process that has the export of a prefix."""

    def __init__(self, folder: Path, store: HbmStore, prefix: Prefix, message: bytes) -> None:
        (folder / "message").write_bytes(message)
        paths = [str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._prefix = prefix
        self._process = subprocess.Popen(
            [
                sys.executable,
                str(HERE / "hbmworker.py"),
                *(str(store.fds[0]), str(folder / "message"), prefix.schema.checksum),
                *(prefix.namespace, str(len(prefix))),
            ],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDEVMODE": ""},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=store.fds,
            text=True,
        )

    def read(self) -> int:
        """How many blocks it could read; asserts that it got the right bytes of each."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        count, *digests = self._process.stdout.readline().split()
        assert len(digests) == int(count)
        for key, digest in zip(self._prefix.keys, digests, strict=False):
            right = payload_of(key, self._prefix.schema)
            assert digest == blake2b(right, digest_size=16).hexdigest()
        return int(count)

    def close(self) -> None:
        self._process.communicate(timeout=20)
        assert self._process.returncode == 0


def test_another_process_reads_what_is_there_and_nothing_else(
    store: HbmStore, tmp_path: Path
) -> None:
    prefix, other = fresh_prefix(4, SCHEMA), fresh_prefix(HBM_BLOCKS, SCHEMA)
    publish(store, prefix)
    with store.lease(prefix) as blocks:
        worker = Worker(tmp_path, store, prefix, store.export(blocks[:]))
        assert worker.read() == 4
        blocks[2].tensor[100] ^= 8
        assert worker.read() == 2
        blocks[2].tensor[100] ^= 8
        assert worker.read() == 4
    store.remove(prefix, pool=False)
    publish(store, other)  # in their place
    assert worker.read() == 0
    # While blocks come and go: whatever it says is right is right, now and then nothing is.
    counts = set()
    for _ in range(40):
        store.remove(other, pool=False)
        publish(store, prefix)
        counts.add(worker.read())
        store.remove(prefix, pool=False)
        publish(store, other)
        counts.add(worker.read())
    assert 0 in counts
    assert len(counts) > 1
    worker.close()
    assert_quiet(store)


def test_only_what_was_exported_can_be_read(
    store: HbmStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = fresh_prefix(4, SCHEMA)
    publish(store, prefix)
    with store.lease(prefix) as blocks:
        message = store.export(blocks[:2])
        monkeypatch.setattr("tiffin.messenger.device_region._process", b"x" * 16)
        into = torch.zeros((4, BLOCK), dtype=torch.uint8)
        with attach(message, SCHEMA, fds=[os.dup(store.fds[0])]) as exported:
            assert exported.read(prefix, into) == 2
    for key, row in zip(prefix.keys[:2], into, strict=False):
        assert row.numpy().tobytes() == bytes(payload_of(key, SCHEMA))
    assert not into[2:].any()


@pytest.fixture
def theirs(store: HbmStore, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """An export that this process takes for another's."""
    prefix = fresh_prefix(2, SCHEMA)
    publish(store, prefix)
    with store.lease(prefix) as blocks:
        message = store.export(blocks[:])
    monkeypatch.setattr("tiffin.messenger.device_region._process", b"x" * 16)
    return message


def test_attaching_checks_everything(store: HbmStore, theirs: bytes) -> None:
    with pytest.raises(SchemaError):
        attach(theirs, SCHEMAS["xxh3_64"], fds=[os.dup(store.fds[0])])
    with pytest.raises(TierUnavailable, match="descriptors"):
        attach(theirs, SCHEMA)
    with pytest.raises(ProtocolError):
        attach(theirs[:-1], SCHEMA, fds=[os.dup(store.fds[0])])
    export = msgspec.msgpack.decode(theirs, type=Export)
    block = export.blocks[0]

    def changed(**fields: object) -> bytes:
        return msgspec.msgpack.encode(msgspec.structs.replace(export, **fields))

    far = msgspec.structs.replace(block, offset=HBM_BLOCKS * BLOCK)
    few = msgspec.structs.replace(block, checksums=block.checksums[:-8])
    for wrong, error in (
        (changed(version=2), VersionMismatch),
        (changed(blocks=[far]), ProtocolError),
        (changed(blocks=[few]), ProtocolError),
        (changed(region=b"nowhere"), TierUnavailable),
    ):
        opened = len(os.listdir("/proc/self/fd"))
        with pytest.raises(error):
            attach(wrong, SCHEMA, fds=[os.dup(store.fds[0])])
        assert len(os.listdir("/proc/self/fd")) <= opened  # what was passed was closed


def test_reading_checks_its_target(store: HbmStore, theirs: bytes) -> None:
    export = msgspec.msgpack.decode(theirs, type=Export)
    with attach(theirs, SCHEMA, fds=[os.dup(store.fds[0])]) as blocks:
        prefix = _prefix_of(store, export)
        assert blocks.match(prefix) == 2
        for wrong in (
            torch.zeros((1, BLOCK), dtype=torch.uint8),
            torch.zeros((2, BLOCK - 1), dtype=torch.uint8),
            torch.zeros((2, BLOCK), dtype=torch.int8),
            torch.zeros((2, 2 * BLOCK), dtype=torch.uint8)[:, ::2],
            bytearray(2 * BLOCK),
        ):
            with pytest.raises(InvalidInput):
                blocks.read(prefix, wrong)
        with pytest.raises(SchemaError):
            blocks.match(fresh_prefix(1))
        into = torch.zeros((3, BLOCK), dtype=torch.uint8)
        assert blocks.read(fresh_prefix(1, SCHEMA), into) == 0
        assert blocks.read(prefix, into) == 2
        assert not into[2].any()
    blocks.close()


def _prefix_of(store: HbmStore, export: Export) -> Prefix:
    return store._desk.core.entries[export.blocks[0].key].prefix


def test_a_process_does_not_attach_to_itself(store: HbmStore) -> None:
    prefix = fresh_prefix(1, SCHEMA)
    publish(store, prefix)
    with store.lease(prefix) as blocks:
        message = store.export(blocks)
    with pytest.raises(TierUnavailable, match="this process"):
        attach(message, SCHEMA, fds=[os.dup(store.fds[0])])


def test_a_closed_store_exports_nothing(store: HbmStore) -> None:
    store.close()
    with pytest.raises(ClientClosed):
        store.export([])
    with pytest.raises(ClientClosed):
        _ = store.fds


@settings(max_examples=200)
@given(st.data())
def test_garbage_is_a_typed_error(data: st.DataObject) -> None:
    with DeviceRegion.create(BLOCK, "cpu") as region:
        good = msgspec.msgpack.encode(Export(1, region.descriptor(), SCHEMA.fingerprint, []))
    at = data.draw(st.integers(0, len(good) - 1))
    garbage = good[:at] + data.draw(st.binary(max_size=8)) + good[at + 1 :]
    with pytest.raises(TiffinError):
        attach(garbage, SCHEMA)
