"""How a job ends: exit statuses, the first failure, signals, and what is left behind."""

import os
import re
import signal
import subprocess
import sys
import tempfile

import pytest
from launching import ASKED, LAUNCH, closing_line, launch, marked_processes, nothing_left, python, running  # noqa: F401
from waiting import seconds_of, wait_for

import mlxdist.launch
from mlxdist.launch.local import LocalJob, usual_grace


@pytest.mark.parametrize("status", [1, 3, 127, 255])
def test_exit_status_is_that_of_the_rank_that_failed(status):
    job = python(3, f"import sys; sys.exit({status} if rank == 1 else 0)")
    assert job.returncode == status
    assert f"rank 1 failed first, with exit status {status} after " in closing_line(job)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_exit_status_of_a_killed_rank(number):
    job = python(2, f"if rank == 1: os.kill(os.getpid(), {int(number)})\nstay()", options=["--grace-period", "0.2"])
    assert job.returncode == 128 + number
    assert f"rank 1 failed first, killed by {number.name}" in closing_line(job)
    assert "rank 0 ended after SIGTERM" in closing_line(job)


def test_success_prints_nothing_of_its_own():
    job = launch(2, "true")
    assert (job.returncode, job.stdout, job.stderr) == (0, b"", b"")


def test_ranks_that_end_early_are_no_failure():
    job = python(3, "late(0.3 * rank); print('done')")
    assert job.returncode == 0 and job.stdout.count(b"done") == 3


# gone(rank): once its process has ended and is no zombie either, the launcher knows how it has ended.
GONE = """
import pathlib, sys
pathlib.Path(f'rank-{rank}').write_text(str(os.getpid()))
def gone(other):
    try: os.kill(int(pathlib.Path(f'rank-{other}').read_text()), 0)
    except (FileNotFoundError, ValueError): return False
    except ProcessLookupError: return True
def wait_until_gone(other):
    while not gone(other): late(0.01)
"""


def test_a_failure_is_the_first_in_time_not_in_number(tmp_path):
    job = python(2, GONE + "if rank == 0: wait_until_gone(1)\nsys.exit(10 + rank)", cwd=tmp_path)
    assert job.returncode == 11
    assert "rank 0 left by itself" in closing_line(job)


def test_the_others_may_leave_by_themselves(tmp_path):
    program = GONE + "if rank == 1: sys.exit(5)\nwait_until_gone(1); print('cleaned up'); sys.exit(6)"
    job = python(2, program, cwd=tmp_path)
    assert job.returncode == 5 and b"[0] cleaned up" in job.stdout


def test_the_others_are_ended_after_the_grace(tmp_path):
    program = "import sys; print('start', flush=True)\nif rank != 1: stay()\n"
    program += "while not os.path.exists('go'): late(0.01)\nsys.exit(5)"
    with running(3, program, options=["--grace-period", "0.5"], cwd=tmp_path) as job:
        (tmp_path / "go").touch()
        seconds, (_, err) = seconds_of(job.communicate, timeout=20)
    assert 0.5 < seconds < usual_grace(on_mac=False)
    assert job.returncode == 5 and "ranks 0 and 2 ended after SIGTERM" in err


def test_a_rank_that_ignores_sigterm_is_killed(tmp_path):
    program = "import pathlib, signal, sys\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    program += "if rank == 0: pathlib.Path('ignores').touch(); stay()\n"
    program += "while not os.path.exists('ignores'): late(0.01)\nsys.exit(5)"
    job = python(2, program, options=["--grace-period", "0.3"], cwd=tmp_path)
    assert job.returncode == 5
    assert "rank 0 had to be killed (SIGKILL)" in closing_line(job)


def test_the_cause_is_distinguished_from_the_consequence(tmp_path):
    """Rank 0 ends first, but only because rank 1 has announced its failure."""
    job = python(
        2,
        GONE
        + """
import threading
from mlxdist.base.environment import Environment
from mlxdist.base.errors import Aborted
from mlxdist.runtime.rendezvous import Rendezvous
rendezvous = Rendezvous(Environment.read())
failed = threading.Event()
rendezvous.watch(lambda *news: failed.set())
if rank == 1:
    rendezvous.report_failure(Aborted("it is me"))
    wait_until_gone(0)
    sys.exit(7)
failed.wait(20)
os._exit(8)
""",
        cwd=tmp_path,
    )
    assert job.returncode == 7, job.stderr
    assert "rank 1 failed first, with exit status 7" in closing_line(job)


