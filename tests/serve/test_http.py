"""The HTTP side of `mlxdist serve` in this process: keys, and clients that do not read."""

import contextlib
import hmac
import http.client
import socket
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor

import pytest
from mlx_lm import load
from serving import VOCABULARY, ServerProcess, post, save_model_folder
from waiting import wait_for

from mlxdist.serve.decisions import FRAME
from mlxdist.serve.frontend import Frontend
from mlxdist.serve.http import Handler, HttpServer
from mlxdist.serve.listener import listen
from mlxdist.serve.options import ServeOptions
from mlxdist.serve.scheduler import Scheduler
from mlxdist.serve.server import _mlx_lms
from mlxdist.serve.worker import BatchLimits, Worker


@pytest.mark.parametrize(
    "allowed, status", [([], 403), (["http://b.page"], 403), (["http://a.page"], 200), (["*"], 200)]
)
def test_pages_of_allowed_origins(allowed, status):
    frontend = Frontend(Namespace(allowed_origins=allowed), ("tiny",), 60.0, "")
    server = HttpServer(listen("127.0.0.1", 0), frontend)
    with (
        server.listening(),
        contextlib.closing(http.client.HTTPConnection(*server.server_address, timeout=20)) as there,
    ):
        there.request("GET", "/v1/models", headers={"Origin": "http://a.page"})
        response = there.getresponse()
    assert (response.status, response.headers["Access-Control-Allow-Origin"] is not None) == (status, status == 200)


def test_connections_beyond_the_limit_get_a_503(monkeypatch):
    monkeypatch.setattr("mlxdist.serve.http.MAX_CONNECTIONS", 2)
    server = HttpServer(listen("127.0.0.1", 0), Frontend(Namespace(allowed_origins=[]), ("tiny",), 60.0, ""))
    with server.listening():
        idle = [socket.create_connection(server.server_address, 20) for _ in range(2)]
        with contextlib.closing(http.client.HTTPConnection(*server.server_address, timeout=20)) as third:
            third.request("GET", "/v1/models")
            assert third.getresponse().status == 503
        for connection in idle:
            connection.close()

        def is_served():
            with contextlib.closing(http.client.HTTPConnection(*server.server_address, timeout=20)) as again:
                again.request("GET", "/v1/models")
                return again.getresponse().status == 200

        assert wait_for(is_served)


def test_keys_are_compared_in_constant_time(monkeypatch):
    """With hmac.compare_digest: how long it takes does not say how much of a guess is right."""
    compared = []
    compare = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((a, b)) or compare(a, b))
    frontend = Frontend(Namespace(allowed_origins=[]), ("tiny",), 60.0, "a-long-key")
    server = HttpServer(listen("127.0.0.1", 0), frontend)
    with server.listening():
        for key, status in (("a-long-kez", 401), ("a-long-key", 404)):
            connection = http.client.HTTPConnection(*server.server_address, timeout=20)
            with contextlib.closing(connection):
                connection.request("GET", "/nothing", headers={"Authorization": f"Bearer {key}"})
                assert connection.getresponse().status == status
    assert [given for given, _ in compared] == [b"Bearer a-long-kez", b"Bearer a-long-key"]


@pytest.mark.long
def test_a_client_that_does_not_read_is_disconnected_and_holds_up_no_other(tmp_path, monkeypatch):
    """With buffers of a few events, and a second in place of a minute."""
    monkeypatch.setattr(Handler, "timeout", 1.0)
    loaded, tokenizer = load(str(save_model_folder(tmp_path)))
    frontend = Frontend(_mlx_lms(ServeOptions("tiny")), ("tiny",), 60.0, "")
    scheduler, worker = Scheduler(8, 8, 0.01, tokenizer, frontend.metrics), Worker(loaded, tokenizer, BatchLimits())
    frontend.open(scheduler, tokenizer, VOCABULARY, 4096, scheduler.gauges)
    http = HttpServer(listen("127.0.0.1", 0), frontend)
    http.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    server = ServerProcess.__new__(ServerProcess)
    server.address = http.address

    def clients():
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            slow.connect(server.where)
            slow.sendall(post({"prompt": "x", "max_tokens": 4000, "stream": True, "logit_bias": {"256": -100}}))
            assert wait_for(lambda: server.metrics()["running"] == 1, 30)
            answers = 0
            while server.metrics()["running"]:
                answers += bool(server.text("another", 3))
            return answers

    with http.listening(), ThreadPoolExecutor(1) as threads:
        done = threads.submit(clients)
        done.add_done_callback(lambda done: scheduler.stop())
        size, step = FRAME, 0
        while not (decisions := scheduler.decide(step, size, worker.digest)).stop:
            scheduler.deliver(worker.step(decisions))
            size, step = decisions.next_size, step + 1
        assert done.result() > 3
        assert 'outcome="cancelled"} 1\n' in frontend.metrics.text({})
