"""The rendezvous: which ranks are admitted, and that other connections do no harm."""

import os
import socket
import struct
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from meeting import SECRET, SOON, Job, Watcher, at_once, join, pose_as_rank_0
from waiting import late, seconds_of, wait_for

from mlxdist.base import errors
from mlxdist.base.environment import Environment
from mlxdist.runtime.rendezvous import Rendezvous, connect, server
from mlxdist.runtime.rendezvous.authentication import proof
from mlxdist.runtime.rendezvous.protocol import MAGIC, MAX_FRAME, Framing, Kind, ProtocolError


def stranger(address):
    sock = socket.create_connection(address, timeout=5)
    sock.settimeout(5)
    return sock


def read_challenge(sock):
    framing = Framing()
    while (frame := framing.next_frame()) is None:
        framing.feed(sock.recv(4096))
    assert frame[0] == Kind.CHALLENGE
    return frame[1]


def test_wrong_secret_is_rejected_and_noted_by_rank_0():
    job, ended = Job(2), []

    def rank(number, **changes):
        try:
            Rendezvous(job.environment(number, **changes))
        finally:
            ended.append(number)

    waiting, refused = at_once(lambda: rank(0, rendezvous_timeout=1.0), lambda: rank(1, secret=b"\x11" * 32))
    assert isinstance(refused, errors.RendezvousError) and "MLXDIST_SECRET is not this job's" in str(refused)
    assert ended == [1, 0], "rejected at once, not after the timeout"
    assert "rank 1 of 2 has not connected" in str(waiting) and "was refused: its MLXDIST_SECRET" in str(waiting)


def test_wrong_secret_does_not_disturb_the_job():
    job = Job(2)
    results = join(job.environment(0), job.environment(1, secret=b"\x11" * 32), job.environment(1))
    assert isinstance(results[1], errors.RendezvousError)
    assert isinstance(results[0], Rendezvous) and isinstance(results[2], Rendezvous)
    at_once(results[0].close, results[2].close)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"world_size": 3}, "MLXDIST_WORLD_SIZE is 3 on rank 1 and 2 on rank 0"),
        ({"job": "other"}, "MLXDIST_JOB is other on rank 1 and test on rank 0"),
        ({"rank": 2}, "MLXDIST_RANK is 2"),
    ],
)
def test_contradictions_are_reported_to_both_sides_at_once(changes, words):
    job = Job(2)
    for result in join(job.environment(0), replace(job.environment(1), **changes)):  # after the timeout: other words
        assert isinstance(result, errors.RendezvousError) and words in str(result), result


def test_another_version_is_reported_to_both_sides_at_once(monkeypatch):
    monkeypatch.setattr(connect, "__version__", "9.9.9")
    job = Job(2)
    for result in join(job.environment(0), job.environment(1)):
        assert isinstance(result, errors.RendezvousError)
        assert "the version of mlxdist is 9.9.9 on rank 1 and" in str(result)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_second_rank_of_the_same_number_is_rejected(when, monkeypatch):
    """Before the group is complete, and after."""
    job, servers, make = Job(3), [], server.RendezvousServer.__init__
    monkeypatch.setattr(
        server.RendezvousServer, "__init__", lambda one, *arguments: servers.append(one) or make(one, *arguments)
    )
    with ThreadPoolExecutor(4) as pool:
        first = [pool.submit(Rendezvous, job.environment(rank)) for rank in (0, 1)]
        if when == "after":
            first.append(pool.submit(Rendezvous, job.environment(2)))
            [future.result(5) for future in first]
        assert wait_for(lambda: servers and 1 in servers[0]._members)
        with pytest.raises(errors.RendezvousError, match="rank 1 is already taken by pid"):
            Rendezvous(job.environment(1))
        if when == "before":
            first.append(pool.submit(Rendezvous, job.environment(2)))
        members = [future.result(5) for future in first]
    assert at_once(*(lambda m=m: m.all_gather(b"", "x") for m in members)) == [[b""] * 3] * 3
    at_once(*(lambda m=m: m.close() for m in members))


