"""The scripts for two nodes: help, options, and scripts/test_2node.sh on this machine and between two hosts."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launching import nothing_left  # noqa: F401  (a fixture of every test)
from ssh_hosts import ssh_hosts

from mlxdist.cluster.hostfile.parsing import read
from mlxdist.launch.backends import choose

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


NAMES = sorted(path.name for path in SCRIPTS.glob("*.sh") if os.access(path, os.X_OK))


@pytest.mark.parametrize("script", NAMES)
def test_help(script):
    job = run(SCRIPTS / script, "--help")
    assert job.returncode == 0 and job.stderr == ""
    assert job.stdout.startswith(f"usage: {script} ")
    for option in ("node0", "node1", "node0-ip", "node1-ip", "node0-device", "node1-device", "hostfile", "remote-dir"):
        assert f"\n  --{option} " in job.stdout, option


@pytest.mark.parametrize("script", NAMES)
def test_before_make_setup(tmp_path, script):
    """There is no .venv, and Python has no packages."""
    (tmp_path / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')
    (tmp_path / "python3").chmod(0o755)
    copied = shutil.copytree(SCRIPTS, tmp_path / "scripts", symlinks=True)
    job = run(copied / script, "--help", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert (job.returncode, job.stderr) == (0, "") and "--node0-device" in job.stdout
    job = run(copied / script, *HERE, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert job.returncode == 1 and "this Python has no mlxdist; " in job.stderr and "type: make setup" in job.stderr


@pytest.mark.parametrize(
    "options, words",
    [
        ([], "--node0 is missing: what ssh connects to; or give --hostfile"),
        (["--node0", "a"], "--node1 is missing"),
        (["--node0"], "argument --node0: expected one argument"),
        (["--node2", "a"], "unrecognized arguments: --node2 a"),
        ([*HERE, "--only"], "argument --only: expected one argument"),
        ([*HERE, "--only", "nothing"], "invalid choice: 'nothing' (choose from"),
        (["--node0", "a;b", "--node1", "c"], "'a;b' is no name or address of a host"),
        ([*HERE, "--node0-ip", "192.168.0"], "'192.168.0' is no IP address"),
        (["--node0", "a", "--node1", "b", "--node0-device", "en5"], "a cable has two ends: give --node0-device and"),
        ([*HERE, "--node0-device", "en5", "--node1-device", "en5"], 'a host with "rdma" stands there once'),
        ([*HERE, "--hostfile", "hosts"], "give --hostfile, or --node0 and --node1"),
        (["--hostfile", "/no/file"], "No such file or directory"),
    ],
)
def test_wrong_options(options, words):
    job = run(TEST, *options)
    assert job.returncode == 2 and words in job.stderr and job.stdout == ""


def test_a_hostfile_has_two_ranks(tmp_path):
    (tmp_path / "hosts").write_text("a\nb\nc\n")
    job = run(TEST, "--hostfile", tmp_path / "hosts")
    assert job.returncode == 2 and "it has 3 ranks, and this needs one on each of two hosts" in job.stderr


@pytest.mark.parametrize("by", ["--hostfile", "devices"])
def test_devices_of_the_cable_are_in_the_hostfile(tmp_path, monkeypatch, by):
    """JACCL needs them: mlxdist accepts it with these hosts."""
    rows = [[None, "rdma_en5"], ["rdma_en4", None]]
    names, ips = ["mac0", "mac1"], ["10.0.0.1", "10.0.0.2"]
    hosts = [{"ssh": name, "ips": [ip], "rdma": row} for name, ip, row in zip(names, ips, rows)]
    (tmp_path / "hosts.json").write_text(json.dumps(hosts))
    options = ["--node0", "mac0", "--node1", "mac1", "--node0-ip", ips[0], "--node1-ip", ips[1]]
    options += ["--node0-device", "rdma_en5", "--node1-device", "rdma_en4"]
    monkeypatch.syspath_prepend(SCRIPTS)
    two_nodes = importlib.import_module("two_nodes")
    parser = two_nodes.parser_of("bench_2node.sh", two_nodes.bench)
    given = parser.parse_args(["--hostfile", str(tmp_path / "hosts.json")] if by == "--hostfile" else options)
    with two_nodes.nodes_of(parser, given) as nodes:
        assert json.loads(Path(nodes.hosts[1]).read_text()) == hosts
        assert choose("jaccl", read(nodes.hosts[1]), None).name == "jaccl"


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
