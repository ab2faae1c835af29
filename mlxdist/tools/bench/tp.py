"""`mlxdist bench tp`: a decoder layer on two ranks, as a SplitBlock and by the methods that it competes with."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import click
import mlx.core as mx
import numpy as np
from rich.console import Console
from rich.table import Table

import mlxdist

from .bandwidth import READ_ONLY
from .benchmark import Benchmark
from .mlx_groups import mlx_group
from .operations import TOLERANCE, count_off
from .results import Result, Results, Row, Target, by_case, find, spread, table_of, times_of
from .runner import Runner, without_missing_mpi
from .sizes import multiples_of, names_of
from .timing import Work, asleep, slowest
from .workload import BenchmarkWorkload

__all__ = ["Layers", "communication", "targets", "tp"]

RANKS = 2
FAMILIES, PHASES, BACKENDS = ("mixtral", "qwen"), ("decode", "prefill", "generate"), ("ring", "mpi")
# On a CPU: for more, the reference BLAS of MLX's wheels takes seconds.
SLOW_PHASES_UP_TO = 1024
# To reach on a CPU with two cores.
FASTER_THAN_RING, COMMUNICATION, NOT_SLOWER, MODEL = 1.3, 0.02, 1.0, 1.5
NAMES = {
    "per-op": "mlx-lm's layer, every operation evaluated by itself",
    "split": "SplitBlock, two submissions per layer",
    "lazy": "SplitBlock, one lazy graph",
    "graph": "SplitBlock as one compiled graph, all_sum inside",
    "mlx": "mlx-lm's sharded layer on mlxdist",
    "ring": "mlx-lm's sharded layer on MLX's ring",
    "ring compiled": "the same, compiled",
    "mpi": "mlx-lm's sharded layer on Open MPI",
    "mpi compiled": "the same, compiled",
    "tp1": "mlx-lm's layer on one rank, the other asleep",
    "tp1 split": "SplitBlock on one rank, the other asleep",
}
COPY_UP_TO = 256 << 20  # bytes; more is copied no faster
PROMPT = [1, 2, 3, 4]


class Layers(BenchmarkWorkload):
    """Cases: family, hidden, and operation "decode" or "prefill" with tokens and cached, or "generate" with layers,
    vocabulary and tokens, for a full model. Parameters: backends, device."""

    def __init__(self, world: mlxdist.Group, parameters: dict[str, Any]) -> None:
        super().__init__(world, parameters)
        device = parameters["device"]
        self.dtype = "float16" if device == "gpu" else "float32"
        self.summary = {"device": device, "dtype": self.dtype}
        mx.set_default_device(getattr(mx, device))
        self.groups = {name: mlx_group(name, world) for name in parameters["backends"]}

    def __call__(self, case: dict[str, Any]) -> list[dict[str, Any]]:
        return self._model(case) if case["operation"] == "generate" else self._layer(case)

    def _layer(self, case: dict[str, Any]) -> list[dict[str, Any]]:
        from .models import make_model
        from .tp_layers import layer_bytes, variants

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
        results = self.time(case, works, copied=copied, means=True)
        for result in results:
            variant = timed[result["variant"]]
            result |= {"weights": weights, "submitted": variant.submitted}
            if result["variant"] in ("split", "lazy", "graph", "mlx"):
                result["engine"] = _engine(variant, self.parameters["repeats"], world)
        return results

    def _model(self, case: dict[str, Any]) -> list[dict[str, Any]]:
        """Decode with models of the same weights: "tp1" on rank 0 while the others sleep, all others on all ranks."""
        from mlxdist.nn.models.split_model import SplitModel

        from .models import make_model

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
        return self.time(case, works, means=True)


class Timed:
    """Calls of one variant: their times, their results, how many graphs were submitted, and the time in the engine."""

    def __init__(self, call: Callable[[], mx.array | None], world: mlxdist.Group) -> None:
        from mlxdist.nn.split_block.submissions import submissions

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
        """Counts the elements of the first and the last result that differ from the dense layer's."""
        return sum(self.check(result) for result in self.results if result is not None)


