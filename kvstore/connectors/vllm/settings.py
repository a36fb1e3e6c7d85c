"""The connector's settings, as they stand in `kv_connector_extra_config`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import parse_qsl, urlsplit

import msgspec

from ...client.verbs.arguments import Verify, check_timeout
from ...errors import InvalidInput
from ...format.key_space import read_secret
from ...format.keys import namespace_fingerprint
from ...sizes import parse_bytes
from ...url import parse_url

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Loading = Literal["auto", "synchronous", "asynchronous"]
Saving = Literal["always", "second"]
Layerwise = Literal["auto", "always", "never"]

# Secrets that somebody may write into a URL, and the parameters that name a file with them instead.
_FILES = {
    "token": "token_file",
    "password": "password_file",
    "sentinel_password": "sentinel_password_file",
}
_OF_NETWORK = ("tiffin", "redis", "rediss", "valkey", "valkeys")
# A request's adapter and salt are appended to the namespace: a zero byte and 32 digits.
_LONGEST_SUFFIX = "\0" + 32 * "0"


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`kv_connector_extra_config`, checked. Made by `read`, which raises InvalidInput.

    `url`: the pool, in any form that `Client.open` takes. `engine`: a name of this engine, by which
    a conductor knows it from others of its model on its host; only needed where their key spaces
    differ. `namespace`: requests share blocks only
    within it. `secret_file`: a file with the namespace's secret; the secret itself must not stand
    in a configuration that vLLM logs. `model_fingerprint`: what identifies the weights, if they are
    not files that can be read here. `loading`: "auto" loads synchronously what lies in the DRAM of
    this host while nothing decodes, else asynchronously. `save`: "second" saves a block when this
    engine uses it for the second time. `layerwise`: "always" copies layer after layer beside the
    forward pass, loads and, while they are computed, saves; "auto" does so where it pays.
    `weights_version` names the weights, `weights_version_file` a file with that name, which is read
    again at each reset (`WeightsEpoch`).
    `load_tokens_min`: fewer tokens are computed rather than loaded; `save_tokens_min`: shorter
    prompts are not saved. `handoff_timeout_s`: how long a request waits for blocks that the
    instance which prefilled it has promised, and for the next ones while it prefills;
    `prefill_timeout_s`: how long one that was sent together with its prefill waits until that
    writes. `pin_memory`: register the pool's memory on this host
    with CUDA; on a CPU it does nothing. `hbm_bytes`: of each worker's GPU for blocks in front of
    the pool, a number or text such as "8GiB"; 0 is none.
    """

    url: str
    engine: str = ""
    namespace: str = ""
    secret_file: str | None = None
    model_fingerprint: str | None = None
    weights_version: str = ""
    weights_version_file: str | None = None
    block_tokens: int = 512
    verify: Verify = "always"
    loading: Loading = "auto"
    save: Saving = "always"
    layerwise: Layerwise = "auto"
    load_tokens_min: int = 1
    save_tokens_min: int = 0
    lookup_timeout_s: float = 0.25
    handoff_timeout_s: float = 2.0
    prefill_timeout_s: float = 10.0
    load_timeout_s: float = 5.0
    save_timeout_s: float = 10.0
    pin_memory: bool = True
    hbm_bytes: int | str = 0

    @property
    def saves_by_layer(self) -> bool:
        """Whether blocks are saved layer by layer while they are computed. Not with the policy
        "second", which knows only of confirmed blocks whether they are to be saved."""
        return self.layerwise == "always" and self.save == "always"

    def hbm_nbytes(self) -> int:
        """`hbm_bytes` as a number."""
        return parse_bytes(self.hbm_bytes)

    def secret(self) -> bytes:
        """The namespace's secret. Raises InvalidInput if its file can't be read, or has no secret
        that keys can have."""
        if self.secret_file is None:
            return b""
        try:
            return read_secret(Path(self.secret_file))
        except InvalidInput as error:
            raise InvalidInput(f"secret_file: {error}") from error


def read(extra: Mapping[str, Any]) -> Settings:
    """The settings in `kv_connector_extra_config`. Raises InvalidInput that names the setting."""
    if "url" not in extra:
        raise InvalidInput(
            'kv_connector_extra_config needs "url", the pool: for example'
            ' {"url": "unix:/run/tiffin/node.sock"}'
        )
    try:
        settings = msgspec.convert(dict(extra), Settings)
    except msgspec.ValidationError as error:
        raise InvalidInput(f"kv_connector_extra_config: {error}") from error
    _check_no_secret(settings.url)
    parse_url(settings.url)
    for name, lowest in (("block_tokens", 1), ("load_tokens_min", 0), ("save_tokens_min", 0)):
        if getattr(settings, name) < lowest:
            raise InvalidInput(f"{name}={getattr(settings, name)}; pass {lowest} or more tokens")
    for name in (
        "lookup_timeout_s",
        "handoff_timeout_s",
        "prefill_timeout_s",
        "load_timeout_s",
        "save_timeout_s",
    ):
        _check(name, check_timeout, getattr(settings, name))
    if settings.weights_version and settings.weights_version_file is not None:
        raise InvalidInput("weights_version and weights_version_file are set; pass one of them")
    _check("hbm_bytes", parse_bytes, settings.hbm_bytes)
    _check("namespace", namespace_fingerprint, settings.namespace + _LONGEST_SUFFIX)
    return settings


def _check_no_secret(url: str) -> None:
    """Raise InvalidInput, which does not quote it, for a URL with a password or a token in it:
    vLLM logs its configuration. A URL that is none is left to `parse_url`."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return
    for name, _ in parse_qsl(parts.query, keep_blank_values=True):
        if name.lower() in _FILES:
            _refuse_secret(name, _FILES[name.lower()])
    if parts.scheme.partition("+")[0] not in _OF_NETWORK:
        return
    # An unescaped / ? or # in a password ends what urlsplit takes for the host.
    user, at, _ = parts.netloc.rpartition("@")
    rest = parts.path + parts.query.partition("=")[0] + parts.fragment
    if (at and ":" in user) or "@" in rest:
        name = "token" if parts.scheme == "tiffin" else "password"
        _refuse_secret(name, _FILES[name])


def _refuse_secret(name: str, parameter: str) -> None:
    raise InvalidInput(
        f"url has a {name.replace('_', ' ')} in it, and vLLM logs its configuration: write it into "
        f"a file that only the engine's user can read, and name that in the URL by "
        f"?{parameter}=PATH"
    )


def _check(name: str, check: Callable[[Any], object], value: object) -> None:
    """Raise InvalidInput, with the setting's name, if `check` refuses its value."""
    try:
        check(value)
    except InvalidInput as error:
        raise InvalidInput(f"{name}: {error}") from error
