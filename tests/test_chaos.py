"""Collectives while ranks are killed, stopped and resumed, and messages get lost: see scripts/chaos.py and tests/chaos."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "chaos"))
import plan  # noqa: E402


def run(rounds, seed, timeout):
    command = [sys.executable, str(ROOT / "scripts" / "chaos.py"), "--rounds", str(rounds), "--seed", str(seed)]
    script = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    assert script.returncode == 0, script.stdout + script.stderr
    assert f"chaos: {rounds} rounds" in script.stdout


@pytest.mark.long
def test_chaos_for_a_moment():
    """Always the same rounds."""
    run(10, 0, timeout=120)


@pytest.mark.long
def test_chaos():
    """Always the same rounds; `make chaos` plays others. One of them lost the news of a failure with a cable."""
    run(200, 77_000, timeout=1200)


def test_a_seed_makes_a_round():
    for seed in range(100):
        assert plan.make(seed) == plan.make(seed) == json.loads(json.dumps(plan.make(seed)))
