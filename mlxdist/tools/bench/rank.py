"""What every rank of a benchmark runs: it makes the class of the benchmark, and hands back the results of each case.

    python -m mlxdist.tools.bench.rank package.module:Class JOB

JOB is {"mark", "cases": [...], "parameters": {...}} as runner.py packs it.

The class is made with the group and the parameters; a call with a case gives its results, on all ranks alike: those of
`time_case`, and `{"variant", "absent"}` for a variant that cannot do the case. Its `summary`, if any, is part of what
is said of the run; its `close`, if any, is called at the end.
"""

from __future__ import annotations

import base64
import importlib
import importlib.metadata
import json
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

import mlxdist
from mlxdist.base.json_reader import parse_json
from mlxdist.cluster.ssh.rpc_server import claim_streams

from .bandwidth import impossible
from .limits import LIMITS
from .machine import describe_machine
from .timing import ForeignLoad, Work, copy_work, exchange, limit_works, measure_limits, pin, quantiles, slowest

__all__ = ["main", "peak_memory", "time_case", "total"]

Take = Callable[[Mapping[str, Work], mlxdist.Group], dict[str, np.ndarray]]


def time_case(
    world: mlxdist.Group,
    case: dict[str, Any],
    works: Mapping[str, Work],
    take: Take,
    *,
    moved: int = 0,
    copied: int = 0,
    means: bool = False,
) -> list[dict[str, Any]]:
    """The result of each of the ``works``, as the slowest rank saw it; see results.py.

    Args:
        take: `timing.interleave` with its numbers.
        moved: bytes that move between the ranks; both limits of the machine for as many are taken in turn.
        copied: bytes of which only a copy is taken, for works that compute; see `Work.copies`.
        means: of blocks, where what one call sends ahead shows in the next.
    """
    limits = limit_works(moved, world) if moved else {"memcpy": copy_work(copied)} if copied else {}
    times = {}
    for name, samples in take({**works, **limits}, world).items():
        times[name] = quantiles(slowest(samples.mean(axis=1) if means else samples, world))
    allowed = {name: times.pop(name, None) for name in (LIMITS if moved else limits)}
    copy = allowed.get("memcpy")
    results = []
    for name, work in works.items():
        wrong = total(work.wrong(), world)
        why = f"{wrong} elements of all ranks and calls together are wrong" if wrong else None
        if work.copies and copy:
            why = why or impossible(times[name]["median"], copy["min"] * work.copies)
        # Numbers that cannot be must not be found in a file.
        found = {"wrong": wrong, "refused": why, "microseconds": None if why else times[name]}
        results.append({"case": case, "variant": name} | found | allowed)
    return results


def peak_memory(world: mlxdist.Group, call: Callable[[], Any]) -> int:
    """Bytes that a call needs beyond what is held before, on the rank that needs most."""
    mx.clear_cache()
    world.barrier()
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(call())
    return int(mlxdist.all_max(np.array([mx.get_peak_memory() - held]), group=world)[0])


def total(number: int, world: mlxdist.Group) -> int:
    """Of all ranks."""
    return int(mlxdist.all_sum(np.array([number], np.int64), group=world)[0])


def find(target: str) -> Callable[[mlxdist.Group, dict[str, Any]], Callable[[dict], Iterable[dict]]]:
    module, _, name = target.rpartition(":")
    if module.endswith(".py"):
        sys.path.insert(0, str(Path(module).parent))
        module = Path(module).stem
    return getattr(importlib.import_module(module), name)


def main() -> None:
    # Whatever prints here or in a child: the standard output is for results alone.
    _, stdout = claim_streams()
    target, job = find(sys.argv[1]), parse_json(zlib.decompress(base64.b64decode(sys.argv[2])))
    parameters = job["parameters"]
    world = mlxdist.init()
    pinned = parameters["pinned"] and pin(world.rank())
    mx.set_default_device(mx.cpu)
    mx.set_cache_limit(4 << 30)  # MLX's default on the CPU gives large buffers back, and mapping them again dominates
    foreign = ForeignLoad(world)
    with open(stdout, "w", buffering=1) as output:

        def hand_back(found: Any) -> None:
            if world.rank() == 0:
                output.write(f"{job['mark']}{json.dumps(found)}\n")

        measure = target(world, parameters)
        for case in job["cases"]:
            hand_back(list(measure(case)))
            mx.clear_cache()
        getattr(measure, "close", lambda: None)()
        summary = {
            "ranks": world.size(),
            "provider": f"{world.provider}: {world.provider_reason}",
            "pinned": pinned,
            "device": "cpu",
            "mlx": importlib.metadata.version("mlx"),
            "mlxdist": mlxdist.__version__,
            "limits": measure_limits(world) if parameters.get("with_limits") else [],
            "machines": exchange(describe_machine(), world),
            "foreign_cpu_share": foreign.share(),
            "absent": [],
        }
        hand_back(summary | getattr(measure, "summary", {}))


if __name__ == "__main__":
    main()
