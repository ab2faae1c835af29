"""Adapters on column- and row-parallel layers against the same adapters on the full layers."""

import mlx.core as mx
import pytest
from mlx import nn

from mlxdist.nn.adapters_of_rows import adapters_of_rows
from mlxdist.nn.tensor_parallel.column_parallel import ColumnParallelLinear
from mlxdist.nn.tensor_parallel.lora import LoRALinear
from mlxdist.nn.tensor_parallel.multi_lora import MultiLoRALinear

SCENARIOS = ["adapters", "collectives", "fused", "sequence", "several", "refused"]


@pytest.mark.long
@pytest.mark.parametrize("ranks", [*(pytest.param(ranks, marks=pytest.mark.long) for ranks in (1, 3)), 2])
def test_adapters_compute_and_train_as_on_the_full_model(run_ranks, ranks):
    """The scenarios are functions of tests/rank_scripts/lora.py."""
    assert all("close" in output for output in run_ranks("lora.py", ranks, *SCENARIOS))


@pytest.mark.long
def test_every_adapter_also_compiled(run_ranks):
    outputs = run_ranks("lora.py", 4, "everything", *SCENARIOS, timeout=240)
    assert all("close" in output for output in outputs)


@pytest.mark.long  # the import of mlx-lm takes seconds
@pytest.mark.parametrize("quantized", [{}, {"group_size": 32, "bits": 4}])
def test_adapters_are_those_of_mlx_lm(quantized):
    """Names, initial values, scale, dropout and what is fused, in a group of one."""
    from mlx_lm.tuner.lora import LoRALinear as Original

    mx.random.seed(0)
    whole, x = nn.Linear(64, 32), mx.random.normal((3, 64))
    whole = whole.to_quantized(**quantized) if quantized else whole
    layers = []
    for kind, linear in ((Original, whole), (LoRALinear, ColumnParallelLinear.from_linear(whole))):
        mx.random.seed(1)
        linear.freeze()
        layer = kind.from_base(linear, r=4, dropout=0.3, scale=5.0)
        layer.lora_b = mx.full((4, 32), 0.1)
        layers.append(layer)
    theirs, ours = layers
    assert ours.trainable_parameters().keys() == theirs.trainable_parameters().keys()
    ours.load_adapter(theirs.lora_a, theirs.lora_b)
    results = []
    for layer in layers:
        mx.random.seed(2)
        results.append(layer(x))
    assert mx.allclose(*results, rtol=1e-5, atol=1e-5)
    for dequantize in (False, True):
        fused = ours.fuse(dequantize=dequantize).to_linear()
        expected = theirs.fuse(dequantize=dequantize)
        assert type(fused) is type(expected)
        assert all(mx.array_equal(fused[name], value) for name, value in expected.parameters().items())


@pytest.mark.long  # the import of mlx-lm takes seconds
@pytest.mark.parametrize("quantized", [{}, {"group_size": 32, "bits": 4}])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(4, 1, 64), (4, 5, 64), (4, 2, 5, 64), (20, 64)], ids=str)
def test_each_row_is_as_with_its_adapter_of_mlx_lm(quantized, dtype, shape):
    """Of other ranks, as mlx-lm trains them, in float32."""
    from mlx_lm.tuner.lora import LoRALinear as Original

    mx.random.seed(0)
    linear = nn.Linear(64, 32)
    linear.set_dtype(dtype)
    linear = linear.to_quantized(**quantized) if quantized else linear
    adapters = [Original.from_base(linear, r=r, scale=scale) for r, scale in ((4, 5.0), (1, 0.0), (9, -1.5))]
    for adapter in adapters:
        adapter.lora_b = mx.random.normal(adapter.lora_b.shape)
    x, rows = mx.random.normal(shape).astype(dtype), [3, 0, 1, 2]
    with adapters_of_rows(rows):
        y = MultiLoRALinear(adapters)(x)
    parts = x.reshape(4, -1, 64)
    expected = mx.stack([[linear, *adapters][number](part) for number, part in zip(rows, parts)]).reshape(y.shape)
    assert y.dtype == dtype and y.shape == (*shape[:-1], 32)
    tolerance = {mx.float32: 1e-5, mx.float16: 5e-3, mx.bfloat16: 5e-2}[dtype]
    assert mx.allclose(y, expected, rtol=tolerance, atol=tolerance)
