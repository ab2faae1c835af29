"""`mlxdist bench cp`: attention over a sequence sharded among the ranks, by each method that mlxdist has."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import click
import mlx.core as mx

import mlxdist

from .benchmark import Benchmark
from .operations import count_off
from .results import Comparison, Results, Target, by_case, case_name, peak_columns
from .runner import Runner
from .sizes import multiples_of, names_of
from .timing import Work
from .workload import BenchmarkWorkload, evaluated, peak_memory

__all__ = ["SequenceShards", "cp", "targets"]

RING, ULYSSES, GATHERED = "ring", "ulysses", "gathered"
PASSES = ("forward", "training")
NOT_SLOWER, HALF = 1.0, 0.5
TOLERANCE = 1e-4  # of the largest element: float32, sums of thousands of terms in another order


class SequenceShards(BenchmarkWorkload):
    """Cases: operation "forward" or "training", tokens, heads, kv_heads, dims."""

    blocks = {"warm_up": 1, "calls": 1}

    def __call__(self, case: dict[str, Any]) -> list[dict[str, Any]]:
        ways: dict[str, Callable[..., mx.array]] = {
            RING: partial(mlxdist.nn.ring_attention, mask="causal", group=self.world),
            GATHERED: partial(_gathered_attention, group=self.world),
        }
        if case["kv_heads"] % self.world.size() == 0:
            ways[ULYSSES] = partial(mlxdist.nn.ulysses_attention, mask="causal", group=self.world)
        full = _arrays(case)
        own = self._shards(full)
        whole = partial(mx.fast.scaled_dot_product_attention, mask="causal")
        expected = self._shards(_call(whole, case, full)())
        mx.eval(own, expected)
        del full
        works, peaks = {}, {}
        for name, attention in ways.items():
            call = _call(attention, case, own)
            wrong = sum(count_off(one, TOLERANCE, found) for one, found in zip(expected, call()))
            works[name] = Work(evaluated(call), wrong=wrong, copies=1)
            peaks[name] = {"peak": peak_memory(self.world, call)}
        return self.time(case, works, copied=sum(x.nbytes for x in own), more=peaks)

    def _shards(self, arrays: list[mx.array]) -> list[mx.array]:
        return [mx.contiguous(mlxdist.nn.shard_sequence(x, 2, group=self.world)) for x in arrays]


def _call(attention: Callable[..., mx.array], case: dict[str, Any], arrays: list[mx.array]) -> Callable[[], Any]:
    """A function that returns the result; for "training" also the gradients, with the last array as cotangent."""
    *inputs, cotangent = arrays
    attend = partial(attention, scale=case["dims"] ** -0.5)
    if case["operation"] == "forward":
        return lambda: [attend(*inputs)]

    def both() -> list[mx.array]:
        results, gradients = mx.vjp(lambda q, k, v: attend(q, k, v), inputs, [cotangent])
        return [*results, *gradients]

    return both


def _gathered_attention(q: mx.array, k: mx.array, v: mx.array, *, scale: float, group: mlxdist.Group) -> mx.array:
    """Calls attention once per chunk of queries, with the keys up to the chunk's end: a causal mask's last rows."""
    from mlxdist.nn.context_parallel.sequence import chunk_starts

    keys, values = (mlxdist.nn.gather_sequence(x, 2, group=group) for x in (k, v))
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


def targets(results: Results) -> list[Target]:
    found = []
    for row in by_case(results):
        where = case_name(row[RING]["case"])
        found.append(Target.slower(where, row, RING, [GATHERED], NOT_SLOWER))
        share = row[RING]["peak"] / row[GATHERED]["peak"]
        found.append(Target(f"{where}: peak of memory", f"{HALF:g}x {GATHERED} or less", share, HALF))
    return found


@Benchmark(
    SequenceShards,
    show=Comparison(
        lambda results: f"causal attention over a sequence on {results['setup']['ranks']} ranks",
        RING,
        (ULYSSES, GATHERED),
        peak_columns((RING, ULYSSES, GATHERED)),
    ),
    targets=targets,
    repeats=5,
)
@click.option("--tokens", type=multiples_of(2), default="8192", show_default=True, help="Of the full sequence.")
@click.option("--heads", type=click.IntRange(1, 256), default=4, show_default=True, help="Of queries.")
@click.option("--kv-heads", type=click.IntRange(1, 256), default=2, show_default=True, help="Of keys and values.")
@click.option("--dims", type=click.IntRange(1, 512), default=64, show_default=True, help="Of a head.")
@click.option("--pass", "passes", type=names_of(PASSES), default="all", help="forward or training [default: all].")
def cp(runner: Runner, tokens: list[int], heads: int, kv_heads: int, dims: int, passes: list[str]) -> Results:
    """Time causal attention over a sharded sequence, in float32 on the CPU, and count its memory.

    ring_attention and ulysses_attention; and MLX's attention of this rank's queries to the keys and values of all
    ranks, gathered ("gathered"), with one call for each of the two chunks, which leaves out what causality hides.
    "training" is forward and backward. Each result is compared with that of one process. The peak of memory is what a
    call needs beyond its arguments.

    The exit status is 1 if a result was wrong, a time is shorter than the memory allows, or a file is not written.
    """
    if heads % kv_heads:
        raise click.UsageError(f"--heads {heads} is not a multiple of --kv-heads {kv_heads}")
    for count in tokens:
        if count % (2 * runner.ranks):
            raise click.UsageError(
                f"--tokens {count} is not a multiple of {2 * runner.ranks}, two chunks for each rank"
            )
    cases = [
        {"operation": name, "tokens": count, "heads": heads, "kv_heads": kv_heads, "dims": dims}
        for count, name in product(tokens, passes)
    ]
    return runner.run(cases)