STRANGERS = {
    "silent": b"",
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "random": os.urandom(3000),
    "half a frame": struct.pack(">IB", 200, Kind.HELLO) + b"x" * 50,
    "oversized": struct.pack(">IB", 2**31, Kind.HELLO),
    "empty frame": struct.pack(">IB", 0, Kind.HELLO),
    "other kind": struct.pack(">IB", 4, Kind.REPORT_FAILURE) + b"oops",
    "wrong proof": struct.pack(">IB", 70, Kind.HELLO) + b"x" * 70,
}


@pytest.mark.parametrize("greeting", STRANGERS.values(), ids=STRANGERS)
def test_an_unauthenticated_connection_does_not_delay_the_ranks(greeting):
    job = Job(2)
    with stranger(job.address) as sock:
        sock.sendall(greeting)
        seconds, members = seconds_of(join, job.environment(0), job.environment(1))
        assert all(isinstance(member, Rendezvous) for member in members), members
        assert seconds < SOON
        assert at_once(*(lambda m=m: m.all_gather(b"", "x") for m in members)) == [[b"", b""]] * 2
        at_once(*(lambda m=m: m.close() for m in members))


def test_an_oversized_greeting_is_cut_off():
    job = Job(2)
    with ThreadPoolExecutor(1) as pool, stranger(job.address) as sock:
        forming = pool.submit(Rendezvous, job.environment(0, rendezvous_timeout=0.7))
        read_challenge(sock)
        sock.sendall(struct.pack(">IB", 5000, Kind.HELLO))
        assert sock.recv(100) == b""
        assert "a frame of 5000 bytes where at most 4096 are allowed" in str(forming.exception(5))


def test_many_silent_connections_do_not_delay_the_ranks():
    job = Job(2)
    strangers = [stranger(job.address) for _ in range(server.MAX_UNAUTHENTICATED + 100)]
    seconds, members = seconds_of(join, job.environment(0), job.environment(1))
    assert all(isinstance(member, Rendezvous) for member in members), members
    assert seconds < SOON
    for sock in strangers[:90]:
        read_challenge(sock)
        assert sock.recv(1) == b"", "the oldest were sent away"
    at_once(*(lambda m=m: m.close() for m in members))
    for sock in strangers:
        sock.close()


def test_connections_that_use_up_the_descriptors_of_rank_0():
    """The longest waiting ones are sent away."""
    job = Job(2)
    program = """
import resource
from mlxdist.base.environment import Environment
from mlxdist.runtime.rendezvous import Rendezvous
resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))
rendezvous = Rendezvous(Environment.read())
rendezvous.barrier("x")
rendezvous.close()
"""
    descriptor = job.listener.fileno()
    variables = job.variables(0) | {"MLXDIST_RENDEZVOUS_FD": str(descriptor)}
    server_process = subprocess.Popen([sys.executable, "-c", program], env=variables, pass_fds=[descriptor])
    job.listener.close()
    strangers = [stranger(job.address) for _ in range(60)]
    try:
        member = Rendezvous(job.environment(1))
        member.barrier("x")
        member.close()
        assert server_process.wait(10) == 0
    finally:
        server_process.kill()
        server_process.wait()
        for sock in strangers:
            sock.close()


def test_an_unauthenticated_connection_that_trickles_is_closed(monkeypatch):
    """However slowly it goes on: the deadline is for the whole greeting."""
    monkeypatch.setattr(server, "HANDSHAKE_SECONDS", 0.3)
    job = Job(2)
    members = join(job.environment(0), job.environment(1))
    with stranger(job.address) as sock:
        read_challenge(sock)

        def trickle():
            with pytest.raises(OSError):
                for byte in struct.pack(">IB", 4000, Kind.HELLO) + b"x" * 4000:
                    sock.sendall(bytes([byte]))
                    late(0.02)

        assert 0.2 < seconds_of(trickle)[0] < SOON
    at_once(*(lambda m=m: m.close() for m in members))


def test_a_recorded_greeting_is_worth_nothing():
    """The challenge is new for every connection."""
    job = Job(2)
    with ThreadPoolExecutor(1) as pool, stranger(job.address) as first, stranger(job.address) as second:
        forming = pool.submit(Rendezvous, job.environment(0, rendezvous_timeout=0.7))
        server_nonce = read_challenge(first)[len(MAGIC) :]
        greeting = b'{"rank": 1, "world_size": 2, "job": "test", "version": "0", "host": "h", "pid": 1}'
        hello = Framing().frame(
            Kind.HELLO, b"n" * 32 + proof(SECRET, "rank", server_nonce, b"n" * 32, greeting) + greeting
        )
        read_challenge(second)
        second.sendall(hello)
        assert b"MLXDIST_SECRET is not this job's" in second.recv(4096)
        assert isinstance(forming.exception(5), errors.RendezvousError)


