"""One rank of test_parallel_attention.py. Arguments: scenarios.

Every rank makes the full layer from the same seed, and its reference: the plain formula, on this process alone.
"""

from functools import partial
from typing import NamedTuple

import comparing
import mlx.core as mx
from comparing import equal, refused
from mlx import nn
from mlx.utils import tree_flatten
from scenarios import group, rank, run_scenarios, size

from mlxdist.nn.tensor_parallel.lora import LoRALinear
from mlxdist.nn.tensor_parallel.parallel_attention import ParallelAttention

close = partial(comparing.close, rtol=1e-4)
QUANTIZED = [(32, bits, "affine") for bits in (2, 3, 4, 5, 6, 8)]
QUANTIZED += [(32, 4, "mxfp4"), (16, 4, "nvfp4"), (32, 8, "mxfp8")]


class Dense(nn.Module):
    """Attention of the shape of mlx-lm's Llama and Qwen3, with nothing fused."""

    def __init__(self, dims: int, n_heads: int, n_kv_heads: int, head_dim: int, bias: bool, norm: bool, rope: bool):
        super().__init__()
        self.n_heads, self.n_kv_heads, self.scale = n_heads, n_kv_heads, head_dim**-0.5
        self.q_proj = nn.Linear(dims, n_heads * head_dim, bias)
        self.k_proj = nn.Linear(dims, n_kv_heads * head_dim, bias)
        self.v_proj = nn.Linear(dims, n_kv_heads * head_dim, bias)
        self.o_proj = nn.Linear(n_heads * head_dim, dims, bias)
        self.rope = nn.RoPE(head_dim) if rope else None
        if norm:
            self.q_norm, self.k_norm = nn.RMSNorm(head_dim), nn.RMSNorm(head_dim)
            self.q_norm.weight, self.k_norm.weight = mx.random.normal((2, head_dim))

    def __call__(self, x: mx.array, mask: mx.array | str | None = None, cache: object = None) -> mx.array:
        batch, length, _ = x.shape
        q = self.q_proj(x).reshape(batch, length, self.n_heads, -1)
        k = self.k_proj(x).reshape(batch, length, self.n_kv_heads, -1)
        v = self.v_proj(x).reshape(batch, length, self.n_kv_heads, -1).swapaxes(1, 2)
        if "q_norm" in self:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = q.swapaxes(1, 2), k.swapaxes(1, 2)
        if self.rope is not None:
            offset = 0 if cache is None else cache.offset
            q, k = self.rope(q, offset=offset), self.rope(k, offset=offset)
        if cache is not None:
            k, v = cache.update_and_fetch(k, v)
        each = self.n_heads // self.n_kv_heads
        scores = q @ mx.repeat(k, each, axis=1).swapaxes(-1, -2) * self.scale
        if isinstance(mask, str):
            mask = mx.tril(mx.ones(scores.shape[-2:]), scores.shape[-1] - scores.shape[-2]) == 1
        if mask is not None:
            scores = mx.where(mask, scores, -mx.inf) if mask.dtype == mx.bool_ else scores + mask
        y = mx.softmax(scores, axis=-1) @ mx.repeat(v, each, axis=1)
        return self.o_proj(y.swapaxes(1, 2).reshape(batch, length, -1))


class Cache:
    """What a cache of mlx-lm does."""

    def __init__(self) -> None:
        self.offset, self.kept = 0, None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self.kept is not None:
            keys, values = (mx.concatenate(pair, axis=2) for pair in zip(self.kept, (keys, values)))
        self.kept, self.offset = (keys, values), keys.shape[2]
        return self.kept


class Case(NamedTuple):
    n_heads: int
    n_kv_heads: int
    weights: list[int] | None = None
    head_dim: int = 8
    bias: bool = False
    norm: bool = False
    rope: bool = True

    def dense(self, dims: int = 12) -> Dense:
        return Dense(dims, self.n_heads, self.n_kv_heads, self.head_dim, self.bias, self.norm, self.rope)


