"""ExpertParallelSwitchGLU, dispatch and combine: as the dense layer on one process, in every mode."""

import pytest
from rank_counts import one_to_four

from mlxdist import InvalidArgument
from mlxdist.nn.expert_parallel import Placement


@one_to_four(2)
def test_exchanged_tokens(run_scenarios, ranks):
    """Gradients, handles, what is dropped."""
    run_scenarios("expert_parallel.py", ranks, "gradients", "handles", "capacities")


@one_to_four(2)
def test_options_that_are_set_later(run_scenarios, ranks):
    run_scenarios("expert_parallel.py", ranks, "settings")


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_mode_is_the_dense_layer(run_scenarios, ranks):
    """A thinned matrix of routings, token counts, experts, top-k and dtypes."""
    run_scenarios("expert_parallel.py", ranks, "thin", "wide")


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_whole_matrix(run_scenarios, ranks):
    run_scenarios("expert_parallel.py", ranks, "whole", timeout=240)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 3])
def test_layers_of_mlx_lm(run_scenarios, ranks):
    """Quantized forms, LoRA, memory, mx.compile, and the blocks of five models."""
    of_layers = ["quantized", "adapters", "new_adapters", "memory", "compiled", "blocks"]
    run_scenarios("expert_parallel.py", ranks, *of_layers)


@pytest.mark.long
@one_to_four(2)
def test_grid_with_tensor_parallelism(run_scenarios, ranks):
    run_scenarios("expert_grid.py", ranks, "grid", timeout=240)


def test_gradients_of_experts_cut_inside(run_scenarios):
    run_scenarios("expert_grid.py", 2, "thin")


@pytest.mark.long
@one_to_four(3)
def test_bad_input_of_one_rank_is_an_error_of_all(run_scenarios, ranks):
    run_scenarios("expert_parallel.py", ranks, "bad_input")


@one_to_four(2)
def test_few_tokens_take_one_collective(run_scenarios, ranks):
    """Counted, with results as of the dense layer, also where that has changed between calls."""
    run_scenarios("few_tokens.py", ranks, "decoding", "changes", "products")


@one_to_four(2)
def test_mistakes_with_few_tokens(run_scenarios, ranks):
    """What is noticed of them, and when: the routing at the next comparison, shapes at once."""
    run_scenarios("few_tokens.py", ranks, "mistakes", "shapes")


@pytest.mark.parametrize(
    ("num_experts", "ranks", "weights", "counts"),
    [
        (8, 2, None, [4, 4]),
        (8, 3, None, [3, 3, 2]),
        (3, 3, None, [1, 1, 1]),
        (12, 2, [2, 1], [8, 4]),
        (5, 3, [100, 1, 1], [3, 1, 1]),
    ],
)
def test_placement(num_experts, ranks, weights, counts):
    placement = Placement(num_experts, ranks, weights)
    assert placement.counts == counts
    assert [expert for rank in range(ranks) for expert in placement.local(rank)] == list(range(num_experts))
    assert all(expert in placement.local(placement.owners[expert]) for expert in range(num_experts))
    assert placement == Placement(num_experts, ranks, weights)


@pytest.mark.parametrize(("num_experts", "ranks", "weights"), [(2, 3, None), (4, 2, [1]), (4, 2, [1, 0]), (0, 1, None)])
def test_placement_that_cannot_be(num_experts, ranks, weights):
    with pytest.raises(InvalidArgument, match="number of experts"):
        Placement(num_experts, ranks, weights)
