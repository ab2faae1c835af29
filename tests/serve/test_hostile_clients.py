"""Clients that mean harm, or do any: a server answers the others as if these were not there.

A stream runs beside each of them. What it gets is counted, and not timed: each step of the server has a token for it,
and /health is answered all the while.
"""

import contextlib
import http.client
import itertools
import json
import random
import re
import resource
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from serving import ServerProcess, post, save_model_folder
from waiting import late, wait_for

pytestmark = pytest.mark.long
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LASTING = {"logit_bias": {"256": -100}}  # the token that ends an answer
ENDLESS = LASTING | {"max_tokens": 30_000}
LETTER = ord("a") - ord("!")  # the token of the letter a
CONNECTIONS = 1000
STILL = 40  # answers of /health between two tokens of the stream; one each 50 ms, and a step takes a few
STARVED = 2000  # tokens of the stream between two answers of /health
MANY = 8 << 20  # bytes of a body, at most


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model_folder(tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=1 << 15)


@pytest.fixture(scope="module", params=[1, 2])
def shared(request, model):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 4 * CONNECTIONS if hard == resource.RLIM_INFINITY else hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(most, 4 * CONNECTIONS)), hard))
    with ServerProcess(model, request.param) as server:
        yield server
        assert server.stop() == 0, "".join(server.lines)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Bystander:
    """A stream of one letter again and again, and a client that asks for /health, until the context ends.

    Attributes:
        tokens: those of the stream that have come.
        health: how many had come when /health was answered, for each answer.
    """

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self.tokens, self.health = 0, []
        self._wrong: list[object] = []
        self._ends = threading.Event()
        self._connection = http.client.HTTPConnection(*server.where, timeout=120)
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._read, self._look)]

    def _read(self) -> None:
        body = ENDLESS | {"prompt": "bystander", "stream": True, "logit_bias": {str(LETTER): 100}}
        try:
            self._connection.request("POST", TEXT, json.dumps(body), {"Content-Type": "application/json"})
            for line in self._connection.getresponse():
                if self._ends.is_set():
                    return
                if line.startswith(b"data: "):
                    text = json.loads(line[6:])["choices"][0]["text"]
                    self._wrong += [text] if text.strip("a") else []
                    self.tokens += len(text)
            self._wrong.append("the stream has ended")
        except (OSError, ValueError, KeyError, http.client.HTTPException) as error:
            self._wrong.append(error)

    def _look(self) -> None:
        while not self._ends.is_set():
            try:
                status, answer, _ = self._server.request(None, "/health", timeout=120)
                self._wrong += [] if (status, answer) == (200, {"status": "ok"}) else [answer]
            except (OSError, http.client.HTTPException) as error:
                self._wrong.append(error)
            self.health.append(self.tokens)
            self._ends.wait(0.05)

    def goes_on(self) -> bool:
        tokens, looked = self.tokens, len(self.health)
        return wait_for(lambda: (self.tokens > tokens + 3 and len(self.health) > looked + 1) or self._wrong, 120)

    def __enter__(self) -> "Bystander":
        for thread in self._threads:
            thread.start()
        assert self.goes_on() and not self._wrong, self._wrong
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        goes_on = kind is not None or self.goes_on()
        self._ends.set()
        for thread in self._threads:
            thread.join(120)
        self._connection.close()
        if kind is None:
            assert goes_on and not self._wrong, self._wrong[:3]
            still = max(len(list(same)) for _, same in itertools.groupby(self.health))
            gaps = [later - before for before, later in itertools.pairwise(self.health)]
            assert still <= STILL, f"the stream got no token while /health was answered {still} times"
            assert max(gaps) <= STARVED, f"the stream got {max(gaps)} tokens between two answers of /health"


