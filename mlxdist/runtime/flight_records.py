"""The files of the flight recorder, read and checked. mlxdist/runtime/flight_recorder.py writes them."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxdist.base.environment import MAX_RANKS
from mlxdist.base.errors import InvalidArgument
from mlxdist.base.validation import Check, fields_of, flag, list_of, map_of, number, or_null, text

__all__ = [
    "MAX_OPERATIONS",
    "MAX_THREADS",
    "SCHEMA",
    "Dump",
    "Operation",
    "check_dump",
    "dump_name",
    "marker_of",
    "read_dump",
    "read_folder",
    "read_json",
    "request_of",
    "status_of",
]

SCHEMA = 1
MAX_OPERATIONS = 4096  # of a rank: 1000 that have ended, and those in progress
MAX_THREADS = 64
_MAX_FILE_BYTES = 16 << 20
_MAX_TEXT = 4096
_MAX_NUMBER = 2**64 - 1


@dataclass(frozen=True)
class Operation:
    """One operation of a rank. Times are nanoseconds of that rank's monotonic clock."""

    number: int  # among all operations of the rank, from 1
    group: int  # its id: 0 is the world
    hidden: bool  # made by mlxdist itself, beside the group, and counted apart: split
    collective: bool
    sequence: int  # among the collectives of the group on this rank, or its other operations, from 1
    name: str
    dtype: str | None
    shape: tuple[int, ...] | None
    bytes: int
    root: int | None
    to: int | None  # a rank of the world, as are the next two
    source: int | None
    algorithm: str
    started_ns: int
    ended_ns: int | None  # None: in progress
    status: int  # enum mlxdist_status; 0 while in progress
    waits_for: int | None
    place: str  # "train.py:88", "near train.py:88", or "" where it is not known

    @property
    def is_open(self) -> bool:
        """In progress, or it was when the group failed."""
        return self.ended_ns is None or self.status != 0

    def __str__(self) -> str:
        """``all_sum #413``, ``recv #5 from rank 1``."""
        other = f" from rank {self.source}" if self.source is not None else ""
        other = f" to rank {self.to}{other}" if self.to is not None else other
        return f"{self.name} #{self.sequence}{other}"

    @property
    def array(self) -> str:
        """``float32 [3, 4]``; nothing where there is none."""
        return "" if self.shape is None else f"{self.dtype} {list(self.shape)}"

    @property
    def at(self) -> str:
        """``at train.py:88``, after a blank; nothing where that is not known."""
        return "" if not self.place else f" {self.place}" if self.place.startswith("near ") else f" at {self.place}"


@dataclass(frozen=True)
class Dump:
    """What a rank's flight recorder has written."""

    job: str
    rank: int
    size: int
    host: str
    pid: int
    why: str
    error: str | None  # the first error of the group, once it has failed
    monotonic_ns: int  # when it was written, on both clocks
    wall_ns: int
    groups: dict[int, tuple[int, ...]]  # the members, ranks of the world, of every group that still exists
    threads: dict[str, str]  # where each thread is in the program
    operations: tuple[Operation, ...]  # in the order in which they were started
    step: int | None = None  # as the program has said
    steps: int | None = None  # in all
    bytes_sent: int = 0  # since the beginning
    bytes_received: int = 0

    @property
    def progress(self) -> str:
        """``5 of 100``; nothing where the program does not say."""
        of = "" if self.steps is None else f" of {self.steps}"
        return "" if self.step is None else f"{self.step}{of}"


def dump_name(rank: int) -> str:
    return f"flight-{rank}.json"


def marker_of(temporary: Path) -> Path:
    """The file in a rank's temporary folder that has the number of its process, as long as this can be asked."""
    return temporary / ".mlxdist-rank"


def request_of(temporary: Path, what: str) -> Path:
    """The file beside the marker that says what a SIGUSR1 is for: "dump", or "status"."""
    return temporary / f".mlxdist-ask-{what}"


def status_of(temporary: Path) -> Path:
    """What answers a request for the status: as flight-<rank>.json, but with few operations."""
    return temporary / ".mlxdist-status"


