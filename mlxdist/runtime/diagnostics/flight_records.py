"""The files of the flight recorder, read and checked. mlxdist/runtime/diagnostics/flight_recorder.py writes them."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxdist.base.environment import MAX_RANKS
from mlxdist.base.errors import InvalidArgument
from mlxdist.base.json_reader import parse_json
from mlxdist.base.validation import (
    build,
    checked,
    flag,
    list_of,
    map_of,
    number,
    object_of,
    or_null,
    read_bounded,
    row_of,
    share,
    text,
)
from mlxdist.cluster.facts.power import Power

from .memory import RankMemory
from .stacks import MAX_THREADS, STACKS, Stacks
from .step import Computed

__all__ = [
    "FlightRecord",
    "Operation",
    "check_record",
    "group_name",
    "pid_file",
    "rank_directory",
    "read_directory",
    "read_flight_record",
    "stack_file",
]

SCHEMA = 4
STREAM_LANE = 0x7FFF  # mlxdist_group_stream_lane()
MAX_OPERATIONS = 4096  # of a rank: 1000 that have ended, and those in progress
_MAX_FILE_BYTES = 16 << 20
_MAX_TEXT = 4096
_ANY = number(0, 2**64 - 1)
_RANK = number(0, MAX_RANKS - 1)
_GROUP = number(0, STREAM_LANE)
_STATUS = number(0, 1000)
_MEMBERS = map_of(list_of(_RANK, MAX_RANKS), MAX_OPERATIONS)


def group_name(group: int) -> str:
    """ "group 2", or "mx.distributed", of a group other than the world."""
    return "mx.distributed" if group == STREAM_LANE else f"group {group}"


def _groups(name: str, value: Any) -> dict[int, tuple[int, ...]]:
    return {
        _GROUP(name, int(id) if re.fullmatch(r"[0-9]{1,5}", id, re.ASCII) else -1): members
        for id, members in _MEMBERS(name, value).items()
    }


def _computed(name: str, value: Any) -> Computed:
    return Computed(*row_of(text(32), _ANY, _ANY)(name, value))


@dataclass(frozen=True)
class Operation:
    """An operation of a rank. Times are nanoseconds of that rank's monotonic clock."""

    number: int = checked(_ANY)  # among all operations of the rank, from 1
    group: int = checked(_GROUP)  # its id: 0 is the world
    internal: bool = checked(flag)  # made by mlxdist itself, in a group with its own numbers: split
    collective: bool = checked(flag)
    sequence: int = checked(_ANY)  # among the collectives of the group on this rank, or its other operations, from 1
    name: str = checked(text(32))
    dtype: str | None = checked(or_null(text(32)))
    shape: tuple[int, ...] | None = checked(or_null(list_of(_ANY, 6)))
    bytes: int = checked(_ANY)
    root: int | None = checked(or_null(_RANK))
    destination: int | None = checked(or_null(_RANK))  # a rank of the world, as are the next two
    source: int | None = checked(or_null(_RANK))
    waiting_on: int | None = checked(or_null(_RANK))
    algorithm: str = checked(text(32))
    started_ns: int = checked(_ANY)
    ended_ns: int | None = checked(or_null(_ANY))  # None: in progress
    status: int = checked(_STATUS)  # enum mlxdist_status; 0 while in progress
    call_site: str = checked(text(64))  # "train.py:88", "near train.py:88", or "" where it is not known

    @property
    def is_open(self) -> bool:
        """Whether the operation is in progress, or was when the group failed."""
        return self.ended_ns is None or self.status != 0

    def __str__(self) -> str:
        """``all_sum #413``, ``recv #5 from rank 1``."""
        other = f" from rank {self.source}" if self.source is not None else ""
        other = f" to rank {self.destination}{other}" if self.destination is not None else other
        return f"{self.name} #{self.sequence}{other}"

    @property
    def array(self) -> str:
        """``float32 [3, 4]``; nothing where there is none."""
        return "" if self.shape is None else f"{self.dtype} {list(self.shape)}"

    @property
    def at(self) -> str:
        """``at train.py:88``, after a blank; nothing where that is not known."""
        near = self.call_site.startswith("near ")
        return "" if not self.call_site else f" {self.call_site}" if near else f" at {self.call_site}"


