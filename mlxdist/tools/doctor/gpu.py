"""Measures an operation on the CPU between two on the GPU, with MLX_METAL_FAST_SYNCH and without. Runs on that host.

`python -m mlxdist.tools.doctor.gpu` measures once, with the variables of its environment, and prints JSON.
"""

import json
from typing import Any

from mlxdist.base.child_process import module_command
from mlxdist.base.json_reader import parse_json

__all__ = ["main", "synchronization"]

_SECONDS = 30.0
_CHAIN = 50  # crossings there and back in one evaluation
_REPEATS = 7


def synchronization(seconds: float = _SECONDS) -> dict[str, Any]:
    """Microseconds of one GPU-CPU crossing for each value of MLX_METAL_FAST_SYNCH; or why they are not known."""
    from .facts import run_python  # here: what measures starts without

    found: dict[str, Any] = {"skipped": "", "microseconds": {}, "error": ""}
    for value in ("0", "1"):
        output, error = run_python(module_command("mlxdist.tools.doctor.gpu"), seconds, MLX_METAL_FAST_SYNCH=value)
        if error:
            return found | {"error": f"with MLX_METAL_FAST_SYNCH={value}: {error}"}
        measured = parse_json(output)
        if measured["skipped"]:
            return found | {"skipped": measured["skipped"]}
        found["microseconds"][value] = measured["microseconds"]
    return found


def main() -> None:
    import statistics
    import time

    import mlx.core as mx

    if not mx.metal.is_available():
        print(json.dumps({"skipped": "there is no Metal here, so nothing crosses from a GPU of Apple's"}))
        return

    def chain(between: Any) -> float:
        x = mx.ones(16)
        mx.eval(x)
        begin = time.perf_counter()
        for _ in range(_CHAIN):
            x = mx.add(mx.add(x, 1, stream=mx.gpu), 1, stream=between)
        mx.eval(x)
        return (time.perf_counter() - begin) / _CHAIN * 1e6

    times: dict[Any, list[float]] = {mx.gpu: [], mx.cpu: []}
    for repeat in range(_REPEATS + 2):
        for device, taken in times.items():
            took = chain(device)
            if repeat >= 2:
                taken.append(took)
    # A CPU operation costs two crossings, there and back; the chain on the GPU has the time of the operations alone.
    cost = (statistics.median(times[mx.cpu]) - statistics.median(times[mx.gpu])) / 2
    print(json.dumps({"skipped": "", "microseconds": max(0.0, cost)}))


if __name__ == "__main__":
    main()
