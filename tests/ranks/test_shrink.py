"""`mlxdist launch --elastic` and Group.shrink: ranks are lost, and the others go on."""

import json
import os
import re
import signal
import socket
import subprocess
import sys

import pytest
from launching import LAUNCH, RANK_SCRIPTS, launch, nothing_left, python, running  # noqa: F401
from ssh_hosts import ssh_hosts
from waiting import wait_for

SCRIPT = RANK_SCRIPTS / "shrink.py"


def shrink(ranks, *losses, least=1, options=(), **keywords):
    elastic = ["--elastic", str(least), *options]
    return launch(ranks, sys.executable, str(SCRIPT), *losses, options=elastic, timeout=120, **keywords)


def of_launcher(job):
    return [line.removeprefix("mlxdist launch: ") for line in job.stderr.decode().splitlines() if "launch: " in line]


@pytest.mark.parametrize(
    ("ranks", "losses", "left"),
    [
        (2, ["1:3"], [0]),
        (3, ["0:5"], [1, 2]),
        (4, ["2:3", "0:9", "3:10"], [1]),
        (4, ["1:7", "2:7"], [0, 3]),
        (4, ["0:4", "1:4:shrink"], [2, 3]),
        pytest.param(4, ["3:0", "2:1", "1:2"], [0], marks=pytest.mark.long),
        pytest.param(4, ["1:4", "0:4:shrink"], [2, 3], marks=pytest.mark.long),
        pytest.param(8, ["0:2", "7:2", "3:2:shrink", "4:11"], [1, 2, 5, 6], marks=pytest.mark.long),
        pytest.param(4, ["2:6:fails"], [0, 1, 3], marks=pytest.mark.long),
    ],
)
def test_the_others_go_on(ranks, losses, left):
    job = shrink(ranks, *losses)
    assert job.returncode == 0, job.stderr
    ends = sorted(re.findall(r"\[(\d)\] left (\[.*\]) with (\d) epochs as rank (\d)", job.stdout.decode()))
    assert ends == [(str(member), str(left), ends[0][2], str(rank)) for rank, member in enumerate(left)]
    said = of_launcher(job)
    lost = sorted(set(range(ranks)) - set(left))
    for member in lost:
        assert any(f"rank {member} is lost (" in line for line in said), said
    assert said[-1].endswith("had been lost.") and all(str(member) in said[-1] for member in lost)


@pytest.mark.parametrize("options", [[], pytest.param(["--hosts", "localhost"], marks=pytest.mark.long)])
def test_too_few_are_left(options):
    """The first loss is survived, the second one is the job's failure: the same error on all, named by the launcher."""
    job = shrink(4, "2:3", "0:9", least=3, options=options)
    assert job.returncode == 128 + signal.SIGKILL, job.stderr
    error = b"PeerLost: shrink: rank %d cannot go on: 2 of at least 3 ranks are left (--elastic 3)"
    assert error % 1 in job.stderr and error % 2 in job.stderr, job.stderr
    assert re.search(r"^rank 0 failed first, killed by SIGKILL.*; rank 2 had been lost; ", of_launcher(job)[-1])


@pytest.mark.long
def test_a_rank_that_does_not_come_is_ended():
    """It is stopped: the others have waited for it as long as for a rank at the start."""
    job = shrink(4, "1:5:stop", "2:5", env=os.environ | {"MLXDIST_RENDEZVOUS_TIMEOUT": "3"})
    assert job.returncode == 0, job.stderr
    assert b"[3] left [0, 3] with 1 epochs as rank 1" in job.stdout
    said = of_launcher(job)
    assert "rank 1 has not come to Group.shrink() in time, and is killed" in said, said


@pytest.mark.long
def test_ranks_of_an_agent():
    job = shrink(4, "0:5", "2:5:shrink", options=["--hosts", "localhost"])
    assert job.returncode == 0, job.stderr
    assert b"left [1, 3] with" in job.stdout


