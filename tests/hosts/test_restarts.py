"""`mlxdist launch --max-restarts`: the whole job again after a failure."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from fake_ssh import fake_ssh
from launching import ASKED, LAUNCH, RANK, closing_line, launch, nothing_left, python, running  # noqa: F401
from waiting import wait_for

from mlxdist.launch.exit_status import Ending, FirstFailure
from mlxdist.launch.jobs import LAUNCHER, Job, JobDirectory, find_job, list_jobs, read_job
from mlxdist.launch.restarts import run_with_restarts
from mlxdist.launch.runtime_directory import runtime_directory

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_and_generate.py"
RESTART = "restart = int(os.environ['MLXDIST_RESTART_COUNT'])\n"


def restarts(job):
    return [line for line in job.stderr.decode().splitlines() if line.startswith("mlxdist launch: ")]


@pytest.mark.long
def test_the_whole_group_starts_again_until_it_succeeds():
    program = RESTART + "print('start', restart, flush=True)\nif rank == 1 and restart < 2: os.kill(os.getpid(), 9)"
    job = python(2, program, options=["--max-restarts", "3"])
    assert job.returncode == 0, job.stderr
    assert sorted(job.stdout.decode().splitlines()) == [f"[{rank}] start {n}" for rank in range(2) for n in range(3)]
    first, second = restarts(job)
    assert re.search(r"rank 1 failed first, killed by SIGKILL .* after \d+\.\d s; .*; restart 1 of 3 in 1 s\.$", first)
    assert second.endswith("; restart 2 of 3 in 2 s.")


@pytest.mark.long
@pytest.mark.parametrize("options", [[], ["--hosts", "localhost"]], ids=["here", "host"])
def test_a_failure_that_repeats_at_the_same_step_is_not_tried_again(options):
    program = (
        RESTART
        + """
import mlxdist, mlx.core as mx
mlxdist.init()
print("start", restart, flush=True)
for step in range(10):
    mlxdist.set_step(step)
    mx.eval(mlxdist.all_sum(mx.ones(3)))
    if step == (3 if restart == 0 else 7) and rank == 1:
        raise SystemExit(3)
"""
    )
    job = python(2, program, options=["--max-restarts", "9", *options], timeout=90)
    assert job.returncode == 3, job.stderr
    assert job.stdout.count(b"start") == 6  # by two ranks: at step 3, and twice at step 7
    last = restarts(job)[-1]
    assert re.search(r"; it failed like that at step [78] before, so it is not started again\.$", last)


@pytest.mark.parametrize("note", ["1", "1 7"])
def test_only_a_failure_alike_is_a_repeated_one(note):
    """Another rank, status or step, step 0, or none that the program reports: it is started again."""
    noted = FirstFailure.parse(note)
    first = Ending(3, "", True, rank=noted.rank, step=noted.step)
    others = [replace(first, rank=2), replace(first, status=4), replace(first, step=8), replace(first, step=0)]
    for endings, starts in [([first] * 5, 2 if noted.step else 5), *(([first, other], 2) for other in others)]:
        assert starts_of(endings) == starts
    assert starts_of([replace(first, step=0)] * 3) == 3


def starts_of(endings):
    """Returns how often a job is started whose starts end so."""
    begun = []
    status = run_with_restarts(
        "job", lambda n: begun.append(n) or endings[n], len(endings) - 1, Impatient(), print, None
    )
    assert status == endings[len(begun) - 1].status
    return len(begun)


class Impatient:
    """A pause that takes no time."""

    def wait(self, seconds):
        return None


def test_a_host_that_is_gone_at_a_restart_costs_a_restart(tmp_path):
    """As one that has lost its power, and comes back. At the first start it is an error at once."""
    program = f"""
import os
with open({str(tmp_path / "calls")!r}, "a+") as calls:
    calls.seek(0)
    number = len(calls.read())
    calls.write("x")
if number in (1, 4):
    sys.exit("ssh: connect to host other port 22: No route to host")
