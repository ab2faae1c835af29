"""Ctrl-C, SIGTERM and SIGUSR2 act at once, also while a rank waits in C; handlers of other code stay.

Times are those of a quiet machine. Where other programs may have had the cores, another attempt counts.
"""

import re
from collections.abc import Callable

import pytest

WAITS = ["eval", *(pytest.param(how, marks=pytest.mark.long) for how in ("numpy", "mpi_shim", "handle", "finalize"))]


def at(output: str, what: str) -> float:
    found = re.search(rf"^{what} at ([0-9.]+)", output, re.MULTILINE)
    assert found, f"no {what!r}:\n{output}"
    return float(found[1])


def seconds(outputs: list[str], rank: int, what: str) -> float:
    """From the signal, on rank 1, to what a rank printed."""
    return at(outputs[rank], what) - at(outputs[1], "signal")


@pytest.fixture
def run_in_time(run_ranks) -> Callable[..., list[str]]:
    """run_in_time(limit, what, how, signal, status): the outputs of three ranks, where each rank of ``what`` printed
    its text less than ``limit`` seconds after the signal."""

    def run(limit: float, what: dict[int, str], how: str, number: str, status: int | None) -> list[str]:
        for _ in range(3):
            outputs = run_ranks("signals.py", 3, how, number, status=status)
            late = {rank: seconds(outputs, rank, text) for rank, text in what.items()}
            if max(late.values()) < limit:
                return outputs
        raise AssertionError(f"seconds after the signal: {late}")

    return run


@pytest.mark.parametrize("how", WAITS)
def test_ctrl_c_ends_a_wait_within_100_ms(run_in_time, how):
    outputs = run_in_time(0.1, {1: "raised KeyboardInterrupt", 2: "raised Aborted"}, how, "SIGINT", None)
    for output in (outputs[0], outputs[2]):
        assert re.search(r"Aborted .*: rank 1 on \S+ was interrupted \(SIGINT\) \[rank 1 on \S+\]$", output, re.M)


@pytest.mark.parametrize("how", ["eval", pytest.param("numpy", marks=pytest.mark.long)])
def test_sigterm_ends_a_wait_within_100_ms_and_exit_handlers_run(run_in_time, how):
    outputs = run_in_time(0.1, {1: "raised SystemExit", 2: "raised Aborted"}, how, "SIGTERM", 143)
    assert "at exit" in outputs[1] and "Traceback" not in outputs[1]
    for output in (outputs[0], outputs[2]):
        assert re.search(r"raised Aborted .*: rank 1 on \S+ was terminated \(SIGTERM\)", output)


@pytest.mark.long
def test_sigterm_outside_of_operations(run_ranks):
    """The status is that of the signal, and the others learn what it was; not that a rank has left."""
    outputs = run_ranks("signals.py", 3, "sleep", "SIGTERM", status=143)
    assert "raised SystemExit" in outputs[1] and "Aborted" not in outputs[1]
    assert all("rank 1 on" in output and "was terminated (SIGTERM)" in output for output in (outputs[0], outputs[2]))


@pytest.mark.long
def test_sigterm_ends_a_rank_that_is_stuck_in_c(run_in_time):
    outputs = run_in_time(0.1, {0: "raised Aborted", 2: "raised Aborted"}, "stuck", "SIGTERM", 143)
    assert "at exit" not in outputs[1]
    assert "terminated (SIGTERM)" in outputs[0] and "terminated (SIGTERM)" in outputs[2]


@pytest.mark.long
@pytest.mark.parametrize("how", ["init", "init_shim"])
def test_ctrl_c_ends_the_wait_for_missing_ranks(run_in_time, how):
    outputs = run_in_time(0.1, {1: "raised KeyboardInterrupt", 0: "raised Aborted"}, how, "SIGINT", None)
    assert "was interrupted (SIGINT)" in outputs[0]


@pytest.mark.long
def test_ctrl_c_is_not_lost_where_numpy_ignores_errors(run_in_time):
    run_in_time(0.2, {1: "raised KeyboardInterrupt"}, "array", "SIGINT", None)


def test_ctrl_c_in_python_leaves_the_group_alone(run_ranks):
    outputs = run_ranks("signals.py", 2, "python", "SIGINT")
    assert "interrupted" in outputs[1]


@pytest.mark.long
@pytest.mark.parametrize("number", ["SIGINT", pytest.param("SIGTERM", marks=pytest.mark.long)])
def test_a_handler_of_the_program_s_own_decides(run_ranks, number):
    outputs = run_ranks("signals.py", 2, "own_handler", number)
    assert at(outputs[1], "handled") <= at(outputs[1], "ended")
    assert seconds(outputs, 1, "ended") > 0.5


@pytest.mark.long
def test_a_second_ctrl_c_goes_before_a_handler_that_cannot_run(run_ranks):
    outputs = run_ranks("signals.py", 2, "impatient", "SIGINT")
    assert 0.3 < seconds(outputs, 1, "raised Aborted") < 0.6
    assert "was interrupted (SIGINT)" in outputs[0]


def test_sigusr2_calls_what_was_registered_and_everything_is_put_back(run_ranks):
    outputs = run_ranks("signals.py", 2, "own_wakeup", "SIGUSR2")
    assert seconds(outputs, 1, "called") < 0.1
    assert all("as before" in output for output in outputs)


def test_a_forked_child_has_its_signals_to_itself(run_ranks):
    assert all("goes on" in output for output in run_ranks("signals.py", 2, "forked", "SIGINT"))
