"""A job on four hosts that ssh reaches: what it computes, how it ends, and what is seen of it from its launcher."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import uuid

import pytest
from launching import LAUNCH, RANK, nothing_left  # noqa: F401  (nothing_left is a fixture of every test)
from ssh_hosts import SshHosts, ssh_hosts
from waiting import wait_for

pytestmark = pytest.mark.long

NAMES = ["node0", "node1", "node2", "node3"]
HOSTS = ["--hosts", ",".join(NAMES)]
VARIABLES = ["--env", "MLXDIST_SOFT_TRANSPORT=tcp"]  # the namespaces share a kernel, and could share memory
# What a network that delays has no part in.
ONCE = pytest.mark.parametrize("nodes", ["good"], indirect=True)


@pytest.fixture(autouse=True)
def records(monkeypatch):
    monkeypatch.delenv("MLXDIST_FLIGHT_DIR", raising=False)


@pytest.fixture(scope="module", params=["good", "late"])
def nodes(tmp_path_factory, request):
    with ssh_hosts(tmp_path_factory.mktemp("ssh"), late=request.param == "late", count=4) as found:
        yield found


def mlxdist(nodes: SshHosts, command: str, *options: object) -> list[str]:
    """Where the launcher is; what names hosts, and how they are reached, is added by `over_ssh`."""
    return nodes.command(sys.executable, "-m", "mlxdist", command, *options)


def over_ssh(nodes: SshHosts) -> list[str]:
    return [*HOSTS, "--ssh", nodes.ssh]


def launch(nodes: SshHosts, program: str, *options: str) -> list[str]:
    command = [*LAUNCH, *over_ssh(nodes), *VARIABLES, *options, "--", sys.executable, "-c", RANK + program]
    return nodes.command(*command)


def run(command: list[str], timeout: float = 100, **keywords: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=timeout, **keywords
    )


@contextlib.contextmanager
def running(nodes: SshHosts, program: str, *options: str):
    """The launcher, once every rank has printed a line."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(launch(nodes, program, *options), **pipes)
    try:
        assert all(process.stdout.readline() for _ in NAMES), process.communicate()
        yield process
    finally:
        process.kill()
        process.communicate()


COLLECTIVES = """
import mlxdist, numpy as np
group = mlxdist.init()
parts = [np.random.default_rng(of).integers(-100, 100, 50_000).astype(np.float32) for of in range(group.size())]
for _ in range(3):
    assert (mlxdist.all_sum(parts[rank]) == sum(parts)).all()
    assert (mlxdist.all_gather(parts[rank]) == np.concatenate(parts)).all()
    assert (mlxdist.broadcast(parts[rank], root=2) == parts[2]).all()
print(group.size(), "exact")
"""


def test_collectives(nodes):
    """Two ranks on each host, compared with what NumPy computes."""
    job = run(launch(nodes, COLLECTIVES, "-n", "2"))
    assert job.returncode == 0, job.stderr
    expected = [f"[{rank} {NAMES[rank // 2]}] 8 exact" for rank in range(8)]
    assert sorted(job.stdout.splitlines()) == expected
    assert all(host.received_bytes() > 1e6 for host in nodes.hosts), "they went by another way"


def test_a_rank_that_fails(nodes):
    marker = uuid.uuid4().hex
    program = "import mlxdist\nmlxdist.init(); mlxdist.barrier()\nif rank == 2: os._exit(7)\nmlxdist.barrier()"
    job = run(launch(nodes, program, "--env", f"MARKER={marker}"))
    assert job.returncode == 7 and "rank 2 failed first, with exit status 7" in job.stderr, job.stderr
    assert wait_for(lambda: not nodes.processes(marker), 15), nodes.processes(marker)


@ONCE
def test_restart(nodes):
    program = "import mlxdist\nmlxdist.init(); mlxdist.barrier()\nrestart = os.environ['MLXDIST_RESTART_COUNT']\n"
    program += "if rank == 3 and restart == '0': os._exit(5)\nmlxdist.barrier(); print('done', restart)"
    job = run(launch(nodes, program, "--max-restarts", "1"))
    assert job.returncode == 0, job.stderr
    assert sorted(job.stdout.splitlines()) == [f"[{rank} {name}] done 1" for rank, name in enumerate(NAMES)]


