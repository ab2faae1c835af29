"""One rank of test_split_block.py. Argument: the scenario.

Every rank makes the whole dense layer from the same seed, and compares its results with that.
"""

import math
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import generate_step
from mlx_lm.models import granite, llama, qwen3
from mlx_lm.models.cache import ArraysCache, BatchKVCache, KVCache, QuantizedKVCache, RotatingKVCache, trim_prompt_cache
from scenarios import group, rank, run_scenarios, size

import mlxdist
from mlxdist.nn.models.split_model import SplitModel
from mlxdist.nn.split_block.split_block import WINDOW, SplitBlock, table_of
from mlxdist.nn.split_block.submissions import submissions

# Of the largest element of a result: sums of a hundred products, added up in another order.
TOLERANCE = {mx.float32: 1e-5, mx.float16: 1e-2, mx.bfloat16: 6e-2}


def llama_layer(heads: int, kv_heads: int, inner: int, **more: object) -> nn.Module:
    return llama.TransformerBlock(llama_args(heads, kv_heads, inner, **more))


def llama_args(heads: int, kv_heads: int, inner: int, **more: object) -> llama.ModelArgs:
    given = {"num_hidden_layers": 1, "vocab_size": 53, "hidden_size": 48, "head_dim": 8} | more
    return llama.ModelArgs(
        model_type="llama", intermediate_size=inner, num_attention_heads=heads, num_key_value_heads=kv_heads,
        rms_norm_eps=1e-5, **given,
    )  # fmt: skip


def qwen3_layer(heads: int, kv_heads: int, inner: int) -> nn.Module:
    args = qwen3.ModelArgs(
        model_type="qwen3", hidden_size=40, num_hidden_layers=1, intermediate_size=inner, num_attention_heads=heads,
        rms_norm_eps=1e-6, vocab_size=53, num_key_value_heads=kv_heads, max_position_embeddings=512, head_dim=8,
        tie_word_embeddings=True, rope_theta=1e6,
    )  # fmt: skip
    return qwen3.TransformerBlock(args)


def randomized(module: nn.Module, dtype: mx.Dtype = mx.float32) -> nn.Module:
    """Norms and biases too, which otherwise begin as ones and zeros; and outputs that matter beside the residual."""
    mx.random.seed(7)
    module.apply(lambda x: mx.random.normal(x.shape) / (4 if x.ndim == 1 else x.shape[-1] ** 0.5))
    module.apply(lambda x: x.astype(dtype))
    return module


def quantized(module: nn.Module, **options: object) -> nn.Module:
    nn.quantize(module, **options)
    return module


def close(found: mx.array, wanted: mx.array, what: str, tolerance: float) -> None:
    assert found.shape == wanted.shape, f"{what} on rank {rank}: shape {found.shape}, not {wanted.shape}"
    assert found.dtype == wanted.dtype, f"{what} on rank {rank}: {found.dtype}, not {wanted.dtype}"
    error = (mx.abs(found.astype(mx.float32) - wanted.astype(mx.float32))).max().item()
    largest = mx.abs(wanted.astype(mx.float32)).max().item()
    assert error <= tolerance * largest, f"{what} on rank {rank}: off by {error} of {largest}"


