"""Operations run alike on all ranks, whatever their graphs are and what they evaluate."""


def test_operations_in_one_order(run_ranks):
    assert all("ordered" in output for output in run_ranks("ordering.py", 3))