@pytest.fixture
def bystander(shared):
    """The server is afterwards what it was: ready, without an error, and with nothing that runs."""
    text, before = shared.text("hello", 8), shared.metrics()
    with Bystander(shared) as bystander:
        yield bystander
    assert wait_for(lambda: shared.metrics()["running"] + shared.metrics()["queued"] == 0, 60)
    after = shared.metrics()
    assert shared.text("hello", 8) == text
    assert after["restarts_total"] == 0 and not re.search("Traceback|Exception", "".join(shared.lines))
    for outcome in ("error", "timeout"):
        name = f'requests_total{{outcome="{outcome}"}}'
        assert after[name] == before[name]


@contextlib.contextmanager
def no_step_without_the_stream(server: ServerProcess, others: list[int] | None = None) -> Iterator[None]:
    """Each step has a token for the stream, but for one, and one that ends between two counters as they are read.

    ``others``: gets the number of tokens of each other request, before the end.
    """
    before = server.metrics()
    yield
    after = server.metrics()
    steps, tokens = (after[name] - before[name] for name in ("steps_total", "generated_tokens_total"))
    assert steps - (tokens - sum(others or [])) <= 2, (steps, tokens, others)


def answer_to(server: ServerProcess, data: bytes, ends: bool = False) -> tuple[int, bytes]:
    """Status and what follows, of a connection that is sent these bytes; 0 if it is closed without an answer."""
    with contextlib.suppress(ConnectionError), socket.create_connection(server.where, timeout=120) as connection:
        with contextlib.suppress(ConnectionError):  # it may answer, and close, before it has read all
            connection.sendall(data)
            if ends:
                connection.shutdown(socket.SHUT_WR)
        with connection.makefile("rb") as reader:
            while status := re.match(rb"HTTP/1\.[01] (\d{3})\b", reader.readline()):
                if status[1] >= b"200":
                    return int(status[1]), read_answer(reader)
                read_head(reader)  # of an interim response
    return 0, b""


def read_head(reader) -> bytes:
    return b"\n".join(iter(lambda: reader.readline().strip(), b""))


def read_answer(reader) -> bytes:
    head = read_head(reader)
    length = re.search(rb"(?i)content-length: *(\d+)", head)
    return reader.read(int(length[1])) if length else reader.read()


def is_closed(connection: socket.socket) -> bool:
    """Whether the server has closed it."""
    try:
        connection.setblocking(False)
        while connection.recv(1 << 16):
            continue
        return True
    except BlockingIOError:
        return False
    except OSError:
        return True


def open_connections(server: ServerProcess, stack: contextlib.ExitStack, number: int, data: bytes) -> list:
    """Connections that have sent these bytes, and stay."""
    found = [stack.enter_context(socket.create_connection(server.where, timeout=120)) for _ in range(number)]
    for connection in found:
        with contextlib.suppress(ConnectionError):
            connection.sendall(data)
    return found


