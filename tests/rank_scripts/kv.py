"""One rank of test_kv.py. Arguments: the scenario and its arguments.

Every rank has the model. Rank 0 computes the prompt, the others go on with its cache.
"""

import json
import os
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import BatchKVCache, KVCache, QuantizedKVCache, RotatingKVCache, make_prompt_cache
from scenarios import group, rank, run_scenario, size

import mlxdist
from mlxdist import kv
from mlxdist.kv.agreement import propose
from mlxdist.kv.same_model import described_model
from mlxdist.kv.states import CACHES
from mlxdist.nn import pipeline_parallel, plan_shards, shard_model
from mlxdist.nn.rank_checks import texts

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import tiny_models

PROMPT = mx.array([[index % 90 for index in range(37)]])
MADE = {
    "quantized": lambda model: [QuantizedKVCache(group_size=32, bits=8) for _ in model.layers],
    "rotating": lambda model: [RotatingKVCache(max_size=16, keep=4) for _ in model.layers],
    "rows": lambda model: [BatchKVCache([0, 3]) for _ in model.layers],
    "plain": make_prompt_cache,
}
ROWS = {"rows": 2}


def prefilled(model, made):
    cache = MADE[made](model)
    model(mx.repeat(PROMPT, ROWS.get(made, 1), axis=0), cache=cache)
    return cache


def goes_on(model, cache, rows=1):
    """The logits of three more tokens."""
    logits = []
    for token in (5, 6, 7):
        logits.append(model(mx.array([[token]] * rows), cache=cache))
        mx.eval(logits)  # one by one: stages exchange messages
    return logits


def models(made, *names):
    """One rank's prompt, another's next tokens: bitwise what one process computes."""
    for name in names:
        model = tiny_models.build(name, **({"head_dim": 32} if made == "quantized" else {}))
        if rank == 0:
            cache = prefilled(model, made)
            for other in range(1, size):
                kv.send(cache, other, model=model)
        else:
            cache = kv.recv(0, model=model)
        expected = prefilled(model, made)
        assert [type(layer) for layer in cache] == [type(layer) for layer in expected], name
        for a, b in zip(goes_on(model, cache), goes_on(model, expected), strict=True):
            assert mx.array_equal(a, b, equal_nan=True), f"{name}: off by {mx.abs(a - b).max().item()}"


def bytes_sent():
    """Those of the tokens and descriptions; the room that a cache has for more stays here."""
    model = tiny_models.build("qwen3")
    cache = prefilled(model, "plain")
    mx.eval([layer.state for layer in cache])
    tokens = sum(x[..., : PROMPT.size, :].nbytes for layer in cache for x in (layer.keys, layer.values))
    before = group.stats()["payload_bytes_sent"]
    if rank == 0:
        kv.send(cache, 1, model=model)
        assert 0 <= group.stats()["payload_bytes_sent"] - before - tokens < 1000 + 200 * len(cache)
    elif rank == 1:
        received = kv.recv(0, model=model)
        assert [layer.size() for layer in received] == [PROMPT.size] * len(cache)


def all_shapes():
    """Caches of nothing, of every dtype, and in rows of a batch."""
    rows = KVCache()
    rows.update_and_fetch(mx.ones((2, 1, 3, 4)), mx.ones((2, 1, 3, 4)))
    cache = [KVCache(), rows, KVCache.merge([KVCache(), KVCache()])]
    for dtype in (mx.float16, mx.bfloat16, mx.uint8, mx.int64):
        cache.append(KVCache())
        cache[-1].update_and_fetch(mx.arange(15).reshape(1, 1, 5, 3).astype(dtype), mx.zeros((1, 1, 5, 0), dtype))
    model = tiny_models.build("qwen3", num_hidden_layers=len(cache))
    if rank == 0:
        kv.send(cache, 1, model=model)
    elif rank == 1:
        received = kv.recv(0, model=model)
        for got, expected in zip(received, cache, strict=True):
            assert type(got) is type(expected) and got.size() == expected.size()
            if got.size():
                pairs = zip(tree_flatten(got.keys_and_values()), tree_flatten(expected.keys_and_values()), strict=True)
                assert all(a.dtype == b.dtype and mx.array_equal(a, b) for (_, a), (_, b) in pairs)


