"""What beside its tokens decides a request's KV cache: the weights' epoch, its adapter, its salt,
its images."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ....format.key_space import KeySpace, announceable, request_namespace
from ....format.media import Media, media_extras
from .adapters import Adapters

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from .weights_epoch import WeightsEpoch


class Identity(NamedTuple):
    """`namespace`: of all blocks of the request. `extras`: of single blocks (`Prefix`)."""

    namespace: str
    extras: dict[int, bytes]


class RequestIdentities:
    """The identities of one engine's requests: its keys are those of `space`, and its weights of
    `epoch`."""

    def __init__(self, block_tokens: int, space: KeySpace, epoch: WeightsEpoch) -> None:
        self._block_tokens = block_tokens
        self._space, self._epoch = space, epoch
        self._adapters = Adapters()

    @property
    def space(self) -> KeySpace:
        """The key space as it is now: of the epoch, and with the adapters that were used."""
        adapters = announceable(self._adapters.known())
        return msgspec.structs.replace(self._space, version=self._epoch.name, adapters=adapters)

    def of(self, request: Any) -> Identity | None:
        """The identity of a request; None if nothing here decides its content, so that it can be
        neither looked up nor stored. Raises InvalidInput for an adapter whose files can't be read
        or have changed.
        """
        if request.prompt_embeds is not None:
            return None
        adapter = request.lora_request
        weights = "" if adapter is None else self._adapters.fingerprint(adapter)
        namespace = request_namespace(
            self._space.namespace, weights, request.cache_salt or "", self._epoch.name
        )
        media = _media_of(request.mm_features or ())
        return Identity(namespace, media_extras(media, self._block_tokens))

    def holds(self, request: Any) -> bool:
        """Whether what the engine has computed of a request since then is still what its identity
        says."""
        return request.lora_request is None or self._adapters.unchanged(request.lora_request)


def _media_of(features: Iterable[Any]) -> Iterator[Media]:
    """By their hashes in vLLM's prefix cache."""
    for feature in features:
        where = feature.mm_position
        yield Media(str(feature.identifier), where.offset, where.length)
