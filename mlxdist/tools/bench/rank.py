"""The program of every rank of a benchmark: makes the `BenchmarkWorkload` of the benchmark, and hands back its results.

    python -m mlxdist.tools.bench.rank package.module:Class JOB

JOB is {"mark", "cases": [...], "parameters": {...}} as runner.py packs it.
"""

from __future__ import annotations

import base64
import importlib
import importlib.metadata
import json
import sys
import zlib
from pathlib import Path
from typing import Any

import mlx.core as mx

import mlxdist
from mlxdist.base.json_reader import parse_json
from mlxdist.cluster.ssh.rpc_server import claim_streams

from .machine import describe_machine
from .timing import ForeignLoad, exchange, measure_limits, pin
from .workload import BenchmarkWorkload

__all__ = ["main"]


def find(target: str) -> type[BenchmarkWorkload]:
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
        measure.close()
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
        hand_back(summary | measure.summary)


if __name__ == "__main__":
    main()
