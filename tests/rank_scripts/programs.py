"""Programs of collectives that are data: what sequences.py and chaos.py carry out, each result compared with
the reference. test_sequences.py says what stands in a program.

Groups are numbered in the order of the splits, "group" 0 being the world; one split makes several groups, of which a
rank is in one at most.
"""

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

import mlxdist

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import reference

from mlxdist.runtime.group.group import engine_of
from mlxdist.runtime.native import check, lib

__all__ = ["carry_out", "inject", "world"]

ORDERS = {"ring": reference.ring_all_reduce, "recursive_doubling": reference.recursive_doubling_all_reduce}

world = mlxdist.init()


class Part:
    """The groups of one split, as this rank sees them: its own group, and its members as ranks of the world."""

    def __init__(self, group: mlxdist.Group | None, members: list[list[int]]) -> None:
        self.group = group
        self.members = members  # of all the groups
        self.own = next((ranks for ranks in members if world.rank() in ranks), [])
        assert (group is None) == (not self.own)
        if group is not None:
            assert (group.rank(), group.size()) == (self.own.index(world.rank()), len(self.own))


def split(part: Part, step: dict) -> Part:
    colors, keys = step["colors"], step["keys"]
    members = []
    for ranks in part.members:
        for color in sorted({colors[rank] for rank in ranks if colors[rank] >= 0}):
            selected = [(keys[r] if keys[r] >= 0 else i, i, r) for i, r in enumerate(ranks) if colors[r] == color]
            members.append([rank for _, _, rank in sorted(selected)])
    group = None if part.group is None else part.group.split(colors[world.rank()], keys[world.rank()])
    return Part(group, members)


