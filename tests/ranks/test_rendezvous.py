"""The rendezvous: what the ranks exchange, and who is missing."""

import errno
import os
import socket
import sys
import threading
from dataclasses import replace

import pytest
from meeting import SOON, Job, at_once, group, join
from waiting import late as sleep_late
from waiting import seconds_of

from mlxdist.base import errors
from mlxdist.runtime.rendezvous import Rendezvous, connect
from mlxdist.runtime.rendezvous.protocol import GATHER, MAX_GATHER_BYTES, Kind

# Exchanging.


@pytest.mark.parametrize("size", [2, 3, 8])
def test_all_gather_in_rank_order(size):
    with group(size) as members:
        for step in range(3):
            blobs = [bytes([rank, step]) * rank for rank in range(size)]
            results = at_once(*(lambda r=r: members[r].all_gather(blobs[r], "blobs") for r in range(size)))
            assert results == [blobs] * size


def test_all_gather_of_the_largest_blob():
    with group(2) as members:
        blobs = [os.urandom(MAX_GATHER_BYTES), os.urandom(MAX_GATHER_BYTES)]
        assert at_once(*(lambda r=r: members[r].all_gather(blobs[r], "large") for r in range(2))) == [blobs] * 2


def test_a_blob_that_is_too_large_is_rejected_before_anything_is_sent():
    with group(2) as members:
        with pytest.raises(errors.InvalidArgument, match="1047553 bytes"):
            members[1].all_gather(b"x" * (MAX_GATHER_BYTES + 1), "large")
        assert at_once(*(lambda m=m: m.all_gather(b"", "next") for m in members)) == [[b"", b""]] * 2


def test_barrier_waits_for_the_last():
    with group(2) as members:
        entered = threading.Event()

        def late():
            sleep_late(0.2)
            entered.set()
            members[1].barrier("b")

        def early():
            members[0].barrier("b")
            return entered.is_set()

        assert at_once(early, late)[0] is True


def test_ipv6():
    if not socket.has_ipv6:
        pytest.skip("this Python has no IPv6")
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    with group(2, host="::1") as members:
        assert at_once(*(lambda m=m: m.all_gather(b"6", "v6") for m in members)) == [[b"6", b"6"]] * 2


def test_rank_0_may_start_late_and_bind_itself():
    job = Job(2)
    job.listener.close()
    job.listener = None

    def late():
        sleep_late(0.3)
        return Rendezvous(job.environment(0))

    members = at_once(late, lambda: Rendezvous(job.environment(1)))
    assert at_once(*(lambda m=m: m.all_gather(b"", "late") for m in members)) == [[b"", b""]] * 2
    at_once(*(lambda m=m: m.close() for m in members))


def test_a_mac_that_may_not_use_the_local_network(monkeypatch):
    """macOS answers as where there is no route; so it does here."""
    job = Job(2, timeout=0.1)
    words = "; if /usr/bin/nc or ping reaches it, macOS keeps this program from the local network"

    def refuse(sock, address):
        raise OSError(errno.EHOSTUNREACH, os.strerror(errno.EHOSTUNREACH))

    monkeypatch.setattr(socket.socket, "connect", refuse)
    with pytest.raises(errors.RendezvousError, match=r"No route to host\)") as without:
        connect.connect(job.environment(1))
    assert words not in str(without.value)
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(errors.RendezvousError, match="System Settings > Privacy & Security > Local Network") as found:
        connect.connect(job.environment(1))
    assert words in str(found.value)
    job.listener.close()


def test_the_port_can_be_used_again_at_once():
    with group(2) as members:
        environments = [replace(member._environment, rendezvous_fd=None) for member in members]
    again = join(*environments)
    assert at_once(*(lambda m=m: m.all_gather(b"", "again") for m in again)) == [[b"", b""]] * 2
    at_once(*(lambda m=m: m.close() for m in again))


def test_a_rank_that_has_left_waits_for_the_next_world():
    """Rank 0 still serves the world before, in which that rank had a place."""
    job = Job(2)
    before = join(*(job.environment(rank) for rank in range(2)))
    before[1].close()

    def leave_late():
        sleep_late(0.2)
        before[0].close()
        return Rendezvous(job.environment(0))

    members = at_once(leave_late, lambda: Rendezvous(job.environment(1)))
    assert at_once(*(lambda m=m: m.all_gather(b"", "next") for m in members)) == [[b"", b""]] * 2
    at_once(*(lambda m=m: m.close() for m in members))


def test_other_steps_are_an_error_on_every_rank():
    with group(3) as members:
        steps = ["addresses", "addresses", "ready"]
        results = at_once(*(lambda r=r: members[r].all_gather(b"", steps[r]) for r in range(3)))
        for result in results:
            assert isinstance(result, errors.Mismatch)
            assert "rank 0 is at 'addresses' while rank 2 is at 'ready'" in str(result)


def test_a_late_rank_is_named_on_all_others():
    with group(3, timeout=0.5) as members:
        waits = [lambda member=member: member.barrier("ready") for member in members[:2]]
        seconds, results = seconds_of(at_once, *waits)
        assert seconds < SOON
        for result in results:
            assert isinstance(result, errors.Timeout)
            assert "rank 2 (" in str(result) and "'ready'" in str(result) and "0.5 s" in str(result)
        with pytest.raises(errors.Timeout):
            members[2].barrier("ready")


def test_a_member_that_does_not_read_delays_no_other():
    job = Job(3)

    def deaf():
        sock, framing, _ = connect.connect(job.environment(2))
        sock.sendall(framing.frame(Kind.GATHER, GATHER.pack(0, 1) + b"x" + b"z" * MAX_GATHER_BYTES))
        return sock

    sock, *members = at_once(deaf, *(lambda r=r: Rendezvous(job.environment(r)) for r in range(2)))
    blobs = [b"0" * MAX_GATHER_BYTES, b"1" * MAX_GATHER_BYTES]
    results = at_once(*(lambda r=r: members[r].all_gather(blobs[r], "x") for r in range(2)))
    assert [len(result) for result in results] == [3, 3], results
    sock.close()
    at_once(*(lambda m=m: m.close(linger=0.1) for m in members))


# Who is missing.


def test_missing_ranks_are_named_on_every_rank_that_is_there():
    job = Job(5, timeout=0.6)
    seconds, results = seconds_of(join, *(job.environment(rank) for rank in (0, 1, 4)))
    assert seconds < SOON
    for result in results:
        assert isinstance(result, errors.RendezvousError)
        assert "ranks 2 and 3 of 5 have not connected to 127.0.0.1:" in str(result)
        assert "after 0.6 s" in str(result)


def test_one_missing_rank():
    job = Job(2, timeout=0.3)
    [result] = join(job.environment(0))
    assert "rank 1 of 2 has not connected" in str(result)


def test_missing_rank_0_is_named():
    job = Job(3, timeout=0.4)
    job.listener.close()
    for rank, result in zip((1, 2), join(job.environment(1), job.environment(2))):
        assert isinstance(result, errors.RendezvousError)
        assert f"rank {rank} of 3" in str(result) and "rank 0" in str(result) and "0.4 s" in str(result)
        assert "refused" in str(result)


def test_a_rank_0_that_never_accepts_connections():
    job = Job(2, timeout=0.4)
    [result] = join(job.environment(1))
    job.listener.close()
    assert isinstance(result, errors.RendezvousError) and "silent" in str(result)
