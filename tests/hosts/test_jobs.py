"""Where running jobs are found, what stays of a job, and what the next start removes."""

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from launching import LAUNCH, RANK, launch, marked_processes, nothing_left, python, running  # noqa: F401
from waiting import wait_for

from mlxdist.base.errors import InvalidArgument, ResourceError
from mlxdist.launch import stale_jobs
from mlxdist.launch.jobs import LAUNCHER, Job, JobDirectory, find_job, list_jobs, read_job
from mlxdist.launch.processes import start_times
from mlxdist.launch.runtime_directory import runtime_directory

WAITING = "print(os.environ['MLXDIST_JOB'], os.getpid(), flush=True); stay()"
RECORD = "open(os.path.join(os.environ['MLXDIST_FLIGHT_DIR'], f'flight-{rank}.json'), 'w').write('x')\n"


def name_and_pids(job):
    """Name of the job, and the process of each rank, as the ranks of WAITING print them."""
    rows = [re.fullmatch(r"\[(\d)\] (\S+) (\d+)\n", line).groups() for line in job.first_lines]
    return rows[0][1], {int(rank): int(pid) for rank, _, pid in rows}


def end(job):
    job.terminate()
    job.communicate(timeout=10)


def test_a_running_job_is_found():
    with running(2, WAITING) as job:
        name, pids = name_and_pids(job)
        assert wait_for(lambda: [found.pids for found in list_jobs()] == [pids])
        found = find_job(name)
        assert (found.name, found.pids, found) == (name, pids, find_job(name[:5]))
        assert found.command[:2] == [sys.executable, "-c"]
        assert found.flight_directory == found.directory / "flight" and found.flight_directory.is_dir()
        end(job)
    assert list_jobs() == []
    with pytest.raises(InvalidArgument, match=f"there is no job '{name}' in .*; running are: none"):
        find_job(name)


def run(*arguments):
    return subprocess.run([sys.executable, "-m", "mlxdist", *arguments], capture_output=True, text=True, timeout=60)


def test_ps_lists_and_stop_ends():
    assert "No jobs run here." in run("ps").stderr and json.loads(run("ps", "--json").stdout) == []
    with running(2, WAITING) as job, running(1, WAITING) as other:
        name, pids = name_and_pids(job)
        assert wait_for(lambda: len(list_jobs()) == 2 and find_job(name).pids == pids)
        lines = run("ps").stdout.splitlines()
        assert lines[0].split()[:3] == ["job", "runs", "for"] and len(lines) == 3
        assert any(re.match(rf"{name}  +0:00:\d\d  ranks 0 and 1  ", line) for line in lines)
        found = {entry["job"]: entry for entry in json.loads(run("ps", "--json").stdout)}[name]
        assert found["launcher"] == job.pid and found["pids"] == {str(rank): pid for rank, pid in pids.items()}
        stopped = run("stop", name[:6])
        assert stopped.returncode == 0 and stopped.stdout == f"{name} has ended\n"
        assert job.wait(10) == 143 and other.poll() is None
        assert run("stop", "--all").returncode == 0 and other.wait(10) == 143
    assert list_jobs() == []


def test_a_job_over_hosts_is_one_job_where_it_was_started_and_runs(tmp_path):
    """This machine has the launcher's record and an agent's: `ps` lists them once, and the launcher stops them."""
    command = [*LAUNCH, "--hosts", "localhost", "-n", "2", "--", sys.executable, "-c", RANK + WAITING]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        assert [job.stdout.readline() for _ in range(2)]
        assert wait_for(lambda: [list(found.pids) for found in list_jobs()] == [[0, 1]])
        (found,) = list_jobs()
        assert found.launcher == job.pid and [host.name for host in found.hosts] == ["localhost"]
        assert found == find_job(found.name[:5])
        (shown,) = json.loads(run("ps", "--json").stdout)
        assert shown["hosts"] == [{"name": "localhost", "first": 0, "slots": 2}] and len(shown["pids"]) == 2
        assert "localhost: 0-1" in run("ps").stdout
        (asked,) = json.loads(run("ps", "--hosts", "localhost", "--json").stdout)
        assert (asked["host"], asked["pids"]) == ("localhost", shown["pids"])
        stopped = run("stop", found.name[:6])
        assert stopped.returncode == 0 and stopped.stdout == f"{found.name} has ended\n"
        job.communicate(timeout=20)
        assert job.returncode == 143
    assert list_jobs() == []


@pytest.mark.long
def test_the_record_of_a_launcher_that_was_killed_is_removed():
    command = [*LAUNCH, "--hosts", "localhost", "--", sys.executable, "-c", RANK + WAITING]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        assert job.stdout.readline()
        job.kill()
        job.communicate(timeout=20)
    (left,) = runtime_directory().glob(f"*{LAUNCHER}")
    assert wait_for(lambda: list_jobs() == [], 10)  # the agent has noticed
    stale_jobs.remove_stale_jobs()
    assert not left.exists()


