"""One rank of test_expert_parallel.py. Arguments: scenarios.

Every rank makes the tokens and all experts of all ranks from the same seed, and computes the dense layer by itself.
"""

import copy
import functools
import itertools
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP
from mlx_lm.tuner.lora import LoRASwitchLinear

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import reference_moe as reference
from scenarios import group, rank, run_scenarios, size

import mlxdist
from mlxdist.nn.expert_parallel import ExpertParallelSwitchGLU, Placement, combine, dispatch

HIDDEN, INNER = 32, 24
MODES = ("replicated", "gather", "dispatch")
# Of the largest number of the result. 16 bits have 11 (float16) and 8 (bfloat16) bits of mantissa, and tokens are
# rounded twice, results once per rank.
TOLERANCE = {None: 1e-5, "float32": 1e-5, "float16": 3e-3, "bfloat16": 2.5e-2, "fp8": 0.2}


def near(got: mx.array, want: np.ndarray | mx.array, what: object, tolerance: float = 1e-5) -> None:
    got, want = np.array(got.astype(mx.float32)), np.array(want)
    assert got.shape == want.shape, f"{what} on rank {rank}: shape {got.shape}, expected {want.shape}"
    scale = max(1e-3, np.abs(want).max(initial=0))
    error = np.abs(got - want).max(initial=0) / scale
    assert error <= tolerance, f"{what} on rank {rank}: off by {error:.2e} of {scale:.2e}, more than {tolerance:.0e}"


@functools.cache
def switch_of(num_experts: int) -> SwitchGLU:
    mx.random.seed(num_experts)
    switch = SwitchGLU(HIDDEN, INNER, num_experts)
    mx.eval(switch.parameters())
    return switch


def weights_of(switch: SwitchGLU) -> tuple[np.ndarray, ...]:
    return tuple(np.array(switch[name].weight) for name in ("gate_proj", "up_proj", "down_proj"))


