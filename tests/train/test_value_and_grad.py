"""mlxdist.train.value_and_grad against nn.value_and_grad of one process with the whole batch."""

import pytest

LONG = pytest.mark.long
CHECKS = ["whole_batch", "messages", "sharded", "refused", "numpy_batches"]
MORE = ["unequal_shares", "dtypes", "nbytes", "overlap", "adapters"]


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=LONG), pytest.param(4, marks=LONG)])
@pytest.mark.parametrize("check", CHECKS + [pytest.param(name, marks=LONG) for name in MORE])
def test_ranks_train_as_one_process(run_scenarios, check, ranks):
    run_scenarios("value_and_grad.py", ranks, check)


@LONG
@pytest.mark.parametrize("check", ["whole_batch", "unequal_shares", "adapters", "refused"])
def test_group_of_one(run_scenarios, check):
    run_scenarios("value_and_grad.py", 1, check)
