"""`mlxdist config --install`: what it leaves on hosts, and what it says where something goes wrong."""

import io
import subprocess
import sys
import tarfile

import pytest
from click.testing import CliRunner
from fake_ssh import through_a_shell

from mlxdist.cli import commands
from mlxdist.cluster.setup.install import _SCRIPT as SCRIPT
from mlxdist.cluster.setup.install import _archive as archive
from mlxdist.cluster.setup.install import read_result
from mlxdist.cluster.ssh.ssh import CommandResult
from mlxdist.version import __version__


def config(directory, *words):
    ssh = through_a_shell(directory, "Welcome!").ssh[0]
    return CliRunner().invoke(commands, ["config", "--ssh", ssh, "--hosts", "a,b", *map(str, words)])


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--venv", "/x"], "--from, --with and --venv are for --install"),
        (["--install", "--venv", "here"], "--venv here: write an absolute path, or one that begins with ~/"),
        (["--install", "--venv", "/"], "--venv /: write an absolute path"),
        (["--install", "--venv", "~/"], "--venv ~: write an absolute path"),
        *((["--install", option], "leave those out") for option in ("--dry-run", "--auto-setup", "--verify", "--undo")),
        (["--install", "--with", "--pre"], "--with --pre: write a package"),
        (["--install", "--from", "{directory}"], f"there is no wheel mlxdist-{__version__}-*.whl"),
        (["--install", "--from", "{directory}/x.whl"], f"there is no wheel mlxdist-{__version__}-*.whl"),
        (["--install", "--from", "{directory}/old"], f"this is mlxdist {__version__}, and hosts must have the same"),
    ],
)
def test_bad_input_is_rejected_before_any_host_is_reached(tmp_path, words, text):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "mlxdist-0.0.1-py3-none-any.whl").touch()
    done = CliRunner().invoke(
        commands, ["config", "--ssh", "/no/ssh", "--hosts", "a", *(word.format(directory=tmp_path) for word in words)]
    )
    assert done.exit_code in (1, 2) and text in " ".join(done.stderr.split())


def test_a_directory_of_another_program_is_left_alone(tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "link").symlink_to("own")
    for name in ("own", "own/", "link"):
        done = config(tmp_path, "--install", "--venv", f"{tmp_path}/{name}")
        words = f"{name.rstrip('/')} is there, and mlxdist has not made it; choose another one with --venv"
        assert done.exit_code == 1 and done.stdout.count(words) == 2, done.output
    assert {path.name for path in tmp_path.iterdir()} == {"link", "own", "ssh"}


# Instead of uv: environments whose Python has the versions that the script asks for.
UV = """#!/bin/sh
test "$1" = venv || exit 0
for directory; do :; done
mkdir "$directory/bin" && printf '#!/bin/sh\ncase "$*" in *platform*) echo 3 0 0 ;; *) exec {python} "$@" ;; esac\n' \
  >"$directory/bin/python" && chmod +x "$directory/bin/python"
"""


@pytest.fixture
def uv(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "uv").write_text(UV.replace("{python}", sys.executable))
    (tmp_path / "bin" / "uv").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")


def test_the_environment_before_is_kept(tmp_path, uv):
    """It may be the one that runs this."""
    directory = tmp_path / "there"
    made = []
    for _ in range(3):
        words = ["sh", "-c", SCRIPT, "sh", f"{directory}/venv", "3.12", "no", "mlxdist"]
        done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60)
        assert done.returncode == 0 and f"@mlxdist:3 0 0 {directory}/venv/bin/python" in done.stdout, done
        made.append((directory / "venv").resolve())
        before = made[-2:-1]
        assert {path.resolve() for path in directory.glob("venv.previous")} == set(before)
        assert {path for path in directory.iterdir() if not path.is_symlink()} == {made[-1], *before}


def test_other_hosts_find_it_by_the_link(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv.aBc123"))
    (tmp_path / "venv").symlink_to("venv.aBc123")
    shown = CliRunner().invoke(commands, ["launch", "--print-python"])
    assert shown.stdout == f"{tmp_path}/venv/bin/python\n", shown.output
    given = CliRunner().invoke(commands, ["launch", "--print-python", "--python", "/opt/python"])
    assert given.stdout == "/opt/python\n", given.output


def test_wheels_that_are_links(tmp_path):
    (tmp_path / "store").write_text("a wheel")
    (tmp_path / "x.whl").symlink_to("store")
    with tarfile.open(fileobj=io.BytesIO(archive([tmp_path / "x.whl"]))) as found:
        assert found.extractfile("x.whl").read() == b"a wheel"


@pytest.mark.long
def test_what_fails_on_a_host_leaves_what_was_there(tmp_path):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / f"mlxdist-{__version__}-py3-none-any.whl").write_text("cut off")
    (tmp_path / "venv.former").mkdir()
    (tmp_path / "venv").symlink_to(tmp_path / "venv.former")
    done = config(tmp_path, "--install", "--from", wheels, "--venv", tmp_path / "venv")
    assert done.exit_code == 1 and done.stdout.count("is invalid") == 2, done.output
    assert (tmp_path / "venv").resolve() == tmp_path / "venv.former"
    assert {path.name for path in tmp_path.iterdir()} == {"venv.former", "ssh", "venv", "wheels"}


@pytest.mark.parametrize(
    ("errors", "advice"),
    [
        ("ERROR: [Errno 28] No space left on device", "free some of its disk"),
        ("Failed to establish a new connection: x\nERROR: No matching distribution found for mlxdist", "reach PyPI"),
        (f"ERROR: No matching distribution found for mlxdist=={__version__}", "is not on PyPI for that host"),
        ("ERROR: x.whl is not a supported wheel on this platform.", "give --from a directory with one for each"),
    ],
)
def test_what_goes_wrong_on_a_host_comes_with_advice(errors, advice):
    found = read_result(CommandResult("a", 1, "Welcome!\n", errors))
    assert found.error.startswith(errors.splitlines()[-1]) and advice in found.error and not found.path


def test_a_host_that_ssh_does_not_reach():
    found = read_result(CommandResult("a", 255, "", "ssh: connect to host a port 22: No route to host"))
    assert found.error.endswith("No route to host; try: ssh -o BatchMode=yes a true")
