"""The tuning table: which algorithm an operation uses, measured by `mlxdist bench tune` and kept in a file.

Rank 0 reads it with :func:`load` and hands it to all ranks as bytes (:func:`pack`, :func:`unpack`): a choice that
differs between ranks is a mismatch. The format of the file is described in docs/tuning.md.
"""

import datetime
import json
import os
import platform
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxdist.base.atomic_file import replace_file
from mlxdist.base.environment import ALGORITHMS as SETTINGS
from mlxdist.base.environment import MAX_RANKS
from mlxdist.base.errors import InvalidArgument

__all__ = [
    "ALGORITHMS",
    "OPERATIONS",
    "TUNED",
    "Row",
    "default_path",
    "load",
    "merge",
    "pack",
    "read",
    "unpack",
    "write",
]

# In the order of mlxdist_operation and mlxdist_algorithm in mlxdist.h, which both count from 1.
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "barrier", "reduce", "gather", "scatter")
# Those that the measurement chooses for: the ring of the other two is for cables that leave no choice.
TUNED = OPERATIONS[:6]
ALGORITHMS = tuple(name for name in SETTINGS if name != "auto")

SCHEMA = 1
MAX_ROWS = 4096
MAX_FILE_BYTES = 1 << 20
MAX_BYTES = 2**64 - 1  # in a row: however large

_PACKED = struct.Struct("<4sHH")  # magic, schema, number of rows
_PACKED_ROW = struct.Struct("<HHHxxQ")  # operation, ranks, algorithm, bytes
_MAGIC = b"MLXT"


@dataclass(frozen=True)
class Row:
    """``operation`` on ``ranks`` ranks, with an input of at most ``bytes`` bytes, uses ``algorithm``."""

    operation: str
    ranks: int
    bytes: int
    algorithm: str

    def native(self) -> tuple[int, int, int, int]:
        """The fields of a ``mlxdist_tuning``, in its order."""
        return OPERATIONS.index(self.operation) + 1, self.ranks, self.bytes, ALGORITHMS.index(self.algorithm) + 1


