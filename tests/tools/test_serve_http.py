"""benchmarks/serve_http.py: that it measures running servers. No test looks at the times."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from serving import ServerProcess, save_model_folder

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "serve_http.py"
FIGURES = {"requests/s", "one client, ms", "first byte of a stream, ms", "/health, ms", "idle connection, KiB"}


def measure(*arguments: object, status: int = 0) -> subprocess.CompletedProcess:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == status, done.stderr
    return done


@pytest.mark.long
def test_running_servers_are_measured(tmp_path):
    output = tmp_path / "figures.json"
    with ServerProcess(save_model_folder(tmp_path / "tiny")) as server:
        counts = ["--repeats", 3, "--requests", 8, "--clients", 2, "--connections", 4]
        printed = measure(f"one={server.address}", f"other={server.address}", *counts, "--output", output).stdout
        assert server.metrics()["generated_tokens_total"] >= 2 * 4 * (8 + 2 * 4)
    found = json.loads(output.read_text())
    assert list(found) == ["one", "other"] and "one" in printed and "requests/s" in printed
    for figures in found.values():
        idle = figures.pop("idle connection, KiB", [0.0])
        assert len(idle) == 1 and set(figures) == FIGURES - {"idle connection, KiB"}
        assert all(len(of_rounds) == 3 and min(of_rounds) > 0 for of_rounds in figures.values())


def test_what_cannot_be_measured_is_an_error():
    assert "localhost is not an address such as" in measure("localhost", status=2).stderr
    assert "a server does not answer: " in measure("http://127.0.0.1:1", status=1).stderr
