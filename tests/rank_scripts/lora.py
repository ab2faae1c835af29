"""One rank of test_lora.py. Arguments: scenarios. Prints "close" at the end."""

import sys

import mlx.core as mx
from mlx import nn
from whole_and_parts import (
    UNEVEN,
    close,
    compare,
    features,
    gathered,
    group,
    linear,
    part,
    rank,
    refuses,
    rms_norm,
    size,
)

from mlxdist.nn.adapters_of_rows import adapters_of_rows
from mlxdist.nn.layout.partition import take
from mlxdist.nn.tensor_parallel.column_parallel import ColumnParallelLinear
from mlxdist.nn.tensor_parallel.lora import LoRALinear
from mlxdist.nn.tensor_parallel.multi_lora import MultiLoRALinear
from mlxdist.nn.tensor_parallel.parallel_linear import ParallelLinear
from mlxdist.nn.tensor_parallel.row_parallel import RowParallelLinear

SCALE = 3.0
QUANTIZED = {"group_size": 32, "bits": 3, "mode": "affine"}


class DenseLoRA(nn.Module):
    """What mlx-lm's LoRALinear computes; test_lora.py compares with the original."""

    def __init__(self, layer: nn.Module, a: mx.array, b: mx.array, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear, self.dropout, self.lora_a, self.lora_b = layer, nn.Dropout(dropout), a, b

    def __call__(self, x: mx.array) -> mx.array:
        return self.linear(x) + SCALE * ((self.dropout(x) @ self.lora_a) @ self.lora_b)


def pair(whole: nn.Module, layer: ParallelLinear, dropout: float = 0.0) -> tuple[DenseLoRA, LoRALinear]:
    """The same adapter, which is not zero, on a frozen layer and on its shards."""
    whole.freeze()
    layer.freeze()
    a = mx.random.normal((layer.input_dims, 2)) * 0.3
    b = mx.random.normal((2, layer.output_dims)) * 0.3
    adapter = LoRALinear.from_base(layer, r=3, dropout=dropout, scale=SCALE)
    assert mx.array_equal(adapter.join_adapter()["lora_b"], mx.zeros((3, layer.output_dims)))
    dense = DenseLoRA(whole, a, b, dropout)
    adapter.load_adapter(a, b)
    joined = adapter.join_adapter()
    assert mx.array_equal(joined["lora_a"], a) and mx.array_equal(joined["lora_b"], b)
    return dense, adapter


def cut_like(layer: ParallelLinear, gradients: dict) -> dict[str, mx.array]:
    name, axis = ("lora_b", 1) if layer.shard_axis == 0 else ("lora_a", 0)
    return gradients | {name: part(gradients[name], axis, layer, layer.segments)}


def adapters() -> None:
    """Output and gradients as of an adapter on the full layer, with the same dropout."""
    unit, parts = QUANTIZED["group_size"], size + 1
    for dtype, quantized in ((mx.float32, {}), (mx.float32, QUANTIZED), (mx.float16, {})):
        for dropout in (0.0, 0.4):
            mx.random.seed(7)
            whole = linear(unit * parts, 6 * parts, dtype=dtype, **quantized)
            x = (0.1 * mx.random.normal((2, 3, unit * parts))).astype(dtype)
            for options in ({}, {"gather_output": True}):
                what = f"adapter on columns, {dtype}, {quantized}, dropout {dropout}, {options}"
                layer = ColumnParallelLinear.from_linear(whole, rank_shares=UNEVEN, segments=(1, 2), **options)
                dense, adapter = pair(whole, layer, dropout)
                check(what, dense, adapter, x, join_y=gathered(layer), compiled=bool(options and dropout and quantized))
            for parallel in (True, False):
                what = f"adapter on rows, {dtype}, {quantized}, dropout {dropout}, input_is_parallel {parallel}"
                layer = RowParallelLinear.from_linear(whole, rank_shares=UNEVEN, input_is_parallel=parallel)
                dense, adapter = pair(whole, layer, dropout)
                check(what, dense, adapter, x, cut_x=features(layer))


def check(what: str, dense: DenseLoRA, adapter: LoRALinear, x: mx.array, **keywords: object) -> None:
    if x.dtype != mx.float32:
        for module in (dense, adapter):
            module.set_dtype(x.dtype)
    compare(what, dense, adapter, x, cut_parameters=lambda g: cut_like(adapter.linear, g), **keywords)


def collectives() -> None:
    """None but the layer's own in the forward pass, one more in the backward pass."""
    if size == 1:
        return
    x = mx.random.normal((2, 4 * size))
    for kind in (ColumnParallelLinear, RowParallelLinear):
        layer = kind(4 * size, 4 * size)
        layer.freeze()
        adapter = LoRALinear.from_base(layer)
        mine = x if kind is ColumnParallelLinear else x[:, :4]
        steps = [(lambda m: m(mine), 0), (lambda m: mx.grad(lambda x, m=m: m(x).sum())(mine), 0)]
        steps.append((lambda m: nn.value_and_grad(m, lambda m, x: m(x).sum())(m, mine), 1))
        for number, (step, more) in enumerate(steps):
            counts = []
            for module in (layer, adapter):
                if number == 2 and module is layer:
                    counts.append(0 if kind is ColumnParallelLinear else 1)  # nothing to train: the forward pass
                    continue
                before = group.stats()["collectives"]
                mx.eval(step(module))
                counts.append(group.stats()["collectives"] - before)
            assert counts[1] == counts[0] + more, f"{kind.__name__}, step {number}: {counts}"


def fused() -> None:
    """Fused, the layer computes what it did with the adapter; it is quantized, or not, as asked."""
    unit, parts = QUANTIZED["group_size"], size + 1
    for quantized in ({}, QUANTIZED):
        mx.random.seed(8)
        whole = linear(unit * parts, 6 * parts, **quantized)
        x = mx.random.normal((2, unit * parts))
        for kind, options in ((ColumnParallelLinear, {"gather_output": True}), (RowParallelLinear, {})):
            layer = kind.from_linear(whole, rank_shares=UNEVEN, **options)
            _, adapter = pair(whole, layer)
            mine = x if kind is ColumnParallelLinear else features(layer)(x)
            plain = adapter.fuse(dequantize=True)
            assert type(plain) is kind and plain.sizes == layer.sizes
            close(plain(mine), adapter(mine), f"{kind.__name__}, {quantized}, fused")
            again = adapter.fuse()
            assert type(again) is type(layer)
            if quantized:
                expected = plain.to_linear().to_quantized(**quantized)
                for name, value in again.to_linear().parameters().items():
                    assert mx.array_equal(value, expected[name]), f"{name} of the quantized {kind.__name__}, fused"


def sequence() -> None:
    """Adapters on sequence-parallel layers."""
    mx.random.seed(9)
    width, x = 2 * size, mx.random.normal((2, 3 * size, 6))
    whole = linear(6, width), linear(width, 6), linear(6, width)
    options = {"sequence_parallel": True}
    parts = (
        ColumnParallelLinear.from_linear(whole[0], **options),
        RowParallelLinear.from_linear(whole[1], **options),
        ColumnParallelLinear.from_linear(whole[2], gather_output=True, **options),
    )
    dense, adapters = zip(*(pair(layer, part) for layer, part in zip(whole, parts)))
    models = [nn.Sequential(first, mx.tanh, second, rms_norm, third) for first, second, third in (dense, adapters)]

    def cut(gradients: dict) -> dict:
        layers = zip((parts[0], None, parts[1], None, parts[2]), gradients["layers"])
        return {"layers": [cut_like(layer, gradient) if layer else gradient for layer, gradient in layers]}

    compare("adapters, sequence parallel", *models, x, cut_x=lambda x: take(x, 1, [3] * size, rank), cut_parameters=cut)


def several() -> None:
    """Rows with one of several adapters, or none: each is as with that adapter alone on the full layer."""
    unit, parts, rows = QUANTIZED["group_size"], size + 1, [2, 0, 1, 2]
    for dtype, quantized in ((mx.float32, {}), (mx.float32, QUANTIZED), (mx.float16, {})):
        mx.random.seed(10)
        whole = linear(unit * parts, 6 * parts, dtype=dtype, **quantized)
        x = (0.1 * mx.random.normal((4, 3, unit * parts))).astype(dtype)
        for kind, options in (
            (ColumnParallelLinear, {"segments": (1, 2)}),
            (ColumnParallelLinear, {"gather_output": True}),
            (RowParallelLinear, {}),
            (RowParallelLinear, {"input_is_parallel": False}),
        ):
            layer = kind.from_linear(whole, rank_shares=UNEVEN, **options)
            dense, adapters = zip(*(pair(whole, layer) for _ in range(2)))
            both = MultiLoRALinear([*adapters, None])
            is_column = kind is ColumnParallelLinear
            mine = x if is_column or options else features(layer)(x)
            join = gathered(layer) if is_column else lambda y: y
            with adapters_of_rows(rows):
                ys = join(both(mine)), join(both(mine.reshape(-1, mine.shape[-1])))
            wanted = mx.stack([[whole, *dense][number](row) for number, row in zip(rows, x)]).astype(dtype)
            what = f"{kind.__name__} with several adapters, {dtype}, {quantized}, {options}"
            close(ys[0], wanted, what)
            close(ys[1], wanted.reshape(-1, wanted.shape[-1]), f"{what}, in one axis")
            close(join(both(mine)), whole(x), f"{what}, without")
            with adapters_of_rows([0, 3, 0, 3]):
                assert mx.array_equal(both(mine), layer(mine)), f"{what}: an adapter that is not on the layer"
            for wrong in ([0, 1, 2, 4], [0, 1, -1, 0], [0, 1, 2]):
                with adapters_of_rows(wrong):
                    refuses({"adapters_of_rows: a batch of shape (4, 3, ": lambda: both(mine)})


def refused() -> None:
    column = ColumnParallelLinear(4, 4 * size)
    refuses(
        {
            "LoRALinear: the layer must be column- or row-parallel, not Linear": lambda: LoRALinear.from_base(
                nn.Linear(4, 4)
            ),
            "LoRALinear: r must be a positive integer, not 0": lambda: LoRALinear.from_base(column, r=0),
            "LoRALinear: dropout must be from 0": lambda: LoRALinear.from_base(column, dropout=1.0),
            "LoRALinear: lora_a must be": lambda: LoRALinear.from_base(column).load_adapter(
                mx.ones((4, 2)), mx.ones((3, 4 * size))
            ),
            "not () and (2, 3)": lambda: LoRALinear.from_base(column).load_adapter(mx.array(1.0), mx.ones((2, 3))),
        }
    )


if __name__ == "__main__":
    for scenario in sys.argv[1:]:
        if scenario != "everything":
            globals()[scenario]()
    print("close")