@pytest.mark.long
@pytest.mark.parametrize("loss", ["rank 0", "host"])
def test_ranks_on_three_hosts(tmp_path, loss):
    """Rank 0 is on another host then; a host that is lost ends its ranks for the launcher, too."""
    with ssh_hosts(tmp_path, count=3) as nodes:
        losses = ["0:5", "3:9"] if loss == "rank 0" else ["2:9:wait", "3:9:wait"]
        words = ["--hosts", ",".join(f"{name}:2" for name in nodes.names), "--ssh", nodes.ssh, "--elastic", "2"]
        command = nodes.command(*LAUNCH, *words, "--", sys.executable, str(SCRIPT), *losses)
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as launcher:
            if loss == "host":
                assert launcher.stdout.readline().endswith("waits\n")
                nodes.servers[1].kill()
            output, errors = launcher.communicate(timeout=240)
    assert launcher.returncode == 0, errors
    left = [1, 2, 4, 5] if loss == "rank 0" else [0, 1, 4, 5]
    assert output.count(f"left {left} with") == 4, (output, errors)


CALLS = """
import mlxdist
group = mlxdist.init()
for call in (lambda: group.split(0).shrink(), group.shrink):
    try:
        call()
    except mlxdist.InvalidArgument as error:
        print(error, flush=True)
print(group.shrink() is group if group.size() == 1 else "", mlxdist.all_sum(1).item())
"""


def test_shrink_needs_an_elastic_job():
    job = python(2, CALLS)
    assert job.returncode == 0, job.stderr
    lines = job.stdout.decode().splitlines()
    assert sum("a group made by split() cannot go on alone" in line for line in lines) == 2
    assert sum(line.endswith("start the job with `mlxdist launch --elastic MIN`") for line in lines) == 2
    assert {line[4:] for line in lines[4:]} == {" 2"}, "the group goes on"
    alone = subprocess.run([sys.executable, "-c", CALLS], capture_output=True, text=True, timeout=60)
    assert alone.stdout.splitlines()[-1] == "True 1", alone.stderr


def test_a_group_that_has_not_failed_shrinks_to_itself():
    program = """
import mlxdist
group = mlxdist.init().shrink()
print(group, mlxdist.all_sum(1).item())
"""
    job = python(2, program, options=["--elastic", "2"])
    assert job.returncode == 0, job.stderr
    assert sorted(job.stdout.splitlines()) == [b"[%d] <mlxdist.Group rank %d of 2> 2" % (n, n) for n in range(2)]
    assert of_launcher(job) == ["ranks 0 and 1 go on in a group of 2"]


def test_a_rank_in_a_session_of_its_own():
    """As `script -c` and others start it."""
    program = "import mlxdist; print(mlxdist.init().shrink())"
    job = launch(2, "setsid", "--wait", sys.executable, "-c", program, options=["--elastic", "2"], timeout=60)
    assert job.returncode == 0 and job.stdout.count(b"of 2>") == 2, job.stderr


AGAIN = """
import mlxdist, threading
def count():
    return len(os.listdir("/proc/self/fd")), threading.active_count(), len(os.listdir(os.environ["TMPDIR"]))
group = mlxdist.init().shrink()
first = count()
for n in range(8):
    group = group.shrink()
for n in range(200):  # what a group leaves behind for a moment
    if all(now <= then for now, then in zip(count(), first)):
        break
    late(0.05)
else:
    raise AssertionError((first, count()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors in /proc")
def test_nothing_is_left_of_groups_before():
    job = python(2, AGAIN, options=["--elastic", "2"], timeout=60)
    assert job.returncode == 0, job.stderr


ARRAYS = """
import signal, mlxdist, mlx.core as mx
group = mlxdist.init()
once, twice = mx.zeros(2) + 1, mx.zeros(2) + 2
mx.eval(once, twice)
mx.eval(twice)
try:
    while True:
        if rank == 1: os.kill(os.getpid(), signal.SIGKILL)
        mx.eval(mlxdist.all_sum(mx.ones(3)))
except mlxdist.Error:
    group = group.shrink()
print(twice.tolist(), (twice + 1).tolist(), flush=True)
try:
    assert once.tolist() == [1.0, 1.0]  # no operation was going on when the rank was lost
except mlxdist.PeerLost as error:
    assert "rank 1" in str(error)
