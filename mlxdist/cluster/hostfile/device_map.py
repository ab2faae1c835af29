"""The device map: which device of a host leads to which other host, as the user has cabled them.

    [[null, "rdma_en2", "rdma_en3"],                    row: a host, or a rank; column: where the cable leads
     ["rdma_en2", null, ["rdma_en4", "rdma_en5"]],      a list: several cables to the same host
     ["rdma_en3", ["rdma_en4", "rdma_en5"], null]]      null: the host itself, and hosts that no cable leads to

The matrix itself, or the rows of a hostfile: a list of hosts, or {"hosts": [...]}, each with its row as "rdma".
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxdist.base.environment import MAX_RANKS
from mlxdist.base.errors import InvalidArgument

__all__ = ["DeviceMap", "MalformedMap", "load", "parse", "rows_of"]

_MAX_BYTES = 16 << 20
_MAX_CABLES = 16
_NAME_BYTES = 63


@dataclass(frozen=True)
class DeviceMap:
    """``rows[i][j]``: the devices of host i whose cables lead to host j."""

    rows: tuple[tuple[tuple[str, ...], ...], ...]
    source: str = "MLXDIST_DEVICE_MAP"

    @property
    def size(self) -> int:
        return len(self.rows)

    def devices(self, host: int, to: int) -> tuple[str, ...]:
        return self.rows[host][to]

    @property
    def wires(self) -> frozenset[tuple[int, int]]:
        """The pairs of rows that a cable joins, both ways."""
        return frozenset((i, j) for i, row in enumerate(self.rows) for j, devices in enumerate(row) if devices)


def load(setting: str) -> DeviceMap:
    """The map that MLXDIST_DEVICE_MAP stands for: the matrix itself, or the name of a file.

    Raises:
        InvalidArgument: the file cannot be read, or the map is malformed or not symmetric.
    """
    if setting.lstrip()[:1] in ("[", "{"):
        return parse(setting)
    path = Path(setting)
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "no file has such a name"
        raise InvalidArgument(
            f"device map {setting!r:.200}: {why}; MLXDIST_DEVICE_MAP is a matrix such as "
            '[[null, "rdma_en2"], ["rdma_en2", null]], or a file that has one'
        ) from None
    if len(data) > _MAX_BYTES:
        raise InvalidArgument(f"device map {path}: it has more than {_MAX_BYTES} bytes")
    try:
        return parse(data.decode(), os.fspath(path))
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"device map {path}: byte {error.start} is not UTF-8") from None


def parse(text: str, source: str = "MLXDIST_DEVICE_MAP") -> DeviceMap:
    """The map in ``text``.

    Raises:
        InvalidArgument: it is malformed or not symmetric; the message names ``source``, the host and the column.
    """
    try:
        return DeviceMap(rows_of(_json(text)), source)
    except MalformedMap as error:
        raise InvalidArgument(f"device map {source}: {error}") from None


def rows_of(found: Any) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """`DeviceMap.rows` of what has been read from JSON: a matrix, or hosts that have a row each.

    Raises:
        MalformedMap: it is none, or not symmetric.
    """
    rows, hosts = _rows(found)
    devices = [[_devices(entry, i, j, hosts) for j, entry in enumerate(row)] for i, row in rows]
    _require_symmetry(devices, hosts)
    return tuple(map(tuple, devices))


class MalformedMap(ValueError):
    """What is wrong with a map, without saying which. ``row``: the number of the host it is about, if of one."""

    def __init__(self, text: str, row: int | None = None) -> None:
        super().__init__(text)
        self.row = row


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise MalformedMap(f"line {error.lineno}, column {error.colno}: {error.msg}; write it as JSON") from None
    except RecursionError:
        raise MalformedMap("it is nested too deeply") from None
    except ValueError as error:  # a number of thousands of digits
        raise MalformedMap(str(error)) from None


def _rows(found: Any) -> tuple[list[tuple[int, list]], list[str]]:
    """The rows with their numbers, and what the hosts are called in messages."""
    if isinstance(found, dict):
        found = found.get("hosts")
    if not isinstance(found, list) or not found:
        raise MalformedMap('it must be a list of rows, a list of hosts with "rdma" each, or {"hosts": [...]}')
    if len(found) > MAX_RANKS:
        raise MalformedMap(f"it has {len(found)} rows, and at most {MAX_RANKS} are allowed")
    hosts = [_host(number, entry) for number, entry in enumerate(found)]
    rows = []
    for number, entry in enumerate(found):
        row = entry.get("rdma") if isinstance(entry, dict) else entry
        if not isinstance(row, list):
            missing = '; write "rdma": [...] for each host' if isinstance(entry, dict) else ""
            raise MalformedMap(f"{hosts[number]} has no row: a list with an entry for each host{missing}", number)
        if len(row) != len(found):
            raise MalformedMap(
                f"the row of {hosts[number]} has {len(row)} entries, but there are {len(found)} hosts; write null for "
                "the host itself, and for hosts that no cable leads to",
                number,
            )
        rows.append((number, row))
    return rows, hosts


def _host(number: int, entry: Any) -> str:
    name = entry.get("ssh") or entry.get("host") if isinstance(entry, dict) else None
    return f"host {number} ({name:.100})" if isinstance(name, str) else f"host {number}"


def _devices(entry: Any, row: int, column: int, hosts: list[str]) -> tuple[str, ...]:
    where = f"{hosts[row]}, column {column}"
    names = [] if entry is None else entry if isinstance(entry, list) else [entry]
    if not all(map(_is_name, names)) or (isinstance(entry, list) and not entry):
        raise MalformedMap(
            f"{where}: {json.dumps(entry):.80} is neither the name of a device, nor a list of names for several cables"
            "; write null where there is no cable",
            row,
        )
    if len(names) > _MAX_CABLES:
        raise MalformedMap(
            f"{where}: {len(names)} cables; at most {_MAX_CABLES} can be named, of which 2 are used", row
        )
    for name in names:
        if names.count(name) > 1:
            raise MalformedMap(f"{where}: {name} is there twice; each cable has a device of its own", row)
    if names and row == column:
        raise MalformedMap(f"{where}: {', '.join(names)} would lead from the host to itself; write null", row)
    return tuple(names)


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and name.isprintable() and " " not in name and 0 < len(name.encode()) <= _NAME_BYTES


def _require_symmetry(rows: list[list[tuple[str, ...]]], hosts: list[str]) -> None:
    for i, row in enumerate(rows):
        for j, there in enumerate(row):
            back = rows[j][i]
            if there and not back:
                raise MalformedMap(
                    f"{hosts[i]} has a cable to {hosts[j]} ({', '.join(there)}), but {hosts[j]} has null in column {i}"
                    f"; write there which device of {hosts[j]} the cable ends in, or null in both rows",
                    i,
                )
            if len(there) > len(back):
                raise MalformedMap(
                    f"{hosts[i]} has {len(there)} cables to {hosts[j]} ({', '.join(there)}), but {hosts[j]} has "
                    f"{len(back)} to {hosts[i]} ({', '.join(back)}); write both ends of every cable",
                    i,
                )
