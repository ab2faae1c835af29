"""The flight recorder: what this rank did last, written to a file when the group fails or on SIGUSR2.

The engine keeps the operations (native/engine/flight_recorder.h). `mlxdist dump` reads the files of all ranks and
finds the stragglers. docs/debugging.md is for users.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlxdist.base import logger
from mlxdist.base.atomic_file import replace_file
from mlxdist.base.environment import ALGORITHMS, Environment
from mlxdist.base.errors import Error, from_status
from mlxdist.runtime.internal_thread import InternalThread
from mlxdist.version import __version__

from .. import signals
from ..native import bridge, ffi, last_error, lib
from .flight_records import (
    MAX_OPERATIONS,
    SCHEMA,
    Operation,
    group_name,
    pid_file,
    rank_directory,
    record_file_name,
    stack_file,
)
from .memory import read_memory
from .power import PowerWatch
from .stacks import StackFile, current_stacks, program_frames
from .step import current_computing, current_step

__all__ = ["Recorder", "explain"]

# The first error waits so long for its record to be written.
_RECORD_SECONDS = 1.0

# finalize() waits so long for a disk.
_MAX_WRITE_SECONDS = 10.0

# Operations of a status, and how many recent ones are read to find those in progress.
_RECENT = 64
_STATUS_OPERATIONS = 8

_recorder: "Recorder | None" = None  # of this process


class Recorder:
    """The flight recorder of one world, from connecting to finalize(). Any thread may call its methods."""

    def __init__(
        self,
        environment: Environment,
        host: str,
        native: Any,
        on_failure: Callable[[Error], object],
        traffic: Callable[[], tuple[int, int]],
    ) -> None:
        """``on_failure(error)`` is called once, in a thread of the recorder, for the first failure of the engine.

        ``traffic()``: how many bytes this rank has sent, and received.
        """
        global _recorder
        self._on_failure = on_failure
        self._traffic = traffic
        self._environment = environment
        self._host = host
        self._native: Any = native  # None once it is closed
        self._power = PowerWatch()
        # Where the program is started, wherever it changes its directory to.
        self._directory = None if environment.flight_dir == "none" else Path(environment.flight_dir or "").absolute()
        self.renew_locks()
        self._settled = threading.Event()  # the first failure is written, or could not be
        self._outcome = ""
        self._pid_file: Path | None = None
        self._stack_file: StackFile | None = None
        self._watcher = InternalThread(target=self._watch, name="mlxdist flight recorder", daemon=True)
        self._watcher.start()
        _recorder = self
        signals.on(signal.SIGUSR2, lambda: self.dump("SIGUSR2"))
        if signal.getsignal(signal.SIGUSR2) != signal.SIG_DFL:  # as where init() was not called in the main thread
            self._let_others_signal()

    def renew_locks(self) -> None:
        """Makes new locks, also in a forked child: the old ones may be held by threads that the child does not have."""
        self._reading = threading.Lock()  # guards _native
        self._writing = threading.Lock()  # one file at a time; the disk may be slow

    def dump(self, reason: str) -> Path | None:
        """Writes the record. Returns its file, or None: the recorder is switched off, or the file cannot be written."""
        with self._writing:
            if self._directory is None or (record := self._record(reason)) is None:
                return None
            path = self._directory / record_file_name(self._environment.rank)
            try:
                _write(path, record)
            except OSError as error:
                self._outcome = f"{path} could not be written: {error.strerror}"
                logger.warn(
                    "flight", f"the flight recorder's file {self._outcome}; MLXDIST_FLIGHT_DIR names another directory"
                )
                return None
            self._outcome = f"{path}; `mlxdist dump --files {self._directory}` shows which ranks waited for which"
            logger.info("flight", f"wrote {path}: {reason}")
            return path

    def position(self) -> str:
        """The position of this rank, for the others: "in all_gather #412 at train.py:88 for 12.3 s"; "" if unknown."""
        entries, count = self._read(_RECENT)
        if count == 0:
            return ""
        recent = list(entries[0:count])
        entry = next((e for e in recent if e.ended_ns == 0), None) or max(recent, key=lambda e: e.ended_ns)
        operation = Operation(**_operation(entry))
        seconds = (time.monotonic_ns() - (entry.ended_ns or entry.started_ns)) / 1e9
        group = f" in {group_name(operation.group)}" if operation.group else ""
        text = f"{operation.name} #{operation.sequence}{group}{operation.at}"
        if entry.ended_ns == 0:
            return f"in {text} for {seconds:.1f} s"
        return f"between operations for {seconds:.1f} s since {text}"

    def status(self) -> bytes:
        """The record with few operations, for `mlxdist top`; empty once the group is closed."""
        record = self._record("status", _STATUS_OPERATIONS)
        return b"" if record is None else json.dumps(record).encode()

    def outcome(self) -> str:
        """The place of the record of the failure, in words; "" if there is none."""
        with self._reading:
            failed = self._native is not None and lib.mlxdist_group_error(self._native)
        if failed:  # not where an argument was refused: nothing is written then
            self._settled.wait(_RECORD_SECONDS)
        return self._outcome

    def close(self) -> None:
        """Writes what is left to write, and reads the engine's group no more; to be called before that is destroyed."""
        global _recorder
        lib.mlxdist_group_stop_watching(self._native)
        self._watcher.join(_MAX_WRITE_SECONDS)
        self._settled.set()
        with self._reading:
            self._native = None
        if self._pid_file is not None:
            self._pid_file.unlink(missing_ok=True)
        if self._stack_file is not None:
            self._stack_file.close()
        if _recorder is self:
            _recorder = None

    def _watch(self) -> None:
        if lib.mlxdist_group_watch_failure(self._native):
            status, text = lib.mlxdist_group_error(self._native), last_error()
            self._on_failure(from_status(status, text))
            self.dump(text)
            self._settled.set()

    def _let_others_signal(self) -> None:
        """Writes the process id, for `mlxdist dump` to signal: SIGUSR2 would end a process that does not handle it."""
        directory = rank_directory(self._environment.first_rank)
        if directory is None:
            return
        try:
            self._stack_file = StackFile(stack_file(directory))
            pid_file(directory).write_text(str(os.getpid()))
            self._pid_file = pid_file(directory)
        except OSError as error:
            logger.warn("flight", f"`mlxdist dump` will not find this rank, since nothing can be written here: {error}")

    def _read(self, limit: int) -> tuple[Any, int]:
        """The latest operations of the engine, and how many; 0 where it is stuck: this must return in any case."""
        entries = ffi.new("mlxdist_flight_record[]", limit)
        with self._reading:
            count = 0 if self._native is None else lib.mlxdist_flight_read(self._native, entries, limit)
        return entries, count

    def _record(self, reason: str, limit: int = MAX_OPERATIONS) -> dict[str, Any] | None:
        """A record with at most ``limit`` operations, those in progress first. A status has the main thread alone."""
        is_status = limit < MAX_OPERATIONS
        entries, count = self._read(_RECENT if is_status else MAX_OPERATIONS)
        with self._reading:
            if self._native is None:
                return None
            operations = [_operation(entry) for entry in _foremost(list(entries[0:count]), limit)]
            groups = {str(group): self._members(group) for group in {0} | {o["group"] for o in operations}}
            error = last_error() if lib.mlxdist_group_error(self._native) else None
            # Not where the engine is stuck: the counters wait for it.
            sent, received = self._traffic() if count else (0, 0)
        step, total_steps = current_step()
        computing = current_computing()
        threads = _threads()
        return {
            "schema": SCHEMA,
            "version": __version__,
            "job": self._environment.job,
            "rank": self._environment.rank,
            "size": self._environment.world_size,
            "host": self._host,
            "pid": os.getpid(),
            "reason": reason,
            "error": error,
            # The clock of the operations, and what the time was at the same moment.
            "monotonic_ns": time.monotonic_ns(),
            "wall_ns": time.time_ns(),
            "step": step,
            "total_steps": total_steps,
            "bubble": computing and computing.bubble,
            "computed": []
            if computing is None or is_status
            else [list(span) for span in computing.spans[:MAX_OPERATIONS]],
            "power": asdict(power) if is_status and (power := self._power.last()) else None,
            "memory": asdict(read_memory()),
            "bytes_sent": sent,
            "bytes_received": received,
            "groups": groups,
            "threads": dict(list(threads.items())[:1]) if is_status else threads,
            "stacks": {} if is_status else current_stacks(),
            "operations": operations,
        }

    def _members(self, group: int) -> list[int]:
        members = ffi.new("int32_t[]", self._environment.world_size)
        return list(members[0 : lib.mlxdist_flight_members(self._native, group, members, len(members))])


