"""`~` in the paths of options, variables and configurations."""

import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from mlxdist.base import tuning_file
from mlxdist.base.environment import Environment
from mlxdist.base.user_path import UserPath
from mlxdist.cli import commands
from mlxdist.launch.jobs import JobDirectory
from mlxdist.train.checkpoint.directory import checked_path
from mlxdist.train.config import TrainConfig


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def parameters(command, context):
    yield from ((command.name, parameter) for parameter in command.params)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            yield from parameters(command.get_command(context, name), context)


def test_every_option_with_a_path():
    paths = [
        (command, parameter)
        for command, parameter in parameters(commands, click.Context(commands))
        if isinstance(parameter.type, click.Path) or parameter.metavar in ("FILE", "DIR", "PATH")
    ]
    assert len(paths) > 30
    others = [(command, parameter.name) for command, parameter in paths if not isinstance(parameter.type, UserPath)]
    assert others == [("config", "venv")]  # the home directory of another host


@pytest.mark.parametrize("options", [["--hostfile=~/hosts"], ["--hosts", "a", "--env-file=~/env", "--cwd=~/"]])
def test_launch(home, options):
    (home / "hosts").write_text("a\n")
    (home / "env").write_text("A=1\n")
    shown = CliRunner().invoke(commands, ["launch", *options, "--dry-run", "true"])
    assert shown.exit_code == 0 and "[0 a] true" in shown.output, shown.output


def test_mlx_hostfile(home, monkeypatch):
    (home / "hosts").write_text("a\n")
    monkeypatch.setenv("MLX_HOSTFILE", "~/hosts")
    assert "[0 a] true" in CliRunner().invoke(commands, ["launch", "--dry-run", "true"]).output


def test_variables(home, monkeypatch):
    names = ("TUNING_FILE", "DEVICE_MAP", "DEBUG_FILE", "FLIGHT_DIR")
    read = Environment.read({f"MLXDIST_{name}": "~/x" for name in names})
    assert {getattr(read, name.lower()) for name in names} == {str(home / "x")}
    assert Environment.read({"MLXDIST_FLIGHT_DIR": "none"}).flight_dir == "none"
    monkeypatch.setenv("MLXDIST_TUNING_FILE", "~/x")
    assert tuning_file.find(tuning_file.setting()) == home / "x"
    assert JobDirectory.of_ranks("job", home, ["true"], "~/x").job.flight == str(home / "x")


def test_checkpoints(home):
    assert checked_path("Checkpoints", "~/x") == checked_path("Checkpoints", Path("~/x")) == home / "x"


def test_the_file_of_train(home):
    lines = ['model = "m"', 'data = "~/data"', 'output = "~/out"']
    lines += ["[checkpoints]", 'directory = "~/kept"', "[control]", 'kill_file = "~/kill"', 'save_file = "~/save"']
    (home / "train.toml").write_text("\n".join(lines))
    config = TrainConfig.read(home / "train.toml")
    found = config.data, config.output, config.checkpoints.directory, config.control.kill_file, config.control.save_file
    assert found == tuple(str(home / name) for name in ("data", "out", "kept", "kill", "save"))


def test_tuning_file_of_calibrate(home, monkeypatch):
    """`hostfile show` prints what the file in the home directory has."""
    (home / "hosts").write_text("a\n")
    hosts = {"a": {"tflops": 3.5, "memory_gbps": 400.0}}
    (home / "x.json").write_text(json.dumps({"schema": 3, "hosts": hosts}))
    monkeypatch.setenv("MLXDIST_TUNING_FILE", "~/x.json")
    shown = json.loads(CliRunner().invoke(commands, ["hostfile", "show", "--json", "~/hosts"]).stdout)
    assert shown["hosts"][0]["measured"]["tflops"] == 3.5
