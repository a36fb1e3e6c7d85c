"""Computes a prompt's length and block keys: with a local tokenizer, by an instance's `/tokenize`,
or as an estimate.

The keys serve to locate a prompt's blocks. Wrong keys find no blocks, which costs a prefill but
never changes an answer: engines and the store compute their own keys. So a prompt that the gateway
can't tokenise exactly as the engine does gets no keys, and an estimated length unless an instance
counts its tokens.
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from tiffin.kvstore.credentials import read_token
from tiffin.kvstore.errors import InvalidInput, TokenError
from tiffin.kvstore.extras import need
from tiffin.kvstore.format.keys import MAX_SECRET_BYTES, Prefix
from tiffin.kvstore.sizes import format_bytes

from ...errors import InvalidRequest
from ...events.vllm_events import lora_namespace
from ...records import KEYS_MAX, TOKENS_MAX
from ...state.part_keys import part_keys
from ...wire.models import NAME_MAX
from ...wire.schema_text import parse_schema

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tiffin.kvstore.format.media import Media
    from tiffin.kvstore.format.schema import KVSchema

    from ..config import GatewayConfig, ModelConfig
    from ..engines.rendered import Tokens
    from .openai_request import ClientRequest

    # Calls an instance that serves the model; None if it does not return token ids. The flag: asks
    # what is behind placeholders, too.
    Remote = Callable[[ClientRequest, bool], Awaitable[Tokens | None]]

log = logging.getLogger("tiffin.gateway")

How = Literal["client", "local", "engine", "estimated"]
_SCHEMA_BYTES_MAX = 1 << 20
# Content that is no tokens, and that no engine's connector stores.
_EMBEDS = b"prompt_embeds"
_flag = msgspec.json.Decoder(bool)


@dataclass(frozen=True, slots=True)
class Sized:
    """A prompt's length and the keys of its full blocks and of its first parts, 16 bytes each; no
    keys where the gateway can't compute them. `token_ids` are set if the conductor is to make the
    keys, in `namespace`, with `cache_salt` and `media`. `how` names the source of the length."""

    prompt_tokens: int
    how: How
    keys: tuple[bytes, ...] = ()
    token_ids: list[int] | None = None
    part_keys: tuple[bytes, ...] = ()
    namespace: str = ""
    cache_salt: str = ""
    media: tuple[Media, ...] = ()


class LocalTokenizer:
    """A model's tokenizer from a folder in Hugging Face's layout: `tokenizer.json`, and for chats
    the files in which transformers finds the template. Raises InvalidInput. Thread-safe.

    No code of the folder is run, and templates that clients send are not rendered.
    """

    def __init__(self, folder: Path) -> None:
        need("a local tokenizer", "tokenizers")
        from tokenizers import Tokenizer

        path = folder / "tokenizer.json"
        if not path.is_file():
            raise InvalidInput(f"there is no {path}: tokenizer takes a folder that has one")
        try:
            self._tokenizer: Any = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more specific
            raise InvalidInput(f"can't load {path}: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._template = _template(folder)

    @property
    def chats(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return self._template is not None

    def text(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text."""
        # `encode` keeps the interpreter to itself (1.5 s for 1 MB of short words, in which no other
        # thread ran, the event loop's included); `encode_batch` releases it.
        (encoded,) = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoded.ids
        return ids

    def chat(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> list[int] | None:
        """The token ids of a chat; None if the template rejects it, as the engine will."""
        if self._template is None:
            return None
        try:
            text = self._template.apply_chat_template(_joined(messages), tokenize=False, **options)
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            log.debug("the chat template refuses a request: %s", type(error).__name__)
            return None
        except Exception as error:
            if type(error).__module__.partition(".")[0] != "jinja2":
                raise
            return None
        return self.text(text, add_special_tokens=False)


class _Model:
    """The tokenizer, schema and secret with which one model's prompts become tokens and keys."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.local: LocalTokenizer | None = None
        if config.tokenizer not in ("engine", "estimate"):
            self.local = LocalTokenizer(Path(config.tokenizer))
        self.schema: KVSchema | None = None
        if config.schema_file:
            self.schema = read_schema(Path(config.schema_file))
        self.secret = b""
        if config.secret_file:
            self.secret = read_token(Path(config.secret_file))
            if len(self.secret) > MAX_SECRET_BYTES:
                raise InvalidInput(
                    f"the secret in {config.secret_file} is over {MAX_SECRET_BYTES} bytes"
                )
        if self.schema is not None:
            # Validates: raises for an invalid namespace or secret.
            Prefix(self.schema, [], config.namespace, self.secret)

    def of_adapter(self, name: str) -> _Model:
        """The same for an adapter of the model: its KV is another."""
        model = copy.copy(self)
        model.config = msgspec.structs.replace(self.config, namespace=lora_namespace(name))
        return model

    def keys_by(self, *, keyed: bool) -> Literal["gateway", "conductor", "none"]:
        """Who makes keys. `keyed`: whether the conductor can."""
        if self.config.keys == "auto":
            return "gateway" if self.schema is not None else "conductor" if keyed else "none"
        if self.config.keys == "gateway" and self.schema is None:
            return "none"
        return self.config.keys

    def sized(self, ask: ClientRequest, token_ids: list[int], how: How, *, keyed: bool) -> Sized:
        """The length and keys of a tokenised prompt. Raises InvalidRequest for bad token ids."""
        count = min(max(len(token_ids), 1), TOKENS_MAX)
        maker = self.keys_by(keyed=keyed)
        if not token_ids or maker == "none":
            return Sized(count, how)
        if maker == "conductor" and len(ask.salt) <= NAME_MAX:
            return Sized(
                *(count, how),
                token_ids=token_ids,
                namespace=self.config.namespace,
                cache_salt=ask.salt,
            )
        if ask.salt:  # only engines that the conductor knows say what becomes of it
            return Sized(count, how)
        assert self.schema is not None
        try:
            prefix = Prefix(self.schema, token_ids, self.config.namespace, self.secret)
        except TokenError as error:
            raise InvalidRequest(str(error)) from error
        parts = part_keys(prefix, self.secret)
        return Sized(count, how, prefix.keys[:KEYS_MAX], part_keys=parts)


def check_model(config: ModelConfig) -> None:
    """Raises InvalidInput for files of a model's configuration that can't be used."""
    _Model(config)


class Tokenizing:
    """All models' tokenizers, and a thread pool for them. `remote` calls an instance.

    Raises InvalidInput for files that can't be used. The caller closes it.
    """

    def __init__(self, config: GatewayConfig, remote: Remote) -> None:
        self._models = {name: _Model(one) for name, one in config.models.items()}
        self._default = _Model(config.default)
        self._remote = remote
        self._threads = ThreadPoolExecutor(config.limits.tokenizer_threads, "tokenizer")

    def close(self) -> None:
        """Stop the thread pool."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    async def size(self, ask: ClientRequest, base: str, *, keyed: bool) -> Sized:
        """A prompt's length, and its keys if the gateway can compute them. `base` is its model, or
        that to which it belongs as an adapter; `keyed`: whether the conductor can compute them.
        Raises InvalidRequest."""
        model = self._models.get(ask.model)
        if model is None:
            model = self._models.get(base, self._default)
            if base != ask.model:
                model = model.of_adapter(ask.model)
        prompt = ask.prompt
        if prompt.token_ids is not None:
            return model.sized(ask, prompt.token_ids, "client", keyed=keyed)
        if prompt.tokenisable:
            found = await self._tokens(model, ask)
            if found is not None:
                return model.sized(ask, *found, keyed=keyed)
        elif (
            model.config.tokenizer != "estimate" and prompt.foreign and prompt.messages is not None
        ):
            # The engine counts the tokens of an image. The keys depend on the image, too, so there
            # are some only if the engine says what its cache knows it by.
            wanted = model.keys_by(keyed=keyed) == "conductor" and _EMBEDS not in ask.raw
            remote = await self._remote(ask, wanted)
            if remote is not None and remote.media is not None:
                sized = model.sized(ask, remote.ids, "engine", keyed=keyed)
                return replace(sized, media=remote.media)
            if remote is not None:
                return Sized(min(max(len(remote.ids), 1), TOKENS_MAX), "engine")
        estimate = prompt.heard_tokens
        if estimate is None:
            estimate = round(prompt.nbytes / model.config.bytes_per_token)
        return Sized(min(max(estimate, 1), TOKENS_MAX), "estimated")

    async def _tokens(self, model: _Model, ask: ClientRequest) -> tuple[list[int], How] | None:
        if model.local is not None:
            loop = asyncio.get_running_loop()
            ids = await loop.run_in_executor(self._threads, _tokenise, model.local, ask)
            if ids is not None:
                return ids, "local"
        if model.config.tokenizer == "estimate":
            return None
        remote = await self._remote(ask, False)
        return (remote.ids, "engine") if remote is not None else None


def read_schema(path: Path) -> KVSchema:
    """Read a schema from a file that contains its canonical text. Raises InvalidInput."""
    try:
        with path.open("rb") as file:
            raw = file.read(_SCHEMA_BYTES_MAX + 1)
        if len(raw) > _SCHEMA_BYTES_MAX:
            raise InvalidInput(f"{path} is larger than {format_bytes(_SCHEMA_BYTES_MAX)}")
        return parse_schema(raw.decode("ascii").strip())
    except (OSError, ValueError) as error:
        raise InvalidInput(f"can't read a schema from {path}: {error}") from error
    except InvalidRequest as error:
        raise InvalidInput(f"{path}: {error}") from error


def _tokenise(tokenizer: LocalTokenizer, ask: ClientRequest) -> list[int] | None:
    """The prompt's token ids; None if only the engine can tokenise it."""
    if ask.prompt.text is not None:
        special = _option(ask, "add_special_tokens", default=True)
        return tokenizer.text(ask.prompt.text, add_special_tokens=special)
    if ask.own_template or not tokenizer.chats or ask.prompt.messages is None:
        return None
    messages = json.loads(bytes(ask.prompt.messages))
    options: dict[str, Any] = {}
    for name in ("chat_template_kwargs", "tools"):
        if name in ask.fields:
            options[name] = json.loads(bytes(ask.fields[name]))
    extras = options.pop("chat_template_kwargs", None) or {}
    if not isinstance(extras, dict):
        return None
    last = _option(ask, "continue_final_message", default=False)
    start = _option(ask, "add_generation_prompt", default=True)
    # The client's `chat_template_kwargs` reach the template, except those that are parameters of
    # `apply_chat_template` itself.
    kept = {name: value for name, value in extras.items() if name not in _CALL_NAMES}
    options |= {**kept, "continue_final_message": last, "add_generation_prompt": start}
    return tokenizer.chat(messages, options)


# Parameters of `apply_chat_template` that a client's `chat_template_kwargs` can't set.
_CALL_NAMES = frozenset(
    {
        *("self", "conversation", "chat_template", "tokenize", "padding", "truncation"),
        *("max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
        *("tokenizer_kwargs", "continue_final_message", "add_generation_prompt"),
        *("tools", "documents"),
    }
)


def _option(ask: ClientRequest, name: str, *, default: bool) -> bool:
    raw = ask.fields.get(name)
    if raw is None:
        return default
    try:
        return _flag.decode(raw)
    except msgspec.DecodeError:
        return default


def _template(folder: Path) -> Any:
    """The transformers tokenizer, which renders chats; None without a template, or if transformers
    is not installed."""
    if not any(
        (folder / name).is_file() for name in ("tokenizer_config.json", "chat_template.jinja")
    ):
        return None
    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError:
        log.warning("without the library transformers chats of %s are estimated", folder)
        return None
    try:
        found = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError) as error:
        raise InvalidInput(f"can't load the tokenizer in {folder}: {error}") from error
    return found if found.chat_template else None


def _joined(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join a content that is a list of texts into one text with newlines between, as vLLM does for
    templates that take text."""
    joined = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            texts = [str(part.get("text", "")) for part in content]
            message = {**message, "content": "\n".join(texts)}
        joined.append(message)
    return joined
