"""The scripts for two nodes: help, options, and scripts/test_2node.sh on this machine and between two hosts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launching import nothing_left  # noqa: F401  (a fixture of every test)
from ssh_hosts import ssh_hosts

SCRIPTS = Path(__file__).parents[2] / "scripts"
TEST = SCRIPTS / "test_2node.sh"
HERE = ["--node0", "localhost", "--node1", "localhost", "--python", sys.executable]
STEPS = ["sendrecv", "registration", "collectives", "experts", "linears"]


def run(*words, timeout=60, **variables):
    environ = {name: value for name, value in os.environ.items() if not name.startswith("RMLX_")}
    return subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, timeout=timeout, env=environ | variables
    )


def rows(job):
    """Step and result of the table."""
    lines = job.stdout.splitlines()
    table = lines[next(i for i, line in enumerate(lines) if line.startswith("step ")) + 1 :]
    return [(line.split()[0], " ".join(line.split()[1:-1])) for line in table]


def with_step(directory, program):
    """A copy of the project with another program for the steps."""
    path = directory / "scripts"
    path.mkdir()
    (path / "check_two_nodes.py").write_text(program)
    return ["--remote-dir", directory, "--only", "sendrecv"]


@pytest.mark.parametrize("script", sorted(path.name for path in SCRIPTS.glob("*.sh") if os.access(path, os.X_OK)))
def test_help(script):
    job = run(SCRIPTS / script, "--help")
    assert job.returncode == 0 and job.stderr == ""
    assert job.stdout.startswith(f"Usage: {script} ")
    for option in ("node0", "node1", "node0-ip", "node1-ip", "remote-dir", "help"):
        assert f"\n  --{option} " in job.stdout or job.stdout.endswith(f"\n  --{option}\n"), option


@pytest.mark.parametrize(
    "options, words",
    [
        ([], "Missing option '--node0' (env var: 'RMLX_NODE0')"),
        (["--node0", "a"], "Missing option '--node1' (env var: 'RMLX_NODE1')"),
        (["--node0"], "Option '--node0' requires an argument"),
        (["--node2", "a"], "No such option '--node2'"),
        ([*HERE, "--only"], "Option '--only' requires an argument"),
        ([*HERE, "--only", "nothing"], "'nothing' is not one of 'sendrecv', 'registration'"),
        (["--node0", "a;b", "--node1", "c"], "'a;b' is no name or address of a host"),
        ([*HERE, "--node0-ip", "192.168.0"], "'192.168.0' is no IP address"),
    ],
)
def test_wrong_options(options, words):
    job = run(TEST, *options)
    assert job.returncode == 2 and words in job.stderr and job.stdout == ""


def test_a_limit_without_an_earlier_run_is_rejected():
    job = run(SCRIPTS / "compare_2node.sh", *HERE, "--max-slowdown", "1.2")
    assert job.returncode == 2 and "--max-slowdown needs --baseline" in job.stderr and job.stdout == ""


def test_variables_stand_in_for_options():
    job = run(TEST, "--only", "sendrecv", RMLX_NODE0="localhost", RMLX_NODE1="127.0.0.1", RMLX_PYTHON=sys.executable)
    assert job.returncode == 0, job.stdout + job.stderr
    assert rows(job) == [("sendrecv", "ok")]


def test_a_step_that_fails_is_shown(tmp_path):
    job = run(TEST, *HERE, *with_step(tmp_path, "print('before'); raise SystemExit(7)"))
    assert job.returncode == 1 and rows(job) == [("sendrecv", "failed with status 7")]
    assert "[0 localhost] before\n" in job.stdout and "failed first, with exit status 7" in job.stdout


@pytest.mark.long
def test_a_step_that_hangs_ends(tmp_path):
    job = run(TEST, *HERE, *with_step(tmp_path, "import time; time.sleep(60)"), "--timeout", "0.5")
    assert job.returncode == 1 and rows(job) == [("sendrecv", "not done within 0.5 s")]


@pytest.mark.long
def test_all_steps_on_this_machine():
    job = run(TEST, *HERE, timeout=240)
    assert job.returncode == 0, job.stdout + job.stderr
    assert rows(job) == [(step, "ok") for step in STEPS]


@pytest.mark.long
def test_all_steps_between_two_hosts(tmp_path):
    """Over TCP, for these hosts have no RDMA device."""
    directory = tmp_path / "hosts"
    directory.mkdir()
    with ssh_hosts(directory) as nodes:
        ips = ["--node0-ip", nodes.hosts[0].address, "--node1-ip", nodes.hosts[1].address]
        names = ["--node0", nodes.names[0], "--node1", nodes.names[1]]
        job = run(*nodes.command(TEST, *names, *ips, "--ssh", nodes.ssh, "--python", sys.executable), timeout=270)
    assert job.returncode == 0, job.stdout + job.stderr
    assert rows(job) == [(step, "ok") for step in STEPS]