def test_the_others_detect_a_killed_rank_and_leave_by_themselves():
    """Long before the grace is over."""
    job = python(
        3,
        """
from mlxdist.base.environment import Environment
from mlxdist.runtime.rendezvous import Rendezvous
rendezvous = Rendezvous(Environment.read())
rendezvous.barrier("start")
if rank == 1:
    os.kill(os.getpid(), 9)
rendezvous.barrier("end")
""",
        options=["--grace-period", "20"],
        timeout=10,
    )
    assert job.returncode == 137
    assert "ranks 0 and 2 left by themselves" in closing_line(job)
    for rank in (0, 2):
        assert re.search(rf"\[{rank}\] mlxdist.PeerLost: rank 1 \(.*\) has died".encode(), job.stderr)


def test_children_of_a_rank_end_with_it():
    """Whatever they did to get away: a group or session of their own, no environment, no parent, ignored signals."""
    seconds = f"60.{os.getpid()}"  # to tell them from anybody else's
    job = python(
        2,
        f"SECONDS = '{seconds}'"
        """
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["sleep", SECONDS])
subprocess.Popen(["sleep", SECONDS], env={})
signal.signal(signal.SIGTERM, signal.SIG_DFL)
subprocess.Popen(["sleep", SECONDS], start_new_session=True)
subprocess.run(["sh", "-c", "sleep $0 & sleep $0 &", SECONDS])
print("started")
sys.exit(9 if rank == 1 else 0)
""",
        options=["--grace-period", "0.3"],
    )
    assert job.returncode == 9 and job.stdout.count(b"started") == 2
    assert subprocess.run(["pgrep", "-f", f"^sleep {seconds}$"], capture_output=True).stdout == b""


def test_a_child_may_finish_its_last_line():
    """As resource trackers and uploaders do when their parent ends."""
    job = launch(1, "sh", "-c", "(sleep 0.2; echo last) & exit 0")
    assert job.stdout == b"[0] last\n"


def test_verbose_reports_every_rank():
    job = launch(2, "true", options=["--verbose"])
    text = job.stderr.decode()
    for rank in range(2):
        assert re.search(rf"rank {rank} \(pid \d+\) started", text)
        assert re.search(rf"rank {rank} \(pid \d+\) ended with exit status 0", text)
    assert "all ranks succeeded" in text


WAITING = "print('start', flush=True); stay()"


def test_ctrl_c_reaches_all_ranks():
    program = "try: print('start', flush=True); stay()\nexcept KeyboardInterrupt: print('interrupted')"
    with running(3, program) as job:
        job.send_signal(signal.SIGINT)
        out, err = job.communicate(timeout=10)
    assert job.returncode == 130
    assert sorted(out.splitlines()) == [f"[{rank}] interrupted" for rank in range(3)]
    assert "interrupted by SIGINT" in err and "ranks 0, 1 and 2 ended after SIGINT" in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_signals_reach_all_ranks(number):
    handler = "import signal, sys\ndef interrupted(*_): print('interrupted', flush=True); sys.exit(0)\n"
    program = f"{handler}signal.signal({int(number)}, interrupted)\n{WAITING}"
    with running(2, program) as job:
        job.send_signal(number)
        out, err = job.communicate(timeout=10)
    assert job.returncode == (0 if number == signal.SIGTERM else 128 + number)
    assert sorted(out.splitlines()) == ["[0] interrupted", "[1] interrupted"], err
    assert ("all ranks ended with status 0 after SIGTERM" in err) == (number == signal.SIGTERM)


def test_sigterm_is_a_failure_where_one_rank_ends_so():
    program = f"import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(3 * rank))\n{WAITING}"
    with running(2, program) as job:
        job.send_signal(signal.SIGTERM)
        _, err = job.communicate(timeout=10)
    assert job.returncode == 143 and "interrupted by SIGTERM" in err


def test_sigusr1_reaches_all_ranks_and_has_no_consequence_of_its_own():
    program = ASKED + "print('start', flush=True)\nwhile not asked: late(0.01)"
    with running(2, program, options=["--grace-period", "0.1"]) as job:
        job.send_signal(signal.SIGUSR1)
        out, err = job.communicate(timeout=10)
    assert (job.returncode, err) == (0, "")
    assert sorted(out.splitlines()) == ["[0] asked", "[1] asked"]


