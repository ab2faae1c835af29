"""One rank of test_split_models.py. Arguments: the scenario and its arguments.

Every rank computes with the full model too, in one process, and compares.
"""

import gc
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import llama
from mlx_lm.models.cache import (
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from scenarios import group, run_scenario

import mlxdist
from mlxdist.nn import SplitModel, submissions

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import tiny_models

mx.set_default_device(mx.cpu)
# Logits are of order 1; float32 sums over the ranks come in another order.
TOLERANCE = 2e-4
QUANTIZED = 1e-2  # a difference in the last bit can be a step of 8 bits
PADDING = [2, 0]  # of the batched caches: how many tokens of each row are none
LARGER = {"hidden_size": 128, "head_dim": 32}
NOT_LARGER = ("lfm2",)  # their other sizes do not fit these
# Where mlx-lm itself is wrong: the mask of a batch meets scores with an axis more, so that it masks KV heads.
NOT_BATCHED = ("gemma2",)
compared: Counter[str] = Counter()  # how many models with each kind of cache
STEPS = [7, 1, 3]  # crosses the windows of the tiny models (8) and of the caches here (6)


def own(cache: object) -> object:
    return cache


def plain(cache: object) -> object:
    return KVCache() if isinstance(cache, RotatingKVCache) else cache


def rotating(cache: object) -> object:
    return RotatingKVCache(max_size=6, keep=2) if type(cache) is KVCache else cache


def quantized(cache: object) -> object:
    return QuantizedKVCache(group_size=32, bits=8) if type(cache) is KVCache else cache


def batched(cache: object) -> object:
    if type(cache) is KVCache:
        return BatchKVCache(PADDING)
    if type(cache) is RotatingKVCache:
        return BatchRotatingKVCache(cache.max_size, PADDING)
    if type(cache) is CacheList:
        return CacheList(*(batched(one) for one in cache.caches))
    cache.left_padding = mx.array(PADDING)
    return cache


def batched_rotating(cache: object) -> object:
    return BatchRotatingKVCache(6, PADDING) if type(cache) is KVCache else batched(cache)


def chunked(cache: object) -> object:
    return ChunkedKVCache(64) if type(cache) is KVCache else cache


def concatenated(cache: object) -> object:
    return ConcatenateKVCache() if type(cache) is KVCache else cache


KINDS: dict[str, Callable[[object], object]] = {
    kind.__name__: kind for kind in (own, rotating, quantized, batched, batched_rotating, chunked, concatenated)
}


def logits(model: nn.Module, kind: str, steps: Sequence[int] = tuple(STEPS)) -> list[np.ndarray]:
    """Of prompts and single tokens in turn, one cache for all; of rows with padding without it."""
    cache = [KINDS[kind](one) for one in make_prompt_cache(model)]
    rows = len(PADDING) if kind.startswith("batched") else 1
    tokens = np.random.default_rng(1).integers(0, 96, (rows, sum(steps)))
    results, start = [], 0
    for length in steps:
        result = model(mx.array(tokens[:, start : start + length]), cache=cache)
        mx.eval(result)
        result = np.maximum(np.array(result.astype(mx.float32)), -1e9)  # some models forbid tokens with -inf
        results += [result[row, max(PADDING[row] - start, 0) if rows > 1 else 0 :] for row in range(rows)]
        start += length
    return results


def outcome(model: nn.Module, kind: str, steps: Sequence[int]) -> list[np.ndarray] | str:
    try:
        return logits(model, kind, steps)
    except Exception as error:  # mlx-lm offers not every cache for every model
        return f"{type(error).__name__}: {error}"


def different(found: list[np.ndarray] | str, wanted: list[np.ndarray] | str, tolerance: float) -> str:
    """What is wrong; "" where nothing is."""
    if isinstance(wanted, str):
        return "" if isinstance(found, str) else f"computed, where mlx-lm says {wanted[:80]}"
    if isinstance(found, str):
        return found
    error = np.max([np.abs(a - b).max(initial=0) for a, b in zip(found, wanted, strict=True)])
    size = np.max([np.abs(b[b != -1e9]).max(initial=0) for b in wanted])
    return "" if error <= tolerance * max(size, 1) and size > 1e-2 else f"off by {error:.3g} of {size:.3g}"


def compare(name: str, kinds: Sequence[str], steps: Sequence[int] = tuple(STEPS), **fields: object) -> list[str]:
    """The faults of one model; a line for each cache that mlx-lm has for it."""
    whole = tiny_models.build(name, **fields)
    wanted = {kind: outcome(whole, kind, steps) for kind in kinds}
    compared.update(kind for kind in kinds if not isinstance(wanted[kind], str))
    try:
        split = SplitModel.from_model(whole, group=group)
    except mlxdist.InvalidArgument as error:
        return [f"{name} is rejected: {error}"]
    faults = []
    for kind in kinds:
        fault = different(outcome(split, kind, steps), wanted[kind], QUANTIZED if kind == "quantized" else TOLERANCE)
        faults += [f"{name}, {kind}: {fault}"] if fault else []
    return faults


def matrix(least: str, *names: str) -> None:
    """Models with caches; ``least`` is how many models mlx-lm must have each cache for, and so are compared.

    Each model with its own cache and with a batch of it. Of the others there are all for a few models, one for each of
    many, in turn. Heads of 16, as the tiny models have them, are too small for a quantized cache: LARGER.
    """
    faults = []
    others = [kind for kind in KINDS if kind not in ("own", "batched")]
    for number, name in enumerate(names):
        selected = others if len(names) < 10 else [others[number % len(others)]]
        kinds = ["own", "batched", *(kind for kind in selected if kind != "quantized")]
        faults += compare(name, [kind for kind in kinds if name not in NOT_BATCHED or not kind.startswith("batched")])
        if "quantized" in selected and name not in NOT_LARGER:
            faults += compare(name, ["quantized"], **LARGER)
    assert compared["own"] == len(names), compared
    assert all(compared[kind] >= int(least) for kind in KINDS), compared
    assert not faults, f"{len(faults)} faults\n" + "\n".join(faults)


HEADS = {"num_attention_heads": 12, "num_key_value_heads": 12, "hidden_size": 192}  # on any number of ranks
SMALL = HEADS | {"max_position_embeddings": 32}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}


