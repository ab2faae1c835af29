"""What the ranks of `mlxdist bench tp` measure: one decoder layer in several ways, in the same processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

import mlxdist
from mlxdist.nn.models.split_model import SplitModel
from mlxdist.nn.split_block.submissions import submissions

from .bandwidth import READ_ONLY
from .mlx_groups import mlx_group
from .operations import count_off
from .rank import time_case
from .timing import Work, asleep, interleave, slowest
from .tp_layers import layer_bytes, make_model, variants

# Of the largest element of a layer's output; the order of additions differs.
TOLERANCE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
COPY_UP_TO = 256 << 20  # bytes; more is copied no faster
PROMPT = [1, 2, 3, 4]


class Layers:
    """Cases: family, hidden, and operation "decode" or "prefill" with tokens and cached, or "generate" with layers,
    vocabulary and tokens, for a full model. Parameters: backends, device, repeats."""

    def __init__(self, world: mlxdist.Group, parameters: dict[str, Any]) -> None:
        self.world, self.repeats = world, parameters["repeats"]
        self.take = partial(interleave, repeats=self.repeats)
        self.dtype = "float16" if parameters["device"] == "gpu" else "float32"
        self.summary = {"device": parameters["device"], "dtype": self.dtype}
        if parameters["device"] == "gpu":
            mx.set_default_device(mx.gpu)
        self.groups = {name: mlx_group(name, world) for name in parameters["backends"]}

    def __call__(self, case: dict[str, Any]) -> list[dict[str, Any]]:
        return self._model(case) if case["operation"] == "generate" else self._layer(case)

    def _layer(self, case: dict[str, Any]) -> list[dict[str, Any]]:
        world = self.world
        model = make_model(case["family"], case["hidden"], getattr(mx, self.dtype))
        calls, expected, weights = variants(model, case["tokens"], case["cached"], world, self.groups)
        timed = {name: Timed(call, world) for name, call in calls.items()}
        copied, full = min(weights, COPY_UP_TO), layer_bytes(model.model.layers[0])
        works = {}
        for name, variant in timed.items():
            read = full if name.startswith("tp1") else weights
            if not name.endswith("compute"):  # without its sums the result is another one
                variant.check = partial(count_off, expected, TOLERANCE[self.dtype])
            works[name] = Work(
                variant.again, elsewhere=variant.block, wrong=variant.wrong, copies=read / copied / READ_ONLY
            )
        results = time_case(world, case, works, self.take, copied=copied, means=True)
        for result in results:
            variant = timed[result["variant"]]
            result |= {"weights": weights, "submitted": variant.submitted}
            if result["variant"] in ("split", "lazy", "graph", "mlx"):
                result["engine"] = _engine(variant, self.repeats, world)
        return results

    def _model(self, case: dict[str, Any]) -> list[dict[str, Any]]:
        """Decode with models of the same weights: "tp1" on rank 0 while the others sleep, all others on all ranks."""
        world, dtype = self.world, getattr(mx, self.dtype)

        def made() -> Any:
            return make_model(case["family"], case["hidden"], dtype, case["layers"], case["vocabulary"])

        # A group of its own: the model may still be at a token when the ranks meet for the next block.
        models = {"split": SplitModel.from_model(made(), group=world.split(0))}
        for name, group in self.groups.items():
            models[name] = made()
            models[name].shard(group)
        alone = {"tp1": made(), "tp1 split": SplitModel.from_model(made(), group=world.split(world.rank()))}
        decodes = {name: Decode(model, case["tokens"]) for name, model in (models | alone).items()}

        def wrong(decode: Decode) -> int:
            tokens = decodes["tp1"].tokens or [0] * case["tokens"]
            expected = mlxdist.broadcast(np.array(tokens), group=world)
            found = np.array(decode.tokens) if decode.tokens else expected  # a rank that slept has none
            return int(np.count_nonzero(found != expected))

        works = {}
        for name, decode in decodes.items():
            block = decode.block if name in models or world.rank() == 0 else asleep
            works[name] = Work(lambda: None, elsewhere=block, wrong=partial(wrong, decode))
        return time_case(world, case, works, self.take, means=True)


class Timed:
    """Calls of one variant: how long, what came out, how often a graph was handed over, how long inside the engine."""

    def __init__(self, call: Callable[[], mx.array | None], world: mlxdist.Group) -> None:
        self.call, self._world = call, world
        self.check: Callable[[mx.array], int] = lambda result: 0
        self.engine: list[float] = []  # microseconds per call inside operations of mlxdist, block by block
        call()  # compiles
        with submissions() as count:
            self.results = [call()]
        self.submitted = count.submitted

    def block(self, calls: int) -> list[float]:
        before = self._world.stats()["operation_ns"]
        times = Work(self.again).block(calls)
        self.engine.append((self._world.stats()["operation_ns"] - before) / 1e3 / calls)
        return times

    def again(self) -> None:
        self.results[1:] = [self.call()]

    def wrong(self) -> int:
        """Elements of the first and the last result that are not as the dense layer's."""
        return sum(self.check(result) for result in self.results if result is not None)


def _engine(variant: Timed, repeats: int, world: mlxdist.Group) -> dict[str, float]:
    """Microseconds per call inside mlxdist's operations: of the rank that was there longer, and of the other.

    The shorter one is what the operations cost; the rest of the longer one waits for a rank that computes longer.
    """
    blocks = np.array(variant.engine[-repeats:])
    least = mlxdist.all_min(blocks, group=world)
    return {"median": float(np.median(least)), "longest": float(np.median(slowest(blocks, world)))}


class Decode:
    """mlx-lm's own generate: microseconds per token after the first."""

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
