"""mlxdist.average_gradients against a plain mean in NumPy: odd trees, mixed dtypes, and how many messages they take."""

import pytest


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.long), 3])
@pytest.mark.parametrize(
    "check",
    ["odd_trees", "messages", "compiled", "like_the_whole_batch", "refused", "of_guides"]
    + [pytest.param(name, marks=pytest.mark.long)
       for name in ("no_more_messages", "any_order_of_evaluation", "weighted", "reduce_dtype")],
)  # fmt: skip
def test_averages(run_scenarios, check, ranks):
    run_scenarios("data_parallel.py", ranks, check)


@pytest.mark.parametrize(
    "difference, ranks",
    [("paths", 2)]
    + [pytest.param(*case, marks=pytest.mark.long) for case in (("shapes", 2), ("many_dimensions", 3), ("empty", 4))],
)
def test_trees_that_differ_are_not_averaged(run_scenarios, difference, ranks):
    run_scenarios("data_parallel.py", ranks, "other_trees", difference)


@pytest.mark.parametrize("check", ["unchanged", "refused", "odd_trees"])
def test_group_of_one(run_scenarios, check):
    run_scenarios("data_parallel.py", 1, check)