GET = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n"
UNFINISHED = {
    "nothing": b"",
    "half a line": b"POST /v1/comp",
    "half a head": GET + b"X-One: 1\r\n",
    "no body": b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n",
    "half a body": post({"prompt": "x" * 500})[:-200],
    "half a chunk": b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nff\r\n{",
    "an answer": GET + b"\r\n",
    "health": b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
}
ANSWERED = ("an answer", "health")


@pytest.mark.parametrize("kind", list(UNFINISHED))
def test_a_thousand_silent_connections_keep_nobody_out(shared, bystander, kind):
    with contextlib.ExitStack() as stack, no_step_without_the_stream(shared):
        open_connections(shared, stack, CONNECTIONS, UNFINISHED[kind])
        assert bystander.goes_on()
        # Those that have sent all of a request are answered first, or refused.
        assert kind not in ANSWERED or wait_for(lambda: shared.request(None, "/v1/models")[0] == 200, 60)
        assert shared.request({"prompt": ""})[0] == 400 and shared.ask(None, "/v1/models")
    with contextlib.ExitStack() as stack:
        open_connections(shared, stack, CONNECTIONS, UNFINISHED[kind])
        assert kind not in ANSWERED or wait_for(lambda: shared.request(None, "/v1/models")[0] == 200, 60)
        assert shared.text("hello", 2) is not None


def test_streams_stay_when_a_thousand_connections_come(shared, bystander):
    """Connections that are idle leave for new ones; those that wait for an answer do not."""
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(8) as threads:
        streams = [threads.submit(shared.stream, LASTING | {"prompt": f"{i}", "max_tokens": 3000}) for i in range(8)]
        assert wait_for(lambda: shared.metrics()["running"] == 9, 60)
        open_connections(shared, stack, CONNECTIONS, b"")
        assert all(stream.result()[-1] == "[DONE]" for stream in streams)


@pytest.mark.parametrize("kind", ["nothing", "half a line", "half a head", "no body", "half a chunk"])
def test_clients_that_never_finish_a_request_are_disconnected(shared, bystander, kind):
    """Some send nothing more, others a byte now and then."""
    with contextlib.ExitStack() as stack:
        connections = open_connections(shared, stack, 20, UNFINISHED[kind])

        def all_are_closed():
            for connection in connections[:10]:
                with contextlib.suppress(OSError):
                    connection.send(b"x")
            late(0.5)
            return all(map(is_closed, connections))

        assert wait_for(all_are_closed, 240)


def test_requests_that_come_byte_by_byte_are_answered_and_delay_nobody(shared, bystander):
    data = post({"prompt": "slowly", "max_tokens": 2})
    with contextlib.ExitStack() as stack:
        connections = open_connections(shared, stack, 16, data[:-60])
        with no_step_without_the_stream(shared):
            for at in range(len(data) - 60, len(data) - 1):
                for connection in connections:
                    connection.sendall(data[at : at + 1])
                late(0.02)
        for connection in connections:
            connection.sendall(data[-1:])
            with connection.makefile("rb") as reader:
                assert b" 200 " in reader.readline()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_half_closes_gets_its_answer(shared, bystander, stream):
    """The client does as `nc -N`: it has sent all, and still reads."""
    asked = {"prompt": "half", "max_tokens": 60, "stream": stream} | LASTING
    status, answer = answer_to(shared, post(asked), ends=True)
    assert status == 200 and (b"[DONE]" in answer if stream else json.loads(answer)["usage"]["completion_tokens"] == 60)


@pytest.mark.parametrize("kind", [name for name in UNFINISHED if name not in ANSWERED])
def test_a_client_that_half_closes_within_its_request_leaves_nothing(shared, bystander, kind):
    with no_step_without_the_stream(shared):
        status, _ = answer_to(shared, UNFINISHED[kind], ends=True)
    assert status == 0 or 400 <= status < 500


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
SIZED = HEAD + b"Content-Length: %d\r\n\r\n%s"
BODY = b'{"prompt": "x", "max_tokens": 2}'
MALFORMED = {
    "noise": random.Random(1).randbytes(4096) + b"\r\n\r\n",
    "zeros": bytes(4096) + b"\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + random.Random(2).randbytes(500) + b"\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/one": b"GET /health HTTP/one\r\nHost: localhost\r\n\r\n",
    "no version": b"GET /v1/models\r\n\r\n",
    "no method": b" /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a header without a colon": GET + b"nonsense\r\n\r\n",
    "a header with a zero": GET + b"X: a\0b\r\n\r\n",
    "a header of 1 MB": GET + b"X: " + b"a" * (1 << 20) + b"\r\n\r\n",
    "100,000 headers": GET + b"".join(b"X-%d: 1\r\n" % i for i in range(100_000)) + b"\r\n",
    "a path of 1 MB": b"GET /" + b"a" * (1 << 20) + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "two lengths": HEAD + b"Content-Length: 2\r\nContent-Length: 32\r\n\r\n" + BODY,
    "a length and chunks": HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a negative length": HEAD + b"Content-Length: -1\r\n\r\n" + BODY,
    "a length of another script": HEAD + "Content-Length: ３２\r\n\r\n".encode() + BODY,
    "a length of 10^30": HEAD + b"Content-Length: 1" + b"0" * 30 + b"\r\n\r\n" + BODY,
    "a length of 1 GB": HEAD + b"Content-Length: 1000000000\r\n\r\n" + BODY,
    "an unknown coding": HEAD + b"Transfer-Encoding: gzip\r\n\r\n" + BODY,
    "a chunk without a size": HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" + BODY + b"\r\n0\r\n\r\n",
    "a negative chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\n-5\r\n" + BODY + b"\r\n0\r\n\r\n",
    "an extension of 1 MB": HEAD + b"Transfer-Encoding: chunked\r\n\r\n20;" + b"a" * (1 << 20) + b"\r\n" + BODY,
    "no JSON": SIZED % (4, b"{{{{"),
    "no UTF-8": SIZED % (16, b'{"prompt":"\xff\xfe"}'),
    "UTF-16": SIZED % (2 * len(BODY), BODY.decode().encode("utf-16-le")),
    "no object": SIZED % (4, b"[[]]"),
    "nothing": SIZED % (0, b""),
    "1,000,000 brackets": SIZED % (1_000_000, b"[" * 1_000_000),
    "a number of 1,000,000 digits": SIZED % (1_000_012, b'{"prompt": ' + b"1" * 1_000_000 + b"}"),
    "NaN": SIZED % (36, b'{"prompt": "x", "temperature":  NaN }'[:36]),
    "half a surrogate pair": SIZED % (19, b'{"prompt":"\\ud800"}'),
    "the same field twice": SIZED % (28, b'{"prompt":"x", "prompt": 5 }'),
    "a file": b"GET /../../../../etc/passwd HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    "a proxy": b"GET http://example.com/ HTTP/1.1\r\nHost: example.com\r\nConnection: close\r\n\r\n",
    "CONNECT": b"CONNECT example.com:443 HTTP/1.1\r\nHost: example.com\r\nConnection: close\r\n\r\n",
    "an unknown method": b"BREW /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
}


@pytest.mark.parametrize("name", list(MALFORMED))
def test_malformed_requests_are_errors_of_the_client(shared, bystander, name):
    """Or the connection is closed. None is an error of the server, and none ends with what it has not read."""
    with no_step_without_the_stream(shared):
        status, answer = answer_to(shared, MALFORMED[name])
    assert status == 0 or 400 <= status < 500 or status in (501, 505), (status, answer)
    assert b"root:" not in answer


def test_random_changes_of_a_request_are_no_error_of_the_server(shared, bystander):
    generator = random.Random(3)
    good = post({"prompt": "x", "max_tokens": 2})
    for _ in range(100):
        data = bytearray(good)
        for _ in range(generator.choice([1, 2, 8])):
            data[generator.randrange(len(data))] = generator.randrange(256)
        status, answer = answer_to(shared, bytes(data), ends=True)
        assert status < 500 or status in (501, 505), (bytes(data), answer)


def test_a_body_is_refused_by_its_length_before_it_is_read(shared, bystander):
    for head in (
        HEAD + b"Content-Length: %d\r\n\r\n" % (MANY + 1),
        HEAD + b"Content-Length: 1" + b"0" * 17 + b"\r\n\r\n",
    ):
        assert answer_to(shared, head)[0] == 413


def test_a_body_without_an_end_is_refused(shared, bystander):
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    status, _ = answer_to(shared, HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * (2 * MANY // 65536))
    assert status in (0, 411, 413)


def test_a_key_is_checked_before_a_body_is_read(model):
    with ServerProcess(model, 2, MLXDIST_API_KEY="a-long-key") as server:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n" % MANY
        for more in (b"", b"Authorization: Bearer wrong\r\n", b"Expect: 100-continue\r\n"):
            assert answer_to(server, head + more + b"\r\n")[0] == 401


LONG = "many words " * 360_000  # 4 MB
HUGE = {
    "a prompt": ({"prompt": LONG}, TEXT),
    "a message": ({"messages": [{"role": "user", "content": LONG}]}, CHAT),
    "many messages": ({"messages": [{"role": "user", "content": "many words"}] * 60_000}, CHAT),
    "a role": ({"messages": [{"role": LONG, "content": "x"}]}, CHAT),
    "tokens": ({"prompt": [5] * 1_000_000}, TEXT),
    "a tool": ({"messages": [{"role": "user", "content": "x"}], "tools": [{"description": LONG}]}, CHAT),
    "a template's variable": (
        {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"x": LONG}, "continue_x": 1},
        CHAT,
    ),
    "names": ({"prompt": "x"} | {f"field {i}": 1 for i in range(100_000)}, TEXT),
    "a stop word": ({"prompt": "x", "stop": LONG}, TEXT),
    "biases": ({"prompt": "x", "logit_bias": {str(i): 1 for i in range(200_000)}}, TEXT),
    "a model": ({"prompt": "x", "model": LONG}, TEXT),
}


@pytest.mark.parametrize("name", list(HUGE))
def test_huge_requests_are_refused_and_delay_nobody(shared, bystander, name):
    body, path = HUGE[name]
    with no_step_without_the_stream(shared), ThreadPoolExecutor(3) as threads:
        for status, answer, _ in threads.map(lambda _: shared.request(body, path, 300), range(3)):
            assert 400 <= status < 500 and len(answer["error"]["message"]) < 1000, answer


def nested(depth):
    schema = {"type": "integer"}
    for _ in range(depth):
        schema = {"anyOf": [{"type": "array", "items": schema}, {"type": "object", "properties": {"a": schema}}]}
    return schema


def properties(number):
    found = {f"p{i}": {"type": "string"} for i in range(number)}
    return {"type": "object", "properties": found, "required": list(found)}


REGEXES = {
    "nested repetitions": "(((a{1,100}){1,100}){1,100}){1,100}",
    "stars of stars": "((a*)*)*b",
    "alternatives of the same": "(a|a|aa|aaa)*" * 30,
    "states that double": "(a|b)*a(a|b){30}",
    "a huge count": "(a|bc|d.f){1,2000000000}",
    "classes": r"(\p{L}|\w|[^a]){500}",
    "any text, again and again": "(.*x){40}",
    "brackets": "(" * 20_000 + ")" * 20_000,
    "60 KB": "|".join(f"word{i}x*y" for i in range(5000)),
}
SCHEMAS = {
    "branches": nested(12),
    "properties": properties(1500),
    "a reference to itself": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "references that grow": {
        "$defs": {f"d{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{i + 1}"}] * 10} for i in range(20)}
        | {"d20": {"type": "null"}},
        "$ref": "#/$defs/d0",
    },
    "10^9 items": {"type": "array", "minItems": 10**9, "items": {"type": "integer"}},
    "10^9 characters": {"type": "string", "minLength": 10**9},
    "patterns": {"allOf": [{"type": "string", "pattern": f"(a|b)*c{{{i}}}"} for i in range(60)]},
    "an integer of many digits": {"type": "integer", "minimum": 10**300, "maximum": 10**301},
    "intersections": {"allOf": [properties(60)] * 60},
    "an enumeration": {"enum": [f"value {i}" for i in range(5000)]},
}
GRAMMARS = {name: {"structured_outputs": {"regex": regex}} for name, regex in REGEXES.items()} | {
    name: {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    for name, schema in SCHEMAS.items()
}


@pytest.mark.parametrize("name", list(GRAMMARS))
def test_catastrophic_grammars_are_refused_or_served_and_delay_nobody(shared, bystander, name):
    """Three at a time, of one text: what is compiled for one is no help to the next, or is for all."""
    body, others = {"prompt": "x", "max_tokens": 3} | GRAMMARS[name], []
    with no_step_without_the_stream(shared, others), ThreadPoolExecutor(3) as threads:
        for status, answer, _ in threads.map(lambda _: shared.request(body, TEXT, 300), range(3)):
            assert status in (200, 400, 503), answer
            others.append(answer["usage"]["completion_tokens"] if status == 200 else 0)


@pytest.fixture
def network():
    """The URL of another server, which no request may reach."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/secret"
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_nothing_is_fetched_from_the_network(shared, bystander, network):
    schema = {"type": "object", "properties": {"a": {"$ref": network}}}
    user = lambda *content: {"messages": [{"role": "user", "content": list(content)}]}
    bodies = [
        user({"type": "image_url", "image_url": {"url": network}}),
        user({"type": "text", "text": "look"}, {"type": "input_audio", "input_audio": {"data": network}}),
        user({"type": "file", "file": {"file_data": network}}),
        user({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}),
    ]
    hello = user({"type": "text", "text": "hello"}) | {"max_tokens": 2}
    bodies += [
        hello | {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": each}}}
        for each in (schema, {"$ref": network}, {"$schema": network, "$id": network, "$ref": "other"})
    ]
    bodies += [hello | {"model": network}, hello | {"chat_template": "{% include '" + network + "' %}"}]
    bodies += [hello | {"draft_model": network}, hello | {"adapters": network}]
    for body in bodies:
        status, answer, _ = shared.request(body, CHAT)
        assert 400 <= status < 500, (body, answer)
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    for choice in ("auto", "required"):  # a tool's schema is text for the model, or a grammar
        assert shared.request(hello | {"tools": [tool], "tool_choice": choice}, CHAT)[0] in (200, 400)


@pytest.mark.parametrize("path", ["/health", "/metrics", "/v1/models", TEXT])
def test_a_name_that_is_not_this_machines_is_refused(shared, bystander, path):
    """A page of evil.example lets its name stand for 127.0.0.1, and its browser sends what is asked of that name."""
    data = BODY if path == TEXT else b""
    head = b"%s %s HTTP/1.1\r\nConnection: close\r\nContent-Length: %d\r\nHost: " % (
        b"POST" if data else b"GET",
        path.encode(),
        len(data),
    )
    port = b":%d" % shared.where[1]
    for host in (b"evil.example", b"evil.example" + port, b"127.0.0.1.evil.example" + port, b"localhost@evil.example"):
        status, answer = answer_to(shared, head + host + b"\r\n\r\n" + data)
        assert 400 <= status < 500, (host, answer)
    for host in (b"localhost" + port, b"127.0.0.1" + port, b"LOCALHOST", b"[::1]" + port):
        assert answer_to(shared, head + host + b"\r\n\r\n" + data)[0] == 200, host


def test_clients_that_vanish_leave_nothing(shared, bystander):
    """The clients reset their connections within a request, before its answer, and within the answer."""
    generator = random.Random(4)
    cancelled = 'requests_total{outcome="cancelled"}'
    before = shared.metrics()[cancelled]
    for number in range(60):
        data = post({"prompt": f"vanish {number}", "stream": number % 2 == 0} | ENDLESS)
        with socket.create_connection(shared.where, timeout=120) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close() resets
            connection.sendall(data[: generator.choice([10, len(data) - 5, len(data)])])
            if number % 3 == 0:
                late(0.02)
    assert wait_for(lambda: shared.metrics()["running"] == 1, 60)
    assert shared.metrics()[cancelled] > before


def test_clients_that_do_not_read_delay_nobody(shared, bystander):
    with contextlib.ExitStack() as stack:
        for number in range(16):
            connection = stack.enter_context(contextlib.closing(socket.socket()))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            connection.connect(shared.where)
            connection.sendall(post({"prompt": f"unread {number}", "stream": True} | ENDLESS))
        assert wait_for(lambda: shared.metrics()["running"] == 17, 60)
        made = shared.metrics()["generated_tokens_total"]
        assert wait_for(lambda: shared.metrics()["generated_tokens_total"] > made + 3000, 120)
        assert bystander.goes_on()


def test_requests_without_an_answer_in_between_are_answered_in_order(shared, bystander):
    """HTTP's pipelining: a client sends many before it reads."""
    stays = lambda body: post(body).replace(b"Connection: close\r\n", b"")
    requests = b"".join(stays({"prompt": f"{number}", "max_tokens": number + 1} | LASTING) for number in range(20))
    with socket.create_connection(shared.where, timeout=120) as connection:
        connection.sendall(requests)
        with connection.makefile("rb") as reader:
            for number in range(20):
                assert b" 200 " in reader.readline(), number
                assert json.loads(read_answer(reader))["usage"]["completion_tokens"] == number + 1
