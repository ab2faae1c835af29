"""Deadlock detection: ranks that wait for each other get an error at once, and not at a deadline of 30 minutes.

An operation is blocked where it waits for another rank to enter it. That rank never will if it has left, or if all that
its threads wait for is blocked itself. So a rank whose operation has not progressed for a moment requests from the rank
it waits on what that one waits on, and so on: a search for a circle in the wait-for graph (deadlock_graph.py).

Responses of several ranks are not of the same moment. So the ranks are queried twice: where nothing has changed, all of
it held between the last response of the first time and the first request of the second.

A false alarm would end a job that works. So what may be in flight counts as able to progress, and so does a rank whose
threads may call other operations (program_threads.py). If no rank of a circle can, all of them get an error. Where
threads wake up now and then, as the monitor of a progress bar does, they may come with what is missing: that circle is
a warning on all ranks, and an error when it has stood for the grace (MLXDIST_DEADLOCK_GRACE). Where a thread runs,
sleeps, or waits for input it is neither. The grace counts only while these ranks respond: not while one is stopped.

Whatever its threads do, a stream of MLX runs its operations in order. So what one has queued comes after the
operation that it is in.
"""

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mlxdist.base import errors, logger
from mlxdist.base.environment import MAX_RANKS
from mlxdist.base.json_reader import parse_json
from mlxdist.base.validation import fields_of, flag, list_of, number, row_of, text

from ..internal_thread import InternalThread
from ..native import bridge, ffi, lib
from .deadlock_graph import GONE, NAMED, Edge, Graph, Node, Operation, Report
from .program_threads import Freedom, ProgramThreads

__all__ = ["TAG", "DeadlockDetector"]

# Of its messages between ranks.
TAG = "deadlock"

# Seconds between two checks of this rank's operations, until one counts as stalled, and for a rank to respond.
_INTERVAL = 0.2
_STALLED = 0.25
_RESPONSE_TIMEOUT = 2.0

# The same operations are searched again after this time, then after twice the time and so on.
_AGAIN = 0.5
_AGAIN_MAX = 30.0

# Seconds until a circle is searched again; and until one that was not seen is a new one, since a process was stopped.
_CONFIRM = 0.5
_UNSEEN_MAX = 5.0

# With more operations in progress a rank counts as free, and its other operations are not reported.
_MAX = 64

# Of the text of an error.
_MAX_TEXT = 4096


# The values that other ranks may send.
_NUMBER = number(1, GONE - 1)
_COUNT = number(0, 2**32 - 1)
_GROUP = number(0, 2**16 - 1)
_TRANSFER = number(0, 2**48 - 1)  # place and index
_OPERATION = (_NUMBER, _COUNT, number(-1, 2**15), _GROUP, number(0, 1), _TRANSFER, text(288))
_EDGE = (number(0, 2**15), _GROUP, number(0, 1), _TRANSFER)
_FAILURE = {"failure": text(_MAX_TEXT)}
_WARNING = {"warning": text(_MAX_TEXT)}
_REQUEST = {"request": _COUNT, "edges": list_of(row_of(*_EDGE), _MAX)}
_RESPONSE = {
    "response": _COUNT,
    "operations": list_of(row_of(*_OPERATION), _MAX),
    "lines": list_of(_NUMBER, 2 * _MAX),
    "left": flag,
    "freedom": number(0, max(Freedom)),
    "come": list_of(number(0, GONE), _MAX),
}


_ADVICE = (
    "all ranks of a group must call the same operations in the same order, with the same algorithm (MLXDIST_ALGO), and "
    "what one waits for must not wait for what it calls later"
)


@dataclass
class _Suspicion:
    """A circle that another operation may still resolve."""

    circle: list[tuple[Node, int]]  # with the progress of each operation
    since: float
    seen: float