def impostor(responses):
    """A server that is not rank 0: sends the next of ``responses`` for each message."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        sock, _ = listener.accept()
        with listener, sock:
            for response in responses:
                sock.sendall(response)
                if not sock.recv(65536):
                    return

    thread = threading.Thread(target=serve)
    thread.start()
    return listener.getsockname()[:2], thread


@pytest.mark.parametrize(
    "responses, words",
    [
        ([b"SSH-2.0-OpenSSH_9.2p1 Debian\r\n" * 20], "it sent"),
        ([Framing().frame(Kind.CHALLENGE, b"mlxdist rendezvous 7" + b"n" * 32)], "mlxdist rendezvous 7"),
        (
            [
                Framing().frame(Kind.CHALLENGE, MAGIC + b"n" * 32),
                Framing().frame(Kind.WELCOME, b"p" * 32 + b'{"host": "h", "pid": 1, "seconds": 1.0, "received": 0}'),
            ],
            "no proof that it knows MLXDIST_SECRET",
        ),
        ([Framing().frame(Kind.REFUSED, b"go \x1b[31maway")], "it sent"),
        (
            [Framing().frame(Kind.CHALLENGE, MAGIC + b"n" * 32), Framing().frame(Kind.REFUSED, b"go \x1b[31maway")],
            "go ?[31maway",
        ),
    ],
    ids=["ssh", "other protocol", "no proof", "refusal first", "refusal with escapes"],
)
def test_a_server_that_is_not_rank_0_is_rejected(responses, words):
    address, thread = impostor(responses)
    environment = Environment(rank=1, world_size=2, rendezvous=address, secret=SECRET, rendezvous_timeout=5)
    with pytest.raises(errors.RendezvousError) as caught:
        Rendezvous(environment)
    thread.join(5)
    assert words in str(caught.value)


def test_frames_right_after_the_welcome_are_not_lost():
    """The last rank to come: rank 0 says that the group is complete in the same breath."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        environment = Environment(rank=1, world_size=2, rendezvous=listener.getsockname(), secret=SECRET)

        def rank_0():
            sock, framing, welcome = pose_as_rank_0(listener)
            sock.sendall(welcome + framing.frame(Kind.FORMED, b"{}"))
            return sock

        sock, member = at_once(rank_0, lambda: Rendezvous(environment))  # nothing follows that could wake it up
        assert isinstance(member, Rendezvous), member
        sock.close()
        member.close()


def test_a_member_that_sends_an_oversized_frame_is_cut_off():
    job = Job(2)
    with ThreadPoolExecutor(1) as pool:
        forming = pool.submit(Rendezvous, job.environment(0))
        sock, framing, _ = connect.connect(job.environment(1))
        member = forming.result(5)
        watcher = Watcher(member)
        sock.sendall(struct.pack(">IB", MAX_FRAME + 1, Kind.GATHER))
        rank, text = watcher.wait()
        assert rank == 1 and "1048577 bytes where at most 1048576" in text
        sock.close()
        member.close(linger=0)


def test_inserted_and_repeated_frames_are_noticed():
    sender, receiver = Framing(), Framing()
    sender.secure(b"a", b"b")
    receiver.secure(b"b", b"a")
    frame = sender.frame(Kind.REPORT_FAILURE, b"text")
    receiver.feed(frame)
    assert receiver.next_frame() == (Kind.REPORT_FAILURE, b"text")
    altered = sender.frame(Kind.REPORT_FAILURE, b"text").replace(b"text", b"lies")
    for bad in (frame, altered, struct.pack(">IB", 3, Kind.REPORT_FAILURE) + b"abc"):
        fresh = Framing()
        fresh.secure(b"b", b"a")
        fresh.feed(frame)
        assert fresh.next_frame() is not None
        fresh.feed(bad)
        with pytest.raises(ProtocolError):
            fresh.next_frame()
