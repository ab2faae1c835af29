"""benchmarks/prefix_disk.py: that it measures the three ways to have a prefix. No test looks at the times."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "prefix_disk.py"


@pytest.mark.long
def test_a_small_prefix(tmp_path):
    size = ["--tokens", "700", "--hidden", "64", "--layers", "2", "--repeats", "3", "--directory", tmp_path]
    done = subprocess.run([sys.executable, SCRIPT, *size], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if "│" in line]
    assert len(rows) == 3 and not list(tmp_path.iterdir())
