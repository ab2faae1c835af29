"""One function starts a job and waits for it: what it returns, and that nothing is left whatever happens here."""

import os
import sys
import time

import pytest

from mlxdist.base.errors import ResourceError
from mlxdist.cluster.hostfile.options import HostSelection
from mlxdist.cluster.hostfile.parsing import parse, read
from mlxdist.launch.jobs import list_jobs
from mlxdist.launch.run_job import host_arguments, run_command, run_job

SHOW = 'import os; os.write(1, f\'{os.environ["MLXDIST_RANK"]} {os.environ["A"]} {os.getcwd()}\\n\'.encode())'
TWO = ["-n", "2"]


def test_output_and_status():
    done = run_job([sys.executable, "-c", SHOW], TWO, variables={"A": "1"}, directory="/", prefix=False)
    assert done.status == 0 and sorted(done.output.splitlines()) == ["0 1 /", "1 1 /"] and done.errors == ""


def test_a_variable_replaces_that_of_this_process(monkeypatch):
    monkeypatch.setenv("MLXDIST_SOFT_PROFILE", "no such profile")  # which the launcher would reject
    assert run_job(["true"], ["-n", "1"], variables={"MLXDIST_SOFT_PROFILE": "ideal"}).status == 0


def test_a_failure_is_a_status():
    done = run_job([sys.executable, "-c", "raise SystemExit(3)"], TWO)
    assert done.status == 3 and "failed first" in done.errors


def test_a_job_that_takes_too_long():
    done = run_job(["sleep", "600"], TWO, timeout=1)
    assert done.status == 124 and "--timeout" in done.errors


def test_a_command_that_takes_too_long():
    done = run_command(["sleep", "600"], timeout=0.2)
    assert done.status < 0 and "it had not ended after 0.2 s" in done.errors


def test_lines_arrive_while_the_job_runs():
    seen = []
    done = run_job(
        ["sh", "-c", "echo a; sleep 2; echo b"], ["-n", "1"], on_line=lambda _: seen.append(time.monotonic())
    )
    assert done == (0, "", "") and len(seen) == 2 and seen[1] - seen[0] > 1


def test_a_silent_job_is_ended():
    with pytest.raises(ResourceError, match="printed nothing for 1 s"):
        run_job(["sleep", "600"], TWO, on_line=print, silence=1)
    assert not list_jobs()


def test_an_exception_ends_the_job():
    def fail(line):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_job(["sh", "-c", "echo a; exec sleep 600"], TWO, on_line=fail)
    assert not list_jobs()


def test_hosts_by_a_temporary_hostfile():
    selection = HostSelection(parse("localhost slots=2", "test"), ("ssh", "-F", "a b"), "/x/python")
    with host_arguments(selection) as words:
        assert [(host.name, host.slots) for host in read(words[1]).hosts] == [("localhost", 2)]
        assert words[2:] == ["--ssh", "ssh -F 'a b'", "--python", "/x/python"]
        assert run_job(["true"], words[:2]).status == 0
    assert not os.path.exists(words[1])
