"""constraints.txt fits the lowest Python that README.md names: its first release, as Debian's are early ones."""

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOWEST = re.search(r"^\| Python \| ([0-9.]+) to ", (ROOT / "README.md").read_text(), re.MULTILINE)[1]
PINS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if line[:1] != "#")


def test_the_lowest_python_is_the_same_everywhere():
    assert PROJECT["project"]["requires-python"] == f">={LOWEST}"
    assert f"sys.version_info < ({LOWEST.replace('.', ', ')})" in (ROOT / "scripts" / "check_machine.py").read_text()


def test_what_is_installed_takes_it():
    installed = [one for one in importlib.metadata.distributions() if PINS.get(one.name) == one.version]
    assert len(installed) > 30
    wanted = {f"{one.name}=={one.version}": one.metadata.get("Requires-Python") or "" for one in installed}
    assert {pin: python for pin, python in wanted.items() if f"{LOWEST}.0" not in SpecifierSet(python)} == {}


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="pip resolves for this system")
def test_all_requirements_can_be_installed_with_it(tmp_path):
    """Those of `make setup`, `make lint` and `make docs`, as pip resolves them for that Python."""
    extras = PROJECT["project"]["optional-dependencies"]
    names = ["lm", "test", "bench", "lint", "docs"]
    lines = sum((extras[name] for name in names), PROJECT["build-system"]["requires"])
    lines += PROJECT["project"]["dependencies"]
    (tmp_path / "requirements").write_text("\n".join(line for line in lines if not line.startswith("mlxdist")))
    options = ["--dry-run", "--quiet", "--ignore-installed", "--target", tmp_path / "target", "--only-binary=:all:"]
    options += ["--python-version", f"{LOWEST}.0", "-c", ROOT / "constraints.txt", "-r", tmp_path / "requirements"]
    done = subprocess.run([sys.executable, "-m", "pip", "install", *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