@ONCE
def test_the_failed_start_of_a_job_that_was_restarted(nodes):
    """Its name is the beginning of that of the job that runs now: its records are shown, `top` says that it ended."""
    program = "import mlxdist\nmlxdist.init(); print(os.environ['MLXDIST_JOB'], flush=True); mlxdist.barrier()\n"
    program += "if os.environ['MLXDIST_RESTART_COUNT'] == '1': stay()\nif rank == 3: os._exit(5)\nmlxdist.barrier()"
    with running(nodes, program, "--max-restarts", "1") as launcher:
        lines = [launcher.stdout.readline() for _ in NAMES]
        job = lines[0].split()[-1].removesuffix("-1")
        assert {line.split()[-1] for line in lines} == {f"{job}-1"}
        for where in ([], over_ssh(nodes)):
            shown = run(mlxdist(nodes, "dump", job, *where, "--json"))
            ranks = json.loads(shown.stdout)["ranks"]
            assert shown.returncode == 1, shown
            assert [rank["error"] is not None for rank in ranks] == [True, True, True, False]
            ended = run(mlxdist(nodes, "top", job, *where))
            assert (ended.returncode, ended.stderr) == (0, f"Job {job} has ended.\n"), ended
        now = json.loads(run(mlxdist(nodes, "dump", job[:5], "--json")).stdout)
        assert [rank["error"] for rank in now["ranks"]] == [None] * 4
        stopped = run(mlxdist(nodes, "stop", job))
        assert stopped.returncode == 0 and stopped.stdout == f"{job}-1 has ended\n", stopped
        launcher.communicate(timeout=30)


def test_a_host_is_lost(nodes):
    """The others end at once; on the lost host the ranks end by themselves when it is back."""
    marker = uuid.uuid4().hex
    program = "import mlxdist, numpy\nmlxdist.init(); mlxdist.barrier(); print('runs', flush=True)\n"
    program += "while True: mlxdist.all_sum(numpy.ones(1000))"
    options = ["--env", f"MARKER={marker}", "--grace-period", "1"]
    with running(nodes, program, *options) as launcher:
        nodes.hosts[2].pull_cable()
        try:
            _, error = launcher.communicate(timeout=90)
        finally:
            nodes.hosts[2].plug_cable()
        assert launcher.returncode not in (0, None) and "node2" in error, error
    assert wait_for(lambda: not nodes.processes(marker), 90), nodes.processes(marker)


# What others wait for: rank 2 enters no operation before it gets a signal to end.
LATE = """
import mlxdist, numpy
mlxdist.init()
for step in range(3):
    mlxdist.set_step(step, 10)
    mlxdist.all_sum(numpy.ones(100_000))
print(os.environ['MLXDIST_JOB'], flush=True)
if rank == 2: stay()
mlxdist.all_sum(numpy.ones(100_000))
"""


def test_a_job_is_seen_from_its_launcher(nodes):
    marker = uuid.uuid4().hex
    with running(nodes, LATE, "--env", f"MARKER={marker}") as launcher:
        (job,) = json.loads(run(mlxdist(nodes, "ps", "--json")).stdout)
        assert job["launcher"] == launcher.pid and job["pids"] == {}
        assert job["hosts"] == [{"name": name, "first": i, "slots": 1} for i, name in enumerate(NAMES)]
        shown = run(mlxdist(nodes, "ps")).stdout
        assert "node0: 0, node1: 1, node2: 2, node3: 3" in shown, shown

        def waiting():
            found = run(mlxdist(nodes, "dump", "--json"))
            assert found.returncode == 0, found.stdout + found.stderr
            return [rank["in_operation"] for rank in json.loads(found.stdout)["ranks"]] == [True, True, False, True]

        assert wait_for(waiting, 30)
        trace = nodes.directory / "trace.json"
        shown = run(mlxdist(nodes, "dump", job["job"][:6], "--trace", trace))
        assert re.search(r"Rank 2 computes since all_sum #3 .*, the others wait in all_sum #4", shown.stdout), shown
        assert all(name in shown.stdout for name in NAMES) and "2/10" in shown.stdout
        events = json.loads(trace.read_text())["traceEvents"]
        assert sorted(e["pid"] for e in events if e["ph"] == "X" and e["args"]["sequence"] == 3) == [0, 1, 2, 3]

        view = json.loads(run(mlxdist(nodes, "top", "--once", "--json")).stdout)  # they wait for longer than 0.1 s
        assert [row["host"] for row in view["ranks"]] == NAMES
        assert [row["is_straggler"] for row in view["ranks"]] == [False, False, True, False]
        assert all((row["step"], row["total_steps"], row["operations"]) == (2, 10, 3 + (row["rank"] != 2))
                   for row in view["ranks"])  # fmt: skip
        assert "straggler" in run(mlxdist(nodes, "top", "--once")).stdout

        stopped = run(mlxdist(nodes, "stop", job["job"][:6]))
        assert stopped.returncode == 0 and stopped.stdout == f"{job['job']} has ended\n", stopped
        assert launcher.wait(30) == 143
    assert json.loads(run(mlxdist(nodes, "ps", "--json")).stdout) == []
    assert wait_for(lambda: not nodes.processes(marker), 15), nodes.processes(marker)


