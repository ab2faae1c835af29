"""What each rank of `mlxdist bench tp` runs: one decoder layer in several ways, in turn, in the same processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np

import mlxdist
from mlxdist.nn.split_block.split_model import SplitModel
from mlxdist.nn.split_block.submissions import submissions

from .job import serve
from .limits_rank import copy_work
from .mlx_groups import mlx_groups
from .operations import total_wrong
from .timing import Work, asleep, interleave, quantiles, slowest
from .tp_layers import layer_bytes, make_model, variants

# Of the largest element of a layer's output; the order of additions differs.
TOLERANCE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
COPY_UP_TO = 256 << 20  # bytes; more is copied no faster
# A copy moves three bytes per byte, read, read for ownership and written, and reading the weights moves one.
READ_ONLY = 3
PROMPT = [1, 2, 3, 4]


def measure(world: mlxdist.Group, parameters: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Parameters: cases (family, hidden, phase, tokens, cached), backends, rounds, dtype, device;
    models: (family, hidden, layers, vocabulary, tokens), for whole-model decode."""
    if parameters["device"] == "gpu":
        mx.set_default_device(mx.gpu)
    groups = mlx_groups(parameters["backends"], world)
    for case in parameters["cases"]:
        yield _case(world, case, groups, parameters["dtype"], parameters["rounds"])
        mx.clear_cache()
    for case in parameters["models"]:
        yield _whole_model(world, case, groups, parameters["dtype"], parameters["rounds"])
        mx.clear_cache()


class Timed:
    """Calls of one variant: how long, what came out, how often a graph was handed over, how long inside the engine."""

    def __init__(self, call: Callable[[], mx.array | None], world: mlxdist.Group) -> None:
        self.call, self._world = call, world
        self.engine: list[float] = []  # microseconds per call inside operations of mlxdist, block by block
        with submissions() as count:
            self.results = [call()]
        with submissions() as count:
            self.results = [call()]
        self.submitted = count.submitted

    def block(self, calls: int) -> list[float]:
        before = self._world.stats()["operation_ns"]
        clock = time.perf_counter_ns
        times = [clock()]
        for _ in range(calls):
            y = self.call()
            times.append(clock())
        self.engine.append((self._world.stats()["operation_ns"] - before) / 1e3 / calls)
        self.results = [self.results[0], y]
        return [(end - begin) / 1e3 for begin, end in zip(times, times[1:])]

    def wrong(self, expected: mx.array, tolerance: float) -> int:
        """Elements of the first and the last result that are not as the dense layer's."""
        return sum(_wrong(result, expected, tolerance) for result in self.results if result is not None)


def _wrong(result: mx.array, expected: mx.array, tolerance: float) -> int:
    if result.shape != expected.shape:
        return expected.size
    found, wanted = result.astype(mx.float32), expected.astype(mx.float32)
    return int((~(mx.abs(found - wanted) <= tolerance * mx.abs(wanted).max())).sum().item())


def _case(
    world: mlxdist.Group, case: dict[str, Any], groups: dict[str, mx.distributed.Group], dtype: str, rounds: int
) -> dict[str, Any]:
    model = make_model(case["family"], case["hidden"], getattr(mx, dtype))
    calls, expected, weights = variants(model, case["tokens"], case["cached"], world, groups)
    timed = {name: Timed(call, world) for name, call in calls.items()}
    copied = min(weights, COPY_UP_TO)
    works = {name: Work(variant.call, elsewhere=variant.block) for name, variant in timed.items()}
    taken = interleave(works | {"memcpy": copy_work(copied)}, rounds, world)
    spread = {name: quantiles(slowest(blocks.mean(axis=1), world)) for name, blocks in taken.items()}
    memcpy = {name: value * weights / copied for name, value in spread.pop("memcpy").items() if name != "count"}
    wrong = {
        name: total_wrong(variant.wrong(expected, TOLERANCE[dtype]), world)
        for name, variant in timed.items()
        if not name.endswith("compute")
    }
    whole = layer_bytes(model.model.layers[0])
    refused = {
        name: impossible(name, times["median"], whole if name.startswith("tp1") else weights, weights, memcpy["min"])
        for name, times in spread.items()
    }
    return case | {
        "weights": weights,
        "memcpy": memcpy,
        "microseconds": spread,
        "wrong": wrong,
        "submitted": {name: variant.submitted for name, variant in timed.items()},
        "engine": {name: _engine(timed[name], rounds, world) for name in ("split", "lazy", "graph", "mlx")},
        "refused": refused,
    }