UNEVEN = [r + 1 for r in range(size)]
CASES = [
    Case(2 * size, 2 * size, bias=True),
    Case(4 * size, 2 * size, norm=True),
    Case(3 * size, size, bias=True, norm=True, rope=False),
    Case(2 * size, 1, norm=True, bias=True),  # one KV head for all ranks
    Case(2 * sum(UNEVEN), sum(UNEVEN), UNEVEN, norm=True),  # whole KV groups, in proportion to weights
    Case(3 * size, 1, UNEVEN, bias=True),
]
if size == 3:
    CASES.append(Case(6, 2, norm=True, bias=True))  # the rank in the middle has query heads of both KV heads
if size == 4:
    CASES.append(Case(12, 2, [1, 2, 2, 1], norm=True, bias=True))


def mine(path: str, value: mx.array, layer: ParallelAttention) -> mx.array:
    """This rank's shard of a parameter of the full layer, or of its gradient."""
    heads, kv = layer.heads, layer.kv_heads[rank]
    q = slice(sum(heads[:rank]) * layer.head_dim, sum(heads[: rank + 1]) * layer.head_dim)
    if path.startswith("q_proj"):
        return value[q]
    if path.startswith(("k_proj", "v_proj")):
        return value[kv.start * layer.head_dim : kv.stop * layer.head_dim]
    return value[:, q] if path == "o_proj.weight" else value


def gradients(layer: nn.Module, loss: object, *arguments: mx.array) -> tuple[mx.array, dict, mx.array]:
    def of(parameters: dict, *arguments: mx.array) -> mx.array:
        layer.update(parameters)
        return loss(layer, *arguments)

    value, (by_parameters, by_x) = mx.value_and_grad(of, (0, 1))(layer.trainable_parameters(), *arguments)
    return value, dict(tree_flatten(by_parameters)), by_x


def dense() -> None:
    """Values and all gradients, with every kind of mask."""
    mx.random.seed(1)
    for number, case in enumerate(CASES):
        whole = case.dense()
        layer = ParallelAttention.from_attention(whole, rank_shares=case.weights)
        assert (layer.n_heads, layer.n_kv_heads) == (layer.heads[rank], len(layer.kv_heads[rank]))
        assert sum(layer.heads) == case.n_heads and layer.head_dim == case.head_dim
        length = 5
        x, scale = mx.random.normal((2, length, 12)), mx.random.normal((2, length, 12))
        causal = mx.tril(mx.ones((length, length))) == 1
        per_head = mx.random.normal((case.n_heads, length, length))  # as in ALiBi
        for mask in (None, "causal", causal, causal[None, None], per_head, per_head[None]):
            close(layer(x, mask), whole(x, mask), f"{case} {mask}")

        def loss(layer: nn.Module, x: mx.array, mask: mx.array | str = (causal, "causal")[number % 2]) -> mx.array:
            return (mx.sin(layer(x, mask)) * scale).sum()

        value, expected, by_x = gradients(whole, loss, x)
        found, by_parameters, by_mine = gradients(layer, loss, x)
        close(found, value, f"loss of {case}")
        close(by_mine, by_x, f"gradient of x, {case}")
        assert by_parameters.keys() == expected.keys()
        for path, gradient in expected.items():
            close(by_parameters[path], mine(path, gradient, layer), f"gradient of {path}, {case}")
        back = layer.to_attention(case.dense())
        for path, parameter in tree_flatten(whole.parameters()):
            equal(dict(tree_flatten(back.parameters()))[path], parameter, f"{path} back again, {case}")


def sequence_parallel() -> None:
    mx.random.seed(2)
    for case in CASES:
        whole, length = case.dense(), 2 * size
        layer = ParallelAttention.from_attention(whole, rank_shares=case.weights, sequence_parallel=True)
        x, scale = mx.random.normal((2, length, 12)), mx.random.normal((2, length, 12))
        here = slice(2 * rank, 2 * rank + 2)

        def loss(layer: nn.Module, x: mx.array, scale: mx.array) -> mx.array:
            return (mx.sin(layer(x, "causal")) * scale).sum()

        _, expected, by_x = gradients(whole, loss, x, scale)
        close(layer(x[:, here], "causal"), whole(x, "causal")[:, here], f"sequence parallel {case}")
        _, by_parameters, by_mine = gradients(layer, loss, x[:, here], scale[:, here])
        close(by_mine, by_x[:, here], f"gradient of x, sequence parallel {case}")
        for path, gradient in expected.items():
            close(by_parameters[path], mine(path, gradient, layer), f"gradient of {path}, sequence parallel {case}")


