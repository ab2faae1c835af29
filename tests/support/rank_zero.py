"""A peer that speaks mlxdist.serve.protocol in place of rank 0, in threads of this process, and a server before it."""

import asyncio
import contextlib
import http.client
import json
import select
import shutil
import socket
import socketserver
import ssl
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from waiting import wait_for

from mlxdist.serve.authenticated_stream import AuthenticatedServer
from mlxdist.serve.http_options import HttpOptions
from mlxdist.serve.http_server import HttpServer
from mlxdist.serve.listener import SOCKET, listen
from mlxdist.serve.protocol import Admitted, Finished, Output, Progress
from mlxdist.serve.rank_zero import RankZero

ADMITTED = Admitted(model="tiny", prompt_tokens=3, cached_tokens=1)
PROGRESS = Progress(processed=1, total=3)
FINISHED = Finished(finish_reason="stop", completion_tokens=2)
SECRET = b"\x5e" * 32
REASON = "rank 1 failed first; restart 1 of 3"


def said(*events: Any) -> list[Any]:
    """The events that a prompt tells rank 0 to send."""
    return [event if isinstance(event, str) else event.model_dump() for event in events]


def answer(*texts: str) -> list[Any]:
    return said(ADMITTED, *(Output(content=text) for text in texts), FINISHED)


def cluster_of(ranks: int, running: int = 0) -> dict[str, Any]:
    """What rank 0 says of that many ranks, of which the others have begun one operation more than the last one."""
    held = {
        "layers": "all layers",
        "bytes": 4_000_000_000,
        "share": 1 / ranks,
        "memory": 5 * 10**9,
        "limit": 12 * 10**9,
    }
    counts = {"generated_tokens": 10, "prompt_tokens": 40, "cached_prompt_tokens": 30, "restarts": 0}
    observation = {
        "records": [_record(rank, ranks) for rank in range(ranks)],
        "members": [
            {"rank": rank, "host": f"mac-{rank}", "pid": 100 + rank, "age": 0.5, "position": "", "is_gone": False}
            for rank in range(ranks)
        ],
        "notes": [],
    }
    return {
        "model": "tiny",
        "layout": f"tp={ranks}",
        "held": [held | {"rank": rank, "host": f"mac-{rank}"} for rank in range(ranks)],
        "requests": counts | {"running": running, "queued": 0},
        "observation": observation,
    }


def _record(rank: int, ranks: int) -> dict[str, Any]:
    """A flight record as a rank sends it to rank 0."""
    is_late = rank == ranks - 1
    operation = {
        "number": 7 - is_late, "group": 0, "internal": False, "collective": True, "sequence": 7 - is_late,
        "name": "all_sum", "dtype": "float32", "shape": [8], "bytes": 32, "root": None, "destination": None,
        "source": None, "waiting_on": None if is_late else ranks - 1, "algorithm": "direct", "started_ns": 10**9,
        "ended_ns": 2 * 10**9 if is_late else None, "status": 0, "call_site": "train.py:90",
    }  # fmt: skip
    return {
        "schema": 4, "job": "741b468f6c659879", "rank": rank, "size": ranks, "host": f"mac-{rank}", "pid": 100 + rank,
        "reason": "status", "error": None, "monotonic_ns": 4 * 10**9, "wall_ns": 10**18, "step": None,
        "total_steps": None, "bubble": None, "computed": [], "power": None,
        "memory": {"active": 3 << 30, "peak": 4 << 30, "resident": 5 << 30, "private": 5 << 30, "total": 16 << 30},
        "bytes_sent": 32, "bytes_received": 32, "groups": {"0": list(range(ranks))}, "threads": {}, "stacks": {},
        "operations": [operation],
    }  # fmt: skip


