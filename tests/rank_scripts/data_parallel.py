"""One rank of test_data_parallel.py: `check` is the name of a function below."""

import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map
from scenarios import group, rank, run_scenario, size

import mlxdist

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import reference

Pair = namedtuple("Pair", "weight bias")
HEADER = 64  # bytes


def gradient(shape: tuple[int, ...], dtype: str, of_rank: int, seed: int) -> mx.array:
    values = reference.distinct(shape, dtype, of_rank, seed)
    return mx.array(values).view(mx.bfloat16) if dtype == "bfloat16" else mx.array(values)


def mean(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    """Added up and divided in float32, then rounded."""
    shares = [reference.widen(reference.distinct(shape, dtype, r, seed), dtype) for r in range(size)]
    return reference.narrow(reference.all_reduce(shares, "float32") / np.float32(size), dtype)


def odd_tree(leaf: Any) -> Any:
    """Every kind of container and of shape that `leaf(shape, dtype, seed)` can be in."""
    return {
        "embedding": leaf((17, 3), "float32", 1),
        "layers": [
            {"norm": leaf((5,), "bfloat16", 2), "scale": leaf((), "float32", 3), "frozen": {}},
            {"norm": leaf((5,), "bfloat16", 4), "scale": leaf((), "float16", 5), "frozen": []},
        ],
        "pair": Pair(leaf((2, 1, 4), "float16", 6), leaf((1,), "float32", 7)),
        "both": (leaf((0, 8), "float32", 8), leaf((3000,), "float32", 9)),
        "alone": leaf((0,), "bfloat16", 10),
    }


def odd_trees() -> None:
    grads = odd_tree(lambda shape, dtype, seed: gradient(shape, dtype, rank, seed))
    if rank % 2:  # a rank that built its dict in another order
        grads = dict(reversed(grads.items()))
    expected = dict(tree_flatten(odd_tree(mean)))
    for all_reduce_size in (0, 64, 250, 12_000, 2**25):
        averaged = mlxdist.average_gradients(grads, all_reduce_size=all_reduce_size)
        assert list(averaged) == list(grads)
        assert isinstance(averaged["pair"], Pair) and isinstance(averaged["both"], tuple)
        assert averaged["layers"][0]["frozen"] == {} and averaged["layers"][1]["frozen"] == []
        for (path, got), (_, given) in zip(tree_flatten(averaged), tree_flatten(grads), strict=True):
            assert (got.dtype, got.shape) == (given.dtype, given.shape), path
            bits = np.array(got.view(mx.uint16) if got.dtype == mx.bfloat16 else got)
            assert reference.same(bits, expected[path]), f"{path} with buckets of {all_reduce_size}: {got}"


def of_guides() -> None:
    """The function that MLX's guide writes out, by its name; then the end, as such programs have it."""
    gradients = {"a": mx.arange(5.0) * (rank + 1), "b": [mx.full((2, 3), float(rank))]}
    expected = tree_map(lambda x: mx.distributed.all_sum(x, group=group.mlx) / size, gradients)
    averaged = mlxdist.all_reduce_grads(gradients)
    mx.eval(expected, averaged)
    for (path, ours), (_, theirs) in zip(tree_flatten(averaged), tree_flatten(expected)):
        assert np.array_equal(np.array(ours), np.array(theirs)), path
    mlxdist.finalize()


def messages() -> None:
    """How many collectives leaves of these dtypes and element counts take."""
    f32, f16 = mx.float32, mx.float16
    for leaves, all_reduce_size, expected in [
        ([], 100, 0),
        ([(f32, 0), (f16, 0)], 100, 0),
        ([(f32, 1)], 100, 1),
        ([(f32, 10), (f32, 10), (f32, 5)], 100, 1),  # full to the last byte
        ([(f32, 10), (f32, 10), (f32, 6)], 100, 2),
        ([(f32, 10), (f32, 25), (f32, 10)], 100, 2),  # the large one goes alone, the others together
        ([(f32, 10), (f32, 99), (f32, 10)], 100, 2),
        ([(f32, 10), (f16, 10), (f32, 5)], 100, 1),  # 16 bits travel as 32
        ([(f32, 10), (mx.complex64, 10), (f32, 10), (mx.complex64, 2)], 100, 2),
        ([(f32, 8)] * 10, 100, 4),
        ([(f32, 8)] * 10, 1, 10),
        ([(f32, 8)] * 10, 2**25, 1),
    ]:
        grads = [mx.full((count,), rank + 1, dtype) for dtype, count in leaves]
        before = group.stats()["collectives"]
        averaged = mlxdist.average_gradients(grads, all_reduce_size=all_reduce_size)
        assert group.stats()["collectives"] == before, "average_gradients has not waited for the evaluation"
        mx.eval(averaged)
        assert group.stats()["collectives"] - before == expected, (leaves, all_reduce_size)
        assert all((leaf == (size + 1) / 2).all() for leaf in averaged)


def any_order_of_evaluation() -> None:
    """The ranks look at different leaves first; all leaves look the same from outside."""
    grads = [gradient((40, 7), "float32", rank, seed) for seed in range(6)]
    averaged = mlxdist.average_gradients(grads, all_reduce_size=1)
    for seed in (np.arange(6) * 5 + rank) % 6:
        assert reference.same(np.array(averaged[seed]), mean((40, 7), "float32", int(seed))), f"leaf {seed}"


def compiled() -> None:
    step = mx.compile(lambda grads: mlxdist.average_gradients(grads, all_reduce_size=100))
    for seed in (1, 2):
        averaged = step({"w": gradient((4, 5), "float32", rank, seed), "b": gradient((5,), "float32", rank, seed + 2)})
        assert reference.same(np.array(averaged["w"]), mean((4, 5), "float32", seed))
        assert reference.same(np.array(averaged["b"]), mean((5,), "float32", seed + 2))


def like_the_whole_batch() -> None:
    """Each rank its share of a batch, averaged, gives the gradients of the whole batch."""
    mx.random.seed(7)
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3))
    x, y = mx.random.normal((4 * size, 6)), mx.random.normal((4 * size, 3))
    gradients = nn.value_and_grad(model, lambda model, x, y: nn.losses.mse_loss(model(x), y))
    _, averaged = gradients(model, x[rank::size], y[rank::size])
    averaged = mlxdist.average_gradients(averaged, group)
    _, whole = gradients(model, x, y)
    for (path, ours), (_, theirs) in zip(tree_flatten(averaged), tree_flatten(whole), strict=True):
        assert mx.allclose(ours, theirs, rtol=1e-5, atol=1e-6), path


