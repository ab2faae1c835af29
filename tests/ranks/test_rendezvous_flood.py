"""The rendezvous: strangers by the hundred, in any order, end neither its thread nor a job, and hold up no rank."""

import contextlib
import os
import random
import socket
import struct
import threading
from functools import partial

import pytest
from meeting import Job, Watcher, at_once, group, join
from waiting import late, seconds_of, wait_for

from mlxdist.runtime.rendezvous import Rendezvous, authentication
from mlxdist.runtime.rendezvous.event_loop import MAX_UNAUTHENTICATED_READS, EventLoop
from mlxdist.runtime.rendezvous.protocol import Framing, Kind
from mlxdist.runtime.rendezvous.server import ACCEPT_SECONDS, MAX_ACCEPTS, MAX_UNAUTHENTICATED, RendezvousServer

RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends RST


def stranger(address):
    return socket.create_connection(address, timeout=10)


@contextlib.contextmanager
def strangers(address, count):
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(stranger(address)) for _ in range(count)]


def is_challenged(sock):
    sock.settimeout(10)
    with contextlib.suppress(ConnectionError):
        return sock.recv(1) != b""
    return False


@contextlib.contextmanager
def held(loop):
    """The thread of the loop waits meanwhile: all that comes is one batch of events for it."""
    reached, release = threading.Event(), threading.Event()
    loop.call(lambda: reached.set() or release.wait(30))
    assert reached.wait(10)
    try:
        yield
    finally:
        release.set()


def assert_well(members):
    assert at_once(*(lambda m=m: m.all_gather(b"x", "still well") for m in members)) == [[b"x"] * len(members)] * len(
        members
    )


def test_a_callback_may_close_what_is_ready_too():
    """And a new socket may have its number by then, which is not ready."""
    crashes, called, ended = [], [], threading.Event()
    loop = EventLoop(crashes.append)
    (first, say_first), (second, say_second), (third, say_third) = (socket.socketpair() for _ in range(3))

    def close_second(events):
        first.recv(1)
        number = second.fileno()
        loop.unwatch(second)
        second.close()
        os.dup2(third.fileno(), number)
        loop.watch(socket.socket(fileno=number), called.append)
        loop.call(ended.set)

    loop.watch(first, close_second)
    loop.watch(second, called.append)
    say_first.send(b"x")
    say_second.send(b"x")
    loop.start()
    assert ended.wait(10)
    loop.stop()
    assert (crashes, called) == ([], [])
    for sock in (third, say_first, say_second, say_third):
        sock.close()


def test_an_unauthenticated_connection_that_sends_while_it_is_closed():
    """The attack that ended every job: its event is in the batch in which a new connection takes its place."""
    job = Job(2)
    with strangers(job.address, MAX_UNAUTHENTICATED + 20) as before:
        members = join(job.environment(0), job.environment(1))
        assert is_challenged(before[-1])
        for _ in range(3):
            with held(members[0]._loop), strangers(job.address, 1) as _:
                for sock in before:
                    with contextlib.suppress(OSError):
                        sock.sendall(b"x")
            assert_well(members)
        at_once(*(lambda m=m: m.close() for m in members))


def test_a_rank_keeps_its_slot_however_many_connections_follow(monkeypatch):
    """It has connected, and its machine is so slow that it answers the challenge behind a thousand of them."""
    job = Job(2)
    greeted, go = threading.Event(), threading.Event()
    read_frame = authentication.read_frame

    def slowly(sock, framing, deadline):
        frame = read_frame(sock, framing, deadline)
        if frame[0] == Kind.CHALLENGE:
            tries.append(1)
            greeted.set()
            go.wait(30)
        return frame

    tries = []
    monkeypatch.setattr(authentication, "read_frame", slowly)

    def flood():
        assert greeted.wait(10)
        for _ in range(10):
            with strangers(job.address, 100) as socks:
                assert is_challenged(socks[-1])  # so the rank's own connection is behind rank 0, too
        go.set()

    *members, flooded = at_once(lambda: Rendezvous(job.environment(0)), lambda: Rendezvous(job.environment(1)), flood)
    assert flooded is None
    assert len(tries) == 1, "sent away, and connected again"
    assert_well(members)
    at_once(*(lambda m=m: m.close() for m in members))


