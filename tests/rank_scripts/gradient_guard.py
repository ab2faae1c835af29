"""One rank of test_gradient_guard.py. Argument: the scenario."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten
from scenarios import group, rank, run_scenario, size

import mlxdist
from mlxdist.nn import ColumnParallelLinear
from mlxdist.train import GradientGuard, average_gradients, clip_grad_norm, fully_shard

last = size - 1
NAN, INF = float("nan"), float("inf")


def tree(**layers: mx.array) -> dict[str, Any]:
    """What trees of gradients have, and what is no gradient."""
    return {
        "layers": [
            {"weight": mx.ones((3, 5)), "bias": mx.zeros((0,))},
            {"weight": mx.ones((7,), mx.bfloat16)} | layers,
        ],
        "scalar": mx.array(0.5),
        "frozen": mx.arange(3),
    }


def sent() -> int:
    return group.stats()["payload_bytes_sent"]


def finite() -> None:
    """The largest numbers of each dtype are finite; a sum of them is not. It costs 8 bytes to each other rank."""
    guard = GradientGuard()
    largest = [mx.full((4,), 65504.0, mx.float16), mx.full((4,), 3.38e38, mx.bfloat16), mx.full((4,), -3.4e38)]
    complex_ones = mx.array(np.full(3, 3e38 + 3e38j, np.complex64))
    for gradients in (tree(), {}, {"a": mx.arange(2)}, largest, complex_ones, mx.zeros((0,))):
        before = sent()
        assert guard.check(gradients) and guard.report == ""
        assert sent() - before == 8 * (size - 1)
    assert guard.skipped == 0


def named() -> None:
    """The first rank and its first parameter, with every dtype and kind."""
    guard = GradientGuard(max_skips=None)
    dtypes = (mx.float16, mx.bfloat16, mx.float32)
    cases = [(mx.array([1, value, 2, value], dtype), value) for dtype in dtypes for value in (NAN, INF, -INF)]
    cases += [
        (mx.array(np.array([1, 0, complex(0, value), complex(value, 1)], np.complex64)), value) for value in (NAN, INF)
    ]
    for number, (bad, value) in enumerate(cases, 1):
        gradients = tree(extra=bad if rank >= min(1, last) else mx.zeros_like(bad))
        assert not guard.check(gradients) and guard.skipped == number
        dtype, kind = str(bad.dtype).removeprefix("mlx.core."), "NaN" if np.isnan(value) else "infinite"
        others = f" (and on {size - 2} more ranks)" if size > 2 else ""
        first = f"'layers.1.extra' {dtype} [4] has 2 {kind} of 4 elements"
        expected = f"1 gradients of rank {min(1, last)}{others}, the first: {first}"
        assert guard.report == expected, guard.report
    bad = mx.array([NAN, INF, 1])
    assert not guard.check([bad, {"b": bad}, bad, bad] if rank == last else {"other": mx.ones(2)})
    assert guard.report.startswith(
        f"4 gradients of rank {last}, the first: '0' float32 [3] has 1 NaN and 1 infinite of 3"
    )
    assert "; '1.b' float32" in guard.report and "'3'" not in guard.report


def in_a_row() -> None:
    guard = GradientGuard(max_skips=2)
    bad = {"w": mx.array([NAN if rank == 0 else 1.0])}
    for _ in range(3):
        assert guard.check({"w": mx.ones(3)})
        assert not guard.check(bad) and not guard.check(bad)
    try:
        guard.check(bad)
    except mlxdist.NonFinite as error:
        assert "not finite in 3 steps in a row: 1 gradients of rank 0, the first: 'w'" in str(error), error
        assert isinstance(error, FloatingPointError)
    else:
        raise AssertionError("no error")
    assert guard.skipped == 6


def stop() -> None:
    guard = GradientGuard(action="stop")
    assert guard.check({"w": mx.ones(1)})
    try:
        guard.check({"w": mx.full((2, 2), INF if rank == last else 0.0)})
    except mlxdist.NonFinite as error:
        text = f"gradients are not finite: 1 gradients of rank {last}, the first: 'w' float32 [2, 2] has 4 infinite"
        assert text in str(error), error
    else:
        raise AssertionError("no error")
    assert mlxdist.all_sum(np.ones(1, np.float32)) == size  # the group goes on


def norm() -> None:
    """A finite one is the result: nothing is read and nothing sent."""
    guard = GradientGuard()
    before = sent()
    for value in (mx.array(1.5), 0.0, np.float32(3e38)):
        assert guard.check(None, norm=value)
    assert sent() == before
    assert not guard.check({"w": mx.array([NAN if rank == last else 1.0])}, norm=mx.array(NAN))
    assert f"of rank {last}, the first: 'w'" in guard.report
    assert not guard.check({"w": mx.full((2,), 3e38)}, norm=mx.array(INF))
    assert guard.report == "their norm is inf, though each of them is finite"


def loss() -> None:
    """After averaging all ranks have NaN; the loss shows where it began."""
    guard = GradientGuard()
    gradients = average_gradients({"w": mx.array([NAN if rank == last else 1.0])})
    assert not guard.check(gradients, loss=mx.array(INF if rank == last else 1.0))
    others = f" (and on {last} more ranks)" if last else ""
    assert guard.report.startswith(f"the loss of rank {last} is not finite, 1 gradients of rank 0{others}"), (
        guard.report
    )
    assert not guard.check({"w": mx.ones(2)}, loss=NAN if rank == 0 else 1.0)
    assert guard.report == "the loss of rank 0 is not finite"


def training() -> None:
    """A batch of one rank has a NaN: the run without that step has the same weights, bit for bit."""

    def train(steps: list[int], poisoned: int) -> list[tuple[str, mx.array]]:
        mx.random.seed(0)
        model, optimizer, guard = nn.Linear(4, 3), optim.AdamW(1e-2), GradientGuard()
        step = nn.value_and_grad(model, lambda model, x: model(x).square().mean())
        for number in steps:
            x = mx.random.normal((2, 4), key=mx.random.key(100 * number + rank))
            x = mx.where(number == poisoned and rank == last, NAN, x)
            value, gradients = step(model, x)
            gradients = average_gradients(gradients)
            if guard.check(gradients, loss=value):
                optimizer.update(model, gradients)
                mx.eval(model.parameters(), optimizer.state)
        assert guard.skipped == (poisoned in steps)
        return tree_flatten(model.parameters())

    with_nan = train([0, 1, 2, 3], poisoned=2)
    without = train([0, 1, 3], poisoned=-1)
    assert all(mx.array_equal(a, b) and mx.all(mx.isfinite(a)) for (_, a), (_, b) in zip(with_nan, without))


def bad_here(gradients: Any) -> list[str]:
    """The paths of this rank's gradients that are not finite."""
    flat: Any = tree_flatten(gradients)
    return [path for path, leaf in flat if not mx.isfinite(leaf).all().item()]


