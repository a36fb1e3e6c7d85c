"""A key space: all that the keys of an engine's blocks are made of beside a prompt's tokens. Pure,
but for `read_secret`.

    namespace of a request = the space's namespace [‖ 0 ‖ digest]
    digest                 = blake2b-16 of the JSON [adapter's weights, salt, weights' version?], in
                             hex; none for a request without any of the three

Two parties with the same space make the same key for a block from the same request, and with
different ones never (`Prefix`). So an engine announces its own to the pool (docs/key-spaces.md),
and whoever places requests finds their blocks.
"""

from __future__ import annotations

import json
import re
from hashlib import blake2b
from typing import TYPE_CHECKING, Annotated, Self

import msgspec
from msgspec import Meta

from .. import text
from ..errors import InvalidInput
from .keys import MAX_NAMESPACE_BYTES, namespace_fingerprint

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

# Of the encoded space. A schema of 200 layers has some 60 KiB; an adapter some 100 bytes.
SPACE_BYTES_MAX = 1 << 20
# Names that an engine serves its model by; adapters that it has loaded.
MODELS_MAX, ADAPTERS_MAX = 64, 4096
NAME_MAX, VERSION_MAX = 1024, 2048

Name = Annotated[str, Meta(max_length=NAME_MAX, pattern=text.PLAIN)]
Weights = Annotated[str, Meta(min_length=1, max_length=NAME_MAX, pattern=text.PLAIN)]
Natural = Annotated[int, Meta(ge=0, le=1 << 40)]


class KeySpace(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine announces.

    `schema`: `KVSchema.canonical_bytes()`. `namespace`: of all its requests. `version`: of its
    weights; empty for those in the model's files. `adapters`: by name, what identifies their
    weights. `secret`: a name of the namespace's secret, which says only whether somebody has the
    same one (`secret_name`); empty if there is none.

    These decide no key: `models`, the names under which requests ask for the model; `engine`, the
    engine's own name, empty if it has none; `page_tokens` and `ranks` of its cache; `loads` and
    `saves`, what it does with blocks of the pool.
    """

    schema: Annotated[str, Meta(max_length=SPACE_BYTES_MAX)]
    namespace: Annotated[str, Meta(max_length=MAX_NAMESPACE_BYTES)] = ""
    version: Annotated[str, Meta(max_length=VERSION_MAX)] = ""
    adapters: Annotated[dict[Name, Weights], Meta(max_length=ADAPTERS_MAX)] = {}
    secret: Name = ""
    models: Annotated[tuple[Name, ...], Meta(max_length=MODELS_MAX)] = ()
    engine: Name = ""
    page_tokens: Natural = 0
    ranks: Natural = 1
    loads: bool = True
    saves: bool = True

    def namespace_of(self, adapter: str = "", salt: str = "") -> str:
        """The namespace of a request for an adapter, by name, and with a salt. Raises InvalidInput
        for an adapter that the engine does not name."""
        weights = self.adapters.get(adapter, "") if adapter else ""
        if adapter and not weights:
            raise InvalidInput(f"no engine has announced the adapter {adapter!r}")
        return request_namespace(self.namespace, weights, salt, self.version)

    @property
    def kind(self) -> dict[str, str]:
        """What decides the keys of requests without an adapter."""
        return {name: getattr(self, name) for name in ("schema", "namespace", "version", "secret")}

    def encoded(self) -> bytes:
        """As it travels: msgpack. Raises InvalidInput if it is longer than SPACE_BYTES_MAX."""
        data = _encoder.encode(self)
        if len(data) > SPACE_BYTES_MAX:
            raise InvalidInput(f"a key space of {len(data)} bytes; {SPACE_BYTES_MAX} at most")
        return data

    @classmethod
    def decoded(cls, data: bytes) -> Self:
        """The space that `encoded` made. Raises InvalidInput."""
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidInput(f"this is no key space: {error}") from error


def announceable(adapters: Mapping[str, str]) -> dict[str, str]:
    """Those of an engine's adapters that a space can name: the last ADAPTERS_MAX, without those of
    names that nobody could be shown. The others have no keys at whom it is announced to."""
    named = [
        (name, weights)
        for name, weights in adapters.items()
        if len(name) <= NAME_MAX and _plain.match(name)
    ]
    return dict(named[-ADAPTERS_MAX:])


def request_namespace(namespace: str, weights: str, salt: str, version: str) -> str:
    """The namespace of a request's blocks: see the module. `weights`: what identifies those of its
    adapter, empty without one."""
    if not (weights or salt or version):
        return namespace
    content = [weights, salt, *([version] if version else [])]
    return f"{namespace}\0{blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()}"


def secret_name(secret: bytes) -> str:
    """What tells secrets apart in announcements: 16 hex digits of a digest that is keyed by the
    secret. Empty without a secret. Whoever guesses a secret can confirm it by that, as by a block's
    header (`namespace_fingerprint`)."""
    return namespace_fingerprint("", secret).hex()[:16] if secret else ""


def read_secret(path: Path) -> bytes:
    """The secret of keys in `path`, without surrounding white space. Raises InvalidInput if the
    file can't be read, or has no secret that keys can have."""
    try:
        secret = path.read_bytes().strip()
        namespace_fingerprint(secret=secret)
    except (OSError, InvalidInput) as error:
        raise InvalidInput(f"can't use the secret in {path}: {error}") from error
    return secret


_encoder = msgspec.msgpack.Encoder()
_plain = re.compile(text.PLAIN)
