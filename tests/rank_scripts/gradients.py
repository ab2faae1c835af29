"""One rank of test_gradients.py. Argument: the scenario.

Every rank makes the inputs of all ranks, so that it can compute by itself what all of them together compute.
"""

from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from scenarios import group, rank, run_scenario, size

import mlxdist
from mlxdist import nn

after, before = (rank + 1) % size, (rank - 1) % size
COUNTS = [[(2 * i + j) % 4 for j in range(size)] for i in range(size)]  # rows from i to j; some are 0
root = size - 1


class Case(NamedTuple):
    shape: Callable[[int], tuple[int, ...]]  # of a rank's input
    operation: Callable[[mx.array], mx.array]  # on this rank
    dense: Callable[[list[mx.array]], list[mx.array]]  # all ranks' results from all ranks' inputs


def exchanged(xs: list[mx.array]) -> list[mx.array]:
    parts = [mx.split(x, size) for x in xs]
    return [mx.concatenate([parts[i][j] for i in range(size)]) for j in range(size)]


def exchanged_v(xs: list[mx.array]) -> list[mx.array]:
    parts = [mx.split(x, np.cumsum(COUNTS[i])[:-1].tolist()) for i, x in enumerate(xs)]
    return [mx.concatenate([parts[i][j] for i in range(size)]) for j in range(size)]


def rows(n: int) -> Callable[[int], tuple[int, ...]]:
    return lambda r: (n * size, 5)


CASES = {
    "sum_scatter": Case(rows(2), mlxdist.sum_scatter, lambda xs: mx.split(sum(xs), size)),
    "reduce_scatter": Case(rows(1), mlxdist.reduce_scatter, lambda xs: mx.split(sum(xs), size)),
    "all_to_all": Case(rows(3), mlxdist.all_to_all, exchanged),
    "all_to_all_v": Case(
        lambda r: (sum(COUNTS[r]), 3),
        lambda x: mlxdist.all_to_all_v(x, COUNTS[rank], [COUNTS[i][rank] for i in range(size)]),
        exchanged_v,
    ),
    "broadcast": Case(rows(1), lambda x: mlxdist.broadcast(x, root), lambda xs: [xs[root]] * size),
    "reduce": Case(
        lambda r: (4, 3),
        lambda x: mlxdist.reduce(x, root=root),
        lambda xs: [sum(xs) if r == root else xs[r][:0] for r in range(size)],
    ),
    "gather": Case(
        lambda r: (2, 3),
        lambda x: mlxdist.gather(x, root),
        lambda xs: [mx.concatenate(xs) if r == root else xs[r][:0] for r in range(size)],
    ),
    "scatter": Case(rows(2), lambda x: mlxdist.scatter(x, root), lambda xs: mx.split(xs[root], size)),
    "sendrecv": Case(
        lambda r: (r + 1, 4),
        lambda x: mlxdist.sendrecv(x, after, before, (before + 1, 4)),
        lambda xs: [xs[r - 1] for r in range(size)],
    ),
    "gather_from_sequence_parallel_region": Case(
        lambda r: (2, 3), nn.gather_from_sequence_parallel_region, lambda xs: [mx.concatenate(xs)] * size
    ),
    "reduce_scatter_to_sequence_parallel_region, axis 1": Case(
        lambda r: (2, 2 * size, 3),
        lambda x: nn.reduce_scatter_to_sequence_parallel_region(x, axis=1),
        lambda xs: mx.split(sum(xs), size, axis=1),
    ),
}
# Those that take scalars, where the first axis of a result comes from nowhere.
SCALARS = {
    "broadcast": CASES["broadcast"]._replace(shape=lambda r: ()),
    "reduce": Case(
        lambda r: (),
        lambda x: mlxdist.reduce(x, root=root),
        lambda xs: [sum(xs) if r == root else mx.zeros((0,)) for r in range(size)],
    ),
    "gather": Case(
        lambda r: (),
        lambda x: mlxdist.gather(x, root),
        lambda xs: [mx.stack(xs) if r == root else mx.zeros((0,)) for r in range(size)],
    ),
    "sendrecv": Case(
        lambda r: (), lambda x: mlxdist.sendrecv(x, after, before), lambda xs: [xs[r - 1] for r in range(size)]
    ),
}
BATCH = 4


def close(a: mx.array, b: mx.array, what: str) -> None:
    assert a.shape == b.shape, f"{what} on rank {rank}: shape {a.shape}, expected {b.shape}"
    assert mx.allclose(a, b, rtol=1e-5, atol=1e-5), f"{what} on rank {rank}: {a}, expected {b}"