sys.exit(subprocess.run(["sh", "-c", command]).returncode)"""
    options = ["--hosts", "other", "--ssh", fake_ssh(tmp_path, program).ssh[0], "--max-restarts", "2"]
    command = [
        *LAUNCH,
        *options,
        "--",
        sys.executable,
        "-c",
        RANK + RESTART + "print(restart, flush=True)\nos._exit(restart < 2)",
    ]
    job = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
    assert (job.returncode, job.stdout) == (0, b"[0 other] 0\n[0 other] 2\n"), job.stderr
    gone = "other does not respond: ssh: connect to host other port 22: No route to host"
    first, second = restarts(job)
    assert "restart 1 of 2 in 1 s" in first and gone in second and second.endswith("; restart 2 of 2 in 2 s.")
    (tmp_path / "calls").write_text("xxxx")
    job = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
    assert job.returncode == 1 and gone in job.stderr.decode() and not restarts(job)


def test_without_the_option_nothing_starts_again():
    job = python(1, RESTART + "print(restart); raise SystemExit(3)")
    assert (job.returncode, job.stdout) == (3, b"[0] 0\n")
    assert "restart" not in closing_line(job)


def test_each_start_is_a_job_of_its_own():
    """Its name, secret, address, directories; and the exit status is that of the last one."""
    names = ("MLXDIST_JOB", "MLXDIST_SECRET", "MLXDIST_RENDEZVOUS", "TMPDIR", "MLXDIST_FLIGHT_DIR")
    program = (
        f"print(*(os.environ[name] for name in {names}), sep='|')\n"
        "open(os.environ['MLXDIST_FLIGHT_DIR'] + '/flight-0.json', 'w').write('x')\n"
        "raise SystemExit(10 + restart)"
    )
    job = python(1, RESTART + program, options=["--max-restarts", "1"])
    first, second = (line.removeprefix("[0] ").split("|") for line in job.stdout.decode().splitlines())
    assert len(first) == len(names) and not set(first) & set(second)
    assert job.returncode == 11
    assert "with exit status 11" in restarts(job)[1] and "the last of 1 restarts" in restarts(job)[1]
    for start, line in zip((first, second), restarts(job)):
        assert f"flight recordings are in {start[-1]};" in line and os.path.exists(start[-1] + "/flight-0.json")


def test_ranks_find_together_in_every_start():
    program = RESTART + (
        "from mlxdist.base.environment import Environment; from mlxdist.runtime.rendezvous import Rendezvous\n"
        "environment = Environment.read(); assert environment.restart_count == restart\n"
        "r = Rendezvous(environment); print(r.all_gather(str(rank).encode(), 'x'), flush=True)\n"
        "if rank == 1 and restart == 0: os.kill(os.getpid(), 9)\n"
        "r.close()"
    )
    job = python(2, program, options=["--max-restarts", "1"])
    assert job.returncode == 0, job.stderr
    assert job.stdout.count(b"[b'0', b'1']") == 4


def test_processes_of_the_failed_start_do_not_meet_the_next():
    """Also those that have left their rank's group."""
    program = RESTART + (
        "import subprocess\n"
        "if restart == 0: subprocess.Popen(['sleep', SECONDS], start_new_session=True); raise SystemExit(1)\n"
        "print(subprocess.run(['pgrep', '-f', f'^sleep {SECONDS}$'], capture_output=True).stdout)"
    )
    job = python(1, f"SECONDS = '60.{os.getpid()}'\n" + program, options=["--max-restarts", "1"])
    assert (job.returncode, job.stdout) == (0, b"[0] b''\n"), job.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_no_restart_after_an_interrupt(number):
    with running(2, "print('start', flush=True); stay()", options=["--max-restarts", "5"]) as job:
        job.send_signal(number)
        out, err = job.communicate(timeout=10)
    assert job.returncode == 128 + number
    assert "start" not in out and "restart" not in err


