"""Ranks that wait for each other: they get an error at once, and not only at a deadline of 30 minutes.

An operation stands still where it waits for another rank to come to it. That rank never will if it has left, or if all
that its threads wait for stands still itself. So a rank whose operation has not got on for a moment asks the one that
it waits for what that one waits for, and so on: this is a search for a circle in the graph of what waits for what.

Answers of several ranks are not of the same moment. So the ranks are asked twice: where nothing has changed, all of it
held between the last answer of the first time and the first question of the second.

A false alarm would end a job that works. So what is not proven to stand still counts as able to go on: a message that
may be on its way, and a rank that may call other operations. Such a rank has

- a thread of Python, other than mlxdist's own, that is not in the engine, or is there with a time limit of its own:
  also one in ``mx.eval``, and the helper of a library,
- or a stream of MLX with operations to carry out that is in none of them now,
- or the MPI door, behind which MLX queues operations that mlxdist does not see.

Whatever its threads do, a stream of MLX carries out its operations in order. So what one has queued in a group comes
after the operation that it is in.
"""

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from mlxdist.base import errors
from mlxdist.base.environment import MAX_RANKS
from mlxdist.base.validation import Check, fields_of, flag, list_of, number, text
from mlxdist.runtime.internal_thread import InternalThread

from .native import bridge, ffi, lib

__all__ = ["TAG", "Standstill"]

# Of its messages between ranks.
TAG = "standstill"

# Seconds between two looks at this rank's operations, until one stands still, and until a rank has answered.
_LOOK = 0.2
_STILL = 0.25
_PATIENCE = 2.0

# The same operations are looked into again after this time, then after twice the time and so on.
_AGAIN = 0.5
_AGAIN_MOST = 30.0

# With more operations in progress a rank counts as free, and more is not asked of it.
_MOST = 64

# Of the text of an error.
_MOST_TEXT = 4096

_GONE = 2**64 - 1  # of mlxdist_come


class _Edge(NamedTuple):
    """What ``rank`` waits for, in the words of mlxdist_wait."""

    rank: int
    group: int
    receives: int
    stream: int


class _Operation(NamedTuple):
    number: int
    moves: int
    waits_for: int  # -1: not for a rank that has to come
    group: int
    receives: int
    stream: int
    name: str

    def edge(self, rank: int) -> _Edge:
        return _Edge(rank, self.group, self.receives, self.stream)


class _Report(NamedTuple):
    """What a rank says."""

    operations: dict[int, _Operation]  # by number
    lines: tuple[int, ...]  # those that threads wait for, which may call others afterwards
    free: bool  # it may call others now
    left: bool  # it calls no others, but for finalize
    come: dict[_Edge, int]  # see mlxdist_come


_Node = tuple[int, int]  # rank and number of an operation


class _Graph:
    """What the ranks that were asked have said."""

    def __init__(self, start: list[_Node]) -> None:
        self.start = start
        self.reports: dict[int, _Report] = {}

    def operation(self, node: _Node) -> _Operation | None:
        report = self.reports.get(node[0])
        return report.operations.get(node[1]) if report else None

    def holds(self, node: _Node) -> list[_Node] | None:
        """What keeps an operation from going on: if all of these stand still so does it. None: nothing does."""
        operation = self.operation(node)
        report = self.reports.get(operation.waits_for) if operation else None
        if operation is None or report is None:
            return None
        come = report.come.get(operation.edge(node[0]), _GONE)
        if come == _GONE:
            return None
        if come:
            return [(operation.waits_for, come)]
        if report.left:  # that one calls finalize, and nothing else
            return None if operation.name == "finalize" else []
        return None if report.free or not report.lines else [(operation.waits_for, line) for line in report.lines]

    def reachable(self) -> list[_Node]:
        found = list(self.start)
        for node in found:
            found += [held for held in self.holds(node) or [] if held not in found]
        return found

    def standing(self) -> set[_Node]:
        """The operations that cannot go on any more: those that nothing proves to go on."""
        nodes = set(self.reachable())
        while going := {n for n in nodes if (holds := self.holds(n)) is None or not nodes.issuperset(holds)}:
            nodes -= going
        return nodes

    def path(self, node: _Node) -> list[_Node]:
        """From an operation that stands still: a circle, beginning with its lowest rank, or what waits for a rank that
        has left."""
        path = [node]
        while holds := self.holds(path[-1]):
            following = min(holds)
            if following in path:
                circle = path[path.index(following) :]
                lowest = circle.index(min(circle))
                return circle[lowest:] + circle[:lowest]
            path.append(following)
        return path[-1:]

    def describe(self, path: list[_Node]) -> str:
        """The text of the error; of a long circle its beginning."""
        parts = []
        for node in path[:4]:
            operation = self.operation(node)
            parts.append(f"rank {node[0]} calls {operation.name} and waits for rank {operation.waits_for}")
        if len(path) > 4:
            parts.append(f"{len(path) - 4} more wait like these")
        last = self.operation(path[-1]).waits_for
        if self.reports[last].left:
            parts.append(f"rank {last} calls finalize")
        return (
            f"ranks disagree: {', '.join(parts)}; none of them can go on: all ranks of a group must call the same "
            "operations in the same order, with the same algorithm (MLXDIST_ALGO), and what one waits for must not wait "
            "for what it calls later"
        )


