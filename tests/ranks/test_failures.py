"""One rank does something else than the others: every rank gets an error that says what, soon, and nothing hangs."""

import re

import pytest

# What the last rank does differently, and what every rank must raise: the class, and texts that name both sides.
MISMATCHES = {
    "shape": ["all_sum of float32 [4, 3]", "all_sum of float32 [3, 4]"],
    "size_of_another_queue_pair": ["all_sum of float32 [10]", "all_sum of float32 [100000]"],
    "dtype": ["all_sum of float32 [8]", "all_sum of int32 [8]"],
    "operation": ["all_max of float32 [8]", "all_gather of float32 [8]"],
    "order": ["all_sum of float32 [5]", "all_sum of float32 [50000]"],
    "leaving_early": ["all_sum of float32 [8]", "finalize"],
}


def reported(output: str) -> tuple[str, float, str]:
    """Class, seconds and text of the error that a rank printed."""
    match = re.search(r"^(\w+) after ([0-9.]+) s: (.*)$", output, re.MULTILINE)
    assert match, f"a rank reported no error:\n{output}"
    return match[1], float(match[2]), match[3]


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.long), 3])
@pytest.mark.parametrize("kind", ["numpy", pytest.param("mlx", marks=pytest.mark.long)])
@pytest.mark.parametrize("scenario", MISMATCHES)
def test_mismatch_names_both_sides_on_every_rank(run_ranks, scenario, kind, ranks):
    for rank, output in enumerate(run_ranks("failures.py", ranks, scenario, kind, status=1)):
        name, seconds, text = reported(output)
        assert name == "Mismatch", f"rank {rank}: {text}"
        assert all(side in text for side in MISMATCHES[scenario]), f"rank {rank}: {text}"
        assert f"rank {ranks - 1} calls" in text
        assert (scenario == "leaving_early") == ("look for a loop that runs less often on rank" in text)
        assert seconds < 5


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.long), 3])
def test_root_that_differs(run_ranks, ranks):
    """Both roots send and neither receives: they notice at their next operation, all others at once."""
    for output in run_ranks("failures.py", ranks, "root", "numpy", status=1):
        text = re.search(r"Mismatch.*", output)[0]
        assert "broadcast with root 0" in text or "broadcast with root 1" in text


@pytest.mark.parametrize("kind", ["numpy", "mlx"])
def test_first_error_is_kept(run_ranks, kind):
    for output in run_ranks("failures.py", 2, "shape", kind, status=1):
        name, _, text = reported(output)
        assert f"again {name}: {text}" in output


@pytest.mark.parametrize("kind", ["numpy", "mlx"])
def test_a_rank_that_raises_ends_the_job(run_ranks, kind):
    outputs = run_ranks("failures.py", 3, "raises", kind, status=1)
    assert "ValueError: this rank's own mistake" in outputs[2]
    for output in outputs[:2]:
        name, seconds, text = reported(output)
        assert name in ("PeerLost", "Aborted") and "rank 2" in text and seconds < 5


@pytest.mark.parametrize("kind", ["numpy", "mlx"])
def test_a_killed_rank_is_named_within_a_second(run_ranks, kind):
    outputs = run_ranks("failures.py", 3, "killed", kind, status=128 + 9)
    for output in outputs[:2]:
        name, seconds, text = reported(output)
        assert name == "PeerLost" and "rank 2" in text and seconds < 1


def test_abort_reaches_every_rank(run_ranks):
    outputs = run_ranks("failures.py", 3, "aborts", "numpy", status=1)
    for output in outputs:
        name, seconds, text = reported(output)
        assert name == "Aborted" and "rank 2" in text and "there is no point in going on" in text and seconds < 5


@pytest.mark.long
def test_a_wait_ends_at_its_deadline(run_ranks):
    outputs = run_ranks("failures.py", 2, "late", "numpy", status=1, environment={"MLXDIST_TIMEOUT": "1"})
    for output in outputs:
        name, _, text = reported(output)
        assert name == "Timeout" and "rank 0 waited 1." in text and "all_sum" in text and "rank 1" in text
