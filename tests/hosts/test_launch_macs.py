"""What `mlxdist launch` does on Macs only: no sleep, no fast synch for two ranks on a GPU, and a longer grace.

The launcher and the agents run as on macOS (as_on_a_mac.py), with a `caffeinate` that is a script; no Mac was asked.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launching import LAUNCH, RANK, launch, marked_processes, nothing_left, running  # noqa: F401  (nothing_left is a fixture of every test)
from waiting import wait_for

from mlxdist import _native
from mlxdist.cluster.hostfile.options import HostSelection
from mlxdist.cluster.hostfile.parsing import parse, read
from mlxdist.launch.reaper import LOST_DOMAINS, Reaper, closing_line
from mlxdist.tools.doctor.cluster import CheckOptions
from mlxdist.tools.doctor.job import place_ranks, try_job

AS_ON_A_MAC = Path(__file__).parents[1] / "support" / "as_on_a_mac.py"
MAC = [sys.executable, str(AS_ON_A_MAC), "launch"]
# As caffeinate(8): it ends with the process that it waits for, or by a signal.
CAFFEINATE = """#!/bin/sh
echo "$$ $*" >>"$CAFFEINATE_LOG"
test "$1 $2" = "-is -w" || exit 64
while kill -0 "$3" 2>/dev/null; do sleep 0.05; done
"""
# The launcher and its agents as on a Mac; else this Python.
PYTHON = f"""#!/bin/sh
case "$*" in
  "-m mlxdist launch "*) shift 2; exec {sys.executable} {AS_ON_A_MAC} "$@" ;;
  "-P -m mlxdist rpc-server") shift 3; exec {sys.executable} {AS_ON_A_MAC} "$@" ;;