def _list_like(checks: tuple[Check, ...]) -> Check:
    def check_list(name: str, value: Any) -> tuple:
        if type(value) is not list or len(value) != len(checks):
            raise ValueError(f"{name} is no list of {len(checks)}")
        return tuple(check(name, field) for check, field in zip(checks, value, strict=True))

    return check_list


# What other ranks may say.
_NUMBER = number(1, _GONE - 1)
_COUNT = number(0, 2**32 - 1)
_GROUP = number(0, 2**16 - 1)
_OPERATION = (_NUMBER, _COUNT, number(-1, 2**15), _GROUP, number(0, 1), _COUNT, text(160))
_EDGE = (number(0, 2**15), _GROUP, number(0, 1), _COUNT)
_FAILURE = {"failure": text(_MOST_TEXT)}
_QUESTION = {"asked": _COUNT, "edges": list_of(_list_like(_EDGE), _MOST)}
_ANSWER = {
    "answers": _COUNT,
    "operations": list_of(_list_like(_OPERATION), _MOST),
    "lines": list_of(_NUMBER, 2 * _MOST),
    "free": flag,
    "left": flag,
    "come": list_of(number(0, _GONE), _MOST),
}


class Standstill:
    """Of one world, from connecting to finalize()."""

    def __init__(
        self,
        rank: int,
        host: str,
        native: Any,
        send: Callable[[int, str, bytes], None],
        has_left: Callable[[], bool],
        has_doors: Callable[[], bool],
    ) -> None:
        """``send(rank, tag, data)`` makes ``take`` be called there. ``has_left()``: this rank calls nothing more but
        finalize. ``has_doors()``: MLX may carry out operations that the bridge does not know of."""
        self._rank = rank
        self._host = host
        self._native = native
        self._send = send
        self._has_left = has_left
        self._has_doors = has_doors
        self._changed = threading.Condition()
        self._asked = 0
        self._questions: dict[int, list[_Edge]] = {}
        self._answers: dict[int, _Report] = {}
        self._ended = False
        self._thread = InternalThread(target=self._watch, name="mlxdist standstill", daemon=True)
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
            elif isinstance(message, dict) and "asked" in message:
                question = fields_of(_QUESTION, message)
                self._answer(rank, question["asked"], [_Edge(*edge) for edge in question["edges"]])
            else:
                self._take_answer(rank, fields_of(_ANSWER, message))

    def _answer(self, rank: int, asked: int, edges: list[_Edge]) -> None:
        report = self._report(edges)
        come = [report.come[edge] for edge in edges]
        operations = list(report.operations.values())
        self._tell(rank, report._asdict() | {"answers": asked, "operations": operations, "come": come})

    def _take_answer(self, rank: int, answer: dict[str, Any]) -> None:
        operations = {fields[0]: _Operation(*fields) for fields in answer["operations"]}
        with self._changed:
            edges = self._questions.get(rank, [])
            if answer["answers"] == self._asked and rank in self._questions and len(edges) == len(answer["come"]):
                come = dict(zip(edges, answer["come"], strict=True))
                self._answers[rank] = _Report(operations, answer["lines"], answer["free"], answer["left"], come)
                self._changed.notify_all()

    def _watch(self) -> None:
        seen: set[tuple[int, int]] = set()
        again = due = 0.0
        while self._sleep():
            waits, _ = self._waits()
            still = {(wait.number, wait.progress_count) for wait in waits or [] if wait.stuck_ns > _STILL * 1e9}
            if not still <= seen:
                again, due = _AGAIN, 0.0
            seen = still
            if still and time.monotonic() >= due:
                due, again = time.monotonic() + again, min(2 * again, _AGAIN_MOST)
                self._search([(self._rank, number) for number, _ in sorted(still)])

    def _sleep(self) -> bool:
        with self._changed:
            return not self._changed.wait_for(lambda: self._ended, _LOOK)

    def _search(self, start: list[_Node]) -> None:
        first = self._collect(start)
        standing = sorted(first.standing().intersection(start)) if first else []
        if not standing:
            return
        second = self._collect(start)
        if second is None or second.reports != first.reports:
            return
        path = first.path(standing[0])
        last = first.operation(path[-1]).waits_for
        # One rank says it for all, whichever of them has found it.
        speaker = last if first.reports[last].left else min(rank for rank, _ in path)
        text = first.describe(path)
        if speaker == self._rank:
            self._fail(text)
        else:
            self._tell(speaker, {"failure": text})

    def _fail(self, text: str) -> None:
        text = errors.located(text, self._rank, self._host)
        lib.mlxdist_group_abort(self._native, lib.MLXDIST_MISMATCH, text.encode())

    def _collect(self, start: list[_Node]) -> _Graph | None:
        """Asks all ranks that these operations depend on. None: a rank does not answer, or something has changed."""
        graph = _Graph(start)
        asked: dict[int, list[_Edge]] = {self._rank: []}
        due = {self._rank}
        while due:
            answers = self._ask({rank: asked[rank] for rank in due})
            for rank, report in (answers or {}).items():
                before = graph.reports.setdefault(rank, report)
                if before[:4] != report[:4]:
                    return None
                graph.reports[rank] = report
            if answers is None:
                return None
            due = set()
            for node in graph.reachable():
                operation = graph.operation(node)
                if operation is None or operation.waits_for < 0:
                    continue
                edges = asked.setdefault(operation.waits_for, [])
                if operation.edge(node[0]) not in edges:
                    edges.append(operation.edge(node[0]))
                    due.add(operation.waits_for)
                if len(edges) > _MOST:
                    return None
        return graph

    def _ask(self, questions: dict[int, list[_Edge]]) -> dict[int, _Report] | None:
        with self._changed:
            self._asked += 1
            self._questions = questions
            self._answers = {}
        if self._rank in questions:
            own = self._report(questions[self._rank])
            with self._changed:
                self._answers[self._rank] = own
        for rank, edges in questions.items():
            if rank != self._rank:
                self._tell(rank, {"asked": self._asked, "edges": edges})
        with self._changed:
            self._changed.wait_for(lambda: self._ended or len(self._answers) == len(questions), _PATIENCE)
            return dict(self._answers) if len(self._answers) == len(questions) else None

    def _tell(self, rank: int, message: dict[str, Any]) -> None:
        with contextlib.suppress(errors.Error):  # it has left, or the group has failed: no answer is an answer, too
            self._send(rank, TAG, json.dumps(message).encode())

    # What this rank waits for.

    def _waits(self) -> tuple[list[Any] | None, list[Any]]:
        """The operations in progress, None where they are not known; and the threads that wait, or have waited."""
        waits = ffi.new("mlxdist_wait[]", _MOST)
        threads = ffi.new("mlxdist_waiting_thread[]", lib.MLXDIST_THREADS)
        count = lib.mlxdist_waits(self._native, waits, _MOST, threads)
        if count > _MOST:
            return None, []
        return list(waits[0:count]), [thread for thread in threads if thread.thread]

    def _come(self, edges: list[_Edge]) -> dict[_Edge, int]:
        numbers = ffi.new("uint64_t[]", [_GONE] * len(edges))
        lib.mlxdist_come(self._native, ffi.new("mlxdist_edge[]", edges), len(edges), numbers)
        return dict(zip(edges, numbers, strict=True))

    def _queued_behind(self, edge: _Edge, queued: list[tuple[int, int, int, int]], waiting: dict[int, int]) -> int:
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

    def _report(self, edges: list[_Edge]) -> _Report:
        left = self._has_left()
        streams = bridge.busy_streams()  # before the operations: what has left its stream has begun
        queued = bridge.queued_tasks()
        waits, threads = self._waits()
        if waits is None:
            return _Report({}, (), True, False, dict.fromkeys(edges, _GONE))
        operations = {
            wait.number: _Operation(
                wait.number,
                wait.progress_count,
                wait.rank,
                wait.group,
                wait.receives,
                wait.transfer,
                ffi.string(wait.name).decode(errors="replace"),
            )
            for wait in waits
        }
        lazy = {wait.number for wait in waits if wait.lazy}
        waiting = {thread.thread: thread.number for thread in threads if thread.number and not thread.timed}
        program = _threads_of_program()
        free = self._has_doors() or len(lazy) < streams or not program <= waiting.keys()
        lines = lazy | {waiting[ident] for ident in program & waiting.keys()}
        come = self._come(edges)  # after the queued: one that has begun by now has come
        for edge, number in come.items():
            come[edge] = number or self._queued_behind(edge, queued, waiting)
        return _Report(operations, tuple(sorted(lines)), free, left, come)


def _threads_of_program() -> set[int | None]:
    """The idents of all threads that may call operations, also of those that the module threading does not know."""
    threads = threading.enumerate()
    own = {thread.ident for thread in threads if isinstance(thread, InternalThread)}
    known = {thread.ident for thread in threads if not isinstance(thread, InternalThread)}
    return known | (sys._current_frames().keys() - own)