def read_folder(folder: Path) -> tuple[dict[int, Dump], list[str]]:
    """The records in a folder, by rank, and what is wrong with other files there that are named like one.

    Of several jobs the one counts that was written last.

    Raises:
        InvalidArgument: there is no such folder, or no record in it.
    """
    dumps, problems = [], []
    try:
        paths = sorted(path for path in folder.iterdir() if re.fullmatch(r"flight-[0-9]{1,4}\.json", path.name))
    except OSError as error:
        raise InvalidArgument(
            f"{folder}: {error.strerror}; name the folder with the files flight-<rank>.json"
        ) from None
    for path in paths:
        try:
            dumps.append(read_dump(path))
        except InvalidArgument as error:
            problems.append(str(error))
    if not dumps:
        raise InvalidArgument("; ".join(problems) or f"{folder}: there is no file flight-<rank>.json in it")
    newest = max(dumps, key=lambda dump: dump.wall_ns)
    found = {dump.rank: dump for dump in dumps if (dump.job, dump.size) == (newest.job, newest.size)}
    for dump in dumps:
        if found.get(dump.rank) is not dump:
            problems.append(f"{folder / dump_name(dump.rank)} is of another job ({dump.job or 'without a name'})")
    return found, problems


def read_dump(path: Path) -> Dump:
    """One file.

    Raises:
        InvalidArgument: it cannot be read, or is none of the flight recorder.
    """
    dump = check_dump(read_json(path), str(path))
    if path.name not in (dump_name(dump.rank), status_of(path.parent).name):
        raise InvalidArgument(_refusal(str(path), f"rank is {dump.rank}"))
    return dump


def read_json(path: Path) -> Any:
    """What is in the file, unchecked.

    Raises:
        InvalidArgument: it cannot be read, or is too long, or no JSON.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InvalidArgument(f"{path}: {error.strerror}") from None
    try:
        if len(data) > _MAX_FILE_BYTES:
            raise ValueError(f"it has more than {_MAX_FILE_BYTES} bytes")
        return json.loads(data)
    except RecursionError:
        problem = "it is nested too deeply"
    except ValueError as error:  # JSON's and UTF-8's are such
        problem = str(error)
    raise InvalidArgument(_refusal(str(path), problem))


def check_dump(value: Any, source: str) -> Dump:
    """A record that has come from ``source``.

    Raises:
        InvalidArgument: it is none of the flight recorder.
    """
    try:
        return _dump(value)
    except ValueError as error:
        raise InvalidArgument(_refusal(source, str(error))) from None


def _refusal(source: str, problem: str) -> str:
    return f"{source} is no file of this version's flight recorder: {problem}"


_ANY = number(0, _MAX_NUMBER)
_RANK = number(0, MAX_RANKS - 1)

_OPERATION: dict[str, Check] = {
    "number": _ANY,
    "group": number(0, 0x7FFF),
    "hidden": flag,
    "collective": flag,
    "sequence": _ANY,
    "operation": text(32),
    "dtype": or_null(text(32)),
    "shape": or_null(list_of(_ANY, 6)),
    "bytes": _ANY,
    "root": or_null(_RANK),
    "to": or_null(_RANK),
    "from": or_null(_RANK),
    "algorithm": text(32),
    "started_ns": _ANY,
    "ended_ns": or_null(_ANY),
    "status": number(0, 1000),
    "waits_for": or_null(_RANK),
    "place": text(64),
}

_DUMP: dict[str, Check] = {
    "schema": number(SCHEMA, SCHEMA),
    "job": text(),
    "rank": _RANK,
    "size": number(1, MAX_RANKS),
    "host": text(),
    "pid": _ANY,
    "why": text(_MAX_TEXT),
    "error": or_null(text(_MAX_TEXT)),
    "monotonic_ns": _ANY,
    "wall_ns": _ANY,
    "groups": map_of(list_of(_RANK, MAX_RANKS), MAX_OPERATIONS),
    "threads": map_of(text(), MAX_THREADS),
    "operations": list_of(lambda name, value: _operation(value), MAX_OPERATIONS),
}

# Files of earlier versions have none of these.
_LATER: dict[str, Check] = {"step": or_null(_ANY), "steps": or_null(_ANY), "bytes_sent": _ANY, "bytes_received": _ANY}


def _operation(value: Any) -> Operation:
    fields = fields_of(_OPERATION, value)
    return Operation(name=fields.pop("operation"), source=fields.pop("from"), **fields)


def _dump(value: Any) -> Dump:
    fields = fields_of(_DUMP, value)
    fields |= fields_of({name: check for name, check in _LATER.items() if name in value}, value)
    del fields["schema"]
    groups = {number(0, 0x7FFF)("groups", _id(text)): ranks for text, ranks in fields.pop("groups").items()}
    if fields["rank"] >= fields["size"]:
        raise ValueError(f"rank is {fields['rank']}, but size is {fields['size']}")
    return Dump(groups=groups, **fields)


def _id(text: str) -> int:
    return int(text) if re.fullmatch(r"[0-9]{1,5}", text, re.ASCII) else -1