def decoding() -> None:
    """With a cache: a prompt, then token after token; one all_sum each."""
    mx.random.seed(3)
    for case in CASES:
        whole = case.dense()
        layer = ParallelAttention.from_attention(whole, rank_shares=case.weights)
        cache, reference = Cache(), Cache()
        for length in (4, 1, 1, 3):
            x = mx.random.normal((2, length, 12))
            expected = whole(x, "causal", reference)
            before = group.stats()["collectives"]
            y = layer(x, "causal", cache)
            mx.eval(y)
            assert group.stats()["collectives"] - before == (size > 1)
            close(y, expected, f"decoding {case}")
        assert cache.kept[0].shape[1] == layer.n_kv_heads
    before = group.stats()["collectives"]
    layer = ParallelAttention.from_attention(CASES[0].dense())
    mx.eval(mx.value_and_grad(lambda x: layer(x).sum())(x))
    assert group.stats()["collectives"] - before == (2 if size > 1 else 0) + (size > 1), "one to agree, two all_sums"


def quantized() -> None:
    mx.random.seed(4)
    for number, (group_size, bits, mode) in enumerate(QUANTIZED):
        shape = [(2 * size, 2 * size), (2 * size, 1), (4 * size, size)][number % 3]
        case = Case(*shape, head_dim=32, bias=number % 2 == 0)
        whole = case.dense(64)
        nn.quantize(whole, group_size, bits, mode=mode)
        layer = ParallelAttention.from_attention(whole)
        x = mx.random.normal((1, 3, 64))
        close(layer(x, "causal"), whole(x, "causal"), f"quantized {group_size} {bits} {mode}, {case}")
        _, expected, by_x = gradients(whole, lambda layer, x: mx.sin(layer(x)).sum(), x)
        _, by_parameters, by_mine = gradients(layer, lambda layer, x: mx.sin(layer(x)).sum(), x)
        close(by_mine, by_x, f"gradient of x, {bits} {mode}")
        assert by_parameters.keys() == expected.keys()
        for path, gradient in expected.items():  # the biases: MLX does not freeze these
            close(by_parameters[path], mine(path, gradient, layer), f"gradient of {path}, {bits} {mode}")
        back = dict(tree_flatten(layer.to_attention(case.dense(64)).parameters()))
        for path, parameter in tree_flatten(whole.parameters()):
            equal(back[path], parameter, f"{path} back again, {bits} {mode}")
    # Heads of 16 features in groups of 32: every rank holds pairs of heads.
    whole = Case(2 * size, 2 * size, head_dim=16).dense(64)
    nn.quantize(whole, 32, 4)
    assert ParallelAttention.from_attention(whole).heads == [2] * size


def adapters() -> None:
    mx.random.seed(5)
    case = Case(4 * size, 2 * size)
    whole = case.dense()
    layer = ParallelAttention.from_attention(whole)
    x = mx.random.normal((2, 3, 12))
    expected, gradient = whole(x), mx.grad(lambda x: mx.sin(whole(x)).sum())(x)
    for name in ("q_proj", "v_proj", "o_proj"):
        setattr(layer, name, LoRALinear.from_base(layer[name], r=2))
    close(layer(x), expected, "with adapters that change nothing yet")
    close(mx.grad(lambda x: mx.sin(layer(x)).sum())(x), gradient, "gradient of x with adapters")


def constructor() -> None:
    mx.random.seed(6)
    layer = ParallelAttention(12, 4 * size, size, 8, rope=nn.RoPE(8), q_norm=nn.RMSNorm(8), k_norm=nn.RMSNorm(8))
    whole = layer.to_attention(Case(4 * size, size, norm=True).dense())
    x = mx.random.normal((2, 3, 12))
    close(layer(x, "causal"), whole(x, "causal"), "a layer of one's own")
    half = ParallelAttention(12 * size, 3 * size)
    assert half.head_dim == 4 and half.n_kv_heads == 3