class Sides:
    """The first ranks compute prompts, the others go on; each side has the model over tp x pp ranks: "2x1", or with
    the shares of its tp ranks, "2x1:3,1"."""

    def __init__(self, senders, receivers):
        grids = [[int(length) for length in spec.partition(":")[0].split("x")] for spec in (senders, receivers)]
        shares = [[int(share) for share in spec.partition(":")[2].split(",") if share] for spec in (senders, receivers)]
        counts = [tp * pp for tp, pp in grids]
        self.senders, self.receivers = list(range(counts[0])), list(range(counts[0], sum(counts)))
        self.sends = rank in self.senders
        (self.tp, self.pp), self.shares = grids[not self.sends], shares[not self.sends] or None
        own = group.split(0 if self.sends else 1 if rank in self.receivers else -1)
        self.mesh = own and mlxdist.mesh(pp=self.pp, tp=self.tp, group=own)
        self.is_cut = any(tp > 1 for tp, _ in grids)

    def place(self, model):
        """This rank's shard and stage of a model."""
        if self.tp > 1:
            shard_model(model, plan_shards(model, tp=self.tp, rank_shares=self.shares), group=self.mesh["tp"])
        return pipeline_parallel(model, group=self.mesh["pp"]) if self.pp > 1 else model

    def transfer(self, cache, model):
        """The cache that a receiver has then."""
        if self.sends:
            kv.send(cache, self.receivers, model=model)
            return None
        return kv.recv(self.senders, model=model)


def sides(senders, receivers, made, *names):
    """Prompts of one side, next tokens of the other, which has other shards and stages: as one process computes.

    A name may have numbers of heads and KV heads behind it: "qwen3:8,4"; with "-" before it the transfer is refused."""
    both = Sides(senders, receivers)
    for spec in names:
        name, _, heads = spec.removeprefix("-").partition(":")
        fields: dict = {"head_dim": 32} if made == "quantized" else {}
        fields |= {"heads": tuple(map(int, heads.split(",")))} if heads else {}
        full, model = tiny_models.build(name, **fields), both.place(tiny_models.build(name, **fields))
        known = kv.layout_of(model) if name == "qwen3" else model
        transfer = lambda: both.transfer(prefilled(model, made) if both.sends else None, known)
        if spec.startswith("-"):
            refused(r"layer \d+, (whose cache is|an?) \w+", transfer)
            continue
        cache = transfer()
        if not both.sends:
            goes_on_right(name, both, made, model, full, cache)


