"""`mlxdist serve` whose first host is another one: the launcher has the address, and reaches rank 0 by TCP."""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fake_ssh import through_a_shell
from launching import nothing_left  # noqa: F401  (nothing_left is a fixture of every test)
from serving import ServerProcess, post, save_model_folder
from ssh_hosts import ssh_hosts
from waiting import wait_for

from mlxdist.base.descriptors import raise_limit
from mlxdist.base.errors import InvalidArgument
from mlxdist.serve.authenticated_stream import connect
from mlxdist.serve.listener import listen_for_application

ENDLESS = {"max_tokens": 8000, "logit_bias": {"256": -100}}  # the token that ends an answer
QUESTION = {"prompt": "a question", "max_tokens": 9}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model_folder(tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=8192)


@pytest.fixture(scope="module")
def expected(model):
    """The answer of one process to QUESTION."""
    with ServerProcess(model) as server:
        return server.ask(QUESTION)["choices"]


@contextlib.contextmanager
def server_over_there(directory, model, *options):
    ssh = through_a_shell(directory).ssh[0]
    with ServerProcess(model, 1, "--hosts", "other", "-n", 2, "--ssh", ssh, *options) as server:
        server.ranks = 2
        yield server


def health(server):
    status, answer, headers = server.request(None, "/health", timeout=10)
    return status, answer.get("reason", ""), headers.get("Retry-After")


def address_of_rank_0(server):
    """Where it listens for the launcher: the socket that it has got from the agent."""
    process = Path(f"/proc/{server.pids()[0]}")
    descriptor = re.search(rb"MLXDIST_FOLLOWER_FD=(\d+)", (process / "environ").read_bytes())[1].decode()
    inode = re.search(r"\d+", os.readlink(process / "fd" / descriptor))[0]
    row = next(row for row in map(str.split, (process / "net/tcp").read_text().splitlines()) if row[9] == inode)
    host, port = row[1].split(":")
    return socket.inet_ntoa(bytes.fromhex(host)[::-1]), int(port, 16)


@pytest.mark.long
def test_answers_streams_and_cancels(tmp_path, model, expected):
    with server_over_there(tmp_path, model) as server:
        assert server.ask(QUESTION)["choices"] == expected
        *parts, last = server.stream(QUESTION | {"max_tokens": 60})
        texts = [json.loads(part)["choices"][0]["text"] for part in parts]
        assert ("".join(texts), last) == (server.text("a question", 60), "[DONE]")
        assert len(texts) > 1  # how many tokens a part has depends on the machine
        assert server.ask({"prompt": "abc"}, "/tokenize")["tokens"]
        prompt = "x" * 200_000  # of several frames, and too long for the model
        status, answer, _ = server.request({"prompt": prompt})
        assert status == 400 and "tokens" in answer["error"]["message"]
        with server.raw(post({"prompt": "x", "stream": True} | ENDLESS)) as connection:
            assert connection.recv(1 << 16)
            assert server.metrics()["running"] == 1
        assert wait_for(lambda: server.metrics()["running"] == 0)
        assert server.metrics()['requests_total{outcome="cancelled"}'] == 1
        assert server.stop() == 0, "".join(server.lines)
    ready = [line for line in server.lines if "is ready at" in line]
    assert len(ready) == 1 and f"is ready at {server.address} on the launcher's host, ranks: 2" in ready[0]


@pytest.mark.long
def test_other_connections_to_rank_0_disturb_no_request(tmp_path, model, expected):
    """With another secret, with garbage, and more silent ones than there are places."""
    with server_over_there(tmp_path, model) as server, contextlib.ExitStack() as strangers:
        address = address_of_rank_0(server)
        stream = strangers.enter_context(server.raw(post({"prompt": "x", "stream": True} | ENDLESS)))
        assert stream.recv(1 << 16)
        with pytest.raises(ConnectionRefusedError):
            asyncio.run(connect(*address, b"\x11" * 32, 1 << 16))
        for sends in (b"GET / HTTP/1.1\r\n\r\n", b'{"op": "status"}\n', os.urandom(5000)):
            with socket.create_connection(address, 30) as connection, contextlib.suppress(ConnectionResetError):
                connection.sendall(sends)
                while connection.recv(1 << 16):
                    continue
        raise_limit(4096)
        for _ in range(1100):
            strangers.enter_context(socket.create_connection(address, 30))
        assert server.ask(QUESTION)["choices"] == expected
        assert stream.recv(1 << 16) and server.metrics()["running"] == 1
        assert "secret" not in "".join(server.lines)


