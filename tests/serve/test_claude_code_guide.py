"""docs/claude-code.md: its lines are those that the command prints, and its request is answered."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner
from rank_zero import answer, launcher_server, started
from serving import ServerProcess, save_model_folder

from mlxdist.cli.serve import serve

GUIDE = (Path(__file__).parents[2] / "docs" / "claude-code.md").read_text()
KEY = "a-long-key"


def ask(address, text="What is a ring?"):
    """The answer to the page's curl, typed into a shell that has the key."""
    (command,) = re.findall(r"^    (curl .*)", GUIDE, re.MULTILINE)
    command = (
        command.replace("http://127.0.0.1:8080", address).replace("curl", "curl -sS").replace("What is a ring?", text)
    )
    variables = os.environ | {"MLXDIST_API_KEY": KEY}
    done = subprocess.run(["bash", "-c", command], env=variables, capture_output=True, check=True, timeout=60)
    return json.loads(done.stdout)


def test_the_lines_to_paste_are_those_of_the_command():
    words = ["mlx-community/Qwen3-Coder-30B-A3B-Instruct-4bit", "-n", "2", "--print-client", "claude-code"]
    done = CliRunner().invoke(serve, words, env={"MLXDIST_API_KEY": KEY})
    assert done.exit_code == 0 and KEY not in done.output
    assert "".join(f"    {line}\n" for line in done.output.splitlines()) in GUIDE


def test_the_key_is_one_and_the_request_needs_it():
    (command,) = re.findall(r"MLXDIST_API_KEY=(\$\(openssl .*\))", GUIDE)
    key = subprocess.run(["bash", "-c", f"echo {command}"], capture_output=True, text=True, check=True).stdout
    assert re.fullmatch("[0-9a-f]{32}\n", key)
    with launcher_server(api_key=KEY) as client, started(client):
        question = json.dumps(json.dumps([answer("A circle.")]))[1:-1]
        assert ask(client.server.address, question)["content"][0]["text"] == "A circle."
    with launcher_server(api_key="another-key") as client:
        assert ask(client.server.address)["error"]["type"] == "authentication_error"


@pytest.mark.long
def test_the_server_answers_the_request(tmp_path):
    with ServerProcess(save_model_folder(tmp_path / "qwen"), 2, MLXDIST_API_KEY=KEY) as server:
        assert any("ranks: 2, tp=2" in line for line in server.lines)
        assert ask(server.address)["usage"]["output_tokens"] > 0
        assert server.stop() == 0