def flood_until(done, address, batch):
    """Connects as fast as it can, without waiting for an answer. Returns how many were connected, and challenged."""
    connected = challenged = 0
    while not done.is_set():
        with contextlib.ExitStack() as stack:
            socks = []
            for _ in range(batch):
                with contextlib.suppress(OSError):
                    socks.append(stack.enter_context(socket.create_connection(address, timeout=0.5)))
            connected += len(socks)
            for sock in socks:
                sock.setblocking(False)
                with contextlib.suppress(OSError):
                    challenged += sock.recv(1) != b""
    return connected, challenged


def test_a_flood_does_not_delay_a_start():
    """Connections before the ranks, and more all the while. Both ranks come at their first try or their second."""
    for _ in range(3):
        job, done = Job(3), threading.Event()
        with strangers(job.address, 250):

            def start(job=job, done=done):
                try:
                    return join(*(job.environment(rank) for rank in range(3)))
                finally:
                    done.set()

            flood_of = partial(flood_until, done, job.address, 40)
            seconds, (members, flood) = seconds_of(at_once, start, flood_of)
            assert all(isinstance(member, Rendezvous) for member in members), members
            assert seconds < 10, flood  # of 20 s; on a quiet machine 0.1 s
            assert_well(members)
            at_once(*(lambda m=m: m.close() for m in members))


@pytest.mark.long
def test_a_flood_is_let_in_no_faster_than_ranks(monkeypatch):
    """Rank 0 reads from what it has accepted after each 64: no more are between a rank and its response."""
    job, greeted, go = Job(2), threading.Event(), threading.Event()
    accept, welcome, accepted, counts = RendezvousServer._accept_one, RendezvousServer._welcome, [], []

    def counted(server):
        found = accept(server)
        accepted.append(1)
        return found

    def welcomed(server, pending):
        counts.append(len(accepted))
        return welcome(server, pending)

    monkeypatch.setattr(RendezvousServer, "_accept_one", counted)
    monkeypatch.setattr(RendezvousServer, "_welcome", welcomed)
    read_frame = authentication.read_frame

    def slowly(sock, framing, deadline):
        frame = read_frame(sock, framing, deadline)
        if frame[0] == Kind.CHALLENGE and not greeted.is_set():
            greeted.set()
            assert go.wait(30)
        return frame

    monkeypatch.setattr(authentication, "read_frame", slowly)
    servers, make = [], RendezvousServer.__init__
    monkeypatch.setattr(
        RendezvousServer, "__init__", lambda one, *arguments: servers.append(one) or make(one, *arguments)
    )

    def flood():
        assert greeted.wait(10)
        with held(servers[0]._loop), strangers(job.address, 250):
            before = len(accepted)
            go.set()
            late(0.5)  # the rank's answer is there as well
        return before

    *members, before = at_once(lambda: Rendezvous(job.environment(0)), lambda: Rendezvous(job.environment(1)), flood)
    assert counts[0] - before <= MAX_ACCEPTS
    assert_well(members)
    at_once(*(lambda m=m: m.close() for m in members))


def test_a_flood_costs_a_running_job_a_few_connections_a_second():
    """However many there are, rank 0's thread looks at ten a second. More would take its time from the program."""
    with group(2) as members:
        address, done = members[0]._environment.rendezvous, threading.Event()
        looked_at, loop = [], members[0]._loop
        accept = members[0]._server._accept_one
        members[0]._server._accept_one = lambda: looked_at.append(1) or accept()

        def work():
            for _ in range(100):
                assert_well(members)
            done.set()

        seconds, (worked, flood) = seconds_of(at_once, work, lambda: flood_until(done, address, 100))
        assert worked is None
        assert flood[0] >= 100
        assert len(looked_at) <= 1 + seconds / ACCEPT_SECONDS
        assert loop._thread.is_alive()


