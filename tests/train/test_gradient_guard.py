"""mlxdist.train.GradientGuard: one decision for all ranks, the right names, and what it costs."""

import pytest

_LONG = pytest.mark.long


@pytest.mark.parametrize(
    "ranks", [pytest.param(1, marks=_LONG), 2, pytest.param(3, marks=_LONG), pytest.param(4, marks=_LONG)]
)
@pytest.mark.parametrize(
    "check",
    ["finite", "named", *(pytest.param(name, marks=_LONG) for name in ("in_a_row", "stop", "norm", "loss", "wrong"))],
)
def test_one_decision(run_scenarios, check, ranks):
    run_scenarios("gradient_guard.py", ranks, check)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=_LONG)])
def test_a_skipped_step_leaves_no_trace(run_scenarios, ranks):
    run_scenarios("gradient_guard.py", ranks, "training")


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=_LONG)])
@pytest.mark.parametrize("shards", ["fully_sharded", "tensor_parallel"])
def test_one_rank_has_the_shard_that_is_not_finite(run_scenarios, shards, ranks):
    run_scenarios("gradient_guard.py", ranks, shards)
