"""The balance bias: a skewed router becomes balanced, all ranks keep bitwise the same bias; and what a load says."""

import mlx.core as mx
import pytest
from rank_counts import one_to_four

import mlxdist
from mlxdist.nn.expert_parallel.load_balancing import BalanceBias, ExpertLoad, count_experts


@one_to_four(2)
def test_a_skewed_router_becomes_balanced_on_all_ranks_alike(run_ranks, ranks):
    """Also: a rank without tokens, and indices on one rank that are no expert."""
    assert all("balanced" in output for output in run_ranks("expert_balance.py", ranks))


def test_the_bias_chooses_and_does_not_weight():
    balance = BalanceBias(3)
    balance.bias = mx.array([0.0, 0.0, 10.0])
    scores = mx.array([[0.5, 0.3, 0.1], [0.2, 0.6, 0.1]])
    indices, weights = balance.choose(scores, 2)
    assert [sorted(row) for row in indices.tolist()] == [[0, 2], [1, 2]]
    assert mx.array_equal(weights, mx.take_along_axis(scores, indices, axis=-1))
    gradient = mx.grad(lambda scores: (balance.choose(scores, 2)[1] * mx.array([1.0, 2.0])).sum())(scores)
    assert gradient[0, 1].item() == gradient[1, 0].item() == 0  # not chosen
    assert sorted(gradient[0].tolist()) == [0, 1, 2]
    compiled, _ = mx.compile(lambda scores: balance.choose(scores, 2))(scores)
    assert mx.array_equal(compiled, indices)


def test_an_expert_with_as_many_tokens_as_the_mean_keeps_its_bias():
    balance = BalanceBias(3, rate=0.25)
    balance.update(mx.array([0, 0, 0, 1, 1, 2]))
    assert balance.bias.tolist() == [-0.25, 0.0, 0.25]


def test_load():
    load = ExpertLoad([4, 0, 8, 0], owners=[0, 0, 1, 1])
    assert (load.total, load.mean, load.idle) == (12, 3, 2)
    assert load.imbalance == pytest.approx(8 / 3)
    assert load.per_rank.tolist() == [4, 8]
    both = load + ExpertLoad([0, 4, 0, 8])
    assert both.counts.tolist() == [4, 4, 8, 8] and both.per_rank.tolist() == [8, 16]
    lines = str(load).splitlines()
    assert lines[0] == "12 tokens for 4 experts: 3.0 on average, largest over mean 2.67, 2 idle"
    assert lines[1] == "per rank: 0: 4, 1: 8"
    assert lines[2].split() == ["expert", "rank", "tokens", "times", "mean"]
    assert [line.split() for line in lines[3:5]] == [["2", "1", "8", "2.67"], ["0", "0", "4", "1.33"]]
    empty = ExpertLoad([0, 0])
    assert (empty.imbalance, empty.idle, empty.per_rank) == (1, 2, None)
    assert "0 tokens for 2 experts" in str(empty)


def test_counts():
    assert count_experts(mx.array([[1, 1], [3, 9]]), 4).tolist() == [0, 2, 0, 1]
    assert count_experts(mx.zeros((0, 2), mx.uint8), 2).tolist() == [0, 0]


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: BalanceBias(0), "experts (0)"),
        (lambda: BalanceBias(4, rate=0), "rate (0) must be positive"),
        (lambda: BalanceBias(4, rate=float("nan")), "rate (nan)"),
        (lambda: BalanceBias(4).choose(mx.ones((2, 5)), 2), "shape (2, 5), expected (..., 4)"),
        (lambda: BalanceBias(4).choose(mx.ones((2, 4)), 5), "top_k is 5, but there are 4 experts"),
        (lambda: BalanceBias(4).update(mx.ones((2,))), "indices are integers, not float32"),
        (lambda: BalanceBias(4, owners=[0, 1]), "name one rank per expert"),
        (lambda: ExpertLoad([1]) + ExpertLoad([1, 2]), "have no sum"),
    ],
)
def test_rejected(call, words):
    with pytest.raises(mlxdist.InvalidArgument) as raised:
        call()
    assert words in str(raised.value)