@pytest.mark.long
def test_hosts_end_what_a_launcher_and_its_reaper_have_left():
    with running(1, WAITING) as job:
        name, pids = name_and_pids(job)
        directory = find_job(name).directory
        reaper = next(int(line.split()[0]) for line in marked_processes(os.environ["TEST_MARKER"]) if name in line)
        os.kill(job.pid, signal.SIGKILL)
        os.kill(reaper, signal.SIGKILL)
        job.communicate(timeout=20)
        stopped = run("stop", "--all", "--hosts", "localhost")
        assert stopped.returncode == 0 and f"localhost: cleaned up after job {name}" in stopped.stderr, stopped
        assert not directory.exists() and start_times(pids.values()) == {}


def test_stop_rejects_what_is_no_job():
    refusals = {("nothing",): "there is no job 'nothing'", (): "Name the jobs", ("a", "--all"): "Name the jobs"}
    for arguments, words in refusals.items():
        refused = run("stop", *arguments)
        assert refused.returncode != 0 and words in refused.stderr


@pytest.mark.parametrize("arguments", [["ps"], ["stop", "--all"], ["stop", "nothing"], ["dump"]])
def test_a_command_that_reaches_no_host(arguments):
    done = run(*arguments, "--hosts", "a", "--ssh", "nosuch")
    error = "a: the command 'nosuch' cannot be run: No such file or directory; see --ssh"
    assert done.returncode == 1 and done.stderr.count("a: ") == 1 and error in done.stderr, done.stderr


