"""The HTTP server: what it reads, how long it waits, how many connections it has, and how it ends."""

import contextlib
import json
import signal
import socket
import ssl
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from rank_zero import (
    ADMITTED,
    FINISHED,
    REASON,
    Client,
    FakeRankZero,
    answer,
    events_of,
    launcher_server,
    read_all,
    said,
    started,
    texts_of,
)
from waiting import wait_for

from mlxdist.base.errors import InvalidArgument
from mlxdist.serve.http_options import HttpOptions
from mlxdist.serve.http_server import HttpServer
from mlxdist.serve.listener import MAX_BODY, SOCKET, listen
from mlxdist.serve.protocol import Output
from mlxdist.serve.rank_zero import RankZero

CONNECTION = "mlxdist.serve.http_connection."


def answered(client, data):
    """The bytes that come until the server closes its side."""
    with client.connect() as connection:
        connection.sendall(data)
        return read_all(connection)


def read_until(connection, words):
    found = b""
    while words not in found:
        data = connection.recv(1 << 16)
        assert data, found
        found += data
    return found


def test_a_connection_serves_several_requests(client, rank_0):
    with contextlib.closing(client.connection()) as connection:
        for _ in range(3):
            connection.request("POST", "/v1/completions", json.dumps({"prompt": json.dumps([answer("x")])}))
            assert json.loads(connection.getresponse().read())["choices"][0]["text"] == "x"
            used = connection.sock.getsockname()
        connection.request("GET", "/v1/models")
        assert connection.getresponse().read() and connection.sock.getsockname() == used


def test_no_part_of_an_answer_waits_for_an_acknowledgment(client):
    with client.connect() as connection:
        connection.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
        read_until(connection, b"0.1.0")
        (served,) = client.server._server.server_state.connections
        there = served.transport.get_extra_info("socket")
        assert there.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_requests_that_come_at_once_are_answered_in_order(client, rank_0):
    get = b"GET /%s HTTP/1.1\r\nHost: localhost\r\n%s\r\n"
    found = answered(
        client, get % (b"version", b"") + get % (b"v1/models", b"") + get % (b"x", b"Connection: close\r\n")
    )
    assert found.count(b"HTTP/1.1 ") == 3
    assert found.index(b'"version"') < found.index(b'"tiny"') < found.index(b"nothing of this name")


def test_a_body_may_come_in_chunks(client, rank_0):
    body = json.dumps({"prompt": json.dumps([answer("x")])}).encode()
    with contextlib.closing(client.connection()) as connection:
        connection.request("POST", "/v1/completions", iter([body[:5], body[5:]]), encode_chunked=True)
        assert json.loads(connection.getresponse().read())["choices"][0]["text"] == "x"


def test_a_client_may_wait_for_100_continue(client, rank_0):
    head, _, body = client.raw(answer("x")).partition(b"\r\n\r\n")
    with client.connect() as connection:
        connection.sendall(head + b"\r\nExpect: 100-continue\r\nConnection: close\r\n\r\n")
        assert connection.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert read_all(connection).startswith(b"HTTP/1.1 200 ")


def test_a_body_that_is_too_long_is_refused_before_it_comes(client, rank_0):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n" % (MAX_BODY + 1)
    found = answered(client, head + b"Expect: 100-continue\r\n\r\n")
    assert found.startswith(b"HTTP/1.1 413 ") and b"at most 8388608 bytes" in found


def test_the_answer_to_a_body_that_is_too_long_arrives(client, rank_0):
    """Though the client sends all of it, or as much as it can, before it reads."""
    status, found, _ = client.request("POST", "/v1/completions", b" " * (MAX_BODY + 1))
    assert status == 413 and "at most 8388608 bytes" in found["error"]["message"]
    with contextlib.closing(client.connection()) as connection:
        parts = (b" " * 100_000 for _ in range(100))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.request("POST", "/v1/completions", parts, encode_chunked=True)
        assert connection.getresponse().status == 413
    assert client.health()[0] == 200