class _Handler(socketserver.StreamRequestHandler):
    """Does what the prompt of a call says, for each time that it comes: events to send, and methods to call."""

    server: "FakeRankZero"

    def handle(self) -> None:
        line = self.rfile.readline()
        call = json.loads(line) if line else {"op": "none"}
        self.server.calls.append(call)
        getattr(self, call["op"])(call)

    def none(self, call: dict) -> None:
        """A connection that ended before its call."""

    def status(self, call: dict) -> None:
        self.server.calls.pop()
        if self.server.is_busy.is_set():
            self.server.go.wait(30)
        metrics = "mlxdist_serve_running 0\n"
        value = {"reason": self.server.reason, "models": ["tiny"], "adapters": ["sql"], "metrics": metrics}
        if call["cluster"]:
            self.server.observed += 1
            value["cluster"] = self.server.cluster
        self._send({"event": "result", "value": value})

    def tokenize(self, call: dict) -> None:
        if self.server.tokenizer_dies:
            self.server.end()
            return
        tokens = list(call["prompt"]["text"].encode())
        self._send({"event": "result", "value": {"model": "tiny", "tokens": tokens, "max_model_len": 512}})

    def detokenize(self, call: dict) -> None:
        self._send({"event": "result", "value": {"prompt": bytes(call["tokens"]).decode()}})

    def generate(self, call: dict) -> None:
        prompt = call["prompt"]
        text = prompt["text"] if prompt["text"] is not None else prompt["messages"][-1]["content"]
        attempts = json.loads(text)
        same = [each for each in self.server.calls if each == call]
        for event in attempts[min(len(same), len(attempts)) - 1]:
            if isinstance(event, dict):
                self._send(event)
            else:
                getattr(self, event)()

    def _send(self, event: dict) -> None:
        with contextlib.suppress(OSError):
            self.wfile.write(json.dumps(event).encode() + b"\n")

    def send_half(self) -> None:
        self.wfile.write(b'{"event": "outp')

    def send_until_it_leaves(self) -> None:
        event = Output(content="x" * 8000).model_dump_json().encode() + b"\n"
        with contextlib.suppress(OSError):
            while True:
                self.wfile.write(event)
                self.server.sent += len(event)

    def send_as_it_is_taken(self) -> None:
        """Until the client leaves: an event as soon as the test asks for it."""
        while self.server.wanted.acquire(timeout=30) and not select.select([self.connection], [], [], 0)[0]:
            self._send(Output(content="x").model_dump())
        self.server.left.append(True)

    def wait(self) -> None:
        """Until the connection is closed."""
        with contextlib.suppress(ConnectionResetError):
            self.connection.recv(1)
        self.server.left.append(True)

    def hold(self) -> None:
        """Until the test lets it go on."""
        self.server.holding.release()
        self.server.go.wait(60)

    def release(self) -> None:
        """Lets those that are held go on."""
        self.server.go.set()

    def fail(self) -> None:
        """Fails as rank 0 does when another rank has died."""
        self.server.reason = "the server has failed: rank 1 has died"

    def die(self) -> None:
        """Dies as rank 0 does: it listens no more, and the connection ends."""
        self.server.end()


