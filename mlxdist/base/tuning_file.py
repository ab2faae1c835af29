"""The tuning file: what `mlxdist calibrate` has measured, with a section for each reader.

    "hosts"         how fast each host is, by name: mlxdist/cluster/hostfile/rank_shares.py
    "algorithms"    which algorithm an operation uses: mlxdist/runtime/tuning.py
    "expert_links"  what exchanges of tokens cost: mlxdist/nn/experts/policy.py

Its reader checks a section; docs/tuning.md describes the format. MLXDIST_TUNING_FILE names the file, or is "none".
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
from .validation import read_bounded

__all__ = ["SECTIONS", "default_path", "find", "read_section", "setting", "strict_json", "update"]

SCHEMA = 2
SECTIONS = ("hosts", "algorithms", "expert_links")
MAX_FILE_BYTES = 1 << 20
_FIELDS = {"schema", "machine", "date", *SECTIONS}

T = TypeVar("T")


def default_path(environ: Mapping[str, str] = os.environ) -> Path:
    """The file that is read and written where MLXDIST_TUNING_FILE names no other."""
    return Path(environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "mlxdist" / "tuning.json"


def setting() -> str | None:
    """The value of MLXDIST_TUNING_FILE, for commands, which are no rank and read no other variable."""
    return os.environ.get("MLXDIST_TUNING_FILE") or None


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
        check: raises ValueError for what the section must not hold.

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
            f"tuning file {path}: {error}; measure again with `mlxdist calibrate`, or set MLXDIST_TUNING_FILE=none"
        ) from None


def update(path: Path, sections: Mapping[str, Any]) -> None:
    """Replaces sections of a file, and keeps the others. Readers see either the old or the new content.

    Raises:
        InvalidArgument: what is there is malformed.
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
    """JSON with one element of a list per line, unlike that of json.dumps."""
    if not isinstance(value, list):
        return json.dumps(value)
    return "[\n    " + ",\n    ".join(map(json.dumps, value)) + "\n  ]"


def _read(path: Path) -> dict[str, Any]:
    content = strict_json(read_bounded(path, MAX_FILE_BYTES))
    if not isinstance(content, dict):
        raise ValueError("it is not a JSON object")
    schema = content.get("schema")
    if schema != SCHEMA or isinstance(schema, bool):
        raise ValueError(f"its schema is {schema!r:.50}, and this mlxdist reads {SCHEMA}")
    if unknown := sorted(set(content) - _FIELDS):
        raise ValueError(f"there is no field {unknown[0]!r:.50}")
    return content


def strict_json(data: bytes) -> Any:
    """The value of a JSON text that another program may have written.

    Raises:
        ValueError: it is none, has a name twice in one object, or a number that JSON does not have.
    """
    try:
        return json.loads(data.decode(), object_pairs_hook=_object, parse_constant=_constant)
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"line {error.lineno}, column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for name, _ in pairs if sum(name == other for other, _ in pairs) > 1)
        raise ValueError(f"{twice!r:.50} is there twice in one object")
    return found


def _constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")
