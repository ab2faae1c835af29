"""mlxdist.print: the lines of all ranks in the order of the ranks."""

import pytest


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_rank_0_prints_all(run_ranks, ranks):
    first, *others = run_ranks("ordered_print.py", ranks, "prints")
    lines = [f"rank {rank} array([{ranks}], dtype=int32)\n" for rank in range(ranks)]
    assert (
        first == "".join(f"rank {rank}: {line}" if ranks > 1 else line for rank, line in enumerate(lines)) + "passed\n"
    )
    assert others == ["passed\n"] * (ranks - 1)


def test_what_one_rank_cannot_do_is_an_error_of_all(run_ranks):
    assert run_ranks("ordered_print.py", 3, "fails_alike", resident=False) == ["passed\n"] * 3