def same_parts(senders):
    """From each rank to one with the same shard and stage, also where it is not known which; to another, not."""
    both = Sides(senders, senders)
    full, model = tiny_models.build("qwen3_5"), both.place(tiny_models.build("qwen3_5"))
    if both.sends:
        kv.send(prefilled(model, "plain"), rank + size // 2, model=model)
    else:
        goes_on_right("qwen3_5", both, "plain", model, full, kv.recv(rank - size // 2, model=model))
    if both.tp == 1:
        return
    peer = 3 - rank  # with the other shard
    with pytest.raises(mlxdist.InvalidArgument, match=r"layer 0, whose cache is ArraysCache, cannot be sent"):
        if both.sends:
            kv.send(prefilled(model, "plain"), peer, model=model)
        else:
            kv.recv(peer, model=model)


def goes_on_right(name, both, made, model, full, cache):
    """A received cache is as the model's own, and what comes next as the full model's."""
    own, expected = prefilled(model, made), prefilled(full, made)
    mx.eval([layer.state for layer in own])
    assert [type(layer) for layer in cache] == [type(layer) for layer in expected], name
    assert shapes(cache) == shapes(own), f"{name}: {shapes(cache)}, and its own are {shapes(own)}"
    rows = ROWS.get(made, 1)
    for a, b in zip(goes_on(model, cache, rows), goes_on(full, expected, rows), strict=True):
        near = 1e-5 * mx.nan_to_num(mx.abs(b)).max().item() if both.is_cut else 0
        off = mx.abs(a - b).max().item()
        assert mx.allclose(a, b, rtol=0, atol=near, equal_nan=True), f"{name}: off by {off}, more than {near}"
        assert mx.array_equal(a.argmax(-1), b.argmax(-1)), name


def shapes(cache):
    """Of keys and values, without the room for more."""
    held = [layer for layer in cache if getattr(layer, "keys", None) is not None]
    return [[x.shape for _, x in tree_flatten(layer.keys_and_values())] for layer in held]


def bytes_of_sides(senders, receivers, name):
    """The senders send once what a receiver needs, whichever of them has it. Besides, each pair of ranks exchanges
    descriptions of the model and of each layer."""
    both = Sides(senders, receivers)
    model = both.place(tiny_models.build(name))
    cache = prefilled(model, "plain")
    mx.eval([layer.state for layer in cache])
    mlxdist.barrier()
    before = group.stats()["payload_bytes_sent"]
    received = both.transfer(cache if both.sends else None, model)
    sent = (group.stats()["payload_bytes_sent"] - before) * both.sends
    needed = 0 if both.sends else sum(x.nbytes for layer in received for x in layer.keys_and_values())
    sent, needed = mlxdist.all_sum(np.array([sent, needed])).tolist()
    described = (1000 + 400 * len(cache)) * len(both.senders) * len(both.receivers)
    assert 0 < needed <= sent < needed + described, (sent, needed)


def refused(words, run):
    """All ranks have the same error."""
    with pytest.raises(mlxdist.InvalidArgument, match=words) as caught:
        run()
    found = texts(str(caught.value), group)
    assert found == found[:1] * size, found


def bad_pair():
    """Whatever one of two ranks does wrong is the same error on both, and the next is a new transfer."""
    model = tiny_models.build("qwen3")
    cache = prefilled(model, "plain")

    class KVCache:  # mlx-lm's name
        state = ()

    longer = tiny_models.build("qwen3", num_hidden_layers=5)
    cases = [
        (None, model, model, "cache must be a list with a cache for each layer, not NoneType"),
        ([object(), *cache[1:]], model, model, "the cache of layer 0 is object"),
        ([KVCache(), *cache[1:]], model, model, "another class has that name"),
        (cache[:3], model, model, "the cache has 3 layers, and is not one of the model: 4"),
        (cache, None, model, r"without model=.*\[rank 0 "),
        (cache, model, None, r"without model=.*\[rank 1 "),
        (cache, model, "model", "must be an mlx.nn.Module, not str"),
        (prefilled(longer, "plain"), longer, model, "the caches sent have 5 layers, and that of the model 4"),
        # Caches look alike: only the configuration shows that it is another model.
        (cache, model, tiny_models.build("qwen3", rope_theta=5e5), "cache of another model: its rope_theta is 10000.0"),
        (cache, model, tiny_models.build("qwen2"), "cache of another model: its file is qwen3, and here qwen2"),
    ]
    for sent, computed, other, words in cases:
        refused(words, lambda: kv.send(sent, 1, model=computed) if rank == 0 else kv.recv(0, model=other))
    kind = CACHES.pop("KVCache") if rank == 1 else None  # as of another mlx-lm
    with pytest.raises(mlxdist.Mismatch, match="sends is no prompt cache of this mlx-lm") as caught:
        kv.send(cache, 1, model=model) if rank == 0 else kv.recv(0, model=model)
    assert len(set(texts(str(caught.value), group))) == 1
    CACHES.update({"KVCache": kind} if kind else {})
    received = kv.send(cache, 1, model=model) if rank == 0 else kv.recv(0, model=model)
    assert rank == 0 or [layer.offset for layer in received] == [PROMPT.size] * 4


def bad_sides():
    """Ranks 0 and 1 send shards, rank 2 has the full model. After each refusal the next is a new transfer."""
    both = Sides("2x1", "1x1")
    build = lambda **fields: both.place(tiny_models.build("qwen3", **fields))
    model, receives = build(), not both.sends
    cache = prefilled(model, "plain")
    transfer = lambda cache, model: lambda: both.transfer(cache, model)
    for missing in (1, 2):
        refused(rf"without model=.*\[rank {missing} ", transfer(cache, None if rank == missing else model))
    for fields, words in (
        ({"num_hidden_layers": 3}, "4, 4 layers, and that of the model 3"),
        ({"num_attention_heads": 8, "num_key_value_heads": 4}, "layer 0, a KVCache, is not one of the model: 2 heads"),
        ({"head_dim": 32}, r"widths \[16, 16\], and in the model 2 of \[32, 32\]"),
    ):
        refused(words, transfer(cache, build(**fields) if receives else model))
    longer = prefilled(model, "plain")
    if not receives:
        model(PROMPT, cache=longer)
    refused("senders' caches of layer 0, KVCache and KVCache, differ", transfer(longer if rank == 1 else cache, model))
    full = prefilled(tiny_models.build("qwen3"), "plain")
    refused("kv.send: the cache of layer 0, a KVCache, is not one of the model", transfer(full, model))
    refused("kv.send: the cache has 3 layers", transfer(cache[:3], model))
    refused("layer 0 is object: mlx_lm", transfer([object(), *cache[1:]], model))
    recurrent = both.place(tiny_models.build("qwen3_5"))
    refused("layer 0, whose cache is ArraysCache, cannot be sent", transfer(prefilled(recurrent, "plain"), recurrent))
    received = transfer(cache, model)()
    assert both.sends or [layer.offset for layer in received] == [PROMPT.size] * 4


def bad_pairs():
    """What two ranks alone find: heads that no rank has, peers that are none, one side without a model."""
    model = tiny_models.build("qwen3")
    shard = shard_model(tiny_models.build("qwen3"), plan_shards(model, tp=2), group=group)
    cache = prefilled(shard, "plain")
    transfer = lambda: kv.send(cache, [1], model=shard) if rank == 0 else kv.recv([0], model=model)
    refused("no sender has head 1 of layer 0, whose cache is KVCache", transfer)
    for peers in ([], [1 - rank] * 2, [rank], [size], "1"):
        with pytest.raises(mlxdist.InvalidArgument, match="kv: dst is|dst is '1'"):
            kv.send([], peers, model=model)
        with pytest.raises(mlxdist.InvalidArgument, match="kv: src is|src is '1'"):
            kv.recv(peers, model=model)


def bad_offers(layers):
    """What a sender says of its caches is checked before anything is made of it."""
    model = tiny_models.build("qwen3")
    shard = shard_model(tiny_models.build("qwen3"), plan_shards(model, tp=2), group=group)  # not the same part
    with pytest.raises(mlxdist.Mismatch, match=r"ranks \[0\] sends is no prompt cache of this mlx-lm"):
        if rank == 0:
            propose({"model": described_model(shard), "layers": None}, None, [1], group)
            propose(json.loads(layers), None, [1], group)
        else:
            kv.recv(0, model=model)


def lost_sender():
    """One of two senders dies while its part of the cache is expected."""
    both = Sides("2x1", "1x1")
    model = both.place(tiny_models.build("qwen3"))
    cache = prefilled(model, "plain")
    mx.eval([layer.state for layer in cache])
    if rank == 0:  # or the other sender would be missed in the last collective of this one's cache
        mlxdist.send(np.zeros(1), 1)
    if rank == 1:
        mlxdist.recv((1,), np.float64, 0)
        os._exit(9)
    with pytest.raises(mlxdist.PeerLost):
        both.transfer(cache, model)


def bad_input():
    for peer in (rank, -1, size, "1"):
        with pytest.raises(mlxdist.InvalidArgument, match=f"dst is {peer!r}, but must be other ranks than {rank},"):
            kv.send([], peer)
        with pytest.raises(mlxdist.InvalidArgument, match=f"src is {peer!r}, but must be other ranks than {rank},"):
            kv.recv(peer)


def bad_layers(layers):
    """The same where both have all of the model."""
    model = tiny_models.build("qwen3")
    with pytest.raises(mlxdist.Mismatch, match=r"ranks \[0\] sends is no prompt cache of this mlx-lm"):
        if rank == 0:
            propose({"model": described_model(model), "layers": json.loads(layers)}, None, [1], group)
        else:
            kv.recv(0, model=model)


def bad_bytes(text):
    """What a sender describes is checked before anything is made of it."""
    if rank == 0:
        sent = np.frombuffer(text.encode(), np.uint8)
        mlxdist.send(np.array([1 << 40 if text == "long" else sent.size], np.int64), 1)
        if text != "long":
            mlxdist.send(sent, 1)
    else:
        with pytest.raises(mlxdist.Mismatch, match="rank 0 describes its cache in|is no prompt cache of this mlx-lm"):
            kv.recv(0, model=tiny_models.build("qwen3"))
    mlxdist.barrier()


def lost():
    """A rank that dies while its cache is expected."""
    if rank == 0:
        os._exit(9)
    with pytest.raises(mlxdist.PeerLost):
        kv.recv(0, model=tiny_models.build("qwen3"))


run_scenario(globals())