class FakeRankZero(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """Attributes:
    calls: those of Generate and of tokens, to this one and those before it.
    is_busy: whether it answers Status when ``go`` is set, and not before.
    left: one for each client that has left an action that waits for it.
    cluster: what it says of all ranks, and ``observed`` how often it was asked.
    tcp: its socket where it is on another host.
    """

    daemon_threads = True
    request_queue_size = 300

    def __init__(self, before: "FakeRankZero | None" = None, is_elsewhere: bool = False) -> None:
        self.temporary = Path(tempfile.mkdtemp(prefix="mlxdist-"))
        super().__init__(str(self.temporary / SOCKET), _Handler)
        self.tcp = TcpSocket(self.temporary / SOCKET) if is_elsewhere else None
        self.place = self.temporary if self.tcp is None else self.tcp.address
        self.calls: list[dict] = [] if before is None else before.calls
        self.left: list[bool] = []
        self.reason, self.sent = "", 0
        self.cluster, self.observed = cluster_of(2), 0
        self.tokenizer_dies, self.is_busy = False, threading.Event()
        self.holding, self.go, self.wanted = threading.Semaphore(0), threading.Event(), threading.Semaphore(0)
        threading.Thread(target=self.serve_forever, args=(0.01,)).start()

    def end(self) -> None:
        if self.temporary.exists():
            if self.tcp is not None:
                self.tcp.close()
            self.shutdown()
            self.server_close()
            shutil.rmtree(self.temporary)


class TcpSocket:
    """Of a rank 0 on another host: what comes there is relayed to the Unix domain socket of the peer above."""

    def __init__(self, path: Path, port: int = 0) -> None:
        self._path = path
        listener = socket.create_server(("127.0.0.1", port), backlog=300)
        self.address: tuple[str, int] = listener.getsockname()
        self._loop, self._server = asyncio.new_event_loop(), AuthenticatedServer(self._relay, SECRET, 1 << 16)
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        asyncio.run_coroutine_threadsafe(self._server.start(listener, 300), self._loop).result()

    def close(self) -> None:
        """As the process of rank 0 ends: nothing listens any more when this returns."""

        async def close() -> None:
            self._server.close()

        asyncio.run_coroutine_threadsafe(close(), self._loop).result()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, to_there = await asyncio.open_unix_connection(str(self._path))
        except OSError:
            writer.transport.abort()
            return

        async def pass_on(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                while data := await source.read(1 << 16):
                    target.write(data)
                    await target.drain()
            target.close()

        await asyncio.gather(pass_on(reader, to_there), pass_on(there, writer))


class Client:
    """A client of an :class:`HttpServer`. ``is_elsewhere``: rank 0 is on another host, which is reached by TCP."""

    def __init__(self, server: HttpServer) -> None:
        self.server, self.is_elsewhere = server, False
        scheme, _, place = server.address.partition("://")
        self.host, port = place.rsplit(":", 1)
        self.port, self._has_tls = int(port), scheme == "https"

    def connect(self) -> socket.socket:
        return socket.create_connection((self.host, self.port), timeout=30)

    def connection(self) -> http.client.HTTPConnection:
        if self._has_tls:
            context = ssl._create_unverified_context()
            return http.client.HTTPSConnection(self.host, self.port, timeout=30, context=context)
        return http.client.HTTPConnection(self.host, self.port, timeout=30)

    def request(
        self, method: str, path: str, body: Any = None, **headers: str
    ) -> tuple[int, Any, http.client.HTTPMessage]:
        """Status, body and headers. Names of ``headers`` have underscores; a body of bytes is sent as it is."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        with contextlib.closing(self.connection()) as connection:
            connection.request(method, path, data, named)
            response = connection.getresponse()
            text = response.read()
        is_json = response.headers.get("Content-Type") == "application/json"
        return response.status, json.loads(text) if is_json and text else text.decode(), response.headers

    def health(self) -> tuple[int, Any, http.client.HTTPMessage]:
        return self.request("GET", "/health")

    def generate(self, *attempts: list[Any], **fields: Any) -> tuple[int, Any, http.client.HTTPMessage]:
        """The answer to a prompt that says what rank 0 sends, in its first and its second attempt."""
        return self.request("POST", "/v1/completions", {"prompt": json.dumps(attempts)} | fields)

    def raw(self, *attempts: list[Any], version: str = "1.1", **fields: Any) -> bytes:
        """The same request as its bytes."""
        return _posted("/v1/completions", {"prompt": json.dumps(attempts)} | fields, version)


def _posted(path: str, fields: dict, version: str = "1.1") -> bytes:
    body = json.dumps(fields).encode()
    head = f"POST {path} HTTP/{version}\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def events_of(text: str) -> list[Any]:
    """The events of a stream, without its comments."""
    found = [part.removeprefix("data: ") for part in text.split("\n\n") if part.startswith("data: ")]
    return [part if part == "[DONE]" else json.loads(part) for part in found]


def named_events_of(text: str) -> list[Any]:
    """The events of a stream, without its comments: each with its name, which is its type."""
    found = []
    for part in text.split("\n\n"):
        if part and not part.startswith(":"):
            name, data = part.split("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
    return found


def message(answered: Any) -> str:
    """The text of an error."""
    return answered["error"]["message"]


def texts_of(text: str) -> list[str]:
    """The texts of the chunks of a stream."""
    return [choice["text"] for event in events_of(text)[:-1] for choice in event.get("choices", ())]


def read_all(connection: socket.socket) -> bytes:
    """The bytes that come until the peer closes its side, or resets the connection."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while data := connection.recv(1 << 16):
            found += data
    return found


@contextlib.contextmanager
def launcher_server(has_small_buffers: bool = False, **options: Any) -> Iterator[Client]:
    """A server as in the launcher."""
    given = HttpOptions(port=0, **options)
    listener = listen(given.host, 0)
    if has_small_buffers:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with HttpServer(listener, given, RankZero(None, given.request_timeout)) as server:
        yield Client(server)


@contextlib.contextmanager
def started(client: Client, before: FakeRankZero | None = None) -> Iterator[FakeRankZero]:
    """Rank 0, started by the launcher of this server."""
    rank_zero = FakeRankZero(before, client.is_elsewhere)
    try:
        client.server.starting(rank_zero.place, SECRET.hex())
        assert wait_for(lambda: client.health()[0] == 200)
        yield rank_zero
    finally:
        rank_zero.go.set()
        rank_zero.end()


def require_cancelled(client: Client, rank_0: FakeRankZero, path: str, body: dict) -> None:
    """Rank 0 sees that a client has left while its answer, a stream or not, was being made."""
    with client.connect() as connection:
        connection.sendall(_posted(path, body))
        assert wait_for(lambda: rank_0.calls)
        if body["stream"]:
            assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
    assert wait_for(lambda: rank_0.left == [True])
