"""`mlxdist bench pp`: training and generation with a model in stages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import click
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

import mlxdist

from .benchmark import Benchmark
from .operations import count_off
from .results import Comparison, Results, Row, Target, by_case, case_name
from .runner import Runner
from .sizes import multiples_of, names_of
from .timing import Work
from .workload import BenchmarkWorkload, evaluated

__all__ = ["Pipelines", "pp", "targets"]

ALONE, SCHEDULES = "alone", ("gpipe", "1f1b", "zero_bubble")
IN_FLIGHT, BATCH, MLX_LM = "in flight", "one batch", "mlx-lm"
BY_SPEED, EQUAL = "by speed", "equal"
SPEEDUP, MORE_TOKENS, FASTER_CUT, BUBBLE = 1.5, 1.6, 1.25, 0.1
TOLERANCE = 1e-4  # of the largest element: the same sums, in float32, through all layers
NEW_TOKENS = 16
# The options that each uses, besides those of the model.
OPERATIONS = {
    "training": ("tokens", "micro_batches"),
    "generation": ("requests",),
    "slowed": ("tokens", "micro_batches"),
}


class Pipelines(BenchmarkWorkload):
    """Cases: operation "training", "generation" or "slowed", hidden, layers, vocabulary, and what each needs."""

    blocks = {"calls": 1}

    def __init__(self, world: mlxdist.Group, parameters: dict[str, Any]) -> None:
        super().__init__(world, parameters)
        self.mesh = mlxdist.mesh(pp=world.size())

    def __call__(self, case: dict[str, Any]) -> list[dict[str, Any]]:
        return getattr(self, f"_{case['operation']}")(case)

    def _training(self, case: dict[str, Any]) -> list[dict[str, Any]]:
        tokens, expected = self._expected(case)
        full = _model(case)
        this_rank, count = self.mesh["dp"], case["micro_batches"]
        alone = mlxdist.train.value_and_grad(full, _loss, group=this_rank, micro_batches=count)
        works: dict[str, Work] = {}
        bubbles: dict[str, list[list[float]]] = {}
        for name in sorted(SCHEDULES):  # 1f1b is what the others are compared with
            model = mlxdist.nn.pipeline_parallel(_model(case), group=self.mesh["pp"])
            measured = bubbles[name] = list[list[float]]()
            works[name] = self._step(model, name, tokens, expected, partial(self._note_bubble, measured))
        works[ALONE] = Work(evaluated(lambda: alone(full, tokens)) if self.world.rank() == 0 else lambda: None)
        results = self.time(case, works)
        # Of all schedules the last has I and W apart.
        names = ("forward", "input_gradient", "weight_gradient")
        costs = dict(zip(names, np.median(bubbles["zero_bubble"][2:], axis=0)[1:].tolist()))
        for result in results:
            if (name := result["variant"]) in bubbles:
                schedule = mlxdist.nn.pipeline_schedule(name, self.world.size(), count)
                formula = schedule.simulate(**costs).bubble
                result |= {"bubble": float(np.median([row[0] for row in bubbles[name][2:]])), "formula": formula}
        return results

    def _slowed(self, case: dict[str, Any]) -> list[dict[str, Any]]:
        tokens, expected = self._expected(case)
        works = {}
        for name, fast in ((BY_SPEED, 2.0), (EQUAL, 1.0)):
            model = _model(case)
            rank_shares = [fast, *[1.0] * (self.world.size() - 1)]
            if self.world.rank() > 0:
                for layer in model.layers:
                    _slow_down(layer)
            stage_plan = mlxdist.nn.plan_stages(model, self.world.size(), rank_shares=rank_shares)
            staged = mlxdist.nn.pipeline_parallel(model, group=self.mesh["pp"], stage_plan=stage_plan)
            works[name] = self._step(staged, "1f1b", tokens, expected)
        return self.time(case, works)

    def _step(
        self,
        model: nn.Module,
        schedule: str,
        tokens: mx.array,
        expected: dict[str, mx.array],
        after: Callable[[nn.Module], None] = lambda model: None,
    ) -> Work:
        step = mlxdist.train.value_and_grad(model, _loss, mesh=self.mesh, micro_batches=len(tokens), schedule=schedule)
        found: Any = tree_flatten(step(model, tokens)[1])
        wrong = sum(count_off(expected[path], TOLERANCE, array) for path, array in found)
        return Work(evaluated(lambda: step(model, tokens)), after=lambda: after(model), wrong=wrong)

    def _expected(self, case: dict[str, Any]) -> tuple[mx.array, dict[str, mx.array]]:
        """The batch, a micro-batch in each row, and the gradients of one process."""
        shape = case["micro_batches"], case["tokens"] + 1
        tokens = mx.random.randint(0, case["vocabulary"], shape, key=mx.random.key(0))
        model = _model(case)
        found: Any = tree_flatten(nn.value_and_grad(model, _loss)(model, tokens)[1])
        return tokens, dict(found)

    def _note_bubble(self, measured: list[list[float]], model: Any) -> None:
        """Records all ranks' bubble in the step that has ended, by this host's clock, and how long F, I and W took.

        These times are the last stage's: the first sends no gradient, so its I is empty, and its W is both.
        """
        timeline = model.stage.timeline
        took = {kind: [one.end - one.start for one in timeline.spans[0] if one.action.kind == kind] for kind in "FIW"}
        costs = [float(np.median(took[kind])) if took[kind] else 0.0 for kind in "FIW"]
        own = [timeline.start, timeline.start + timeline.seconds, timeline.busy(0), *costs]
        rows = np.asarray(mlxdist.all_gather(np.array([own]), group=self.world))
        measured.append([float(1 - rows[:, 2].mean() / (rows[:, 1].max() - rows[:, 0].min())), *rows[-1, 3:]])

    def _generation(self, case: dict[str, Any]) -> list[dict[str, Any]]:
        from mlx_lm.generate import BatchGenerator

        prompts = [list(range(1 + row, 9 + row)) for row in range(case["requests"])]
        options = {"max_tokens": NEW_TOKENS, "completion_batch_size": case["requests"]}
        stream = mx.default_stream(mx.default_device())
        ours, theirs = mlxdist.nn.pipeline_parallel(_model(case), group=self.mesh["pp"]), _model(case)
        theirs.model.pipeline(self.world.mlx)
        mx.eval(theirs.parameters())
        makers: dict[str, Callable[[], Any]] = {
            IN_FLIGHT: lambda: mlxdist.nn.PipelineBatchGenerator(ours, **options),
            BATCH: lambda: BatchGenerator(ours, stream=stream, **options),
            MLX_LM: lambda: BatchGenerator(theirs, stream=stream, **options),
        }
        full = _model(case)
        expected = _generate(BatchGenerator(full, stream=stream, **options), prompts)
        works = {}
        for name, make in makers.items():
            wrong = sum(a != b for a, b in zip(_generate(make(), prompts), expected, strict=True))
            call = partial(lambda make: _generate(make(), prompts), make)
            works[name] = Work(call, operations=NEW_TOKENS * len(prompts), wrong=wrong)
        return self.time(case, works)


def _slow_down(layer: nn.Module) -> None:
    """Makes a layer half as fast, as on a slower rank: it computes everything twice."""
    from mlxdist.nn.interception import become

    kind: Any = type(layer)

    class Twice(kind):
        def __call__(self, x: mx.array, *args: Any, **keywords: Any) -> mx.array:
            first = super().__call__(x, *args, **keywords)
            (again,) = mx.depends([x], [first])
            return (first + super().__call__(again, *args, **keywords)) / 2

    become(layer, Twice)


def _model(case: dict[str, Any]) -> Any:
    from .models import make_qwen2

    return make_qwen2(case["hidden"], case["layers"], case["vocabulary"])


def _loss(model: nn.Module, tokens: mx.array) -> mx.array:
    return nn.losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:], reduction="mean")


def _generate(generator: Any, prompts: list[list[int]]) -> list[int]:
    """The tokens of each request, one after the other."""
    tokens: dict[int, list[int]] = {number: [] for number in generator.insert(prompts)}
    left = set(tokens)
    while left:
        for response in generator.next()[1]:
            tokens[response.uid].append(response.token)
            left -= {response.uid} if response.finish_reason else set()
    mx.synchronize()
    generator.close()
    return [token for _, row in sorted(tokens.items()) for token in row]


def targets(results: Results) -> list[Target]:
    found = []
    for row in by_case(results):
        name = case_name(next(iter(row.values()))["case"])
        if ALONE in row:
            found.append(Target.slower(name, row, "1f1b", [ALONE], SPEEDUP))
            for schedule in SCHEDULES:
                wanted = f"{schedule}: bubble off by {BUBBLE:.0%} of its formula at most"
                off = abs(row[schedule]["bubble"] / row[schedule]["formula"] - 1)
                found.append(Target(name, wanted, off, BUBBLE))
        elif IN_FLIGHT in row:
            found.append(Target.slower(name, row, IN_FLIGHT, [MLX_LM], MORE_TOKENS))
        else:
            found.append(Target.slower(name, row, BY_SPEED, [EQUAL], FASTER_CUT))
    return found


def _title(results: Results) -> str:
    return f"{results['cases'][0]['case']['operation']} on {results['setup']['ranks']} stages"


def _bubble(schedule: str, row: Row) -> str | None:
    return f"{row[schedule]['bubble']:.1%} ({row[schedule]['formula']:.1%})" if schedule in row else None


@Benchmark(
    Pipelines,
    show=Comparison(
        _title, columns={f"{name}: bubble (formula)": partial(_bubble, name) for name in SCHEDULES}, apart=True
    ),
    targets=targets,
    repeats=9,
)
@click.option(
    "--operation", "operations", type=names_of(tuple(OPERATIONS)), default="all", help=f"{', '.join(OPERATIONS)}."
)
@click.option("--hidden", type=multiples_of(128), default="256", show_default=True, help="Sizes of the layers.")
@click.option("--layers", type=click.IntRange(2, 256), default=8, show_default=True, help="Of Qwen2.")
@click.option("--vocabulary", type=multiples_of(64), default="64", show_default=True, help="Tokens that there are.")
@click.option("--tokens", type=click.IntRange(1, 65536), default=64, show_default=True, help="Of a micro-batch.")
@click.option("--micro-batches", type=click.IntRange(1, 1024), default=8, show_default=True, help="Of a step.")
@click.option("--requests", type=click.IntRange(1, 256), default=4, show_default=True, help="At a time.")
def pp(runner: Runner, operations: list[str], hidden: list[int], vocabulary: list[int], **numbers: int) -> Results:
    """Time a model whose layers are spread over ranks, in float32 on the CPU, with one core for each stage.

    "training" is the gradients of a step by each schedule, and by one process ("alone"); the bubble is the share of
    the ranks' time in which they do not compute, and its formula that of equal stages whose F, I and W take as long.
    "generation": requests in as many batches as there are stages ("in flight"), in one batch, and in one batch by
    mlx-lm's own pipeline on the same group ("mlx-lm"). "slowed": a step where every rank but the first computes each
    layer twice, with a plan by speed and with equal stages. Gradients and tokens are compared with those of one
    process.

    The exit status is 1 if a result was wrong, a time is shorter than the memory allows, or a file is not written.
    """
    if runner.ranks > numbers["layers"]:
        raise click.UsageError(f"--layers {numbers['layers']} are too few for {runner.ranks} stages")
    cases = [
        {"operation": name, "hidden": size, "layers": numbers["layers"], "vocabulary": words}
        | {option: numbers[option] for option in OPERATIONS[name]}
        for name, size, words in product(operations, hidden, vocabulary)
    ]
    return runner.run(cases)
