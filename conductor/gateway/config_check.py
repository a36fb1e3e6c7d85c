"""What is wrong with a gateway's configuration before it is used: `tiffin gateway check`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tiffin.kvstore.credentials import read_token
from tiffin.kvstore.errors import InvalidInput

from .openai.tokenizing import check_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ..web.auth import Tokens
    from .clients.client_settings import ClientSettings
    from .config import GatewayConfig


def errors(config: GatewayConfig) -> Iterator[str]:
    """Why a gateway would not start with this configuration: one line each, all of them."""
    for name, model in {"default": config.default, **config.models}.items():
        yield from _raised(f"models.{name}", partial(check_model, model))
    if config.engine_token_file:
        yield from _raised("engine_token_file", partial(read_token, Path(config.engine_token_file)))
    if config.engine_tls_ca and not Path(config.engine_tls_ca).is_file():
        yield f"engine_tls_ca: there is no file {config.engine_tls_ca}"
    if config.quota_file and not Path(config.quota_file).parent.is_dir():
        yield f"quota_file: there is no folder {Path(config.quota_file).parent}"


def warnings(config: GatewayConfig, tokens: Tokens | None) -> Iterator[str]:
    """What is allowed, and probably not meant."""
    models = {f"models.{name}": model for name, model in config.models.items()}
    for name, model in (models or {"default": config.default}).items():
        if model.keys == "gateway" and not model.schema_file:
            yield (
                f"{name}: without a schema_file the gateway makes no keys, and requests are placed"
                ' by load alone: give one, or keys = "auto"'
            )
    everyone = {"client_default": config.client_default}
    everyone |= {f"clients.{name}": client for name, client in config.clients.items()}
    if not config.quota_file and any(map(_has_quota, everyone.values())):
        yield "quotas per day begin anew when the gateway starts: give a quota_file"
    for name, client in everyone.items():
        if client.priorities and "priority" not in config.honour and len(client.priorities) > 1:
            yield f"{name}.priorities: clients can't name one, as `honour` lacks `priority`"
    if tokens is None:
        if config.clients:
            yield "clients: without --token-file nobody is one of these"
        return
    named = {grant.client for grant in tokens.known.values()} - {""}
    for name in sorted(config.clients.keys() - named):
        yield f"clients.{name}: no key of the token file is named client:{name}"
    for name in sorted(named - config.clients.keys()):
        yield f"client:{name} of the token file has no settings here, and gets client_default"


def _has_quota(client: ClientSettings) -> bool:
    return client.requests_per_day is not None or client.tokens_per_day is not None


def _raised(where: str, check: Callable[[], object]) -> Iterator[str]:
    try:
        check()
    except InvalidInput as error:
        yield f"{where}: {error}"
