"""GPU work never waits for a rank that is late: ranks meet on the CPU first.

A stand-in for the GPU ends work that waits, as macOS does.

Every scenario runs without meetings first, where the stand-in has to end the work: else it would show nothing.
"""

import re

import pytest

LATE, LIMIT = 8, 5  # seconds: what macOS allows, and more than that
SOON = (3, 1.5)  # the same in less time

TIMEOUT = "kIOGPUCommandBufferCallbackErrorTimeout"


def run(run_ranks, tmp_path, scenario, late, limit, status=0, **variables):
    environment = {"MLXDIST_MEET_AFTER": "0.3"} | variables
    return run_ranks("late_peers.py", 2, scenario, late, limit, tmp_path, status=status, environment=environment)


@pytest.mark.long
@pytest.mark.parametrize(
    "scenario, seconds",
    [
        ("stops", SOON),
        pytest.param("compiles", SOON, marks=pytest.mark.long),
        *(pytest.param(name, (LATE, LIMIT), marks=pytest.mark.long) for name in ("compiles", "stops")),
        *(pytest.param(name, (LATE, LIMIT), marks=pytest.mark.long) for name in ("loads", "receives")),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value[0]}s",
)
def test_a_late_rank_does_not_meet_the_gpu(run_ranks, tmp_path, scenario, seconds):
    ended = run(run_ranks, tmp_path, scenario, *seconds, status=None, MLXDIST_MEET_AFTER="0")
    assert TIMEOUT in ended[0] and "came" not in ended[0]
    assert all("came" in output for output in run(run_ranks, tmp_path, scenario, *seconds))


@pytest.mark.long
@pytest.mark.parametrize("faults", ["drop=1/4", "duplicate=1/4"])
def test_requests_and_responses_may_be_lost(run_ranks, tmp_path, faults):
    assert all("came" in out for out in run(run_ranks, tmp_path, "loads", *SOON, MLXDIST_INJECT_FAULTS=faults))
    assert all("came" in out for out in run(run_ranks, tmp_path, "mixed", *SOON, MLXDIST_INJECT_FAULTS=faults))


@pytest.mark.long
def test_ranks_that_connect_on_first_use(run_ranks, tmp_path):
    variables = {"MLXDIST_ON_DEMAND_THRESHOLD": "1"}
    run(run_ranks, tmp_path, "loads", *SOON, status=None, MLXDIST_MEET_AFTER="0", **variables)
    assert all("came" in output for output in run(run_ranks, tmp_path, "loads", *SOON, **variables))


@pytest.mark.long
@pytest.mark.parametrize("scenario", ["sends", "mixed", "meets"])
def test_what_the_meeting_must_not_change(run_ranks, tmp_path, scenario):
    assert all("came" in output for output in run(run_ranks, tmp_path, scenario, 2, 1.5))


def test_a_rank_without_a_gpu_responds(run_ranks, tmp_path):
    """It waits for no other rank itself."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os\n"
        "os.environ['MLXDIST_MEET_AFTER'] = '0' if os.environ['MLXDIST_RANK'] == '1' else '0.3'\n"
        "import mlx.core as mx, mlxdist\n"
        "for _ in range(3): mx.eval(mlxdist.all_sum(mx.ones(3)))\n"
        "stats = mlxdist.init().stats()\n"
        "print(stats['meetings'], 'meetings')\n"
    )
    outputs = run_ranks(program, 2)
    assert re.search("[1-3] meetings", outputs[0]) and "0 meetings" in outputs[1], outputs


@pytest.mark.parametrize(
    "scenario, size, late",
    [
        ("ring", 3, 0),
        pytest.param("handle_in_circle", 3, 0, marks=pytest.mark.long),
        *(pytest.param(name, 3, 0, marks=pytest.mark.long) for name in ("through_calls", "held_back", "p2p")),
        pytest.param("handles", 2, 0, marks=pytest.mark.long),
        pytest.param("refuse", 4, 0.4, marks=pytest.mark.long),
        pytest.param("req", 2, 1, marks=pytest.mark.long),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_legal_program_does_not_wait_for_ever(run_ranks, tmp_path, scenario, size, late):
    environment = {"MLXDIST_MEET_AFTER": "2", "MLXDIST_TIMEOUT": "15"}
    if scenario == "refuse":
        environment["MLXDIST_TOPOLOGY"] = "0-1,1-2,2-3,3-0"
    outputs = run_ranks("late_peers.py", size, scenario, late, 5, tmp_path, environment=environment)
    assert all("came" in output for output in outputs), outputs


@pytest.mark.long
def test_all_ranks_after_a_late_one_stay_on_the_cpu(run_ranks, tmp_path):
    for meet_after, status in (("0", None), ("2", 0)):
        environment = {"MLXDIST_MEET_AFTER": meet_after}
        outputs = run_ranks("late_peers.py", 4, "pipeline", *SOON, tmp_path, status=status, environment=environment)
        assert all("came" in output for output in outputs) == (meet_after != "0"), outputs


@pytest.mark.long
def test_requests_to_a_late_rank_become_rare(run_ranks, tmp_path):
    outputs = run_ranks("late_peers.py", 3, "one_is_late", 3, 5, tmp_path, environment={"MLXDIST_MEET_AFTER": "2"})
    assert all("came" in output for output in outputs), outputs


@pytest.mark.long
def test_a_deadline_of_the_operation_begins_after_the_meeting(run_ranks, tmp_path):
    outputs = run(run_ranks, tmp_path, "deadline", 0.8, 5)
    assert all("came" in output for output in outputs), outputs


@pytest.mark.long
def test_the_meeting_has_the_deadline_for_ranks_that_come_later(run_ranks, tmp_path):
    output = run(run_ranks, tmp_path, "gives_up", 4, 1, status=None, MLXDIST_TIMEOUT="1")[0]
    assert "Timeout: rank 0 waited 1.0 s in all_sum for rank 1, which has not entered it" in output, output


@pytest.mark.long
def test_an_abort_ends_the_meeting(run_ranks, tmp_path):
    output = run(run_ranks, tmp_path, "aborted", 2, 1, status=None, MLXDIST_STALL_WARNING="0.2")[0]
    assert "Aborted: rank 1 on" in output and "there is no point in going on" in output
    assert re.search(r"has waited [0-2] s in all_sum for rank 1, which has not entered it", output), output


@pytest.mark.long
def test_meet_names_the_rank_that_is_late(run_ranks, tmp_path):
    output = run(run_ranks, tmp_path, "meets_late", 4, 1, status=None)[0]
    assert re.search(r"Timeout: rank 0 waited 1.\d s in barrier #1 for rank 1, which has not entered", output), output


def test_the_timeout_of_the_gpu_names_the_late_rank(run_ranks, tmp_path):
    outputs = run(run_ranks, tmp_path, "translated", 2, 1, MLXDIST_MEET_AFTER="0")
    for output in outputs:
        assert re.search(
            r"^macOS ended GPU work of rank 0, .*: rank 1 was [12].\d s late for all_sum #1 of float32 \[3\]. "
            r"Call mlxdist.meet\(\).*\[rank 0 on \S+\]$",
            output,
            re.MULTILINE,
        ), output


@pytest.mark.long
def test_steps_of_the_demo_cost_no_message(run_ranks, tmp_path):
    # On a busy machine a step may take longer than the 2 s of MLXDIST_MEET_AFTER's default.
    outputs = run(run_ranks, tmp_path, "demo", 0, 5, MLXDIST_MEET_AFTER="30")
    assert all("came" in output for output in outputs)
