"""One rank of test_expert_low_latency.py. Prints "exact" at the end.

Every rank makes all ranks' tokens and all experts, so that it can compute what a dense layer on one process does.
"""

import mlx.core as mx
import numpy as np
import pytest

import mlxdist
from mlxdist.nn.expert_parallel.fp8 import pack_e4m3, unpack_e4m3
from mlxdist.nn.expert_parallel.low_latency import LowLatencyExchange
from mlxdist.nn.expert_parallel.placement import Placement

group = mlxdist.init()
rank, size = group.rank(), group.size()
HIDDEN = 5  # odd, so that 16-bit tokens end in the middle of a word
MOST = 4
TOLERANCE = {mx.float32: 1e-5, mx.float16: 4e-3, mx.bfloat16: 3e-2}  # results are rounded twice on the way


def layer(experts: int) -> tuple[mx.array, mx.array]:
    mx.random.seed(7)
    return mx.random.normal((experts, HIDDEN, HIDDEN)) / HIDDEN**0.5, mx.random.normal((experts, HIDDEN))


def computed(x: mx.array, ids: mx.array, weight: mx.array, bias: mx.array) -> mx.array:
    """(tokens, D) and (tokens, k) experts: (tokens, k, D), in float32."""
    x = x.astype(mx.float32)[:, None, None]
    return mx.tanh(mx.matmul(x, weight[ids]).squeeze(-2) + bias[ids])


def dense(x: mx.array, indices: mx.array, scores: mx.array, weight: mx.array, bias: mx.array) -> mx.array:
    y = computed(x, mx.maximum(indices, 0), weight, bias) * scores.astype(mx.float32)[..., None]
    return mx.where((indices >= 0)[..., None], y, 0).sum(axis=1)


def tokens_of(count: int, experts: int, top_k: int, dtype: mx.Dtype, seed: int) -> tuple[mx.array, ...]:
    random = np.random.default_rng([seed, rank])
    indices = np.array([random.permutation(experts)[:top_k] for _ in range(count)], np.int32).reshape(count, top_k)
    scores = random.uniform(0.1, 1, (count, top_k)).astype(np.float32)
    return mx.array(random.normal(size=(count, HIDDEN)), dtype=dtype), mx.array(indices), mx.array(scores)


def close(y: mx.array, expected: mx.array, dtype: mx.Dtype, what: object) -> None:
    assert (y.dtype, y.shape) == (dtype, expected.shape), (what, y.dtype, y.shape)
    scale = max(1.0, mx.abs(expected).max().item()) if expected.size else 1
    assert mx.allclose(y.astype(mx.float32), expected, rtol=0, atol=TOLERANCE[dtype] * scale), (what, y, expected)


def local(exchange: LowLatencyExchange, weight: mx.array, bias: mx.array):
    mine = exchange.placement.local(rank)
    return lambda x, ids: computed(x, ids, weight[mine.start : mine.stop], bias[mine.start : mine.stop])


def like_one_process() -> None:
    weights = [1.0] * size if size == 1 else [2.0] + [1.0] * (size - 1)
    for experts, top_k, unequal in ((8, 1, False), (8, 2, True), (6, 6, False), (64, 8, False)):
        placement = Placement(experts, size, weights if unequal else None)
        weight, bias = layer(experts)
        for dtype in TOLERANCE if unequal else (mx.float32,):
            exchange = LowLatencyExchange(placement, MOST, top_k)
            run = local(exchange, weight, bias)
            # Full, one token, none on one rank, and different numbers on each.
            for count in (MOST, 1, 0 if rank == size - 1 else 2, (rank * 2 + 1) % (MOST + 1)):
                x, indices, scores = tokens_of(count, experts, top_k, dtype, seed=count)
                y = exchange(x, indices, scores, run)
                close(y, dense(x, indices, scores, weight, bias), dtype, (experts, top_k, dtype, count))
        # All tokens of all ranks to one expert, and an index that is no expert.
        exchange = LowLatencyExchange(placement, MOST, top_k)
        x, indices, scores = tokens_of(MOST, experts, top_k, mx.float32, seed=9)
        one = mx.where(mx.arange(top_k) == 0, experts - 1, -1) * mx.ones((MOST, 1), mx.int32)
        close(exchange(x, one, scores, run), dense(x, one, scores, weight, bias), mx.float32, "one expert")


def repeated() -> None:
    """An expert that a token has several times, where its rank has fewer experts than a token."""
    placement, (weight, bias) = Placement(6, size), layer(6)
    exchange = LowLatencyExchange(placement, MOST, 6)
    x, _, scores = tokens_of(MOST, 6, 6, mx.float32, seed=5)
    indices = mx.array([[0, 0, 0, 0, 1, 0], [5, 5, 5, 5, 5, 5], [-1, 4, 4, 0, -1, 4], [3, 2, 5, 3, 2, 3]])
    close(exchange(x, indices, scores, local(exchange, weight, bias)), dense(x, indices, scores, weight, bias),
          mx.float32, "repeated")  # fmt: skip