def _engine(variant: Timed, repeats: int, world: mlxdist.Group) -> dict[str, float]:
    """Microseconds per call inside mlxdist's operations: "longest" on the rank that spent longer there, "median" on the
    other rank.

    The shorter time is the cost of the operations; in the rest of the longer one a rank waits for the other, which
    still computes.
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


def targets(results: Results, families: list[str]) -> list[Target]:
    # The form that SplitBlock takes by default on the device that was measured.
    ours = "lazy" if results["setup"]["device"] == "cpu" else "split"
    ring = ["ring", "ring compiled"]
    wanted = f"communication {COMMUNICATION:.0%} of the layer or less"
    table = []
    for name in families:
        small, middle, large = (find(results, family=name, operation="decode", hidden=n) for n in (256, 1024, 4096))
        share = communication(middle[ours]) if middle else None
        model = find(results, family=name, operation="generate", hidden=1024)
        table.append(Target.slower(f"{name}, hidden 256, decode", small, ours, ring, FASTER_THAN_RING))
        table.append(Target(f"{name}, hidden 1024, decode", wanted, share, COMMUNICATION))
        table.append(Target.slower(f"{name}, hidden 4096, decode", large, ours, ring, NOT_SLOWER))
        table.append(Target.slower(f"{name}, whole model, generate", model, "split", ["tp1"], MODEL))
    return table


def communication(result: Result) -> float | None:
    """The share of a layer's time that its all_sum take, on the rank that reached them last and did not wait.

    It is shown for variants that also run without sums (``... compute``). The difference to those holds the time that a
    rank waits for the other, too, so it is no measure of communication.
    """
    times = result["microseconds"]
    return result["engine"]["median"] / times["median"] if times else None


def _show(results: Results, console: Console) -> None:
    for row in by_case(results):
        console.print(_table(row))
        for name in ("split", "lazy", "mlx"):
            if f"{name} compute" in row and row[name]["microseconds"]:
                inside = row[name]["engine"]
                console.print(
                    f"{name}: compute {spread(row[f'{name} compute']['microseconds'])} us; in its two all_sum "
                    f"{inside['median']:.1f} us, {communication(row[name]):.1%} of the layer, and up to "
                    f"{inside['longest'] - inside['median']:.1f} us more waiting for the other rank",
                    markup=False,
                )


def _table(row: Row) -> Table:
    ours = row["split"]
    case = ours["case"]
    if case["operation"] == "generate":
        title = f"{case['family']}, hidden {case['hidden']}, {case['layers']} layers: mlx-lm's generate, per token"
    else:
        length = f"{case['cached']} in the cache" if case["operation"] == "decode" else f"{case['tokens']} tokens"
        title = f"{case['family']}, hidden {case['hidden']}, {case['operation']}, {length}; per layer"
    rows = []
    for name, words in NAMES.items():
        if name not in row:
            continue
        result, ratio = row[name], times_of(row[name], ours)
        cells = ["", "", ""]
        if ratio is not None:
            cells[0] = f"{ratio:.2f}"
            if "weights" in result:
                read = result["weights"] * (RANKS if name.startswith("tp1") else 1)
                cells[1:] = [f"{read / result['microseconds']['median'] / 1e3:.1f}", str(result["submitted"])]
        rows.append([name, words, spread(result["microseconds"]), *cells, str(result["wrong"])])
    columns = ["variant", "what it is", "time", "times split", "GB/s of weights", "submissions", "#wrong"]
    return table_of(f"{title}; microseconds: median [range]", columns, rows, left=2)


@Benchmark(Layers, show=_show, repeats=15, two_ranks_here=True)
@click.option(
    "--shape", "families", type=names_of(FAMILIES), default="mixtral", show_default=True, help="Or qwen, all."
)
@click.option("--hidden", type=multiples_of(128), default="256,1024", show_default=True, help="Sizes of the layer.")
@click.option(
    "--phase", "phases", type=names_of(PHASES), default="decode", show_default=True, help="Or prefill, generate."
)
@click.option("--tokens", type=click.IntRange(2, 8192), default=32, show_default=True, help="Of a prefill.")
@click.option("--cache", "cached", type=click.IntRange(1, 255), default=128, show_default=True, help="Of a decode.")
@click.option("--baseline", "backends", type=names_of(BACKENDS), default="ring", show_default=True, help="Or mpi, all.")
@click.option("--layers", type=click.IntRange(1, 128), default=4, show_default=True, help="Of models that generate.")
@click.option("--device", type=click.Choice(["auto", "cpu", "gpu"]), default="auto", help="Where layers compute.")
@click.option("--targets", "judging", is_flag=True, help="Judge what a CPU with two cores should reach.")
def tp(
    runner: Runner,
    families: list[str],
    hidden: list[int],
    phases: list[str],
    tokens: int,
    cached: int,
    backends: list[str],
    layers: int,
    device: str,
    judging: bool,
) -> Results:
    """Time one decoder layer on two ranks of this machine, and check what it computes.

    float32 on a CPU, where 16-bit products are several times slower, float16 on a GPU. Every variant is compared with
    the full layer, and all of them alternate in the same two processes. "generate" is the decode of a full model with
    mlx-lm's own generate. On a CPU, prefill and generate are for sizes up to 1024.

    The exit status is 1 if an element was wrong, a time is shorter than reading the weights takes, or the file is not
    written.
    """
    if device == "auto":
        device = "gpu" if mx.default_device() == mx.gpu else "cpu"
    lengths = {"decode": {"tokens": 1, "cached": cached}, "prefill": {"tokens": tokens, "cached": 0}}
    lengths["generate"] = {"layers": layers, "vocabulary": 8192, "tokens": 24}
    cases = [
        {"family": family, "operation": phase, "hidden": size} | lengths[phase]
        for family in families
        for size in hidden
        for phase in phases
        if phase == "decode" or device == "gpu" or size <= SLOW_PHASES_UP_TO
    ]
    results = runner.run(cases, backends=without_missing_mpi(backends), device=device)
    results["targets"] = [one.judged() for one in targets(results, families)] if judging else []
    return results
