"""One rank of test_message_gradients.py. Arguments: the scenario; "compiled".

A chain of layers, one on each rank. Every rank has all weights, so that it can compute by itself what the chain does.
"""

from collections.abc import Callable

import mlx.core as mx
import numpy as np
from scenarios import group, rank, run_scenario, size

import mlxdist

WIDTHS = [5, 3, 7, 4, 6][: size + 1]
TOLERANCE = {mx.float32: 1e-6, mx.float16: 4e-3, mx.bfloat16: 3e-2}


def layer(weight: mx.array, x: mx.array) -> mx.array:
    return mx.tanh(x @ weight)


def head(y: mx.array) -> mx.array:
    return mx.sin(y.astype(mx.float32)).sum()


def arrays(dtype: mx.Dtype) -> tuple[list[mx.array], mx.array]:
    mx.random.seed(1)
    weights = [mx.random.normal((a, b)).astype(dtype) for a, b in zip(WIDTHS, WIDTHS[1:])]
    return weights, mx.random.normal((2, WIDTHS[0])).astype(dtype)


def dense(weights: list[mx.array], x: mx.array) -> mx.array:
    for weight in weights:
        x = layer(weight, x)
    return head(x)


def part(weight: mx.array, x: mx.array) -> mx.array:
    """This rank's part of the chain: on the last rank the loss, elsewhere zero. ``weight`` is the token."""
    if rank > 0:
        x = mlxdist.recv((x.shape[0], WIDTHS[rank]), x.dtype, rank - 1, token=weight)
    y = layer(weight, x)
    if rank == size - 1:
        return head(y)
    return mx.depends([mx.array(0.0)], [mlxdist.send(y, rank + 1)])[0]


def close(value: mx.array, expected: mx.array, what: str, tolerance: float = 1e-6) -> None:
    assert value.dtype == expected.dtype, f"{what} on rank {rank}: {value.dtype}"
    difference = mx.abs(value - expected).max() / mx.abs(expected).max()
    assert difference.item() <= tolerance, f"{what} on rank {rank}: {value}, expected {expected}"


def messages(function: Callable[[], object]) -> int:
    """How many this rank sends and receives while ``function`` runs."""
    before = group.stats()["point_to_point"]
    mx.eval(function())
    return group.stats()["point_to_point"] - before


def chain(kind: str = "") -> None:
    """Each form with the number of messages to or from a neighbor: one there, one back, one again for a checkpoint."""
    neighbors = (rank > 0) + (rank < size - 1)
    forms = {"plain": (mx.value_and_grad(part), 2), "checkpointed": (mx.value_and_grad(mx.checkpoint(part)), 3)}
    compiled_forms = {
        "compiled": (mx.compile(mx.value_and_grad(part)), 2),
        "of a compiled function": (mx.value_and_grad(mx.compile(part)), 2),
        "compiled and checkpointed": (mx.compile(mx.value_and_grad(mx.checkpoint(part))), 3),
    }
    if kind == "compiled":
        forms = compiled_forms
    for dtype, tolerance in TOLERANCE.items():
        weights, x = arrays(dtype)
        loss, gradients = mx.value_and_grad(dense)(weights, x)
        for name, (function, each) in forms.items():
            for _ in range(2):
                value, gradient = function(weights[rank], x)
                sent = messages(lambda value=value, gradient=gradient: (value, gradient))
                assert sent == each * neighbors, f"{name}: {sent} messages on rank {rank}"
                close(gradient, gradients[rank], f"{name} {dtype}", tolerance)
                if rank == size - 1:
                    close(value, loss, f"loss, {name} {dtype}", tolerance)
    weights, x = arrays(mx.float32)
    assert messages(lambda: part(weights[rank], x)) == neighbors, "without a gradient"


def both_ways() -> None:
    """What is sent is used by the sender, too, and ``recv_like`` has its path by the array that it is like."""
    mx.random.seed(2)
    x = mx.random.normal((3, 4))

    def exchanged(x: mx.array) -> mx.array:
        if rank == 0:
            sent = mlxdist.send(mx.exp(x), 1)
            return (sent * sent).sum() + mx.cos(mlxdist.recv_like(sent, 1)).sum()
        received = mlxdist.recv_like(x, 0)
        return mx.sin(mlxdist.send(received * 2, 0)).sum()

    def whole(x: mx.array) -> mx.array:
        y = mx.exp(x)
        return (y * y).sum() + mx.cos(2 * y).sum() + mx.sin(2 * y).sum()

    expected = mx.grad(whole)(x) if rank == 0 else mx.zeros_like(x)
    for function in (mx.grad(exchanged), mx.compile(mx.grad(exchanged))):
        gradient = function(x)
        assert messages(lambda gradient=gradient: gradient) == 4
        assert mx.allclose(gradient, expected, rtol=1e-5, atol=1e-5), gradient


def other_transformations() -> None:
    mx.random.seed(3)
    x, direction = mx.random.normal((4, 2, 3)), mx.random.normal((4, 2, 3))
    operation = (lambda x: mlxdist.send(x, 1)) if rank == 0 else (lambda x: mlxdist.recv_like(x, 0))
    mine = x if rank == 0 else mx.zeros_like(x)
    # The cotangent of a sum does not depend on what was received, which is received all the same.
    assert messages(lambda: mx.grad(lambda x: operation(x).sum())(mine)) == 2
    _, (tangent,) = mx.jvp(operation, [mine], [direction if rank == 0 else mx.zeros_like(x)])
    assert mx.array_equal(tangent, direction), tangent
    for axis in range(3):
        mapped = mx.vmap(operation, in_axes=axis)(mine)
        assert mx.array_equal(mapped, mx.moveaxis(x, axis, 0)), f"vmap, axis {axis}"


def rejected() -> None:
    peer = 1 - rank
    for words, call in [
        ("token must be an mx.array, not int", lambda: mlxdist.recv((2,), mx.float32, peer, token=1)),
        ("stream and token are for dtypes of MLX", lambda: mlxdist.recv((2,), "float32", peer, token=mx.array(1.0))),
        ("negative dimension", lambda: mlxdist.recv((-2,), mx.float32, peer, token=mx.array(1.0))),
        ("negative dimension", lambda: mlxdist.recv((2, -1), mx.float32, peer)),
        ("negative dimension", lambda: mlxdist.recv((-2,), np.float32, peer)),
    ]:
        try:
            call()
        except mlxdist.InvalidArgument as error:
            assert words in str(error), error
        else:
            raise AssertionError(f"no error: {words}")
    x = mx.ones((2, 3))
    operation = (lambda x: mlxdist.send(x, 1)) if rank == 0 else (lambda x: mlxdist.recv((3, 2), x.dtype, 0, token=x))
    try:
        mx.eval(mx.grad(lambda x: operation(x).sum())(x))
    except mlxdist.Mismatch as error:
        assert "[2, 3]" in str(error) and "[3, 2]" in str(error), error
    else:
        raise AssertionError("no error for another shape")


run_scenario(globals())