def _engine(variant: Timed, rounds: int, world: mlxdist.Group) -> dict[str, float]:
    """Microseconds per call inside mlxdist's operations: of the rank that was there longer, and of the other.

    The shorter one is what the operations cost; the rest of the longer one waits for a rank that computes longer.
    """
    blocks = np.array(variant.engine[-rounds:])
    least = mlxdist.all_min(blocks, group=world)
    return {"median": float(np.median(least)), "longest": float(np.median(slowest(blocks, world)))}


def impossible(name: str, microseconds: float, read: int, copied: int, memcpy: float) -> str | None:
    """Why a layer that reads ``read`` bytes of weights cannot take so long, or None if it can.

    Args:
        memcpy: the shortest time in which all ranks at once copied ``copied`` bytes each, in the same run.
    """
    least = memcpy * read / copied / READ_ONLY
    if microseconds >= least:
        return None
    claimed, most = (read / time / 1e3 for time in (microseconds, least))
    return (
        f"{name} read {read} bytes of weights in {microseconds:.1f} us, {claimed:.1f} GB/s, but copies in the same run "
        f"allow {most:.1f} GB/s at most; the clock or the work is wrong, so this is no result"
    )


class Decode:
    """mlx-lm's own generate: microseconds per token behind the first."""

    def __init__(self, model: Any, tokens: int) -> None:
        self._model, self._count = model, tokens
        self.tokens: list[int] = []

    def block(self, calls: int) -> list[float]:
        from mlx_lm.generate import generate_step, generation_stream

        times = []
        for _ in range(calls):
            self.tokens, begin = [], 0.0
            for token, _ in generate_step(mx.array(PROMPT), self._model, max_tokens=self._count):
                begin = begin or time.perf_counter()
                self.tokens.append(int(token))
            times.append((time.perf_counter() - begin) * 1e6 / (self._count - 1))
            mx.synchronize(generation_stream)  # it has begun one token more
        return times


def _whole_model(
    world: mlxdist.Group, case: dict[str, Any], groups: dict[str, mx.distributed.Group], dtype: str, rounds: int
) -> dict[str, Any]:
    """Decode with every model but one, of the same weights, on all ranks; "tp1" on rank 0 while the others sleep."""

    def made() -> Any:
        return make_model(case["family"], case["hidden"], getattr(mx, dtype), case["layers"], case["vocabulary"])

    dense = made()
    # A group of its own: the model may still be at a token when the ranks meet for the next block.
    models = {"split": SplitModel.from_model(made(), world.split(0))}
    for name, group in groups.items():
        models[name] = made()
        models[name].shard(group)
    decodes = {name: Decode(model, case["tokens"]) for name, model in models.items()}
    works = {name: Work(lambda: None, elsewhere=decode.block) for name, decode in decodes.items()}
    alone = {"tp1": Decode(dense, case["tokens"])}
    alone["tp1 split"] = Decode(SplitModel.from_model(made(), world.split(world.rank())), case["tokens"])
    for name, decode in alone.items():
        works[name] = Work(lambda: None, elsewhere=decode.block if world.rank() == 0 else asleep)
    taken = interleave(works, rounds, world)
    spread = {name: quantiles(slowest(blocks.mean(axis=1), world)) for name, blocks in taken.items()}
    expected = mlxdist.broadcast(np.array(alone["tp1"].tokens or [0] * case["tokens"]), group=world)
    wrong = {}
    for name, decode in (decodes | alone).items():
        tokens = np.array(decode.tokens) if decode.tokens else expected  # who slept has none
        wrong[name] = total_wrong(int(np.count_nonzero(tokens != expected)), world)
    return case | {"phase": "generate", "microseconds": spread, "wrong": wrong}


if __name__ == "__main__":
    serve(measure, limits=True)
