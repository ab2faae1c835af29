"""The rendezvous: messages from one rank to another, through rank 0."""

import array
import collections
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from meeting import SECRET, SOON, Job, Watcher, at_once, group, join, pose_as_rank_0
from waiting import seconds_of, wait_for

from mlxdist.base import errors
from mlxdist.base.environment import Environment
from mlxdist.runtime.rendezvous import Rendezvous, connect, rendezvous, server
from mlxdist.runtime.rendezvous.protocol import MAX_MESSAGE_BYTES, MAX_TAG, Framing, Kind, pack_message

# What arrives.


@pytest.mark.parametrize("size", [2, 3, 8])
def test_all_pairs_at_once(size):
    """Every message once, unaltered, in the order of its sender."""
    each = 20

    def data(sender, receiver, number):
        return bytes([sender, receiver, number]) * (number * 50)

    with group(size) as members:
        watchers = [Watcher(member) for member in members]

        def send_all(sender):
            for number in range(each):
                for receiver in range(size):
                    if receiver != sender:
                        members[sender].send(receiver, f"m{number}", data(sender, receiver, number))

        at_once(*(lambda s=sender: send_all(s) for sender in range(size)))
        for receiver, watcher in enumerate(watchers):
            by_sender = collections.defaultdict(list)
            for sender, tag, content in watcher.wait_messages(each * (size - 1)):
                by_sender[sender].append((tag, content))
            assert by_sender == {
                sender: [(f"m{number}", data(sender, receiver, number)) for number in range(each)]
                for sender in range(size)
                if sender != receiver
            }
        at_once(*(lambda m=m: m.barrier("afterwards") for m in members))
        assert [len(watcher.messages) for watcher in watchers] == [each * (size - 1)] * size


def test_threads_of_one_rank_send_at_once():
    with group(2) as members:
        watcher = Watcher(members[0])

        def send_all(thread):
            for number in range(100):
                members[1].send(0, f"{thread}", bytes([number]) * 100 * thread)

        at_once(*(lambda t=thread: send_all(t) for thread in range(6)))
        messages = watcher.wait_messages(600)
        for thread in range(6):
            of_thread = [content for _, tag, content in messages if tag == str(thread)]
            assert of_thread == [bytes([number]) * 100 * thread for number in range(100)]


