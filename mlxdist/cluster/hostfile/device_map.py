"""The device map: which device of a host leads to which other host, as the user has connected them.

    [[null, "rdma_en2", "rdma_en3"],                    row: a host, or a rank; column: where the cable leads
     ["rdma_en2", null, ["rdma_en4", "rdma_en5"]],      a list: several cables to the same host
     ["rdma_en3", ["rdma_en4", "rdma_en5"], null]]      null: the host itself, and hosts that no cable leads to

The matrix itself, or the rows of a hostfile: a list of hosts, or {"hosts": [...]}, each with its row as "rdma".
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlxdist.base.environment import MAX_LINKS, MAX_RANKS
from mlxdist.base.errors import InvalidArgument
from mlxdist.base.json_reader import parse_json
from mlxdist.base.validation import read_bounded

__all__ = ["DeviceMap", "MalformedMap", "load", "parse", "rows_of"]

_MAX_BYTES = 16 << 20
_MAX_CABLES = 16
_NAME_BYTES = 63
_VARIABLE = "MLXDIST_DEVICE_MAP"
_ADVICE = f'{_VARIABLE} is a matrix such as [[null, "rdma_en2"], ["rdma_en2", null]], or a file that has one'


@dataclass(frozen=True)
class DeviceMap:
    """A device map. ``rows[i][j]``: the devices of host i whose cables lead to host j."""

    rows: tuple[tuple[tuple[str, ...], ...], ...]
    source: str = _VARIABLE

    @property
    def size(self) -> int:
        return len(self.rows)

    def of_ranks(self, hosts: Sequence[int], ranks: Sequence[int]) -> str:
        """The map as JSON, cut to some ranks or, where its rows are hosts, to their hosts. ``hosts``: of each rank."""
        kept = list(ranks) if self.size == len(hosts) else sorted({hosts[rank] for rank in ranks})
        return json.dumps([[list(self.rows[i][j]) or None for j in kept] for i in kept])

    def devices(self, host: int, to: int) -> tuple[str, ...]:
        return self.rows[host][to]


class MalformedMap(ValueError):
    """A malformed device map. The text does not name the map. ``row``: the number of the host at fault, if known."""

    def __init__(self, text: str, row: int | None = None) -> None:
        super().__init__(text)
        self.row = row


def load(setting: str) -> DeviceMap:
    """The map that MLXDIST_DEVICE_MAP stands for: the matrix itself, or the name of a file. Raises InvalidArgument: the
    file cannot be read, or the map is malformed or not symmetric."""
    if setting.lstrip()[:1] in ("[", "{"):
        return parse(setting)
    try:
        data = read_bounded(setting, _MAX_BYTES)
    except ValueError as error:
        raise InvalidArgument(f"device map {setting!r:.200}: {error}; {_ADVICE}") from None
    return parse(data, setting)


def parse(text: str | bytes, source: str = _VARIABLE) -> DeviceMap:
    """The map in ``text``. Raises InvalidArgument: the map is malformed or not symmetric; the message names ``source``,
    the host and the column."""
    advice = "; write it as JSON"
    try:
        found = parse_json(text)
        advice = ""
        return DeviceMap(rows_of(found), source)
    except ValueError as error:
        raise InvalidArgument(f"device map {source}: {error}{advice}") from None


def rows_of(found: Any) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """The rows of a `DeviceMap` from a JSON value: a matrix, or hosts that have a row each. Raises MalformedMap:
    the value is no map, or is not symmetric."""
    entries = found.get("hosts") if isinstance(found, dict) else found
    if not isinstance(entries, list) or not entries:
        raise MalformedMap('it must be a list of rows, a list of hosts with "rdma" each, or {"hosts": [...]}')
    if len(entries) > MAX_RANKS:
        raise MalformedMap(f"it has {len(entries)} rows, and at most {MAX_RANKS} are allowed")
    hosts = [_host(number, entry) for number, entry in enumerate(entries)]
    rows = [_row(number, entry, hosts) for number, entry in enumerate(entries)]
    _require_symmetry(rows, hosts)
    return tuple(map(tuple, rows))


def _host(number: int, entry: Any) -> str:
    """The name of a host for messages."""
    name = entry.get("ssh") or entry.get("host") if isinstance(entry, dict) else None
    return f"host {number} ({name:.100})" if isinstance(name, str) else f"host {number}"


def _row(number: int, entry: Any, hosts: list[str]) -> list[tuple[str, ...]]:
    row = entry.get("rdma") if isinstance(entry, dict) else entry
    if not isinstance(row, list):
        missing = '; write "rdma": [...] for each host' if isinstance(entry, dict) else ""
        raise MalformedMap(f"{hosts[number]} has no row: a list with an entry for each host{missing}", number)
    if len(row) != len(hosts):
        raise MalformedMap(
            f"the row of {hosts[number]} has {len(row)} entries, but there are {len(hosts)} hosts; write null for "
            "the host itself, and for hosts that no cable leads to",
            number,
        )
    return [_devices(cell, number, column, hosts) for column, cell in enumerate(row)]


def _devices(entry: Any, row: int, column: int, hosts: list[str]) -> tuple[str, ...]:
    names = [] if entry is None else entry if isinstance(entry, list) else [entry]
    wrong = ""
    if not all(map(_is_name, names)) or (isinstance(entry, list) and not entry):
        wrong = f"{json.dumps(entry):.80} is neither the name of a device, nor a list of names for several cables"
        wrong += "; write null where there is no cable"
    elif len(names) > _MAX_CABLES:
        wrong = f"{len(names)} cables; at most {_MAX_CABLES} can be named, of which {MAX_LINKS} are used"
    elif twice := [name for name in names if names.count(name) > 1]:
        wrong = f"{twice[0]} is there twice; each cable has a device of its own"
    elif names and row == column:
        wrong = f"{', '.join(names)} would lead from the host to itself; write null"
    if wrong:
        raise MalformedMap(f"{hosts[row]}, column {column}: {wrong}", row)
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