@pytest.mark.long
def test_rank_0_that_is_killed_comes_back_at_the_same_address(tmp_path, model, expected):
    with server_over_there(tmp_path, model, "--decode-concurrency", 1) as server, ThreadPoolExecutor(2) as threads:
        stream = threads.submit(server.stream, {"prompt": "x"} | ENDLESS)
        assert wait_for(lambda: server.metrics()["generated_tokens_total"] > 9)
        waiting = threads.submit(server.request, QUESTION, timeout=150)
        assert wait_for(lambda: server.metrics()["queued"] == 1)
        before = address_of_rank_0(server)
        os.kill(server.pids()[0], signal.SIGKILL)
        assert wait_for(lambda: "rank 0 failed first" in health(server)[1])
        status, reason, seconds = health(server)
        assert (status, reason.rpartition("; ")[2]) == (503, "restart 1 of 3") and 1 <= int(seconds) <= 600
        *parts, last = stream.result(60)
        assert parts and json.loads(last)["error"]["message"] == reason
        status, answer, _ = waiting.result(150)
        assert (status, answer["choices"]) == (200, expected)
        assert health(server)[0] == 200 and server.metrics()["restarts_total"] == 1
        assert address_of_rank_0(server) != before
        assert server.stop() == 0, "".join(server.lines)


def test_without_restarts_rank_0_listens_itself(tmp_path, model, expected):
    with server_over_there(tmp_path, model, "--max-restarts", 0) as server:
        assert server.ask(QUESTION)["choices"] == expected
        assert b"MLXDIST_FOLLOWER_FD" not in Path(f"/proc/{server.pids()[0]}/environ").read_bytes()
        assert server.stop() == 0
    assert not any("on the launcher's host" in line for line in server.lines)


def test_a_launcher_without_the_http_server_says_what_to_install():
    program = "import sys; sys.modules['uvicorn'] = None; from mlxdist.cli import main; main()"
    words = ["serve", "models/qwen", "--hosts", "other"]
    done = subprocess.run([sys.executable, "-P", "-c", program, *words], capture_output=True, text=True)
    assert done.returncode == 1 and "needs uvicorn: pip install 'mlxdist[lm]', or give --max-restarts 0" in done.stderr


def test_a_descriptor_that_is_no_socket(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(f"MLXDIST_{name}", value)
    with open(os.devnull) as file:
        monkeypatch.setenv("MLXDIST_FOLLOWER_FD", str(file.fileno()))
        with pytest.raises(InvalidArgument, match="MLXDIST_FOLLOWER_FD needs MLXDIST_SECRET"):
            listen_for_application()  # anyone could be the launcher
        monkeypatch.setenv("MLXDIST_SECRET", "5e" * 32)
        with pytest.raises(InvalidArgument, match="is not the launcher's socket: .*; a program between"):
            listen_for_application()
        file.fileno()  # it is still open


# Between two network namespaces.


def ask_there(host, address, path="/health", body=None):
    """Status, answer and Retry-After of a request that is sent on that host."""
    program = (
        "import json, sys, urllib.error, urllib.request\n"
        "data = sys.argv[2].encode() or None\n"
        "request = urllib.request.Request(sys.argv[1], data, {'Content-Type': 'application/json'})\n"
        "try: answer = urllib.request.urlopen(request, timeout=200)\n"
        "except urllib.error.HTTPError as error: answer = error\n"
        "print(json.dumps([answer.status, json.load(answer), answer.headers['Retry-After']]))"
    )
    words = [sys.executable, "-c", program, address + path, "" if body is None else json.dumps(body)]
    done = subprocess.run(host.command(*words), capture_output=True, text=True, timeout=230, check=True)
    return json.loads(done.stdout)


@pytest.mark.long
def test_a_host_that_is_gone_for_longer_than_a_start(tmp_path, model, expected):
    """Ranks start again once it is back, at the same address. What had no output is answered then."""
    with ssh_hosts(tmp_path) as nodes:
        here, there = nodes.hosts
        where = ["--hosts", "node1", "-n", 2, "--ssh", nodes.ssh, "--max-restarts", 9]
        with ServerProcess(model, 1, *where, prefix=here.command()) as server, ThreadPoolExecutor(1) as threads:
            assert ask_there(here, server.address, "/v1/completions", QUESTION)[1]["choices"] == expected
            there.pull_cable()
            asked = threads.submit(ask_there, here, server.address, "/v1/completions", QUESTION)
            # With Retry-After it is an outage; before that, a request is one of those that wait for its end.
            assert wait_for(lambda: ask_there(here, server.address)[2])
            status, _, seconds = ask_there(here, server.address, "/v1/completions", QUESTION)
            assert status == 503 and int(seconds) >= 1
            assert wait_for(lambda: "".join(server.lines).count("node1 does not respond: ssh: connect") == 2, 90)
            assert "node1 does not respond" in ask_there(here, server.address)[1]["reason"]
            there.plug_cable()
            assert wait_for(lambda: ask_there(here, server.address)[0] == 200, 90)
            status, answer, _ = asked.result()
            assert (status, answer["choices"]) == (200, expected)
            assert server.stop() == 0, "".join(server.lines)
        assert sum(f"is ready at {server.address} on" in line for line in server.lines) == 2