def bad_input() -> None:
    mx.random.seed(9)
    odd = size - 1  # the only rank whose argument is wrong
    whole = Case(2 * size, 2 * size).dense()
    other = Case(2 * size, 2 * size, norm=True).dense()
    other.q_norm = nn.RMSNorm(16 * size)
    extra = Case(2 * size, 2 * size).dense()
    extra.sinks = mx.zeros((2 * size,))
    wrong_heads = Case(2 * size, 2 * size).dense()
    wrong_heads.n_kv_heads = 1
    for words, wrong in [
        ("has no q_proj", nn.Linear(3, 3)),
        ("has other parameters, too: sinks", extra),
        ("a norm over more than a head", other),
        ("k_proj and v_proj must have 8 outputs", wrong_heads),
    ]:
        for given in (wrong, wrong if rank == odd else whole):
            refused(words, lambda given=given: ParallelAttention.from_attention(given))
    for words, arguments in [
        ("are not a multiple of", (12, 5 * size, 2 * size)),
        ("n_heads must be a positive integer", (12, 0)),
        ("give head_dim", (12 * size + 1, 2 * size)),
    ]:
        refused(words, lambda arguments=arguments: ParallelAttention(*arguments))
    refused("rank_shares must be", lambda: ParallelAttention(12, 2 * size, 2 * size, 8, rank_shares=[0] * size))
    if size > 1:
        refused("disagree about the arguments", lambda: ParallelAttention(12, 2 * size * (1 + (rank == odd)), 1, 8))
        refused("cannot be split into", lambda: ParallelAttention(12, 4 * size + 2, 2 * size + 1, 8))
    if size == 2:
        narrow = Case(2, 2, head_dim=16).dense(64)
        nn.quantize(narrow, 32, 4)
        refused("quantization groups of 32", lambda: ParallelAttention.from_attention(narrow))
    to = Case(4 * size, 2 * size).dense()
    layer = ParallelAttention.from_attention(whole)
    refused("heads and", lambda: layer.to_attention(to if rank == odd else whole))
    close(layer(mx.ones((1, 2, 12))), whole(mx.ones((1, 2, 12))), "the ranks are still in step")


def mlx_lm() -> None:
    """The attention and the MLP of Llama and Qwen3 themselves, with mlx-lm's caches."""
    from mlx_lm.models import llama, qwen3
    from mlx_lm.models.base import create_attention_mask
    from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache

    from mlxdist.nn.tensor_parallel.parallel_mlp import ParallelMLP

    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 32 * 2 * size, "vocab_size": 50}
    sizes |= {"rms_norm_eps": 1e-5, "num_attention_heads": 4 * size, "num_key_value_heads": 2 * size, "head_dim": 32}
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 32}
    models = [
        (llama, {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "rope_scaling": scaling}),
        (qwen3, {"model_type": "qwen3", "rope_theta": 1e4, "max_position_embeddings": 64, "tie_word_embeddings": True}),
        (qwen3, {"model_type": "qwen3", "rope_theta": 1e4, "max_position_embeddings": 64, "tie_word_embeddings": True}),
    ]
    mx.random.seed(7)
    for number, (module, options) in enumerate(models):
        args = module.ModelArgs(**sizes, **options)
        block = module.TransformerBlock(args)
        if number == 2:
            block.self_attn.n_kv_heads = 1  # fewer than ranks
            block.self_attn.k_proj, block.self_attn.v_proj = nn.Linear(64, 32), nn.Linear(64, 32)
        if number > 0:
            nn.quantize(block, 32, 4 + number)
        attention = ParallelAttention.from_attention(block.self_attn)
        mlp = ParallelMLP.from_mlp(block.mlp)
        for kind in (KVCache, lambda: RotatingKVCache(max_size=6), lambda: QuantizedKVCache(group_size=32, bits=8)):
            cache, reference = kind(), kind()
            for length in (5, 1, 1, 1):
                x = mx.random.normal((2, length, 64))
                mask = create_attention_mask(x, reference)
                close(attention(x, mask, cache), block.self_attn(x, mask, reference), f"{args.model_type} {kind}")
        close(mlp(x), block.mlp(x), f"MLP of {args.model_type}")
        again = module.TransformerBlock(args)
        again.self_attn.n_kv_heads = block.self_attn.n_kv_heads
        attention.to_attention(again.self_attn)
        mlp.to_mlp(again.mlp)
        for part in ("self_attn", "mlp"):
            back = dict(tree_flatten(again[part].parameters()))
            for path, parameter in tree_flatten(block[part].parameters()):
                equal(back[path], parameter, f"{path} of {args.model_type} back again")


run_scenarios(globals())
