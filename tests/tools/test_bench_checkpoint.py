"""`mlxdist bench checkpoint`: that it runs, checks and judges. No test looks at times."""

import json
import subprocess
import sys

import pytest

from mlxdist.tools.bench.results import by_case


def run(*arguments: str, status: int = 0) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "mlxdist", "bench", "checkpoint", *arguments]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert finished.returncode == status, finished.stdout + finished.stderr
    return finished


@pytest.mark.long
def test_steps_with_and_without_saves(tmp_path):
    arguments = ["--hidden", "64,128", "--steps", "2", "--rows", "8", "--repeats", "3", "--directory", str(tmp_path)]
    results = json.loads(run(*arguments, "--json").stdout)
    rows = by_case(results)
    assert [row["asynchronous"]["case"]["hidden"] for row in rows] == [64, 128]
    for row in rows:
        assert set(row) == {"no save", "asynchronous", "waiting"}
        assert not any(result["wrong"] or result["refused"] for result in row.values())
    assert rows[0]["asynchronous"]["saved"] == 3 * 4 * 4 * (64 * 64 + 64) + 8 + 4, (
        "parameters, two moments, two numbers"
    )
    assert len(results["targets"]) == 2 and not list(tmp_path.iterdir())


def test_rejected():
    assert "'100' is not a multiple of 8" in run("--hidden", "100", status=2).stderr