def weighted() -> None:
    """Unequal shares, one of them empty: as one process with all samples, in every dtype and size of bucket."""
    shares = [3, 0, 5, 1][:size]
    rows = np.split(np.random.default_rng(3).normal(size=(sum(shares), 37)).astype(np.float32), np.cumsum(shares)[:-1])
    expected = np.concatenate(rows).mean(axis=0)
    mine = mx.array(rows[rank]).mean(axis=0)  # NaN on the rank without samples
    assert shares[rank] or mx.isnan(mine).all()
    for dtype, reduce_dtype, tolerance in [
        (mx.float32, None, 1e-6),
        (mx.float32, mx.bfloat16, 0.02),
        (mx.bfloat16, None, 0.01),
        (mx.float16, mx.float16, 0.005),
    ]:
        for weight in (shares[rank], mx.array([shares[rank]])):
            for all_reduce_size in (0, 2**20):
                averaged = mlxdist.average_gradients(
                    {"w": mine.astype(dtype), "b": mine[:1].astype(dtype)},
                    None,
                    all_reduce_size,
                    reduce_dtype=reduce_dtype,
                    weight=weight,
                )
                for got, wanted in ((averaged["w"], expected), (averaged["b"], expected[:1])):
                    assert got.dtype == dtype
                    assert mx.allclose(got.astype(mx.float32), mx.array(wanted), atol=tolerance), (dtype, got, wanted)


