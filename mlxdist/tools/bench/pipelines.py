"""What the ranks of `mlxdist bench pp` measure: training and generation in stages, in the same processes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.generate import BatchGenerator
from mlx_lm.models import qwen2

import mlxdist
from mlxdist.nn import PipelineBatchGenerator, pipeline_parallel, pipeline_schedule, plan_stages
from mlxdist.nn.interception import become
from mlxdist.train import value_and_grad

from .operations import count_off
from .rank import time_case
from .timing import Work, interleave

__all__ = ["Pipelines", "make_qwen2"]

SCHEDULES = ("1f1b", "gpipe", "zero_bubble")
TOLERANCE = 1e-4  # of the largest element: the same sums, in float32, through all layers
NEW_TOKENS = 16
Gradients = Callable[[nn.Module, mx.array], tuple[Any, Any]]


class Pipelines:
    """Cases: operation "training", "generation" or "slowed", hidden, layers, vocabulary, and what each needs."""

    def __init__(self, world: mlxdist.Group, parameters: dict[str, Any]) -> None:
        self.world, self.mesh = world, mlxdist.mesh(pp=world.size())
        self.alone = self.mesh["dp"]  # this rank
        self.take = partial(interleave, repeats=parameters["repeats"], warm_up=2, calls=1)

    def __call__(self, case: dict[str, Any]) -> list[dict[str, Any]]:
        return getattr(self, f"_{case['operation']}")(case)

    def _training(self, case: dict[str, Any]) -> list[dict[str, Any]]:
        tokens, expected = self._expected(case)
        full = _model(case)
        alone = value_and_grad(full, _loss, group=self.alone, micro_batches=case["micro_batches"])
        works: dict[str, Work] = {}
        bubbles: dict[str, list[list[float]]] = {}
        for name in SCHEDULES:
            model = pipeline_parallel(_model(case), group=self.mesh["pp"])
            measured = bubbles[name] = list[list[float]]()
            works[name] = self._step(model, name, tokens, expected, partial(self._note_bubble, measured))
        works["alone"] = Work(lambda: _evaluate(alone, full, tokens)) if self.world.rank() == 0 else Work(lambda: None)
        results = time_case(self.world, case, works, self.take)
        # Of all schedules the last has I and W apart.
        names = ("forward", "input_gradient", "weight_gradient")
        costs = dict(zip(names, np.median(bubbles["zero_bubble"][2:], axis=0)[1:].tolist()))
        for result in results:
            if (name := result["variant"]) in bubbles:
                schedule = pipeline_schedule(name, self.world.size(), case["micro_batches"])
                formula = schedule.simulate(**costs).bubble
                result |= {"bubble": float(np.median([row[0] for row in bubbles[name][2:]])), "formula": formula}
        return results

    def _slowed(self, case: dict[str, Any]) -> list[dict[str, Any]]:
        tokens, expected = self._expected(case)
        works = {}
        for name, slow in (("by speed", 2.0), ("equal", 1.0)):
            model = _model(case)
            rank_shares = [slow, *[1.0] * (self.world.size() - 1)]
            if self.world.rank() > 0:
                for layer in model.layers:
                    become(layer, _Twice)
            stage_plan = plan_stages(model, self.world.size(), rank_shares=rank_shares)
            works[name] = self._step(
                pipeline_parallel(model, group=self.mesh["pp"], stage_plan=stage_plan), "1f1b", tokens, expected
            )
        return time_case(self.world, case, works, self.take)

    def _step(
        self,
        model: nn.Module,
        schedule: str,
        tokens: mx.array,
        expected: dict[str, mx.array],
        after: Callable[[nn.Module], None] = lambda model: None,
    ) -> Work:
        count = len(tokens)
        step = value_and_grad(model, _loss, mesh=self.mesh, micro_batches=count, schedule=schedule)
        found: Any = tree_flatten(step(model, tokens)[1])
        wrong = sum(count_off(expected[path], TOLERANCE, array) for path, array in found)
        return Work(lambda: _evaluate(step, model, tokens), after=lambda: after(model), wrong=lambda: wrong)

    def _expected(self, case: dict[str, Any]) -> tuple[mx.array, dict[str, mx.array]]:
        """The batch, a micro-batch in each row, and the gradients of one process."""
        shape = case["micro_batches"], case["tokens"] + 1
        tokens = mx.random.randint(0, case["vocabulary"], shape, key=mx.random.key(0))
        model = _model(case)
        found: Any = tree_flatten(nn.value_and_grad(model, _loss)(model, tokens)[1])
        return tokens, dict(found)

    def _note_bubble(self, measured: list[list[float]], model: Any) -> None:
        """That of the step that has ended, of all ranks, by the clock of this host; and how long F, I and W took.

        The last stage says that: the first sends no gradient, so its I is nothing and its W is both.
        """
        timeline = model.stage.timeline
        took = {kind: [one.end - one.start for one in timeline.spans[0] if one.action.kind == kind] for kind in "FIW"}
        costs = [float(np.median(took[kind])) if took[kind] else 0.0 for kind in "FIW"]
        own = [timeline.start, timeline.start + timeline.seconds, timeline.busy(0), *costs]
        rows = np.asarray(mlxdist.all_gather(np.array([own]), group=self.world))
        measured.append([float(1 - rows[:, 2].mean() / (rows[:, 1].max() - rows[:, 0].min())), *rows[-1, 3:]])

    def _generation(self, case: dict[str, Any]) -> list[dict[str, Any]]:
        prompts = [list(range(1 + row, 9 + row)) for row in range(case["requests"])]
        options = {"max_tokens": NEW_TOKENS, "completion_batch_size": case["requests"]}
        stream = mx.default_stream(mx.default_device())
        ours, theirs = pipeline_parallel(_model(case), group=self.mesh["pp"]), _model(case)
        theirs.model.pipeline(self.world.mlx)
        mx.eval(theirs.parameters())
        makers: dict[str, Callable[[], Any]] = {
            "in flight": lambda: PipelineBatchGenerator(ours, **options),
            "one batch": lambda: BatchGenerator(ours, stream=stream, **options),
            "mlx-lm": lambda: BatchGenerator(theirs, stream=stream, **options),
        }
        full = _model(case)
        expected = _generate(BatchGenerator(full, stream=stream, **options), prompts)
        works = {}
        for name, make in makers.items():
            wrong = sum(a != b for a, b in zip(_generate(make(), prompts), expected, strict=True))
            call = partial(lambda make: _generate(make(), prompts), make)
            works[name] = Work(call, operations=NEW_TOKENS * len(prompts), wrong=partial(int, wrong))
        return time_case(self.world, case, works, self.take)


class _Twice(qwen2.TransformerBlock):
    """A layer of a rank that is half as fast: it computes everything twice."""

    def __call__(self, x: mx.array, *args: Any, **keywords: Any) -> mx.array:
        first = super().__call__(x, *args, **keywords)
        (again,) = mx.depends([x], [first])
        return (first + super().__call__(again, *args, **keywords)) / 2


def make_qwen2(hidden: int, layers: int, vocabulary: int) -> qwen2.Model:
    """Random weights, the same on every rank; a model that mlx-lm itself can have in stages."""
    arguments = qwen2.ModelArgs(
        model_type="qwen2", hidden_size=hidden, num_hidden_layers=layers, intermediate_size=hidden * 3,
        num_attention_heads=hidden // 64, num_key_value_heads=max(1, hidden // 128), rms_norm_eps=1e-6,
        vocab_size=vocabulary, tie_word_embeddings=False,
    )  # fmt: skip
    mx.random.seed(0)
    model = qwen2.Model(arguments)
    mx.eval(model.parameters())
    return model


def _model(case: dict[str, Any]) -> qwen2.Model:
    return make_qwen2(case["hidden"], case["layers"], case["vocabulary"])


def _loss(model: nn.Module, tokens: mx.array) -> mx.array:
    return nn.losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:], reduction="mean")


def _evaluate(step: Gradients, model: nn.Module, tokens: mx.array) -> None:
    mx.eval(step(model, tokens))


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
