"""Finds a model on this host: a directory, or a name such as org/model that Hugging Face's local cache has.

Nothing here uses the network or imports ``huggingface_hub``: `mlxdist doctor` checks hosts that may not have it.
"""

import os
import re
import shlex
from pathlib import Path

from .errors import InvalidArgument

__all__ = ["find_model", "hub_cache", "hub_directory", "hub_snapshot", "is_hub_name", "model_directory", "pull_command"]

_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
_MAX_REVISION = 256  # bytes


def find_model(model: str, directory: str = "") -> Path | None:
    """The path ``model``, relative to ``directory``; else the entry of that name in the local cache; else ``None``."""
    path = Path(directory, os.path.expanduser(model))
    if path.exists():
        return path
    return hub_snapshot(model) if is_hub_name(model) else None


def hub_snapshot(model: str) -> Path | None:
    """The directory in the local cache with the files of a model of the hub, some of which may be missing."""
    kept = hub_directory(model)
    main = kept / "refs" / "main"
    if not main.is_file():
        return None
    with main.open("rb") as file:
        revision = file.read(_MAX_REVISION).decode(errors="replace").strip()
    snapshot = kept / "snapshots" / revision
    return snapshot if revision and snapshot.is_dir() else None


def model_directory(model: str | Path | None) -> Path:
    """The directory with the config.json of ``model``: a path, or a name such as org/model after `mlxdist pull`.

    Raises:
        InvalidArgument: there is no such directory; the text has the command to type.
    """
    if not isinstance(model, str | Path):
        raise InvalidArgument(f"a model must be the directory or the name of one, not {model!r}")
    found = find_model(str(model))
    if found is not None and (found / "config.json").is_file():
        return found
    what = f"there is no {model if found is None else found / 'config.json'}"
    if is_hub_name(str(model)) and not Path(model).exists():
        what += f", and no such model in {hub_cache()}" if found is None else ""
        raise InvalidArgument(f"{what}; to fetch it from the Hugging Face Hub, type: {pull_command(str(model))}")
    path = os.path.abspath(os.path.expanduser(model))
    raise InvalidArgument(
        f"{what}; give the directory of a model, or org/model after `mlxdist pull org/model`; if another host has it, "
        f"type: {pull_command(path)}"
    )


def pull_command(model: str | Path) -> str:
    """The command that brings a model to hosts: a name of the hub, or a directory, which may be that of a snapshot in
    the local cache."""
    path = Path(model)
    kept = path.parent.parent
    if path.parent.name == "snapshots" and kept.parent == hub_cache() and kept.name.startswith("models--"):
        model = kept.name.removeprefix("models--").replace("--", "/", 1)
    if is_hub_name(str(model)):
        return f"mlxdist pull {model}, for several hosts with --hostfile FILE"
    return f"mlxdist pull {shlex.quote(str(model))} --hostfile FILE"


def is_hub_name(model: str) -> bool:
    """Whether ``model`` may be the name of a model on Hugging Face's hub; it may be a relative path, too."""
    return _HUB_NAME.fullmatch(model) is not None


def hub_directory(model: str) -> Path:
    """The directory of Hugging Face's local cache for a model of the hub, with its blobs, refs and snapshots."""
    return hub_cache() / f"models--{model.replace('/', '--')}"


def hub_cache() -> Path:
    """The directory of Hugging Face's local cache, found by the same variables that ``huggingface_hub`` reads."""
    variables = os.environ
    caches = variables.get("XDG_CACHE_HOME") or "~/.cache"
    home = variables.get("HF_HOME") or os.path.join(caches, "huggingface")
    hub = variables.get("HF_HUB_CACHE") or variables.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    return Path(os.path.expandvars(os.path.expanduser(hub)))