@ONCE
def test_a_job_is_seen_from_elsewhere(nodes, tmp_path):
    """Where it was not started, and by naming its hosts."""
    marker = uuid.uuid4().hex
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    there = {"env": os.environ | {"XDG_RUNTIME_DIR": str(elsewhere)}}
    with running(nodes, LATE, "--env", f"MARKER={marker}", "--max-restarts", "3") as launcher:
        jobs = json.loads(run(mlxdist(nodes, "ps", *over_ssh(nodes), "--json"), **there).stdout)
        assert [(job["host"], list(job["pids"])) for job in jobs] == [(n, [str(i)]) for i, n in enumerate(NAMES)]
        listed = run(mlxdist(nodes, "ps", *over_ssh(nodes)[2:], "--hosts", "node1,nowhere"), **there)
        assert listed.returncode == 1 and "nowhere does not respond" in listed.stderr and "node1" in listed.stdout
        assert run(mlxdist(nodes, "dump", *over_ssh(nodes)), **there).returncode == 0
        part = run(mlxdist(nodes, "dump", "--hosts", "node0,node2", "--ssh", nodes.ssh), **there)
        assert part.returncode == 1 and "ranks 1 and 3 have no full record" in part.stdout, part
        unknown = run(mlxdist(nodes, "stop", "zzz", *over_ssh(nodes)), **there)
        assert unknown.returncode == 2 and "there is no job 'zzz' on these hosts; running are: " in unknown.stderr
        stopped = run(mlxdist(nodes, "stop", jobs[0]["job"][:6], *over_ssh(nodes)), **there)
        assert stopped.returncode == 0, stopped
        assert stopped.stdout == f"{jobs[0]['job']} has ended on {', '.join(NAMES)}\n"
        assert launcher.wait(30) == 143
    assert wait_for(lambda: not nodes.processes(marker), 15), nodes.processes(marker)


@ONCE
def test_clocks_that_disagree(nodes, tmp_path):
    """On node1 it is an hour earlier: what happened together is shown together, and who is late is found."""
    (tmp_path / "sitecustomize.py").write_text(
        "import time\nwall, wall_ns = time.time, time.time_ns\n"
        "time.time, time.time_ns = lambda: wall() - 3600, lambda: wall_ns() - 3600 * 10**9\n"
    )
    python = tmp_path / "python"
    late = f"[ $(hostname) = node1 ] && export PYTHONPATH={tmp_path}"
    python.write_text(f'#!/bin/sh\n{late}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    with running(nodes, LATE, "--python", str(python)) as launcher:
        trace = tmp_path / "trace.json"
        assert wait_for(lambda: "the others wait in all_sum #4" in run(mlxdist(nodes, "dump")).stdout, 30)
        shown = run(mlxdist(nodes, "dump", "--trace", trace, "--json"))
        events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
        begins = [event["ts"] for event in events if event["args"]["sequence"] == 3]
        assert len(begins) == 4 and max(begins) - min(begins) < 600e6  # microseconds
        assert [rank["is_straggler"] for rank in json.loads(shown.stdout)["ranks"]] == [False, False, True, False]
        launcher.send_signal(signal.SIGTERM)
        _, error = launcher.communicate(timeout=30)
        assert launcher.returncode == 143, error


@ONCE
def test_a_host_that_does_not_respond_is_named(nodes):
    with running(nodes, LATE) as launcher:
        nodes.hosts[3].pull_cable()
        try:
            shown = run(mlxdist(nodes, "dump"))
        finally:
            nodes.hosts[3].plug_cable()
        assert shown.returncode == 1 and "node3 has not responded" in shown.stdout, shown
        assert "Rank 3 has left no record" in shown.stdout
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(60) != 0


@ONCE
def test_top_ends_with_the_job(nodes):
    with running(nodes, LATE) as launcher:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(mlxdist(nodes, "top", "--json", "--interval", "0.3"), **pipes) as top:
            first = json.loads(top.stdout.readline())
            assert first["ranks"][0]["gbps"] is None and len(first["ranks"]) == 4, first
            assert json.loads(top.stdout.readline())["ranks"][0]["gbps"] is not None
            launcher.send_signal(signal.SIGTERM)
            output, error = top.communicate(timeout=60)
            assert top.returncode == 0 and "has ended" in error, (output, error)
        assert launcher.wait(30) == 143
