"""One rank of test_expert_overlap.py. Prints "equal" at the end."""

import time

import mlx.core as mx
import numpy as np
import pytest

import mlxdist
from mlxdist.nn.expert_parallel.dispatch import combine, dispatch
from mlxdist.nn.expert_parallel.overlap import Overlap, OverlappedExchange
from mlxdist.nn.expert_parallel.placement import Placement

group = mlxdist.init()
rank, size = group.rank(), group.size()
EXPERTS, HIDDEN = 8, 7
placement = Placement(EXPERTS, size)


def tokens_of(count: int, top_k: int, dtype: mx.Dtype, seed: int, hidden: int = HIDDEN) -> tuple[mx.array, ...]:
    random = np.random.default_rng([seed, rank])
    indices = np.array([random.permutation(EXPERTS)[:top_k] for _ in range(count)], np.int32).reshape(count, top_k)
    x, scores = random.normal(size=(count, hidden)), random.uniform(size=(count, top_k))
    return mx.array(x, dtype=dtype), mx.array(indices), mx.array(scores.astype(np.float32))


def experts(x: mx.array, ids: mx.array) -> mx.array:
    return mx.tanh(x * (ids[:, None] + placement.local(rank).start + 1)).astype(x.dtype)


def synchronous(x: mx.array, indices: mx.array, scores: mx.array, exchange_dtype: mx.Dtype | str | None) -> mx.array:
    rows, ids, handle = dispatch(x, indices, placement, group=group, exchange_dtype=exchange_dtype)
    return combine(experts(rows, ids), handle, scores, exchange_dtype=exchange_dtype)


def equal_to_the_synchronous_ones() -> None:
    """Bitwise: the same rows, weighed and added up in the same order."""
    exchange = OverlappedExchange(placement)
    cases = [(mx.float32, None), (mx.float16, None), (mx.bfloat16, None), (mx.float32, mx.bfloat16)]
    for number, (dtype, exchange_dtype) in enumerate(cases):
        for count in (13, rank, 0):
            x, indices, scores = tokens_of(count, 2, dtype, seed=10 * number + count)
            expected = synchronous(x, indices, scores, exchange_dtype)
            sent = exchange.dispatch_async(x, indices, scores, exchange_dtype=exchange_dtype)
            rows, ids = sent.wait()
            back = exchange.combine_async(experts(rows, ids), sent, exchange_dtype=exchange_dtype)
            y = back.wait()
            assert (y.dtype, y.shape) == (dtype, x.shape)
            assert mx.array_equal(y, expected), (dtype, exchange_dtype, count)
            assert sent.done() and back.done()
            assert mx.array_equal(back.wait(), y) and mx.array_equal(sent.wait()[0], rows)


def in_eight_bits() -> None:
    exchange = OverlappedExchange(placement)
    x, indices, scores = tokens_of(20, 2, mx.float32, seed=50)
    sent = exchange.dispatch_async(x, indices, scores, exchange_dtype="fp8")
    rows, ids = sent.wait()
    expected, same_ids, _ = dispatch(x, indices, placement, group=group)
    assert mx.array_equal(ids, same_ids)
    assert mx.allclose(rows, expected, rtol=2.0**-4 + 1e-6, atol=1e-5)
    assert size == 1 or not mx.allclose(rows, expected, rtol=1e-4, atol=0)
    exchange.combine_async(rows, sent).wait()


def micro_batches() -> None:
    """Two in flight, and collectives of the surroundings meanwhile, lazy ones and others."""
    exchange = OverlappedExchange(placement)
    batches = [tokens_of(11 + rank, 2, mx.float32, seed=60 + i) for i in range(4)]
    expected = [synchronous(*batch, None) for batch in batches]
    results, sent = [], exchange.dispatch_async(*batches[0])
    for i in range(len(batches)):
        following = exchange.dispatch_async(*batches[i + 1]) if i + 1 < len(batches) else None
        assert mlxdist.all_sum(mx.ones((4,))).tolist() == [size] * 4
        rows, ids = sent.wait()
        back = exchange.combine_async(experts(rows, ids), sent)
        assert mlxdist.all_sum(np.ones(4))[0] == size
        results.append(back.wait())
        sent = following
    for y, wanted in zip(results, expected):
        assert mx.array_equal(y, wanted)


def counted() -> None:
    """Hidden where this rank computes until all has arrived, not where it waits at once. The last rank comes late."""
    exchange = OverlappedExchange(placement)
    x, indices, scores = tokens_of(64, 2, mx.float32, seed=70)
    weight = mx.random.normal((64, 64)) / 8
    shares = {}
    for computes in (True, False):
        sent = exchange.dispatch_async(x, indices, scores)
        rows, ids = sent.wait()
        y = experts(rows, ids)
        mx.eval(y)
        before = exchange.overlap
        if rank == size - 1:
            time.sleep(0.5)  # long beside what a busy machine takes for the rest
        back = exchange.combine_async(y, sent)
        while computes and not back.done():
            mx.eval(mx.tanh(weight @ weight))
        mx.eval(back.wait())
        overlap = Overlap(*np.subtract(exchange.overlap, before).tolist())
        assert 0 <= overlap.hidden <= overlap.in_flight
        assert "of communication" in str(overlap) and f"({overlap.share:.0%})" in str(overlap)
        shares[computes] = overlap.share
    if size == 1:
        assert shares == {True: 0, False: 0}  # there is no communication
    elif rank < size - 1:
        assert shares[True] > 0.7 and shares[False] < 0.3, shares


def refused() -> None:
    exchange = OverlappedExchange(placement)
    x, indices, scores = tokens_of(5, 2, mx.float32, seed=80)

    def arrived(*arguments: mx.array) -> mx.array:
        return exchange.dispatch_async(*arguments).wait()[0]

    strange = indices + (100 if rank == size - 1 else 0)
    with pytest.raises(mlxdist.InvalidArgument, match="dispatch_async: indices are from 100"):  # on all ranks
        exchange.dispatch_async(x, strange, scores)
    sent = exchange.dispatch_async(x, indices, scores)
    for words, call in [
        ("scores have shape (4, 2)", lambda: exchange.dispatch_async(x, indices, scores[:4])),
        ("transfers are in flight; wait for them first", exchange.reset_overlap),
        ("y has shape (1, 7)", lambda: exchange.combine_async(x[:1], sent)),
        ("the placement is for 7 ranks", lambda: OverlappedExchange(Placement(EXPERTS, 7))),
        ("cannot be compiled", lambda: mx.compile(lambda x, i: arrived(x, i, scores))(x, indices)),
        ("has no gradient", lambda: mx.grad(lambda x: arrived(x, indices, scores).sum())(x)),
    ]:
        with pytest.raises(mlxdist.InvalidArgument) as raised:
            call()
        assert words in str(raised.value), raised.value


if __name__ == "__main__":
    equal_to_the_synchronous_ones()
    in_eight_bits()
    micro_batches()
    counted()
    refused()
    print("equal")