@pytest.mark.parametrize("sender, receiver", [(0, 1), (1, 0), (1, 2)])
def test_empty_and_largest_messages(sender, receiver):
    sent = [
        ("", b""),
        ("t", b"x"),
        ("", os.urandom(MAX_MESSAGE_BYTES)),
        ("ö" * (MAX_TAG // 2), os.urandom(MAX_MESSAGE_BYTES)),
        ("", b""),
    ]
    with group(3) as members:
        watcher = Watcher(members[receiver])
        for tag, data in sent:
            members[sender].send(receiver, tag, data)
        assert watcher.wait_messages(len(sent)) == [(sender, tag, data) for tag, data in sent]


def test_any_bytes_may_be_sent():
    with group(2) as members:
        watcher = Watcher(members[0])
        for data in (bytearray(b"abc"), memoryview(b"defg")[1:], array.array("H", [1, 2])):
            members[1].send(0, "t", data)
        shorts = array.array("H", [1, 2]).tobytes()
        assert watcher.wait_messages(3) == [(1, "t", b"abc"), (1, "t", b"efg"), (1, "t", shorts)]
        with pytest.raises(errors.InvalidArgument, match="data of 65538 bytes"):
            members[1].send(0, "t", array.array("H", bytes(MAX_MESSAGE_BYTES + 2)))


def test_a_message_is_copied_when_it_is_sent():
    with group(2) as members:
        watcher, data = Watcher(members[0]), bytearray(b"before")
        for _ in range(50):
            data[:] = b"before"
            members[1].send(0, "t", data)
            data[:] = b"behind"
        assert {content for _, _, content in watcher.wait_messages(50)} == {b"before"}


def test_a_round_trip_takes_no_timer():
    """Nothing on the way waits for more to come: with Nagle's algorithm, or a poll interval, it would take 40 ms."""
    with group(3) as members:
        watchers = [Watcher(member) for member in members]

        def round_trip(number):
            members[1].send(2, "ping", b"")
            assert len(watchers[2].wait_messages(number)) == number
            members[2].send(1, "pong", b"")
            assert len(watchers[1].wait_messages(number)) == number

        seconds = [seconds_of(round_trip, number)[0] for number in range(1, 31)]
        assert sorted(seconds)[15] < 0.02


def test_messages_between_exchanges():
    with group(3) as members:
        watchers = [Watcher(member) for member in members]

        def work(rank):
            for step in range(20):
                members[rank].send((rank + 1) % 3, f"{step}", bytes([rank]))
                assert members[rank].all_gather(bytes([rank]), f"step {step}") == [b"\0", b"\1", b"\2"]

        assert at_once(*(lambda r=rank: work(r) for rank in range(3))) == [None] * 3
        for rank, watcher in enumerate(watchers):
            sender = (rank - 1) % 3
            assert watcher.wait_messages(20) == [(sender, f"{step}", bytes([sender])) for step in range(20)]


# Before, and from within, watch().


def test_messages_from_before_watch_come_first():
    with group(3) as members:
        for number in range(50):
            members[1].send(2, "early", bytes([number]))
        at_once(*(lambda m=m: m.barrier("all are there") for m in members))
        members[2].watch(lambda *news: None)  # still no receiver of messages
        members[1].send(2, "late", b"")
        watcher = Watcher(members[2])
        expected = [(1, "early", bytes([number])) for number in range(50)] + [(1, "late", b"")]
        assert watcher.wait_messages(51) == expected


def test_too_many_unread_messages(monkeypatch):
    monkeypatch.setattr(rendezvous, "MAX_INBOX", 1_000_000)
    with group(3) as members:
        watchers = [Watcher(member) for member in members[:2]]
        for _ in range(16):
            members[1].send(2, "flood", bytes(MAX_MESSAGE_BYTES))
        for watcher in watchers:
            rank, text = watcher.wait()
            assert rank == 2 and "rank 2 was sent more than" in text and "pass an on_message" in text
        with pytest.raises(errors.RendezvousError, match="rank 2 was sent more than"):
            members[2].barrier("next")
        with pytest.raises(errors.RendezvousError, match="rank 2 was sent more than"):
            members[1].send(2, "more", b"")


def test_a_callback_may_send():
    with group(2) as members:
        watcher = Watcher(members[0])
        members[1].watch(
            lambda *news: None, on_message=lambda rank, tag, data: members[1].send(rank, tag + "!", data * 2)
        )
        for number in range(100):
            members[0].send(1, f"{number}", bytes([number]))
        assert watcher.wait_messages(100) == [(1, f"{number}!", bytes([number]) * 2) for number in range(100)]


def test_a_callback_that_raises_is_reported_and_the_next_message_is_delivered(monkeypatch):
    reported, delivered = [], []
    done = threading.Event()
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, traceback: reported.append(kind))

    def on_message(rank, tag, data):
        if tag == "last":
            done.set()
        delivered.append(tag)
        raise KeyError(tag)

    with group(2) as members:
        members[1].watch(lambda *news: None, on_message=on_message)
        for tag in ("first", "second", "last"):
            members[0].send(1, tag, b"")
        assert done.wait(SOON)
        members[1].close()
        assert delivered == ["first", "second", "last"] and reported == [KeyError] * 3


# What is refused.


@pytest.mark.parametrize("rank", [-1, 1, 3, 10**30], ids=["negative", "itself", "the size", "enormous"])
def test_an_unknown_rank_is_rejected(rank):
    with group(3) as members:
        watchers = [Watcher(member) for member in members]
        with pytest.raises(errors.InvalidArgument, match=f"rank 1 cannot send 'hello' to rank {rank}"):
            members[1].send(rank, "hello", b"")
        at_once(*(lambda m=m: m.barrier("still well") for m in members))
        assert [watcher.messages for watcher in watchers] == [[], [], []]


@pytest.mark.parametrize(
    "tag, size", [("t", MAX_MESSAGE_BYTES + 1), ("t" * (MAX_TAG + 1), 0), ("ö" * (MAX_TAG // 2 + 1), 0)]
)
def test_a_message_that_is_too_long_is_rejected_before_anything_is_sent(tag, size):
    with group(2) as members:
        watcher = Watcher(members[0])
        with pytest.raises(errors.InvalidArgument, match="at most 256 and 65536"):
            members[1].send(0, tag, bytes(size))
        members[1].send(0, "next", b"")
        assert watcher.wait_messages(1) == [(1, "next", b"")]


@pytest.mark.parametrize("arguments", [("1", "t", b""), (1.0, "t", b""), (1, b"t", b""), (1, "t", "text"), (1, "t", 5)])
def test_other_types_are_rejected(arguments):
    with group(2) as members:
        watcher = Watcher(members[1])
        with pytest.raises((TypeError, AttributeError)):
            members[0].send(*arguments)
        members[0].send(1, "next", b"")
        assert watcher.wait_messages(1) == [(0, "next", b"")]


# Ends.


@pytest.mark.parametrize("sender", [0, 1])
def test_what_was_sent_before_close_arrives_before_the_report_of_it(sender):
    with group(3) as members:
        heard = []
        left = threading.Event()

        def on_leave(rank, text):
            heard.append(("left", rank))
            left.set()

        members[2].watch(lambda *news: None, on_leave, lambda rank, tag, data: heard.append((tag, rank)))
        for number in range(200):
            members[sender].send(2, f"{number}", bytes(1000))
        members[sender].close(linger=0)
        assert left.wait(SOON)
        assert heard == [(f"{number}", sender) for number in range(200)] + [("left", sender)]


def test_close_while_others_send():
    """No member hangs, and the senders get the error that the receiver has left."""
    with group(3) as members:
        watcher = Watcher(members[1])

        def send_until_refused(rank):
            def send_some():
                for _ in range(20):
                    members[rank].send(1, "more", bytes(100))

            wait_for(send_some)

        with ThreadPoolExecutor(2) as pool:
            sending = [pool.submit(send_until_refused, rank) for rank in (0, 2)]
            assert len(watcher.wait_messages(50)) == 50
            members[1].close()
            delivered = len(watcher.messages)
            for future in sending:
                error = future.exception(60)
                assert isinstance(error, errors.PeerLost) and "rank 1" in str(error), error
                assert "has left the group (finalize)" in str(error)
        assert len(watcher.messages) == delivered, "a callback after close"
        members[0].send(2, "the others go on", b"")
        assert Watcher(members[2]).wait_messages(1) == [(0, "the others go on", b"")]


def test_after_close():
    with group(2) as members:
        members[1].close()
        with pytest.raises(errors.Error, match="rank 1 has left the group already"):
            members[1].send(0, "t", b"")


def test_after_a_failure():
    with group(3) as members:
        watcher = Watcher(members[2])
        members[1].report_failure(errors.Aborted("no memory"))
        assert watcher.wait() == (1, "no memory")
        for sender in (1, 2):
            with pytest.raises(errors.Aborted, match="no memory"):
                members[sender].send(0, "t", b"")


def test_a_rank_that_does_not_read_fails_the_group(monkeypatch):
    """Rank 0 keeps a limited number of messages for it. No other member is delayed meanwhile."""
    monkeypatch.setattr(server, "MAX_QUEUED", 1_000_000)
    job = Job(3)
    (deaf, _, _), *members = at_once(
        lambda: connect.connect(job.environment(2)), *(lambda r=r: Rendezvous(job.environment(r)) for r in range(2))
    )
    watchers = [Watcher(member) for member in members]
    try:
        for _ in range(1000):  # 64 MiB: more than any buffer on the way holds
            members[1].send(2, "flood", bytes(MAX_MESSAGE_BYTES))
            members[1].send(0, "meanwhile", b"")
            watchers[0].wait_messages(len(watchers[0].messages) + 1, 0.02)
    except errors.RendezvousError as error:
        assert "rank 2 (" in str(error) and "bytes from other ranks unread" in str(error)
    assert watchers[0].wait()[0] == 2
    assert watchers[0].messages
    deaf.close()
    at_once(*(lambda m=m: m.close(linger=0.1) for m in members))


def test_a_rank_0_that_is_stopped(monkeypatch):
    """The sender keeps what rank 0 does not take, and not without end."""
    monkeypatch.setattr(rendezvous, "MAX_QUEUED", 1_000_000)
    job = Job(2)
    program = """
from mlxdist.base.environment import Environment
from mlxdist.runtime.rendezvous import Rendezvous
rendezvous = Rendezvous(Environment.read())
rendezvous.barrier("x")
"""
    descriptor = job.listener.fileno()
    process = subprocess.Popen(
        [sys.executable, "-c", program + "import time; time.sleep(60)"],
        env=job.variables(0) | {"MLXDIST_RENDEZVOUS_FD": str(descriptor)},
        pass_fds=[descriptor],
    )
    job.listener.close()
    try:
        member = Rendezvous(job.environment(1))
        member.barrier("x")
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(errors.RendezvousError, match=r"rank 0 \(.*\) has not read \d+ bytes of messages"):
            for _ in range(1000):  # 64 MiB: more than any buffer on the way holds
                member.send(0, "flood", bytes(MAX_MESSAGE_BYTES))
    finally:
        process.kill()
        process.wait()
    member.close()


# Who may send, and what.


def message(rank, tag=b"t", data=b"", length=None):
    return struct.pack(">IH", rank, len(tag) if length is None else length) + tag + data


MALFORMED = {
    "empty": (b"", "a truncated message"),
    "half a head": (b"\0\0\0\0\0", "a truncated message"),
    "tag cut off": (message(0, b"abc", length=4), "a truncated tag"),
    "long tag": (message(0, b"t" * (MAX_TAG + 1)), "a tag of 257"),
    "long data": (message(0, b"t", bytes(MAX_MESSAGE_BYTES + 1)), "data of 65537 bytes"),
    "longest frame": (message(0, b"t", bytes(2**20 - 64)), "data of 1048512 bytes"),
    "no text": (message(0, b"\xff\xfe"), "whose tag is no text"),
    "to itself": (message(1), "a message for rank 1"),
    "to no rank": (message(3), "a message for rank 3"),
    "to the largest rank": (message(2**32 - 1), "a message for rank 4294967295"),
}


@pytest.mark.parametrize("payload, words", MALFORMED.values(), ids=MALFORMED)
def test_a_member_that_sends_a_malformed_message_is_cut_off(payload, words):
    job = Job(3)
    (sock, framing, _), *members = at_once(
        lambda: connect.connect(job.environment(1)), *(lambda r=r: Rendezvous(job.environment(r)) for r in (0, 2))
    )
    watchers = [Watcher(member) for member in members]
    sock.sendall(framing.frame(Kind.MESSAGE, payload))
    for watcher in watchers:
        rank, text = watcher.wait()
        assert rank == 1 and "was cut off: it sent" in text and words in text
        assert watcher.messages == []
    sock.close()
    at_once(*(lambda m=m: m.close(linger=0.1) for m in members))


@pytest.mark.parametrize("payload, words", [MALFORMED["tag cut off"], MALFORMED["long data"]])
def test_a_malformed_message_from_rank_0(payload, words):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        environment = Environment(rank=1, world_size=2, rendezvous=listener.getsockname(), secret=SECRET)

        def rank_0():
            sock, framing, welcome = pose_as_rank_0(listener)
            sock.sendall(welcome + framing.frame(Kind.FORMED, b"{}"))
            return sock, framing

        (sock, framing), member = at_once(rank_0, lambda: Rendezvous(environment))
        watcher = Watcher(member)
        sock.sendall(framing.frame(Kind.MESSAGE, payload))
        rank, text = watcher.wait()
        assert rank == 0 and "was cut off: it sent" in text and words in text
        sock.close()
        member.close()


def test_an_unauthenticated_connection_cannot_send():
    """Neither instead of a greeting nor to the rank that it claims to be."""
    job = Job(2)
    members = join(job.environment(0), job.environment(1))
    watchers = [Watcher(member) for member in members]
    for rank in (0, 1):
        with socket.create_connection(job.address, timeout=5) as sock:
            sock.sendall(Framing().frame(Kind.MESSAGE, pack_message(rank, "hello", b"from no rank")))
            while sock.recv(4096):
                continue  # its challenge, and then the end
    at_once(*(lambda m=m: m.barrier("still well") for m in members))
    assert [(watcher.messages, watcher.failures) for watcher in watchers] == [([], []), ([], [])]
    at_once(*(lambda m=m: m.close() for m in members))


@pytest.mark.parametrize("how", ["without a tag", "altered", "repeated"])
def test_messages_that_another_party_inserts_are_noticed(how):
    job = Job(2)
    with ThreadPoolExecutor(1) as pool:
        forming = pool.submit(Rendezvous, job.environment(0))
        sock, framing, _ = connect.connect(job.environment(1))
        member = forming.result(5)
    watcher = Watcher(member)
    good = framing.frame(Kind.MESSAGE, pack_message(0, "good", b"12345678901234567890"))
    sock.sendall(good)
    assert watcher.wait_messages(1) == [(1, "good", b"12345678901234567890")]
    if how == "without a tag":
        sock.sendall(Framing().frame(Kind.MESSAGE, pack_message(0, "bad", b"12345678901234567890")))
    elif how == "altered":
        frame = framing.frame(Kind.MESSAGE, pack_message(0, "good", b"12345678901234567890"))
        sock.sendall(frame.replace(b"good", b"evil"))
    else:
        sock.sendall(good)
    rank, text = watcher.wait()
    assert rank == 1 and "a frame that another party has altered or inserted" in text
    assert len(watcher.messages) == 1
    sock.close()
    member.close(linger=0)
