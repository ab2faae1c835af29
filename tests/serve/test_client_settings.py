"""Programs that ask the server: what `--print-client` prints works with their libraries, and their requests are served.

The requests are small ones of the form that each program sends, as its documentation describes it.
"""

import json
import shlex
import socket
import subprocess
import tomllib

import pytest
from click.testing import CliRunner
from rank_zero import answer, launcher_server, started

from mlxdist.cli.client_settings import CLIENTS
from mlxdist.cli.serve import serve

KEY = "a-long-key"
QUESTION = json.dumps([answer("Hello")])


def printed(client, *options, **variables):
    done = CliRunner().invoke(serve, ["models/qwen", "--print-client", client, *map(str, options)], env=variables)
    assert done.exit_code == 0, done.output
    return done.output


def environment(lines):
    """The variables of a shell that has run the lines."""
    shell = ["env", "-i", f"MLXDIST_API_KEY={KEY}", "bash", "-c", f"{lines}\nenv -0"]
    found = subprocess.run(shell, capture_output=True, text=True, check=True).stdout
    return dict(each.split("=", 1) for each in found.split("\0") if each)


@pytest.fixture
def port():
    with launcher_server(api_key=KEY) as client, started(client):
        yield client.port


def test_claude_codes_variables(port, monkeypatch):
    import anthropic

    for name, value in environment(printed("claude-code", "--port", port, "--api-key", KEY)).items():
        if name.startswith(("ANTHROPIC_", "CLAUDE_")):
            monkeypatch.setenv(name, value)
    found = environment(printed("claude-code", "--port", port))
    models = {value for name, value in found.items() if "MODEL" in name}
    assert models == {"default_model"} and found["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0"
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
    with anthropic.Anthropic(max_retries=0) as client:  # reads these variables
        messages = [{"role": "user", "content": QUESTION}]
        made = client.messages.create(model=found["ANTHROPIC_MODEL"], max_tokens=9, messages=messages)
    assert made.content[0].text == "Hello"


def test_codexs_configuration(port):
    import openai

    lines = printed("codex", "--port", port, "--api-key", KEY)
    config = tomllib.loads(lines)
    provider = config["model_providers"][config["model_provider"]]
    assert (provider["env_key"], provider["wire_api"]) == ("MLXDIST_API_KEY", "responses")
    with openai.OpenAI(base_url=provider["base_url"], api_key=KEY, max_retries=0) as client:
        assert client.responses.create(model=config["model"], input=QUESTION, store=False).output_text == "Hello"
    assert "env_key" not in printed("codex", "--port", port)


def test_open_webuis_variables_and_clines_settings(port):
    import openai

    found = environment(printed("open-webui", "--port", port, "--api-key", KEY))
    rows = dict(line.split(": ", 1) for line in printed("cline", "--port", port).splitlines()[1:])
    assert rows["Base URL"].strip() == found["OPENAI_API_BASE_URL"]
    with openai.OpenAI(base_url=found["OPENAI_API_BASE_URL"], api_key=found["OPENAI_API_KEY"], max_retries=0) as client:
        messages = [{"role": "user", "content": QUESTION}]
        made = client.chat.completions.create(model=rows["Model ID"].strip(), messages=messages)
    assert made.choices[0].message.content == "Hello"


@pytest.mark.parametrize("client", CLIENTS)
def test_the_address_and_the_key(client):
    text = printed(client, "--host", "::1", "--ssl-certfile", "cert.pem", MLXDIST_API_KEY=KEY)
    assert "https://[::1]:8080" in text and KEY not in text and "MLXDIST_API_KEY" in text
    assert f"http://{socket.gethostname()}:81" in printed(client, "--host", "0.0.0.0", "--port", 81)
    assert "MLXDIST_API_KEY" not in printed(client)
    odd = printed(client, "--host", "a b;c")
    if client in ("claude-code", "open-webui"):
        assert any("http://a b;c:8080" in word for word in shlex.split(odd.partition("\n")[2]))


def test_a_port_that_is_not_known_is_refused():
    done = CliRunner().invoke(serve, ["models/qwen", "--print-client", "codex", "--port", "0"])
    assert done.exit_code == 2 and "--print-client needs a --port" in done.output


PARTS = [{"type": "text", "text": QUESTION}]
FUNCTION = {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": FUNCTION}
SYSTEM = {"role": "system", "content": "You are an agent."}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
SHAPES = {
    "Cline": {"messages": [SYSTEM, {"role": "user", "content": PARTS}], "temperature": 0, "tools": [TOOL], **USAGE},
    "Open WebUI": {"messages": [{"role": "user", "content": QUESTION}], "stream": True, "metadata": {"chat_id": "1"}},
    "LangChain": {
        "messages": [
            {"role": "user", "content": "Look."},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"type": "function", "id": "call_1", "function": {"name": "look", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "a ring"},
            {"role": "user", "content": QUESTION},
        ],
        "tools": [TOOL | {"function": FUNCTION | {"strict": True}}],
        "tool_choice": "auto",
        "max_completion_tokens": 9,
        "n": 1,
        **USAGE,
    },
}


@pytest.mark.parametrize("name", SHAPES)
def test_requests_of_programs_for_chats(client, rank_0, name):
    status, found, _ = client.request("POST", "/v1/chat/completions", {"model": "default_model"} | SHAPES[name])
    assert status == 200 and '"content": "Hello"' in found