class DeadlockDetector:
    """Detects deadlocks of one world, from connecting to finalize()."""

    def __init__(
        self,
        rank: int,
        host: str,
        native: Any,
        grace: float,
        send: Callable[[int, str, bytes], None],
        has_left: Callable[[], bool],
        has_mpi_shim: Callable[[], bool],
    ) -> None:
        """``grace``: seconds, 0 for ever. ``send(rank, tag, data)`` makes ``take`` be called there. ``has_left()``:
        this rank calls nothing more but finalize. ``has_mpi_shim()``: MLX may carry out operations that the bridge does
        not know of."""
        self._rank = rank
        self._host = host
        self._native = native
        self._grace = grace
        self._threads = ProgramThreads(native)
        self._suspicion: _Suspicion | None = None
        self._warned_of: list[tuple[Node, int]] = []
        self._printed = ""
        self._send = send
        self._has_left = has_left
        self._has_mpi_shim = has_mpi_shim
        self._changed = threading.Condition()
        self._request_number = 0
        self._requests: dict[int, list[Edge]] = {}
        self._responses: dict[int, Report] = {}
        self._ended = False
        self._thread = InternalThread(target=self._watch, name="mlxdist deadlock", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread; to be called before the rendezvous and the engine's group end."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._thread.join()

    def take(self, rank: int, data: bytes) -> None:
        """A message from another rank, in the rendezvous' thread. What is malformed counts as lost."""
        with contextlib.suppress(ValueError):
            message = parse_json(data)
            if isinstance(message, dict) and "failure" in message:
                self._fail(fields_of(_FAILURE, message)["failure"])
            elif isinstance(message, dict) and "warning" in message:
                self._print(fields_of(_WARNING, message)["warning"])
            elif isinstance(message, dict) and "request" in message:
                request = fields_of(_REQUEST, message)
                self._respond(rank, request["request"], [Edge(*edge) for edge in request["edges"]])
            else:
                self._take_response(rank, fields_of(_RESPONSE, message))

    def _respond(self, rank: int, number: int, edges: list[Edge]) -> None:
        report = self._own_report(edges)
        come = [report.come[edge] for edge in edges]
        operations = list(report.operations.values())
        self._send_to(rank, report._asdict() | {"response": number, "operations": operations, "come": come})

    def _take_response(self, rank: int, response: dict[str, Any]) -> None:
        operations = {fields[0]: Operation(*fields) for fields in response["operations"]}
        with self._changed:
            edges = self._requests.get(rank, [])
            if (
                response["response"] == self._request_number
                and rank in self._requests
                and len(edges) == len(response["come"])
            ):
                come = dict(zip(edges, response["come"], strict=True))
                self._responses[rank] = Report(
                    operations, response["lines"], response["left"], come, Freedom(response["freedom"])
                )
                self._changed.notify_all()

    def _watch(self) -> None:
        seen: set[tuple[int, int]] = set()
        again = due = 0.0
        free = False
        while self._sleep():
            waits, _ = self._waits()
            still = {(wait.number, wait.progress_count) for wait in waits or [] if wait.stuck_ns > _STALLED * 1e9}
            if not still <= seen:
                again, due = _AGAIN, 0.0
            # The last rank that comes to wait finds the circle that this closes.
            was_free, free = free, bool(still) and self._own_report([]).freedom == Freedom.FREE
            if was_free and not free:
                due = min(due, time.monotonic() + _CONFIRM)
            seen = still
            if still and time.monotonic() >= due:
                suspects = self._search([(self._rank, wait) for wait, _ in sorted(still)])
                due, again = time.monotonic() + (_CONFIRM if suspects else again), min(2 * again, _AGAIN_MAX)

    def _sleep(self) -> bool:
        with self._changed:
            return not self._changed.wait_for(lambda: self._ended, _INTERVAL)

    def _search(self, start: list[Node]) -> bool:
        """Whether ranks wait for each other, as far as can be seen now."""
        if not (found := self._find(start)):
            self._suspicion = None
            return False
        self._act(*found)
        return True

    def _find(self, start: list[Node]) -> tuple[Graph, list[Node], Freedom] | None:
        """A circle that has stood for a moment, and what its ranks may do about it."""
        first = self._collect(start)
        if first is None or not first.blocked(Freedom.PENDING).intersection(start):
            return None
        second = self._collect(start)
        if second is None or not second.agrees(first):
            return None
        for freedom in (Freedom.STUCK, Freedom.IDLE, Freedom.PENDING):
            if blocked := first.blocked(freedom) & second.blocked(freedom) & set(start):
                return second, second.path(min(blocked), freedom), freedom
        return None

    def _act(self, graph: Graph, path: list[Node], freedom: Freedom) -> None:
        """Warns of a circle when it is seen again, and ends it when no thread, or none in time, can."""
        operations = [graph.reports[rank].operations[number] for rank, number in path]
        circle = [(node, operation.progress_count) for node, operation in zip(path, operations, strict=True)]
        now = time.monotonic()
        last = self._suspicion
        if last is None or last.circle != circle or now - last.seen > _UNSEEN_MAX:
            last = self._suspicion = _Suspicion(circle, now, now)
        last.seen = now
        text = graph.describe(path)
        if freedom > Freedom.STUCK and now > last.since and circle != self._warned_of:
            self._warned_of = circle
            self._warn(text, path)
        is_over = freedom == Freedom.IDLE and 0 < self._grace <= now - last.since
        if freedom == Freedom.STUCK or is_over:
            # One rank says it for all, whichever of them has found it.
            waits_for = operations[-1].waits_for
            speaker = waits_for if graph.reports[waits_for].left else min(rank for rank, _ in path)
            why = f"has gone on for {self._grace:g} s (MLXDIST_DEADLOCK_GRACE)" if is_over else "can go on"
            self._tell(speaker, {"failure": f"ranks disagree: {text}; none of them {why}: {_ADVICE}"})

    def _warn(self, text: str, path: list[Node]) -> None:
        """Warns all ranks, which print it once. Each rank that the text names sends it: one may not find the circle."""
        if self._rank not in {rank for rank, _ in path[:NAMED]}:
            return
        limit = f"in {self._grace:g} s" if self._grace else "at the deadline of the operations"
        text = (
            f"ranks wait for each other: {text}; unless a thread that is idle now calls what is missing, this ends "
            f"with an error {limit} (MLXDIST_DEADLOCK_GRACE): {_ADVICE}"
        )
        for rank in range(lib.mlxdist_group_size(self._native)):
            self._tell(rank, {"warning": text})

    def _tell(self, rank: int, message: dict[str, str]) -> None:
        if rank == self._rank:
            self.take(rank, json.dumps(message).encode())
        else:
            self._send_to(rank, message)

    def _print(self, text: str) -> None:
        with self._changed:
            is_new, self._printed = text != self._printed, text
        if is_new:
            logger.warn("deadlock", text)

    def _fail(self, text: str) -> None:
        text = errors.located(text, self._rank, self._host)
        lib.mlxdist_group_abort(self._native, lib.MLXDIST_MISMATCH, text.encode())

    def _collect(self, start: list[Node]) -> Graph | None:
        """Collects the reports of all ranks that these operations depend on. None: one does not respond, or changes."""
        graph = Graph(start)
        edges_of: dict[int, list[Edge]] = {self._rank: []}
        due = {self._rank}
        while due:
            responses = self._query({rank: edges_of[rank] for rank in due})
            for rank, report in (responses or {}).items():
                before = graph.reports.setdefault(rank, report)
                if before[:3] != report[:3]:
                    return None
                graph.reports[rank] = report._replace(freedom=max(before.freedom, report.freedom))
            if responses is None:
                return None
            due = set()
            for node in graph.reachable(Freedom.PENDING):
                operation = graph.operation(node)
                if operation is None or operation.waits_for < 0:
                    continue
                edges = edges_of.setdefault(operation.waits_for, [])
                if operation.edge(node[0]) not in edges:
                    edges.append(operation.edge(node[0]))
                    due.add(operation.waits_for)
                if len(edges) > _MAX:
                    return None
        return graph

    def _query(self, requests: dict[int, list[Edge]]) -> dict[int, Report] | None:
        with self._changed:
            self._request_number += 1
            self._requests = requests
            self._responses = {}
        if self._rank in requests:
            own = self._own_report(requests[self._rank])
            with self._changed:
                self._responses[self._rank] = own
        for rank, edges in requests.items():
            if rank != self._rank:
                self._send_to(rank, {"request": self._request_number, "edges": edges})
        with self._changed:
            self._changed.wait_for(lambda: self._ended or len(self._responses) == len(requests), _RESPONSE_TIMEOUT)
            return dict(self._responses) if len(self._responses) == len(requests) else None

    def _send_to(self, rank: int, message: dict[str, Any]) -> None:
        # Where the rank has left, or the group has failed, the requester finds no response.
        with contextlib.suppress(errors.Error):
            self._send(rank, TAG, json.dumps(message).encode())

    # What this rank waits for.

    def _waits(self) -> tuple[list[Any] | None, list[Any]]:
        """The operations in progress, None where they are not known; and the threads that wait, or have waited."""
        waits = ffi.new("mlxdist_wait[]", _MAX)
        threads = ffi.new("mlxdist_waiting_thread[]", lib.MLXDIST_THREADS)
        count = lib.mlxdist_waits(self._native, waits, _MAX, threads)
        if count > _MAX:
            return None, []
        return list(waits[0:count]), [thread for thread in threads if thread.thread]

    def _come(self, edges: list[Edge]) -> dict[Edge, int]:
        numbers = ffi.new("uint64_t[]", [GONE] * len(edges))
        lib.mlxdist_come(self._native, ffi.new("mlxdist_edge[]", edges), len(edges), numbers)
        return dict(zip(edges, numbers, strict=True))

    def _queued_behind(self, edge: Edge, queued: list[tuple[int, ...]], waiting: dict[int, int]) -> int:
        """The operation that must progress before a stream of MLX comes to what the edge waits for; 0: none will.

        A stream that is in no operation computes, and comes to it then.
        """
        place, index = divmod(edge.transfer, 2**16)
        members = ffi.new("int32_t[]", MAX_RANKS)
        size = lib.mlxdist_flight_members(self._native, edge.group, members, MAX_RANKS)
        peer = next((member for member in range(size) if members[member] == edge.rank), -1)
        for group, to, source, collective, send, receive, thread in queued:
            message = (send, to) if edge.receives else (receive, source)
            if group == edge.group and (
                (place, peer) == message if index == lib.MLXDIST_MESSAGE else place == collective
            ):
                return waiting.get(thread, 0) if thread else GONE
        return 0

    def _own_report(self, edges: list[Edge]) -> Report:
        left = self._has_left()
        streams = bridge.busy_streams()  # before the operations: what has left its stream has begun
        queued = bridge.queued_tasks()
        waits, threads = self._waits()
        if waits is None:
            return Report({}, (), False, dict.fromkeys(edges, GONE), Freedom.FREE)
        operations = {}
        for wait in waits:
            name, target = ffi.string(wait.name).decode(errors="replace"), (wait.group, wait.receives, wait.transfer)
            operations[wait.number] = Operation(wait.number, wait.progress_count, wait.rank, *target, name)
        lazy = {wait.number for wait in waits if wait.lazy}
        waiting = {thread.thread: thread for thread in threads if thread.number and not thread.timed}
        numbers = {ident: thread.number for ident, thread in waiting.items()}
        if _threads_of_program() <= waiting.keys() and len(lazy) >= streams and not self._has_mpi_shim():
            freedom = Freedom.STUCK  # as the engine and the bridge know, whatever the system shows
        else:
            moment = tuple(sorted((wait.number, wait.progress_count) for wait in waits))
            freedom = self._threads.freedom({ident: thread.id for ident, thread in waiting.items()}, moment)
        lines = lazy.union(numbers.values())
        come = self._come(edges)  # after the queued: one that has begun by now has come
        for edge, operation in come.items():
            come[edge] = operation or self._queued_behind(edge, queued, numbers)
        return Report(operations, tuple(sorted(lines)), left, come, freedom)


def _threads_of_program() -> set[int | None]:
    """The idents of all threads that may call operations, also of those that the module threading does not know."""
    threads = threading.enumerate()
    own = {thread.ident for thread in threads if isinstance(thread, InternalThread)}
    known = {thread.ident for thread in threads if not isinstance(thread, InternalThread)}
    return known | (sys._current_frames().keys() - own)
