"""The rendezvous: a connection that the network cuts is made again; a rank that is silent everywhere is lost."""

import contextlib
import errno
import itertools
import re
import socket
import time
from dataclasses import replace

import pytest
from meeting import SOON, Job, Watcher, at_once, join
from proxy import Proxy
from waiting import late, wait_for

from mlxdist.base import errors
from mlxdist.runtime.rendezvous import connect, heartbeat, outage, server
from mlxdist.runtime.rendezvous.event_loop import Connection, EventLoop
from mlxdist.runtime.rendezvous.outage import SignsOfLife, is_outage
from mlxdist.runtime.rendezvous.protocol import Kind, ProtocolError


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    """A silence of 0.5 s counts, and 2 s are a loss."""
    for module in (heartbeat, server, outage):
        monkeypatch.setattr(module, "HEARTBEAT_SECONDS", 0.05)
    for module in (heartbeat, outage):
        monkeypatch.setattr(module, "SILENT_SECONDS", 0.5)
    monkeypatch.setattr(outage, "LOST_SECONDS", 2.0)
    monkeypatch.setattr(connect, "RECONNECT_SECONDS", 0.05)


class Pair:
    """Ranks 0 and 1, between them a proxy."""

    def __init__(self, proxy, members, data_flows):
        self.proxy, self.members = proxy, members
        self.heard = [[], []]  # positions of the other rank
        self.watchers = [Watcher(member) for member in members]
        counts = itertools.count()
        for rank, member in enumerate(members):
            watcher = self.watchers[rank]
            member.watch(
                lambda *news, watcher=watcher: watcher._add(watcher.failures, news),
                on_message=lambda *news, watcher=watcher: watcher._add(watcher.messages, news),
                on_peer_status=lambda other, text, rank=rank: self.heard[rank].append(text),
                position=lambda rank=rank: f"in step {rank}",
                signs_of_life=lambda rank: next(counts) if data_flows else 7,
            )
        assert wait_for(lambda: all(self.heard))

    def cut(self):
        """The network goes away until each side has missed the other, and its connection ends."""
        self.proxy.stall()
        zero, one = self.members
        assert wait_for(lambda: zero._server._members[1].was_silent and one._signs.is_silent)
        self.proxy.reset()

    def must_go_on(self):
        assert at_once(*(lambda m=m: m.barrier("afterwards") for m in self.members)) == [None] * 2

    def is_cut(self):
        return self.members[1]._is_cut and not self.members[0]._server._members[1].connection.is_open


@contextlib.contextmanager
def pair(data_flows=True, **changes):
    job = Job(2)
    with Proxy(job.address) as proxy:
        members = join(job.environment(0, **changes), job.environment(1, rendezvous=proxy.address, **changes))
        try:
            yield Pair(proxy, members, data_flows)
        finally:
            proxy.resume()
            at_once(*(lambda m=member: m.close(linger=0.2) for member in members))


def test_a_cut_connection_is_made_again_and_nothing_is_lost_or_doubled(capfd):
    with pair() as ranks:
        for part in range(3):
            for rank, member in enumerate(ranks.members):
                member.send(1 - rank, f"{part}", b"before")
            if part == 1:  # what follows is under way, or not even sent, when it is cut
                ranks.proxy.stall()
        ranks.cut()
        assert wait_for(ranks.is_cut)
        for rank, member in enumerate(ranks.members):
            member.send(1 - rank, "meanwhile", b"")
        ranks.proxy.resume()
        gathered = at_once(*(lambda m=m, r=r: m.all_gather(bytes([r]), "x") for r, m in enumerate(ranks.members)))
        assert gathered == [[b"\0", b"\1"]] * 2
        expected = [(f"{part}", b"before") for part in range(3)] + [("meanwhile", b"")]
        for rank, watcher in enumerate(ranks.watchers):
            assert watcher.wait_messages(4) == [(1 - rank, *message) for message in expected]
        assert [watcher.failures for watcher in ranks.watchers] == [[], []]
    said = capfd.readouterr().err
    assert said.count("is cut after") == said.count("is connected again") == 2, said


def test_a_barrier_during_an_outage_waits_for_its_end():
    with pair(rendezvous_timeout=0.3) as ranks:
        ranks.cut()
        assert wait_for(ranks.is_cut)

        def back():
            late(1)  # more than three times the timeout
            ranks.proxy.resume()

        results = at_once(*(lambda m=m: m.barrier("x") for m in ranks.members), back)
        assert results == [None] * 3
        assert [watcher.failures for watcher in ranks.watchers] == [[], []]


def test_several_outages_one_after_the_other():
    with pair() as ranks:
        for number in range(3):
            ranks.cut()
            ranks.proxy.resume()
            assert at_once(*(lambda m=m, n=number: m.barrier(f"{n}") for m in ranks.members)) == [None] * 2
        assert ranks.members[0]._server._members[1].epoch == ranks.members[1]._epoch >= 3


