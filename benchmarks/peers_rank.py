"""What the ranks of vs_peers.py measure: the same operation by mlxdist and by its peers, in the same process.

gloo comes with torch, which has an environment and so a process of its own: each rank starts a gloo process on its own
core and waits, asleep, while that has its block.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from engine import engine_work

import mlxdist
from mlxdist.tools.bench.bandwidth import bandwidths
from mlxdist.tools.bench.mlx_groups import mlx_group
from mlxdist.tools.bench.operations import CASES, Eager, Inputs, Lazy, storage
from mlxdist.tools.bench.timing import Work
from mlxdist.tools.bench.workload import OURS, BenchmarkWorkload


class Memory(BenchmarkWorkload):
    """One case: one operation, then the registered memory of all slabs of the rank that has most."""

    def __call__(self, case: dict[str, Any]) -> list[dict[str, Any]]:
        mlxdist.all_sum(np.ones(1 << 20, np.float32), group=self.world)
        largest = mlxdist.all_max(np.array([self.world.stats()["slab_bytes"]], np.int64), group=self.world)
        return [{"slab_bytes": int(largest[0])}]


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
        self._request({})  # until it is connected

    def _request(self, block: dict[str, Any]) -> dict[str, Any]:
        self._process.stdin.write(json.dumps(block) + "\n")
        self._process.stdin.flush()
        response = self._process.stdout.readline()
        if not response:
            raise RuntimeError(f"the gloo process ended with status {self._process.wait()}; its output is above")
        return json.loads(response)

    def work(self, dtype: str, elements: int, operations: int) -> Work:
        block = {"dtype": dtype, "elements": elements, "operations": operations}
        self.wrong = 0

        def elsewhere(calls: int) -> list[float]:
            response = self._request(block | {"calls": calls})
            self.wrong += response["wrong"]
            return response["microseconds"]

        return Work(lambda: None, operations, elsewhere=elsewhere, wrong=lambda: self.wrong)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(60)


class Peers(BenchmarkWorkload):
    """Cases: operation, dtype, bytes, chain ("all_reduce", called from C, has none). Parameters: backends,
    gloo (its Python, or None), gloo_port, mpi4py (the directory with its packages, or None)."""

    def __init__(self, world: mlxdist.Group, parameters: dict[str, Any]) -> None:
        super().__init__(world, parameters)
        self.groups = {name: mlx_group(name, world) for name in parameters["backends"]}
        self.gloo = Gloo(parameters["gloo"], parameters["gloo_port"], world) if parameters["gloo"] else None
        self.mpi4py = _mpi4py(parameters["mpi4py"], world) if parameters["mpi4py"] else None

    def __call__(self, case: dict[str, Any]) -> list[dict[str, Any]]:
        works = self._works(case)
        # Means: a peer that is done with a call here may still be at it on the other rank.
        results = self.time(case, works, moved=case["bytes"], means=True)
        return [result | bandwidths(result, self.world.size(), "all_sum") for result in results]

    def close(self) -> None:
        if self.gloo:
            self.gloo.close()

    def _works(self, case: dict[str, Any]) -> dict[str, Work]:
        operation, dtype, world = case["operation"], case["dtype"], self.world
        if operation == "all_reduce":
            return {OURS: engine_work(case["bytes"], world)}
        data = Inputs(dtype, case["bytes"] // storage(dtype).itemsize, world.size())
        called: dict[str, Lazy | Eager] = {}
        if operation == "all_to_all":
            called[OURS] = Eager(CASES[operation], data, world)
            if self.mpi4py:
                called["mpi4py"] = Eager(CASES[operation], data, world, self.mpi4py.Alltoall)
        else:
            function = getattr(mx.distributed, operation)
            for name, group in {OURS: world.mlx, **self.groups}.items():
                called[name] = Lazy(CASES[operation], data, world, _on(function, group), case["chain"])
        works = {name: Work(one.call, one.operations, wrong=one.count_wrong) for name, one in called.items()}
        if self.gloo and operation == "all_sum":
            works["gloo"] = self.gloo.work(dtype, data.elements, case["chain"])
        return works


def _mpi4py(directory: str, world: mlxdist.Group) -> Any:
    """mpi4py's communicator, over the MPI that MLX has started already, where it has."""
    sys.path.append(directory)
    import mpi4py

    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    from mpi4py import MPI

    if not MPI.Is_initialized():
        MPI.Init()
    if MPI.COMM_WORLD.Get_rank() != world.rank():
        raise RuntimeError(f"mpi4py numbers the ranks differently: {MPI.COMM_WORLD.Get_rank()}")
    return MPI.COMM_WORLD


def _on(function: Callable[..., mx.array], group: mx.distributed.Group) -> Callable[[mx.array], mx.array]:
    return lambda x: function(x, group=group)