@pytest.mark.parametrize("grace", ["5", pytest.param("0.2", marks=pytest.mark.long)])
def test_no_restart_after_the_agent_on_a_host_was_terminated(grace):
    """As `mlxdist stop --hosts` does there. Ranks that ignore it are killed after the grace, not before."""
    waiting = "import signal\n"
    waiting += "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" if grace == "0.2" else ""
    waiting += "print('start', flush=True); stay()"
    options = ["--hosts", "localhost", "--max-restarts", "5", "--grace-period", grace]
    with running(2, waiting, options=options) as job:
        (found,) = list_jobs()
        agent = read_job(found.directory).launcher
        assert agent != found.launcher == job.pid
        os.kill(agent, signal.SIGTERM)
        out, err = job.communicate(timeout=20)
    assert job.returncode == 143, err
    assert "start" not in out and "restart" not in err
    fate = "had to be killed (SIGKILL)" if grace == "0.2" else "ended after SIGTERM"
    assert "interrupted by SIGTERM on localhost after" in err and f"ranks 0 and 1 {fate}" in err


@pytest.mark.parametrize("where", ["launcher", pytest.param("agent", marks=pytest.mark.long)])
def test_sigusr1_reaches_the_ranks_of_a_host(where):
    program = ASKED + "print('start', flush=True)\nwhile not asked: late(0.01)"
    with running(2, program, options=["--hosts", "localhost"]) as job:
        (found,) = list_jobs()
        os.kill(job.pid if where == "launcher" else read_job(found.directory).launcher, signal.SIGUSR1)
        out, err = job.communicate(timeout=20)
    assert (job.returncode, out.count("asked")) == (0, 2), err


def test_an_interrupt_ends_the_pause_before_a_restart():
    program = RESTART + "print('start', flush=True); raise SystemExit(1)"
    with running(1, program, options=["--max-restarts", "5"]) as job:
        while "restart 2 of 5" not in job.stderr.readline():
            assert job.poll() is None
        job.send_signal(signal.SIGINT)
        out, err = job.communicate(timeout=10)
    assert job.returncode == 130
    assert out.count("start") == 1 and "interrupted by SIGINT before restart 2 of 5" in err


def test_a_job_is_listed_and_stopped_in_the_pause_before_a_restart():
    program = RESTART + "print(os.environ['MLXDIST_JOB'], flush=True); raise SystemExit(1)"
    with running(1, program, options=["--max-restarts", "5"], lines=3) as job:  # the next pause is 4 s long
        name = job.first_lines[2].split()[1].removesuffix("-2")
        assert wait_for(lambda: [(found.name, found.pids) for found in list_jobs()] == [(f"{name}-3", {})])
        (found,) = list_jobs()
        assert found.launcher == job.pid and found.command[0] == sys.executable and find_job(name) == found
        stop = [sys.executable, "-m", "mlxdist", "stop", name]
        assert subprocess.run(stop, capture_output=True, text=True, timeout=60).stdout == f"{name}-3 has ended\n"
        out, err = job.communicate(timeout=10)
    assert job.returncode == 143 and "interrupted by SIGTERM before restart 3 of 5" in err
    assert list(runtime_directory().iterdir()) == []


@pytest.mark.parametrize(
    "record", ["{", "[]", '{"launcher": 0, "job": "x", "started": 1, "command": []}', "[" * 99_999]
)
def test_a_damaged_record_of_restarts_names_no_job(record):
    directory = JobDirectory(Job("x", os.getpid(), 0.0, []), f"x{LAUNCHER}")
    assert [job.name for job in list_jobs()] == ["x"]
    (directory.path / "job.json").write_text(record)
    assert list_jobs() == []
    directory.remove()


def test_the_record_of_a_launcher_that_was_killed_is_removed():
    with running(1, "print(flush=True); stay()", options=["--max-restarts", "5"]) as job:
        job.kill()
        job.communicate(timeout=20)
    assert wait_for(lambda: list_jobs() == []) and list(runtime_directory().glob(f"*{LAUNCHER}")) != []
    assert wait_for(lambda: launch(1, "true").returncode == 0 and list(runtime_directory().iterdir()) == [])


