"""docs/serve.md: its commands and its programs run, and its table has the defaults."""

import contextlib
import io
import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from guides import program_of
from serving import ServerProcess, save_model_folder

from mlxdist.cli.serve import serve

DOCS = Path(__file__).parents[2] / "docs"
GUIDE = (DOCS / "serve.md").read_text()


def test_the_table_has_the_defaults():
    defaults = {option.opts[0]: option.default for option in serve.params}
    shown = dict(re.findall(r"`(--[\w-]+)` (\d+\w*)", GUIDE))
    assert len(shown) == 8 and {name: f"{defaults[name]}".removesuffix(".0") for name in shown} == shown


def test_the_number_of_models_that_are_computed_one_at_a_time():
    (number,) = re.findall(r"Of (\d+) models mlx-lm's batches fail", GUIDE)
    assert int(number) == (DOCS / "models.md").read_text().count(" one at a time |")


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_server_in_a_program(run_ranks, tmp_path, monkeypatch, ranks):
    monkeypatch.chdir(tmp_path)
    save_model_folder(tmp_path / "models" / "qwen")
    first, *others = run_ranks(program_of(DOCS / "serve.md", tmp_path, -1), ranks)
    assert "qwen is ready at http://127.0.0.1:" in first and "16 tokens" in first
    assert not any("127.0.0.1" in output for output in others)


@pytest.mark.long
def test_the_program_of_the_reference(run_ranks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_model_folder(tmp_path / "models" / "qwen")
    first, second = run_ranks(program_of(DOCS / "reference" / "serve.md", tmp_path), 2)
    assert "\nhttp://127.0.0.1:" in first and "a rank that computes with rank 0" in second


@pytest.mark.long
def test_the_commands_and_the_program_run(tmp_path):
    model = save_model_folder(tmp_path / "models" / "qwen")
    commands = re.findall(r"^    (curl .*)", GUIDE, re.MULTILINE)
    *programs, _ = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)  # the other one is a server
    assert "mlxdist serve models/qwen -n 2" in GUIDE
    with ServerProcess(model.relative_to(tmp_path), 2, cwd=tmp_path) as server:
        here = lambda text: text.replace("http://127.0.0.1:8080", server.address)
        for command in commands:
            done = subprocess.run(
                ["curl", "-sS", *shlex.split(here(command))[1:]], capture_output=True, check=True, timeout=60
            )
            found = json.loads(done.stdout)
            parts = found.get("choices") or found.get("content") or found["output"]
            assert len(parts) == 1, found
        body = {"messages": [{"role": "user", "content": "What is a ring?"}], "max_tokens": 16, "seed": 1}
        answer = server.ask(body, "/v1/chat/completions")
        for program in programs:  # the same question
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(here(program), {})
            assert printed.getvalue() == (answer["choices"][0]["message"]["content"] or "")