esac
exec {sys.executable} "$@"
"""
NOTHING = RANK + "late(0.1)"


@pytest.fixture
def caffeinate(tmp_path, monkeypatch):
    """The log of what was started: its lines are words."""
    directory = tmp_path / "bin"
    directory.mkdir()
    (directory / "caffeinate").write_text(CAFFEINATE)
    (directory / "caffeinate").chmod(0o700)
    (directory / "python").write_text(PYTHON)
    (directory / "python").chmod(0o700)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
    monkeypatch.setenv("CAFFEINATE_LOG", str(tmp_path / "log"))

    def started():
        path = tmp_path / "log"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    started.directory = directory
    return started


@pytest.fixture
def mac(monkeypatch, tmp_path):
    """`launching` starts a launcher as on a Mac."""
    monkeypatch.setenv("HOME", str(tmp_path))  # of caches
    LAUNCH[:], usual = MAC, LAUNCH[:]
    yield
    LAUNCH[:] = usual


def on_macs(caffeinate, names="localhost"):
    """Agents run as on a Mac, too."""
    return ["--python", str(caffeinate.directory / "python"), "--hosts", names]


def said(job, words):
    return [line for line in job.stderr.decode().splitlines() if words in line]


def test_a_mac_does_not_sleep_during_a_job(caffeinate, mac):
    job = launch(2, sys.executable, "-c", NOTHING, options=["--verbose"])
    assert job.returncode == 0, job.stderr
    ((_, *words, pid),) = caffeinate()  # one process for both ranks
    assert words == ["-is", "-w"] and int(pid) > 1
    assert said(job, "caffeinate") == ["mlxdist launch: no sleep while the job runs, by caffeinate -is: this Mac"]


@pytest.mark.long
def test_it_is_reported_only_in_the_log(caffeinate, mac):
    job = launch(1, "true")
    assert len(caffeinate()) == 1 and job.stderr == b""


@pytest.mark.long
def test_nothing_of_it_elsewhere(caffeinate):
    assert launch(2, "true", options=["--verbose"]).returncode == 0 and caffeinate() == []


@pytest.mark.long
def test_a_restart_is_reported_once(caffeinate, mac):
    options = ["--verbose", "--max-restarts", "1", "--grace-period", "1"]
    job = launch(1, "sh", "-c", "exit 3", options=options)
    assert job.returncode == 3 and len(caffeinate()) == 2 and len(said(job, "caffeinate")) == 1


def test_agents_hold_it_and_a_launcher_next_to_one_does_not(caffeinate, mac):
    job = launch(2, sys.executable, "-c", NOTHING, options=["--verbose", *on_macs(caffeinate)])
    assert job.returncode == 0, job.stderr
    assert len(caffeinate()) == 1
    assert said(job, "caffeinate") == ["mlxdist launch: no sleep while the job runs, by caffeinate -is: localhost"]


@pytest.mark.long
def test_the_launcher_of_a_job_on_other_hosts_stays_awake(caffeinate, mac):
    """Its machine has no agent of the job. The other host is this machine, behind a shell that ssh would reach."""
    ssh = caffeinate.directory / "ssh"
    ssh.write_text('#!/bin/sh\nfor word; do command=$word; done\nexec sh -c "$command"\n')
    ssh.chmod(0o700)
    options = ["--verbose", "--ssh", str(ssh), *on_macs(caffeinate, "mini-7")]
    job = launch(1, sys.executable, "-c", NOTHING, options=options)
    assert job.returncode == 0, job.stderr
    assert len(caffeinate()) == 2
    assert said(job, "caffeinate") == [
        "mlxdist launch: no sleep while the job runs, by caffeinate -is: this Mac, mini-7"
    ]


@pytest.mark.long
def test_a_mac_without_the_command(mac, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    job = launch(1, "true")
    words = "mlxdist launch: this Mac may fall asleep during the job: caffeinate: No such file or directory"
    assert job.returncode == 0 and said(job, "caffeinate") == [words]


@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL"])
def test_nothing_of_it_is_left_when_the_launcher_is_ended(caffeinate, mac, how):
    with running(2, "print('here', flush=True); stay()") as job:
        ((pid, *_),) = caffeinate()
        assert any(line.startswith(f"{pid} ") for line in marked_processes(os.environ["TEST_MARKER"]))
        job.send_signal(getattr(signal, how))
        job.wait(20)
    assert wait_for(lambda: not marked_processes(os.environ["TEST_MARKER"]))
    if how == "SIGTERM":  # no zombie either: what a killed launcher leaves is reaped by the system
        assert not os.path.exists(f"/proc/{pid}")


# MLX_METAL_FAST_SYNCH

REJECTED = b"MLX_METAL_FAST_SYNCH=1 with 2 ranks on one Mac has locked up GPUs"


@pytest.mark.parametrize(
    "way", ["--env", "shell of a host", *(pytest.param(way, marks=pytest.mark.long) for way in ("shell", "hostfile"))]
)
def test_fast_synch_is_rejected_for_two_ranks_on_a_mac(caffeinate, mac, monkeypatch, tmp_path, way):
    options = ["--env", "MLX_METAL_FAST_SYNCH=1"] if way == "--env" else []
    if way.startswith("shell"):
        monkeypatch.setenv("MLX_METAL_FAST_SYNCH", "1")
    if way == "shell of a host":
        options = on_macs(caffeinate)
    if way == "hostfile":
        (tmp_path / "hosts").write_text('{"envs": ["MLX_METAL_FAST_SYNCH=1"], "hosts": [{"ssh": "localhost"}]}')
        options = [*on_macs(caffeinate)[:2], "--hostfile", str(tmp_path / "hosts")]
    job = launch(2, "echo", "started", options=options)
    assert job.returncode and REJECTED in job.stderr and b"set MLX_METAL_FAST_SYNCH=0" in job.stderr
    assert job.stdout == b"" and b"Traceback" not in job.stderr


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "value"), [(1, "1"), (2, "0")])
def test_fast_synch_for_one_rank_or_off(caffeinate, mac, ranks, value):
    job = launch(ranks, "echo", "started", options=["--env", f"MLX_METAL_FAST_SYNCH={value}"])
    assert job.returncode == 0 and job.stdout.count(b"started") == ranks, job.stderr


def test_fast_synch_means_nothing_without_metal():
    job = launch(2, "echo", "started", options=["--env", "MLX_METAL_FAST_SYNCH=1"])
    assert job.returncode == 0 and job.stderr == b"", job.stderr


@pytest.mark.parametrize("where", ["here", pytest.param("on a host", marks=pytest.mark.long)])
def test_fast_synch_for_one_rank_does_not_fail_the_two_that_doctor_starts(caffeinate, monkeypatch, where):
    python = str(caffeinate.directory / "python")
    hostfile = parse('{"envs": ["MLX_METAL_FAST_SYNCH=1"], "hosts": [{"ssh": "localhost"}]}')
    selection = HostSelection() if where == "here" else HostSelection(hostfile, python=python)
    if where == "here":
        monkeypatch.setenv("MLX_METAL_FAST_SYNCH", "1")
        monkeypatch.setattr(sys, "executable", python)  # of doctor, which starts the launcher
    job = try_job(selection, ["localhost"], CheckOptions(variables={"MLX_METAL_FAST_SYNCH": "1"}, quick=True))
    assert (job.error, job.ranks) == ("", 2)
    with place_ranks(selection, ["localhost"]) as placement:  # benchmarks of a report
        assert placement.settings == {"MLX_METAL_FAST_SYNCH": "0"}
        if where == "on a host":
            assert read(placement.options[1]).envs == ("MLX_METAL_FAST_SYNCH=0",)


# The end of ranks that do not leave

STUBBORN = "import signal, sys\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('here', flush=True)\n"
STUBBORN += "ignores = os.path.join(os.path.dirname(os.environ['TMPDIR']), 'ignores')\n"  # the directory of both ranks
STUBBORN += "if rank == 0: open(ignores, 'w').close(); stay()\n"
STUBBORN += "while not os.path.exists(ignores): late(0.01)\nsys.exit(5)"
LOST = f"rank 0 killed on a Mac: {LOST_DOMAINS}".encode()


@pytest.mark.parametrize("where", ["here", pytest.param("on a host", marks=pytest.mark.long)])
def test_a_rank_that_was_killed_on_a_mac(caffeinate, mac, where):
    options = ["--grace-period", "0.3", *(on_macs(caffeinate) if where == "on a host" else [])]
    job = launch(2, sys.executable, "-c", RANK + STUBBORN, options=options)
    assert job.returncode == 5 and b"rank 0 had to be killed (SIGKILL)" in job.stderr, job.stderr
    assert LOST in job.stderr and b"`ioclasscount AppleThunderboltRDMAProtectionDomain`" in job.stderr


@pytest.mark.long
def test_a_rank_that_was_killed_elsewhere():
    job = launch(2, sys.executable, "-c", RANK + STUBBORN, options=["--grace-period", "0.3"])
    assert job.returncode == 5 and b"had to be killed" in job.stderr and b"protection domain" not in job.stderr


def test_a_reaper_reports_what_it_had_to_kill(monkeypatch, tmp_path):
    """Where the launcher was killed, and a rank does not end by SIGTERM."""
    program = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
    stubborn = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True)
    stubborn.stdout.readline()
    polite = subprocess.Popen(["sleep", "60"], start_new_session=True)
    ranks = Reaper("job-of-this-test", str(tmp_path / "no"), str(tmp_path / "none"), 0.2)
    for rank in (stubborn, polite):
        ranks.take(f"+{rank.pid}")
    assert ranks.finish() == 2 and ranks.killed == 1
    assert (stubborn.wait(5), polite.wait(5)) == (-signal.SIGKILL, -signal.SIGTERM)
    stubborn.stdout.close()
    assert "domain" not in closing_line(2, ranks.killed)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert f"1 of them by SIGKILL: {LOST_DOMAINS}" in closing_line(2, ranks.killed)
    assert "domain" not in closing_line(2, 0)


def test_the_native_code_reports_the_same_of_lost_domains():
    (library,) = Path(_native.__file__).parent.glob("libmlxdist.*")
    assert LOST_DOMAINS.encode() in library.read_bytes()


POLITE = "import signal, sys\n"
POLITE += "def leave(*_): late(6); print('left', flush=True); sys.exit()\n"
POLITE += "signal.signal(signal.SIGTERM, leave)\nprint('here', flush=True)\nstay()"


@pytest.mark.long
@pytest.mark.parametrize(("system", "left"), [("mac", True), ("linux", False)])
@pytest.mark.parametrize("where", ["here", "on a host"])
def test_a_mac_has_longer_to_leave(caffeinate, request, system, where, left):
    """Only SIGTERM that was in vain is followed by SIGKILL."""
    if system == "mac":
        request.getfixturevalue("mac")
    options = [] if where == "here" else on_macs(caffeinate) if system == "mac" else ["--hosts", "localhost"]
    with running(1, POLITE, options) as job:
        job.send_signal(signal.SIGTERM)
        output, errors = job.communicate(timeout=40)
    assert ("left" in output) is left and ("had to be killed" in errors) is not left
