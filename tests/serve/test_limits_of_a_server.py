"""What a server of `mlxdist serve` does at its limits and at its end: keys, a full queue, time, a rank that dies."""

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
from launching import nothing_left  # noqa: F401
from serving import ServerProcess, post, save_model_folder
from waiting import late, wait_for

ENDLESS = {"logit_bias": {"256": -100}, "max_tokens": 480}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model_folder(tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=4096)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_server_is_ready_once_its_tokenizer_is(model, tmp_path, ranks):
    """The process that tokenizes takes longer than the model to load."""
    late = "if 'mlxdist.serve.preparation_child' in sys.orig_argv: time.sleep(8); print('it begins', file=sys.stderr)"
    (tmp_path / "sitecustomize.py").write_text(f"import sys, time\n{late}\n")
    with ServerProcess(model, ranks, PYTHONPATH=str(tmp_path)) as server:
        begun, ready = ([word in line for line in server.lines].index(True) for word in ("it begins", "is ready at"))
        assert begun < ready and server.text("hello")
        assert server.stop() == 0


def test_a_key_and_a_full_queue(model):
    options = ["--decode-concurrency", 1, "--prompt-concurrency", 1, "--max-queue", 1]
    key = {"Authorization": "Bearer a-long-key"}
    with ServerProcess(model, 1, *options, MLXDIST_API_KEY="a-long-key") as server:
        good = {"prompt": "x", "max_tokens": 2}
        assert server.request(None, "/health")[0] == 200
        for wrong in ({}, {"Authorization": "Bearer a-long-ke"}, {"Authorization": "a-long-key"}):
            for body, path in ((good, "/v1/completions"), (None, "/v1/models"), (None, "/metrics")):
                status, answer, headers = server.request(body, path, **wrong)
                assert (status, headers["WWW-Authenticate"]) == (401, "Bearer") and "API key" in answer["error"][
                    "message"
                ]
        assert server.ask(good, **key)
        long = post({"prompt": "long", "max_tokens": 4000} | {"logit_bias": ENDLESS["logit_bias"]})
        long = long.replace(b"\r\n", b"\r\nAuthorization: Bearer a-long-key\r\n", 1)
        with server.raw(long), server.raw(long):
            assert wait_for(lambda: server.metrics(**key)["queued"] == 1, 20)
            status, answer, headers = server.request(good, **key)
            assert (status, answer["error"]["message"]) == (429, "1 requests wait already; try again later")
            assert 1 <= int(headers["Retry-After"]) <= 600
        assert wait_for(lambda: server.metrics(**key)["running"] == 0, 20)
        assert server.ask(good, **key)
        assert "a-long-key" not in "".join(server.lines) and server.stop() == 0


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long(model, ranks, stream):
    with ServerProcess(model, ranks, "--request-timeout", 0.5) as server:
        body = {"prompt": "x", "max_tokens": 4000, "logit_bias": {"256": -100}}
        # The first ones may wait longer for the process that makes them into tokens.
        assert wait_for(lambda: server.request({"prompt": "x", "max_tokens": 1})[0] == 200, 60)
        before = server.metrics()['requests_total{outcome="timeout"}']
        if stream:
            assert '"code": "timeout"' in server.stream(body)[-1]
        else:
            status, answer, _ = server.request(body)
            assert (status, answer["error"]["message"]) == (504, "the request has taken too long")
        assert server.text("x", 3) and server.metrics()['requests_total{outcome="timeout"}'] == before + 1


