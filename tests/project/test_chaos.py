"""Collectives while ranks are killed, stopped and resumed, and messages get lost: scripts/chaos.py, tests/chaos."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "chaos"))
import plan


@pytest.mark.long
def test_chaos():
    """Always the same rounds; `make chaos` plays others."""
    command = [sys.executable, str(ROOT / "scripts" / "chaos.py"), "--rounds", "100", "--seed", "77000"]
    script = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert script.returncode == 0, script.stdout + script.stderr
    assert "chaos: 100 rounds" in script.stdout


def test_a_seed_makes_a_round():
    for seed in range(100):
        assert plan.make(seed) == plan.make(seed) == json.loads(json.dumps(plan.make(seed)))
