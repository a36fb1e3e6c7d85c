"""The connector's settings, as they stand in `kv_connector_extra_config`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from ...errors import InvalidInput
from ...url import parse_url
from ...verbs.arguments import VERIFY, Verify, check_timeout

if TYPE_CHECKING:
    from collections.abc import Mapping

Loading = Literal["auto", "synchronous", "asynchronous"]


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`kv_connector_extra_config`, checked. Made by `read`, which raises InvalidInput.

    `url`: the pool, in any form that `Client.open` takes. `namespace`: requests share blocks only
    within it. `secret_file`: a file with the namespace's secret; the secret itself must not stand
    in a configuration that vLLM logs. `model_fingerprint`: what identifies the weights, if they are
    not files that can be read here. `loading`: "auto" loads synchronously what lies in the DRAM of
    this host while nothing decodes, else asynchronously. `load_tokens_min`: fewer tokens are
    computed rather than loaded; `save_tokens_min`: shorter prompts are not saved.
    """

    url: str
    namespace: str = ""
    secret_file: str | None = None
    model_fingerprint: str | None = None
    block_tokens: int = 512
    verify: Verify = "always"
    loading: Loading = "auto"
    load_tokens_min: int = 1
    save_tokens_min: int = 0
    lookup_timeout_s: float = 0.25
    load_timeout_s: float = 5.0
    save_timeout_s: float = 10.0

    def secret(self) -> bytes:
        """The namespace's secret. Raises InvalidInput if its file can't be read."""
        if self.secret_file is None:
            return b""
        try:
            return Path(self.secret_file).read_bytes().strip()
        except OSError as error:
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
    parse_url(settings.url)
    if settings.verify not in VERIFY:
        raise InvalidInput(f"verify={settings.verify!r}; choose one of {', '.join(VERIFY)}")
    for name in ("lookup_timeout_s", "load_timeout_s", "save_timeout_s"):
        check_timeout(getattr(settings, name))
    for name in ("load_tokens_min", "save_tokens_min"):
        if getattr(settings, name) < 0:
            raise InvalidInput(f"{name}={getattr(settings, name)}; pass 0 or more tokens")
    return settings