def positions() -> None:
    """Rotary embeddings and scales that change with the position, past every boundary that the configuration names."""
    faults = compare("internlm3", ["own"], [20, 1, 30, 1], **SMALL, rope_scaling=DYNAMIC)
    rope = tiny_models.CONFIGS["ministral3"]["rope_parameters"] | {"original_max_position_embeddings": 16}
    faults += compare("ministral3", ["own"], [20, 1, 30, 1], **SMALL, rope_parameters=rope)
    assert not faults, f"{len(faults)} faults\n" + "\n".join(faults)


def more_positions() -> None:
    """The same where a table of rotary embeddings grows, and with other kinds of these."""
    llama_3 = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }  # fmt: skip
    far = {"max_position_embeddings": 1100}
    faults = compare("internlm3", ["own"], [1090, 1, 60, 1], **(HEADS | far), rope_scaling=DYNAMIC)
    for name, scaling in [
        ("llama", llama_3),
        ("llama", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}),
        ("llama", DYNAMIC),
        ("qwen3", {"rope_type": "linear", "factor": 4.0}),
    ]:
        faults += compare(name, ["own", "rotating"], [20, 1, 30, 20, 1], **SMALL, rope_scaling=scaling)
    assert not faults, f"{len(faults)} faults\n" + "\n".join(faults)


def checks() -> None:
    forbidden()
    refused()


def forbidden() -> None:
    """Tokens that a model forbids by -inf are as far from themselves as any other: not at all."""
    faults = compare("phi3small", ["own"], [3, 1])
    assert compared["own"] == 1 and not faults, faults


class NotANumber(llama.Model):
    """Whole it computes what llama does. Sharded, and past its boundary, it does not."""

    def __call__(self, inputs: mx.array, cache: list | None = None) -> mx.array:
        whole = isinstance(self.layers[0], llama.TransformerBlock)
        past = cache is not None and cache[0].offset > self.args.max_position_embeddings
        logits = super().__call__(inputs, cache)
        return logits if whole or not past else logits * mx.nan


def refused() -> None:
    """Errors that are the same on every rank: NaN past a boundary; other layers on another rank; a failed cut."""
    mx.random.seed(0)
    args = llama.ModelArgs.from_dict(tiny_models.config_of("llama"))
    said("its logits differ from those of the llama by nan", NotANumber(args))
    said("the ranks disagree", tiny_models.build("llama", num_hidden_layers=2 + group.rank()), mlxdist.Mismatch)
    endless = tiny_models.build("llama")
    if group.rank() == 1:
        note = SimpleNamespace()
        note.note = endless.layers[0].self_attn.rope.note = note
    said("maximum recursion depth", endless, RecursionError if group.rank() == 1 else mlxdist.InvalidArgument)


def said(words: str, model: nn.Module, kind: type[Exception] = mlxdist.InvalidArgument) -> None:
    try:
        SplitModel.from_model(model, group=group)
    except (mlxdist.Error, RecursionError) as error:
        assert type(error) is kind and words in str(error), f"{type(error).__name__}: {error}"
    else:
        raise AssertionError(f"no error on rank {group.rank()}: {words}")


def sliding() -> None:
    """Layers with a window and caches without one: nothing is traced from token to token, and nothing is kept."""
    fields = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8}
    faults = compare("llama", ["plain"], [7, 1, 3, 1, 1, 30, 1, 1], **fields)
    split = SplitModel.from_model(tiny_models.build("llama", **fields), group=group)
    assert not faults and split.why_not_blocks is None, (faults, split.why_not_blocks)
    cache = [KVCache() for _ in split.layers]
    tokens = mx.array([[5]])
    for _ in range(10):
        mx.eval(split.model(tokens, cache=cache))
    with submissions() as count:
        for _ in range(10):
            mx.eval(split.model(tokens, cache=cache))
    assert count.traces == 0, count
    before = alive()
    for _ in range(10):
        mx.eval(split.model(tokens, cache=cache))
    assert alive() == before, (alive(), before)


def alive() -> int:
    """How many arrays Python holds."""
    gc.collect()
    return sum(isinstance(one, mx.array) for one in gc.get_objects())


def submitted() -> None:
    """Layers that are mlx-lm's own: their sums are handed over where they are built, two a layer."""
    for name in ("mixtral", "gemma3_text"):
        whole = tiny_models.build(name)
        wanted = logits(whole, "own")
        split = SplitModel.from_model(whole, group=group, submit=True)
        assert split.why_not_blocks and len(split.layers) == tiny_models.LAYERS
        with submissions() as count:
            split(mx.array([[1, 2, 3]]))
        assert count.submitted == 2 * tiny_models.LAYERS, (name, count)
        assert not (fault := different(logits(split, "own"), wanted, TOLERANCE)), (name, fault)


run_scenario(globals())