def default_path(environ: Mapping[str, str] = os.environ) -> Path:
    """The file that is read and written where MLXDIST_TUNING_FILE names no other."""
    return Path(environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "mlxdist" / "tuning.json"


def load(setting: str | None, environ: Mapping[str, str] = os.environ) -> list[Row]:
    """The table that a job uses.

    Args:
        setting: the value of MLXDIST_TUNING_FILE: a file, "none" for no table, or None for the default file, which need
            not exist.

    Raises:
        InvalidArgument: the file does not exist although it was named, cannot be read, or is malformed.
    """
    if setting == "none":
        return []
    if setting is not None:
        return read(Path(setting))
    try:
        path = default_path(environ)
    except RuntimeError:  # this user has no home folder
        return []
    return read(path) if path.exists() else []


def read(path: Path) -> list[Row]:
    """The rows of a file.

    Raises:
        InvalidArgument: it cannot be read, or is malformed; the text names the line or row.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InvalidArgument(
            f"tuning table {path}: {error.strerror}; `mlxdist bench tune` makes one, MLXDIST_TUNING_FILE=none uses none"
        ) from None
    try:
        if len(data) > MAX_FILE_BYTES:
            raise _Malformed(f"it has more than {MAX_FILE_BYTES} bytes")
        return _rows(_parse(data))
    except _Malformed as error:
        raise InvalidArgument(
            f"tuning table {path}: {error}; make it again with `mlxdist bench tune`, or set MLXDIST_TUNING_FILE=none"
        ) from None


def write(path: Path, rows: Sequence[Row]) -> None:
    """Writes a table; whoever reads meanwhile finds the old one or the new one.

    Raises:
        InvalidArgument: :func:`read` would refuse these rows.
        OSError: the file cannot be written.
    """
    table = {
        "schema": SCHEMA,
        "machine": {
            "host": platform.node(),
            "system": platform.system(),
            "architecture": platform.machine(),
            "cores": os.cpu_count(),
        },
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    lines = ",".join(f"\n    {json.dumps(vars(row))}" for row in rows)  # one row per line, unlike json.dumps
    head = json.dumps(table, indent=2).removesuffix("\n}")
    text = f'{head},\n  "rows": [{lines}\n  ]\n}}\n'
    try:
        _rows(_parse(text.encode()))
    except _Malformed as error:
        raise InvalidArgument(f"tuning table for {path}: {error}") from None
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, text, 0o600)


def merge(old: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """The new rows, and those old ones that are for another operation or number of ranks."""
    measured = {(row.operation, row.ranks) for row in new}
    kept = [row for row in old if (row.operation, row.ranks) not in measured]
    return sorted([*kept, *new], key=lambda row: (row.ranks, OPERATIONS.index(row.operation), row.bytes))


def pack(rows: Sequence[Row]) -> bytes:
    """The rows as bytes, for :func:`unpack` on another rank: 8 bytes, and 16 for each row."""
    packed = [_PACKED.pack(_MAGIC, SCHEMA, len(rows))]
    for operation, ranks, size, algorithm in (row.native() for row in rows):
        packed.append(_PACKED_ROW.pack(operation, ranks, algorithm, size))
    return b"".join(packed)


def unpack(data: bytes) -> list[Row]:
    """The rows that :func:`pack` was given.

    Raises:
        InvalidArgument: these bytes are not from :func:`pack` of this version.
    """
    try:
        return _unpack(data)
    except _Malformed as error:
        raise InvalidArgument(
            f"the tuning table that rank 0 sent is malformed: {error}; install the same mlxdist on all hosts"
        ) from None


class _Malformed(ValueError):
    """What is wrong with a table, without saying which."""


def _unpack(data: bytes) -> list[Row]:
    if len(data) < _PACKED.size:
        raise _Malformed(f"it has {len(data)} bytes")
    magic, schema, count = _PACKED.unpack_from(data)
    if magic != _MAGIC or schema != SCHEMA:
        raise _Malformed(f"it begins with {data[: _PACKED.size].hex()}")
    expected = _PACKED.size + count * _PACKED_ROW.size
    if count > MAX_ROWS or len(data) != expected:
        raise _Malformed(f"{count} rows need {expected} bytes, not {len(data)}; at most {MAX_ROWS} are allowed")
    rows = []
    for number, (operation, ranks, algorithm, size) in enumerate(_PACKED_ROW.iter_unpack(data[_PACKED.size :]), 1):
        if not (1 <= operation <= len(OPERATIONS) and 1 <= algorithm <= len(ALGORITHMS)):
            raise _Malformed(f"row {number} has operation {operation} and algorithm {algorithm}")
        row = {"operation": OPERATIONS[operation - 1], "ranks": ranks, "bytes": size}
        rows.append(_row(number, row | {"algorithm": ALGORITHMS[algorithm - 1]}))
    _refuse_unreachable(rows)
    return rows


def _parse(data: bytes) -> Any:
    try:
        return json.loads(data.decode(), object_pairs_hook=_object, parse_constant=_constant)
    except UnicodeDecodeError as error:
        raise _Malformed(f"byte {error.start} is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise _Malformed(f"line {error.lineno}, column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise _Malformed("it is nested too deeply") from None
    except _Malformed:
        raise
    except ValueError as error:  # a number of thousands of digits
        raise _Malformed(str(error)) from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise _Malformed(f"{name!r} is there twice in one object")
        found[name] = value
    return found


def _constant(name: str) -> None:
    raise _Malformed(f"{name} is not a number of JSON")


def _rows(table: Any) -> list[Row]:
    if not isinstance(table, dict):
        raise _Malformed("it is not a JSON object")
    schema = table.get("schema")
    if schema != SCHEMA or isinstance(schema, bool):
        raise _Malformed(f"its schema is {schema!r}, and this mlxdist reads {SCHEMA}")
    unknown = sorted(set(table) - {"schema", "machine", "date", "rows"})
    if unknown:
        raise _Malformed(f"there is no field {unknown[0]!r}")
    rows = table.get("rows")
    if not isinstance(rows, list):
        raise _Malformed('"rows" must be a list')
    if len(rows) > MAX_ROWS:
        raise _Malformed(f"it has {len(rows)} rows, and at most {MAX_ROWS} are allowed")
    checked = [_row(number, row) for number, row in enumerate(rows, 1)]
    _refuse_unreachable(checked)
    return checked


def _row(number: int, row: Any) -> Row:
    fields = ("operation", "ranks", "bytes", "algorithm")
    if not isinstance(row, dict) or set(row) != set(fields):
        raise _Malformed(f"row {number} must have the fields {', '.join(fields)}, and no others")
    for field, known in (("operation", OPERATIONS), ("algorithm", ALGORITHMS)):
        if row[field] not in known:
            raise _Malformed(f"row {number}: {field} is {row[field]!r:.50}, not one of {', '.join(known)}")
    for field, low, high in (("ranks", 2, MAX_RANKS), ("bytes", 0, MAX_BYTES)):
        value = row[field]
        if type(value) is not int or not low <= value <= high:
            raise _Malformed(f"row {number}: {field} is {value!r:.50}, not a whole number from {low} to {high}")
    return Row(**row)


def _refuse_unreachable(rows: Sequence[Row]) -> None:
    """The first row that fits counts; one that can never be first is a mistake in the table."""
    largest: dict[tuple[str, int], tuple[int, int]] = {}
    for number, row in enumerate(rows, 1):
        size, before = largest.get((row.operation, row.ranks), (-1, 0))
        if row.bytes <= size:
            raise _Malformed(
                f"row {number} never counts, because row {before} is for {row.operation} on {row.ranks} ranks too, "
                f"with {size} bytes"
            )
        largest[row.operation, row.ranks] = row.bytes, number