def inputs(case: Case, seed: int = 0, batch: tuple[int, ...] = ()) -> list[mx.array]:
    mx.random.seed(seed)
    return [mx.random.normal((*batch, *case.shape(r))) for r in range(size)]


def loss_of(y: mx.array, weight: mx.array) -> mx.array:
    return (mx.sin(y) * weight).sum()  # not linear, so that the cotangent depends on the result


def dense_gradients(case: Case, xs: list[mx.array], weights: list[mx.array]) -> list[mx.array]:
    """The gradient of the sum of all ranks' losses by the input of every rank."""

    def loss(xs: list[mx.array]) -> mx.array:
        return sum(loss_of(y, weight) for y, weight in zip(case.dense(xs), weights))

    return mx.grad(loss)(xs)


def operations() -> None:
    for name, case in [*CASES.items(), *((f"{name} of scalars", case) for name, case in SCALARS.items())]:
        xs, directions = inputs(case), inputs(case, seed=1)
        ys = case.dense(xs)
        mx.random.seed(2)
        weights = [mx.random.normal(y.shape) for y in ys]
        close(case.operation(xs[rank]), ys[rank], name)
        expected = dense_gradients(case, xs, weights)[rank]
        gradient = mx.grad(lambda x, case=case, weights=weights: loss_of(case.operation(x), weights[rank]))
        close(gradient(xs[rank]), expected, f"gradient of {name}")
        close(mx.compile(gradient)(xs[rank]), expected, f"compiled gradient of {name}")
        _, tangents = mx.jvp(case.operation, [xs[rank]], [directions[rank]])
        close(tangents[0], case.dense(directions)[rank], f"jvp of {name}")
        # The gradient is linear in its cotangent, so the gradient of that is the operation again.
        _, (again,) = mx.vjp(
            lambda y, case=case, xs=xs: mx.vjp(case.operation, [xs[rank]], [y])[1][0], [weights[rank]], [xs[rank]]
        )
        close(again, ys[rank], f"adjoint of the adjoint of {name}")


def transformations() -> None:
    for name, case in [*CASES.items(), *((f"{name} of scalars", case) for name, case in SCALARS.items())]:
        batches = inputs(case, batch=(BATCH,))
        results = [case.dense([x[i] for x in batches])[rank] for i in range(BATCH)]
        expected, x = mx.stack(results), batches[rank]
        for axis in range(x.ndim):
            moved = mx.moveaxis(x, 0, axis)
            close(mx.vmap(case.operation, in_axes=axis)(moved), expected, f"vmap of {name}, axis {axis}")
        last = results[0].ndim
        close(mx.vmap(case.operation, out_axes=last)(x), mx.moveaxis(expected, 0, last), f"vmap of {name}, out_axes")
        function = mx.compile(mx.vmap(lambda x, case=case: case.operation(x * 2) + 1))
        for _ in range(2):
            close(function(x), expected * 2 + 1, f"compiled vmap of {name}")
        weights = [mx.ones(y.shape) for y in case.dense([x[0] for x in batches])]
        gradients = mx.stack([dense_gradients(case, [x[i] for x in batches], weights)[rank] for i in range(BATCH)])
        one = mx.grad(lambda x, case=case, weights=weights: loss_of(case.operation(x), weights[rank]))
        close(mx.vmap(one)(x), gradients, f"vmap of the gradient of {name}")
        mapped = mx.vmap(case.operation)
        whole = mx.grad(lambda x, mapped=mapped, weights=weights: loss_of(mapped(x), weights[rank]))
        close(whole(x), gradients, f"gradient of the vmap of {name}")
    mapped_over_every_axis()
    twice()


# Those whose gradient is not that of the sum of all ranks' losses: with the results of all ranks from all inputs.
MAPPED = {
    "all_sum": (mlxdist.all_sum, lambda xs: sum(xs)),
    "all_max": (mlxdist.all_max, lambda xs: mx.max(mx.stack(xs), axis=0)),
    "all_min": (mlxdist.all_min, lambda xs: mx.min(mx.stack(xs), axis=0)),
    "all_reduce (prod)": (lambda x: mlxdist.all_reduce(x, "prod"), lambda xs: mx.prod(mx.stack(xs), axis=0)),
    "all_gather": (mlxdist.all_gather, lambda xs: mx.concatenate(xs) if xs[0].ndim else mx.stack(xs)),
    "reduce_scatter (max)": (
        lambda x: mlxdist.reduce_scatter(x, "max"),
        lambda xs: mx.split(mx.max(mx.stack(xs), axis=0), size)[rank],
    ),
}


