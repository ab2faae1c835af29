"""The graph of operations that wait for operations of other ranks, and the circles in it."""

from typing import NamedTuple

__all__ = ["GONE", "Edge", "Graph", "Node", "Operation", "Report"]

GONE = 2**64 - 1  # of mlxdist_come


class Edge(NamedTuple):
    """What ``rank`` waits for: fields of mlxdist_wait."""

    rank: int
    group: int
    receives: int
    transfer: int


class Operation(NamedTuple):
    number: int
    progress_count: int
    waits_for: int  # -1: not for a rank that has to come
    group: int
    receives: int
    transfer: int
    name: str

    def edge(self, rank: int) -> Edge:
        return Edge(rank, self.group, self.receives, self.transfer)


class Report(NamedTuple):
    """The state of a rank."""

    operations: dict[int, Operation]  # by number
    lines: tuple[int, ...]  # those that threads wait for, which may call others afterwards
    free: bool  # it may call others now
    left: bool  # it calls no others, but for finalize
    come: dict[Edge, int]  # see mlxdist_come


Node = tuple[int, int]  # rank and number of an operation


class Graph:
    """The reports of the ranks."""

    def __init__(self, start: list[Node]) -> None:
        self.start = start
        self.reports: dict[int, Report] = {}

    def operation(self, node: Node) -> Operation | None:
        report = self.reports.get(node[0])
        return report.operations.get(node[1]) if report else None

    def blockers(self, node: Node) -> list[Node] | None:
        """What blocks an operation: if all of these are blocked for ever, so is it. None: nothing blocks it."""
        operation = self.operation(node)
        report = self.reports.get(operation.waits_for) if operation else None
        if operation is None or report is None:
            return None
        come = report.come.get(operation.edge(node[0]), GONE)
        if come == GONE:
            return None
        if come:
            return [(operation.waits_for, come)]
        if report.left:  # that one calls finalize, and nothing else
            return None if operation.name == "finalize" else []
        return None if report.free or not report.lines else [(operation.waits_for, line) for line in report.lines]

    def reachable(self) -> list[Node]:
        found = list(self.start)
        for node in found:
            found += [held for held in self.blockers(node) or [] if held not in found]
        return found

    def blocked(self) -> set[Node]:
        """The operations that cannot progress: those that nothing proves to progress."""
        nodes = set(self.reachable())
        while progressing := {
            n for n in nodes if (blockers := self.blockers(n)) is None or not nodes.issuperset(blockers)
        }:
            nodes -= progressing
        return nodes

    def path(self, node: Node) -> list[Node]:
        """From a blocked operation: a circle from its lowest rank on, or the wait for a rank that has left."""
        path = [node]
        while blockers := self.blockers(path[-1]):
            following = min(blockers)
            if following in path:
                circle = path[path.index(following) :]
                lowest = circle.index(min(circle))
                return circle[lowest:] + circle[:lowest]
            path.append(following)
        return path[-1:]

    def describe(self, path: list[Node]) -> str:
        """The text of the error; of a long circle its beginning."""
        operations = [self.reports[rank].operations[number] for rank, number in path]
        parts = [
            f"rank {rank} calls {operation.name} and waits for rank {operation.waits_for}"
            for (rank, _), operation in zip(path[:4], operations)
        ]
        if len(path) > 4:
            parts.append(f"{len(path) - 4} more wait like these")
        last = operations[-1].waits_for
        if self.reports[last].left:
            parts.append(f"rank {last} calls finalize")
        return (
            f"ranks disagree: {', '.join(parts)}; none of them can go on: all ranks of a group must call the same "
            "operations in the same order, with the same algorithm (MLXDIST_ALGO), and what one waits for must not "
            "wait for what it calls later"
        )
