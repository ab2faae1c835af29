"""Every algorithm by itself: exact in the order in which it reduces, the same on every rank and in every run."""

import re

import pytest


MANY = [pytest.param(ranks, marks=pytest.mark.long) for ranks in (4, 5, 8)]


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.long), 3, *MANY])
@pytest.mark.parametrize("algorithm", ["direct", "mesh", "ring", "doubling", "tree"])
def test_exact_in_its_own_order(run_ranks, algorithm, ranks):
    digests = set()
    for output in run_ranks("algorithms.py", ranks, environment={"MLXDIST_ALGO": algorithm}):
        match = re.search(f"^{algorithm} is exact in [a-z_ ]+; ([0-9a-f]+)$", output, re.MULTILINE)
        assert match, output
        digests.add(match[1])
    assert len(digests) == 1, "the ranks have different results"


@pytest.mark.parametrize(
    "algorithm", ["ring", *(pytest.param(other, marks=pytest.mark.long) for other in ("mesh", "doubling"))]
)
def test_same_in_every_run(run_ranks, algorithm):
    outputs = [run_ranks("algorithms.py", 3, environment={"MLXDIST_ALGO": algorithm})[0] for _ in range(2)]
    assert outputs[0] == outputs[1] and algorithm in outputs[0]


@pytest.mark.parametrize(
    "operation, odd, even",
    [
        ("all_sum", "ring", "mesh"),
        ("all_sum", "direct", "doubling"),
        ("all_gather", "direct", "ring"),
        ("reduce_scatter", "ring", "direct"),
        ("broadcast", "tree", "ring"),
        ("reduce", "tree", "mesh"),
    ],
)
def test_ranks_with_different_algorithms_are_told(run_ranks, operation, odd, even):
    outputs = run_ranks("algorithms_differ.py", 3, operation, odd, even, status=1)
    assert all("Mismatch: ranks disagree" in output for output in outputs), outputs
    # The one who noticed has told all others. Where one rank waits for another that has no part in it, nobody can say
    # more than what may be the cause.
    assert all("MLXDIST_ALGO" in output for output in outputs), outputs