print("right, or lost with the group", flush=True)
"""


def test_arrays_of_before():
    """What was evaluated once may be from an operation that has failed: it raises then, rather than be wrong."""
    job = python(2, ARRAYS, options=["--elastic", "1"])
    assert job.stdout == b"[0] [2.0, 2.0] [3.0, 3.0]\n[0] right, or lost with the group\n", job.stderr


LATE = """
import signal, mlxdist
mlxdist.init()
print("ready", flush=True)
if rank == 1: os.kill(os.getpid(), signal.SIGKILL)
late(60)
"""


def test_other_ends_of_a_job_with_a_loss():
    """The other rank has not noticed it yet."""
    job = python(2, LATE, options=["--elastic", "1", "--timeout", "6"], timeout=60)
    assert job.returncode == 124, job.stderr
    with running(2, LATE, ["--elastic", "1"]) as launcher:
        assert wait_for(lambda: len(running_ranks()) == 1, 30)
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(60) == 130


def running_ranks():
    """The ranks of the only job that still run, with their processes."""
    listed = subprocess.run([*LAUNCH[:-1], "ps", "--json"], capture_output=True, text=True, timeout=60)
    return json.loads(listed.stdout)[0]["pids"]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["-n", "2", "--elastic", "1", "--env", "MLXDIST_TOPOLOGY=0-1"], "--elastic needs a link between every two"),
        (["-n", "2", "--elastic", "3"], "--elastic 3: the job has only 2 ranks."),
        (["-n", "2", "--elastic", "1", "--backend", "ring"], "--elastic goes neither with --nodes nor"),
        (["-n", "2", "--elastic", "0"], "0 is not in the range"),
    ],
)
def test_options_that_contradict_each_other(options, problem):
    job = subprocess.run([*LAUNCH, *options, "--", "true"], capture_output=True, text=True, timeout=30)
    assert job.returncode == 2 and problem in " ".join(job.stderr.split()), job.stderr


WAITING = """
import mlxdist
group = mlxdist.init()
print(os.environ["MLXDIST_MEMBERSHIP"], flush=True)
try:
    while True:
        mlxdist.all_sum(1).item()
        late(0.01)
except mlxdist.PeerLost:
    group = group.shrink()
print(group, flush=True)
late(1000 if group.rank() == 0 and group.size() == 2 else 0)
"""
QUESTION = {"kind": "shrink", "member": 0, "token": "", "epoch": 0, "attempt": 1, "port": 1}


def test_what_is_no_question_is_dropped():
    """Other programs of this user may write anything to the socket: the job goes on."""
    with running(2, WAITING, ["--elastic", "1"], lines=1) as launcher:
        path = launcher.first_lines[0].split()[1].rpartition(":")[0]
        wrong = [QUESTION | change for change in ({"member": -1}, {"epoch": "0"}, {"port": 0}, {"attempt": None})]
        lines = [json.dumps(question).encode() for question in wrong]
        for line in [b"", b"\xff" * 5000, b"[1]", b"{}", *lines]:
            assert ask(path, line + b"\n") == b""
        for question in ({"member": 7}, {"epoch": 1}):
            assert b"" == ask(path, json.dumps(QUESTION | question).encode() + b"\n") or question == {"epoch": 1}
        kill(launcher, 1)
        assert launcher.wait(60) == 0, launcher.stderr.read()


def ask(path, line):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        connection.settimeout(20)
        try:
            connection.sendall(line)
            connection.shutdown(socket.SHUT_WR)
            return connection.recv(10_000)
        except (BrokenPipeError, ConnectionResetError):
            return b""


def kill(launcher, rank):
    """Kills a rank of the launcher's job."""
    os.kill(running_ranks()[str(rank)], signal.SIGKILL)


@pytest.mark.long
def test_dump_finds_the_ranks_of_a_smaller_group():
    """Rank 0 is another process than at the start."""
    with running(3, WAITING, ["--elastic", "1"], lines=3) as launcher:
        kill(launcher, 0)
        assert sorted(launcher.stdout.readline() for _ in range(2)) == [
            f"[{n + 1}] <mlxdist.Group rank {n} of 2>\n" for n in range(2)
        ]
        dump = [sys.executable, "-m", "mlxdist", "dump", "--json"]

        def found():
            result = subprocess.run(dump, capture_output=True, text=True, timeout=60)
            ranks = json.loads(result.stdout)["ranks"]
            return [each["rank"] for each in ranks if each["has_responded"]] == [0, 1] == [*range(len(ranks))]

        assert wait_for(found, 30)
        launcher.terminate()
        launcher.communicate(timeout=60)
