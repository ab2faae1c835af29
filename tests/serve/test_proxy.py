"""The proxy of `mlxdist serve` alone, before an HTTP server on a Unix domain socket in this process."""

import contextlib
import http.client
import json
import select
import shutil
import socket
import socketserver
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from serving import post
from waiting import wait_for

from mlxdist.serve.listener import MAX_BODY, SOCKET, listen
from mlxdist.serve.proxy import Proxy

EVENTS = [b'data: {"choices": [{"text": "%d"}]}\n\n' % number for number in range(3)]
DONE = b"data: [DONE]\n\n"
REASON = "rank 1 failed first; restart 1 of 3"


class Handler(BaseHTTPRequestHandler):
    """Does what the body of a request says, for each time that it comes."""

    def do_GET(self):
        reason = self.server.reason
        self.answer(503 if reason else 200, {"reason": reason} if reason else {"status": "ok"})

    def do_POST(self):
        length = int(self.headers["Content-Length"])
        body = self.rfile.read(length if length <= MAX_BODY else -1)
        self.server.bodies.append(body)
        if length > MAX_BODY:
            self.answer(413, {})
            return
        for action, *arguments in json.loads(body)[len(self.server.bodies) - 1]:
            getattr(self, action)(*arguments)

    def answer(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def headers_of_a_stream(self):
        self.send_response(200)
        self.send_header("Content-type", "text/event-stream")
        self.end_headers()
        self.wfile.write(b": keepalive 1/2\n\n")

    def send(self, text):
        self.wfile.write(text.encode())

    def send_until_it_leaves(self):
        while not select.select([self.connection], [], [], 0)[0]:
            self.server.sent += self.connection.send(b"data: " + bytes(8000) + b"\n\n")

    def wait(self):
        """Until the connection is closed."""
        self.server.left.append(self.connection.recv(1))

    def fail(self):
        """As rank 0 does when another rank has died."""
        self.server.reason = "the server has failed: rank 1 has died"

    def die(self):
        """As rank 0: it listens no more, and the connection ends."""
        self.server.end()

    def log_message(self, *arguments):
        pass


class Rank0(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """Attributes: bodies: of requests to this one and those before it."""

    daemon_threads = True

    def __init__(self, before=None):
        self.temporary = Path(tempfile.mkdtemp(prefix="mlxdist-"))
        super().__init__(str(self.temporary / SOCKET), Handler)
        self.bodies = [] if before is None else before.bodies
        self.left, self.reason, self.sent = [], "", 0
        threading.Thread(target=self.serve_forever, args=(0.01,)).start()

    def end(self):
        if self.temporary.exists():
            self.shutdown()
            self.server_close()
            shutil.rmtree(self.temporary)


@pytest.fixture
def proxy():
    with Proxy(listen("127.0.0.1", 0), 60.0) as proxy:
        yield proxy
    assert "mlxdist proxy" not in [thread.name for thread in threading.enumerate()]
    with pytest.raises(OSError):
        connected(proxy)


@pytest.fixture
def rank_0(proxy):
    with started(proxy) as rank_0:
        yield rank_0


@contextlib.contextmanager
def started(proxy, before=None):
    rank_0 = Rank0(before)
    try:
        proxy.starting(rank_0.temporary)
        assert wait_for(lambda: ask(proxy, None)[0] == 200)
        yield rank_0
    finally:
        rank_0.end()


def connected(proxy):
    host, port = proxy.address.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def ask(proxy, *attempts, path="/v1/completions"):
    """Status, body and Retry-After; of /health, where the one attempt is None."""
    connection = http.client.HTTPConnection(proxy.address.removeprefix("http://"), timeout=20)
    with contextlib.closing(connection):
        if attempts == (None,):
            connection.request("GET", "/health")
        else:
            connection.request("POST", path, json.dumps(attempts))
        response = connection.getresponse()
        return response.status, response.read(), response.headers["Retry-After"]


def message(text):
    return json.loads(text)["error"]["message"]


def test_an_answer_and_a_stream_are_passed_on(proxy, rank_0):
    with connected(proxy) as connection:
        request = post([[("answer", 429, {"a": "b" * 200_000})], "x" * 1_000_000])
        connection.sendall(request)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.0 429 ") and answer.endswith(b'{"a": "%s"}' % (b"b" * 200_000))
    assert rank_0.bodies == [request.partition(b"\r\n\r\n")[2]]
    events = [("send", event.decode()) for event in (*EVENTS, DONE)]
    large = f'data: "{"x" * 1_000_000}"\n\n'
    status, stream, _ = ask(proxy, [], [("headers_of_a_stream",), ("send", large), *events])
    assert (status, stream) == (200, b": keepalive 1/2\n\n" + large.encode() + b"".join(EVENTS) + DONE)


def test_rank_0_sees_that_a_client_leaves(proxy, rank_0):
    with connected(proxy) as connection:
        connection.sendall(post([[("headers_of_a_stream",), ("wait",)]]))
        assert connection.recv(65536).startswith(b"HTTP/1.0 200 ") and rank_0.left == []
    assert wait_for(lambda: rank_0.left == [b""], 1)


def test_a_client_that_does_not_read_stops_rank_0(proxy, rank_0):
    with connected(proxy) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(post([[("headers_of_a_stream",), ("send_until_it_leaves",)]]))
        sent = []
        assert wait_for(lambda: sent.append(rank_0.sent) or sent[-30:] == [max(rank_0.sent, 1)] * 30, 20)
        assert rank_0.sent < 8_000_000  # buffers of the system and of the proxy


@pytest.mark.parametrize(
    "data, status, words",
    [
        (b"nonsense\r\n\r\n", 400, b"this is no request of HTTP/1.0 or 1.1"),
        (b"GET / HTTP/2\r\n\r\n", 400, b"this is no request of HTTP/1.0 or 1.1"),
        (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 101 + b"\r\n", 431, b"more than 100 headers"),
        (b"GET / HTTP/1.1\r\nA: " + b"b" * 65536, 431, b"at most 65536 bytes"),
        (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 20_000, 431, b"at most 65536 bytes"),
        (b"POST / HTTP/1.1\r\nContent-Length: 8388609\r\n\r\n" + b" " * 100_000, 413, b"{}"),
        (b"GET / HTTP/1.0\n\n", 200, b"ok"),
    ],
)
def test_what_is_read_of_a_request_is_limited(proxy, rank_0, data, status, words):
    with connected(proxy) as connection:
        connection.sendall(data)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.0 %d " % status) and words in answer and b"".join(rank_0.bodies) == b""


def test_connections_beyond_the_limit_are_refused(proxy, monkeypatch):
    monkeypatch.setattr("mlxdist.serve.proxy.MAX_CONNECTIONS", 2)
    with connected(proxy), connected(proxy), connected(proxy) as third:
        answer = b"".join(iter(lambda: third.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.0 503 ") and b"too many connections are open" in answer

    def is_told():
        with contextlib.suppress(ConnectionError), connected(proxy) as again:
            again.sendall(b"GET / HTTP/1.0\r\n\r\n")
            return b"the model is being loaded" in again.recv(65536)

    assert wait_for(is_told)


def test_what_comes_while_no_rank_is_ready_is_told_why(proxy):
    assert ask(proxy, None) == (503, b'{"status": "unavailable", "reason": "the model is being loaded"}', None)
    assert message(ask(proxy, [])[1]) == "the model is being loaded"
    with started(proxy) as rank_0:
        rank_0.end()
        proxy.failed(REASON, 2.0)
        assert wait_for(lambda: REASON.encode() in ask(proxy, None)[1])
        status, text, seconds = ask(proxy, [])
        assert (status, message(text)) == (503, f"the server has failed: {REASON}") and 1 <= int(seconds) <= 4
    assert proxy.seconds_ready() > 0


# What rank 0 may have sent when it ends: nothing of the answer.
NO_OUTPUT = {
    "nothing": [("die",)],
    "headers": [("headers_of_a_stream",), ("die",)],
    "a part of an event": [("headers_of_a_stream",), ("send", "data: {"), ("die",)],
    "an error": [("fail",), ("answer", 503, {"error": "rank 1 has died"}), ("die",)],
    "an error event": [("headers_of_a_stream",), ("fail",), ("send", 'data: {"error": "rank 1"}\n\n'), ("die",)],
    "a part of an answer": [("send", "HTTP/1.0 200 OK\r\nContent-Length: 9\r\n\r\n1234"), ("die",)],
}  # fmt: skip
STREAM = [("headers_of_a_stream",), ("send", (EVENTS[0] + DONE).decode())]


@pytest.mark.parametrize("first", NO_OUTPUT)
def test_a_request_without_output_is_tried_again(proxy, rank_0, first):
    streams = "headers_of_a_stream" in NO_OUTPUT[first][0]
    again = STREAM if streams else [("answer", 200, {"text": "x"})]
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(ask, proxy, NO_OUTPUT[first], again)
        assert wait_for(lambda: not rank_0.temporary.exists())
        proxy.failed(REASON, 1.0)
        with started(proxy, rank_0):
            status, text, _ = asked.result()
    assert status == 200 and rank_0.bodies[0] == rank_0.bodies[1] and len(rank_0.bodies) == 2
    if streams:
        assert text == 2 * b": keepalive 1/2\n\n" + EVENTS[0] + DONE
    else:
        assert text == b'{"text": "x"}'


@pytest.mark.parametrize("first", ["nothing", "headers"])
def test_it_is_tried_once_again(proxy, rank_0, first):
    """When the second start fails, too, it is an error: of a stream an event."""
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(ask, proxy, *2 * [NO_OUTPUT[first]])
        assert wait_for(lambda: not rank_0.temporary.exists())
        proxy.failed(REASON, 1.0)
        with started(proxy, rank_0) as second:
            assert wait_for(lambda: not second.temporary.exists())
            proxy.failed("rank 0 failed first; it was the last of 1 restarts", None)
            status, text, seconds = asked.result()
    assert status == (503 if first == "nothing" else 200) and seconds is None and len(rank_0.bodies) == 2
    text = text.rpartition(b"data: ")[2]
    assert message(text) == "the server has failed: rank 0 failed first; it was the last of 1 restarts"


@pytest.mark.parametrize("end", ["die", "fail"])
def test_a_stream_with_output_ends_with_an_error_event(proxy, rank_0, end):
    """Of a part of an event nothing is sent."""
    last = {"die": [("send", 'data: {"ch'), ("die",)], "fail": [("fail",), ("send", 'data: {"error": "rank 1"}\n\n')]}
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(ask, proxy, [*STREAM[:1], ("send", EVENTS[0].decode()), *last[end]])
        assert not wait_for(asked.done, 0.3)  # until the launcher has said why
        proxy.failed(REASON, 1.0)
        status, text, _ = asked.result()
    events = text.split(b"data: ")
    assert status == 200 and b"data: " + events[1] == EVENTS[0] and len(events) == 3
    assert json.loads(events[2])["error"] == {
        "message": f"the server has failed: {REASON}",
        "type": "server_error",
        "code": 503,
    }


def test_a_request_that_fails_alone_is_not_tried_again(proxy, rank_0):
    status, text, _ = ask(proxy, [])
    assert status == 502 and message(text) == "rank 0 has closed the connection before the end of the answer"
    assert ask(proxy, None)[0] == 200 and len(rank_0.bodies) == 1
    late = {"error": {"message": "the request has taken too long"}}
    assert ask(proxy, [], [("answer", 504, late)])[:2] == (504, json.dumps(late).encode())


def test_a_request_waits_for_its_time_and_not_longer():
    with Proxy(listen("127.0.0.1", 0), 0.5) as proxy, started(proxy):
        status, text, _ = ask(proxy, NO_OUTPUT["nothing"])
    assert (status, message(text)) == (504, "the request has taken too long")


def test_requests_that_wait_are_told_of_the_end():
    with ThreadPoolExecutor(1) as threads:
        with Proxy(listen("127.0.0.1", 0), 60) as proxy, started(proxy) as rank_0:
            asked = threads.submit(ask, proxy, NO_OUTPUT["nothing"])
            assert wait_for(lambda: not rank_0.temporary.exists())
        status, text, _ = asked.result()
    assert (status, message(text)) == (503, "the server stops")
