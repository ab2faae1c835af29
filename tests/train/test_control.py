"""mlxdist.train.Control under `mlxdist launch`: real signals, files, clocks and limits of memory; and its parts."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launching import LAUNCH, marked_processes, nothing_left  # noqa: F401
from waiting import wait_for

from mlxdist import InvalidArgument
from mlxdist.cluster.facts.memory import cgroup_memory, memory_now
from mlxdist.train import Control, LossAlarm

SCRIPT = Path(__file__).parents[1] / "rank_scripts" / "control.py"
_LONG = pytest.mark.long


def stops(outputs: list[str], step: int | None = None) -> bool:
    """Whether all ranks have decided alike, stopped, and come to their end."""
    texts = {output.split("decision", 1)[1].split("\n")[0] for output in outputs}
    assert all("done\n" in output for output in outputs) and len(texts) == 1, outputs
    return "stop=True save=True" in texts.pop()


@pytest.mark.parametrize("number", ["SIGUSR1", pytest.param("SIGTERM", marks=_LONG)])
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=_LONG), 3, pytest.param(4, marks=_LONG)])
def test_a_signal_to_one_rank_stops_all_after_the_same_step(run_ranks, number, ranks):
    outputs = run_ranks("control.py", ranks, "by_signal", number)
    assert stops(outputs)
    line = f"mlxdist: step 3: rank {ranks - 1} received {number}: the job saves a checkpoint and exits with status 0\n"
    assert [line in output for output in outputs] == [True] + [False] * (ranks - 1)


def start(directory: Path, ranks: int, *options: str) -> subprocess.Popen:
    command = [*LAUNCH, "-n", str(ranks), *options, "--", sys.executable, str(SCRIPT), "by_launcher", str(directory)]
    environment = os.environ | {"MLXDIST_TUNING_FILE": "none"}
    job = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while "step 5" not in (line := job.stdout.readline()):
        assert line, job.communicate()
    return job


def saved(directory: Path, ranks: int) -> set[str]:
    return {(directory / f"saved-{rank}").read_text() for rank in range(ranks)}


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=_LONG)])
def test_the_launcher_passes_a_signal_on_and_ends_with_status_0(tmp_path, number, nothing_left):  # noqa: F811
    job = start(tmp_path, 2, "--max-restarts", "2")
    job.send_signal(number)
    out, errors = job.communicate(timeout=30)
    assert (job.returncode, out.count("done")) == (0, 2), errors
    assert len(saved(tmp_path, 2)) == 1 and f"received {number.name}" in errors
    closing = [line for line in errors.splitlines() if line.startswith("mlxdist launch: ")]
    if number == signal.SIGTERM:
        assert len(closing) == 1 and "all ranks ended with status 0 after SIGTERM" in closing[0]
    else:
        assert not closing


def test_a_signal_to_every_process_of_the_job_as_slurm_sends_it(tmp_path, nothing_left):  # noqa: F811
    """The launcher passes it on, so that ranks get it twice, perhaps when they have stopped already."""
    job = start(tmp_path, 2)
    for _ in range(3):
        for process in map(str, marked_processes(os.environ["TEST_MARKER"])):
            os.kill(int(process.split()[0]), signal.SIGUSR1)
    out, errors = job.communicate(timeout=30)
    assert (job.returncode, out.count("done")) == (0, 2), errors
    assert len(saved(tmp_path, 2)) == 1


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=_LONG)])
def test_a_save_switch_and_regular_saves(run_ranks, tmp_path, ranks):
    outputs = run_ranks("control.py", ranks, "save_switch", tmp_path / "SAVE")
    assert all(output.endswith("done\n") for output in outputs)
    assert outputs[0].count(f"the save switch {tmp_path}/SAVE is there: the job saves a checkpoint\n") == 2


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=_LONG)])
def test_saves_by_time(run_ranks, ranks):
    assert run_ranks("control.py", ranks, "saves_by_time") == ["done\n"] * ranks


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_kill_switch_stops_this_job_and_the_next_ones(run_ranks, tmp_path, ranks):
    assert stops(run_ranks("control.py", ranks, "kill_switch", tmp_path / "STOP"))


@pytest.mark.long
@pytest.mark.parametrize("scenario", ["duration", "slurm"])
def test_the_clock_of_rank_0_stops_all(run_ranks, scenario):
    assert stops(run_ranks("control.py", 3, scenario))


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=_LONG), 2])
def test_the_device_memory_of_the_worst_rank(run_ranks, ranks):
    assert stops(run_ranks("control.py", ranks, "device_memory"))


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A control group of 1 GiB: what a container or a SLURM job is given."""
    for root, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        directory = Path(root, f"mlxdist-test-{os.getpid()}")
        try:
            directory.mkdir()
        except OSError:
            continue
        try:
            if (directory / limit).exists():
                (directory / limit).write_text(str(1 << 30))
                yield directory
                return
        finally:
            wait_for(lambda directory=directory: not (directory / "cgroup.procs").read_text())
            directory.rmdir()
    pytest.skip("this user cannot make a control group with a limit of memory")


