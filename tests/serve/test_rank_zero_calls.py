"""Calls of rank 0 by the launcher's application: bursts of them, and refusals that are no failure of rank 0."""

import asyncio
import contextlib
import os
import resource
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from pydantic_core import PydanticSerializationError
from rank_zero import ADMITTED, FINISHED, said

from mlxdist.serve import authenticated_stream
from mlxdist.serve.application import _events
from mlxdist.serve.listener import SOCKET
from mlxdist.serve.protocol import Failed, Generate, Prompt, Result
from mlxdist.serve.rank_zero import RankZero

STOPS = Failed(message="the server stops", status=503, retry_after=9)


def test_a_request_while_rank_0_stops_is_refused_at_once(client, rank_0):
    """It says so in its status, too, which is no outage: the request does not wait for the end of the launcher."""
    for streams in (False, True):
        status, found, headers = client.generate(["fail", *said(STOPS)], stream=streams)
        assert (status, found["error"]["message"], headers["Retry-After"]) == (503, STOPS.message, "9")


@contextlib.contextmanager
def no_descriptors():
    """None is free in this context."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
        with contextlib.suppress(OSError):
            while True:
                stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        yield


@pytest.mark.parametrize("missing", [contextlib.nullcontext, no_descriptors])
def test_more_calls_come_at_once_than_there_is_room_for(tmp_path, missing):
    """Calls that find the queue of rank 0's connections full, or no descriptor, wait for a place."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / SOCKET))
    listener.listen(1)

    def answer():
        with listener:
            listener.settimeout(30)
            left = count
            while left:
                connection, _ = listener.accept()
                with connection, connection.makefile("rwb") as file:
                    is_status = b'"status"' in file.readline()
                    left -= not is_status
                    events = [Result(value={"reason": "not yet"})] if is_status else [ADMITTED, FINISHED]
                    file.write(b"".join(event.model_dump_json().encode() + b"\n" for event in events))

    async def call(rank_zero):
        return [event async for event in rank_zero.generate(Generate(prompt=Prompt(text="x")))]

    async def burst():
        rank_zero = RankZero()
        rank_zero.open()
        rank_zero.starting(tmp_path)
        await asyncio.sleep(0)
        with missing():
            calls = [asyncio.create_task(call(rank_zero)) for _ in range(count)]
            for _ in range(5):  # all have tried
                await asyncio.sleep(0)
        with ThreadPoolExecutor(1) as threads:
            answered = threads.submit(answer)
            found = await asyncio.gather(*calls)
            answered.result()
        return found

    count = 8
    assert asyncio.run(burst()) == [[ADMITTED, FINISHED]] * count


def test_a_host_that_tcp_does_not_reach_is_named_once(client, monkeypatch, capfd):
    """ssh may reach it through another machine. A start after it is another matter."""
    monkeypatch.setattr(authenticated_stream, "_CONNECT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, contextlib.ExitStack() as fills:
        for _ in range(3):  # its queue is full: the kernel answers no more
            connection = fills.enter_context(socket.socket())
            connection.setblocking(False)
            connection.connect_ex(listener.getsockname())
        host, port = listener.getsockname()
        said = ""
        for start in (1, 2):
            client.server.starting((host, port), "5e" * 32)
            for _ in range(3):
                status, found, _ = client.generate([])
                assert (status, found["error"]["message"]) == (503, "the model is being loaded")
            said += capfd.readouterr().err
            assert said.count(f"rank 0 cannot be reached by TCP at {host}:{port}: no response; if") == start
    assert "give --max-restarts 0" in said


def test_a_call_that_cannot_be_written_ends_its_request():
    """It waited for ever, for events of a task that had failed."""

    async def ask():
        here, there = socket.socketpair()
        with there:
            rank_zero = RankZero(lambda: asyncio.open_connection(sock=here))
            calls = [Generate(prompt=Prompt(text="\ude00"))]
            async with asyncio.timeout(30):
                return [event async for event in _events(rank_zero, calls)]

    with pytest.raises(PydanticSerializationError):
        asyncio.run(ask())


def test_a_server_raises_the_limit_of_descriptors():
    """A request may have 64 choices, each with a connection to rank 0, and macOS begins with 256 descriptors."""
    program = """
import resource
from mlxdist.serve.http_options import HttpOptions
from mlxdist.serve.http_server import HttpServer
from mlxdist.serve.listener import listen
from mlxdist.serve.rank_zero import RankZero
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
HttpServer(listen("127.0.0.1", 0), HttpOptions(), RankZero())
most = 10240 if hard == resource.RLIM_INFINITY else min(hard, 10240)
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, hard)
"""
    subprocess.run([sys.executable, "-P", "-c", program], check=True)