def skipped_alike(model: nn.Module, gradients: Any, path: str) -> None:
    """One element is infinite, in the shard of one rank; with the norm and without it, all ranks skip the step, and
    their reports name that rank and the parameter, also where clipping makes the rest of the gradients NaN."""
    (bad,) = np.flatnonzero(np.array(mlxdist.all_gather(mx.array([len(bad_here(gradients))]))))
    assert bad_here(gradients) == ([path] if rank == bad else [])
    _, norm = clip_grad_norm(gradients, 1.0, model=model)
    for options in ({}, {"norm": norm}):
        guard = GradientGuard()
        assert not guard.check(gradients, **options) and guard.skipped == 1
        assert guard.report.startswith(f"1 gradients of rank {bad}, the first: '{path}' float32"), guard.report
        assert "has 1 infinite of" in guard.report


def fully_sharded() -> None:
    """The last input of the last rank is infinite: so is the last element of one gradient, in one rank's shard."""
    for stage in (1, 2, 3):
        model = nn.Linear(6, 1)
        fully_shard(model, stage=stage)
        step = nn.value_and_grad(model, lambda model, x: model(x).sum())
        _, gradients = step(model, mx.where(mx.arange(6) == 5, INF if rank == last else 1.0, mx.ones((2, 6))))
        skipped_alike(model, gradients, "weight")


def tensor_parallel() -> None:
    """The gradient of one output is infinite, which one rank has."""
    model = ColumnParallelLinear.from_linear(nn.Linear(1, 2 * size, bias=False))
    weights = mx.where(mx.arange(2) == 1, INF if rank == last else 1.0, mx.ones(2))
    _, gradients = nn.value_and_grad(model, lambda model, x: (model(x) * weights).sum())(model, mx.ones((1, 1)))
    skipped_alike(model, gradients, "weight")


def wrong() -> None:
    def rejected(make: Any, text: str) -> None:
        try:
            make()
        except mlxdist.Mismatch if "disagree" in text else mlxdist.InvalidArgument as error:
            assert text in str(error), error
        else:
            raise AssertionError(f"not rejected: {text}")

    rejected(
        lambda: GradientGuard(action="ignore" if rank == last else "skip"), "action is 'ignore', none of skip, stop"
    )
    rejected(lambda: GradientGuard(max_skips=-1), "max_skips is -1")
    if size > 1:
        rejected(lambda: GradientGuard(max_skips=3 + rank), "disagree")


run_scenario(globals())
