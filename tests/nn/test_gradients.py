"""Gradients, vmap and mx.compile of the operations that are linear, and Megatron's mappings: as in one process."""

import mlx.core as mx
import pytest

from mlxdist.nn import mappings

RANKS = pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.long), 3])


@RANKS
def test_operations_are_differentiated_as_in_one_process(run_scenarios, ranks):
    """All ranks' inputs on one process, a dense formula for every rank's result, and MLX's own gradient of that."""
    run_scenarios("gradients.py", ranks, "operations")


@pytest.mark.long
def test_vmap_and_compile(run_scenarios):
    """Every axis, scalars, and gradients below and above vmap."""
    run_scenarios("gradients.py", 3, "transformations")


@RANKS
def test_operations_without_a_gradient_raise(run_scenarios, ranks):
    run_scenarios("gradients.py", ranks, "without_gradient")


@RANKS
@pytest.mark.parametrize("scenario", ["tensor_parallel", pytest.param("sequence_parallel", marks=pytest.mark.long)])
def test_mappings_train_the_shards_of_a_model_as_the_full_one(run_scenarios, scenario, ranks):
    run_scenarios("gradients.py", ranks, scenario)


@pytest.mark.parametrize("name", [name for name in mappings.__all__ if name.endswith("_region")])
def test_mappings_change_nothing_in_a_group_of_one(name):
    x = mx.arange(6.0).reshape(2, 3)
    assert mx.array_equal(getattr(mappings, name)(x), x)
    assert mx.array_equal(mx.grad(lambda x: (getattr(mappings, name)(x) ** 2).sum())(x), 2 * x)
