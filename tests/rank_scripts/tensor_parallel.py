"""One rank of test_tensor_parallel.py. Arguments: scenarios, "everything". Prints "close" at the end.

Every rank makes the full layers and inputs from the same seed, and compares its shard with what they give.
"""

import sys
from collections.abc import Iterator

import mlx.core as mx
from mlx import nn
from whole_and_parts import (
    EVERYTHING,
    TOLERANCES,
    UNEVEN,
    close,
    compare,
    cut_like,
    features,
    gathered,
    group,
    linear,
    loss_of,
    part,
    rank,
    refuses,
    rms_norm,
    same,
    size,
)

import mlxdist
from mlxdist.nn import reduce_from_tensor_parallel_region
from mlxdist.nn.layout.partition import join, scatter, slices, take
from mlxdist.nn.tensor_parallel.column_parallel import ColumnParallelLinear, QuantizedColumnParallelLinear
from mlxdist.nn.tensor_parallel.row_parallel import QuantizedRowParallelLinear, RowParallelLinear

QUANTIZATIONS = [
    *(
        {"group_size": g, "bits": b, "mode": "affine"}
        for i, b in enumerate((2, 3, 4, 5, 6, 8))
        for g in ((32, 64, 128) if EVERYTHING else ((32, 64, 128)[i % 3],))
    ),
    {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    {"group_size": 32, "bits": 8, "mode": "mxfp8"},
    {"group_size": 16, "bits": 4, "mode": "nvfp4"},
]


def column_cases() -> Iterator[tuple[int, dict]]:
    """Outputs and options."""
    yield 3 * size, {}
    yield 3 * size, {"gather_output": True}
    yield 2 * (size + 1), {"rank_shares": UNEVEN}
    yield 7 * size + 3, {"rank_shares": UNEVEN, "gather_output": True}
    yield 4 * 3 * size, {"segments": (2, 1, 1)}
    yield 4 * 3 * (size + 1), {"segments": (2, 1, 1), "rank_shares": UNEVEN, "multiple": 3, "gather_output": True}
    yield 2 * (size + 2), {"segments": 2, "rank_shares": UNEVEN, "gather_output": True}


def columns() -> None:
    for number, (outputs, options) in enumerate(column_cases()):
        for bias in (True, False):
            what = f"columns of {outputs}, {options}, bias {bias}"
            mx.random.seed(number)
            whole, x = linear(5, outputs, bias), mx.random.normal((2, 3, 5))
            layer = ColumnParallelLinear.from_linear(whole, **options)
            same(layer.to_linear(), whole, what)
            close(layer(x), part(whole(x), -1, layer, layer.segments) if not layer.gather_output else whole(x), what)
            compare(what, whole, layer, x, join_y=gathered(layer), compiled=bias and "multiple" in options)
            mx.random.seed(number)
            fresh = ColumnParallelLinear(5, outputs, bias, **options)
            same(fresh.to_linear(), whole, f"{what}, not from a layer")


def row_cases() -> Iterator[tuple[int, dict]]:
    """Inputs and options."""
    yield 3 * size, {}
    yield 3 * size, {"input_is_parallel": False}
    yield 5 * size + 2, {"rank_shares": UNEVEN}
    yield 4 * (size + 1), {"rank_shares": UNEVEN, "multiple": 4, "input_is_parallel": False}


def rows() -> None:
    for number, (inputs, options) in enumerate(row_cases()):
        for bias in (True, False):
            what = f"rows of {inputs}, {options}, bias {bias}"
            mx.random.seed(number)
            whole, x = linear(inputs, 7, bias), mx.random.normal((2, 3, inputs))
            layer = RowParallelLinear.from_linear(whole, **options)
            same(layer.to_linear(), whole, what)
            compare(what, whole, layer, x, cut_x=features(layer), compiled=bias and "multiple" in options)
            mx.random.seed(number)
            fresh = RowParallelLinear(inputs, 7, bias, **options)
            same(fresh.to_linear(), whole, f"{what}, not from a layer")


def empty() -> None:
    """No tokens."""
    column, row = ColumnParallelLinear(4, 3 * size, gather_output=True), RowParallelLinear(3 * size, 5)
    for layer, inputs, outputs in ((column, 4, 3 * size), (row, 3, 5)):
        for shape in ((0,), (2, 0), (0, 3)):
            step = nn.value_and_grad(layer, lambda layer, x: layer(x).sum())
            y, (loss, gradients) = layer(mx.ones((*shape, inputs))), step(layer, mx.ones((*shape, inputs)))
            mx.eval(y, loss, gradients)
            assert y.shape == (*shape, outputs) and not mx.any(gradients["weight"])


class MLP(nn.Module):
    """Gate and up in one matrix, down: `width` features in the middle on this rank."""

    def __init__(self, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.up, self.down = up, down

    def __call__(self, x: mx.array) -> mx.array:
        gate, up = mx.split(self.up(x), 2, axis=-1)
        return self.down(nn.silu(gate) * up)


def mlp() -> None:
    """Columns, then rows, trained for some steps with nn.value_and_grad as the full model; the dtypes; sequence
    parallel."""
    width = 4 * (size + 1)
    for dtype in TOLERANCES:
        for weights in (None, UNEVEN):
            what = f"MLP in {dtype}, weights {weights}"
            mx.random.seed(1)
            middle = width * size
            whole = MLP(linear(6, 2 * middle, dtype=dtype), linear(middle, 6, dtype=dtype))
            options = {"rank_shares": weights, "multiple": 2}
            parallel = MLP(
                ColumnParallelLinear.from_linear(whole.up, segments=2, **options),
                RowParallelLinear.from_linear(whole.down, **options),
            )
            x = mx.random.normal((2, 4, 6)).astype(dtype)

            def cut(gradients: dict, parallel: MLP = parallel) -> dict:
                return {name: cut_like(parallel[name], gradients[name]) for name in ("up", "down")}

            compare(what, whole, parallel, x, cut_parameters=cut, compiled=dtype == mx.float32)
            if dtype == mx.float32:
                trained(what, whole, parallel, x)


def trained(what: str, whole: MLP, parallel: MLP, x: mx.array) -> None:
    for model in (whole, parallel):
        step = nn.value_and_grad(model, lambda model, x: loss_of(model(x)))
        for _ in range(3):
            _, gradients = step(model, x)
            rate = 0.01
            model.update(
                {
                    name: {key: model[name][key] - rate * value for key, value in of.items()}
                    for name, of in gradients.items()
                }
            )
            mx.eval(model.parameters())
    for name in ("up", "down"):
        joined = parallel[name].to_linear()
        for key, value in whole[name].parameters().items():
            close(joined[key], value, f"{what}: {name}.{key} after three steps")


def sequence() -> None:
    """The input sharded along the sequence, a norm on each rank's part of it between the row and the next column
    layer."""
    for shape in ((2 * size, 6), (2, 3 * size, 6)):
        for weights in (None, UNEVEN):
            what = f"sequence parallel, x of shape {shape}, weights {weights}"
            mx.random.seed(2)
            middle, axis = size * (size + 1), len(shape) - 2
            whole = nn.Sequential(linear(6, middle), mx.tanh, linear(middle, 6), rms_norm, linear(6, middle, False))
            first, _, second, _, third = whole.layers
            options = {"rank_shares": weights, "sequence_parallel": True}
            parts = [
                ColumnParallelLinear.from_linear(first, **options),
                mx.tanh,
                RowParallelLinear.from_linear(second, **options),
                rms_norm,
                ColumnParallelLinear.from_linear(third, gather_output=True, **options),
            ]
            parallel, x = nn.Sequential(*parts), mx.random.normal(shape)

            def cut(gradients: dict, parts: list = parts) -> dict:
                return {"layers": [cut_like(p, g) if g else g for p, g in zip(parts, gradients["layers"])]}

            along = [shape[axis] // size] * size
            compare(what, whole, parallel, x, cut_x=lambda x, a=axis, s=along: take(x, a, s, rank), cut_parameters=cut)
    rows_alone()


def rows_alone() -> None:
    """An output that is sharded along the sequence, each rank with the loss of its shard: the bias gets that of all."""
    mx.random.seed(3)
    whole, x = linear(3 * size, 5), mx.random.normal((2 * size, 3 * size))
    layer = RowParallelLinear.from_linear(whole, sequence_parallel=True, input_is_parallel=False)
    assert layer(x).shape == (2, 5)
    total = nn.value_and_grad(whole, lambda layer, x: mx.sin(layer(x)).sum())
    mine = nn.value_and_grad(
        layer, lambda layer, x: reduce_from_tensor_parallel_region(mx.sin(layer(x)).sum(), group=group)
    )
    (expected, theirs), (value, gradients) = total(whole, x), mine(layer, x)
    close(value, expected, "rows, sequence parallel")
    for name, gradient in cut_like(layer, theirs).items():
        close(gradients[name], gradient, f"rows, sequence parallel: gradient of {name}")


def quantized() -> None:
    for number, config in enumerate(QUANTIZATIONS):
        mx.random.seed(number)
        unit, bias = config["group_size"], number % 2 == 0
        for weights, parts in ((None, size), (UNEVEN, size + 1)):
            what = f"{config}, weights {weights}, bias {bias}"
            whole, x = linear(unit * parts, 6 * parts, bias, **config), mx.random.normal((2, unit * parts))
            row = RowParallelLinear.from_linear(whole, rank_shares=weights, input_is_parallel=number % 3 == 0)
            assert type(row) is QuantizedRowParallelLinear and row.sizes[rank] % unit == 0
            same(row.to_linear(), whole, f"rows: {what}")
            compare(f"rows: {what}", whole, row, x, cut_x=features(row))
            column = ColumnParallelLinear.from_linear(whole, rank_shares=weights, segments=2)
            assert type(column) is QuantizedColumnParallelLinear
            same(column.to_linear(), whole, f"columns: {what}")
            compare(f"columns: {what}", whole, column, x, join_y=gathered(column))
            plain = linear(unit * parts, 6 * parts, bias)
            for kind in (ColumnParallelLinear, RowParallelLinear):
                # Quantized when it is sharded, as nn.quantize does it, is sharded when it is quantized.
                late = kind.from_linear(plain, rank_shares=weights, multiple=unit if kind is RowParallelLinear else 1)
                late = late.to_quantized(**config)
                early = type(late).from_linear(plain.to_quantized(**config), rank_shares=weights)
                for name, value in early.parameters().items():
                    assert mx.array_equal(late[name], value), f"{name} of {kind.__name__}, {what}"


def states() -> None:
    """What is frozen, and whether a layer is trained, is as in the layer it is made from."""
    mx.random.seed(4)
    whole = linear(4 * size, 4 * size)
    whole.freeze(keys=["bias"])
    whole.eval()
    quantized = nn.Linear(64 * size, 4 * size).to_quantized()  # MLX leaves the bias of such a one trainable
    for kind in (ColumnParallelLinear, RowParallelLinear):
        layer = kind.from_linear(quantized)
        assert list(layer.trainable_parameters()) == ["bias"]
        same(layer.to_linear(), quantized, f"quantized {kind.__name__}")
        layer = kind.from_linear(whole)
        assert list(layer.trainable_parameters()) == ["weight"] and not layer.training
        same(layer.to_linear(), whole, kind.__name__)
        assert f"size={layer.sizes[rank]}" in repr(layer) and f"input_dims={4 * size}" in repr(layer)


def joining() -> None:
    """Shards of different sizes, joined and scattered, in every dtype; the gradients are those of the full model."""
    mx.random.seed(5)
    sizes = [other + 1 for other in range(size)]
    for dtype in (mx.uint8, mx.uint32, mx.int64, mx.float16, mx.bfloat16, mx.float32, mx.bool_):
        x = mx.random.randint(0, 100, (2, 2 * sum(sizes), 3)).astype(dtype)
        double = [2 * number for number in sizes]
        for segments in (1, 2, (1, 1)):
            mine = take(x, 1, double, rank, segments)
            assert mx.array_equal(join(mine, 1, double, group, segments), x), f"{dtype}, segments {segments}"
        assert mx.array_equal(scatter(x, -2, double, group), take(x, 1, double, rank))
    x = mx.random.normal((3, sum(sizes)))
    compared = mx.grad(lambda x: loss_of(mx.tanh(x)))(x)
    through = mx.grad(lambda x: loss_of(join(mx.tanh(scatter(x, 1, sizes, group)), 1, sizes, group)))
    for function in (through, mx.compile(through)):
        close(function(x), compared, "gradient through scatter and join")
    place = slices(sizes, rank)[0]
    mine = mx.grad(lambda part: loss_of(join(mx.tanh(part), 1, sizes, group)))(x[:, place])
    close(mine, compared[:, place], "gradient of join")


def refused() -> None:
    """The same error on every rank, before anything is sent."""
    before = group.stats()["collectives"]
    odd, whole = 4 * size + 1, linear(4 * size, 4 * size)
    row = RowParallelLinear.from_linear(whole, sequence_parallel=True)
    attempts = {
        "rank_shares must be": lambda: ColumnParallelLinear(4, 4 * size, rank_shares=[1] * (size + 1)),
        "rank_shares must be positive": lambda: RowParallelLinear(4 * size, 4, rank_shares=[-1] * size),
        "cannot be split into whole multiples of 3": lambda: ColumnParallelLinear(4, 3 * odd + 1, multiple=3),
        "takes its shard of the features": lambda: row(mx.ones((size, 4 * size + 1))),
        "not ()": lambda: row(mx.array(1.0)),
        f"x must be (..., 4), not (2, {odd})": lambda: ColumnParallelLinear(4, 4 * size)(mx.ones((2, odd))),
        "QuantizedRowParallelLinear: input_dims in quantization groups of 64": lambda: RowParallelLinear.from_linear(
            linear(64 * size, 8, group_size=64, bits=4), multiple=64 * size * 3
        ),
        "must be an nn.Linear or nn.QuantizedLinear, not RowParallelLinear": lambda: ColumnParallelLinear.from_linear(
            row
        ),
        "axis is 7": lambda: join(mx.ones(3), 7, [3] * size, group),
        "must be 3 long": lambda: join(mx.ones(2), 0, [3] * size, group),
        "sizes must be": lambda: scatter(mx.ones(3), 0, [3] * (size + 1), group),
    }
    if size > 1:
        attempts |= {
            "ColumnParallelLinear: output_dims": lambda: ColumnParallelLinear(4, odd),
            "RowParallelLinear: input_dims": lambda: RowParallelLinear(odd, 4),
            "with sequence_parallel the sequence": lambda: row(mx.ones((size + 1, 4))),
            "are not whole quantization groups of 32": lambda: RowParallelLinear(
                32 * size, 4, rank_shares=[3, *[2] * (size - 2), 1]
            ).to_quantized(group_size=32),
            "QuantizedRowParallelLinear: input_dims in quantization groups of 128": lambda: (
                RowParallelLinear.from_linear(linear(128 * (size + 1), 8, group_size=128, bits=3))
            ),
        }
    refuses(attempts)
    assert group.stats()["collectives"] == before, "something was sent"


def sequences_of_different_lengths() -> None:
    """Last, since the group has failed then."""
    if size == 1:
        return
    layer = ColumnParallelLinear(4, 4 * size, sequence_parallel=True)
    try:
        mx.eval(layer(mx.ones((3 if rank == 0 else 2, 4))))
    except mlxdist.Mismatch as error:
        assert "all_gather" in str(error), error
    else:
        raise AssertionError("no error")


if __name__ == "__main__":
    for scenario in sys.argv[1:]:
        if scenario != "everything":
            globals()[scenario]()
    print("close")
