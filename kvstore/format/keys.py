"""Block keys: the chained hash of everything that determines a block's bytes.

    key[-1] = H(format version, model, schema fingerprint, namespace, secret)     the root
    key[i]  = H(key[i-1] ‖ tokens[i] ‖ extra[i])             tokens as little-endian uint32

Two prompts share key i when they share the root, their first (i+1) × block_tokens tokens and what
else decides these blocks' content (`extra`, empty for text), and otherwise only if H collides.
Equality of prefixes thus becomes equality of 16 bytes, and a lookup needs no tree.
`docs/key-format.md` has the root byte by byte, the choice of H, and test vectors.

This module is written for speed: every request hashes its prompt, of up to 128k tokens, before
anything else can happen. So tokens are converted to bytes once and checked in bulk, and the loop
over blocks only slices, hashes and appends.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b, sha256
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128_digest

from ..errors import InvalidInput, TokenError
from .header import KEY_BYTES, TOKEN_BYTES

if TYPE_CHECKING:
    from .schema import KVSchema

KEY_FORMAT_VERSION: Final = 1
MAX_SECRET_BYTES: Final = 64  # the longest key of blake2b
MAX_NAMESPACE_BYTES: Final = 1024  # a tenant, an adapter and a few digests, with room
MAX_EXTRA_BYTES: Final = 1 << 16  # digests of a block's images, with room
TOKEN_LIMIT: Final = 2**32

_TOKEN: Final = np.dtype("<u4")
_EMPTY: Final = np.frombuffer(b"", dtype=_TOKEN)
_ROOT_TAG: Final = b"tiffin-key"
_NAMESPACE_TAG: Final = b"tiffin-namespace"  # blake2b's `person`: 16 bytes at most

assert array("I").itemsize == TOKEN_BYTES  # true on every platform with 32-bit C ints


class Tensor(Protocol):
    """The interface of a torch tensor that this module uses, so that it need not import torch."""

    def detach(self) -> Any: ...


TokenIds: TypeAlias = Sequence[int] | NDArray[Any] | Tensor
# By block: what beside its tokens decides its content, such as digests of images.
Extras: TypeAlias = Mapping[int, bytes]
Digest: TypeAlias = Callable[[bytes], bytes]


def root_key(schema: "KVSchema", namespace: str = "", secret: bytes = b"") -> bytes:
    """The 16-byte key before the first block. Raises InvalidInput for a bad namespace or secret."""
    _check_secret(secret)
    return digest_of(schema.hash, secret)(_root_bytes(schema, namespace, secret))


def namespace_fingerprint(namespace: str = "", secret: bytes = b"") -> bytes:
    """16 bytes that distinguish namespaces in headers and messages.

    Keyed by the secret, so they reveal neither it nor whether two tenants chose the same name. An
    attacker can confirm a guessed secret; use 16 random bytes or more.
    """
    _check_secret(secret)
    name = _namespace_bytes(namespace)
    return blake2b(name, digest_size=KEY_BYTES, key=secret, person=_NAMESPACE_TAG).digest()


class _Chain:
    """The blocks of one prompt. Append-only: block i never changes.

    Invariants: len(keys) == len(chunks); every chunk is exactly one block of tokens; tail is less
    than one block. Chunks are the hashed slices, kept because writers put them in headers and
    readers compare them with headers. `first` is the index of the first block within the prompt and
    `before` the key before it: not 0 and the root if this was unpickled from a slice.
    """

    __slots__ = (
        "before",
        "chunks",
        "digest",
        "extras",
        "first",
        "keys",
        "name",
        "name_print",
        "root",
        "schema",
        "tail",
    )

    def __init__(self, schema: "KVSchema", namespace: str, secret: bytes, extras: Extras) -> None:
        self.extras = _check_extras(extras)
        self.root = root_key(schema, namespace, secret)
        self.name_print = namespace_fingerprint(namespace, secret)
        self.digest = digest_of(schema.hash, secret)
        self.schema = schema
        self.name = namespace
        self.keys: list[bytes] = []
        self.chunks: list[bytes] = []
        self.tail = b""
        self.first = 0
        self.before = self.root

    def append(self, token_bytes: bytes) -> int:
        """Add tokens; return how many blocks they completed."""
        data = self.tail + token_bytes if self.tail else token_bytes
        chunk_bytes = self.schema.block_tokens * TOKEN_BYTES
        end = len(data) - len(data) % chunk_bytes
        digest, keys, chunks = self.digest, self.keys, self.chunks
        key = keys[-1] if keys else self.before
        extras = self.extras
        for offset in range(0, end, chunk_bytes):
            chunk = data[offset : offset + chunk_bytes]
            key = digest(key + chunk + extras[len(keys)] if len(keys) in extras else key + chunk)
            chunks.append(chunk)
            keys.append(key)
        self.tail = data[end:]
        return end // chunk_bytes


class Prefix:
    """The full blocks of a prompt, or of a part of it: their tokens and their chained keys.

    `len()` counts blocks; `prefix[a:b]` and `prefix[i]` are prefixes over a part of the same chain,
    made without a copy. Only the object that was built from tokens can be extended; slices taken
    earlier stay unchanged. A prompt shorter than one block has length 0 and a tail.

    Pickled, it becomes a slice with its blocks' tokens and keys, without tail and secret.

    `extras`: for blocks that their tokens do not decide, what else does, at most MAX_EXTRA_BYTES:
    digests of the images behind their placeholders, and where these begin. It is part of the
    block's key and so of all keys after it.

    Raises TokenError for bad token ids, InvalidInput for a bad namespace, secret or extra. Not
    thread-safe while a thread extends it.
    """

    __slots__ = ("_chain", "_key_bytes", "_keys", "_start", "_stop", "_tokens")

    def __init__(
        self,
        schema: "KVSchema",
        token_ids: TokenIds,
        namespace: str = "",
        secret: bytes = b"",
        extras: Extras | None = None,
    ) -> None:
        chain = _Chain(schema, namespace, secret, extras or {})
        chain.append(_as_uint32(token_ids).tobytes())  # tobytes copies: later changes do no harm
        self._init(chain, 0, None)

    def _init(self, chain: _Chain, start: int, stop: int | None) -> None:
        self._chain = chain
        self._start = start
        self._stop = stop  # None: to the chain's end, also after `extend`
        self._forget()

    def _forget(self) -> None:
        self._keys: tuple[bytes, ...] | None = None
        self._key_bytes: bytes | None = None
        self._tokens: NDArray[np.uint32] | None = None

    def __len__(self) -> int:
        stop = len(self._chain.keys) if self._stop is None else self._stop
        return stop - self._start

    def __getitem__(self, index: int | slice) -> "Prefix":
        """A part of this prefix, counted in blocks. Raises InvalidInput for a step other than 1."""
        if isinstance(index, slice):
            first, last, step = index.indices(len(self))
            if step != 1:
                raise InvalidInput("blocks of a prefix are consecutive: the slice step must be 1")
        else:
            first = range(len(self))[index]  # handles negative indices, raises IndexError
            last = first + 1
        part = Prefix.__new__(Prefix)
        part._init(self._chain, self._start + first, self._start + max(first, last))
        return part

    def __iter__(self) -> "Iterator[Prefix]":
        return (self[index] for index in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Prefix):
            return NotImplemented
        return (
            self.start == other.start
            and self.schema_fingerprint == other.schema_fingerprint
            and self.namespace_fingerprint == other.namespace_fingerprint
            and self.keys == other.keys
            and self.token_chunks() == other.token_chunks()
            and self._tail() == other._tail()
        )

    __hash__ = None  # type: ignore[assignment]  # extend() changes it in place

    def __repr__(self) -> str:
        last = self.keys[-1].hex() if len(self) else "none"
        blocks = f"blocks {self.start}:{self.start + len(self)}"
        namespace = f" namespace={self.namespace!r}" if self.namespace else ""
        model = self.schema.model
        return f"<Prefix {model!r}{namespace} {blocks}, {self.token_count} tokens, last key {last}>"

    @property
    def schema(self) -> "KVSchema":
        return self._chain.schema

    @property
    def namespace(self) -> str:
        return self._chain.name

    @property
    def root(self) -> bytes:
        """The key before the first block of the whole prompt."""
        return self._chain.root

    @property
    def parent(self) -> bytes:
        """The key before this slice's first block; the root at the start of the prompt."""
        return self._chain.keys[self._start - 1] if self._start else self._chain.before

    @property
    def start(self) -> int:
        """Index of the first block within the whole prompt."""
        return self._chain.first + self._start

    @property
    def schema_fingerprint(self) -> bytes:
        return self._chain.schema.fingerprint

    @property
    def namespace_fingerprint(self) -> bytes:
        return self._chain.name_print

    @property
    def keys(self) -> tuple[bytes, ...]:
        """One 16-byte key per block."""
        if self._keys is None:
            self._keys = tuple(self._chain.keys[self._start : self._start + len(self)])
        return self._keys

    @property
    def key_bytes(self) -> bytes:
        """All keys joined, 16 bytes each, as in messages."""
        if self._key_bytes is None:
            self._key_bytes = b"".join(self.keys)
        return self._key_bytes

    @property
    def tokens(self) -> NDArray[np.uint32]:
        """Tokens of the full blocks, uint32 [len × block_tokens], read-only. Without the tail."""
        if self._tokens is None:
            self._tokens = np.frombuffer(b"".join(self.token_chunks()), dtype=_TOKEN)
        return self._tokens

    @property
    def tail(self) -> NDArray[np.uint32]:
        """Tokens after the last full block, uint32, read-only; empty for slices."""
        tail = self._tail()
        return np.frombuffer(tail, dtype=_TOKEN) if tail else _EMPTY

    @property
    def token_count(self) -> int:
        """Tokens in full blocks and in the tail."""
        return len(self) * self.schema.block_tokens + len(self._tail()) // TOKEN_BYTES

    def token_bytes(self, index: int) -> bytes:
        """Tokens of one block as little-endian uint32 bytes; no copy. Raises IndexError."""
        return self._chain.chunks[self._start + range(len(self))[index]]

    def token_chunks(self) -> list[bytes]:
        """`token_bytes` of every block, for loops over many blocks."""
        return self._chain.chunks[self._start : self._start + len(self)]

    def extend(self, token_ids: TokenIds) -> int:
        """Add tokens in place; return how many blocks they completed.

        Hashes only the new tokens and the incomplete block, not the prompt. Raises InvalidInput on
        a slice, and TokenError for bad token ids, without adding any token.
        """
        if self._stop is not None:
            raise InvalidInput("a slice cannot be extended; extend the prefix it was taken from")
        completed = self._chain.append(_as_uint32(token_ids).tobytes())
        if completed:
            self._forget()
        return completed

    def __reduce__(self) -> "tuple[Callable[..., Prefix], tuple[Any, ...]]":
        chain = self._chain
        identity = (chain.schema, chain.name, chain.root, chain.name_print)
        tokens = b"".join(self.token_chunks())
        return _unpickled, (*identity, self.start, self.parent, self.key_bytes, tokens)

    def _tail(self) -> bytes:
        return self._chain.tail if self._stop is None else b""