def test_no_restart_follows_sigusr1():
    with running(2, WAITING, options=["--max-restarts", "3"]) as job:
        job.send_signal(signal.SIGUSR1)
        _, err = job.communicate(timeout=10)
    assert job.returncode == 138 and "killed by SIGUSR1" in err and "restart" not in err


def test_ranks_that_ignore_ctrl_c_are_ended():
    program = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + WAITING
    with running(2, program, options=["--grace-period", "0.4"]) as job:
        job.send_signal(signal.SIGINT)
        seconds, (_, err) = seconds_of(job.communicate, timeout=10)
    assert 0.4 < seconds < usual_grace(on_mac=False)
    assert job.returncode == 130 and "ended after SIGTERM" in err


def test_ctrl_c_that_ranks_ignore_reports_what_comes_next():
    program = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + WAITING
    with running(2, program, options=["--grace-period", "60"]) as job:
        job.send_signal(signal.SIGINT)
        said = job.stderr.readline()
        assert said.startswith("mlxdist launch: ranks 0 and 1 still run after SIGINT; SIGTERM follows in 59 s"), said
        assert said.endswith("Another Ctrl-C ends them now, a third one kills them\n"), said
        job.send_signal(signal.SIGINT)
        assert job.wait(10) == 130


def test_a_second_and_third_ctrl_c_do_not_wait():
    program = "import signal\nfor s in (2, 15): signal.signal(s, lambda s, _: print(int(s), flush=True))\n"
    with running(2, program + WAITING, options=["--grace-period", "60"]) as job:
        for number in (2, 15):  # what the ranks get, and do not end by
            job.send_signal(signal.SIGINT)
            assert sorted(job.stdout.readline() for _ in range(2)) == [f"[{rank}] {number}\n" for rank in range(2)]
        job.send_signal(signal.SIGINT)
        _, err = job.communicate(timeout=10)
    assert job.returncode == 130 and "had to be killed" in err


def test_an_ignored_hangup_stays_ignored():
    """nohup mlxdist launch ..."""
    with running(1, WAITING, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)) as job:
        job.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            job.wait(0.3)
        job.send_signal(signal.SIGTERM)
        assert job.wait(10) == 143


@pytest.mark.parametrize("options", [(), ("--no-prefix",)])
def test_a_killed_launcher_takes_its_ranks_along(options, tmp_path):
    """SIGKILL cannot be handled, and yet nothing is left: see the fixture."""
    program = "import subprocess; subprocess.Popen(['sleep', '60'], start_new_session=True)\n" + WAITING
    with running(2, program, options=["--grace-period", "1", *options]) as job:
        job.kill()
        assert wait_for(lambda: not marked_processes(os.environ["TEST_MARKER"]), 5)


def test_a_job_inside_a_killed_job_ends_too():
    inner = [*LAUNCH, "-n", "2", "--", "sleep", "60"]
    with running(1, f"import subprocess; print('start', flush=True); subprocess.run({inner!r})") as job:
        assert wait_for(lambda: str(marked_processes(os.environ["TEST_MARKER"])).count("sleep") >= 2)
        job.kill()


@pytest.mark.long
def test_a_job_inside_a_job_that_ignores_sigterm(tmp_path):
    """Its launcher and its reaper would both give it a minute."""
    seconds = f"60.{os.getpid()}"
    ignores = f"trap '' TERM; touch ignores; sleep {seconds}"
    inner = [*LAUNCH, "-n", "1", "--grace-period", "60", "--", "sh", "-c", ignores]
    program = f"import sys\nif rank == 0: os.execv({inner[0]!r}, {inner!r})\n"
    program += "while not os.path.exists('ignores'): late(0.01)\nsys.exit(5)"
    job = python(2, program, options=["--grace-period", "0.3"], cwd=tmp_path)
    assert job.returncode == 5, job.stderr
    assert subprocess.run(["pgrep", "-f", f"^sleep {seconds}$"], capture_output=True).stdout == b""


def test_a_job_whose_reaper_was_killed_is_cleaned_up_as_well(tmp_path):
    program = (
        "import subprocess; subprocess.Popen(['sleep', '60'], start_new_session=True); print(os.getppid(), flush=True)"
    )
    with running(1, program + "\nwhile not os.path.exists('go'): late(0.01)", cwd=tmp_path) as job:
        children = subprocess.run(["pgrep", "-P", str(job.pid), "-f", "reaper.py"], capture_output=True, text=True)
        os.kill(int(children.stdout), signal.SIGKILL)
        (tmp_path / "go").touch()
        assert job.wait(10) == 0