@pytest.mark.long
def test_the_launcher_restarts_a_server(model):
    """--max-restarts of `mlxdist launch`; the port is the same."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with ServerProcess(model, 2, "--port", port, restarts=1) as server:
        text = server.text("hello", 8)
        os.kill(server.pids()[1], signal.SIGKILL)
        assert wait_for(lambda: sum("is ready at" in line for line in server.lines) == 2, 60)
        assert server.text("hello", 8) == text
        assert server.stop() == 0


@pytest.mark.long
@pytest.mark.parametrize("ranks, victim", [(2, 1), (3, 2), (2, 0)])
@pytest.mark.parametrize("busy", [True, False])
def test_a_rank_that_is_killed_without_a_proxy(model, ranks, victim, busy):
    """Rank 0's death ends the connections; another's is an error event, a reason on /health, and the end."""
    with ServerProcess(model, ranks, restarts=0) as server, ThreadPoolExecutor(4) as threads:
        body = {"prompt": "x", "max_tokens": 4000, "logit_bias": {"256": -100}}
        streams = [threads.submit(server.stream, body) for _ in range(2 * busy)]
        others = [threads.submit(server.request, body) for _ in range(2 * busy)]
        assert wait_for(lambda: server.metrics()["running"] == 4 * busy, 30)
        if busy:
            assert wait_for(lambda: server.metrics()["generated_tokens_total"] > 20, 30)
        os.kill(server.pids()[victim], signal.SIGKILL)
        if victim:
            reasons = []

            def is_unavailable():
                status, answer, _ = server.request(None, "/health", timeout=5)
                reasons.append(answer.get("reason", ""))
                return status == 503

            assert wait_for(is_unavailable, 30)
            assert f"rank {victim}" in reasons[-1] and "has died" in reasons[-1]
            for stream in streams:
                assert f"rank {victim}" in stream.result()[-1] and "service_unavailable" in stream.result()[-1]
            for other in others:
                assert other.result()[0] == 503 and f"rank {victim}" in other.result()[1]["error"]["message"]
        for each in streams + others:
            with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
                each.result(timeout=20)
        assert server.process.wait(30) == 128 + signal.SIGKILL
        assert wait_for(
            lambda: any(f"rank {victim} failed first, killed by SIGKILL" in line for line in server.lines), 30
        )


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
@pytest.mark.parametrize("busy", [True, False])
def test_signals_end_a_server(model, ranks, number, status, busy):
    with ServerProcess(model, ranks, "--drain", 0) as server, ThreadPoolExecutor(1) as threads:
        body = {"prompt": "x", "max_tokens": 4000, "logit_bias": {"256": -100}}
        stream = threads.submit(server.stream, body) if busy else None
        assert wait_for(lambda: server.metrics()["running"] == busy, 30)
        assert server.stop(number) == status, "".join(server.lines)
        assert stream is None or "the server stops" in stream.result()[-1]
        assert not any("Traceback" in line for line in server.lines)


@pytest.mark.long
def test_what_keeps_a_server_from_starting(model, tmp_path):
    def error(*arguments):
        command = [sys.executable, "-m", "mlxdist", "serve", *map(str, arguments), "-n", "2"]
        job = subprocess.run(
            command, capture_output=True, text=True, timeout=90, env=os.environ | {"HF_HUB_OFFLINE": "1"}
        )
        assert job.returncode == 2 and "Traceback" not in job.stderr, job.stderr
        return job.stderr

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"cannot listen at 127.0.0.1, port {port}: " in error(model, "--port", port)
    assert "there is no" in error(tmp_path / "nothing", "--port", 0)
    alone = save_model_folder(tmp_path / "gemma2", "gemma2")
    assert "drafts are for models that mlx-lm can batch, and gemma2 is none" in error(alone, "--prompt-lookup")
    assert "with quantized KV caches (--kv-bits)" in error(alone, "--kv-bits", 8, "--kv-group-size", 32)
    assert "is not JSON" in error(model, "--chat-template-args", "{")
    assert "must be 8 to 256 letters" in error(model, "--api-key", "short")


@pytest.mark.long
def test_health_while_the_model_is_being_loaded(model):
    """The port is open from the start: what comes early gets a 503."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    seen = []

    def look():
        with contextlib.suppress(OSError):
            connection = ServerProcess.__new__(ServerProcess)
            connection.address = f"http://127.0.0.1:{port}"
            seen.append(connection.request(None, "/health", timeout=5)[:2])
        return seen and seen[-1][0] == 200

    thread = threading.Thread(target=wait_for, args=(look, 60))
    thread.start()
    with ServerProcess(model, 2, "--port", port):
        thread.join(60)
    assert seen[-1] == (200, {"status": "ok"})
    assert seen[0] == (503, {"status": "unavailable", "reason": "the model is being loaded"})


@pytest.mark.long
def test_no_code_of_the_current_directory_runs(model, tmp_path):
    for name in ("typing", "mlx_lm", "tokenizers", "wave"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('of the current directory')")
    with ServerProcess(model, 2, cwd=tmp_path) as server:
        assert server.text("x", 2)


@pytest.mark.long
def test_ranks_on_hosts_with_a_key_and_a_short_deadline(model):
    """The key reaches the ranks, on no command line; an idle server's messages come before the deadline."""
    key = uuid.uuid4().hex
    header = {"Authorization": f"Bearer {key}"}
    with ServerProcess(model, 1, "--hosts", "localhost:2", MLXDIST_API_KEY=key, MLXDIST_TIMEOUT="1") as server:
        assert server.request({"prompt": "x", "max_tokens": 2})[0] == 401
        late(4)
        assert server.ask({"prompt": "x", "max_tokens": 2}, **header) and server.metrics(**header)["steps_total"] > 4
        commands = subprocess.run(["ps", "-axww", "-o", "args="], capture_output=True, text=True, check=True).stdout
        assert "mlxdist serve" in commands and key not in commands
        assert server.stop() == 0
