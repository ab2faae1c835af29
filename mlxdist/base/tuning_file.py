"""The tuning file: what `mlxdist calibrate` has measured, with a section for each reader.

    "hosts"         how fast each host is, by name: mlxdist/cluster/hostfile/rank_shares.py
    "algorithms"    which algorithm an operation uses: mlxdist/runtime/group/tuning.py
    "expert_links"  what exchanges of tokens cost: mlxdist/nn/expert_parallel/policy.py

The reader of a section checks it; docs/tuning.md has the format. MLXDIST_TUNING_FILE names the file, or is "none".
"""

import datetime
import json
import os
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from .atomic_file import replace_file
from .errors import InvalidArgument
from .json_reader import parse_json
from .validation import read_bounded, suggestion

__all__ = ["SECTIONS", "default_path", "find", "read_section", "setting", "update"]

SCHEMA = 3
SECTIONS = ("hosts", "algorithms", "expert_links")
MAX_FILE_BYTES = 1 << 20
_FIELDS = ("schema", "machine", "date", *SECTIONS)

T = TypeVar("T")


def default_path(environ: Mapping[str, str] = os.environ) -> Path:
    """The path that is read and written where MLXDIST_TUNING_FILE names no other file."""
    return Path(environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "mlxdist" / "tuning.json"


def setting() -> str | None:
    """The value of MLXDIST_TUNING_FILE, for commands, which are no rank and read no other variable."""
    return os.path.expanduser(os.environ.get("MLXDIST_TUNING_FILE", "")) or None


def find(setting: str | None, environ: Mapping[str, str] = os.environ) -> Path | None:
    """The file to read, given MLXDIST_TUNING_FILE: a file, "none", or None for the default one if it exists."""
    if setting is not None:
        return None if setting == "none" else Path(setting)
    try:
        path = default_path(environ)
    except RuntimeError:  # this user has no home directory
        return None
    return path if path.exists() else None


def read_section(path: Path, name: str, check: Callable[[Any], T], empty: Any) -> T:
    """A section of the file, as ``check`` returns it; ``check(empty)`` where the file has no such section.

    Args:
        check: a function that raises ValueError for an invalid section.

    Raises:
        InvalidArgument: the file cannot be read, or is malformed; the text names the line or row.
    """
    try:
        content = _read(path)
        try:
            return check(content.get(name, empty))
        except ValueError as error:
            raise ValueError(f'in "{name}": {error}') from None
    except ValueError as error:
        raise InvalidArgument(
            f"tuning file {path}: {error}; remove it and measure again with `mlxdist calibrate`, or set "
            "MLXDIST_TUNING_FILE=none"
        ) from None


def update(path: Path, sections: Mapping[str, Any]) -> None:
    """Replaces sections of a file, and keeps the others. Readers see either the old or the new content.

    Raises:
        InvalidArgument: the existing file is malformed.
        OSError: the file cannot be written.
    """
    kept = {name: read_section(path, name, lambda value: value, None) for name in SECTIONS if path.exists()}
    machine = {"host": platform.node(), "system": platform.system(), "architecture": platform.machine()}
    head = {
        "schema": SCHEMA,
        "machine": machine | {"cores": os.cpu_count()},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    content = head | {name: value for name, value in (kept | dict(sections)).items() if value}
    lines = [f"  {json.dumps(name)}: {_lines(value)}" for name, value in content.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, "{\n" + ",\n".join(lines) + "\n}\n", 0o600)


def _lines(value: Any) -> str:
    """JSON text with one element of a list per line, which json.dumps cannot write."""
    if not isinstance(value, list):
        return json.dumps(value)
    return "[\n    " + ",\n    ".join(map(json.dumps, value)) + "\n  ]"


def _read(path: Path) -> dict[str, Any]:
    content = parse_json(read_bounded(path, MAX_FILE_BYTES))
    if not isinstance(content, dict):
        raise ValueError("it is not a JSON object")
    schema = content.get("schema")
    if schema != SCHEMA or isinstance(schema, bool):
        raise ValueError(f"its schema is {schema!r:.50}, and this mlxdist reads {SCHEMA}")
    if unknown := sorted(content.keys() - _FIELDS):
        raise ValueError(f"there is no field {unknown[0]!r:.50}; {suggestion(unknown[0], _FIELDS)}")
    return content