def compiled() -> None:
    """Traced once for any count; nothing is carried out before the result is evaluated; two collectives a call."""
    placement, (weight, bias) = Placement(8, size), layer(8)
    exchange = LowLatencyExchange(placement, MOST, 2)
    run, traces = local(exchange, weight, bias), []

    @mx.compile
    def step(x: mx.array, indices: mx.array, scores: mx.array, count: mx.array) -> mx.array:
        traces.append(1)
        return exchange(x, indices, scores, run, count)

    collectives = group.stats()["collectives"]
    for turn in range(6):
        x, indices, scores = tokens_of(MOST, 8, 2, mx.float32, seed=turn)
        count = (turn + rank) % (MOST + 1)
        x[count:] = float("nan")  # what lies behind the count does not matter
        indices[count:] = 12345
        before = group.stats()["collectives"]
        y = step(x, indices, scores, mx.array(count))
        # Another rank cannot have carried out what this one has not come to.
        assert group.stats()["collectives"] == before, "something was evaluated while the graph was built"
        mx.eval(y)
        expected = dense(x[:count], indices[:count], scores[:count], weight, bias)
        close(y[:count], expected, mx.float32, ("compiled", turn))
        assert not y[count:].any()
    assert len(traces) == 1
    assert group.stats()["collectives"] - collectives == (0 if size == 1 else 2 * 6)


def in_eight_bits() -> None:
    """As if the tokens had been rounded to E4M3 before."""
    placement, (weight, bias) = Placement(8, size), layer(8)
    for dtype in TOLERANCE:
        exchange = LowLatencyExchange(placement, MOST, 2, fp8=True)
        x, indices, scores = tokens_of(3, 8, 2, dtype, seed=3)
        y = exchange(x, indices, scores, local(exchange, weight, bias))
        rounded = unpack_e4m3(pack_e4m3(x), dtype)
        close(y, dense(rounded, indices, scores, weight, bias), dtype, ("fp8", dtype))


def refused() -> None:
    placement = Placement(8, size)
    exchange = LowLatencyExchange(placement, MOST, 2)
    assert exchange.admit(rank % 3) == min(2, size - 1)
    too_many = MOST + 3 if rank == size - 1 else 1
    with pytest.raises(mlxdist.InvalidArgument, match="7 tokens are more than max_tokens = 4") as raised:
        exchange.admit(too_many)
    texts = mlxdist.all_gather(np.frombuffer(str(raised.value).encode().ljust(600), np.uint8)[None])
    assert (texts == texts[0]).all(), "the ranks say different things"
    if size > 1:
        other = LowLatencyExchange(placement, MOST + (rank == 0), 2)
        with pytest.raises(mlxdist.Mismatch, match="disagree about the max_tokens: 5 on rank 0, 4 on rank 1"):
            other.admit(1)
    x, indices, scores = tokens_of(MOST, 8, 2, mx.float32, seed=0)
    more = [mx.concatenate([part, part]) for part in (x, indices, scores)]
    slots = exchange.dispatch(x, indices, scores)
    mx.eval(slots)

    def through(x: mx.array, indices: mx.array, scores: mx.array) -> mx.array:
        slots = exchange.dispatch(x, indices, scores)
        return slots.x.sum() + slots.weights.sum()

    collectives = group.stats()["collectives"]
    for words, call in [
        ("8 tokens are more than max_tokens = 4", lambda: exchange.dispatch(*more)),
        ("indices (shape (4, 1)) must be integers", lambda: exchange.dispatch(x, indices[:, :1], scores)),
        ("scores (shape (3, 2))", lambda: exchange.dispatch(x, indices, scores[:3])),
        ("must be integers", lambda: exchange.dispatch(x, scores, scores)),
        ("not int32 of shape (4, 2)", lambda: exchange.dispatch(indices, indices, scores)),
        ("y has shape (4, 5), expected", lambda: exchange.combine(x, slots)),
        ("the placement is for 7 ranks", lambda: LowLatencyExchange(Placement(8, 7), 1, 2)),
        ("max_tokens is 0", lambda: LowLatencyExchange(placement, 0, 2)),
        ("and top_k 9", lambda: LowLatencyExchange(placement, 1, 9)),
        ("is for decoding and has no gradient", lambda: mx.grad(lambda x: through(x, indices, scores))(x)),
        ("is for decoding and has no gradient", lambda: mx.grad(lambda s: through(x, indices, s))(scores)),
    ]:
        with pytest.raises(mlxdist.InvalidArgument) as raised:
            call()
        assert words in str(raised.value), raised.value
    assert group.stats()["collectives"] == collectives
    weight, bias = layer(8)
    y = exchange(x, indices, scores, local(exchange, weight, bias))  # and it still works
    close(y, dense(x, indices, scores, weight, bias), mx.float32, "afterwards")


if __name__ == "__main__":
    like_one_process()
    repeated()
    compiled()
    in_eight_bits()
    refused()
    print("exact")
