"""One rank of test_shard_model.py. Arguments: the scenario and its arguments."""

import dataclasses
import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from scenarios import group, run_scenario

import mlxdist
from mlxdist.nn.models.plan import Plan, plan_shards, shard_model
from mlxdist.nn.models.plan.shard_model import ShardedRMSNorm

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import tiny_models

PROMPT = [[5, 17, 3, 60, 21, 9, 44]]
DECODED = [11, 80, 2]
# Logits are of order 1; float32 sums over the ranks come in another order.
TOLERANCE = 2e-4
NOTHING_CUT = ("mamba", "mamba2")
QUANTIZED_LLAMA = tiny_models.SIZES | {
    "model_type": "llama", "rms_norm_eps": 1e-5, "hidden_size": 384, "num_attention_heads": 12,
    "num_key_value_heads": 12, "head_dim": 32, "intermediate_size": 224, "num_hidden_layers": 2,
}  # fmt: skip


def logits(model: nn.Module) -> list[np.ndarray]:
    """Of a prompt, and of some tokens after it, with a cache."""
    cache = make_prompt_cache(model)
    results = [model(mx.array(PROMPT), cache=cache)]
    for token in DECODED:
        results.append(model(mx.array([[token]]), cache=cache))
        mx.eval(results)
    # Some models forbid tokens with -inf.
    return [np.maximum(np.array(result.astype(mx.float32)), -1e9) for result in results]


def compare(name: str, quantized: bool = False, fields: dict | None = None, **how: object) -> str:
    """Shards a tiny model and compares its logits with the full one's: "" if they are close, else what is wrong."""
    expected = logits(built(name, quantized, fields))
    model = built(name, quantized, fields)
    plan = plan_shards(model, **({"tp": group.size()} | how))
    assert Plan.from_json(plan.to_json()) == plan
    if not plan.sharded and name not in NOTHING_CUT and group.size() > 1:
        return f"{name}: nothing is sharded"
    shard_model(model, plan, group=group)
    held = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    if held != plan.bytes(group.rank()):
        return f"{name}: {held} bytes are held, {plan.bytes(group.rank())} planned"
    found = logits(model)
    error = max(float(np.abs(a - b).max()) for a, b in zip(found, expected, strict=True))
    size = max(float(np.abs(b[b > -1e9]).max()) for b in expected)
    if not (error <= TOLERANCE * max(size, 1) and size > 1e-2):
        return f"{name} by {plan.how}: logits of up to {size:.3g} differ by {error:.3g}"
    return ""


def built(name: str, quantized: bool, fields: dict | None) -> nn.Module:
    model = tiny_models.build(name, **(fields or {}))
    if quantized:
        nn.quantize(model, group_size=32, bits=4)
    return model


def close(*cases: tuple[str, dict]) -> None:
    wrong = [f"{how}: {message}" for name, how in cases if (message := compare(name, **how))]
    assert not wrong, "; ".join(wrong)


def models(*names: str) -> None:
    """One process for all: MLX compiles kernels at run time, and keeps them."""
    close(*((name, {}) for name in names))


def uneven() -> None:
    """As many KV heads as ranks and more, and fewer, also with copies, or all of them on one rank only."""
    for heads, names in {
        (8, 4): ("llama", "iquestloopcoder", "qwen2_moe"),
        (8, 2): ("llama", "phi3", "qwen2_moe"),
        (4, 1): ("phi3",),
        (12, 2): ("hunyuan_v1_dense",),
    }.items():
        for name in names:
            plan = plan_shards(tiny_models.build(name, heads=heads), tp=group.size())
            sizes = plan.shards["model.layers.0.self_attn.o_proj.weight"].sizes
            assert len(set(sizes)) == 1 + (heads[0] % 3 > 0), (name, heads)
        close(*((name, {"fields": {"heads": heads}}) for name in names))


def norm() -> None:
    """Of 16 bits with a weight of 32: in 32 bits, as nn.RMSNorm. Shards of different sizes."""
    width = 8 * size_before(group.size())
    mine = slice(8 * size_before(group.rank()), 8 * size_before(group.rank() + 1))
    mx.random.seed(4)
    x, whole = mx.random.normal((3, width)).astype(mx.bfloat16), nn.RMSNorm(width)
    whole.weight = mx.random.normal((width,))
    part = nn.RMSNorm(width)
    part.weight, part._group, part.__class__ = whole.weight[mine], group, ShardedRMSNorm
    got, want = part(x[:, mine]), whole(x)[:, mine]
    assert got.dtype == want.dtype == mx.float32
    error = mx.abs(got - want).max().item()
    assert error < 1e-5, f"ShardedRMSNorm on rank {group.rank()} is off by {error:.1e}"