def test_a_command_that_cannot_start_is_not_tried_again(tmp_path):
    program = tmp_path / "program"
    program.write_bytes(b"\x7fELF nonsense")
    program.chmod(0o755)
    job = launch(2, str(program), options=["--max-restarts", "5"])
    assert job.returncode == 126 and b"restart" not in job.stderr


def test_no_restart_when_the_output_has_no_reader():
    """`mlxdist launch ... | head`: the next start would fail for the same reason."""
    line = " ".join([*LAUNCH, "-n 1 --max-restarts 5 -- yes | head -n 1; echo ${PIPESTATUS[0]}"])
    job = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=20)
    assert job.stdout.split("\n")[:2] == ["[0] y", str(128 + signal.SIGPIPE)]
    assert "restart" not in job.stderr


def test_bad_numbers():
    job = launch(1, "true", options=["--max-restarts", "-1"])
    assert job.returncode == 2 and b"--max-restarts" in job.stderr


def run_example(directory, *launcher_options):
    """A short training, with its files in ``directory``. The launcher, its output in a pipe."""
    options = ["--steps", "40", "--checkpoint-every", "8", "--tokens", "2"]
    files = ["--out", directory / "model", "--json", directory / "demo.json"]
    command = [*LAUNCH, "-n", "2", *launcher_options, "--", sys.executable, EXAMPLE, *options, *files]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([str(part) for part in command], **streams)


@pytest.mark.long
def test_the_example_goes_on_from_its_checkpoint(tmp_path):
    """A rank is killed in the middle; in the end the weights are bit for bit those of an undisturbed training."""
    directories = [tmp_path / "undisturbed", tmp_path / "killed"]
    undisturbed = run_example(directories[0])
    said = undisturbed.communicate(timeout=120)[0]
    assert undisturbed.returncode == 0, said

    job = run_example(directories[1], "--max-restarts", "1")
    checkpoints = directories[1] / "model" / "checkpoints"
    assert wait_for(lambda: (checkpoints / "step-00000008" / "manifest.json").exists(), 60)
    (running_job,) = list_jobs()
    os.kill(running_job.pids[1], signal.SIGKILL)
    said = job.communicate(timeout=120)[0]
    assert job.returncode == 0, said

    assert re.search(r"rank 1 failed first, killed by SIGKILL .*; restart 1 of 1 in 1 s\.", said), said
    report = json.loads((directories[1] / "demo.json").read_text())
    assert 8 <= report["training"]["resumed_at"] < 40 and report["training"]["resumed_at"] % 8 == 0
    assert f"[0] resumed after step {report['training']['resumed_at']}\n" in said
    assert report["loss_first"] == json.loads((directories[0] / "demo.json").read_text())["loss_first"]
    assert sorted(path.name for path in checkpoints.iterdir()) == ["lock", "step-00000032", "step-00000040"]
    first, second = ((directory / "model" / "model.safetensors").read_bytes() for directory in directories)
    assert first == second


# As in docs/launch.md: 100 steps of a training that adds 2 to its weights, and fails once.
RECIPE = """
import os, sys, mlx.core as mx, mlxdist
from mlxdist import train
checkpoints = train.Checkpoints(sys.argv[1])
state = {"weights": mx.zeros(1)}
step = checkpoints.load(state, other_run="--resume" in sys.argv) or 0
for step in range(step + 1, 101):
    state["weights"] = state["weights"] + 2
    if step % 10 == 0:
        checkpoints.save(step, state)
    if step == 55 and os.environ["MLXDIST_RESTART_COUNT"] == "0":
        sys.exit("lost a rank")
print("weights", state["weights"].item(), flush=True)
"""


def recipe(directory, *arguments, ranks=2):
    (directory / "recipe.py").write_text(RECIPE)
    program = [sys.executable, str(directory / "recipe.py"), str(directory / "checkpoints"), *arguments]
    return launch(ranks, *program, options=["--max-restarts", "1"], timeout=120)