def compare(name: str, layer: nn.Module, batch: int = 1, tokens: int = 5, steps: int = 3, **options: object) -> None:
    """Prefill, tokens one by one, a second prefill behind them, a trimmed cache, no cache: as the layer."""
    dtype = layer.input_layernorm.weight.dtype
    width = layer.input_layernorm.weight.size
    block = SplitBlock.from_layer(layer, group=group, **options)
    assert repr(block).startswith(f"SplitBlock(rank {rank} of {size}, heads={block._shape.heads}, kv_heads=")
    mine, dense = KVCache(), KVCache()

    def both(length: int, mask: str | mx.array | None, what: str, cached: bool = True) -> None:
        x = mx.random.normal((batch, length, width)).astype(dtype)
        found = block(x, mask, mine if cached else None)
        wanted = layer(x, mask, dense if cached else None)
        close(found, wanted, f"{name}, {what}", TOLERANCE[dtype])

    mx.random.seed(11)
    both(tokens, "causal", "prefill")
    for number in range(steps):
        both(1, None, f"token {number}")
    assert mine.trim(2) == dense.trim(2) == 2
    both(3, "causal", "more tokens in a trimmed cache")
    both(1, None, "a token behind them")
    both(2, mine.make_mask(2, return_array=True, window_size=None), "a mask as an array")
    both(4, "causal", "without a cache", cached=False)
    both(4, None, "without a cache or mask", cached=False)
    both(1, None, "one token without a cache", cached=False)
    assert mine.offset == dense.offset
    # One that another cache has made: its buffers are no longer than what is in them.
    for one in (mine, dense):
        one.keys, one.values = (mx.contiguous(part[:, :, : one.offset]) for part in (one.keys, one.values))
        assert one.trim(3) == 3
    both(1, None, "a token in a buffer that ends soon")


def caches() -> None:
    """Caches that are more than two buffers: mlx-lm's own code reads and writes them, between compiled shards."""
    n = math.lcm(size, 2)
    for name, make in (
        ("rotating", lambda: RotatingKVCache(max_size=6, keep=2)),
        ("quantized", lambda: QuantizedKVCache(group_size=32, bits=8)),
        ("batched", lambda: BatchKVCache([2, 0])),
    ):
        layer = randomized(llama_layer(2 * n, n, 12 * n, head_dim=32, attention_bias=True))
        block, mine, dense = SplitBlock.from_layer(layer, group=group, submit=True), make(), make()
        mx.random.seed(11)
        for length in (5, 1, 1, 3, 1):
            x = mx.random.normal((2, length, 48))
            mask = mine.make_mask(length, return_array=False, window_size=None)
            found = block(x, mask, mine)
            wanted = layer(x, dense.make_mask(length, return_array=False, window_size=None), dense)
            # The first row begins with padding. In a quantized cache a difference in the last bit can be a step.
            close(found[1:], wanted[1:], f"{name}, {length} tokens", 1e-2 if name == "quantized" else 1e-5)


def layers() -> None:
    n = math.lcm(size, 2)
    compare("llama", randomized(llama_layer(2 * n, n, 12 * n)), batch=2, steps=WINDOW + 4)
    compare("submitted at once", randomized(llama_layer(2 * n, n, 12 * n)), submit=True)
    compare("one KV head", randomized(llama_layer(2 * n, 1, 6 * n)))
    compare("qwen3", randomized(qwen3_layer(2 * n, n, 6 * n)), batch=3)
    if size > 1:
        weights = [2] + [1] * (size - 1)
        compare("weights", randomized(llama_layer(2 * (size + 1), size + 1, 7 * (size + 1))), rank_shares=weights)


def more_layers() -> None:
    n = math.lcm(size, 2)
    compare("not transposed", randomized(llama_layer(2 * n, n, 12 * n)), transposed=False)
    compare("biases", randomized(llama_layer(n, n, 6 * n, attention_bias=True, mlp_bias=True)))
    compare("odd sizes", randomized(llama_layer(3 * size, size, 5 * size, hidden_size=31, head_dim=6)))
    compare("traditional rope", randomized(llama_layer(n, n, 6 * n, rope_traditional=True)))
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    compare("llama3 rope", randomized(llama_layer(n, n, 6 * n, rope_scaling=scaling)), tokens=40)


def dtypes() -> None:
    for dtype in (mx.float16, mx.bfloat16):
        layer = randomized(llama_layer(2 * size, size, 8 * size, attention_bias=True), dtype)
        compare(str(dtype), layer, tokens=3, steps=2)


