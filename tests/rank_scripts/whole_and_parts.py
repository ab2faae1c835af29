"""What the rank programs of the tensor-parallel layers share: comparing a rank's shard with the full layer."""

import sys
from collections.abc import Callable

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

import mlxdist
from mlxdist.nn.layout.partition import join, take

group = mlxdist.init()
rank, size = group.rank(), group.size()
UNEVEN = [2, *[1] * (size - 1)]
EVERYTHING = "everything" in sys.argv  # also compiled: MLX's CPU backend runs a C++ compiler for each new kernel
TOLERANCES = {mx.float32: 1e-5, mx.float16: 5e-3, mx.bfloat16: 4e-2}


def close(a: mx.array, b: mx.array, what: str) -> None:
    """Within the dtype's tolerance of the largest value: the ranks add up in another order."""
    assert a.shape == b.shape and a.dtype == b.dtype, f"{what} on rank {rank}: {a.shape} {a.dtype}, not {b.shape}"
    error, scale = mx.abs(a - b).max().item(), max(1.0, mx.abs(b).max().item())
    assert error <= TOLERANCES[b.dtype] * scale, f"{what} on rank {rank}: off by {error}, largest {scale}"


def same(a: nn.Module, b: nn.Module, what: str) -> None:
    """The same kind of layer, bitwise the same parameters, the same of them frozen."""
    assert type(a) is type(b), f"{what}: {type(a)}, not {type(b)}"
    mine, theirs = dict(tree_flatten(a.parameters())), dict(tree_flatten(b.parameters()))
    assert mine.keys() == theirs.keys(), f"{what}: {mine.keys()}, not {theirs.keys()}"
    for name, value in theirs.items():
        assert mine[name].dtype == value.dtype, f"{what}: {name} is {mine[name].dtype}, not {value.dtype}"
        assert mx.array_equal(mine[name], value), f"{what}: {name} differs on rank {rank}"
    assert a.trainable_parameters().keys() == b.trainable_parameters().keys(), f"{what}: not the same is frozen"


def linear(
    inputs: int, outputs: int, bias: bool = True, dtype: mx.Dtype = mx.float32, **quantized: object
) -> nn.Module:
    layer = nn.Linear(inputs, outputs, bias)
    layer.set_dtype(dtype)
    if not quantized:
        return layer
    layer = layer.to_quantized(**quantized)
    layer.freeze()
    return layer


def part(x: mx.array, axis: int, layer: nn.Module, segments: object = 1) -> mx.array:
    return take(x, axis, layer.sizes, rank, segments)


def cut_like(layer: nn.Module, gradients: dict) -> dict[str, mx.array]:
    """This rank's shard of the gradients of a full linear layer's parameters."""
    axes = {0: {"weight": 0, "bias": 0}, 1: {"weight": 1}}[layer.shard_axis]
    return {
        name: part(value, axes[name], layer, layer.segments) if name in axes else value
        for name, value in gradients.items()
    }


def loss_of(y: mx.array) -> mx.array:
    """Not linear, so that the cotangent depends on the result, and on the place, so that a permutation is seen."""
    return (mx.sin(y.reshape(-1).astype(mx.float32)) * mx.arange(1.0, y.size + 1)).sum() / y.size


def compare(
    what: str,
    whole: nn.Module,
    parallel: nn.Module,
    x: mx.array,
    *,
    cut_x: Callable[[mx.array], mx.array] = lambda x: x,
    join_y: Callable[[mx.array], mx.array] = lambda y: y,
    cut_parameters: Callable[[dict], dict] | None = None,
    compiled: bool = False,
    seed: int = 0,
) -> None:
    """Output, gradients of the input and of the parameters, plain and, if asked, compiled.

    `cut_x` makes this rank's input, and so its gradient, `join_y` the whole output of this rank's, with a gradient.
    """

    def run(layer: nn.Module, x: mx.array, of: Callable, form: bool) -> tuple:
        def loss(parameters: dict, x: mx.array) -> mx.array:
            layer.update(parameters)
            y = of(layer(x))
            return loss_of(y), y

        parameters = layer.trainable_parameters()
        function = mx.value_and_grad(loss, (0, 1))
        if form:
            function = mx.compile(function, inputs=[mx.random.state], outputs=[mx.random.state])
        results = []
        for _ in range(1 + form):
            mx.random.seed(seed)
            results.append(function(parameters, x))
            mx.eval(results[-1])
            layer.update(parameters)
        return results[-1]

    (_, expected), (gradients, gradient) = run(whole, x, lambda y: y, False)
    gradients = (cut_parameters or (lambda all: cut_like(parallel, all)))(gradients)
    for form in (False, True) if compiled or EVERYTHING else (False,):
        (_, y), (mine, of_x) = run(parallel, cut_x(x), join_y, form)
        form = f"{what}{' compiled' if form else ''}"
        close(y, expected, form)
        close(of_x, cut_x(gradient), f"{form}: gradient of x")
        mine, theirs = dict(tree_flatten(mine)), dict(tree_flatten(gradients))
        assert mine.keys() == theirs.keys(), f"{form}: gradients of {mine.keys()}, not {theirs.keys()}"
        for name, value in mine.items():
            close(value, theirs[name], f"{form}: gradient of {name}")


def gathered(layer: nn.Module) -> Callable[[mx.array], mx.array]:
    """For an output that is sharded: of all ranks, as the losses of all ranks' shards together would."""
    return lambda y: y if layer.gather_output else join(y, -1, layer.sizes, group, layer.segments)


def features(layer: nn.Module) -> Callable[[mx.array], mx.array]:
    return lambda x: part(x, -1, layer) if layer.input_is_parallel else x


def rms_norm(x: mx.array) -> mx.array:
    return mx.fast.rms_norm(x, None, 1e-5)


def refuses(attempts: dict[str, Callable]) -> None:
    for words, attempt in attempts.items():
        try:
            attempt()
        except mlxdist.InvalidArgument as error:
            assert words in str(error), f"{words!r} is not in {error}"
        else:
            raise AssertionError(f"no error: {words}")
