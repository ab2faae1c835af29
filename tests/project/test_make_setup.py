"""What `make setup` says while it works, with a Python in place of the real one that only notes what pip is to do."""

import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = f"""#!{sys.executable}
import os, shutil, sys
words = sys.argv[1:]
if words[:2] == ["-m", "venv"]:
    os.makedirs(words[2] + "/bin")
    shutil.copy(sys.argv[0], words[2] + "/bin/python")
elif words[:2] == ["-m", "pip"]:
    print("pip", *words[2:], flush=True)
else:
    os.execv({sys.executable!r}, [{sys.executable!r}, *words])
"""


@pytest.fixture
def setup(tmp_path):
    """The command for a copy in which nothing is set up."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "scripts/check_machine.py", "mlxdist/version.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "native").mkdir()
    (tmp_path / "native" / "CMakeLists.txt").touch()
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    return ["make", "--no-print-directory", "-C", str(tmp_path), f"PYTHON={python}", "setup"]


def own_variables() -> dict[str, str]:
    """Without those of a make that runs the tests."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}


def on_terminal(command: list[str]) -> str:
    master, slave = pty.openpty()
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=own_variables())
    os.close(slave)
    output = b""
    try:
        while chunk := os.read(master, 65536):
            output += chunk
    except OSError:  # how Linux says that the last process has closed it
        pass
    os.close(master)
    assert process.wait() == 0, output
    return output.decode().replace("\r\n", "\n")


def in_pipe(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env=own_variables())
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("run", [on_terminal, in_pipe])
def test_each_step_is_named_before_it_runs(setup, run):
    lines = run(setup).splitlines()
    first, second, packages, third, build, seconds, following = lines
    assert [line[:4] for line in (first, second, third)] == ["1/3 ", "2/3 ", "3/3 "]
    assert "--requirement .venv/requirements.txt" in packages and "--no-deps --editable ." in build
    assert seconds.startswith("set up in ") and "make demo" in following
    assert ("--quiet" in packages, "--quiet" in build) == (run is in_pipe,) * 2
    assert ("--verbose" in build) == (run is on_terminal)  # the compiler's progress
    assert run(setup).splitlines() == [following]


def test_all_packages_come_before_the_build(setup, tmp_path):
    """What the build would download shows no progress."""
    in_pipe(setup)
    wanted = (tmp_path / ".venv" / "requirements.txt").read_text()
    for name in ("scikit-build-core", "mlx", "numpy", "click", "mlx-lm", "tokenizers", "pytest", "matplotlib"):
        assert f"\n{name}" in f"\n{wanted}"
    assert "mlxdist" not in wanted