@pytest.mark.long
def test_a_job_that_takes_too_long_is_ended():
    job = python(2, "stay()", options=["--timeout", "0.5", "--max-restarts", "3"])
    assert job.returncode == 124
    assert closing_line(job) == (
        "mlxdist launch: it has not ended after 0.5 s (--timeout); ranks 0 and 1 ended after SIGTERM."
    )
    assert python(1, "", options=["--timeout", "60"]).returncode == 0
    options = ["--timeout", "1", "--grace-period", "3"]
    failed = python(2, "rank and stay(); raise SystemExit(3)", options=options)
    assert failed.returncode == 3  # the failure came first


@pytest.mark.parametrize("rank, status, how", [(0, 0, "before rank 1 reached it"), (1, 3, "before it called")])
def test_a_rank_that_ends_before_it_has_come_is_not_waited_for(rank, status, how):
    """It was, for 60 s, and then its output was to say why, where there was none."""
    program = f"""
from mlxdist.base.environment import Environment
from mlxdist.runtime.rendezvous import Rendezvous
if rank == {rank}:
    os._exit({status})
Rendezvous(Environment.read())
"""
    job = python(2, program, options=["--grace-period", "20"], timeout=20)
    assert job.returncode == (status or 1)
    assert f"RendezvousError: rendezvous: rank {rank} has ended with exit status {status} {how}" in job.stderr.decode()


def test_the_reaper_ends_although_the_directory_of_the_ranks_cannot_be_removed():
    """A rank may close it. The job's own directory goes all the same: no start of a job looks there any more."""
    program = (
        "import os, sys, tempfile; sys.path.append(sys.argv[1]); import reaper\n"
        "if os.getuid() == 0: os.setuid(65534)\n"
        "ranks, job = tempfile.mkdtemp(), tempfile.mkdtemp()\n"
        "os.mkdir(f'{ranks}/0'); open(f'{job}/job.json', 'w').close(); os.chmod(ranks, 0)\n"
        "reaper.clean_up('none', ranks, job); print(os.path.exists(ranks), os.path.exists(job))\n"
        "os.chmod(ranks, 0o700); reaper.clean_up('none', ranks, job); print(os.path.exists(ranks))\n"
    )
    directory = os.path.dirname(mlxdist.launch.__file__)
    with tempfile.TemporaryDirectory(dir="/tmp") as temporary:  # pytest's is closed to other users
        os.chmod(temporary, 0o777)
        command = [sys.executable, "-c", program, directory]
        printed = subprocess.check_output(command, env=os.environ | {"TMPDIR": temporary}, text=True, timeout=30)
    assert printed == "True False\nFalse\n"


def test_the_reaper_removes_the_directory_of_the_ranks_and_follows_no_links(tmp_path):
    """Without shutil, which takes as long to import as the rest of the reaper's work."""
    job, kept = tmp_path / "job", tmp_path / "kept"
    (job / "0" / "deep").mkdir(parents=True)
    kept.mkdir()
    for file in (job / "0" / "deep" / "file", kept / "file"):
        file.write_text("x")
    (job / "0" / "mlx").symlink_to(kept, target_is_directory=True)
    (job / "0" / "broken").symlink_to(tmp_path / "nowhere")
    program = (
        "import sys; sys.path.append(sys.argv[1]); import reaper; "
        "reaper.clean_up('none', sys.argv[2], sys.argv[2]); print('shutil' in sys.modules)"
    )
    directory = os.path.dirname(mlxdist.launch.__file__)
    command = [sys.executable, "-I", "-S", "-c", program, directory, str(job)]
    assert subprocess.run(command, capture_output=True, timeout=30, check=True).stdout == b"False\n"
    assert not job.exists() and (kept / "file").exists()


def test_the_end_of_the_last_rank_is_not_noted():
    """Ranks that still run read it; for the last one there is none."""
    with LocalJob("0123456789abcdef", 0, 2, ["true"], dict(os.environ), 1.0) as job:
        ranks = [job.start(number, 1, 2) for number in range(2)]
        for rank in ranks:
            assert rank.process.wait() == 0
            job.ended(rank.rank, 0)
        assert [path.name for path in job.directory.glob("*.ended-*")] == ["first_failure.ended-0"]
