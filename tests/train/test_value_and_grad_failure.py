"""A loss that raises on one rank of train.value_and_grad, when the others have begun to send."""

import pytest


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("micro_batches, failing_call", [(1, 2), pytest.param(2, 2, marks=pytest.mark.long), (2, 4)])
def test_one_rank_fails(run_ranks, micro_batches, failing_call, ranks):
    outputs = run_ranks("value_and_grad_failure.py", ranks, str(micro_batches), str(failing_call), status=1)
    assert all(output.startswith("done\n") for output in outputs), outputs
