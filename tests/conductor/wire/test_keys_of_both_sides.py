"""The engine that computes a request and the conductor that places it make the same keys, if the
one has announced its key space to the other; and who announced another space never makes them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiffin.conductor.records import PromptKeys
from tiffin.conductor.state.part_keys import PART_TOKENS, part_keys
from tiffin.conductor.wire.announced_spaces import name_of
from tiffin.conductor.wire.block_keys import KeyedModels
from tiffin.kvstore import KVSchema
from tiffin.kvstore.connectors.vllm.model.request_identity import RequestIdentities
from tiffin.kvstore.connectors.vllm.model.weights_epoch import WeightsEpoch
from tiffin.kvstore.format.key_space import KeySpace, secret_name
from tiffin.kvstore.format.keys import Prefix
from tiffin.kvstore.format.media import Media

if TYPE_CHECKING:
    from pathlib import Path

# Blocks of one part, and of three.
SCHEMAS = [
    KVSchema.gqa(
        model=model, layers=1, kv_heads=1, head_dim=2, dtype="float32",
        block_tokens=block_tokens, hash=how,
    )
    for model, block_tokens, how in (
        ("one", 32, "blake2b"), ("other", 32, "blake2b"), ("one", 64, "blake2b"),
        ("one", 32, "sha256"), ("one", 32, "xxh3_128"),
    )
]  # fmt: skip
SECRETS = (b"", b"0123456789abcdef", b"fedcba9876543210")
KNOWN = SECRETS[:2]  # to the conductor
WEIGHTS = ("old", "new")


class Engine(NamedTuple):
    """All that an engine's keys have beside its requests. `adapters`: which weights each has."""

    schema: KVSchema
    namespace: str
    version: str
    secret: bytes
    adapters: dict[str, str]

    def identities(self) -> RequestIdentities:
        """Of an engine that has just started."""
        space = KeySpace(
            schema=self.schema.canonical_bytes().decode(),
            namespace=self.namespace,
            secret=secret_name(self.secret),
            models=("served",),
        )
        return RequestIdentities(self.schema.block_tokens, space, WeightsEpoch(self.version))


class Asked(NamedTuple):
    adapter: str
    salt: str


