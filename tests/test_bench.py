"""`mlxdist bench`: that it runs, checks data and prints what it promises. No test looks at the numbers themselves."""

import json
import shutil
import subprocess
import sys

import pytest

CASES = ["8 KiB, chain of 50", "8 KiB", "64 KiB", "1 MiB", "16 MiB"]


def bench(*arguments: str, status: int = 0) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "mlxdist", "bench", "collectives", *arguments]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert finished.returncode == status, finished.stdout + finished.stderr
    return finished


def require_complete(results: dict, backends: list[str]) -> None:
    assert results["backends"] == backends and results["ranks"] == 2
    assert [case["name"] for case in results["cases"]] == CASES
    for case in results["cases"]:
        assert set(case["microseconds"]) == set(backends)
        for spread in [*case["microseconds"].values(), case["memcpy"]]:
            assert 0 < spread["min"] <= spread["median"] <= spread["max"]


def test_results_as_json_and_as_a_table(tmp_path):
    results = tmp_path / "results.json"
    printed = bench("--rounds", "3", "--against", "ring", "--output", str(results)).stdout
    require_complete(json.loads(results.read_text()), ["mlxdist", "ring"])
    assert "ring / mlxdist" in printed and all(case in printed for case in CASES)
    assert "\x1b" not in printed  # no colours in a pipe


@pytest.mark.long
def test_open_mpi_in_the_same_processes():
    if not shutil.which("mpirun"):
        pytest.skip("there is no mpirun on the path (Debian: apt install openmpi-bin)")
    require_complete(json.loads(bench("--rounds", "3", "--json").stdout), ["mlxdist", "ring", "mpi"])


def test_an_unknown_backend_is_refused():
    assert "'carrier-pigeon' is not one of ring, mpi" in bench("--against", "carrier-pigeon", status=2).stderr