class Call:
    """One operation of the program in one group: what goes in, what must come out."""

    def __init__(self, number: int, step: dict, group: mlxdist.Group) -> None:
        self.step, self.group, self.number = step, group, number
        self.rank, self.size = group.rank(), group.size()
        self.op, self.dtype, self.root = step["op"], step["dtype"], step["root"] % group.size()
        rows = step["rows"] * (group.size() if step["do"] in ("reduce_scatter", "scatter", "all_to_all") else 1)
        shape = (rows, *step["row"])
        self.inputs = [reference.distinct(shape, self.dtype, r, number) for r in range(self.size)]
        self.x = self.inputs[self.rank].copy()
        self.keywords: dict[str, Any] = {"group": group}
        self.is_lazy = step["how"] in ("mlx", "async") and step["do"] != "barrier"
        self.is_evaluated_later = self.is_lazy and step["how"] == "async"
        if not self.is_lazy and self.dtype == "bfloat16":
            self.keywords["dtype"] = "bfloat16"
        if step["how"] == "handle":
            self.keywords["async_op"] = True

    def start(self) -> Any:
        """What mlxdist returns: the result, or a handle."""
        if self.is_lazy:
            x = mx.array(self.x)
            result = getattr(self, self.step["do"])(x.view(mx.bfloat16) if self.dtype == "bfloat16" else x)
            (mx.async_eval if self.step["how"] == "async" else mx.eval)(result)
            return result
        if self.step["how"] == "in place" and self.step["do"] in ("all_reduce", "broadcast", "reduce"):
            self.keywords["out"] = self.x
        return getattr(self, self.step["do"])(self.x)

    def finish(self, result: Any) -> None:
        if isinstance(result, mlxdist.Handle):
            result = result.wait()
            assert isinstance(result, np.ndarray) or self.sends
        if isinstance(result, mx.array):
            result = np.array(result.view(mx.uint16) if self.dtype == "bfloat16" else result)
        result = self.x if self.sends else np.array(result)
        expected = getattr(self, f"expect_{self.step['do']}")()
        if "out" in self.keywords and self.step["do"] == "reduce" and self.rank != self.root:
            assert reference.same(self.x, self.inputs[self.rank]), f"{self}: out has changed"
        assert reference.same(result, expected), f"{self}: {result} is not {expected}"
        if "out" not in self.keywords:
            assert reference.same(self.x, self.inputs[self.rank]), f"{self}: the input has changed"

    def __str__(self) -> str:
        return f"step {self.number} on rank {self.rank} of {self.size} (rank {world.rank()} of the world): {self.step}"

    # The operations, and what they must give.

    def _ordered(self, name: str) -> np.ndarray:
        """Reduced in the order of the algorithm that the group says it uses."""
        algorithm = self.group.algorithm(name, self.x)
        if name == "reduce" and algorithm == "tree":
            return reference.tree_reduce(self.inputs, self.dtype, self.op, self.root)
        return ORDERS.get(algorithm, reference.all_reduce)(self.inputs, self.dtype, self.op)

    def all_reduce(self, x: Any) -> Any:
        return mlxdist.all_reduce(x, self.op, **self.keywords)

    def expect_all_reduce(self) -> np.ndarray:
        return self._ordered("all_reduce")

    def reduce_scatter(self, x: Any) -> Any:
        return mlxdist.reduce_scatter(x, self.op, **self.keywords)

    def expect_reduce_scatter(self) -> np.ndarray:
        return np.split(self._ordered("reduce_scatter"), self.size)[self.rank]

    def reduce(self, x: Any) -> Any:
        return mlxdist.reduce(x, self.op, self.root, **self.keywords)

    def expect_reduce(self) -> np.ndarray:
        if self.size == 1 or self.rank == self.root:
            return self._ordered("reduce")
        return reference.nothing(self.inputs[self.rank])

    def all_gather(self, x: Any) -> Any:
        return mlxdist.all_gather(x, **self.keywords)

    def expect_all_gather(self) -> np.ndarray:
        return reference.all_gather(self.inputs)

    def gather(self, x: Any) -> Any:
        return mlxdist.gather(x, self.root, **self.keywords)

    def expect_gather(self) -> np.ndarray:
        return reference.gather(self.inputs, self.root, self.rank)

    def scatter(self, x: Any) -> Any:
        return mlxdist.scatter(x, self.root, **self.keywords)

    def expect_scatter(self) -> np.ndarray:
        return reference.scatter(self.inputs, self.root, self.rank)

    def broadcast(self, x: Any) -> Any:
        return mlxdist.broadcast(x, self.root, **self.keywords)

    def expect_broadcast(self) -> np.ndarray:
        return self.inputs[self.root]

    def all_to_all(self, x: Any) -> Any:
        return mlxdist.all_to_all(x, **self.keywords)

    def expect_all_to_all(self) -> np.ndarray:
        return reference.all_to_all(self.inputs, self.rank)

    def _counts(self) -> list[list[int]]:
        random = np.random.default_rng(self.number)
        rows = self.x.shape[0]
        cuts = np.sort(random.integers(0, rows + 1, (self.size, self.size - 1)), axis=1)
        return np.diff(cuts, prepend=0, append=rows, axis=1).tolist()

    def all_to_all_v(self, x: Any) -> Any:
        counts = self._counts()
        return mlxdist.all_to_all_v(x, counts[self.rank], [row[self.rank] for row in counts], **self.keywords)

    def expect_all_to_all_v(self) -> np.ndarray:
        return reference.all_to_all_v(self.inputs, self._counts(), self.rank)

    @property
    def sends(self) -> bool:
        """Whether this rank is the one that only sends."""
        return self.step["do"] == "send" and self.rank == self.root

    def send(self, x: Any) -> Any:
        """Of the root to one rank; the others have nothing to do with it."""
        if self.size > 1 and self.sends:
            return mlxdist.send(x, (self.root + self._distance()) % self.size, **self.keywords)
        if self.size > 1 and self.rank == (self.root + self._distance()) % self.size:
            return mlxdist.recv_like(x, self.root, **self.keywords)
        return x

    def expect_send(self) -> np.ndarray:
        receives = self.size > 1 and self.rank == (self.root + self._distance()) % self.size
        return self.inputs[self.root if receives else self.rank]

    def _distance(self) -> int:
        return 1 + self.step["root"] % (self.size - 1)

    def sendrecv(self, x: Any) -> Any:
        if self.size == 1:
            return np.array(self.x)
        there, back = (self.rank + self._distance()) % self.size, (self.rank - self._distance()) % self.size
        return mlxdist.sendrecv(x, there, back, **self.keywords)

    def expect_sendrecv(self) -> np.ndarray:
        return self.inputs[(self.rank - self._distance()) % self.size if self.size > 1 else 0]

    def barrier(self, x: Any) -> Any:
        handle = mlxdist.barrier(group=self.group, async_op="async_op" in self.keywords)
        if handle is not None:
            handle.wait()
        return np.empty(0)

    def expect_barrier(self) -> np.ndarray:
        return np.empty(0)