WORDS = st.sampled_from(["", "a", "b"]) | st.text(st.characters(exclude_categories=["Cs"]))
NAMES = st.sampled_from(["sql", "chat"])
ENGINES = st.builds(
    Engine,
    st.sampled_from(SCHEMAS),
    WORDS.map(lambda text: text.replace("\0", "")),
    st.sampled_from(["", "a", "step 7"]),
    st.sampled_from(SECRETS),
    st.dictionaries(NAMES, st.sampled_from(WEIGHTS)),
)
ASKED = st.builds(Asked, st.just("") | NAMES, WORDS)
TOKENS = st.integers(0, 150).flatmap(
    lambda count: st.binary(min_size=count, max_size=count).map(
        lambda some: np.frombuffer(some, np.uint8).astype(np.uint32)
    )
)
# Gaps and lengths, one after the other.
MEDIA = st.lists(
    st.tuples(st.sampled_from(["cat", "dog", "\ud800"]), st.integers(0, 40), st.integers(1, 60)),
    max_size=4,
).map(
    lambda some: [
        Media(name, sum(a + b for _, a, b in some[:at]) + gap, length)
        for at, (name, gap, length) in enumerate(some)
    ]
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the adapters' files."""
    found = tmp_path_factory.mktemp("adapters")
    for weights in WEIGHTS:
        (found / weights).mkdir()
        (found / weights / "adapter_model.safetensors").write_text(weights)
    return found


def both(
    engine: Engine, asked: Asked, tokens: np.ndarray, folder: Path, held: int = 0, *beside: Engine
) -> tuple[PromptKeys, PromptKeys]:
    """What the engine makes of a request, and what the conductor does for it that has heard of it,
    and of others `beside`."""
    identities = _used(engine, folder)
    weights = engine.adapters.get(asked.adapter, "")
    own = identities.of(_request(asked.adapter, folder / weights if weights else None, asked.salt))
    assert own is not None
    prefix = Prefix(engine.schema, tokens, own.namespace, engine.secret, own.extras)
    after = min(held, len(prefix))
    name = name_of(identities.space)
    models = KeyedModels()
    models.announced.secrets = {secret_name(secret): secret for secret in KNOWN if secret}
    models.announced.announced("node", [identities.space.encoded()])
    for one in beside:
        models.announced.announced("another", [_used(one, folder).space.encoded()])
    found = models.keys(
        "served",
        tokens,
        f"lora:{asked.adapter}" if asked.adapter else "",
        lambda keys: min(held, len(keys)),
        salt=asked.salt,
    )
    (theirs,) = (one for one in found if one.space == name)
    return PromptKeys(prefix.keys, part_keys(prefix, engine.secret, after), after, name), theirs


def _used(engine: Engine, folder: Path) -> RequestIdentities:
    """Of one that has used its adapters."""
    identities = engine.identities()
    for name, weights in engine.adapters.items():
        identities.of(_request(name, folder / weights))
    return identities


def _request(name: str, path: Path | None, salt: str = "") -> SimpleNamespace:
    adapter = None if path is None else SimpleNamespace(lora_name=name, lora_path=str(path))
    return SimpleNamespace(
        prompt_embeds=None, lora_request=adapter, cache_salt=salt or None, mm_features=()
    )


@given(ENGINES, ASKED, TOKENS, st.integers(0, 3))
def test_the_conductor_makes_the_engines_keys(
    folder: Path, engine: Engine, asked: Asked, tokens: np.ndarray, held: int
) -> None:
    ours, theirs = both(engine, asked, tokens, folder, held)
    unknown = asked.adapter not in ("", *engine.adapters)
    stranger = engine.secret not in KNOWN
    assert theirs == (PromptKeys(space=ours.space) if stranger or unknown else ours)


@given(ENGINES, ENGINES, ASKED, TOKENS, st.integers(0, 3))
def test_what_other_engines_announce_changes_no_key_of_this_one(
    folder: Path, engine: Engine, other: Engine, asked: Asked, tokens: np.ndarray, held: int
) -> None:
    """Adapters of engines with one space are put together, so they are the same here."""
    if engine._replace(adapters={}) == other._replace(adapters={}):
        other = engine
    assert both(engine, asked, tokens, folder, held) == both(
        engine, asked, tokens, folder, held, other
    )


@given(ENGINES, ENGINES, ASKED, ASKED, TOKENS)
def test_no_two_spaces_and_no_two_kinds_of_requests_share_a_key(
    folder: Path, one: Engine, other: Engine, asked: Asked, again: Asked, tokens: np.ndarray
) -> None:
    """Of the same tokens; and all of them where nothing differs."""
    _compare(folder, (one, asked), (other, again), tokens)


@given(ENGINES, ENGINES, ASKED, TOKENS, st.data())
def test_one_difference_is_enough(
    folder: Path, one: Engine, other: Engine, asked: Asked, tokens: np.ndarray, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(Engine._fields))
    changed = one._replace(**{name: getattr(other, name)})
    _compare(folder, (one, asked), (changed, asked), tokens)


@given(st.sampled_from(SCHEMAS), TOKENS, MEDIA, st.integers(0, 3))
def test_images_make_the_engines_keys(
    schema: KVSchema, tokens: np.ndarray, media: list[Media], held: int
) -> None:
    """And no part key says anything of one."""
    media = [one for one in media if one.offset + one.length <= len(tokens)]
    identities = Engine(schema, "", "", b"", {}).identities()
    features = [
        SimpleNamespace(identifier=name, mm_position=SimpleNamespace(offset=at, length=length))
        for name, at, length in media
    ]
    own = identities.of(SimpleNamespace(**{**vars(_request("", None)), "mm_features": features}))
    assert own is not None
    prefix = Prefix(schema, tokens, extras=own.extras)
    models = KeyedModels()
    models.announced.announced("node", [identities.space.encoded()])
    (theirs,) = models.keys("served", tokens, "", lambda keys: min(held, len(keys)), media=media)
    assert theirs.blocks == prefix.keys
    begin = theirs.after * schema.block_tokens
    first = min((one.offset for one in media if one.offset + one.length > begin), default=150)
    named = len(theirs.parts) * PART_TOKENS
    assert theirs.parts == part_keys(prefix, after=theirs.after)[: len(theirs.parts)]
    assert not named or begin + named <= first


def _compare(
    folder: Path, one: tuple[Engine, Asked], other: tuple[Engine, Asked], tokens: np.ndarray
) -> None:
    (ours, heard), (theirs, also_heard) = (both(*it, tokens, folder) for it in (one, other))
    if _content(*one) == _content(*other):
        assert ours == theirs
    else:
        assert not {*ours.blocks, *ours.parts} & {*theirs.blocks, *theirs.parts}
        assert not {*heard.blocks, *heard.parts} & {*also_heard.blocks, *also_heard.parts}


def _content(engine: Engine, asked: Asked) -> tuple[object, ...]:
    """What decides the bytes of a request's blocks."""
    weights = engine.adapters.get(asked.adapter, "")
    return engine.schema, engine.namespace, engine.version, engine.secret, weights, asked.salt
