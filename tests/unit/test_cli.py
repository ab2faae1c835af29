"""The command `mlxdist` itself."""

import os
import subprocess
import sys

import pytest

from mlxdist.version import __version__


def test_the_command_line_starts_without_mlx():
    program = "import sys, mlxdist.cli, mlxdist.cli.launch; print({'mlx', 'numpy', 'cffi'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", program], timeout=30) == b"set()\n"


@pytest.mark.parametrize("arguments, words", [(["lunch"], "Did you mean 'launch'?"), (["--versoin"], "--version")])
def test_suggestions(arguments, words):
    job = subprocess.run([sys.executable, "-m", "mlxdist", *arguments], capture_output=True, text=True, timeout=30)
    assert job.returncode == 2 and words in job.stderr


def test_version_and_help():
    def mlxdist(*arguments):
        return subprocess.run([sys.executable, "-m", "mlxdist", *arguments], capture_output=True, text=True, timeout=30)

    assert mlxdist("--version").stdout == f"mlxdist {__version__}\n"
    assert "launch" in mlxdist("--help").stdout
    assert "--grace-period" in mlxdist("launch", "--help").stdout


@pytest.mark.parametrize("before", [True, False])
def test_the_garbage_collector_is_as_it_was_after_the_imports(before):
    program = (
        f"import gc; {before} or gc.disable(); "
        "import mlxdist.cli; first = gc.isenabled(); mlxdist.cli.commands.get_command(None, 'launch'); "
        "print(first, gc.isenabled())"
    )
    assert subprocess.check_output([sys.executable, "-c", program], timeout=30, text=True) == f"{before} {before}\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["env"],
        ["ps", "--json"],
        ["launch", "--print-python"],
        ["launch", "-n", "1", "--dry-run", "--", "true"],
    ],
)
def test_a_standard_output_that_cannot_be_written(arguments, unbuffered):
    with open("/dev/full", "wb") as full:
        job = subprocess.run(
            [sys.executable, "-m", "mlxdist", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=30,
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        )
    error = "Error: the standard output cannot be written: No space left on device\n"
    assert (job.returncode, job.stderr) == (1, error)
