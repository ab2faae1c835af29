"""One rank of test_cuts.py. Arguments: the scenario and its arguments."""

import sys
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchGLU
from mlx_lm.tuner.lora import LoRALinear
from mlx_lm.tuner.utils import linear_to_lora_layers
from scenarios import group, run_scenario

import mlxdist
from mlxdist.nn import (
    ColumnParallelLinear,
    ExpertParallelSwitchGLU,
    ParallelAttention,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from mlxdist.nn import LoRALinear as ShardedLoRALinear
from mlxdist.nn.layout.cut import Cut
from mlxdist.nn.models.cuts import cuts
from mlxdist.nn.models.plan import plan_shards, shard_model

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import tiny_models

QUANTIZED = tiny_models.SIZES | {
    "hidden_size": 384, "num_attention_heads": 12, "num_key_value_heads": 12, "head_dim": 32, "intermediate_size": 384,
}  # fmt: skip


def differences(sharded: nn.Module, full: nn.Module, is_sharded: bool = True) -> Iterator[str]:
    """Where a rank's array is not what its cut takes of the full one, or those of all ranks do not give that again."""
    found, arrays = cuts(sharded), dict(tree_flatten(sharded.parameters()))
    expected = dict(tree_flatten(full.parameters()))
    assert list(found) == list(arrays) and arrays.keys() == expected.keys(), arrays.keys() ^ expected.keys()
    assert any(not cut.is_full for cut in found.values()) == is_sharded
    for path, cut in found.items():
        whole, array = expected[path], arrays[path]
        if (cut.shape, cut.local_shape) != (whole.shape, array.shape):
            yield f"{path}: {array.shape} of {whole.shape} is {cut.local_shape} of {cut.shape}"
        elif not mx.array_equal(cut.take(whole), array):
            yield f"{path} is another part"
        elif not np.array_equal(joined(cut, array), np.array(whole.astype(mx.float32))):
            yield f"{path} is not joined"


def joined(cut: object, array: mx.array) -> np.ndarray:
    """What all ranks hold together, each element counted once."""
    full, local = np.zeros(cut.shape, np.float32), np.array(array.astype(mx.float32))
    if (counted := cut.counted()) is not None:
        local = local * counted
    for box, start, stop, shape, within in cut.pieces():
        full[box] += local.reshape(-1)[start:stop].reshape(shape)[within]
    for one in cut.groups:
        sum_up = mlxdist.all_sum if isinstance(one, mlxdist.Group) else mx.distributed.all_sum
        full = np.array(sum_up(mx.array(full), group=one))
    return full


def equal(*cases: tuple[str, dict]) -> None:
    wrong = [f"{name} {how}: {text}" for name, how in cases for text in compare(name, **how)]
    assert not wrong, "; ".join(wrong[:8])


def compare(name: str, fields: dict | None = None, quantized: bool = False, **how: object) -> list[str]:
    full, model = (tiny_models.build(name, **(fields or {})) for _ in range(2))
    for one in (full, model) if quantized else ():
        nn.quantize(one, group_size=32, bits=4)
    plan = plan_shards(model, **({"tp": group.size()} | how))
    shard_model(model, plan, group=group)
    return list(differences(model, full, bool(plan.sharded)))


def models(*names: str) -> None:
    equal(*((name, {}) for name in names))


def layers() -> None:
    """Those of mlxdist.nn, and MLX's, by themselves."""
    size = group.size()
    shares = list(range(1, size + 1))
    mx.random.seed(1)
    common = {"rank_shares": shares, "group": group}
    for bits in (None, 4):
        wide, narrow = nn.Linear(64, 32 * 3 * size * (size + 1)), nn.Linear(32 * size * (size + 1), 48)
        words = nn.Embedding(5 * size + 1, 64)
        if bits:
            wide, narrow, words = (layer.to_quantized(32, bits) for layer in (wide, narrow, words))
        check(ColumnParallelLinear.from_linear(wide, segments=(1, 1, 1), **common), wide)
        check(ColumnParallelLinear.from_linear(wide, segments=(1, 2), group=group), wide)
        check(RowParallelLinear.from_linear(narrow, multiple=32, **common), narrow)
        check(VocabParallelEmbedding.from_embedding(words, group=group), words)
        check(nn.layers.distributed.shard_linear(wide, "all-to-sharded", group=group.mlx), wide)
        check(nn.layers.distributed.shard_linear(narrow, "sharded-to-all", group=group.mlx), narrow)
    for linear, kind in ((wide, ColumnParallelLinear), (narrow, RowParallelLinear)):
        sharded = kind.from_linear(linear, multiple=32, **common).to_lora(r=3)
        full = LoRALinear.from_base(linear, r=3)
        sharded.load_adapter(full.lora_a, full.lora_b)
        check(sharded, full)
    switch = SwitchGLU(32, 24 * size, 2 * size + 1)
    check(ExpertParallelSwitchGLU.from_switch(switch, group=group), switch)


def check(sharded: nn.Module, full: nn.Module) -> None:
    wrong = list(differences(sharded, full))
    assert not wrong, (type(sharded), wrong[:8])


def shared_kv_heads() -> None:
    """Of ParallelAttention."""
    for n_kv_heads in (1, group.size()):
        full = tiny_models.build("qwen3", heads=(2 * group.size(), n_kv_heads)).layers[0].self_attn
        check(ParallelAttention.from_attention(full, group=group), full)


def expert_grid() -> None:
    """Experts on two rows of ranks, each of them sharded over two ranks."""
    mx.random.seed(2)
    rows, columns = group.split(group.rank() % 2), group.split(group.rank() // 2)
    for bits in (None, 4):
        switch = SwitchGLU(64, 192, 5, bias=True)
        if bits:
            nn.quantize(switch, 32, bits)
        check(ExpertParallelSwitchGLU.from_switch(switch, group=rows, tp_group=columns), switch)


def adapters(*names: str) -> None:
    """Put on a model that is sharded; also on experts, also where all experts of a rank are whole."""
    for name, how in [*((name, {"tp": group.size()}) for name in names), ("mixtral", {"tp": 1, "ep": group.size()})]:
        full, model = tiny_models.build(name), tiny_models.build(name)
        shard_model(model, plan_shards(model, **how), group=group)
        for one in (full, model):
            linear_to_lora_layers(one, 4, {"rank": 4, "scale": 2.0, "dropout": 0.0})
        layers = dict(model.named_modules())
        for path, layer in full.named_modules():
            if "lora_a" in layer:
                layer.lora_a, layer.lora_b = (mx.random.normal(layer[key].shape) for key in ("lora_a", "lora_b"))
                put_adapter(layers[path], layer)
        check(model, full)


def put_adapter(layer: nn.Module, full: nn.Module) -> None:
    if isinstance(layer, ShardedLoRALinear):
        layer.load_adapter(full.lora_a, full.lora_b)
        return
    _, shard = getattr(layer.linear, "_full", (None, lambda name, array: array))
    layer.lora_a, layer.lora_b = shard("lora_a", full.lora_a), shard("lora_b", full.lora_b)


def flat() -> None:
    """What fully_shard makes of a parameter: equal runs of elements of it, with zeros at the end of the last."""
    rank, size = group.rank(), group.size()
    for shape in ((), (1,), (7,), (3, 5), (2, 3, 5), (4, 1, 3, 2), (0, 3)):
        full = mx.arange(1, 1 + int(np.prod(shape))).reshape(shape)
        length = -(-full.size // size)
        begin, end = (min(full.size, length * number) for number in (rank, rank + 1))
        cut = Cut.full(shape).flattened(begin, end, length, group)
        local = cut.take(full)
        assert local.shape == cut.local_shape == (length,), (shape, local.shape)
        assert np.array_equal(joined(cut, local), np.array(full)), shape
    for heads in ([(0, 2)], [(1, 3)], [(2, 3), (0, 1)], [(1, 2), (1, 2), (2, 2)]):  # also what both hold
        full = mx.arange(60).reshape(5, 3, 4)
        held = [[(0, 3)] if number == 0 else heads for number in range(size)]
        columns = Cut.full(full.shape).along(1, held, group)
        assert np.array_equal(joined(columns, columns.take(full)), np.array(full)), heads
        whole = int(np.prod(columns.local_shape))
        begin, end = whole // 3, whole // 3 * 2
        part = columns.flattened(begin, end, end - begin + 2, group)
        again = np.zeros(full.shape, int)
        part.put(again, np.array(part.take(full)))
        expected = np.zeros(full.shape, int)
        indices = np.array(columns.take(mx.arange(60).reshape(5, 3, 4))).ravel()[begin:end]
        expected.ravel()[indices] = np.array(full).ravel()[indices]
        assert np.array_equal(again, expected), heads


def cases() -> None:
    """Heads that are sharded unevenly and that several ranks hold, copies of them, fused layers, quantized ones."""
    size = group.size()
    shares = {"rank_shares": list(range(size, 0, -1))}
    heads = {"num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 16}
    one_kv_head = {"fields": heads | {"hidden_size": 192, "num_key_value_heads": 1}}
    equal(
        ("smollm3", {"fields": heads, **shares}),
        ("phi3", {"fields": heads | {"hidden_size": 192}, **shares}),
        ("phi3", one_kv_head),
        ("llama", one_kv_head),
        ("granite", one_kv_head),
        ("iquestloopcoder", one_kv_head),
        ("qwen2_moe", {"fields": {"heads": (8, 2)}}),
        ("llama", {"quantized": True, "fields": QUANTIZED}),
        ("mixtral", {"tp": 1, "ep": size}),
        ("mixtral", {"tp": 1, "ep": size, "quantized": True}),
    )


def grid() -> None:
    equal(("mixtral", {"tp": 2, "ep": 2}), ("qwen2_moe", {"tp": 2, "ep": 2}))


run_scenario(globals())
