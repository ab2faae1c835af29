"""Deadlock detection: ranks that wait for each other get an error at once, and not at a deadline of 30 minutes.

An operation is blocked where it waits for another rank to enter it. That rank never will if it has left, or if all that
its threads wait for is blocked itself. So a rank whose operation has not progressed for a moment requests from the rank
it waits on what that one waits on, and so on: a search for a circle in the wait-for graph (deadlock_graph.py).

Responses of several ranks are not of the same moment. So the ranks are queried twice: where nothing has changed, all of
it held between the last response of the first time and the first request of the second.

A false alarm would end a job that works. So what is not proven to be blocked counts as able to progress: a message that
may be in flight, and a rank that may call other operations. Such a rank has

- a thread of Python, other than mlxdist's own, that is not in the engine, or is there with a time limit of its own:
  also one in ``mx.eval``, and the helper of a library,
- or a stream of MLX with queued operations that is in none of them now,
- or the MPI shim, behind which MLX queues operations that mlxdist does not see.

Whatever its threads do, a stream of MLX runs its operations in order. So what one has queued in a group comes after the
operation that it is in.
"""

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from mlxdist.base import errors
from mlxdist.base.environment import MAX_RANKS
from mlxdist.base.validation import fields_of, flag, list_of, number, row_of, text

from .deadlock_graph import GONE, Edge, Graph, Node, Operation, Report
from .internal_thread import InternalThread
from .native import bridge, ffi, lib

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

# With more operations in progress a rank counts as free, and its other operations are not reported.
_MAX = 64

# Of the text of an error.
_MAX_TEXT = 4096


# What other ranks may say.
_NUMBER = number(1, GONE - 1)
_COUNT = number(0, 2**32 - 1)
_GROUP = number(0, 2**16 - 1)
_OPERATION = (_NUMBER, _COUNT, number(-1, 2**15), _GROUP, number(0, 1), _COUNT, text(160))
_EDGE = (number(0, 2**15), _GROUP, number(0, 1), _COUNT)
_FAILURE = {"failure": text(_MAX_TEXT)}
_REQUEST = {"request": _COUNT, "edges": list_of(row_of(*_EDGE), _MAX)}
_RESPONSE = {
    "response": _COUNT,
    "operations": list_of(row_of(*_OPERATION), _MAX),
    "lines": list_of(_NUMBER, 2 * _MAX),
    "free": flag,
    "left": flag,
    "come": list_of(number(0, GONE), _MAX),
}


class DeadlockDetector:
    """Of one world, from connecting to finalize()."""

    def __init__(
        self,
        rank: int,
        host: str,
        native: Any,
        send: Callable[[int, str, bytes], None],
        has_left: Callable[[], bool],
        has_mpi_shim: Callable[[], bool],
    ) -> None:
        """``send(rank, tag, data)`` makes ``take`` be called there. ``has_left()``: this rank calls nothing more but
        finalize. ``has_mpi_shim()``: MLX may carry out operations that the bridge does not know of."""
        self._rank = rank
        self._host = host
        self._native = native
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
        """Before the rendezvous and the engine's group end."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._thread.join()

    def take(self, rank: int, data: bytes) -> None:
        """A message from another rank, in the rendezvous' thread. What is malformed counts as lost."""
        with contextlib.suppress(ValueError, RecursionError):
            message = json.loads(data)
            if isinstance(message, dict) and "failure" in message:
                self._fail(fields_of(_FAILURE, message)["failure"])
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
                self._responses[rank] = Report(operations, response["lines"], response["free"], response["left"], come)
                self._changed.notify_all()

    def _watch(self) -> None:
        seen: set[tuple[int, int]] = set()
        again = due = 0.0
        while self._sleep():
            waits, _ = self._waits()
            still = {(wait.number, wait.progress_count) for wait in waits or [] if wait.stuck_ns > _STALLED * 1e9}
            if not still <= seen:
                again, due = _AGAIN, 0.0
            seen = still
            if still and time.monotonic() >= due:
                due, again = time.monotonic() + again, min(2 * again, _AGAIN_MAX)
                self._search([(self._rank, wait) for wait, _ in sorted(still)])

    def _sleep(self) -> bool:
        with self._changed:
            return not self._changed.wait_for(lambda: self._ended, _INTERVAL)

    def _search(self, start: list[Node]) -> None:
        first = self._collect(start)
        if first is None or not (blocked := sorted(first.blocked().intersection(start))):
            return
        second = self._collect(start)
        if second is None or second.reports != first.reports:
            return
        path = first.path(blocked[0])
        rank, number = path[-1]
        last = first.reports[rank].operations[number].waits_for
        # One rank says it for all, whichever of them has found it.
        speaker = last if first.reports[last].left else min(rank for rank, _ in path)
        text = first.describe(path)
        if speaker == self._rank:
            self._fail(text)
        else:
            self._send_to(speaker, {"failure": text})

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
                if before[:4] != report[:4]:
                    return None
                graph.reports[rank] = report
            if responses is None:
                return None
            due = set()
            for node in graph.reachable():
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

    def _queued_behind(self, edge: Edge, queued: list[tuple[int, int, int, int]], waiting: dict[int, int]) -> int:
        """The operation that must get on before a stream of MLX comes to what the edge waits for; 0: not the case."""
        members = ffi.new("int32_t[]", MAX_RANKS)
        size = lib.mlxdist_flight_members(self._native, edge.group, members, MAX_RANKS)
        both = {lib.MLXDIST_ALL} | {member for member in range(size) if members[member] == edge.rank}
        threads = {
            thread
            for group, to, source, thread in queued
            if group == edge.group and (to if edge.receives else source) in both
        }
        return waiting.get(threads.pop(), 0) if len(threads) == 1 else 0

    def _own_report(self, edges: list[Edge]) -> Report:
        left = self._has_left()
        streams = bridge.busy_streams()  # before the operations: what has left its stream has begun
        queued = bridge.queued_tasks()
        waits, threads = self._waits()
        if waits is None:
            return Report({}, (), True, False, dict.fromkeys(edges, GONE))
        operations = {}
        for wait in waits:
            name, target = ffi.string(wait.name).decode(errors="replace"), (wait.group, wait.receives, wait.transfer)
            operations[wait.number] = Operation(wait.number, wait.progress_count, wait.rank, *target, name)
        lazy = {wait.number for wait in waits if wait.lazy}
        waiting = {thread.thread: thread.number for thread in threads if thread.number and not thread.timed}
        program = _threads_of_program()
        free = self._has_mpi_shim() or len(lazy) < streams or not program <= waiting.keys()
        lines = lazy | {waiting[ident] for ident in program & waiting.keys()}
        come = self._come(edges)  # after the queued: one that has begun by now has come
        for edge, operation in come.items():
            come[edge] = operation or self._queued_behind(edge, queued, waiting)
        return Report(operations, tuple(sorted(lines)), free, left, come)


def _threads_of_program() -> set[int | None]:
    """The idents of all threads that may call operations, also of those that the module threading does not know."""
    threads = threading.enumerate()
    own = {thread.ident for thread in threads if isinstance(thread, InternalThread)}
    known = {thread.ident for thread in threads if not isinstance(thread, InternalThread)}
    return known | (sys._current_frames().keys() - own)
