"""Every algorithm by itself: exact in the order in which it reduces, the same on every rank and in every run."""

import os
import re

import pytest

MANY = [pytest.param(ranks, marks=pytest.mark.long) for ranks in (4, 5, 8)]


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.long), 3, *MANY])
@pytest.mark.parametrize("algorithm", ["direct", "mesh", "ring", "recursive_doubling", "tree"])
def test_exact_in_its_own_order(run_ranks, algorithm, ranks):
    digests = set()
    for output in run_ranks("algorithms.py", ranks, environment={"MLXDIST_ALGO": algorithm}):
        match = re.search(f"^{algorithm} is exact in [a-z_ ]+; ([0-9a-f]+)$", output, re.MULTILINE)
        assert match, output
        digests.add(match[1])
    assert len(digests) == 1, "the ranks have different results"


@pytest.mark.parametrize(
    "algorithm", ["ring", *(pytest.param(other, marks=pytest.mark.long) for other in ("mesh", "recursive_doubling"))]
)
def test_same_in_every_run(run_ranks, algorithm):
    outputs = [run_ranks("algorithms.py", 3, environment={"MLXDIST_ALGO": algorithm})[0] for _ in range(2)]
    assert outputs[0] == outputs[1] and algorithm in outputs[0]


@pytest.mark.parametrize(
    "operation, odd, even",
    [
        ("all_sum", "ring", "mesh"),
        ("all_sum", "direct", "recursive_doubling"),
        ("all_gather", "direct", "ring"),
        ("reduce_scatter", "ring", "direct"),
        ("broadcast", "tree", "ring"),
        ("reduce", "tree", "mesh"),
    ],
)
def test_ranks_with_different_algorithms_are_reported(run_ranks, operation, odd, even):
    outputs = run_ranks("algorithms_differ.py", 3, operation, odd, even, status=1)
    assert all("Mismatch: ranks disagree" in output for output in outputs), outputs
    # The rank that noticed has reported it to all others. Where one rank waits for another outside of it, the error can
    # only name a possible cause.
    assert all("MLXDIST_ALGO" in output for output in outputs), outputs


def crowded(run_ranks, *cores):
    """What ranks bound to these cores choose for a small all_sum."""
    return set("".join(run_ranks("crowded.py", len(cores), *cores)).split())


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads are not bound to cores here")
def test_more_ranks_than_cores(run_ranks):
    """Few messages in all."""
    core = str(min(os.sched_getaffinity(0)))
    assert crowded(run_ranks, *[core] * 5) == {"tree"}


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads are not bound to cores here")
def test_a_core_for_each_rank(run_ranks):
    """All ranks count the cores of all: what one of them may use is no measure."""
    cores = sorted(map(str, os.sched_getaffinity(0)))
    if len(cores) < 5:
        pytest.skip("this machine has too few cores")
    assert crowded(run_ranks, *cores[:5]) == {"direct"}
