"""Real clients of `mlxdist serve`, and mlx-lm's own server with the same answers."""

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from calling_model import CALL, TOOL, save_model_that_calls_a_tool
from serving import ServerProcess, random_request, save_model_folder
from waiting import wait_for

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module", params=[1, 2])
def server(request, model):
    with ServerProcess(model, request.param, "--api-key", "a-long-key") as server:
        yield server


def test_the_openai_package(server):
    import openai

    client = openai.OpenAI(base_url=server.address + "/v1", api_key="a-long-key", max_retries=0)
    with client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        assert client.models.retrieve("tiny").id == "tiny"
        messages = [{"role": "user", "content": "hello"}]
        asked = {"model": "tiny", "messages": messages, "max_tokens": 12, "seed": 4, "temperature": 1.0}
        answer = client.chat.completions.create(**asked)
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
        with client.chat.completions.create(**asked, stream=True) as stream:
            parts = [part.choices[0].delta.content or "" for part in stream]
        assert "".join(parts) == (answer.choices[0].message.content or "")
        known = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2).choices[0].logprobs.content
        with client.chat.completions.create(**asked, logprobs=True, top_logprobs=2, stream=True) as stream:
            choices = [part.choices[0] for part in stream]
        streamed = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
        tokens = lambda entries: [(entry.token, [top.token for top in entry.top_logprobs]) for entry in entries]
        assert len(known) > 0 and tokens(streamed) == tokens(known)
        text = client.completions.create(model="tiny", prompt="hello", max_tokens=5, stop=["z"])
        assert text.choices[0].finish_reason in ("length", "stop")
        with pytest.raises(openai.BadRequestError, match="temperature must be a number from 0 to 100"):
            client.chat.completions.create(**asked | {"temperature": 1000})
        with pytest.raises(openai.NotFoundError, match="the model served here is tiny"):
            client.chat.completions.create(**asked | {"model": "gpt-4"})
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="another-key").models.list()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(server, tmp_path):
    def curl(*arguments):
        key = ["-H", "Authorization: Bearer a-long-key", "-H", "Content-Type: application/json"]
        command = ["curl", "-sS", "-m", "30", *key, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout

    url = server.address + "/v1/completions"
    body = {"prompt": "hello", "max_tokens": 6, "seed": 1, "temperature": 1.0}
    answer = json.loads(curl(url, "-d", json.dumps(body)))
    streamed = curl("-N", url, "-d", json.dumps(body | {"stream": True}))
    parts = [line.removeprefix("data: ") for line in streamed.splitlines() if line.startswith("data: {")]
    assert "".join(json.loads(part)["choices"][0]["text"] for part in parts) == answer["choices"][0]["text"]
    assert streamed.endswith("data: [DONE]\n\n")
    large = tmp_path / "large"
    large.write_bytes(b" " * (9 << 20))
    assert json.loads(curl(url, "-d", f"@{large}"))["error"]["message"].startswith("the body must have at most")
    assert "mlxdist_serve_requests_total" in curl(server.address + "/metrics")


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_of_a_tool(tmp_path, ranks, stream):
    import openai

    messages = [{"role": "user", "content": "w5"}]
    with ServerProcess(save_model_that_calls_a_tool(tmp_path / "caller"), ranks) as server:
        client = openai.OpenAI(base_url=server.address + "/v1", api_key="none", max_retries=0)
        answer = client.chat.completions.create(
            model="caller", messages=messages, tools=[TOOL], max_tokens=20, stream=stream
        )
        choices = [part.choices[0] for part in answer] if stream else answer.choices
        client.close()
    found = [choice.delta if stream else choice.message for choice in choices]
    (call,) = [call.function for each in found for call in each.tool_calls or []]
    assert (call.name, json.loads(call.arguments)) == ("look", {"at": 1})
    assert choices[-1].finish_reason == "tool_calls" and not any(each.content for each in found)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stop_word_in_a_call_of_a_tool(tmp_path, ranks):
    """Such a call is text, as the model has written it: with what is before the word its arguments would be others."""
    body = {"messages": [{"role": "user", "content": "w5"}], "tools": [TOOL], "max_tokens": 20}
    whole = "".join(CALL[:-1])
    with ServerProcess(save_model_that_calls_a_tool(tmp_path / "caller"), ranks) as server:
        for word, calls in (("ok", 0), ("1}}</tool", 1), ("</tool_call>", 1), ("}</tool_call>", 0), ("tool", 1)):
            found = body | {"stop": word}
            choice = server.ask(found, "/v1/chat/completions")["choices"][0]
            message, reason = choice["message"], "tool_calls" if calls else "stop"
            text = None if calls else whole[: whole.index(word)]
            assert (len(message.get("tool_calls", [])), message["content"]) == (calls, text), word
            assert (choice["finish_reason"], choice["stop_reason"]) == (
                reason,
                word if word in ("ok", "</tool_call>", "}</tool_call>") else None,
            )
            events = [json.loads(event)["choices"][0] for event in server.stream(found, "/v1/chat/completions")[:-1]]
            streamed = [len(event["delta"]["tool_calls"]) for event in events if "tool_calls" in event["delta"]]
            assert streamed == [1] * calls and events[-1]["finish_reason"] == reason, word
            assert "".join(event["delta"].get("content") or "" for event in events) == (text or "")


def test_calls_of_tools_where_there_are_none(tmp_path):
    """Without tools, or with tool_choice none, what looks like a call is text."""
    body = {"messages": [{"role": "user", "content": "w5"}], "max_tokens": 20}
    with ServerProcess(save_model_that_calls_a_tool(tmp_path / "caller")) as server:
        for found in (body, body | {"tools": [TOOL], "tool_choice": "none"}):
            choice = server.ask(found, "/v1/chat/completions")["choices"][0]
            assert (choice["message"]["content"], choice["finish_reason"]) == ("".join(CALL[:-1]), "stop")
            assert "tool_calls" not in choice["message"]


@contextlib.contextmanager
def mlx_lms_server(model):
    """The address of mlx-lm's own, on one process."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlx_lm", "server", "--model", str(model), "--port", str(port)]
    environment = os.environ | {
        "MLX_DISABLE_COMPILE": "1",
        "HF_HUB_OFFLINE": "1",
        "MLX_MPI_LIBNAME": "not-installed.so",
    }
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)

    def is_there():
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), 1).close()
            return True

    try:
        assert wait_for(is_there, 60)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        process.kill()
        process.wait()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_answers_of_mlx_lms_server(model, ranks):
    """Greedy, seeded, chat, stop words; here all at once, there one after the other."""
    generator = random.Random(5)
    bodies = [("/v1/completions", random_request(generator)) for _ in range(16)]
    for number in range(8):
        messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": f"question {number}"}]
        chat = {"messages": messages, "max_tokens": 16, "logprobs": True}
        bodies.append(("/v1/chat/completions", chat | ({"temperature": 0.7, "seed": number} if number % 2 else {})))

    def choice(address, path, body):
        request = urllib.request.Request(
            address + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            found = json.load(response)
        (one,) = found["choices"]
        text = one["message"]["content"] if "message" in one else one["text"]
        listed = (one.get("logprobs") or {}).get("content", [])
        tokens = [(entry["id"], pytest.approx(entry["logprob"], abs=1e-3)) for entry in listed]
        counts = found["usage"]["prompt_tokens"], found["usage"]["completion_tokens"]
        return text or "", one["finish_reason"], tokens, *counts

    with mlx_lms_server(model) as address:
        expected = [choice(address, *each) for each in bodies]
    with ServerProcess(model, ranks) as server, ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda each: choice(server.address, *each), bodies)) == expected