def reduce_dtype() -> None:
    """By default what each rank adds to a 16-bit gradient counts, however small; the bytes are those of the dtype."""
    own = mx.full((4096,), 256.0 if rank == 0 else 0.75, mx.bfloat16)  # 256.75 is not a bfloat16
    for dtype, width, expected in [
        (None, 4, (256 + 0.75 * (size - 1)) / size),
        (mx.bfloat16, 2, None),
        (mx.float32, 4, (256 + 0.75 * (size - 1)) / size),
    ]:
        before = group.stats()["payload_bytes_sent"]
        averaged = mlxdist.average_gradients([own], reduce_dtype=dtype)[0]
        mx.eval(averaged)
        assert group.stats()["payload_bytes_sent"] - before == 4096 * width * (size - 1)  # small messages go direct
        assert averaged.dtype == mx.bfloat16
        assert expected is None or (averaged == mx.array(expected, mx.bfloat16)).all()


def refused() -> None:
    """On one rank alone, before any work: the group goes on."""
    good = mx.ones((3,))
    for grads, options, message in [
        ({"a": good, "b": [good, mx.arange(3)]}, {}, "'b.1' is int32"),
        ({"a": good, "mask": mx.array([True])}, {}, "'mask' is bool"),
        ({"a": np.ones(3)}, {}, "'a' is a ndarray, not an mx.array"),
        ({"a": None}, {}, "'a' is a NoneType"),
        ({"a": good}, {"reduce_dtype": mx.int32}, "reduce_dtype is int32; give a floating point dtype"),
        ({"a": good}, {"weight": -1}, "weight is -1; give a number from 0"),
        ({"a": good}, {"weight": mx.ones(2)}, r"weight is an array of shape \(2,\)"),
        ({"a": good}, {"group": mx.distributed.init()}, "group must be what mlxdist.init"),
    ]:
        if rank == 0:
            with pytest.raises(mlxdist.InvalidArgument, match=message):
                mlxdist.average_gradients(grads, **options)
    assert mlxdist.average_gradients({"a": mx.full((2,), float(rank))})["a"].tolist() == [(size - 1) / 2] * 2


def count(call: Any) -> tuple[int, int]:
    """Messages and bytes of their headers, without acknowledgements and what was sent twice on a slow machine."""
    counts = []
    for _ in range(5):
        before = group.stats()
        mx.eval(call())
        after = group.stats()
        control = after["control_messages_sent"] - before["control_messages_sent"]
        messages = after["messages_sent"] - before["messages_sent"] - control
        counts.append((messages, after["header_bytes_sent"] - before["header_bytes_sent"] - HEADER * control))
    return min(counts)


def no_more_messages() -> None:
    """The comparison of the trees travels in what is sent anyway."""
    leaf, folded = mx.ones((50, 2)), mx.ones((2, 1, 5, 1, 1, 1, 10))
    for x in (leaf, folded):
        plain = count(lambda x=x: mlxdist.all_sum(x))
        assert count(lambda x=x: mlxdist.average_gradients({"w": x}, all_reduce_size=1)) == plain
        assert plain[0] == size - 1


def other_trees(difference: str) -> None:
    """Of equal sizes: averaged with each other until now. Once it is an error, it is that for good."""
    beside = {"beside": mx.ones((4,))}
    mine = {
        "paths": [{"layers": {"0": mx.ones((2, 3))}}, {"layers": {"2": mx.ones((2, 3))}}],
        "shapes": [beside | {"w": mx.ones((2, 3))}, beside | {"w": mx.ones((3, 2))}],
        "many_dimensions": [{"w": mx.ones((1,) * 6 + (2, 3))}, {"w": mx.ones((1,) * 6 + (3, 2))}],
        "empty": [beside | {"w": mx.ones((0, 3), mx.float16)}, beside | {"w": mx.ones((0, 3))}],
    }[difference][min(rank, 1)]
    for _ in range(2):
        with pytest.raises(mlxdist.Mismatch, match="packed from trees that differ in paths, shapes or dtypes"):
            mx.eval(mlxdist.average_gradients(mine))


def unchanged() -> None:
    """In a group of one there is nothing to do, but the same things are rejected."""
    for grads in ({"a": [mx.ones((3,)), mx.ones((2,), mx.bfloat16)]}, {}, [], mx.ones((2, 2))):
        assert mlxdist.average_gradients(grads) is grads


run_scenario(globals())
