"""Whose keys an engine's blocks have, as its weights change."""

from __future__ import annotations

from tiffin.kvstore.connectors.vllm.model.weights_epoch import WeightsEpoch
from tiffin.kvstore.errors import InvalidInput


class Version:
    """What the fleet's file says."""

    def __init__(self, name: str = "") -> None:
        self.name: str | None = name

    def __call__(self) -> str:
        if self.name is None:
            raise InvalidInput("the file is away")
        return self.name


def test_an_engine_with_the_weights_of_its_files_has_the_names_that_it_always_had() -> None:
    epoch = WeightsEpoch(Version())
    assert epoch.scope("") == ""
    assert epoch.scope("a" * 32) == "a" * 32


def test_a_reset_begins_an_epoch_that_no_other_engine_has() -> None:
    one, other = WeightsEpoch(Version()), WeightsEpoch(Version())
    one.begin()
    other.begin()
    seen = {one.scope(""), other.scope(""), one.scope("a" * 32), other.scope("a" * 32), ""}
    one.begin()
    seen.add(one.scope(""))
    assert len(seen) == 6
    assert all(len(scope) in (0, 32) for scope in seen)


def test_engines_with_the_same_version_have_the_same_names() -> None:
    file = Version("step-1")
    one, late = WeightsEpoch(file), WeightsEpoch(file)
    assert one.scope("") == late.scope("") != ""
    file.name = "step-2"
    one.begin()
    assert one.scope("") != late.scope("")
    late.begin()
    assert one.scope("") == late.scope("") == WeightsEpoch(Version("step-2")).scope("")


def test_a_version_that_stood_there_before_the_reset_is_not_believed() -> None:
    file = Version("step-1")
    epoch, fresh = WeightsEpoch(file), WeightsEpoch(Version("step-1"))
    for _ in range(2):  # nor the second time
        epoch.begin()
        assert epoch.scope("") != fresh.scope("")
    file.name = None
    epoch.begin()
    assert epoch.scope("") != fresh.scope("")
    file.name = "step-2"
    epoch.begin()
    assert epoch.scope("") == WeightsEpoch(Version("step-2")).scope("")


def test_no_version_can_be_named_like_the_epoch_of_an_engine() -> None:
    epoch = WeightsEpoch(Version())
    epoch.begin()
    assert WeightsEpoch(Version(epoch.version.strip("\0"))).scope("") != epoch.scope("")