@dataclass(frozen=True)
class FlightRecord:
    """The record that a rank's flight recorder has written, checked."""

    schema: int = checked(number(SCHEMA, SCHEMA))
    job: str = checked(text())
    rank: int = checked(_RANK)
    size: int = checked(number(1, MAX_RANKS))
    host: str = checked(text())
    pid: int = checked(_ANY)
    reason: str = checked(text(_MAX_TEXT))
    error: str | None = checked(or_null(text(_MAX_TEXT)))  # the first error of the group, once it has failed
    monotonic_ns: int = checked(_ANY)  # when it was written, on both clocks
    wall_ns: int = checked(_ANY)
    step: int | None = checked(or_null(_ANY))  # of mlxdist.set_step
    total_steps: int | None = checked(or_null(_ANY))
    # Of the last step of a stage of a pipeline: the share of the time in which it has computed nothing, and its spans.
    bubble: float | None = checked(or_null(share))
    computed: tuple[Computed, ...] = checked(list_of(_computed, MAX_OPERATIONS))
    power: Power | None = checked(or_null(object_of(Power)))  # of a Mac, in a status
    memory: RankMemory = checked(object_of(RankMemory))
    bytes_sent: int = checked(_ANY)  # since the beginning
    bytes_received: int = checked(_ANY)
    # The members, ranks of the world, of every group that still exists.
    groups: dict[int, tuple[int, ...]] = checked(_groups)
    threads: dict[str, str] = checked(map_of(text(), MAX_THREADS))  # where each thread is in the program
    stacks: Stacks = checked(STACKS)  # of each thread; none in a status
    # In the order in which they were started.
    operations: tuple[Operation, ...] = checked(list_of(object_of(Operation), MAX_OPERATIONS))


def record_file_name(rank: int) -> str:
    return f"flight-{rank}.json"


def rank_directory(rank: int) -> Path | None:
    """The private directory that the launcher has made for the process that has been ``rank`` at the start of the job;
    None where there is no launcher, or this is another process."""
    directory = Path(os.environ.get("TMPDIR", ""))
    return directory if directory.name == str(rank) and directory.parent.name.startswith("mlxdist-") else None


def pid_file(directory: Path) -> Path:
    """The file in a rank's private directory that holds its process id, as long as the rank handles SIGUSR2."""
    return directory / ".mlxdist-pid"


def stack_file(directory: Path) -> Path:
    """The file in a rank's private directory that gets the stacks of its threads when SIGUSR2 comes."""
    return directory / ".mlxdist-stacks"


def read_directory(directory: Path) -> tuple[dict[int, FlightRecord], list[str]]:
    """The records in a directory, by rank, and what is wrong with other files there that are named like one.

    If there are several jobs, the one that was written last counts.

    Raises:
        InvalidArgument: there is no such directory, or no record in it.
    """
    records, problems = [], []
    try:
        paths = sorted(path for path in directory.iterdir() if re.fullmatch(r"flight-[0-9]{1,4}\.json", path.name))
    except OSError as error:
        raise InvalidArgument(
            f"{directory}: {error.strerror}; name the directory with the files flight-<rank>.json"
        ) from None
    for path in paths:
        try:
            records.append(read_flight_record(path))
        except InvalidArgument as error:
            problems.append(str(error))
    if not records:
        raise InvalidArgument("; ".join(problems) or f"{directory}: there is no file flight-<rank>.json in it")
    newest = max(records, key=lambda record: record.wall_ns)
    found = {record.rank: record for record in records if (record.job, record.size) == (newest.job, newest.size)}
    for record in records:
        if found.get(record.rank) is not record:
            name = directory / record_file_name(record.rank)
            problems.append(f"{name} is of another job ({record.job or 'without a name'})")
    return found, problems


def read_flight_record(path: Path) -> FlightRecord:
    """Reads and checks one file.

    Raises:
        InvalidArgument: it cannot be read, or is not a flight record.
    """
    record = check_record(read_json(path), str(path))
    if path.name != record_file_name(record.rank):
        raise InvalidArgument(_refusal(str(path), f"rank is {record.rank}"))
    return record


def read_json(path: Path) -> Any:
    """Reads the JSON in a file, unchecked.

    Raises:
        InvalidArgument: it cannot be read, or is too long, or no JSON.
    """
    try:
        return parse_json(read_bounded(path, _MAX_FILE_BYTES))
    except ValueError as error:
        raise InvalidArgument(_refusal(str(path), str(error))) from None


def check_record(value: Any, source: str) -> FlightRecord:
    """A record that has come from ``source``.

    Raises:
        InvalidArgument: it is not a flight record.
    """
    try:
        record = build(FlightRecord, value)
        if record.rank >= record.size:
            raise ValueError(f"rank is {record.rank}, but size is {record.size}")
        return record
    except ValueError as error:
        raise InvalidArgument(_refusal(source, str(error))) from None


def _refusal(source: str, problem: str) -> str:
    return f"{source} is not a flight record of this version: {problem}"
