"""`mlxdist bench kv`: prompt caches from one rank to another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import click
import mlx.core as mx
import mlx.nn as nn

import mlxdist

from .benchmark import Benchmark
from .operations import count_off
from .results import Comparison, Results, Target, by_case, case_name
from .runner import Runner
from .sizes import multiples_of, names_of
from .timing import Work
from .workload import BenchmarkWorkload

__all__ = ["PromptCaches", "kv", "targets"]

OPERATIONS = ("transfer", "first token")
KV, MESSAGES = "kv", "messages"
SPLIT, ALONE = "split", "alone"
SPEED, LATER = 0.9, 1.05
TOLERANCE = 1e-5  # of the largest element
_VOCABULARY = 64


class PromptCaches(BenchmarkWorkload):
    """Cases: operation "transfer" or "first token", hidden, layers, tokens."""

    blocks = {"calls": 1}

    def __call__(self, case: dict[str, Any]) -> list[dict[str, Any]]:
        from .models import make_qwen2

        model = make_qwen2(case["hidden"], case["layers"], _VOCABULARY)
        prompt = mx.random.randint(0, _VOCABULARY, (1, case["tokens"]), key=mx.random.key(0))
        measure = self._transfer if case["operation"] == "transfer" else self._first_token
        return measure(case, model, prompt)

    def _transfer(self, case: dict[str, Any], model: nn.Module, prompt: mx.array) -> list[dict[str, Any]]:
        from mlxdist import kv

        cache = _computed(model, prompt)
        expected = _arrays(cache)
        mx.eval(expected)
        is_sender = self.world.rank() == 0

        def by_kv() -> list[mx.array]:
            if is_sender:
                kv.send(cache, 1, model=model)
                return []
            return _arrays(kv.recv(0, model=model))

        def by_messages() -> list[mx.array]:
            if is_sender:
                arrays: Any = [mlxdist.send(x, 1) for x in map(mx.contiguous, expected)]
            else:
                arrays = [mlxdist.recv(x.shape, x.dtype, 0) for x in expected]
            for x in arrays:
                mx.async_eval(x)  # one by one, in the same order on both
            mx.eval(arrays)
            return [] if is_sender else arrays

        works = {KV: _work(by_kv, expected), MESSAGES: _work(by_messages, expected)}
        return self.time(case, works, moved=sum(x.nbytes for x in expected))

    def _first_token(self, case: dict[str, Any], model: nn.Module, prompt: mx.array) -> list[dict[str, Any]]:
        from mlxdist import kv

        is_sender = self.world.rank() == 0
        start, last = prompt[:, :-1], prompt[:, -1:]

        def split() -> list[mx.array]:
            if is_sender:
                kv.send(_computed(model, start), 1, model=model)
                return []
            return [_evaluated(model(last, cache=kv.recv(0, model=model)))]

        def alone() -> list[mx.array]:
            if not is_sender:
                return []
            cache = _computed(model, start)
            mx.eval(_arrays(cache))
            return [_evaluated(model(last, cache=cache))]

        expected = [_evaluated(model(last, cache=_computed(model, start)))]
        return self.time(case, {SPLIT: _work(split, expected), ALONE: _work(alone, expected)})


def _work(call: Callable[[], list[mx.array]], expected: Sequence[mx.array]) -> Work:
    """``call`` returns arrays on one of the ranks, which are compared."""
    return Work(call, wrong=sum(count_off(a, TOLERANCE, b) for a, b in zip(expected, call())))


def _computed(model: nn.Module, tokens: mx.array) -> list[Any]:
    """The cache of a prompt, lazy."""
    from mlx_lm.models.cache import make_prompt_cache

    cache = make_prompt_cache(model)
    model(tokens, cache=cache)
    return cache


def _arrays(cache: list[Any]) -> list[mx.array]:
    """The tokens' keys and values, without the room that a cache has for more."""
    return [x[..., : layer.offset, :] for layer in cache for x in (layer.keys, layer.values)]


def _evaluated(x: mx.array) -> mx.array:
    mx.eval(x)
    return x


def targets(results: Results) -> list[Target]:
    found = []
    for row in by_case(results):
        name = case_name(next(iter(row.values()))["case"])
        if KV in row:
            found.append(Target.slower(name, row, KV, [MESSAGES], SPEED))
        else:
            alone = row[ALONE]["microseconds"]
            wanted = f"{SPLIT} takes {LATER:g}x of {ALONE} at most"
            found.append(Target.of(name, wanted, row[SPLIT]["microseconds"], alone and alone["median"], LATER))
    return found


@Benchmark(
    PromptCaches,
    show=Comparison(lambda results: f"{results['cases'][0]['case']['operation']} on 2 ranks", apart=True),
    targets=targets,
    repeats=9,
)
@click.option("--operation", "operations", type=names_of(OPERATIONS), default="all", help=f"{', '.join(OPERATIONS)}.")
@click.option("--hidden", type=multiples_of(128), default="512", show_default=True, help="Sizes of the layers.")
@click.option("--layers", type=click.IntRange(1, 256), default=8, show_default=True, help="Of Qwen2.")
@click.option("--tokens", type=multiples_of(1), default="512", show_default=True, help="Of the prompt.")
def kv(runner: Runner, operations: list[str], hidden: list[int], layers: int, tokens: list[int]) -> Results:
    """Time prompt caches that go from rank 0 to rank 1, in float32 on the CPU.

    "transfer": a cache that is computed, by kv.send and kv.recv ("kv"), and as many bytes by send and recv
    ("messages"). "first token": rank 0 computes a prompt and rank 1 the token after it ("split"), and one process both
    ("alone"). Caches and tokens are compared with those of one process.

    The exit status is 1 if a result was wrong, a time is shorter than the memory allows, or a file is not written.
    """
    if runner.ranks != 2:
        raise click.UsageError(f"a cache goes from one rank to another: -n 2, not {runner.ranks}")
    cases = [
        {"operation": name, "hidden": size, "layers": layers, "tokens": count}
        for name, size, count in product(operations, hidden, tokens)
    ]
    return runner.run(cases)