def quantized_layers() -> None:
    for bits, mode in ((4, "affine"), (3, "affine"), (8, "affine"), (4, "mxfp4")):
        made = randomized(llama_layer(4 * size, 4 * size, 64 * size, hidden_size=64))
        layer = quantized(made, bits=bits, group_size=32, mode=mode)
        compare(f"{bits} bits {mode}", layer, tokens=3, steps=2)
    mixed = randomized(llama_layer(8 * size, 4 * size, 64 * size, hidden_size=64, attention_bias=True))
    widths = {"v_proj": {"bits": 8, "group_size": 32}, "up_proj": False}
    nn.quantize(
        mixed,
        group_size=32,
        class_predicate=lambda path, module: (
            widths.get(path.split(".")[-1], True) if hasattr(module, "to_quantized") else False
        ),
    )
    compare("mixed widths", mixed, tokens=3, steps=2)


def counts() -> None:
    """Two submissions per layer, none without ``submit``; nothing traced from token to token."""
    layer = randomized(llama_layer(2 * size, size, 6 * size))
    for submit, wanted in ((True, 2), (False, 0)):
        block, cache = SplitBlock.from_layer(layer, group=group, submit=submit), KVCache()
        x = mx.random.normal((1, 1, 48), key=mx.random.key(1))
        mx.eval(block(x, None, cache))
        for _ in range(3):
            with submissions() as count:
                y = block(x, None, cache)
            assert count.submitted == wanted, count
            mx.eval(y)
    # Blocks of equal sizes share segments, so these were traced before; another buffer or batch is not.
    with submissions() as count:
        cache = KVCache()
        for _ in range(WINDOW):
            mx.eval(block(x, None, cache))
    assert (count.submitted, count.traces) == (WINDOW, 0), count
    with submissions() as count:
        for _ in range(4 * WINDOW):
            mx.eval(block(x, None, cache))
    assert count.traces == 4, count  # four times WINDOW more of the buffer are read
    with submissions() as outer:
        with submissions() as inner:
            mx.eval(x + 1)
        mx.async_eval(x + 2)
    assert (inner.submitted, outer.submitted) == (1, 2)


def in_place() -> None:
    """The KV cache is written where it is, not copied for each token."""
    block, cache = SplitBlock.from_layer(randomized(llama_layer(size, size, 6 * size)), group=group), KVCache()
    x = mx.ones((1, 1, 48))
    places = set()
    for _ in range(5):
        mx.eval(block(x, None, cache))
        mx.eval(cache.keys, cache.values)
        places.add((np.asarray(cache.keys).ctypes.data, np.asarray(cache.values).ctypes.data))
    assert len(places) == 1, places


def models() -> None:
    """mlx-lm's own generate: the same tokens as the full model; tied and untied, dense and quantized."""
    prompt = mx.array([5, 3, 8, 1, 9, 2])
    n = 2 * size
    shape = (n, n, 16 * n)
    for name, tied, bits in (("untied", False, None), ("tied", True, None), ("quantized", True, 4)):
        args = llama_args(*shape, num_hidden_layers=3, hidden_size=64, head_dim=16, tie_word_embeddings=tied)
        model = randomized(llama.Model(args))
        if bits:
            quantized(model, bits=bits, group_size=32)
        wanted = generated(prompt, model)
        logits = model(prompt[None])
        mx.eval(logits)
        whole = sum(x.nbytes for _, x in nn.utils.tree_flatten(model.parameters()))
        split = SplitModel.from_model(model, group=group)
        close(split(prompt[None]), logits, f"{name}: logits", 1e-5)
        found = generated(prompt, split)
        assert found == wanted, f"{name}: {found}, not {wanted}"
        assert len({id(table_of(block)) for block in split.layers}) == 1
        mine = sum(x.nbytes for _, x in nn.utils.tree_flatten(split.parameters()))
        assert size == 1 or mine < whole, (mine, whole)
    # A cache that is kept between prompts, and cut back.
    cache = [KVCache() for _ in split.layers]
    first = split(prompt[None], cache)[:, -1]
    trim_prompt_cache(cache, 2)
    close(split(prompt[None, -2:], cache)[:, -1], first, "after trimming", 1e-5)


def generated(prompt: mx.array, model: nn.Module) -> list[int]:
    tokens = [token for token, _ in generate_step(prompt, model, max_tokens=WINDOW + 8)]
    return tokens