def test_a_body_in_tiny_chunks_is_refused(client, rank_0):
    """The parser takes as much time for each as for many bytes, and all others wait for it."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    found = answered(client, head + b"1\r\n \r\n" * 3000 + b"0\r\n\r\n")
    assert found.startswith(b"HTTP/1.1 413 ") and b"less than 64 bytes" in found
    body = json.dumps({"prompt": json.dumps([answer("x")])}).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    found = answered(client, head.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") + chunks + b"0\r\n\r\n")
    assert found.startswith(b"HTTP/1.1 200 ")


def test_a_body_of_the_greatest_length_is_read(client, rank_0):
    body = json.dumps({"prompt": json.dumps([answer("x")])}).encode()
    status, found, _ = client.request("POST", "/v1/completions", body.ljust(MAX_BODY))
    assert (status, found["choices"][0]["text"]) == (200, "x")


@pytest.mark.parametrize(
    "data, status, words",
    [
        (b"nonsense\r\n\r\n", 400, b"this is no request of HTTP/1.0 or 1.1"),
        (b"GET / HTTP/2\r\n\r\n", 400, b"this is no request of HTTP/1.0 or 1.1"),
        (b"GET /health HTTP/1.1\r\n\r\n", 400, b"Host"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400, b"this is no request"),
        (b"GET / HTTP/1.1\r\nA: " + b"b" * 70_000, 431, b"at most 65536 bytes"),
        (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 20_000, 431, b"at most 65536 bytes"),
        (b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n", 400, b"Content-Length"),
        (b"POST /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", 400, b"no request"),
        (b"GET /health HTTP/1.0\n\n", 200, b"ok"),
    ],
)  # fmt: skip
def test_what_is_no_request_is_refused_in_openais_format(client, rank_0, data, status, words):
    found = answered(client, data)
    head, _, body = found.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status) and words in body and rank_0.calls == []
    assert status == 200 or json.loads(body)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_has_closed_its_side_gets_its_answer(client, rank_0, version, streams):
    with client.connect() as connection:
        connection.sendall(client.raw(["hold", *answer("Hello")], version=version, stream=streams))
        connection.shutdown(socket.SHUT_WR)
        assert rank_0.holding.acquire(timeout=30)
        rank_0.go.set()
        found = read_all(connection)
    assert b"HTTP/1.1 200 OK\r\n" in found and b'"Hello"' in found
    assert found.startswith(b"HTTP/1.1 100 Continue\r\n\r\n") == (version == "1.1")


@pytest.mark.parametrize("begins", [[], said(ADMITTED)])
def test_a_client_that_has_gone_is_cancelled(client, rank_0, begins):
    with client.connect() as connection:
        connection.sendall(client.raw([*begins, "hold", "wait"], stream=True))
        assert rank_0.holding.acquire(timeout=30)
        assert not begins or connection.recv(65536).startswith(b"HTTP/1.1 200 ")
    rank_0.go.set()
    assert wait_for(lambda: rank_0.left == [True])


def test_a_client_that_goes_between_the_parts_of_its_body_leaves_nothing(client, rank_0):
    with client.connect() as connection:
        connection.sendall(client.raw(answer("x"))[:-5])
    assert wait_for(lambda: client.server.connections == 0) and rank_0.calls == []


def test_a_client_that_does_not_read_stops_rank_0(client, rank_0):
    with client.connect() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(client.raw([*said(ADMITTED), "send_until_it_leaves"], stream=True))
        sent = []
        assert wait_for(lambda: sent.append(rank_0.sent) or sent[-30:] == [max(rank_0.sent, 1)] * 30, 20)
        assert rank_0.sent < 8_000_000  # buffers of the system and of the server
        assert client.generate(answer("x"))[0] == 200


@contextlib.contextmanager
def slow_client(client, *events, **fields):
    """A connection with small buffers, to which a stream or an answer is sent."""
    with socket.socket() as connection:
        connection.settimeout(30)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((client.host, client.port))
        connection.sendall(client.raw(said(ADMITTED, *events, FINISHED), **fields))
        yield connection


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_does_not_read_is_disconnected(monkeypatch, streams):
    monkeypatch.setattr(CONNECTION + "_STALLED_SECONDS", 0.5)
    large = [Output(content="x" * 50_000) for _ in range(8)]
    with launcher_server(has_small_buffers=True) as client, started(client):
        with slow_client(client, *large, stream=streams):
            assert wait_for(lambda: client.server.connections == 1)
            assert client.generate(answer("y"))[0] == 200
            assert wait_for(lambda: client.server.connections == 0)


def test_a_client_that_reads_slowly_has_all_of_its_answer(monkeypatch):
    """Longer than a client may take that does not read at all."""
    monkeypatch.setattr(CONNECTION + "_STALLED_SECONDS", 1.0)
    found, pause = b"", threading.Event()
    with launcher_server(has_small_buffers=True) as client, started(client):
        with slow_client(client, *(Output(content="x" * 20_000) for _ in range(8)), stream=True) as connection:
            while b"[DONE]" not in found[-100:]:
                pause.wait(0.02)
                data = connection.recv(1 << 16)
                assert data, len(found)
                found += data
    assert found.count(b"x") >= 160_000


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHost: loc"])
def test_a_head_has_to_come_in_time(client, monkeypatch, sent):
    monkeypatch.setattr(CONNECTION + "_HEAD_SECONDS", 0.3)
    with client.connect() as connection:
        connection.sendall(sent)
        assert read_all(connection) == b""


def test_a_byte_now_and_then_does_not_keep_a_connection(client, monkeypatch):
    monkeypatch.setattr(CONNECTION + "_HEAD_SECONDS", 0.5)
    with client.connect() as connection:
        head = iter(b"GET /health HTTP/1.1\r\nX: " + b"a" * 10_000)

        def is_over():
            try:
                connection.sendall(bytes([next(head)]))
            except OSError:
                return True
            return client.server.connections == 0

        assert wait_for(is_over)


def test_a_second_head_has_to_come_in_time(client, rank_0, monkeypatch):
    with client.connect() as connection:
        connection.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
        read_until(connection, b"0.1.0")
        monkeypatch.setattr(CONNECTION + "_HEAD_SECONDS", 0.3)
        connection.sendall(b"GET /version")
        assert read_all(connection) == b""


def test_a_body_has_to_come_in_time(client, rank_0, monkeypatch):
    monkeypatch.setattr("mlxdist.serve.application._BODY_SECONDS", 0.3)
    found = answered(client, client.raw(answer("x"))[:-5])
    assert found.startswith(b"HTTP/1.1 408 ") and b"the body has not come within 0.3 seconds" in found


def test_the_oldest_idle_connection_leaves_for_a_new_one(client, rank_0, monkeypatch):
    monkeypatch.setattr(CONNECTION + "MAX_REQUESTS", 4)
    monkeypatch.setattr(CONNECTION + "_FIRST_SECONDS", 0.0)
    with contextlib.ExitStack() as stack:
        busy = stack.enter_context(client.connect())
        busy.sendall(client.raw(["hold", *answer("x")]))
        assert rank_0.holding.acquire(timeout=30)
        idle = []
        for number in range(8):
            idle.append(stack.enter_context(client.connect()))
            assert wait_for(lambda: client.server.connections == min(number + 2, 4))
        for connection in idle[:5]:
            assert read_all(connection) == b""
        idle[5].sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
        read_until(idle[5], b"0.1.0")
        rank_0.go.set()
        read_until(busy, b'"x"')


def test_requests_whose_bodies_do_not_come_take_no_places(client, rank_0, monkeypatch):
    """Their connections leave for new ones."""
    for name in (CONNECTION, "mlxdist.serve.application."):
        monkeypatch.setattr(name + "MAX_REQUESTS", 4)
    monkeypatch.setattr(CONNECTION + "_FIRST_SECONDS", 0.0)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n"
    with contextlib.ExitStack() as stack:
        waiting = []
        for number in range(6):
            waiting.append(stack.enter_context(client.connect()))
            waiting[-1].sendall(head)
            assert wait_for(lambda: client.server.connections == min(number + 1, 4))
        assert client.generate(answer("y"))[0] == 200
        for connection in waiting[:3]:
            with contextlib.suppress(ConnectionError):
                assert connection.recv(1) == b""


def test_connections_that_are_new_do_not_leave_before_they_are_read(client, monkeypatch):
    """Many are accepted at once, before any is read."""
    monkeypatch.setattr(CONNECTION + "MAX_REQUESTS", 4)
    monkeypatch.setattr(CONNECTION + "_FIRST_SECONDS", 1e9)
    with contextlib.ExitStack() as stack:
        for connection in [stack.enter_context(client.connect()) for _ in range(12)]:
            connection.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
            read_until(connection, b"0.1.0")


def test_more_requests_than_there_are_places_get_a_503_and_health_is_answered(client, rank_0, monkeypatch):
    for name in (CONNECTION, "mlxdist.serve.application."):
        monkeypatch.setattr(name + "MAX_REQUESTS", 4)
    with contextlib.ExitStack() as stack:
        busy = [stack.enter_context(client.connect()) for _ in range(4)]
        for connection in busy:
            connection.sendall(client.raw(["hold", *answer("x")]))
            assert rank_0.holding.acquire(timeout=30)
        silent = [stack.enter_context(client.connect()) for _ in range(30)]
        assert silent and client.health()[0] == 200 and client.request("GET", "/metrics")[0] == 200
        status, found, headers = client.generate(answer("y"))
        assert (status, headers["Retry-After"]) == (503, "1") and "4 requests are in progress" in str(found)
        rank_0.go.set()
        for connection in busy:
            read_until(connection, b'"x"')
    assert client.generate(answer("y"))[0] == 200


def test_it_prints_nothing_and_takes_no_signals(capfd):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with launcher_server(access_log=False) as client, started(client):
        assert client.generate(answer("x"))[0] == 200
        answered(client, b"nonsense\r\n\r\n")
        assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert capfd.readouterr() == ("", "")


def test_a_request_that_runs_at_the_end_is_told(capfd):
    with ThreadPoolExecutor(1) as threads:
        with launcher_server() as client:
            rank_0 = FakeRankZero()
            client.server.starting(rank_0.temporary)
            assert wait_for(lambda: client.health()[0] == 200)
            running = threads.submit(client.generate, ["hold", *answer("x")])
            assert rank_0.holding.acquire(timeout=30)
        status, found, _ = running.result()
        rank_0.go.set()
        rank_0.end()
    assert (status, found["error"]["message"]) == (503, "the server stops")
    assert "running task" not in capfd.readouterr().err


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-days", "2"]
    subprocess.run(
        [*command, "-keyout", folder / "key.pem", "-out", folder / "cert.pem"], check=True, capture_output=True
    )
    return {"ssl_certfile": str(folder / "cert.pem"), "ssl_keyfile": str(folder / "key.pem")}


def test_tls(certificate):
    with launcher_server(**certificate) as client, started(client) as rank_0:
        assert client.server.address.startswith("https://127.0.0.1:")
        assert client.generate(answer("x"))[1]["choices"][0]["text"] == "x"
        assert texts_of(client.generate(answer("x"), stream=True)[1]) == ["x", ""]
        status, _, _ = client.request("POST", "/v1/completions", b" " * (MAX_BODY + 1))
        assert status == 413 and len(rank_0.calls) == 2


def test_a_client_that_leaves_tls_is_cancelled(certificate):
    with launcher_server(**certificate) as client, started(client) as rank_0:
        context = ssl._create_unverified_context()
        with context.wrap_socket(client.connect()) as connection:
            connection.sendall(client.raw(["hold", "wait"]))
            assert rank_0.holding.acquire(timeout=30)
        rank_0.go.set()
        assert wait_for(lambda: rank_0.left == [True])


def test_the_handshake_of_tls_has_to_come_in_time(certificate, monkeypatch, capfd):
    monkeypatch.setattr(CONNECTION + "_HEAD_SECONDS", 0.3)
    monkeypatch.setattr(CONNECTION + "MAX_REQUESTS", 4)
    with launcher_server(access_log=False, **certificate) as client, contextlib.ExitStack() as stack:
        silent = [stack.enter_context(client.connect()) for _ in range(8)]
        for connection in silent:
            assert read_all(connection) == b""
        plain = answered(client, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"HTTP/1.1 200" not in plain and client.health()[0] == 503
    assert capfd.readouterr() == ("", "")


def test_a_certificate_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "cert.pem").write_text("nothing")
    with contextlib.closing(listen("127.0.0.1", 0)) as listener:
        for name in ("cert.pem", "missing.pem"):
            options = HttpOptions(ssl_certfile=str(tmp_path / name))
            with pytest.raises(InvalidArgument, match=f"the certificate .*{name} cannot be used"):
                HttpServer(listener, options, RankZero())


@pytest.fixture
def beside_rank_0():
    """A server as in rank 0's process, which has a connection of its own to the endpoint."""
    import asyncio

    rank_0 = FakeRankZero()
    path = rank_0.temporary / SOCKET
    rank_zero = RankZero(lambda: asyncio.open_unix_connection(path), 60.0)
    with HttpServer(listen("127.0.0.1", 0), HttpOptions(), rank_zero) as server:
        yield Client(server), rank_0
    rank_0.go.set()
    rank_0.end()


def test_beside_rank_0_it_answers_without_a_launcher(beside_rank_0):
    client, rank_0 = beside_rank_0
    assert client.health()[0] == 200
    assert client.generate(answer("x"))[1]["choices"][0]["text"] == "x"
    rank_0.reason = "the model is being loaded"
    status, found, _ = client.health()
    assert (status, found["reason"]) == (503, "the model is being loaded")


def test_beside_rank_0_nothing_is_computed_again(beside_rank_0):
    client, rank_0 = beside_rank_0
    failed = {"event": "failed", "message": f"the server has failed: {REASON}", "status": 503}
    status, found, _ = client.generate(["fail", failed], answer("x"))
    assert (status, found["error"]["message"]) == (503, failed["message"]) and len(rank_0.calls) == 1
    _, text, _ = client.generate([*said(ADMITTED, Output(content="He")), failed], stream=True)
    assert events_of(text)[-1]["error"]["message"] == failed["message"]
