"""`mlxdist serve --print-service`: what systemd and launchd read in the units, and run."""

import plistlib
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from mlxdist.base.errors import InvalidArgument
from mlxdist.cli.service_unit import service_unit

CWD = Path("/srv/models of 100%")
# What the words of a command line may have that means something to systemd, a shell or XML.
WORDS = ["serve", "models/my qwen", "-n", "2", "--allowed-origins", "*", "--drain", "45"]
WORDS += ["--chat-template-args", '{"a": "50% of $HOME & <b> \\\\ \'x\'"}']
ENVIRONMENT = {"HOME": "/home/ada", "PATH": "/usr/bin", "OPENAI_API_KEY": "sk-other", "HF_HOME": "/data/hf cache"}
ENVIRONMENT |= {"MLXDIST_TIMEOUT": "10", "MLXDIST_FLIGHT_DIR": "100% of $HOME", "MLXDIST_RANK": "1"}
PROGRAM = [sys.executable, "-P", "-m", "mlxdist"]
PASSED = {"MLXDIST_TIMEOUT": "10", "MLXDIST_FLIGHT_DIR": "100% of $HOME", "HF_HOME": "/data/hf cache"}
KEY = "a-long-key"


def unit(kind, *more, **variables):
    return service_unit(kind, [*WORDS, *more], ENVIRONMENT | variables, CWD, drain=45.0)


def settings(text):
    """The settings of a unit of systemd: those that may come again as lists."""
    found = {}
    for line in text.splitlines():
        if line and line[0] not in "#[":
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def plist(text):
    return plistlib.loads(text.encode())


def test_systemd_runs_the_command_line():
    found = settings(unit("systemd", "--print-service"))
    (command,) = found["ExecStart"]
    words = [word.replace("$$", "$").replace("%%", "%") for word in shlex.split(command)]
    assert words == PROGRAM + WORDS
    assert found["WorkingDirectory"] == ["/srv/models of 100%%"]
    variables = [shlex.split(line)[0].replace("%%", "%").split("=", 1) for line in found["Environment"]]
    assert dict(variables) == PASSED


def test_systemd_starts_it_with_the_network_and_ends_it_after_its_requests():
    found = settings(unit("systemd"))
    assert found["Wants"] == found["After"] == ["network-online.target"]
    assert (found["KillSignal"], found["KillMode"], found["Restart"]) == (["SIGTERM"], ["mixed"], ["on-failure"])
    assert int(found["TimeoutStopSec"][0]) > 45
    assert "EnvironmentFile" not in found


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("manager", ["--user", "--system"])
def test_systemd_has_nothing_to_say_about_the_unit(tmp_path, manager):
    tmp_path.chmod(0o755)
    text = service_unit("systemd", [*WORDS, "--api-key", KEY], ENVIRONMENT, tmp_path)
    file = tmp_path / "mlxdist-serve.service"
    file.write_text(text)
    command = ["systemd-analyze", manager, "verify", "--man=no", "--recursive-errors=no", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_launchd_runs_the_command_line():
    found = plist(unit("launchd", "--print-service", "launchd"))
    assert found["ProgramArguments"] == PROGRAM + WORDS
    assert (found["WorkingDirectory"], found["EnvironmentVariables"]) == (str(CWD), PASSED)
    assert found["KeepAlive"] == {"SuccessfulExit": False} and found["RunAtLoad"] is True
    assert found["ExitTimeOut"] > 45 and found["StandardErrorPath"].startswith("/home/ada/Library/Logs/")


def test_the_plist_is_xml_that_says_how_to_install_it():
    text = unit("launchd", "--api-key", KEY)
    ElementTree.fromstring(text)  # stricter than plistlib: no -- in a comment
    assert "launchctl bootstrap gui/" in text and "systemctl --user enable" in unit("systemd")


@pytest.mark.parametrize("kind", ["systemd", "launchd"])
@pytest.mark.parametrize("words", [["--api-key", KEY], [f"--api-key={KEY}"], ["--api-key", "--" + KEY], []])
def test_the_key_is_in_a_file_alone(kind, words):
    text = service_unit(kind, ["serve", *words, "m"], ENVIRONMENT | ({} if words else {"MLXDIST_API_KEY": KEY}), CWD)
    assert KEY not in text and "mlxdist/serve.env" in text and "MLXDIST_API_KEY=..." in text
    if kind == "systemd":
        assert settings(text)["EnvironmentFile"] == ["%E/mlxdist/serve.env"]
    else:
        assert plist(text)["ProgramArguments"][-6:] == [*PROGRAM, "serve", "m"]


def test_launchd_starts_it_with_the_variables_of_the_file(tmp_path):
    """The shell before the command reads the file, runs the command in its place, and does not without the file."""
    home = tmp_path / "my home"
    program = plist(service_unit("launchd", ["serve", "--api-key", KEY], {"HOME": str(home)}, CWD))["ProgramArguments"]
    shell = program[: len(program) - len(PROGRAM) - 1]
    shown = [
        *shell,
        sys.executable,
        "-c",
        "import os, sys; print(os.environ['MLXDIST_API_KEY'], sys.argv[1])",
        "$HOME x",
    ]
    assert subprocess.run(shown, capture_output=True).returncode != 0
    (home / ".config/mlxdist").mkdir(parents=True)
    (home / ".config/mlxdist/serve.env").write_text(f"MLXDIST_API_KEY={KEY}\n")
    assert subprocess.run(shown, capture_output=True, text=True, check=True).stdout == f"{KEY} $HOME x\n"


@pytest.mark.parametrize("given", [["--print-service"], ["--print-service", "systemd"], ["--print-service=launchd"]])
def test_the_service_does_not_print_a_service(given):
    for words in (["serve", *given, "--port", "1", "m"], ["serve", "m", "--port", "1", *given]):
        (command,) = settings(service_unit("systemd", words, ENVIRONMENT, CWD))["ExecStart"]
        assert set(command.split()) == {*PROGRAM, "serve", "m", "--port", "1"}


@pytest.mark.parametrize("kind", ["systemd", "launchd"])
def test_a_character_that_a_unit_cannot_have_is_an_error_that_shows_it(kind):
    for words, cwd in ((["serve", "a\nExecStop=b"], CWD), (["serve"], Path("/srv/a\nb")), (["serve", "\udcff"], CWD)):
        with pytest.raises(InvalidArgument, match=re.escape("has a character that a unit cannot have")):
            service_unit(kind, words, ENVIRONMENT, cwd)