def test_the_host_memory_of_a_control_group(run_ranks, cgroup):
    """One rank fills it with 32 MiB a step; the job ends before the system ends it."""
    outputs = run_ranks("control.py", 2, "host_memory", cgroup)
    assert stops(outputs)
    assert 5 < int(outputs[1].split(" allocations")[0].split()[-1]) < 20


@pytest.mark.parametrize("ranks", [3, pytest.param(4, marks=_LONG)])
def test_a_decision_is_one_collective(run_ranks, ranks):
    assert run_ranks("control.py", ranks, "one_collective") == ["done\n"] * ranks


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=_LONG), 2])
def test_what_one_rank_does_wrong_all_of_them_learn(run_ranks, ranks):
    assert run_ranks("control.py", ranks, "wrong") == ["done\n"] * ranks


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 3])
def test_the_mean_loss_of_all_ranks(run_ranks, ranks):
    outputs = run_ranks("control.py", ranks, "losses")
    assert all(output.endswith("done\n") for output in outputs)


# The loss alarm.


def test_a_control_of_the_next_group_goes_on():
    handler = signal.getsignal(signal.SIGUSR1)
    first = Control(max_seconds=1e6)
    second = Control(previous=first, save_every=10, saved=10)
    assert not second.decide(12).save
    first.close()
    os.kill(os.getpid(), signal.SIGUSR1)
    third = Control(previous=second, save_every=10, saved=9)
    third.close()
    assert signal.getsignal(signal.SIGUSR1) == handler
    decision = third.decide(12)
    assert (decision.save, decision.stop, decision.reason) == (True, True, "rank 0 received SIGUSR1")


def alarms(losses: list[float], **options) -> dict[int, str]:
    alarm = LossAlarm(**options)
    said = {step: alarm.observe(step, loss) for step, loss in enumerate(losses)}
    return {step: text for step, text in said.items() if text}


FALLING = [5.0 * 0.99**step + 0.02 * (step % 5) for step in range(200)]


def test_a_falling_loss_is_no_alarm():
    assert alarms(FALLING) == {}


def test_a_spike_and_its_recovery():
    found = alarms([*FALLING[:150], 9.0, 8.0, 7.0, *FALLING[153:]])
    assert list(found) == [150, 153]
    assert "the loss is 9" in found[150] and "the median of the 100 before is" in found[150]
    assert "again, 3 steps after its spike began" in found[153]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 50.0])
def test_a_loss_that_does_not_recover(value):
    found = alarms([*FALLING[:150], *[value] * 100], patience=30)
    assert list(found) == [150, 179] and "not recovered since step 150" in found[179]


def test_after_a_divergence_the_new_loss_is_normal():
    found = alarms([*[1.0] * 50, *[50.0] * 100, 500.0], patience=30)
    assert list(found) == [50, 79, 150]


def test_a_slow_rise_without_a_spike():
    found = alarms([1.0 + 0.001 * max(0, step - 100) for step in range(400)], window=50)
    assert found and all("the loss rises: the median of the last 50 is" in text for text in found.values())


def test_losses_from_the_first_step_on_that_are_not_finite():
    found = alarms([float("nan")] * 3 + [2.0] * 20, patience=5)
    assert list(found) == [0, 3]


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), max_size=200), st.integers(1, 20))
def test_any_losses(losses, patience):
    """No text is empty where a loss jumps, none comes twice for one spike."""
    found = alarms(losses, window=10, patience=patience)
    spikes = [step for step, text in found.items() if text.startswith("the loss is") and "before" in text]
    ends = [step for step, text in found.items() if "again" in text or "not recovered" in text]
    for first, second in zip(spikes, spikes[1:]):
        assert any(first < end < second for end in ends)


@pytest.mark.parametrize("options", [{"window": 9}, {"deviations": 0}, {"deviations": float("inf")}, {"patience": 0}])
def test_an_alarm_that_cannot_be(options):
    with pytest.raises(InvalidArgument, match=next(iter(options))):
        LossAlarm(**options)


# Memory.


def test_memory_is_that_of_the_strictest_group(tmp_path):
    """cgroup v2, as SLURM nests it: a limit of the job, none of the task."""
    task = tmp_path / "slurm" / "job_7" / "task_0"
    task.mkdir(parents=True)
    for directory, limit in ((task, "max"), (task.parent, 1000), (task.parent.parent, 5000)):
        (directory / "memory.max").write_text(f"{limit}\n")
        (directory / "memory.current").write_text("700\n")
        (directory / "memory.stat").write_text("anon 500\ninactive_file 100\nactive_file 60\n")
    memory = cgroup_memory(tmp_path, "0::/slurm/job_7/task_0\n")
    assert (memory.total, memory.available) == (1000, 400)
    assert cgroup_memory(tmp_path, "0::/elsewhere\n") == cgroup_memory(tmp_path, "")


def test_memory_of_this_machine():
    memory = memory_now()
    assert 0 < memory.available < memory.total
