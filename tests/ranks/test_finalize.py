"""The end of a job: no rank leaves while another misses something, however long a last message is lost."""

import sys

import pytest
from launching import RANK_SCRIPTS, closing_line, launch


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3, pytest.param(4, marks=pytest.mark.long)])
def test_the_last_messages_are_lost(run_ranks, ranks):
    """Rank 0 has met all others, and they have not received its message: also when they re-create their queue pairs."""
    outputs = run_ranks("finalize.py", ranks, "3")
    assert all(output.endswith("finalized\n") for output in outputs)


def test_a_rank_is_killed_meanwhile(run_ranks):
    """Ranks that have all their data wait for one that has not: they get an error that it will never enter."""
    outputs = run_ranks("finalize.py", 3, "2", "0.5", status=128 + 9)
    assert all("PeerLost: rank 2 " in output for output in outputs[:2])


@pytest.mark.parametrize("ranks", [1, 3, pytest.param(2, marks=pytest.mark.long)])
def test_another_world_after_finalize(run_ranks, ranks):
    assert run_ranks("second_world.py", ranks) == ["as expected\n"] * ranks


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_another_world_after_a_failure(run_ranks, ranks):
    assert run_ranks("after_failure.py", ranks) == ["as expected\n"] * ranks


@pytest.mark.parametrize(
    "how, ranks, first, status",
    [
        ("sys.exit", 2, 1, 7),
        ("exit", 3, 0, 7),
        ("raise", 2, 1, 7),
        ("kept", 2, 1, 7),
        ("finally", 2, 0, 7),
        ("handler", 2, 1, 7),
        pytest.param("class", 2, 0, 7, marks=pytest.mark.long),
        pytest.param("late", 2, 1, 7, marks=pytest.mark.long),
        pytest.param("text", 2, 0, 1, marks=pytest.mark.long),
        pytest.param("sys.exit", 4, 2, 7, marks=pytest.mark.long),
    ],
)
def test_an_exit_with_a_status_is_an_exit(run_ranks, how, ranks, first, status):
    """The job ends with that status, and all say whose it is; it was a Mismatch about finalize, and status 1."""
    outputs = run_ranks("exits.py", ranks, how, first, status=status)
    for rank, output in enumerate(outputs):
        assert "Mismatch" not in output
        if rank != first:
            assert f"Aborted: rank {first} on " in output and f"exited with status {status} [rank {first}" in output


@pytest.mark.parametrize("first", [0, 1])
def test_the_launcher_names_the_rank_that_has_exited(first):
    job = launch(2, sys.executable, str(RANK_SCRIPTS / "exits.py"), "sys.exit", str(first))
    assert job.returncode == 7
    assert closing_line(job).startswith(f"mlxdist launch: rank {first} failed first, with exit status 7 after ")


def test_an_exit_that_does_not_end_the_program_is_none(run_ranks):
    """It is caught, or of a thread, of a forked child, or of an exit handler."""
    assert run_ranks("exits.py", 2, "caught", 1) == ["sum 2.0\n"] * 2


def test_an_exit_because_of_a_failure_is_not_the_first(run_ranks):
    """Of the error that all ranks raise, which is not that of the exit."""
    outputs = run_ranks("exits.py", 2, "after a failure", 1, status=None)
    assert "Mismatch: ranks disagree" in outputs[0] and "exited with status" not in outputs[0]
