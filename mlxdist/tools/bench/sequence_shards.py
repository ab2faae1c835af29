"""What the ranks of `mlxdist bench cp` measure: attention over a sharded sequence, in the same processes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx

import mlxdist
from mlxdist.nn import gather_sequence, ring_attention, shard_sequence, ulysses_attention
from mlxdist.nn.context_parallel.sequence import chunk_starts

from .operations import count_off
from .rank import peak_memory, time_case
from .timing import Work, interleave

TOLERANCE = 1e-4  # of the largest element: float32, sums of thousands of terms in another order


class SequenceShards:
    """Cases: operation "forward" or "training", tokens, heads, kv_heads, dims. Parameters: repeats."""

    def __init__(self, world: mlxdist.Group, parameters: dict[str, Any]) -> None:
        self.world = world
        self.take = partial(interleave, repeats=parameters["repeats"], warm_up=1, calls=1)

    def __call__(self, case: dict[str, Any]) -> list[dict[str, Any]]:
        ways: dict[str, Callable[..., mx.array]] = {
            "ring": partial(ring_attention, mask="causal", group=self.world),
            "gathered": partial(_gathered_attention, group=self.world),
        }
        if case["kv_heads"] % self.world.size() == 0:
            ways["ulysses"] = partial(ulysses_attention, mask="causal", group=self.world)
        full = _arrays(case)
        own = [mx.contiguous(shard_sequence(x, 2, group=self.world)) for x in full]
        whole = partial(mx.fast.scaled_dot_product_attention, mask="causal")
        expected = [mx.contiguous(shard_sequence(x, 2, group=self.world)) for x in _call(whole, case, full)()]
        mx.eval(own, expected)
        del full
        works, peaks = {}, {}
        for name, attention in ways.items():
            call = _call(attention, case, own)
            wrong = sum(count_off(one, TOLERANCE, found) for one, found in zip(expected, call()))
            works[name] = Work(partial(_evaluate, call), wrong=partial(int, wrong), copies=1)
            peaks[name] = {"peak": peak_memory(self.world, call)}
        copied = sum(x.nbytes for x in own)
        results = time_case(self.world, case, works, self.take, copied=copied)
        return [result | peaks[result["variant"]] for result in results]


def _call(attention: Callable[..., mx.array], case: dict[str, Any], arrays: list[mx.array]) -> Callable[[], Any]:
    """The result; for "training" also the gradients of the result times the last of ``arrays``."""
    *inputs, cotangent = arrays
    attend = partial(attention, scale=case["dims"] ** -0.5)
    if case["operation"] == "forward":
        return lambda: [attend(*inputs)]

    def both() -> list[mx.array]:
        results, gradients = mx.vjp(lambda q, k, v: attend(q, k, v), inputs, [cotangent])
        return [*results, *gradients]

    return both


def _gathered_attention(q: mx.array, k: mx.array, v: mx.array, *, scale: float, group: mlxdist.Group) -> mx.array:
    """One call for each chunk of queries, with the keys up to its end: the last rows of a causal mask."""
    keys, values = gather_sequence(k, 2, group=group), gather_sequence(v, 2, group=group)
    results, chunk = [], q.shape[2] // 2
    for queries, start in zip(mx.split(q, 2, 2), chunk_starts(group.rank(), group.size(), q.shape[2])):
        seen = [x[:, :, : start + chunk] for x in (keys, values)]
        results.append(mx.fast.scaled_dot_product_attention(queries, *seen, scale=scale, mask="causal"))
    return mx.concatenate(results, 2)


def _arrays(case: dict[str, Any]) -> list[mx.array]:
    """q, k, v and a cotangent, of the full sequence, the same on all ranks."""
    heads = [case["heads"], case["kv_heads"], case["kv_heads"], case["heads"]]
    keys = [mx.random.key(number) for number in range(len(heads))]
    return [mx.random.normal((1, n, case["tokens"], case["dims"]), key=key) for n, key in zip(heads, keys)]


def _evaluate(call: Callable[[], list[mx.array]]) -> None:
    mx.eval(call())