@pytest.mark.long
def test_a_job_that_does_not_end_in_time_is_reported():
    program = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(os.environ['MLXDIST_JOB'], "
    program += "os.getpid(), flush=True); stay()"
    with running(1, program, options=["--grace-period", "3"]) as job:
        name, _ = name_and_pids(job)
        late = run("stop", name, "--timeout", "0.2")
        assert late.returncode == 1 and late.stdout == f"{name} still runs after 0.2 s\n"
        assert job.wait(20) == 143


def test_only_ranks_that_run_have_a_process():
    with running(2, WAITING.replace("stay()", "rank and stay()")) as job:
        name, pids = name_and_pids(job)
        assert wait_for(lambda: find_job(name).pids == {1: pids[1]})
        end(job)


def test_an_ambiguous_name_lists_the_jobs():
    with running(1, WAITING) as first, running(1, WAITING) as second:
        with pytest.raises(InvalidArgument) as caught:
            find_job()
        assert name_and_pids(first)[0] in str(caught.value) and name_and_pids(second)[0] in str(caught.value)
        end(first)
        end(second)


@pytest.mark.parametrize("name", ["", ".", "..", "../x", ".new-x"])
def test_names_that_are_none(name):
    (runtime_directory() / ".new-x" / "flight").mkdir(parents=True)
    with pytest.raises(InvalidArgument, match="there is no job"):
        find_job(name)
    (runtime_directory() / ".new-x" / "flight").rmdir()
    (runtime_directory() / ".new-x").rmdir()


@pytest.mark.parametrize("started", ["NaN", "Infinity", "-1", "1" + "0" * 400, "true"])
def test_a_time_that_is_none_spoils_no_list(tmp_path, started):
    path = runtime_directory() / f"ab{LAUNCHER}"
    directory = JobDirectory(Job("ab", 2, 0.0, []), path.name)
    record = path / "job.json"
    assert read_job(path) is not None and [job.name for job in list_jobs()] == ["ab"]
    record.write_text(record.read_text().replace('"started": 0.0', f'"started": {started}'))
    assert read_job(path) is None and list_jobs() == []
    directory.remove()


def test_directories_and_files_are_for_this_user_only():
    with running(1, WAITING) as job:
        directory = find_job(name_and_pids(job)[0]).directory
        temporary = Path(json.loads((directory / "job.json").read_text())["temporary"])
        assert wait_for(lambda: "job.new" not in os.listdir(directory))
        modes = {
            path: stat.S_IMODE(path.stat().st_mode) for path in [directory.parent, *directory.rglob("*"), temporary]
        }
        assert all(mode == (0o700 if path.is_dir() else 0o600) for path, mode in modes.items()), modes
        end(job)


def test_what_another_launcher_prepares_is_left_alone(tmp_path):
    other = runtime_directory() / ".new-x"
    other.mkdir()
    with pytest.raises(ResourceError, match="cannot be prepared in .*exists"):
        JobDirectory.of_ranks("x", tmp_path, ["true"])
    other.rmdir()


def test_an_open_runtime_directory_is_closed(monkeypatch, tmp_path):
    (tmp_path / "runtime" / "mlxdist").mkdir(mode=0o755)
    assert stat.S_IMODE(runtime_directory().stat().st_mode) == 0o700


@pytest.mark.parametrize("in_the_way", ["link", "file"])
def test_what_is_no_directory_of_ours_is_left_alone(tmp_path, in_the_way):
    """In /tmp anybody can make one of that name first. Jobs go into another one, where they are found again."""
    place = tmp_path / "runtime" / "mlxdist"
    place.symlink_to(tmp_path) if in_the_way == "link" else place.touch()
    with running(1, WAITING) as job:
        directory = find_job(name_and_pids(job)[0]).directory
        assert directory.parent == runtime_directory() != place and directory.parent.name.startswith("mlxdist-")
        end(job)
    assert list(tmp_path.glob("*.json")) == []
    place.unlink()


@pytest.mark.parametrize("value", [None, "", "relative", "/no/such/directory"])
def test_without_a_runtime_directory_of_the_system(monkeypatch, tmp_path, value):
    monkeypatch.setenv("XDG_RUNTIME_DIR", value) if value is not None else monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert runtime_directory() == tmp_path / f"mlxdist-{os.getuid()}"


def test_a_process_number_that_was_used_again_is_not_taken_for_the_rank():
    (own,) = start_times([os.getpid()]).values()
    child = subprocess.Popen(["sleep", "60"])
    try:
        later = start_times([child.pid])[child.pid]
        assert later != own and start_times([child.pid]) == {child.pid: later}
    finally:
        child.kill()
        # A zombie does not run.
        assert wait_for(lambda: start_times([child.pid]) == {})
        child.wait()


def test_recordings_of_a_failed_job_stay_and_are_named():
    job = python(2, RECORD + "raise SystemExit(3 if rank else 0)")
    directory = Path(re.search(r"flight recordings are in (\S+)\.", job.stderr.decode())[1])
    assert sorted(path.name for path in directory.iterdir()) == ["flight-0.json", "flight-1.json"]
    assert os.listdir(directory.parent) == ["flight"]
    ended = find_job(directory.parent.name)
    assert (ended.flight_directory, ended.pids, list_jobs()) == (directory, {}, [])


def test_recordings_of_a_job_that_succeeds_go():
    job = python(2, RECORD)
    assert (job.returncode, job.stderr) == (0, b"")
    assert list(runtime_directory().iterdir()) == []


@pytest.mark.parametrize("value, expected", [("records", "{}/records"), ("/no/such", "/no/such"), ("none", None)])
def test_recordings_go_where_the_user_wants(tmp_path, value, expected):
    program = "print(os.environ['MLXDIST_JOB'], os.environ['MLXDIST_FLIGHT_DIR'], flush=True)\nstay()"
    with running(1, program, options=["--env", f"MLXDIST_FLIGHT_DIR={value}"], cwd=tmp_path) as job:
        _, name, flight_directory = job.first_lines[0].split()
        expected = expected and expected.format(tmp_path)
        assert flight_directory == (expected or "none")
        assert find_job(name).flight_directory == (expected and Path(expected))
        end(job)


def test_a_job_inside_a_job_has_recordings_of_its_own():
    program = "import os; print(os.environ['MLXDIST_FLIGHT_DIR'])"
    inner = [*LAUNCH, "-n", "1", "--no-prefix", "--", sys.executable, "-c", program]
    job = python(1, program + f"\nimport subprocess; subprocess.run({inner!r})")
    assert len(set(job.stdout.split(b"\n"))) == 3, job


def test_only_the_last_recordings_are_kept():
    for number in range(stale_jobs.KEPT + 2):
        directory = runtime_directory() / f"job{number}"
        (directory / "flight").mkdir(parents=True)
        (directory / "flight" / "flight-0.json").touch()
        os.utime(directory, (number, number))
    assert launch(1, "true").returncode == 0
    assert {path.name for path in runtime_directory().iterdir()} == {f"job{n}" for n in range(2, stale_jobs.KEPT + 2)}


def kill_launcher_and_reaper(job):
    """At the same instant, so that neither can clean up after the other."""
    reaper = int(subprocess.run(["pgrep", "-P", str(job.pid), "-f", "reaper.py"], capture_output=True).stdout)
    os.kill(reaper, signal.SIGSTOP)
    job.kill()
    job.wait()
    os.kill(reaper, signal.SIGKILL)
    assert wait_for(lambda: reaper not in start_times([reaper]))


def test_what_a_killed_launcher_and_reaper_leave_is_removed_by_the_next_start():
    """The ranks, their children in sessions of their own or without environment, and both directories."""
    seconds = f"60.{os.getpid()}"
    program = (
        RECORD + f"import subprocess; subprocess.Popen(['sleep', '{seconds}'], start_new_session=True)\n"
        f"subprocess.Popen(['sleep', '{seconds}'], env={{}})\n" + WAITING
    )
    with running(2, program) as job:
        name, pids = name_and_pids(job)
        assert wait_for(lambda: find_job(name).pids == pids)
        kill_launcher_and_reaper(job)
        assert list_jobs() == [] and set(start_times(pids.values())) == set(pids.values())
        assert os.listdir(os.environ["TMPDIR"]) != []
        following = launch(1, "true")
        assert following.returncode == 0
        assert f"cleaned up after job {name}, whose launcher (pid {job.pid}) was killed. 2 processes" in (
            following.stderr.decode()
        )
        assert start_times(pids.values()) == {}
    assert subprocess.run(["pgrep", "-f", f"^sleep {seconds}$"], capture_output=True).stdout == b""
    assert os.listdir(os.environ["TMPDIR"]) == []
    assert os.listdir(runtime_directory() / name) == ["flight"], "its recordings stay"
    assert launch(1, "true").stderr == b"", "said once"


def test_a_job_whose_launcher_runs_is_left_alone():
    with running(1, WAITING) as job:
        name, pids = name_and_pids(job)
        assert launch(1, "true").stderr == b""
        assert wait_for(lambda: find_job(name).pids == pids)
        end(job)


def test_a_job_whose_reaper_still_runs_is_left_to_it():
    with running(1, WAITING) as job:
        name, pids = name_and_pids(job)
        reaper = int(subprocess.run(["pgrep", "-P", str(job.pid), "-f", "reaper.py"], capture_output=True).stdout)
        os.kill(reaper, signal.SIGSTOP)
        job.kill()
        job.wait()
        assert launch(1, "true").stderr == b""
        assert set(start_times(pids.values())) == set(pids.values())
        os.kill(reaper, signal.SIGCONT)
        assert wait_for(lambda: start_times(pids.values()) == {})


def test_a_process_that_is_not_the_job_s_is_never_ended(tmp_path):
    """Its number stands in the record of a dead job, but it started at another time."""
    stranger = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        directory = JobDirectory.of_ranks("dead", tmp_path / "mlxdist-dead", ["true"])
        directory.note_ranks({0: stranger.pid})
        record = json.loads((directory.path / "job.json").read_text())
        record["ranks"]["0"][1] += "0"
        (directory.path / "job.json").write_text(json.dumps(record))
        directory.close()
        assert b"cleaned up after job dead" in launch(1, "true").stderr
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


@pytest.mark.parametrize("damage", ["{", "[]", '{"launcher": 1}', "other directory"])
def test_what_is_not_a_launcher_s_record_removes_nothing(tmp_path, damage):
    precious = tmp_path / "precious"
    precious.mkdir()
    directory = JobDirectory.of_ranks("damaged", precious, ["true"])
    if damage != "other directory":
        (directory.path / "job.json").write_text(damage)
    directory.close()
    assert launch(1, "true").stderr == b""
    assert precious.is_dir() and (directory.path / "job.json").exists()
    shutil.rmtree(directory.path)


@pytest.mark.parametrize("launcher", [0, -1])
def test_a_signal_to_a_damaged_record_s_launcher_is_not_sent(tmp_path, launcher):
    """0 is the own process group, -1 every process."""
    directory = JobDirectory.of_ranks("damaged", tmp_path, ["true"])
    record = json.loads((directory.path / "job.json").read_text()) | {"launcher": launcher}
    (directory.path / "job.json").write_text(json.dumps(record))
    assert list_jobs() == []
    directory.close()
    shutil.rmtree(directory.path)


def test_a_launcher_inside_a_dead_job_does_not_end_itself():
    inner = [*LAUNCH, "-n", "1", "--", "echo", "inner"]
    program = (
        "import subprocess\nprint(os.environ['MLXDIST_JOB'], os.getpid(), flush=True)\n"
        "while os.getppid() == PARENT: late(0.02)\n"
        "late(0.3)\n"
        f"open(OUT, 'wb').write(subprocess.run({inner!r}, stdout=subprocess.PIPE).stdout)\nstay()"
    )
    out = Path(os.environ["TMPDIR"]).parent / "out"
    with running(1, f"PARENT = os.getppid(); OUT = {str(out)!r}\n" + program) as job:
        name, pids = name_and_pids(job)
        kill_launcher_and_reaper(job)
        assert wait_for(lambda: out.exists() and out.read_bytes() == b"[0] inner\n", 10)
        assert set(start_times(pids.values())) == set(pids.values())
        assert b"cleaned up" in launch(1, "true").stderr