def _unpickled(
    schema: "KVSchema",
    namespace: str,
    root: bytes,
    name_print: bytes,
    start: int,
    parent: bytes,
    key_bytes: bytes,
    tokens: bytes,
) -> Prefix:
    """The slice that `Prefix.__reduce__` took apart."""
    chain = _Chain.__new__(_Chain)
    chain.schema, chain.name = schema, namespace
    chain.root, chain.name_print = root, name_print
    chain.first, chain.before = start, parent
    chunk_bytes = schema.block_tokens * TOKEN_BYTES
    chain.keys = [key_bytes[at : at + KEY_BYTES] for at in range(0, len(key_bytes), KEY_BYTES)]
    chain.chunks = [tokens[at : at + chunk_bytes] for at in range(0, len(tokens), chunk_bytes)]
    chain.tail, chain.extras = b"", {}
    prefix = Prefix.__new__(Prefix)
    prefix._init(chain, 0, len(chain.keys))  # a slice: no `extend`, which needs the digest
    return prefix


def digest_of(name: str, secret: bytes) -> Digest:
    """The hash function of a schema, bytes → 16 bytes. Only blake2b uses the secret as a key."""
    if name == "xxh3_128":
        return xxh3_128_digest
    if name == "sha256":
        return lambda data: sha256(data).digest()[:KEY_BYTES]
    if name == "blake2b":
        return lambda data: blake2b(data, digest_size=KEY_BYTES, key=secret).digest()
    raise InvalidInput(f"unknown hash {name!r}")


