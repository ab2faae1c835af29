"""The gradients of expert parallelism, and their collectives, do not depend on what was routed or is evaluated."""

import pytest


@pytest.mark.parametrize(("ranks", "cases"), [pytest.param(2, 16, marks=pytest.mark.long), (3, 8)])
def test_gradients_are_those_of_the_dense_layer(run_ranks, ranks, cases):
    """Skewed routing, ranks without tokens or pairs, shards of the gradients; as many collectives on every rank."""
    assert all("right" in output for output in run_ranks("expert_gradients.py", ranks, 0, cases))


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "cases"), [(1, 10), (2, 60), (3, 40)])
def test_many_gradients(run_ranks, ranks, cases):
    assert all("right" in output for output in run_ranks("expert_gradients.py", ranks, 1000, 1000 + cases, timeout=240))


def test_training_and_inference(run_scenarios):
    """Checkpoints, 16 and 8 bits on the wire, idle ranks; and no operation of the stages without a gradient."""
    run_scenarios("expert_training.py", 2, "idle", "operations", "exchanged", "checkpointed")