@pytest.mark.long
def test_a_restart_goes_on_with_the_checkpoints_of_its_own_run(tmp_path):
    job = recipe(tmp_path)
    assert job.returncode == 0, job.stderr
    assert sorted(job.stdout.splitlines()) == [b"[0] weights 200.0", b"[1] weights 200.0"]

    shutil.rmtree(tmp_path / "checkpoints" / "step-00000100")
    again = recipe(tmp_path, ranks=1)
    assert (again.returncode, again.stdout) == (1, b"")
    assert re.search(rb"step 90 in .* is of another run, [0-9a-f]{16}; .* other_run=True\)", again.stderr)
    again = recipe(tmp_path, "--resume", ranks=1)
    assert (again.returncode, again.stdout) == (0, b"[0] weights 200.0\n"), again.stderr


# It looks for a checkpoint after a restart alone.
FOREIGN = """
import os, sys, mlx.core as mx, mlxdist
from mlxdist import train
checkpoints = train.Checkpoints(sys.argv[1])
state, step = {"weights": mx.zeros(1)}, 0
if os.environ["MLXDIST_RESTART_COUNT"] != "0":
    step = checkpoints.load(state) or 0
for step in range(step + 1, 101):
    state["weights"] = state["weights"] + 2
    if step % 10 == 0:
        checkpoints.save(step, state)
print("weights", state["weights"].item(), flush=True)
"""


@pytest.mark.long
def test_a_restart_does_not_go_on_with_the_checkpoint_of_another_run(tmp_path):
    """The weights would be 40.0 and the status 0, where 200.0 is right."""
    save = "import sys, mlx.core as mx; from mlxdist import train\n"
    save += "train.Checkpoints(sys.argv[1]).save(80, {'weights': mx.zeros(1)})"
    assert launch(1, sys.executable, "-c", save, str(tmp_path)).returncode == 0
    job = launch(1, sys.executable, "-c", FOREIGN, str(tmp_path), options=["--max-restarts", "1"], timeout=60)
    assert (job.returncode, job.stdout) == (1, b""), job
    assert re.search(rb"Checkpoints.save: .* has a checkpoint of step 80 of another run", job.stderr)
    assert re.search(rb"Checkpoints.load: the checkpoint of step 80 in .* is of another run", job.stderr)


# Each rank has something of its own, saved every 10, 8 and 5 steps. Rank 1 dies in the first save of the first start,
# when rank 0 may have its file, and in the second save of the second.
KILLED_BETWEEN_THE_PARTS = """
import os, sys, mlx.core as mx, mlxdist
from mlxdist.train import Checkpoints
from mlxdist.train.checkpoint import saving
group, start = mlxdist.init(), int(os.environ["MLXDIST_RESTART_COUNT"])
saves, write_tensors = [0], saving.write_tensors
def die(*arguments):
    saves[0] += 1
    if group.rank() == 1 and saves[0] == start + 1 < 3:
        os.kill(os.getpid(), 9)
    return write_tensors(*arguments)
saving.write_tensors = die
checkpoints, own = Checkpoints(sys.argv[1]), {"weights": mx.zeros(1)}
step = checkpoints.load({}, own=own) or 0
print("from", step, flush=True)
for step in range(step + 1, 31):
    own["weights"] = own["weights"] + 2
    if step % (10, 8, 5)[start] == 0:
        checkpoints.save(step, {}, own=own)
        checkpoints.wait()
print("weights", own["weights"].item(), flush=True)
"""


@pytest.mark.long
def test_a_job_that_was_killed_between_the_parts_goes_on(tmp_path):
    options = ["--max-restarts", "2"]
    program = [sys.executable, "-c", KILLED_BETWEEN_THE_PARTS, str(tmp_path)]
    job = launch(2, *program, options=options, timeout=120)
    assert job.returncode == 0, job.stderr
    lines = [line.removeprefix("[0] ") for line in job.stdout.decode().splitlines() if line.startswith("[0]")]
    assert lines == ["from 0", "from 0", "from 8", "weights 60.0"]