def mapped_over_every_axis() -> None:
    for name, (operation, dense) in MAPPED.items():
        shapes = [(2 * size, 3), (2 * size, 2, 3)] + [()] * (not name.startswith("reduce_scatter"))
        for shape in shapes:
            mx.random.seed(3)
            batches = [mx.random.normal((BATCH, *shape)) for _ in range(size)]
            expected = mx.stack([dense([x[i] for x in batches]) for i in range(BATCH)])
            for axis in range(len(shape) + 1):
                moved = mx.moveaxis(batches[rank], 0, axis)
                close(mx.vmap(operation, in_axes=axis)(moved), expected, f"vmap of {name} of {shape}, axis {axis}")
                negative = axis - len(shape) - 1
                close(mx.vmap(operation, in_axes=negative)(moved), expected, f"vmap of {name} of {shape}, {negative}")
            last = expected.ndim - 1
            result = mx.vmap(operation, out_axes=last)(batches[rank])
            close(result, mx.moveaxis(expected, 0, last), f"vmap of {name} of {shape}, out_axes {last}")
            inner = mx.vmap(mx.vmap(operation))(mx.stack([batches[rank], batches[rank]]))
            close(inner, mx.stack([expected, expected]), f"vmap of vmap of {name} of {shape}")
    # all_gather has MLX's gradient, this rank's rows, below and above vmap.
    for shape in ((2, 3), ()):
        x, weight = mx.random.normal((BATCH, *shape)), mx.random.normal((size * 2, 3) if shape else (size,))
        own = mx.broadcast_to(mx.split(weight, size)[rank].reshape(shape), x.shape)
        one = mx.grad(lambda x, weight=weight: (mlxdist.all_gather(x) * weight).sum())
        close(one(x[0]), own[0], f"gradient of all_gather of {shape}")
        close(mx.vmap(one)(x), own, f"vmap of the gradient of all_gather of {shape}")
        above = mx.grad(lambda x, weight=weight: (mx.vmap(mlxdist.all_gather)(x) * weight).sum())
        close(above(x), own, f"gradient of the vmap of all_gather of {shape}")


def twice() -> None:
    """Two calls on equal inputs are two operations on every rank: compile must not merge them on one."""
    before = group.stats()["collectives"]
    x = mx.ones((size, 2))
    mx.eval(mx.compile(lambda x: mlxdist.all_to_all(x) + mlxdist.all_to_all(x))(x))
    mx.eval(mx.compile(lambda x: mlxdist.sum_scatter(x) + mlxdist.sum_scatter(x))(x))
    assert group.stats()["collectives"] - before == 4


def without_gradient() -> None:
    x = mx.ones((size, 2))
    for words, operation in [
        ("all_reduce (prod) has no gradient", lambda x: mlxdist.all_reduce(x, "prod")),
        ("all_reduce (max) has no gradient", mlxdist.all_max),
        ("all_reduce (max) has no gradient", lambda x: mlxdist.all_reduce(x, "max")),
        ("all_reduce (min) has no gradient", mlxdist.all_min),
        ("reduce_scatter (max) has no gradient", lambda x: mlxdist.reduce_scatter(x, "max")),
        ("reduce_scatter (prod) has no gradient", lambda x: mlxdist.reduce_scatter(x, "prod")),
        ("reduce (min) has no gradient", lambda x: mlxdist.reduce(x, "min")),
    ]:
        mx.eval(operation(x))
        for transform in (mx.grad(lambda x, f=operation: f(x).sum()), lambda x, f=operation: mx.jvp(f, [x], [x])):
            try:
                transform(x)
            except mlxdist.InvalidArgument as error:
                assert words in str(error), error
            else:
                raise AssertionError(f"no error: {words}")
    # Where a maximum only shifts, as in a softmax, it is taken without one.
    shifted = mx.grad(lambda x: (x - mlxdist.all_max(mx.stop_gradient(x))).sum())(x)
    close(shifted, mx.ones(x.shape), "gradient beside a maximum")


# Shards of a model.


def part(x: mx.array, axis: int) -> mx.array:
    return mx.split(x, size, axis)[rank]


def normal(*shape: int) -> mx.array:
    return mx.random.normal(shape) / shape[-1] ** 0.5