def test_a_rank_that_is_silent_on_the_data_path_too_is_lost():
    with pair(data_flows=False) as ranks:
        ranks.cut()
        for rank, watcher in enumerate(ranks.watchers):
            lost, text = watcher.wait(2 * SOON)
            assert lost == 1 - rank
            assert re.search(r"has been silent for \d s on its control connection and [23] s on the data path", text)
            assert "died" not in text


def test_an_exit_that_the_launcher_has_seen_ends_an_outage(tmp_path):
    note = tmp_path / "first"
    with pair(error_file=str(note)) as ranks:
        ranks.cut()
        assert wait_for(ranks.is_cut)
        (tmp_path / "first.ended-1").write_text("137")
        lost, text = ranks.watchers[0].wait()
        assert lost == 1 and "has ended with exit status 137" in text


def test_a_reset_without_silence_is_a_death():
    with pair() as ranks:
        ranks.proxy.reset()
        assert [watcher.wait()[0] for watcher in ranks.watchers] == [1, 0]
        assert all("has died or closed its connection" in watcher.failures[0][1] for watcher in ranks.watchers)


@pytest.mark.parametrize(
    "error, was_silent, expected",
    [
        (None, True, False),
        (ConnectionResetError(errno.ECONNRESET, "reset"), False, False),
        (ConnectionResetError(errno.ECONNRESET, "reset"), True, True),
        (TimeoutError(errno.ETIMEDOUT, "timed out"), False, True),
        (OSError(errno.EHOSTUNREACH, "no route"), False, True),
        (ProtocolError("nonsense"), True, False),
    ],
)
def test_what_counts_as_an_outage(error, was_silent, expected):
    assert is_outage(error, was_silent) is expected


def resume(ranks, **changes):
    """Greets rank 0 as rank 1 that comes again; ``changes`` to what it says."""
    environment = replace(ranks.members[1]._environment, rendezvous=ranks.members[0]._environment.rendezvous)
    fields = {"epoch": 1, "received": 0} | changes
    return connect._attempt(environment, SOON, time.monotonic() + SOON, **fields)


def test_a_resumption_needs_the_secret():
    with pair() as ranks:
        environment = replace(ranks.members[1]._environment, secret=b"\x11" * 32)
        with pytest.raises(errors.RendezvousError, match="MLXDIST_SECRET is not this job's"):
            connect.reconnect(environment, 0, 0, ranks.members[1]._stopped)
        ranks.must_go_on()


@pytest.mark.parametrize("received", [-1, 1000, 2**80])
def test_a_resumption_that_acknowledges_what_was_not_sent_is_rejected(received):
    with pair() as ranks:
        with pytest.raises((errors.RendezvousError, OSError)):
            resume(ranks, received=received)
        ranks.must_go_on()


def test_another_process_cannot_resume(monkeypatch):
    with pair() as ranks:
        monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
        with pytest.raises(errors.RendezvousError, match="it is not of this group any more"):
            resume(ranks)
        ranks.must_go_on()


def test_an_attempt_that_was_given_up_replaces_nothing():
    with pair() as ranks:
        ranks.members[0]._server._members[1].epoch = 5
        with pytest.raises(OSError):
            resume(ranks, epoch=5)
        ranks.must_go_on()


def test_frames_are_kept_until_they_are_acknowledged():
    loop = EventLoop(lambda error: None)
    ends = socket.socketpair()
    sender, receiver = (Connection(loop, end) for end in ends)
    taken = []
    receiver.on_frame = lambda kind, payload: taken.append((kind, payload))
    sender.send(Kind.MESSAGE, b"12345")
    sender.send(Kind.HEARTBEAT, b"not kept")
    assert sender.unacknowledged == 5
    receiver.read()
    assert taken == [(Kind.MESSAGE, b"12345"), (Kind.HEARTBEAT, b"not kept")] and receiver.received == 1
    sender.read()
    assert sender.unacknowledged == 0
    for number in (0, 2):
        with pytest.raises(ProtocolError):
            sender.acknowledge(number)
    sender.close()
    receiver.close()


def test_signs_of_life_on_the_data_path_count_only_while_they_change(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(outage.time, "monotonic", lambda: now[0])
    signs, count = SignsOfLife(), [7]
    for second in range(1, 10):
        now[0] = second
        count[0] += second < 4
        signs.probe(lambda: count[0])
        assert signs.is_lost == (second >= 3 + outage.MIN_PROBES), second
    assert str(signs) == "has been silent for 9 s on its control connection and 6 s on the data path"
    signs.heard()
    assert not signs.is_lost