class Program:
    """One that is being carried out: the groups that there are, and what has been started."""

    def __init__(self) -> None:
        self.parts: list[Part | None] = [Part(world, [list(range(world.size()))])]
        self.pending: list[tuple[int, Call, Any]] = []  # each with the step before which it is waited for

    def do(self, number: int, step: dict) -> None:
        if step["do"] == "split":
            self.parts.append(split(self.parts[step["group"]], step))
        elif step["do"] == "forget":
            self.parts[step["group"]] = None
        elif step["do"] == "burst":
            # Started on several groups, by each rank in an order of its own.
            groups = step["groups"][world.rank() % len(step["groups"]) :] + step["groups"]
            for index in list(dict.fromkeys(groups)):
                if self.parts[index].group is not None:
                    self.settle(index)
                    call = Call(number, step | {"do": step["each"], "how": "handle"}, self.parts[index].group)
                    self.pending.append((number + 1 + world.rank() % 2, call, call.start()))
        elif step["do"] == "inject":
            inject(step["faults"])
        elif step["do"] == "threads":
            self.in_threads(number, step["each"])
        elif self.parts[step["group"]].group is not None:
            call = Call(number, step, self.parts[step["group"]].group)
            if not call.is_evaluated_later:
                self.settle(step["group"])
            result = call.start()
            if step["how"] in ("handle", "async"):
                self.pending.append((number + step["wait_after"], call, result))
            else:
                call.finish(result)

    def in_threads(self, number: int, steps: list[dict]) -> None:
        """Those of each group in a thread of its own, while the main thread has those of the first."""

        def work(index: int) -> None:
            started: list[tuple[Call, Any]] = []
            for step in steps:
                if step["group"] == index:
                    call = Call(number, step, self.parts[index].group)
                    if not call.is_evaluated_later:  # see settle()
                        finish_evaluated(started)
                    started.append((call, call.start()))
            for call, result in started:
                call.finish(result)

        groups = [i for i in dict.fromkeys(step["group"] for step in steps) if self.parts[i].group is not None]
        for index in groups:
            self.settle(index)
        with ThreadPoolExecutor(max(len(groups), 1)) as pool:
            futures = [pool.submit(work, index) for index in groups[1:]]
            for index in groups[:1]:
                work(index)
            for future in futures:
                future.result()

    def settle(self, index: int) -> None:
        """The operations of one group have one order: nothing of it is carried out at once while it is evaluated."""
        group = self.parts[index].group
        self.finish([entry for entry in self.pending if entry[1].group is group and entry[1].step["how"] == "async"])

    def finish(self, entries: list[tuple[int, Call, Any]]) -> None:
        for entry in entries:
            self.pending.remove(entry)
            entry[1].finish(entry[2])


def finish_evaluated(started: list[tuple[Call, Any]]) -> None:
    """Those that MLX may still be evaluating."""
    for entry in [entry for entry in started if entry[0].step["how"] == "async"]:
        started.remove(entry)
        entry[0].finish(entry[1])


def inject(faults: str) -> None:
    """Into what this rank sends from now on (mlxdist_group_inject_faults); each rank draws its own."""
    check(lib.mlxdist_group_inject_faults(engine_of(world).native, f"{faults},seed={world.rank()}".encode()))


def carry_out(steps: list[dict], before: Callable[[int, dict], None] = lambda number, step: None) -> None:
    """Calls ``before`` with the number of each step and the step, which it may change.

    Raises:
        AssertionError: a result is wrong.
    """
    program = Program()
    for number, step in enumerate(steps):
        before(number, step)
        program.finish([entry for entry in program.pending if entry[0] == number])
        program.do(number, step)
    program.finish(program.pending[::-1] if world.rank() % 2 else program.pending[:])
