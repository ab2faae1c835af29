"""What each rank of `mlxdist bench collectives` runs: blocks of the same work on every backend in turn."""

from __future__ import annotations

import json
import os
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable

# Before MLX reads them: Open MPI's launcher numbers the ranks itself.
if "OMPI_COMM_WORLD_RANK" in os.environ and "MLXDIST_RANK" not in os.environ:
    os.environ["MLXDIST_RANK"] = os.environ["OMPI_COMM_WORLD_RANK"]

import mlx.core as mx
import numpy as np

import mlxdist

# name, elements of float32, operations per lazy graph, graphs per block
CASES = [
    ("8 KiB, chain of 50", 2 << 10, 50, 4),
    ("8 KiB", 2 << 10, 1, 50),
    ("64 KiB", 16 << 10, 1, 50),
    ("1 MiB", 256 << 10, 1, 20),
    ("16 MiB", 4 << 20, 1, 5),
]
BLOCK_PAUSE = 0.002  # lets a backend's helper threads fall asleep before the next backend is timed


def groups(names: list[str], hosts: str, group: mlxdist.Group) -> dict[str, mx.distributed.Group]:
    """A genuine mx.distributed.Group per backend, all over the same ranks."""
    found = {}
    for name in names:
        if name == "mlxdist":
            found[name] = group.mlx
            continue
        if name == "ring":
            os.environ["MLX_HOSTFILE"] = hosts
            os.environ["MLX_RANK"] = str(group.rank())
        found[name] = mx.distributed.init(strict=True, backend=name)
        if (found[name].rank(), found[name].size()) != (group.rank(), group.size()):
            raise RuntimeError(f"{name} numbers the ranks differently: {found[name].rank()} of {found[name].size()}")
    return found


def graph(x: mx.array, operations: int, group: mx.distributed.Group) -> mx.array:
    for _ in range(operations):
        x = mx.distributed.all_sum(x, group=group)
    return x


def check(name: str, elements: int, group: mx.distributed.Group) -> None:
    """One operation on data that differs by rank and element, against the sum computed here."""
    base = np.arange(elements, dtype=np.float32) % 1021
    expected = sum(base * (rank + 1) for rank in range(group.size()))
    result = np.array(mx.distributed.all_sum(mx.array(base * (group.rank() + 1)), group=group))
    wrong = int(np.count_nonzero(result != expected))
    if wrong:
        raise RuntimeError(f"{name}: {wrong} of {elements} elements of all_sum are wrong")


def timed(work: Callable[[], None], operations: int) -> float:
    """Microseconds per operation."""
    begin = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - begin) / 1e3 / operations


def measure(case: tuple, backends: dict[str, mx.distributed.Group], world: mlxdist.Group, rounds: int) -> dict:
    name, elements, operations, graphs = case
    x = mx.zeros(elements)  # sums of zeros stay finite however long the chain
    source, target = np.ones(elements, np.float32), np.ones(elements, np.float32)
    mx.eval(x)
    for backend, group in backends.items():
        check(backend, elements, group)
    samples: dict[str, list[float]] = {backend: [] for backend in [*backends, "memcpy"]}

    def copies() -> None:
        for _ in range(graphs * operations):
            np.copyto(target, source)

    for turn in range(rounds + 2):
        # Shuffled, and not turned around: then each would always follow the same other one. Alike on all ranks.
        for backend in random.Random(turn).sample(list(samples), len(samples)):
            time.sleep(BLOCK_PAUSE)
            world.barrier()
            if backend == "memcpy":
                took = timed(copies, graphs * operations)
            else:
                group = backends[backend]
                took = timed(
                    lambda group=group: [mx.eval(graph(x, operations, group)) for _ in range(graphs)],
                    graphs * operations,
                )
            if turn >= 2:  # two rounds of warm-up
                samples[backend].append(took)
    spread = {
        backend: {"median": statistics.median(took), "min": min(took), "max": max(took)}
        for backend, took in samples.items()
    }
    return {"name": name, "bytes": elements * 4, "memcpy": spread.pop("memcpy"), "microseconds": spread}


class ForeignLoad:
    """The share of the machine that processes other than the ranks used meanwhile: it disturbs more than all else."""

    def __init__(self, world: mlxdist.Group) -> None:
        self._world = world
        self._begin = self._read()

    def _read(self) -> np.ndarray:
        """Seconds of CPU: of the whole machine, idle or busy; of it busy; of all ranks. Zeros where not known."""
        own = resource.getrusage(resource.RUSAGE_SELF)
        ranks = mlxdist.all_sum(np.array([own.ru_utime + own.ru_stime]))[0]
        try:
            with open("/proc/stat") as file:
                ticks = [int(field) for field in file.readline().split()[1:9]]
        except FileNotFoundError:  # macOS
            return np.zeros(3)
        seconds = np.array([sum(ticks), sum(ticks) - ticks[3] - ticks[4]]) / os.sysconf("SC_CLK_TCK")
        return np.array([*seconds, ranks])

    def share(self) -> float | None:
        total, busy, ranks = self._read() - self._begin
        return max(0.0, (busy - ranks) / total) if total > 0 else None


def main() -> None:
    hosts, result, rounds, names = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4].split(",")
    world = mlxdist.init()
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[world.rank() % len(cores)]})
    mx.set_default_device(mx.cpu)
    mx.set_cache_limit(4 << 30)  # MLX's default on the CPU gives large buffers back, and mapping them again dominates
    backends = groups(names, hosts, world)
    foreign = ForeignLoad(world)
    cases = []
    for case in CASES:
        cases.append(measure(case, backends, world, rounds))
        if world.rank() == 0:
            print(f"measured {case[0]}", flush=True)
    foreign_share = foreign.share()
    if world.rank() == 0:
        provider = f"{world.provider}: {world.provider_reason}"
        with open(result, "w") as file:
            json.dump(
                {
                    "ranks": world.size(),
                    "provider": provider,
                    "backends": names,
                    "rounds": rounds,
                    "mlx": mx.__version__,
                    "mlxdist": mlxdist.__version__,
                    "foreign_cpu_share": foreign_share,
                    "cases": cases,
                },
                file,
            )


if __name__ == "__main__":
    main()
