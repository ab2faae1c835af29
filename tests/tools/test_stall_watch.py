"""`mlxdist launch --stall-timeout`: a job that stands still is ended, after it has shown where its ranks are."""

import re
import subprocess
import sys

import pytest
from launching import LAUNCH, nothing_left, python  # noqa: F401, the fixture is for all tests here
from ssh_hosts import ssh_hosts
from test_flight import SECOND, ended, operation, record

from mlxdist.runtime.diagnostics.flight_records import check_record
from mlxdist.runtime.observation.progress import Progress


def checked(*operations, rank=0, **fields):
    return {rank: check_record(record(rank, *operations, **fields), "a test")}


BEFORE = [ended(sequence=7), operation(sequence=8)]


@pytest.mark.parametrize(
    "after",
    [
        checked(ended(sequence=7), operation(sequence=8), operation(sequence=9)),
        checked(ended(sequence=7), ended(sequence=8)),
        checked(*BEFORE, bytes_received=1),
        checked(*BEFORE, step=3),
        checked(*BEFORE, pid=7),
        checked(*BEFORE, rank=1),
    ],
    ids=["begun", "ended", "data", "step", "another process", "another rank"],
)
def test_what_counts_as_progress(after):
    progress = Progress(100.0)
    assert progress.update(checked(*BEFORE), 101.0) == 0.0
    assert progress.update(checked(*BEFORE, monotonic_ns=1200 * SECOND), 105.0) == 4.0
    assert progress.update(after, 106.0) == 0.0
    assert progress.update(after, 109.0) == 3.0


def test_ranks_that_do_not_respond():
    progress = Progress(100.0)
    assert progress.update({}, 130.0) == 30.0  # not at mlxdist.init() yet
    assert progress.update(checked(*BEFORE), 131.0) == 0.0
    assert progress.update({}, 140.0) == 9.0
    assert progress.update(checked(*BEFORE), 141.0) == 10.0  # it is back, where it was
    progress.excuse(150.0)  # its host could not be reached
    assert progress.update({}, 151.0) == 1.0


def test_ranks_that_never_come_to_init():
    job = python(2, "stay()", options=["--stall-timeout", "1"], text=True)
    assert job.returncode == 124, job.stderr
    assert (
        "mlxdist launch: no rank has gone on for 1 s.\nranks 0 and 1 cannot be signaled: not at mlxdist.init() yet"
        in (job.stderr)
    )
    how = "no rank has gone on for 1 s (--stall-timeout); ranks 0 and 1 ended after SIGTERM"
    assert job.stderr.splitlines()[-1].startswith(f"mlxdist launch: {how}")


@pytest.mark.long
def test_a_rank_that_holds_the_gil_and_a_restart():
    program = """
import re
import mlxdist, mlx.core as mx
mlxdist.init()
def sums():
    mx.eval(mlxdist.all_sum(mx.ones(3)))
def holds():
    re.match("(a+)+$", "a" * 60 + "b")
sums()
if rank == 1 and os.environ["MLXDIST_RESTART_COUNT"] == "0":
    holds()
sums()
"""
    options = ["--stall-timeout", "5", "--grace-period", "1", "--max-restarts", "1"]
    job = python(3, program, options=options, text=True, timeout=120)
    assert job.returncode == 0, job.stderr
    shown = re.search(
        r"ranks 0 and 2, MainThread\n    <string>:\d+  sums\n.*?rank 1, MainThread\n(.*?)\nmlxdist",
        job.stderr,
        re.DOTALL,
    )
    assert shown and " holds\n" in shown[1], job.stderr
    assert "no rank has gone on for 5 s (--stall-timeout); " in job.stderr and "restart 1 of 1 in 1 s." in job.stderr


@pytest.mark.long
def test_ranks_on_two_hosts(tmp_path):
    program = """
import mlxdist, numpy as np, os, time
mlxdist.init()
if os.environ["MLXDIST_RANK"] == "1":
    time.sleep(1000)
mlxdist.all_sum(np.ones(3))
"""
    with ssh_hosts(tmp_path) as nodes:
        words = ["--hosts", ",".join(nodes.names), "--ssh", nodes.ssh, "--stall-timeout", "3", "--grace-period", "1"]
        command = nodes.command(*LAUNCH, *words, "--", sys.executable, "-c", program)
        job = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert job.returncode == 124, job.stderr
    assert re.search(r"Rank 1 has not been in an operation yet.*, rank 0 waits in all_sum #1 ", job.stderr), job.stderr
    assert re.search(r"rank 1, MainThread\n    <string>:5  <module>\n", job.stderr), job.stderr


@pytest.mark.parametrize(
    "options", [["--backend", "ring"], ["--nodes", "1", "--node-rank", "0", "--master-addr", "localhost"]]
)
def test_ranks_that_cannot_be_asked(options, monkeypatch):
    monkeypatch.setenv("MLXDIST_SECRET", "ab" * 32)
    job = python(1, "", options=["--stall-timeout", "9", *options], text=True)
    assert job.returncode == 2 and "--stall-timeout asks the ranks of one launcher" in job.stderr, job.stderr
