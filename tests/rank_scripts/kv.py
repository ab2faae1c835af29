"""One rank of test_kv.py. Arguments: the scenario and its arguments. Prints "right" at the end.

Every rank has the model. Rank 0 computes the prompt, the others go on with its cache.
"""

import os
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache, make_prompt_cache

import mlxdist
from mlxdist import kv

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import tiny_models

group = mlxdist.init()
rank, size = group.rank(), group.size()
PROMPT = mx.array([[index % 90 for index in range(37)]])
MADE = {
    "quantized": lambda model: [QuantizedKVCache(group_size=32, bits=8) for _ in model.layers],
    "rotating": lambda model: [RotatingKVCache(max_size=16, keep=4) for _ in model.layers],
    "plain": make_prompt_cache,
}


def prefilled(model, made):
    cache = MADE[made](model)
    model(PROMPT, cache=cache)
    return cache


def goes_on(model, cache):
    """The logits of three more tokens."""
    logits = [model(mx.array([[token]]), cache=cache) for token in (5, 6, 7)]
    mx.eval(logits)
    return logits


def models(made, *names):
    """One rank's prompt, another's next tokens: bitwise what one process computes."""
    for name in names:
        model = tiny_models.build(name, **({"head_dim": 32} if made == "quantized" else {}))
        if rank == 0:
            cache = prefilled(model, made)
            for other in range(1, size):
                kv.send(cache, other)
        else:
            cache = kv.recv(0)
        expected = prefilled(model, made)
        assert [type(layer) for layer in cache] == [type(layer) for layer in expected], name
        for a, b in zip(goes_on(model, cache), goes_on(model, expected), strict=True):
            assert mx.array_equal(a, b, equal_nan=True), f"{name}: off by {mx.abs(a - b).max().item()}"


def bytes_sent():
    """Those of the tokens and a description; the room that a cache has for more stays here."""
    model = tiny_models.build("qwen3")
    cache = prefilled(model, "plain")
    mx.eval([layer.state for layer in cache])
    tokens = sum(x[..., : PROMPT.size, :].nbytes for layer in cache for x in (layer.keys, layer.values))
    before = group.stats()["payload_bytes_sent"]
    if rank == 0:
        kv.send(cache, 1)
        assert 0 <= group.stats()["payload_bytes_sent"] - before - tokens < 200 * len(cache)
    elif rank == 1:
        received = kv.recv(0)
        assert [layer.size() for layer in received] == [PROMPT.size] * len(cache)


def all_shapes():
    """Caches of nothing, of every dtype, and in rows of a batch."""
    rows = KVCache()
    rows.update_and_fetch(mx.ones((2, 1, 3, 4)), mx.ones((2, 1, 3, 4)))
    cache = [KVCache(), rows, KVCache.merge([KVCache(), KVCache()])]
    for dtype in (mx.float16, mx.bfloat16, mx.uint8, mx.int64):
        cache.append(KVCache())
        cache[-1].update_and_fetch(mx.arange(15).reshape(1, 1, 5, 3).astype(dtype), mx.zeros((1, 1, 5, 0), dtype))
    if rank == 0:
        kv.send(cache, 1)
        kv.send([], 1)
    elif rank == 1:
        received = kv.recv(0)
        for got, expected in zip(received, cache, strict=True):
            assert type(got) is type(expected) and got.size() == expected.size()
            if got.size():
                pairs = zip(tree_flatten(got.keys_and_values()), tree_flatten(expected.keys_and_values()), strict=True)
                assert all(a.dtype == b.dtype and mx.array_equal(a, b) for (_, a), (_, b) in pairs)
        assert kv.recv(0) == []


def bad_input():
    class KVCache:  # mlx-lm's name
        state = ()

    for cache, words in (([object()], "the cache of layer 0 is object"), ([KVCache()], "another class has that name")):
        with pytest.raises(mlxdist.InvalidArgument, match=words):
            kv.send(cache, 1 - rank)
    for peer in (rank, -1, size, "1"):
        with pytest.raises(
            mlxdist.InvalidArgument, match=f"dst is {peer!r}, but must be another rank than {rank}, from 0 to 1"
        ):
            kv.send([], peer)
        with pytest.raises(
            mlxdist.InvalidArgument, match=f"src is {peer!r}, but must be another rank than {rank}, from 0 to 1"
        ):
            kv.recv(peer)


def bad_bytes(text):
    """What a sender describes is checked before anything is made of it."""
    if rank == 0:
        sent = np.frombuffer(text.encode(), np.uint8)
        mlxdist.send(np.array([1 << 40 if text == "long" else sent.size], np.int64), 1)
        if text != "long":
            mlxdist.send(sent, 1)
    else:
        with pytest.raises(mlxdist.Mismatch, match="rank 0 describes its cache in|is no prompt cache of this mlx-lm"):
            kv.recv(0)
    mlxdist.barrier()


def lost():
    """A rank that dies while its cache is expected."""
    if rank == 0:
        os._exit(9)
    with pytest.raises(mlxdist.PeerLost):
        kv.recv(0)


globals()[sys.argv[1]](*sys.argv[2:])
print("right")
