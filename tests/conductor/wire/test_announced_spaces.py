"""Which key space the prompts of a model have, of those that engines have announced."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from tiffin.conductor.records import InstanceSpec, Role
from tiffin.conductor.state.part_keys import part_keys
from tiffin.conductor.wire.announced_spaces import AnnouncedSpaces
from tiffin.conductor.wire.block_keys import KeyedModels
from tiffin.kvstore import KVSchema
from tiffin.kvstore.format.key_space import KeySpace, secret_name
from tiffin.kvstore.format.keys import Prefix

ENGINES = KVSchema.gqa(
    model="vllm:print", layers=2, kv_heads=1, head_dim=4, dtype="float32", block_tokens=8
)
LATER = KVSchema.gqa(
    model="vllm:print of a new release", layers=2, kv_heads=1, head_dim=4, dtype="float32",
    block_tokens=8,
)  # fmt: skip
TOKENS = np.arange(40, dtype=np.uint32)
SPACE = KeySpace(schema=ENGINES.canonical_bytes().decode(), models=("served", "alias"))


def space(**changes: object) -> bytes:
    return msgspec.structs.replace(SPACE, **changes).encoded()


def test_prompts_have_the_keys_that_the_engines_connector_makes() -> None:
    models = KeyedModels()
    tenant = space(namespace="acme", version="step 7", adapters={"sql": "weights"})
    assert models.announced.announced("node-a", [tenant]) == {"served", "alias"}
    for asked, namespace in (
        ("", SPACE.namespace_of()),
        ("lora:sql", "x"),
        ("explicit", "explicit"),
    ):
        told = KeySpace.decoded(tenant)
        if asked != "explicit":
            namespace = told.namespace_of(asked.removeprefix("lora:"))
        wanted = Prefix(ENGINES, TOKENS, namespace)
        (found,) = models.keys("served", TOKENS, asked)
        assert found[:3] == (wanted.keys, part_keys(wanted), 0)
        assert (found,) == models.keys("alias", TOKENS, asked)
        adapter = asked[5:] if ":" in asked else ""
        salted = Prefix(ENGINES, TOKENS, told.namespace_of(adapter, "pepper"))
        (keys,) = models.keys("served", TOKENS, asked, salt="pepper")
        assert keys.blocks == (() if asked == "explicit" else salted.keys)
    assert models.keys("served", TOKENS, "lora:unknown")[0].blocks == ()
    models.announced.announced("node-b", [space(adapters={"sql": ""})])  # refused
    assert len(models.keys("served", TOKENS, "lora:sql")) == 1


def test_without_an_announcement_nobody_knows_what_becomes_of_a_salt() -> None:
    models = KeyedModels()
    models.learn("served", ENGINES, set)
    assert models.keys("served", TOKENS)[0].blocks
    assert models.keys("served", TOKENS, salt="pepper")[0].blocks == ()


def test_part_keys_begin_behind_what_somebody_has() -> None:
    models = KeyedModels()
    models.announced.announced("n", [space()])
    wanted = Prefix(ENGINES, TOKENS[:39], SPACE.namespace_of())
    for held in (0, 2, 4):
        (found,) = models.keys("served", TOKENS[:39], held=lambda keys, held=held: held)
        assert found[:3] == (wanted.keys, part_keys(wanted, after=held), held)


def test_a_space_goes_before_the_schema_of_a_registration_and_outlives_its_engines() -> None:
    models = KeyedModels()
    own = KVSchema.gqa(
        model="served", layers=2, kv_heads=1, head_dim=4, dtype="float32", block_tokens=8
    )
    models.learn("served", own, set)
    registered = models.keys("served", TOKENS)
    models.announced.announced("node-a", [space()])
    assert models.schema("served") == ENGINES
    assert models.keys("served", TOKENS) != registered
    announced = models.keys("served", TOKENS)
    assert models.announced.announced("node-a", []) == {"served", "alias"}
    assert models.keys("served", TOKENS) == announced  # they are down, and their blocks are there
    models.learn("served", own, set)  # now there are others
    assert models.schema("served") == own
    assert models.keys("served", TOKENS) == registered


def test_a_secret_is_said_and_gives_no_keys() -> None:
    models = KeyedModels()
    models.announced.announced("n", [space(secret=secret_name(b"0123456789abcdef"))])
    assert models.keys("served", TOKENS)[0].blocks == ()
    assert models.announced.notes() == [
        f"the keys of {name} have a secret: name its file in discovery.secret_files, or send "
        "block_keys"
        for name in ("alias", "served")
    ]


def test_who_has_the_secret_makes_keys() -> None:
    models, secret = KeyedModels(), b"0123456789abcdef"
    models.announced.secrets = {secret_name(secret): secret}
    models.announced.announced("n", [space(secret=secret_name(secret))])
    (found,) = models.keys("served", TOKENS, salt="pepper")
    assert found.blocks == Prefix(ENGINES, TOKENS, SPACE.namespace_of("", "pepper"), secret).keys
    assert models.announced.notes() == []


def test_engines_with_other_keys_have_their_own_and_the_most_come_first() -> None:
    models = KeyedModels()
    spaces = models.announced
    new = space(schema=LATER.canonical_bytes().decode(), models=("served",), engine="new")
    old = space(models=("served",))
    spaces.announced("a", [old, old])
    assert spaces.announced("b", [new]) == {"served"}
    assert spaces.notes() == [
        "the engines of served have 2 key spaces, by schema: those of one can't use the blocks of "
        "another"
    ]
    assert [one.schema for one in spaces.all_of("served")] == [ENGINES, LATER]
    first, second = models.keys("served", TOKENS)
    assert first.blocks == Prefix(ENGINES, TOKENS, "").keys
    assert second.blocks == Prefix(LATER, TOKENS, "").keys
    for instance, node, schema in (("x", "a", ENGINES), ("x", "b", ENGINES), ("new", "", LATER)):
        spec = InstanceSpec(instance, "served", Role.MIXED, "p", node=node)
        keyed = spaces.at(spec)
        assert keyed is not None
        assert keyed.schema == schema
    spaces.announced("c", [new, new])
    assert [one.schema for one in spaces.all_of("served")] == [LATER, ENGINES]
    spaces.announced("a", [])  # it is lost
    assert [one.schema for one in spaces.all_of("served")] == [LATER]
    assert spaces.notes() == []


def test_what_engines_of_one_space_say_of_adapters_is_put_together() -> None:
    spaces = AnnouncedSpaces()
    spaces.announced("a", [space(adapters={"sql": "1", "code": "1"})])
    spaces.announced("b", [space(adapters={"chat": "1", "code": "2"})])
    (keyed,) = spaces.all_of("served")
    named = {name: keyed.namespace_of(f"lora:{name}") for name in ("sql", "chat")}
    assert None not in named.values()
    assert len(set(named.values())) == 1  # by their weights
    assert keyed.namespace_of("lora:code") is None  # which of the two?


def test_engines_of_one_space_that_serve_it_by_other_names() -> None:
    spaces = AnnouncedSpaces()
    spaces.announced("a", [space(models=("one",))])
    assert spaces.announced("b", [space(models=("other",))]) == {"other"}
    assert spaces.of("one") is not None
    assert spaces.of("other") is not None


def test_what_can_not_be_read_is_named_and_harms_nobody() -> None:
    spaces = AnnouncedSpaces()
    assert spaces.announced("a", [b"\xff", space(schema="[]"), space()]) == {"served", "alias"}
    (note,) = spaces.notes()
    assert note.startswith("key spaces at a: ")
    spaces.announced("a", [space()])
    assert spaces.notes() == []


@pytest.mark.parametrize(
    ("announced", "found"),
    [
        ({"a": [space(engine="e")], "b": [space(engine="other")]}, "a"),
        ({"a": [space(engine="e")], "b": [space(engine="e")]}, None),
        ({"a": [space()], "b": []}, "a"),
        ({"a": [space(), space()], "b": []}, "a"),
        ({"a": [space()], "b": [space()]}, None),
        ({"a": [space(models=("another",))], "b": []}, None),
        ({"elsewhere": [space()]}, None),
    ],
)
def test_an_engine_is_at_the_node_where_it_announced(
    announced: dict[str, list[bytes]], found: str | None
) -> None:
    spaces = AnnouncedSpaces()
    for node, said in announced.items():
        spaces.announced(node, said)
    home = spaces.node_of("served", "e", ["a", "b"])
    assert (home and home[0]) == found