def refused(words: str, call, kind: type[Exception] = mlxdist.InvalidArgument) -> None:
    """The same kind of error on every rank; its words on one rank at least, and no rank waits for another."""
    try:
        call()
    except kind as error:
        found = words in str(error)
    else:
        raise AssertionError(f"no error on rank {rank}: {words}")
    assert int(mlxdist.all_max(np.array([found], np.int32), group=group)[0]) == 1, words


def bad_input() -> None:
    good = randomized(llama_layer(2 * size, size, 6 * size))
    cut = partial(SplitBlock.from_layer, group=group)
    block = cut(good)
    x = mx.ones((1, 1, 48))
    refused("has no input_layernorm, self_attn", lambda: cut(nn.Linear(3, 3)))
    refused("ArraysCache is not a cache of keys and values", lambda: block(x, None, ArraysCache(2)))
    cache = KVCache()
    mx.eval(block(x, None, cache))
    refused("the cache is for batch", lambda: block(mx.ones((2, 1, 48)), None, cache))
    gelu = randomized(llama_layer(2 * size, size, 6 * size))
    gelu.mlp = Gelu(gelu.mlp)
    refused("computes something else", lambda: cut(gelu))
    args = {"rms_norm_eps": 1e-5, "vocab_size": 53, "logits_scaling": 1.0, "attention_multiplier": 8**-0.5}
    args |= {"embedding_multiplier": 1.0, "residual_multiplier": 0.95, "max_position_embeddings": 512}
    args |= {"attention_bias": False, "mlp_bias": False, "rope_theta": 1e4, "model_type": "granite"}
    args |= {"hidden_size": 16 * size, "num_attention_heads": 2 * size, "num_key_value_heads": size}
    near = granite.TransformerBlock(granite.ModelArgs(num_hidden_layers=1, intermediate_size=6 * size, **args))
    refused("computes something else", lambda: cut(randomized(near, mx.bfloat16)))
    norm = randomized(llama_layer(2 * size, size, 6 * size))
    norm.input_layernorm = nn.LayerNorm(48)
    refused("is not nn.RMSNorm", lambda: cut(norm))
    if size == 1:
        return
    refused("intermediate size of the MLP", lambda: cut(randomized(llama_layer(size, size, 6 * size + 1))))
    refused("KV heads", lambda: cut(randomized(llama_layer(12, size + 1, 6 * size))))
    refused("k_proj and v_proj must have", lambda: cut(sharded_by_hand()))
    odd = quantized(randomized(llama_layer(size, size, 64 * size, hidden_size=64, head_dim=32)), group_size=32)
    odd.self_attn.o_proj.group_size = 64  # a rank would hold half a group
    refused("quantization groups of 64", lambda: cut(odd))
    # On one rank only.
    other = randomized(llama_layer(2 * size, size, 6 * size))
    if rank == size - 1:
        other.mlp.down_proj.weight = other.mlp.down_proj.weight * 1.5
    refused("the ranks hold different weights", lambda: cut(other))
    refused("has no input_layernorm", lambda: cut(good if rank else nn.Linear(3, 3)))
    wider = randomized(llama_layer(2 * size, size, 6 * size * (1 + rank % 2)))
    refused("the ranks disagree", lambda: cut(wider), mlxdist.Mismatch)
    failing = randomized(llama_layer(2 * size, size, 6 * size))
    if rank == size - 1:
        failing.self_attn.scale = None
    refused("float() argument", lambda: cut(failing), TypeError if rank == size - 1 else mlxdist.InvalidArgument)
    refused("has no layers", lambda: SplitModel.from_model(nn.Linear(2, 2) if rank else model(), group=group))


def model() -> nn.Module:
    return randomized(llama.Model(llama_args(2 * size, size, 6 * size)))


def sharded_by_hand() -> nn.Module:
    layer = randomized(llama_layer(2, 2, 6 * size))
    layer.self_attn.k_proj = nn.Linear(48, 8, bias=False)
    return layer


class Gelu(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(nn.gelu(self.gate_proj(x)) * self.up_proj(x))


run_scenarios(globals())