def tokens_of(owner: int, tokens: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng([owner, tokens, k])
    return random.standard_normal((tokens, HIDDEN)).astype(np.float32), random.random((tokens, k)).astype(np.float32)


def matrix(every: int) -> None:
    """All modes and everything else that the result must not depend on; of all combinations each ``every``-th."""
    cases = list(
        itertools.product(
            ("random", "one", "none", "empty"), (1, 2, 8), (8, 64), (1, 3, 64, 512), ("replicated", "sharded")
        )
    )
    inner = list(itertools.product(MODES, ("float32", "float16", "bfloat16")))
    for number, (kind, k, num_experts, tokens, placed) in enumerate(cases):
        selected = inner[number % every :: every]
        if not selected or (kind == "empty" and placed == "replicated"):
            continue
        owner = 0 if placed == "replicated" else rank
        count = tokens
        if placed == "sharded":
            count = 0 if kind == "empty" and rank == size - 1 else tokens // (rank + 1)
        x, scores = tokens_of(owner, count, k)
        indices = reference.routing(kind, count, k, num_experts, [owner, number])
        switch = switch_of(num_experts)
        y = reference.experts(x, indices, *weights_of(switch))
        arguments = mx.array(x), mx.array(indices.astype(np.uint32)), mx.array(scores)
        for mode, name in selected:
            what = (kind, k, num_experts, tokens, placed, mode, name)
            layer = layer_of(num_experts, mode, placed, name)
            near(layer(*arguments[:2]), y, what, TOLERANCE[name])
            near(layer(*arguments), reference.mixture(y, scores), (*what, "scores"), TOLERANCE[name])
            assert layer.dropped == 0 and layer.last_mode == mode
            shown = f"rank {rank} of {size}, experts={layer.placement.counts}, mode='{mode}'"
            assert repr(layer).startswith(f"ExpertParallelSwitchGLU({shown}")


@functools.cache
def layer_of(num_experts: int, mode: str, placed: str, name: str) -> ExpertParallelSwitchGLU:
    dtype = name if name == "fp8" else getattr(mx, name)
    return ExpertParallelSwitchGLU.from_switch(
        switch_of(num_experts), group=group, mode=mode, tokens=placed, exchange_dtype=dtype
    )


def thin() -> None:
    matrix(every=17)


def whole() -> None:
    matrix(every=1)


def my_share(placed: str, x: mx.array) -> mx.array:
    """All tokens, or this rank's of those that the ranks share: different numbers, none for the last of several."""
    if placed == "replicated":
        return x
    owners = np.arange(len(x)) ** 2 % max(1, size - 1)
    return x[mx.array(np.flatnonzero(owners == rank).astype(np.int32))]


def gradients() -> None:
    """Of tokens, scores, weights and biases, as of the dense layer on all tokens."""
    num_experts, tokens, k = 5, 11, 3
    mx.random.seed(1)
    for make in (glu_with_bias, mlp):
        switch = make(num_experts)
        x, scores, cotangent = normal(tokens, HIDDEN), normal(tokens, k), normal(tokens, HIDDEN)
        indices = mx.array(reference.routing("random", tokens, k, num_experts, [7]))

        def dense(parameters: dict, x: mx.array, scores: mx.array, switch: nn.Module = switch) -> mx.array:
            switch.update(parameters)
            return (mx.sin((switch(x, indices) * scores[..., None]).sum(-2)) * cotangent).sum()

        original = switch.parameters()
        want = mx.grad(dense, argnums=(0, 1, 2))(original, x, scores)
        switch.update(original)
        for mode, placed, weighted in itertools.product(MODES, ("replicated", "sharded"), (True, False)):
            what = (make.__name__, mode, placed, "scores" if weighted else "no scores")
            layer = ExpertParallelSwitchGLU.from_switch(switch, group=group, mode=mode, tokens=placed)
            mine = my_share(placed, indices)

            def loss(parameters: dict, x: mx.array, scores: mx.array) -> mx.array:
                layer.update(parameters)
                y = layer(x, mine, scores) if weighted else (layer(x, mine) * scores[..., None]).sum(-2)
                return (mx.sin(y) * my_share(placed, cotangent)).sum()

            own = layer.parameters()
            got = mx.grad(loss, argnums=(0, 1, 2))(own, my_share(placed, x), my_share(placed, scores))
            mx.eval(got)
            layer.update(own)
            near(got[1], my_share(placed, want[1]), (*what, "x"))
            near(got[2], my_share(placed, want[2]), (*what, "scores"))
            local = layer.placement.local(rank)
            for (name, gradient), (_, whole) in zip(tree_flatten(got[0]), tree_flatten(want[0])):
                near(gradient, whole[local.start : local.stop], (*what, name))


def normal(*shape: int) -> mx.array:
    return mx.random.normal(shape)


def glu_with_bias(num_experts: int, hidden: int = HIDDEN, inner: int = INNER) -> SwitchGLU:
    switch = SwitchGLU(hidden, inner, num_experts, bias=True)
    for name in ("gate_proj", "up_proj", "down_proj"):
        switch[name].bias = normal(*switch[name].bias.shape)
    mx.eval(switch.parameters())
    return switch


def mlp(num_experts: int, hidden: int = HIDDEN, inner: int = INNER) -> SwitchMLP:
    switch = SwitchMLP(hidden, inner, num_experts, bias=True)
    switch.fc2.bias = normal(*switch.fc2.bias.shape)
    mx.eval(switch.parameters())
    return switch


def capacities() -> None:
    """What is dropped is what the reference drops, in number and in effect."""
    num_experts, k = 8, 2
    switch = switch_of(num_experts)
    cases = itertools.product((0.5, 1.0, 8.0), ("random", "one"), ("replicated", "sharded"), MODES)
    for factor, kind, placed, mode in cases:
        counts = [12] * size if placed == "replicated" else [5 + 7 * r for r in range(size)]
        owners = [0] * size if placed == "replicated" else list(range(size))
        routed = [reference.routing(kind, n, k, num_experts, [owner, 3]) for n, owner in zip(counts, owners)]
        kept = [reference.limited(indices, num_experts, factor) for indices in routed]
        x, scores = tokens_of(owners[rank], counts[rank], k)
        layer = ExpertParallelSwitchGLU.from_switch(
            switch, group=group, mode=mode, tokens=placed, capacity_factor=factor
        )
        want = reference.mixture(reference.experts(x, kept[rank], *weights_of(switch)), scores)
        what = ("capacity", factor, kind, placed, mode)
        near(layer(mx.array(x), mx.array(routed[rank]), mx.array(scores)), want, what)
        dropped = sum(int((one < 0).sum()) for one in (kept[:1] if placed == "replicated" else kept))
        assert layer.dropped == dropped, f"{what} on rank {rank}: {layer.dropped} dropped, expected {dropped}"
        layer(mx.array(x), mx.array(routed[rank]))
        assert layer.dropped_total == 2 * dropped
        if factor == 1.0 and kind == "random" and placed == "replicated" and mode == "replicated":
            near(mx.compile(layer)(mx.array(x), mx.array(routed[rank]), mx.array(scores)), want, (*what, "compiled"))
            assert layer.dropped is None


def quantized() -> None:
    """All of MLX's forms, with and without biases of the layers; float16 tokens too."""
    forms = [("affine", 64, 4), ("affine", 32, 3), ("affine", 32, 8)]
    forms += [("mxfp4", 32, 4), ("nvfp4", 16, 4), ("mxfp8", 32, 8)]
    mx.random.seed(2)
    x, indices, scores = normal(2, 5, 64), mx.random.randint(0, 5, (2, 5, 2)), mx.random.uniform(shape=(2, 5, 2))
    for number, ((kind, group_size, bits), make) in enumerate(itertools.product(forms, (glu_with_bias, mlp))):
        switch = make(5, 64, 128)
        nn.quantize(switch, group_size, bits, mode=kind)
        mode = MODES[number % 3]
        layer = ExpertParallelSwitchGLU.from_switch(switch, group=group, mode=mode)
        want = switch(x, indices)
        near(layer(x, indices), want, (kind, bits, mode))
        near(layer(x, indices, scores), (want * scores[..., None]).sum(-2), (kind, bits, mode, "scores"))
        half = layer(x.astype(mx.float16), indices)
        assert half.dtype == switch(x.astype(mx.float16), indices).dtype
        near(half, want, (kind, bits, mode, "float16"), 1e-2)
        assert not layer.trainable_parameters().get("fc1", {}).get("weight"), "quantized weights stay frozen"
        back = layer.to_switch()
        for (name, array), (_, original) in zip(tree_flatten(back.parameters()), tree_flatten(switch.parameters())):
            assert mx.array_equal(array.view(mx.uint8), original.view(mx.uint8)), f"{kind} {bits}: {name}"


def adapters() -> None:
    """LoRA on plain and on quantized experts."""
    mx.random.seed(12)
    x, indices = normal(9, 64), mx.random.randint(0, 5, (9, 2))
    for bits, mode in itertools.product((None, 4), MODES):
        switch = glu_with_bias(5, 64, 128)
        if bits:
            nn.quantize(switch, 32, bits)
        for name in ("gate_proj", "up_proj", "down_proj"):
            switch[name] = LoRASwitchLinear.from_base(switch[name], r=4)
            switch[name].lora_b = normal(*switch[name].lora_b.shape)
        layer = ExpertParallelSwitchGLU.from_switch(switch, group=group, mode=mode)
        near(layer(x, indices), switch(x, indices), ("LoRA", bits, mode))
        near(layer.to_switch()(x, indices), switch(x, indices), ("LoRA, joined", bits, mode))


def new_adapters() -> None:
    """LoRA of mlx-lm put on the experts that a rank holds is its shard of that on all of them."""
    for bits in (None, 4):
        switch = glu_with_bias(2 * size + 1, 64, 128)
        if bits:
            nn.quantize(switch, 32, bits)
        layer = ExpertParallelSwitchGLU.from_switch(switch, group=group)
        mine = layer.placement.local(rank)
        for name in ("gate_proj", "up_proj", "down_proj"):
            mx.random.seed(8)
            expected = LoRASwitchLinear.from_base(switch[name], r=4)
            mx.random.seed(8)
            adapter = layer[name].to_lora(r=4)
            assert type(adapter) is LoRASwitchLinear and adapter.linear is layer[name]
            for matrix in ("lora_a", "lora_b"):
                assert mx.array_equal(adapter[matrix], expected[matrix][mine.start : mine.stop]), (bits, name, matrix)
        back = layer.to_switch()
        assert all(type(back[name]) is type(switch[name]) for name in ("gate_proj", "up_proj", "down_proj"))


def memory() -> None:
    """A rank holds its experts and no others; to_switch() gives all of them again; placement by weights."""
    num_experts = 4 * size + 1
    mx.random.seed(3)
    switch = glu_with_bias(num_experts, 64, 64)
    whole = tree_flatten(switch.parameters())
    for weights in (None, [3] + [1] * (size - 1)):
        layer = ExpertParallelSwitchGLU.from_switch(switch, group=group, rank_shares=weights)
        count, first = layer.placement.counts[rank], layer.placement.local(rank).start
        assert sum(layer.placement.counts) == num_experts and first == sum(layer.placement.counts[:rank])
        for (name, array), (path, original) in zip(tree_flatten(layer.parameters()), whole):
            assert name == path and array.nbytes * num_experts == original.nbytes * count
            assert mx.array_equal(array, original[first : first + count])
        # The longest strides are those of the experts; the others are swapped, which shapes do not show.
        weight = layer.gate_proj.weight
        assert memoryview(weight).strides[1] == 4 and weight.shape == (count, 64, 64)
        with tempfile.TemporaryDirectory() as directory:
            layer.save_weights(f"{directory}/layer.safetensors")
            saved = mx.load(f"{directory}/layer.safetensors")
            assert all(mx.array_equal(saved[name], array) for name, array in tree_flatten(layer.parameters()))
            mx.eval(saved)
        copied = copy.deepcopy(layer)
        copied.gate_proj.weight = copied.gate_proj.weight * 0
        x, indices = mx.ones((3, 64)), mx.array([[0, 1], [1, 2], [num_experts - 1, 0]])
        assert mx.allclose(layer(x, indices), switch(x, indices), atol=1e-4)
        assert not mx.allclose(copied(x, indices), switch(x, indices), atol=1e-4)
        back = layer.to_switch()
        assert type(back) is type(switch)
        assert all(mx.array_equal(a, b) for (_, a), (_, b) in zip(tree_flatten(back.parameters()), whole))
    # What is sharded out is a copy: the original can go.
    total = sum(array.nbytes for _, array in whole)
    layer = ExpertParallelSwitchGLU.from_switch(switch, group=group)
    mx.eval(layer.parameters())
    own = sum(array.nbytes for _, array in tree_flatten(layer.parameters()))
    before = mx.get_active_memory()
    del switch, whole, back, array, original
    freed = before - mx.get_active_memory()
    assert size == 1 or freed >= total, f"{freed} bytes freed of {total}, {own} are this rank's"


def compiled() -> None:
    """Without the host: fixed shapes, the same result, NaN for what is no expert; dispatch says that it cannot."""
    mx.random.seed(5)
    switch = switch_of(8)
    x, indices, scores = normal(6, HIDDEN), mx.random.randint(0, 8, (6, 2)), mx.random.uniform(shape=(6, 2))
    want = switch(x, indices)
    weighted = (want * scores[..., None]).sum(-2)
    for mode, placed in itertools.product(("auto", "replicated", "gather"), ("replicated", "sharded")):
        layer = ExpertParallelSwitchGLU.from_switch(switch, group=group, mode=mode, tokens=placed)
        near(mx.compile(layer)(x, indices, scores), weighted, ("compiled", mode, placed))
        near(mx.compile(lambda x, i, layer=layer: layer(x, i))(x, indices), want, ("compiled", mode, placed))
        gradient = mx.compile(mx.grad(lambda x, layer=layer: mx.sin(layer(x, indices, scores)).sum()))
        dense = mx.grad(lambda x: mx.sin((switch(x, indices) * scores[..., None]).sum(-2)).sum())(x)
        near(gradient(x), dense, ("compiled gradient", mode, placed))
        layer.host_sync = False
        near(layer(x, indices, scores), weighted, ("host_sync=False", mode, placed))
        bad = layer(x, mx.where(mx.arange(6)[:, None] == 4, 8, indices))
        assert mx.isnan(bad[4]).all() and not mx.isnan(bad[:4]).any()
        wrong = layer(x, mx.where(mx.arange(6)[:, None] == 4, -1, indices))
        assert mx.isnan(wrong[4]).all() and not mx.isnan(wrong[:4]).any()
    # Enough pairs to be sorted, and one token.
    for tokens, placed in itertools.product((40, 1), ("replicated", "sharded")):
        layer = ExpertParallelSwitchGLU.from_switch(switch, group=group, tokens=placed, host_sync=False)
        x, indices, scores = normal(tokens, HIDDEN), mx.random.randint(0, 8, (tokens, 2)), normal(tokens, 2)
        near(layer(x, indices, scores), (switch(x, indices) * scores[..., None]).sum(-2), ("unsynced", tokens, placed))
        near(layer(x, indices), switch(x, indices), ("unsynced", tokens, placed))
    layer = ExpertParallelSwitchGLU.from_switch(switch, group=group, mode="dispatch")
    refused("needs the indices on the host", lambda: mx.compile(layer)(x, indices))


def refused(words: str, call: Callable[[], object]) -> str:
    try:
        mx.eval(call())
    except mlxdist.Mismatch if "disagree" in words else mlxdist.InvalidArgument as error:
        assert words in str(error), f"{error}, expected {words!r}"
        return str(error)
    raise AssertionError(f"no error: {words}")


def wide() -> None:
    """Tokens of 16 bits through float32 experts of the CPU backend, and in 8 bits on the wire."""
    mx.random.seed(6)
    switch = switch_of(8)
    for mode, placed, dtype in itertools.product(MODES, ("replicated", "sharded"), (mx.float16, mx.bfloat16)):
        owner = rank if placed == "sharded" else 0
        x, scores = (mx.array(array) for array in tokens_of(owner, 9 - owner, 2))
        indices = mx.array(reference.routing("random", len(x), 2, 8, [owner]))
        want = (switch(x, indices) * scores[..., None]).sum(-2)
        half = SwitchGLU(HIDDEN, INNER, 8)
        half.update(tree_unflatten([(name, array.astype(dtype)) for name, array in tree_flatten(switch.parameters())]))
        layer = ExpertParallelSwitchGLU.from_switch(half, group=group, mode=mode, tokens=placed)
        y = layer(x.astype(dtype), indices, scores)
        assert y.dtype == dtype
        near(y, want, (mode, placed, dtype), 6e-3 if dtype == mx.float16 else 4e-2)
        assert layer(x.astype(dtype), indices).dtype == dtype
        near(layer_of(8, mode, placed, "fp8")(x, indices, scores), want, (mode, placed, "fp8"), TOLERANCE["fp8"])


def blocks() -> None:
    """mlx-lm's own blocks with their switch layer replaced: the same output, as they are and in 4 bits."""
    from mlx_lm.models import deepseek_v3, gpt_oss, mixtral, qwen2_moe, qwen3_moe

    common = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    common |= {"num_key_value_heads": 1, "vocab_size": 32, "rms_norm_eps": 1e-5, "rope_theta": 1e4}
    sparse = {"moe_intermediate_size": 64, "num_experts": 6, "num_experts_per_tok": 2, "decoder_sparse_step": 1}
    qwen = qwen3_moe.ModelArgs(
        model_type="qwen3_moe", **common, **sparse, mlp_only_layers=[], head_dim=32, tie_word_embeddings=False,
        max_position_embeddings=64, norm_topk_prob=True,
    )  # fmt: skip
    qwen2 = qwen2_moe.ModelArgs(
        model_type="qwen2_moe", **common, num_experts_per_tok=2, num_experts=6, moe_intermediate_size=64,
        shared_expert_intermediate_size=96,
    )  # fmt: skip
    deepseek = deepseek_v3.ModelArgs(
        hidden_size=64, moe_intermediate_size=64, n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=3,
        n_group=2, topk_group=1,
    )  # fmt: skip
    oss = gpt_oss.ModelArgs(num_local_experts=5, num_experts_per_tok=2, hidden_size=64, intermediate_size=64)
    made = {
        "Qwen3-MoE": (qwen3_moe.Qwen3MoeSparseMoeBlock(qwen), "switch_mlp"),
        "Qwen2-MoE": (qwen2_moe.Qwen2MoeSparseMoeBlock(qwen2), "switch_mlp"),
        "Mixtral": (
            mixtral.MixtralSparseMoeBlock(
                mixtral.ModelArgs(model_type="mixtral", **common, num_local_experts=4, num_experts_per_tok=2)
            ),
            "switch_mlp",
        ),
        "DeepSeek-V3": (deepseek_v3.DeepseekV3MoE(deepseek), "switch_mlp"),
        "GPT-OSS": (gpt_oss.MLPBlock(oss), "experts"),
    }
    mx.random.seed(8)
    x = normal(2, 7, 64)
    for name, (block, switch_name) in made.items():
        block.update(tree_unflatten([(path, 0.3 * normal(*a.shape)) for path, a in tree_flatten(block.parameters())]))
        for bits in (None, 4):
            if bits:
                nn.quantize(block, 32, bits)
            mx.eval(block.parameters())
            switch, want = block[switch_name], block(x)
            for mode in (*MODES, "auto"):
                block[switch_name] = ExpertParallelSwitchGLU.from_switch(switch, group=group, mode=mode)
                near(block(x), want, (name, bits, mode))
                block[switch_name] = switch


def handles() -> None:
    """One routing for several arrays, -1 for no expert, combine as the adjoint of dispatch."""
    placement = Placement(7, size) if size <= 7 else None
    mx.random.seed(10 + rank)
    tokens, k = [4, 0, 9, 1][rank % 4], 3
    x, z, scores = normal(tokens, 5), normal(tokens, 2), mx.random.uniform(shape=(tokens, k))
    indices = mx.random.randint(-1, 7, (tokens, k))
    factor = mx.where(indices < 0, 0, indices + 1)[..., None].astype(mx.float32)

    def numbered(received: mx.array, experts: mx.array) -> mx.array:
        return received * (experts + placement.local(rank).start + 1)[:, None]

    received, experts, handle = dispatch(x, indices, placement, group=group)
    assert mx.array_equal(experts, mx.sort(experts)) and received.shape == (len(experts), 5)
    near(combine(numbered(received, experts), handle), x[:, None] * factor, "pairs")
    near(combine(numbered(received, experts), handle, scores), (x[:, None] * factor * scores[..., None]).sum(1), "sums")
    again, same, _ = dispatch(z, handle=handle)
    assert mx.array_equal(same, experts)
    near(combine(numbered(again, same), handle), z[:, None] * factor, "the handle again")
    # <dispatch(x), y> = <x, combine(y)> for scores of 1 where there is an expert.
    y = normal(*received.shape)
    there = mlxdist.all_sum((received * y).sum(), group=group)
    here = mlxdist.all_sum((x * combine(y, handle, mx.ones((tokens, k)))).sum(), group=group)
    near(there, here, "adjoint", 1e-4)
    adjoint = mx.grad(lambda x: (dispatch(x, handle=handle)[0] * y).sum())(x)
    near(adjoint, combine(y, handle, mx.ones((tokens, k))), "the gradient of dispatch is combine")
    assert "DispatchHandle of" in repr(handle)
    for given, words in (
        ({"indices": indices}, "the handle has indices of its own"),
        ({"placement": placement}, "the handle has placement of its own"),
        ({"group": group}, "the handle has group of its own"),
        ({"indices": indices, "placement": placement}, "the handle has indices and placement of its own"),
    ):
        refused(words, lambda given=given: dispatch(z, handle=handle, **given)[0])
    refused(f"the handle is of {tokens} tokens", lambda: dispatch(normal(tokens + 1, 2), handle=handle)[0])


def bad_input() -> None:
    """One rank's mistake is the same error on all ranks, and the group works on."""
    switch, last = switch_of(8), size - 1
    x, indices = mx.ones((3, HIDDEN)), mx.zeros((3, 2), mx.int32)
    cases = [
        ("indices are from 0 to 8, but the experts are 0 to 7", (x, indices + 8 * (mx.arange(2) == 1))),
        ("indices are from -1 to -1", (x, indices - 1)),
        ("indices must be integers of shape (3, 'k')", (x, indices.astype(mx.float32))),
        ("indices must be integers of shape (3, 'k')", (x, indices[:2])),
        ("no experts per token", (x, indices[:, :0])),
        ("x must be floats of shape (..., 32), not float32 of shape (3, 31)", (x[:, 1:], indices)),
        ("not int32 of shape (3, 32)", (x.astype(mx.int32), indices)),
        ("must be mx.array, not ndarray", (np.ones((3, HIDDEN)), indices)),
        ("scores must have the shape of indices, (3, 2), not (3, 1)", (x, indices, mx.ones((3, 1)))),
    ]
    disagreements = [
        ("the ranks disagree about the hidden size and dtype of x", (x.astype(mx.float16), indices)),
        ("the ranks disagree about the experts per token: 2 on rank 0, 1 on rank", (x, indices[:, :1])),
        ("the ranks disagree about the scores", (x, indices, mx.ones((3, 2)))),
    ]
    for mode, placed in itertools.product(MODES, ("replicated", "sharded")):
        layer = ExpertParallelSwitchGLU.from_switch(switch, group=group, mode=mode, tokens=placed)
        others = (x, indices)
        own = [("the ranks disagree about the number of tokens", (x[:2], indices[:2]))]
        own += [("the ranks disagree about the experts of the tokens", (x, indices + 1))]
        for words, arguments in [*cases, *disagreements, *(own if placed == "replicated" else [])]:
            if size == 1 and "disagree" in words:
                continue
            text = refused(words, lambda: layer(*(arguments if rank == last else others)))
            assert same_text(text), f"rank {rank} says {text}"
            assert "disagree" in words or f"[rank {last} on " in text, text
        mx.eval(layer(x, indices))
    if size > 1:
        layer = ExpertParallelSwitchGLU.from_switch(
            switch, group=group, mode="gather" if rank == last else "replicated"
        )
        assert same_text(refused("the ranks disagree about the layer", lambda: layer(x, indices)))
        refused(
            "the placement is for", lambda: dispatch(x, indices, Placement(8, size + (rank == last)), group=group)[0]
        )
    for words, call in [
        ("is too little for", lambda: ExpertParallelSwitchGLU.from_switch(switch_of(size - 1), group=group)),
        ("expected mlx-lm's SwitchGLU", lambda: ExpertParallelSwitchGLU.from_switch(nn.Linear(2, 2), group=group)),
        ("mode is 'broadcast'", lambda: ExpertParallelSwitchGLU.from_switch(switch, group=group, mode="broadcast")),
        ("tokens is 'cut'", lambda: ExpertParallelSwitchGLU.from_switch(switch, group=group, tokens="cut")),
        (
            "capacity_factor must be",
            lambda: ExpertParallelSwitchGLU.from_switch(switch, group=group, capacity_factor=0),
        ),
        ("exchange_dtype is", lambda: ExpertParallelSwitchGLU.from_switch(switch, group=group, exchange_dtype=mx.int8)),
        (
            "rank_shares must be",
            lambda: ExpertParallelSwitchGLU.from_switch(switch, group=group, rank_shares=[1] * (size + 1)),
        ),
    ]:
        if size > 1 or "too little" not in words:
            refused(words, call)


def settings() -> None:
    """Options that are set later: checked, compared by the next call, or read-only."""
    switch, last = switch_of(8), size - 1
    x, indices = mx.ones((3, HIDDEN)), mx.zeros((3, 2), mx.int32)
    layer = ExpertParallelSwitchGLU.from_switch(switch, group=group, mode="gather")
    for name, value in (("mode", "dispach"), ("mode", None), ("host_sync", "no")):
        refused(f"{name} is {value!r}, not", lambda name=name, value=value: setattr(layer, name, value))
    for name, value in (
        ("tokens", "sharded"), ("capacity_factor", 1.0), ("exchange_dtype", mx.float16), ("tokens", [1]),
        ("capacity_factor", mx.array(1.0)),
    ):  # fmt: skip
        try:
            setattr(layer, name, value)
        except AttributeError:
            continue
        raise AssertionError(f"{name} is {value!r}")
    for mode in ("replicated", "dispatch", "auto", "gather"):
        layer.mode = mode
        near(layer(x, indices), switch(x, indices), mode)
        assert mode == "auto" or layer.last_mode == mode
    assert layer.tokens == "replicated" and layer.capacity_factor is layer.exchange_dtype is None and layer.host_sync
    layer.host_sync = False
    near(layer(x, indices), switch(x, indices), "host_sync=False")
    if size > 1:
        layer.mode = "replicated" if rank == last else "gather"
        assert same_text(refused("the ranks disagree about the layer", lambda: layer(x, indices)))
        layer.mode, layer.host_sync = "gather", True
        near(layer(x, indices), switch(x, indices), "alike again")


def same_text(text: str) -> bool:
    """Whether all ranks have the same."""
    codes = np.frombuffer(text.encode().ljust(1024)[:1024], np.uint8).copy()
    return bool((mlxdist.all_max(codes, group=group) == mlxdist.all_min(codes, group=group)).all())


run_scenarios(globals())
