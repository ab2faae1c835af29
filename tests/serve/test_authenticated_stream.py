"""Streams between the launcher's application and rank 0 on another host: who gets one, and what others cost."""

import asyncio
import contextlib
import os
import socket
import struct

import pytest

from mlxdist.runtime.rendezvous.authentication import ClientHandshake
from mlxdist.runtime.rendezvous.protocol import MAX_UNAUTHENTICATED_FRAME, Framing, Kind
from mlxdist.serve import authenticated_stream
from mlxdist.serve.authenticated_stream import AuthenticatedServer, connect

SECRET, OTHER = b"\x5e" * 32, b"\x11" * 32
LIMIT = 1 << 16
SECONDS = 30  # only end a test that fails


async def echo(reader, writer):
    while data := await reader.read(LIMIT):
        writer.write(data)
        await writer.drain()
    writer.close()


@contextlib.asynccontextmanager
async def serving(connected=echo, secret=SECRET):
    """The address of a server."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    address, server = listener.getsockname(), AuthenticatedServer(connected, secret, LIMIT)
    await server.start(listener, 256)
    try:
        async with asyncio.timeout(SECONDS):
            yield address
    finally:
        server.close()


async def require_echo(address, data=b"a call\n"):
    reader, writer = await connect(*address, SECRET, LIMIT)
    writer.write(data)
    assert await reader.readexactly(len(data)) == data
    writer.transport.abort()


@contextlib.asynccontextmanager
async def relay(address, change=lambda data: data):
    """The address of a man in the middle, who may change what goes to the server; and all that passes both ways."""
    seen = []

    async def pump(reader, writer, change):
        with contextlib.suppress(OSError):
            while data := await reader.read(LIMIT):
                seen.append(data)
                writer.write(change(data))
        writer.close()

    async def connected(reader, writer):
        there, to_there = await asyncio.open_connection(*address)
        await asyncio.gather(pump(reader, to_there, change), pump(there, writer, bytes))

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname(), seen


def options_of(writer):
    sock = writer.get_extra_info("socket")
    names = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE), (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)]
    return [sock.getsockopt(*name) for name in names]


@pytest.mark.parametrize("size", [1, 65_535, 65_536, 65_537, 3_000_001])
def test_bytes_arrive_as_they_were_sent(size):
    data = os.urandom(size)

    async def run():
        async with serving() as address:
            reader, writer = await connect(*address, SECRET, LIMIT)
            writer.write(b"")  # nothing is no frame
            writer.write(data)
            assert await reader.readexactly(size) == data
            writer.write(b"and more")
            assert await reader.readexactly(8) == b"and more"
            writer.transport.abort()

    asyncio.run(run())


def test_a_stream_that_ends_is_read_to_its_end():
    async def say_and_close(reader, writer):
        writer.write(await reader.readline() + b"x" * 200_000)
        writer.close()

    async def run():
        async with serving(say_and_close) as address:
            reader, writer = await connect(*address, SECRET, LIMIT)
            writer.write(b"call\n")
            assert await reader.read(-1) == b"call\n" + b"x" * 200_000
            writer.transport.abort()

    asyncio.run(run())


def test_a_peer_that_reads_slowly_makes_the_other_wait():
    """At most some MiB wait for it: in buffers of the kernel, and as much as is read ahead."""
    sent = 0

    async def send(reader, writer):
        nonlocal sent
        with contextlib.suppress(OSError):
            while sent < 1 << 28:
                writer.write(b"x" * LIMIT)
                sent += LIMIT
                await writer.drain()
        writer.transport.abort()

    async def run():
        async with serving(send) as address:
            reader, writer = await connect(*address, SECRET, LIMIT)
            before = -1
            while sent > before:  # until it waits
                before = sent
                await asyncio.sleep(0.2)
            assert 0 < sent < 1 << 26
            await reader.readexactly(1 << 26)  # goes on where it was
            assert sent > before
            writer.transport.abort()

    asyncio.run(run())


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="macOS has another option")
def test_both_ends_notice_a_host_without_power():
    found = []

    async def connected(reader, writer):
        found.append(options_of(writer))
        writer.close()

    async def run():
        async with serving(connected) as address:
            reader, writer = await connect(*address, SECRET, LIMIT)
            assert await reader.read() == b""
            found.append(options_of(writer))
            writer.transport.abort()

    asyncio.run(run())
    assert found == [[1, 30_000]] * 2


def test_another_secret_is_refused_on_both_sides():
    calls = []

    async def connected(reader, writer):
        calls.append(await reader.readline())
        await echo(reader, writer)

    async def run():
        async with serving(connected, OTHER) as address:
            with pytest.raises(ConnectionRefusedError, match="no proof that it knows MLXDIST_SECRET"):
                await connect(*address, SECRET, LIMIT)

    asyncio.run(run())
    assert calls == []


def test_a_program_that_answers_in_its_own_way_is_refused():
    async def connected(reader, writer):
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async def run():
        async with await asyncio.start_server(connected, "127.0.0.1", 0) as server:
            address = server.sockets[0].getsockname()
            with pytest.raises(ConnectionRefusedError, match="is not rank 0 of this job"):
                await connect(*address, SECRET, LIMIT)

    asyncio.run(run())


def test_a_server_that_closes_every_connection_is_given_up(monkeypatch):
    monkeypatch.setattr(authenticated_stream, "_PAUSE", 0)
    closed = []

    async def connected(reader, writer):
        closed.append(writer.transport.abort())

    async def run():
        async with await asyncio.start_server(connected, "127.0.0.1", 0) as server:
            with pytest.raises(ConnectionResetError, match="has closed 20 connections"):
                await connect(*server.sockets[0].getsockname(), SECRET, LIMIT)

    asyncio.run(run())
    assert len(closed) == 20


def hello_of_a_rank(challenge):
    """With the right secret, for the rendezvous."""
    return Framing().frame(Kind.HELLO, ClientHandshake(SECRET, "rank").hello(challenge, b"{}"))


STRANGERS = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "random": os.urandom(3000),
    "oversized": struct.pack(">IB", MAX_UNAUTHENTICATED_FRAME + 1, Kind.HELLO),
    "empty greeting": struct.pack(">IB", 0, Kind.HELLO),
    "a call": Framing().frame(Kind.STREAM, b'{"op": "status"}\n'),
    "two knocks": Framing().frame(Kind.KNOCK, b"x" * 64) * 2,
    "wrong proof": struct.pack(">IB", 70, Kind.HELLO) + b"x" * 70,
    "a rank": hello_of_a_rank,
}


@pytest.mark.parametrize("sends", STRANGERS.values(), ids=STRANGERS)
def test_what_is_no_application_is_cut_off_and_disturbs_nothing(sends):
    connected = []

    async def note(reader, writer):
        connected.append(True)
        await echo(reader, writer)

    async def run():
        async with serving(note) as address:
            reader, writer = await connect(*address, SECRET, LIMIT)
            stranger, to_server = await asyncio.open_connection(*address)
            challenge = await stranger.readexactly(5 + 52)
            to_server.write(sends(challenge[5:]) if callable(sends) else sends)
            with contextlib.suppress(ConnectionResetError):
                rest = await stranger.read()
                assert rest in (b"", Framing().frame(Kind.REFUSED, b"the secret is wrong"))
            writer.write(b"x")
            assert await reader.readexactly(1) == b"x"
            await require_echo(address)
            for each in (writer, to_server):
                each.transport.abort()

    asyncio.run(run())
    assert len(connected) == 2


@pytest.mark.parametrize("sends", [b"", struct.pack(">IB", 200, Kind.HELLO) + b"x" * 50])
def test_a_silent_connection_is_ended(sends, monkeypatch):
    monkeypatch.setattr(authenticated_stream, "HANDSHAKE_SECONDS", 0.3)

    async def run():
        async with serving() as address:
            stranger, to_server = await asyncio.open_connection(*address)
            to_server.write(sends)
            kept, to_kept = await connect(*address, SECRET, LIMIT)
            await stranger.readexactly(5 + 52)
            assert await stranger.read() == b""
            await asyncio.sleep(0.5)  # a stream has no such time
            to_kept.write(b"x")
            assert await kept.readexactly(1) == b"x"
            for each in (to_server, to_kept):
                each.transport.abort()

    asyncio.run(run())


def test_one_that_leaves_in_its_handshake_is_forgotten(monkeypatch):
    monkeypatch.setattr(authenticated_stream, "_MAX_PENDING", 1)

    async def run():
        async with serving() as address:
            for half in (b"", struct.pack(">I", 200)):
                stranger, to_server = await asyncio.open_connection(*address)
                to_server.write(half)
                to_server.write_eof()
                assert len(await stranger.read()) == 5 + 52
                to_server.transport.abort()
            await require_echo(address)

    asyncio.run(run())


def test_silent_connections_leave_for_those_that_have_the_secret(monkeypatch):
    """And a burst of these, of more than there are places, gets through."""
    monkeypatch.setattr(authenticated_stream, "_MAX_PENDING", 4)

    async def run():
        async with serving() as address:
            strangers = [await asyncio.open_connection(*address) for _ in range(12)]
            await asyncio.gather(*(require_echo(address) for _ in range(24)))
            left = 0
            for stranger, to_server in strangers[:8]:
                with contextlib.suppress(ConnectionResetError):
                    await stranger.read()
                left += 1
                to_server.transport.abort()
            for _, to_server in strangers[8:]:
                to_server.transport.abort()
            assert left == 8

    asyncio.run(run())


def test_the_secret_is_not_on_the_wire_and_what_is_there_cannot_be_replayed():
    async def run():
        async with serving() as address:
            sent = []
            async with relay(address, lambda data: sent.append(data) or data) as (between, seen):
                await require_echo(between)
            traffic = b"".join(seen)
            assert b"a call\n" in traffic and SECRET not in traffic and SECRET.hex().encode() not in traffic
            stranger, to_server = await asyncio.open_connection(*address)
            await stranger.readexactly(5 + 52)
            to_server.write(b"".join(sent))
            with contextlib.suppress(ConnectionResetError):
                assert await stranger.read() == Framing().frame(Kind.REFUSED, b"the secret is wrong")
            to_server.transport.abort()

    asyncio.run(run())


@pytest.mark.parametrize(
    "change, expected",
    [
        (lambda data: data.replace(b"a call", b"A call"), []),
        (lambda data: data * 2 if b"a call" in data else data, [b"a call"]),
    ],
    ids=["altered", "repeated"],
)
def test_a_frame_that_was_altered_or_inserted_ends_the_stream(change, expected):
    got = []

    async def connected(reader, writer):
        with contextlib.suppress(OSError):
            while data := await reader.read(LIMIT):
                got.append(data)
        got.append("end")
        writer.transport.abort()

    async def run():
        async with serving(connected) as address, relay(address, change) as (between, _):
            reader, writer = await connect(*between, SECRET, LIMIT)
            writer.write(b"a call")
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
            writer.transport.abort()
            while "end" not in got:
                await asyncio.sleep(0.01)

    asyncio.run(run())
    assert got == [*expected, "end"]