def explain(error: Error) -> Error:
    """``error``, with a note that says where the record of what led to it is."""
    outcome = "" if _recorder is None else _recorder.outcome()
    if outcome:
        error.add_note(f"flight recorder: {outcome}")
    return error


def _foremost(entries: list[Any], limit: int) -> list[Any]:
    """The foremost entries, in their order: the oldest in progress, then those that were started last."""
    ranking = sorted(range(len(entries)), key=lambda i: (0, i) if entries[i].ended_ns == 0 else (1, -i))
    return [entries[i] for i in sorted(ranking[:limit])]


def _operation(entry: Any) -> dict[str, Any]:
    has_array = entry.layout.ndim >= 0
    ranks = {
        "root": entry.root,
        "destination": entry.to,
        "source": getattr(entry, "from"),
        "waiting_on": entry.waits_for,
    }
    return {
        "number": entry.number,
        "group": entry.group,
        "internal": bool(entry.internal),
        "collective": bool(entry.collective),
        "sequence": entry.sequence,
        "name": ffi.string(entry.operation).decode(),
        "dtype": ffi.string(lib.mlxdist_dtype_name(entry.layout.dtype)).decode() if has_array else None,
        "shape": list(entry.layout.shape[0 : entry.layout.ndim]) if has_array else None,
        "bytes": entry.bytes,
        "algorithm": ALGORITHMS[entry.algorithm],
        "started_ns": entry.started_ns,
        "ended_ns": entry.ended_ns or None,
        "status": entry.status,
        "call_site": ffi.string(entry.call_site).decode(errors="replace"),
    } | {name: None if rank < 0 else rank for name, rank in ranks.items()}


def _threads() -> dict[str, str]:
    """The call site of each thread of the program, the main thread first."""
    sites = {name: bridge.call_site_of(frame) for name, frame in program_frames().items()}
    return {name: site for name, site in sites.items() if site and not name.startswith("mlxdist ")}


def _write(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",".join(f"\n    {json.dumps(operation)}" for operation in record.pop("operations"))
    head = json.dumps(record, indent=2).removesuffix("\n}")
    replace_file(path, f'{head},\n  "operations": [{lines}\n  ]\n}}\n', 0o600)
