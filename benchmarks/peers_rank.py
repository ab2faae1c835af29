"""What each rank of vs_peers.py runs: the same operation by mlxdist and by its peers, in turn, in the same process.

gloo comes with torch, which has an environment and so a process of its own: each rank starts a gloo process on its own
core and waits, asleep, while that has its block.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx

import mlxdist
from mlxdist.tools.bench.job import serve
from mlxdist.tools.bench.limits_rank import limit_works, take_limits
from mlxdist.tools.bench.mlx_groups import mlx_groups
from mlxdist.tools.bench.operations import CASES, Inputs, storage, total_wrong
from mlxdist.tools.bench.through import Eager, Lazy
from mlxdist.tools.bench.timing import Work, interleave, quantiles, slowest

OURS = "mlxdist"


class Gloo:
    """This rank's gloo process: blocked on its standard input except while it has its block."""

    def __init__(self, python: str, port: int, world: mlxdist.Group) -> None:
        program = Path(__file__).with_name("gloo_process.py")
        variables = {name: value for name, value in os.environ.items() if not name.startswith(("MLX", "OMPI", "PMIX"))}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        variables |= {"RANK": str(world.rank()), "WORLD_SIZE": str(world.size())}
        command = [python, str(program)]
        self._process = subprocess.Popen(
            command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.wrong = 0
        self.ask({})  # until it is connected

    def ask(self, block: dict[str, Any]) -> dict[str, Any]:
        self._process.stdin.write(json.dumps(block) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the gloo process ended with status {self._process.wait()}; its output is above")
        return json.loads(answer)

    def work(self, dtype: str, elements: int, operations: int) -> Work:
        block = {"dtype": dtype, "elements": elements, "operations": operations}
        self.wrong = 0

        def elsewhere(calls: int) -> list[float]:
            answer = self.ask(block | {"calls": calls})
            self.wrong += answer["wrong"]
            return answer["microseconds"]

        return Work(lambda: None, operations, elsewhere=elsewhere)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(60)


def measure(world: mlxdist.Group, parameters: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Parameters: cases (operation, dtype, bytes, chain), backends, rounds, gloo (its
    Python, or None), gloo_port, mpi4py (the folder with its packages, or None)."""
    groups = mlx_groups(parameters["backends"], world)
    gloo = Gloo(parameters["gloo"], parameters["gloo_port"], world) if parameters["gloo"] else None
    mpi4py = _mpi4py(parameters["mpi4py"], world) if parameters["mpi4py"] else None
    for case in parameters["cases"]:
        yield _case(world, case, groups, gloo, mpi4py, parameters["rounds"])
    if gloo:
        gloo.close()


def _mpi4py(folder: str, world: mlxdist.Group) -> Any:
    """mpi4py's communicator, over the MPI that MLX has started already, where it has."""
    sys.path.append(folder)
    import mpi4py

    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    from mpi4py import MPI

    if not MPI.Is_initialized():
        MPI.Init()
    if MPI.COMM_WORLD.Get_rank() != world.rank():
        raise RuntimeError(f"mpi4py numbers the ranks differently: {MPI.COMM_WORLD.Get_rank()}")
    return MPI.COMM_WORLD


def _case(
    world: mlxdist.Group,
    case: dict[str, Any],
    groups: dict[str, mx.distributed.Group],
    gloo: Gloo | None,
    mpi4py: Any,
    rounds: int,
) -> dict[str, Any]:
    operation, dtype, size = case["operation"], case["dtype"], case["bytes"]
    data = Inputs(dtype, size // storage(dtype).itemsize, world.size())
    throughs: dict[str, Lazy | Eager] = {}
    if operation == "all_to_all":
        throughs[OURS] = Eager(CASES[operation], data, world)
        if mpi4py:
            throughs["mpi4py"] = Eager(CASES[operation], data, world, mpi4py.Alltoall)
    else:
        function = getattr(mx.distributed, operation)
        for name, group in {OURS: world.mlx, **groups}.items():
            lazy = _on(function, group)
            throughs[name] = Lazy(CASES[operation], data, world, lazy, case["chain"])
    works = {name: Work(through.call, through.operations) for name, through in throughs.items()}
    if gloo and operation == "all_sum":
        works["gloo"] = gloo.work(dtype, data.elements, case["chain"])
    taken = interleave(works | limit_works(size, world), rounds, world)
    wrong = {name: total_wrong(through.count_wrong(), world) for name, through in throughs.items()}
    if "gloo" in works:
        wrong["gloo"] = total_wrong(gloo.wrong, world)
    # Blocks, not single calls: a peer that is done with a call here may still be at it on the other rank.
    spread = {name: quantiles(slowest(blocks.mean(axis=1), world)) for name, blocks in taken.items()}
    return case | take_limits(spread) | {"microseconds": spread, "wrong": wrong}


def _on(function: Callable[..., mx.array], group: mx.distributed.Group) -> Callable[[mx.array], mx.array]:
    return lambda x: function(x, group=group)


if __name__ == "__main__":
    serve(measure)