def _root_bytes(schema: "KVSchema", namespace: str, secret: bytes) -> bytes:
    """Every field after its length, so that different lists of fields give different bytes."""
    fields = (
        _ROOT_TAG,
        KEY_FORMAT_VERSION.to_bytes(4, "little"),
        schema.model.encode(),
        schema.fingerprint,
        _namespace_bytes(namespace),
        secret,
    )
    return b"".join(len(field).to_bytes(4, "little") + field for field in fields)


def _namespace_bytes(namespace: str) -> bytes:
    if not isinstance(namespace, str):
        raise InvalidInput(f"a namespace is a str, not {type(namespace).__name__}")
    try:
        encoded = namespace.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(f"a namespace must encode as UTF-8: {error.reason}") from error
    if len(encoded) > MAX_NAMESPACE_BYTES:
        raise InvalidInput(f"a namespace has at most {MAX_NAMESPACE_BYTES} bytes of UTF-8")
    return encoded


def _check_secret(secret: bytes) -> None:
    if not isinstance(secret, bytes):
        raise InvalidInput(f"a secret is bytes, not {type(secret).__name__}")
    if len(secret) > MAX_SECRET_BYTES:
        raise InvalidInput(f"a secret has at most {MAX_SECRET_BYTES} bytes, not {len(secret)}")


