"""The graph of operations that wait for operations of other ranks, and the circles in it."""

from typing import NamedTuple

from .program_threads import Freedom

__all__ = ["GONE", "NAMED", "Edge", "Graph", "Node", "Operation", "Report"]

GONE = 2**64 - 1  # of mlxdist_come
NAMED = 4  # ranks of a circle in its text


class Edge(NamedTuple):
    """A wait of ``rank``: the fields of mlxdist_wait."""

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
    left: bool  # it calls no others, but for finalize
    come: dict[Edge, int]  # see mlxdist_come
    freedom: Freedom  # to call others now

    def agrees(self, other: "Report") -> bool:
        """Whether no operation has progressed between the two."""
        return self[:-1] == other[:-1]


Node = tuple[int, int]  # rank and number of an operation


class Graph:
    """The reports of the ranks."""

    def __init__(self, start: list[Node]) -> None:
        self.start = start
        self.reports: dict[int, Report] = {}

    def operation(self, node: Node) -> Operation | None:
        report = self.reports.get(node[0])
        return report.operations.get(node[1]) if report else None

    def agrees(self, other: "Graph") -> bool:
        """Whether no operation has progressed between the two."""
        return self.reports.keys() == other.reports.keys() and all(
            report.agrees(other.reports[rank]) for rank, report in self.reports.items()
        )

    def blockers(self, node: Node, freedom: Freedom) -> list[Node] | None:
        """The operations that block one: if all of these are blocked for ever, so is it. None: nothing blocks it.
        ``freedom``: ranks that have more of it count as able to progress."""
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
            return None if operation.name.startswith("finalize") else []
        if report.freedom > freedom or not report.lines:
            return None
        return [(operation.waits_for, line) for line in report.lines]

    def reachable(self, freedom: Freedom) -> list[Node]:
        found = list(self.start)
        for node in found:
            found += [held for held in self.blockers(node, freedom) or [] if held not in found]
        return found

    def blocked(self, freedom: Freedom) -> set[Node]:
        """The operations that cannot progress: those that nothing proves to progress."""
        nodes = set(self.reachable(freedom))
        while progressing := {
            n for n in nodes if (blockers := self.blockers(n, freedom)) is None or not nodes.issuperset(blockers)
        }:
            nodes -= progressing
        return nodes

    def path(self, node: Node, freedom: Freedom) -> list[Node]:
        """Follows a blocked operation: to a circle, from its lowest rank on, or the wait for a rank that has left."""
        path = [node]
        while blockers := self.blockers(path[-1], freedom):
            # The lowest: ranks that find the same circle must word it alike, since it is printed once.
            following = min(blockers)
            if following in path:
                circle = path[path.index(following) :]
                lowest = circle.index(min(circle))
                return circle[lowest:] + circle[:lowest]
            path.append(following)
        return path[-1:]

    def describe(self, path: list[Node]) -> str:
        """Describes each operation of a path, with its group; of a long path only the first ones."""
        operations = [self.reports[rank].operations[number] for rank, number in path]
        parts = [
            f"rank {rank} calls {operation.name} and waits for rank {operation.waits_for}"
            for (rank, _), operation in zip(path[:NAMED], operations)
        ]
        if len(path) > NAMED:
            parts.append(f"{len(path) - NAMED} more wait like these")
        last = operations[-1].waits_for
        if self.reports[last].left:
            parts.append(f"rank {last} calls finalize")
        return ", ".join(parts)
