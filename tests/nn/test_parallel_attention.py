"""Attention of which each rank computes some of the heads: values, gradients and caches of the full layer."""

import pytest
from rank_counts import one_to_four

from mlxdist.base.errors import InvalidArgument
from mlxdist.nn.tensor_parallel.parallel_attention import split_heads


@one_to_four(3)
def test_as_the_full_layer(run_scenarios, ranks):
    """Within 1e-4 of the plain formula; the way back bitwise."""
    checks = ["dense", "sequence_parallel", "decoding", "quantized", "adapters", "constructor", "bad_input"]
    run_scenarios("parallel_attention.py", ranks, *checks)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_modules_of_mlx_lm(run_scenarios, ranks):
    """Attention, caches and MLP of Llama and Qwen3 themselves."""
    pytest.importorskip("mlx_lm")
    run_scenarios("parallel_attention.py", ranks, "mlx_lm")


@pytest.mark.parametrize(
    ("heads", "ranks", "weights", "sizes", "kv_heads"),
    [
        ((8, 8), 2, None, [4, 4], [(0, 4), (4, 8)]),
        ((8, 4), 2, [3, 1], [6, 2], [(0, 3), (3, 4)]),
        ((8, 2), 4, None, [2, 2, 2, 2], [(0, 1), (0, 1), (1, 2), (1, 2)]),
        ((8, 1), 2, [3, 1], [6, 2], [(0, 1), (0, 1)]),
        ((6, 2), 3, None, [2, 2, 2], [(0, 1), (0, 2), (1, 2)]),
        ((8, 2), 4, [3, 1, 1, 3], [3, 1, 1, 3], [(0, 1), (0, 1), (1, 2), (1, 2)]),
        ((6, 2), 3, [1, 1, 1], [2, 2, 2], [(0, 1), (0, 2), (1, 2)]),
        ((8, 2), 3, [1, 1, 1], [4, 2, 2], [(0, 1), (1, 2), (1, 2)]),
        ((8, 2), 3, [2, 1, 1], [4, 2, 2], [(0, 1), (1, 2), (1, 2)]),
        ((4, 2), 3, [1, 1, 9], [1, 1, 2], [(0, 1), (0, 1), (1, 2)]),
        ((12, 3), 7, [1] * 7, [2, 2, 2, 2, 2, 1, 1], [(0, 1)] * 2 + [(1, 2)] * 2 + [(2, 3)] * 3),
    ],
)
def test_heads_of_the_ranks(heads, ranks, weights, sizes, kv_heads):
    assert split_heads("test", *heads, ranks, weights) == (sizes, [range(*bounds) for bounds in kv_heads])


@pytest.mark.parametrize(
    ("heads", "ranks", "weights", "words"),
    [
        ((8, 3), 2, None, "8 query heads are not a multiple of 3 KV heads"),
        ((8, 4), 3, None, "KV heads: 4 cannot be split into 3 equal shards"),
        ((2, 1), 4, None, "query heads of a KV head: 2"),
        ((8, 2), 3, None, "query heads: 8 cannot be split into 3 equal shards"),
        ((2, 1), 4, None, "query heads of a KV head: 2 is too little for 4 ranks"),
        ((0, 1), 2, None, "n_heads must be a positive integer"),
    ],
)
def test_heads_that_cannot_be_cut(heads, ranks, weights, words):
    with pytest.raises(InvalidArgument, match=words):
        split_heads("test", *heads, ranks, weights)