def _check_extras(extras: Extras) -> dict[int, bytes]:
    for block, extra in extras.items():
        if not isinstance(block, int) or isinstance(block, bool) or block < 0:
            raise InvalidInput(f"extras[{block!r}]: name blocks by their index in the prompt")
        if not isinstance(extra, bytes) or len(extra) > MAX_EXTRA_BYTES:
            raise InvalidInput(f"extras[{block}] must be bytes, {MAX_EXTRA_BYTES} at most")
    return dict(extras)


def _as_uint32(token_ids: TokenIds) -> NDArray[np.uint32]:
    """Token ids as little-endian uint32 [tokens]; may share memory with the input.

    Accepts lists, tuples and ranges of ints; integer arrays and torch tensors, [n] or [1, n].
    Raises TokenError, with the first offending index, for anything that is not an integer in
    [0, 2**32): floats, bools, strings, None, negatives, batches of several prompts, masked arrays.
    """
    if type(token_ids) is not np.ndarray and isinstance(token_ids, np.ma.MaskedArray):
        raise TokenError("token_ids is a masked array; pass those that are tokens: .compressed()")
    if isinstance(token_ids, np.ndarray):
        return _from_array(token_ids)
    if isinstance(token_ids, list | tuple):
        return _from_list(token_ids)
    if isinstance(token_ids, range):
        return _from_range(token_ids)
    if isinstance(token_ids, array):
        return _from_array(np.asarray(token_ids))
    if hasattr(token_ids, "detach"):
        return _from_array(_tensor_to_array(token_ids))
    if hasattr(token_ids, "__array__"):
        return _from_array(np.asarray(token_ids))
    if isinstance(token_ids, Sequence) and not isinstance(token_ids, str | bytes | bytearray):
        return _from_list(list(token_ids))
    raise TokenError(
        f"token_ids is a {type(token_ids).__name__}; pass a list of ints, an integer array or a"
        " tensor"
    )


