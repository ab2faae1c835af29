"""`mlxdist serve --print-client`: what a user pastes so that a program asks this server."""

from __future__ import annotations

import ipaddress
import json
import shlex
import socket
from collections.abc import Callable

from mlxdist.base.environment import format_address

__all__ = ["CLIENTS", "client_settings"]

_MODEL = "default_model"  # a name that every server has
_KEY = "MLXDIST_API_KEY"


def _claude_code(address: str, has_key: bool) -> str:
    variables = {
        "ANTHROPIC_BASE_URL": shlex.quote(address),
        "ANTHROPIC_AUTH_TOKEN": f'"${_KEY}"' if has_key else "none",
    }
    for name in ("MODEL", "DEFAULT_OPUS_MODEL", "DEFAULT_SONNET_MODEL", "DEFAULT_HAIKU_MODEL"):
        variables[f"ANTHROPIC_{name}"] = _MODEL
    variables["CLAUDE_CODE_SUBAGENT_MODEL"] = _MODEL
    # A line at the head of each prompt that differs every time, and requests that are not for a model.
    variables |= {"CLAUDE_CODE_ATTRIBUTION_HEADER": "0", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
    lines = [f"export {name}={value}" for name, value in variables.items()]
    return "\n".join(["# In the shell that starts claude:", *lines])


def _codex(address: str, has_key: bool) -> str:
    lines = [
        "# In ~/.codex/config.toml:",
        f'model = "{_MODEL}"',
        'model_provider = "mlxdist"',
        'web_search = "disabled"',
        "",
        "[model_providers.mlxdist]",
        'name = "mlxdist"',
        f"base_url = {json.dumps(address + '/v1')}",
        'wire_api = "responses"',
        *([f'env_key = "{_KEY}"'] if has_key else []),
    ]
    return "\n".join(lines)


def _cline(address: str, has_key: bool) -> str:
    rows = {
        "API Provider": "OpenAI Compatible",
        "Base URL": f"{address}/v1",
        "OpenAI Compatible API Key": f"that of {_KEY}" if has_key else "none",
        "Model ID": _MODEL,
    }
    return "\n".join(["# In the settings of Cline:", *(f"{name + ':':27}{value}" for name, value in rows.items())])


def _open_webui(address: str, has_key: bool) -> str:
    key = f'"${_KEY}"' if has_key else "none"
    lines = [f"export OPENAI_API_BASE_URL={shlex.quote(address + '/v1')}", f"export OPENAI_API_KEY={key}"]
    return "\n".join(["# In the shell that starts open-webui:", *lines])


CLIENTS: dict[str, Callable[[str, bool], str]] = {
    "claude-code": _claude_code,
    "codex": _codex,
    "cline": _cline,
    "open-webui": _open_webui,
}


def client_settings(client: str, host: str, port: int, has_tls: bool, has_key: bool) -> str:
    """The settings of a client, one of :data:`CLIENTS`. They name the key's variable, and never have the key.

    Args:
        client: its name.
        host, port: where the server listens; an address that stands for all is this machine's name to a client.
        has_tls: whether the server speaks https.
        has_key: whether the server has a key.
    """
    try:
        is_any = ipaddress.ip_address(host).is_unspecified
    except ValueError:  # a name
        is_any = False
    where = format_address(socket.gethostname() if is_any else host, port)
    return CLIENTS[client](f"{'https' if has_tls else 'http'}://{where}", has_key) + "\n"
