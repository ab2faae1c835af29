"""The models that hosts have: in the cache of Hugging Face's hub, and in folders."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mlxdist.base.errors import InvalidArgument
from mlxdist.base.host_shards import ShardCheckpoint, open_checkpoint
from mlxdist.base.model_directory import hub_cache, hub_snapshot, is_hub_name
from mlxdist.base.validation import list_of, number, object_of, text
from mlxdist.cluster.hostfile.options import HostSelection
from mlxdist.cluster.ssh.rpc_client import Connections, checked_call

from .places import parse_config

__all__ = ["list_here", "list_on"]

_PREFIX = "models--"  # of directories in the cache of the hub; there are datasets--, too
_MAX_MODELS = 2000
_SECONDS = 120.0  # for a host to look at all of its models
_ROW = {
    "model": text(512),
    "type": text(100),
    "bytes": number(0, 2**60),
    "missing": text(1000),
    "shards": text(300),
    "path": text(4096),
}
_ROWS = list_of(object_of(_ROW), _MAX_MODELS)


def list_here(directories: Sequence[str]) -> list[dict[str, Any]]:
    """The models on this host. Runs there, for other hosts through the table of mlxdist.cli.rpc_server.

    Args:
        directories: model folders, and folders of these, in addition to the cache of the hub.

    Returns:
        For each model "model": its name or folder, "type": the model_type and the bits of quantized weights, "bytes":
        those of all its files here, "missing": what keeps it from being loaded, empty for nothing, "shards": which
        shards are here where not all of it is, and "path".
    """
    rows = [_row(name, kept, snapshot) for name, kept, snapshot in _in_the_cache()]
    for directory in directories:
        root = Path(os.path.expanduser(directory))
        for path in [root] if (root / "config.json").is_file() else sorted(root.glob("*/")):
            if (path / "config.json").is_file():
                rows.append(_row(str(path), path, path))
    return list(_ROWS("models", rows[:_MAX_MODELS]))  # what is in files may steer a terminal


def list_on(selection: HostSelection, directories: Sequence[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """The models on all hosts as in `list_here`, each with its "host". And messages about hosts without a response."""
    with Connections([host.name for host in selection.hosts()], selection.ssh_config) as connections:
        results, problems = checked_call(
            connections, _ROWS, "models.list", {"directories": list(directories)}, _SECONDS
        )
    return [{"host": host} | row for host, rows in results.items() for row in rows], problems


def _in_the_cache() -> Iterator[tuple[str, Path, Path | None]]:
    """Name, directory and snapshot of each model in the cache of the hub."""
    for kept in sorted(hub_cache().glob(f"{_PREFIX}*")):
        name = kept.name.removeprefix(_PREFIX).replace("--", "/", 1)
        if is_hub_name(name) and kept.is_dir():
            yield name, kept, hub_snapshot(name)


def _row(name: str, directory: Path, snapshot: Path | None) -> dict[str, Any]:
    try:
        missing, shards = _missing(snapshot)
        return {
            "model": name,
            "type": _type(snapshot),
            "bytes": _bytes(directory),
            "missing": missing,
            "shards": shards,
            "path": str(snapshot or directory),
        }
    except OSError as error:  # such as a directory of another user
        what = f"cannot be read: {error.strerror}"
        return {"model": name, "type": "", "bytes": 0, "missing": what, "shards": "", "path": str(directory)}


def _bytes(directory: Path) -> int:
    """The size of all files; in the cache of the hub, where names are links, of all contents."""
    if not (directory / "blobs").is_dir():
        return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    files = [path for part in ("blobs", "snapshots") for path in (directory / part).rglob("*")]
    return sum(path.stat().st_size for path in files if path.is_file() and not path.is_symlink())


def _type(snapshot: Path | None) -> str:
    if snapshot is None:
        return ""
    try:
        config = parse_config(snapshot / "config.json")
        found = str(config["model_type"])
    except (ValueError, KeyError, TypeError):
        return ""
    quantization = config.get("quantization")
    bits = quantization.get("bits") if isinstance(quantization, dict) else None
    return f"{found}, {bits}-bit" if type(bits) is int else found


def _missing(snapshot: Path | None) -> tuple[str, str]:
    if snapshot is None:
        return "the download was interrupted", ""
    if not (snapshot / "config.json").is_file():
        return "there is no config.json", ""
    try:
        checkpoint = open_checkpoint(snapshot)  # which reads the headers of all weights
    except InvalidArgument as error:
        return str(error), ""
    if isinstance(checkpoint, ShardCheckpoint):
        return str(checkpoint.refusal("other ranks read more")), str(checkpoint.shards)
    return "", ""