def size_before(rank: int) -> int:
    """1 + 2 + ... of the ranks before."""
    return rank * (rank + 1) // 2


def cases() -> None:
    """Uneven weights, fewer KV heads than ranks, quantized layers, experts as a whole: on any number of ranks."""
    size = group.size()
    norm()
    heads = {"num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 16}
    weights = list(range(size, 0, -1))
    if size <= tiny_models.GLOBAL_KV_HEAD["num_attention_heads"]:
        close(("gemma4_text", {"fields": tiny_models.GLOBAL_KV_HEAD}))
    close(
        ("smollm3", {"rank_shares": weights, "fields": heads}),
        ("olmo2", {"rank_shares": weights, "fields": heads | {"hidden_size": 192}}),
        ("olmo2", {"fields": heads | {"hidden_size": 192, "num_key_value_heads": 12}}),
        ("phi3", {"rank_shares": weights, "fields": heads | {"hidden_size": 192}}),
        ("phi3", {"fields": heads | {"hidden_size": 192, "num_key_value_heads": 1}}),
        ("granite", {"fields": heads | {"hidden_size": 192, "num_key_value_heads": 1}}),
        ("llama", {"fields": heads | {"num_key_value_heads": 1}}),
        ("gemma2", {"fields": heads | {"num_key_value_heads": 1}}),
        ("mistral3", {"quantized": True, "fields": {"text_config": QUANTIZED_LLAMA}}),
        ("llama", {"quantized": True, "fields": QUANTIZED_LLAMA}),
        ("llama", {"quantized": True, "fields": QUANTIZED_LLAMA | {"intermediate_size": 384}}),
        ("iquestloopcoder", {"rank_shares": weights, "fields": heads}),
        ("iquestloopcoder", {"fields": heads | {"num_key_value_heads": 1}}),
        ("qwen3_moe", {"tp": 1, "ep": size}),
        ("mixtral", {"tp": 1, "ep": size}),
        ("granitemoe", {"fields": heads | {"hidden_size": 192, "num_key_value_heads": 12}}),
    )


def grid() -> None:
    """Two rows of two: attention is sharded in two, and each of the four ranks has whole experts."""
    close(("mixtral", {"tp": 2, "ep": 2}), ("qwen2_moe", {"tp": 2, "ep": 2}), ("qwen3_moe", {"tp": 2, "ep": 2}))


def refused() -> None:
    """Each wrong argument, also on one rank only, is the same error on all ranks, and changes nothing."""
    model, other = tiny_models.build("llama"), tiny_models.build("qwen3")
    plan, first = plan_shards(model, tp=group.size()), group.rank() == 0
    frozen = tiny_models.build("llama")
    if first:
        frozen.model.norm.freeze()
    edited = Plan.from_json(plan.to_json().replace("llama", "lama"))
    for words, arguments in [
        ("the plan is for another model", (other, plan)),
        ("the plan is for another model", (other if first else model, plan)),
        ("the plan is for another model", (tiny_models.build("llama", hidden_size=128), plan)),
        ("the plan is for tp=1 x ep=1 = 1 ranks", (model, plan_shards(model, tp=1))),
        ("the ranks disagree about the plan", (model, edited if first else plan)),
        ("the ranks disagree about the parameter model.norm.weight: float32 [64], frozen on rank 0", (frozen, plan)),
        ("plan must be a Plan", (model, None if first else plan)),
        ("model must be an mlx.nn.Module", ("llama", plan)),
    ]:
        try:
            shard_model(*arguments, group=group)
        except mlxdist.Mismatch if "disagree" in words else mlxdist.InvalidArgument as error:
            texts = [bytes(text) for text in mlxdist.all_gather(padded(str(error)), group=group)]
            assert words in str(error) and len(set(texts)) == 1, (str(error), texts)
        else:
            raise AssertionError(f"no error: {words}")
    broken = Broken(*(getattr(plan, field.name) for field in dataclasses.fields(plan)))
    try:
        shard_model(model, broken if first else plan, group=group)
    except KeyError if first else mlxdist.InvalidArgument as error:
        assert "nothing" in str(error), error
    else:
        raise AssertionError("no error of a model that fails on one rank")
    plan.check(model)  # it is still full
    shard_model(model, plan, group=group)
    try:
        shard_model(model, plan, group=group)
    except mlxdist.InvalidArgument as error:
        assert "in the plan float32 of shape" in str(error), error
    else:
        raise AssertionError("a model was sharded twice")


class Broken(Plan):
    """A plan that fails in another way than by an InvalidArgument."""

    def check(self, model: nn.Module) -> None:
        raise KeyError("nothing")


def padded(text: str) -> np.ndarray:
    return np.frombuffer(text.encode().ljust(1000)[:1000], np.uint8)[None].copy()


run_scenario(globals())
