"""Power and heat of Macs: what is a problem, how a rank reads them, and where `mlxdist top` shows them."""

import json
import os
import subprocess
import sys

import pytest
from launching import nothing_left, running  # noqa: F401  (nothing_left is a fixture of every test)
from pmset import COOL, HOT, SYNTHETIC_PMSET, calls_of, install_pmset
from waiting import wait_for

from mlxdist.base.validation import build
from mlxdist.cluster.facts.power import Power, power_settings, speed_limit
from mlxdist.launch.jobs import find_job
from mlxdist.runtime.diagnostics.power import PowerWatch, read_power
from mlxdist.runtime.observation.view import View
from mlxdist.tools.observe.collect import JobRanks
from mlxdist.tools.observe.top import Watch

LOW = SYNTHETIC_PMSET + " lowpowermode         1\n"
HEAT = "heat leaves 28 % of its speed (pmset -g therm)"
# All compute, until the test ends the job.
IDLE = """
import mlxdist
mlxdist.init().barrier()
print('ready', flush=True)
stay()
"""


@pytest.mark.parametrize(
    ("settings", "heat", "slows", "others"),
    [
        (SYNTHETIC_PMSET, COOL, [], []),
        (SYNTHETIC_PMSET, HOT, [HEAT], []),
        (LOW, HOT, ["Low Power Mode is on", HEAT], []),
        (SYNTHETIC_PMSET + " powermode 1", COOL, ["Low Power Mode is on"], []),
        (SYNTHETIC_PMSET + " powermode 2", COOL, [], []),
        (SYNTHETIC_PMSET.replace("displaysleep         10", "displaysleep 0"), COOL, [], ["its display never sleeps"]),
    ],
)
def test_problems(settings, heat, slows, others):
    power = Power.of(power_settings(settings), speed_limit(heat))
    problems = power.problems()
    for problem, words in zip(problems, slows + others, strict=True):
        assert problem.text.startswith(words) and problem.remedy
    assert [problem.slows for problem in problems] == [True] * len(slows) + [False] * len(others)
    assert View("job", [], [], [], False, {"a": power}).warnings == [
        f"a: {problem.text}; {problem.remedy}" for problem in problems if problem.slows
    ]


def test_what_a_rank_sends_is_checked():
    assert build(Power, {"low_power": None, "speed": 100, "display_sleep": None}) == Power(None, 100, None)
    for wrong in ({"low_power": "sleep"}, {"speed": -1}, {"display_sleep": "never"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            build(Power, {"low_power": "powermode", "speed": 28, "display_sleep": 0} | wrong)


def test_a_reading(tmp_path):
    install_pmset(tmp_path, LOW, HOT)
    assert read_power(str(tmp_path / "pmset")) == Power("lowpowermode", 28, 10)
    assert calls_of(tmp_path) == ["-g", "-g therm"]
    install_pmset(tmp_path, "", "")
    assert read_power(str(tmp_path / "pmset")) is None and read_power(str(tmp_path / "none")) is None


def test_readings_are_made_while_they_are_requested(tmp_path, monkeypatch):
    """The first request does not wait for one, and those that follow at once start no others."""
    install_pmset(tmp_path, SYNTHETIC_PMSET, HOT)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr("mlxdist.runtime.diagnostics.power._PERIOD_SECONDS", 1e6)
    watch = PowerWatch()
    assert calls_of(tmp_path) == [] and watch.last() is None
    assert wait_for(lambda: watch.last() == Power(None, 28, 10))
    assert [watch.last() for _ in range(3)] == [Power(None, 28, 10)] * 3
    assert calls_of(tmp_path) == ["-g", "-g therm"]


def test_no_reading_without_pmset(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert PowerWatch().last() is None


@pytest.mark.long
@pytest.mark.parametrize("settings, heat, warnings", [(LOW, HOT, 2), (SYNTHETIC_PMSET, COOL, 0)])
def test_top(tmp_path, monkeypatch, settings, heat, warnings):
    install_pmset(tmp_path, settings, heat)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("MLXDIST_FLIGHT_DIR", raising=False)
    with running(2, IDLE) as job:
        watch = Watch(JobRanks(find_job().name))
        assert wait_for(lambda: watch.refresh(5).power, 20)
        words = [sys.executable, "-m", "mlxdist", "top", "--once", "--interval", "0.1"]
        table, found = (
            subprocess.run([*words, *more], capture_output=True, text=True, timeout=60).stdout
            for more in ([], ["--json"])
        )
        view = json.loads(found)
        (host,) = {row["host"] for row in view["ranks"]}
        power = Power.of(power_settings(settings), speed_limit(heat))
        assert build(Power, view["power"][host]) == power and len(view["warnings"]) == warnings
        assert [line for line in table.splitlines() if line.startswith(f"{host}: ")] == view["warnings"]
        job.terminate()
        job.communicate(timeout=20)