def compare(name: str, dense: Callable, parts: Callable, whole: list[mx.array], cut: list[Callable]) -> None:
    """Loss and gradients of `parts` on this rank's shards of the arguments, and those of `dense`.

    `cut` makes this rank's shard of each argument, and so of its gradient.
    """
    numbers = list(range(len(whole)))
    loss, gradients = mx.value_and_grad(dense, numbers)(*whole)
    mine = [function(argument) for function, argument in zip(cut, whole)]
    for form, function in (("", mx.value_and_grad), ("compiled ", lambda *a: mx.compile(mx.value_and_grad(*a)))):
        value, results = function(parts, numbers)(*mine)
        close(value, loss, f"{form}{name}")
        for number, (result, gradient, function_of) in enumerate(zip(results, gradients, cut)):
            close(result, function_of(gradient), f"{form}{name}, gradient of argument {number}")


def identity(x: mx.array) -> mx.array:
    return x


def columns(x: mx.array) -> mx.array:
    return part(x, 1)


def lines(x: mx.array) -> mx.array:
    return part(x, 0)


def tensor_parallel() -> None:
    mx.random.seed(3)
    width = 6 * size
    x, w, v = normal(4, 5), normal(5, width), normal(width, 7)
    compare(
        "columns, then rows",
        lambda x, w, v: (mx.tanh(x @ w) @ v).square().mean(),
        lambda x, w, v: (
            nn.reduce_from_tensor_parallel_region(mx.tanh(nn.copy_to_tensor_parallel_region(x) @ w) @ v).square().mean()
        ),
        [x, w, v],
        [identity, columns, lines],
    )
    compare(
        "columns, gathered",
        lambda x, w: mx.tanh(x @ w).square().mean(),
        lambda x, w: (
            mx.tanh(nn.gather_from_tensor_parallel_region(nn.copy_to_tensor_parallel_region(x) @ w)).square().mean()
        ),
        [x, w],
        [identity, columns],
    )
    compare(
        "scattered, then rows",
        lambda x, w, v: (mx.tanh(x @ w) @ v).square().mean(),
        lambda x, w, v: (
            nn.reduce_from_tensor_parallel_region(nn.scatter_to_tensor_parallel_region(mx.tanh(x @ w)) @ v)
            .square()
            .mean()
        ),
        [x, w, v],
        [identity, identity, lines],
    )
    heads = normal(3, 2 * size, 4)
    scattered = nn.scatter_to_tensor_parallel_region(heads, axis=1)
    close(scattered, part(heads, 1), "scatter along axis 1")
    close(nn.gather_from_tensor_parallel_region(scattered, axis=-2), heads, "gather along axis -2")
    odd = heads[:, : size + 1]
    for words, call in [
        ("axis is 3, but x has shape", lambda: nn.scatter_to_tensor_parallel_region(heads, axis=3)),
        ("is not a multiple", lambda: nn.scatter_to_tensor_parallel_region(odd, axis=1)),
        ("is not a multiple", lambda: nn.reduce_scatter_to_sequence_parallel_region(odd, axis=1)),
        ("axis is -4", lambda: nn.gather_from_sequence_parallel_region(odd, axis=-4)),
    ]:
        try:
            call()
        except mlxdist.InvalidArgument as error:
            assert words in str(error) and "parallel_region: " in str(error), error
        else:
            raise AssertionError(f"no error: {words}")


def sequence_parallel() -> None:
    mx.random.seed(4)
    length, width = 2 * size, 3 * size
    for axis, shape in ((0, (length, 5)), (1, (2, length, 5))):
        x, w, v = normal(*shape), normal(5, width), normal(width, 5)

        def parts(x: mx.array, w: mx.array, v: mx.array, axis: int = axis) -> mx.array:
            whole = nn.gather_from_sequence_parallel_region(mx.sin(x), axis=axis)
            y = nn.reduce_scatter_to_sequence_parallel_region(mx.tanh(whole @ w) @ v, axis=axis)
            # Each rank has the loss of its shard; what is compared is the sum, whose gradient is that of each.
            return nn.reduce_from_tensor_parallel_region(mx.cos(y).square().sum())

        compare(
            f"sequence parallel along axis {axis}",
            lambda x, w, v: mx.cos(mx.tanh(mx.sin(x) @ w) @ v).square().sum(),
            parts,
            [x, w, v],
            [lambda x, axis=axis: part(x, axis), columns, lines],
        )


run_scenario(globals())