def _from_array(tokens: NDArray[Any]) -> NDArray[np.uint32]:
    if tokens.ndim == 2 and tokens.shape[0] == 1:
        tokens = tokens[0]
    if tokens.ndim != 1:
        raise TokenError(f"token_ids has shape {tokens.shape}; pass one prompt, [n] or [1, n]")
    kind, item_bytes = tokens.dtype.kind, tokens.dtype.itemsize
    if kind == "O":
        return _from_list(tokens.tolist())
    if kind not in "iu":
        raise TokenError(f"token_ids has dtype {tokens.dtype}; pass integers")
    if kind == "i" or item_bytes > TOKEN_BYTES:
        _check_range(tokens, kind, item_bytes)
    return tokens.astype(_TOKEN, order="C", copy=False)


def _check_range(tokens: NDArray[Any], kind: str, item_bytes: int) -> None:
    """Raise TokenError for a token outside [0, 2**32). Interpreted as unsigned, a negative number
    is a huge one, so a single pass finds both errors.

    For 131072 int64: 14 µs, against 26 µs for min() and max(), and 70 µs for a round trip.
    """
    order = tokens.dtype.byteorder
    unsigned = tokens.view(f"{order}u{item_bytes}")
    limit = TOKEN_LIMIT if item_bytes > TOKEN_BYTES else 1 << (8 * item_bytes - 1)
    if unsigned.size and unsigned.max() >= limit:
        index = int((unsigned >= limit).argmax())
        raise TokenError(f"token_ids[{index}] = {tokens[index]} is outside [0, 2**32)")


def _from_list(tokens: Sequence[int]) -> NDArray[np.uint32]:
    """Convert a list with `array`, which checks three times as fast as numpy, but takes True for 1.

    Only a token that became 0 or 1 can have been a bool, so only those are checked.
    """
    try:
        packed = array("I", tokens)
    except (TypeError, OverflowError) as error:
        raise TokenError(_complaint(tokens)) from error
    values = np.frombuffer(packed, dtype=np.uint32)
    suspects = np.flatnonzero(values <= 1).tolist()
    if bool in map(type, map(tokens.__getitem__, suspects)):
        raise TokenError(_complaint(tokens))
    return values.astype(_TOKEN, copy=False)


def _from_range(tokens: range) -> NDArray[np.uint32]:
    for index in (0, len(tokens) - 1) if tokens else ():  # a range is monotonic
        if not 0 <= tokens[index] < TOKEN_LIMIT:
            raise TokenError(f"token_ids[{index}] = {tokens[index]} is outside [0, 2**32)")
    return np.arange(tokens.start, tokens.stop, tokens.step, dtype=np.int64).astype(_TOKEN)


def _tensor_to_array(tensor: Any) -> NDArray[Any]:
    try:
        return np.asarray(tensor.detach().cpu().numpy())
    except (AttributeError, TypeError, RuntimeError) as error:
        # bfloat16 tensors, among others, raise here: numpy has no such type
        raise TokenError(f"token_ids is no tensor of integers: {error}") from error


def _complaint(tokens: Iterable[object]) -> str:
    """The error message for the first invalid token, without its text, which may be a user's."""
    for index, token in enumerate(tokens):
        if isinstance(token, bool | np.ma.MaskedArray) or not hasattr(token, "__index__"):
            return f"token_ids[{index}] is a {type(token).__name__}, not an int"
        if not 0 <= int(token.__index__()) < TOKEN_LIMIT:
            return f"token_ids[{index}] = {token} is outside [0, 2**32)"
    return "token_ids cannot be read as integers in [0, 2**32)"
