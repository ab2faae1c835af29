"""Code of the current directory, where others may write, is run by no process of ours; a user's own program has it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_models
from fake_ssh import through_a_shell
from mlx_lm.utils import save_config, save_model

import mlxdist
from mlxdist.base.child_process import code_command, module_command

MLXDIST = Path(sys.executable).with_name("mlxdist")
OTHERS = ("mlx", "mlxdist", "numpy", "click", "rich", "jinja2", "transformers", "safetensors", "tqdm", "yaml", "regex")
PLANTED = 'open({mark!r}, "a").write(__name__ + "\\n")\nraise ImportError("of the current directory")\n'


@pytest.fixture
def planted(tmp_path):
    """A directory with a module for each that a program may import."""
    directory = tmp_path / "shared"
    directory.mkdir()
    for name in {*sys.stdlib_module_names, *OTHERS}:
        (directory / f"{name}.py").write_text(PLANTED.format(mark=str(tmp_path / "ran")))
    return directory


def run(directory, *words, timeout=120):
    """In ``directory``: exit status, what was printed, and which of its modules were imported."""
    words = [str(word) for word in words]
    done = subprocess.run(
        words, cwd=directory, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL
    )
    mark = directory.parent / "ran"
    return done.returncode, done.stdout + done.stderr, mark.read_text().split() if mark.exists() else []


COMMANDS = {"devices": ("devices",), "launch": ("launch", "--hosts", "a", "--ssh", "SSH", "--cwd", "/", "--", "true")}
LONG = {
    "doctor": ("doctor", "--quick", "--hosts", "a", "--ssh", "SSH"),
    "collectives": ("bench", "collectives", "--sizes", "4KiB", "--repeats", "3", "--op", "all_sum"),
    "calibrate": ("calibrate", "--seconds", "0.1"),
    "shard": ("shard", "MODEL", "--tp", "2", "--verify"),
}


def check(name, command, planted, tmp_path):
    if "MODEL" in command:
        (tmp_path / "model").mkdir()
        save_model(tmp_path / "model", tiny_models.build("qwen3"))
        save_config(tiny_models.config_of("qwen3"), tmp_path / "model" / "config.json")
    places = {"SSH": through_a_shell(tmp_path).ssh[0], "MODEL": tmp_path / "model"}
    status, said, imported = run(planted, MLXDIST, *(places.get(word, word) for word in command))
    assert imported == [], f"{name}: {said}"
    assert status != 2 and "current directory" not in said, said


@pytest.mark.parametrize("name", COMMANDS)
def test_the_current_directory_is_not_imported(name, planted, tmp_path):
    check(name, COMMANDS[name], planted, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", LONG)
def test_the_current_directory_is_not_imported_by_any_command(name, planted, tmp_path):
    check(name, LONG[name], planted, tmp_path)


def test_a_planted_module_would_have_been_imported(planted):
    """What the test above would see, were a helper started without -P."""
    assert run(planted, *code_command("import typing"))[2] == []
    assert run(planted, *module_command("mlxdist", "--version"))[::2] == (0, [])
    assert run(planted, sys.executable, "-c", "import wave")[2] == ["wave"]


def test_a_program_of_the_user_imports_as_ever(tmp_path):
    (tmp_path / "mine.py").write_text("print('imported mine')")
    for words in (["--", sys.executable, "-c", "import mine"], ["--", "-m", "mine"], ["--", "-c", "import mine"]):
        status, said, _ = run(tmp_path, MLXDIST, "launch", "-n", "1", *words)
        assert status == 0 and "imported mine" in said, said


def test_the_user_s_pythonpath_is_kept(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("print('imported mine')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert "imported mine" in run(Path("/"), *code_command("import mine"))[1]


def test_one_function_makes_the_commands():
    """A command of its own, somewhere in mlxdist, is one that may forget -P."""
    root = Path(mlxdist.__file__).parent
    made = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if re.search(r'(executable|python|PYTHON)\)?,\s*"-[a-zA-Z]', path.read_text())
    }
    # pip's command is shown and not run; the reaper starts with -I -S, without site-packages.
    assert made == {"base/child_process.py", "version.py", "launch/local.py"}