def test_a_greeting_in_many_pieces_is_cut_off():
    """Each is an event for rank 0's thread. The deadline alone would allow 4096 of them."""
    with group(2) as members:
        with stranger(members[0]._environment.rendezvous) as sock:
            assert is_challenged(sock)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = members[0]._server._pending[0].connection
            for number, byte in enumerate(struct.pack(">IB", 4000, Kind.HELLO) + bytes(4000)):
                with contextlib.suppress(ConnectionError):
                    sock.sendall(bytes([byte]))
                assert wait_for(lambda number=number: not connection.is_open or connection._reads > number)
                if not connection.is_open:
                    break
            assert number == MAX_UNAUTHENTICATED_READS
        assert_well(members)


# In random order.


class Crowd:
    """Clients that connect, write, close their side, reset and read, as ``random`` says."""

    WORDS = (
        b"",
        b"x",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        struct.pack(">IB", 2**31, Kind.HELLO),
        struct.pack(">IB", 0, Kind.HELLO),
        struct.pack(">IB", 200, Kind.HELLO) + b"x" * 50,
        Framing().frame(Kind.HELLO, bytes(300)),
        Framing().frame(Kind.HELLO, bytes(300)) * 3,
        Framing().frame(Kind.KNOCK, bytes(64)),
        Framing().frame(Kind.KNOCK, bytes(64)) + Framing().frame(Kind.HELLO, bytes(300)),
        Framing().frame(Kind.REPORT_FAILURE, b"oops"),
        bytes(5000),
    )

    def __init__(self, seed, most):
        self._random = random.Random(seed)
        self._most = most
        self._socks = []
        self.done = 0

    def act(self, address):
        """Does one thing."""
        self.done += 1
        if not self._socks or (len(self._socks) < self._most and self._random.random() < 0.2):
            for _ in range(self._random.choice((1, 2, 40))):
                sock = socket.socket()
                sock.setblocking(False)
                sock.connect_ex(address)
                self._socks.append(sock)
            return
        sock = self._random.choice(self._socks)
        action = self._random.choice((self._write, self._write, self._half_close, self._read, self._close, self._reset))
        with contextlib.suppress(OSError):  # it is not connected yet, or cut off
            action(sock)

    def _write(self, sock):
        sock.send(self._random.choice(self.WORDS))

    def _half_close(self, sock):
        sock.shutdown(self._random.choice((socket.SHUT_WR, socket.SHUT_RD)))

    def _read(self, sock):
        sock.recv(self._random.choice((1, 100, 4096)))

    def _close(self, sock):
        self._socks.remove(sock)
        sock.close()

    def _reset(self, sock):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self._close(sock)

    def leave(self):
        for sock in self._socks:
            sock.close()


def fuzz(seed, jobs, actions):
    """Jobs one after the other, each with `actions` actions of two crowds before, while and after it forms."""
    for number in range(jobs):
        job, done = Job(3), threading.Event()
        crowds = [Crowd(f"{seed} {number} {which}", most=150) for which in range(2)]
        address = job.address

        def stir(crowd, address=address, done=done):
            while crowd.done < actions or not done.is_set():
                crowd.act(address)
                if crowd.done >= actions:
                    late(0.001)

        def work(job=job, crowds=crowds, done=done):
            try:
                crowds[0].act(job.address)
                members = join(*(job.environment(rank) for rank in range(3)))
                assert all(isinstance(member, Rendezvous) for member in members), members
                watchers = [Watcher(member) for member in members]
                rounds = 0
                while rounds < 20 or any(crowd.done < actions for crowd in crowds):
                    assert_well(members)
                    members[1].send(2, f"{rounds}", b"through rank 0")
                    rounds += 1
                assert [watcher.failures for watcher in watchers] == [[], [], []]
                assert len(watchers[2].wait_messages(rounds)) == rounds
                at_once(*(lambda m=m: m.close() for m in members))
            finally:
                done.set()

        worked, *stirred = at_once(work, *(lambda c=crowd: stir(c) for crowd in crowds))
        for crowd in crowds:
            crowd.leave()
        assert [worked, *stirred] == [None] * 3, f"job {number} of seed {seed}"


def test_unauthenticated_connections_in_random_order():
    fuzz(seed=15, jobs=3, actions=1500)


@pytest.mark.long
def test_unauthenticated_connections_in_random_order_for_long():
    fuzz(seed=1500, jobs=8, actions=8000)
