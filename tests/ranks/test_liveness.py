"""Slow differs from dead: a killed rank is an error on all within a second, one that is stopped or late loses nothing.

Times are those of a quiet machine. Where other programs may have had the cores, another attempt counts.
"""

import re
import signal
import socket
import subprocess
import sys

import pytest
from meeting import Job, Watcher, at_once, group, join
from waiting import late, wait_for

from mlxdist.base.errors import Error
from mlxdist.runtime.rendezvous import heartbeat, server
from mlxdist.runtime.rendezvous.heartbeat import (
    MAX_POSITION,
    PeerStatus,
    pack_peer_status,
    pack_position,
    unpack_peer_status,
    unpack_position,
)
from mlxdist.runtime.rendezvous.protocol import Kind, ProtocolError


def at(output: str, what: str) -> float:
    found = re.search(rf"^{what} at ([0-9.]+)", output, re.MULTILINE)
    assert found, f"no {what!r}:\n{output}"
    return float(found[1])


@pytest.mark.parametrize("dead", [0, 2])
def test_a_killed_rank_is_noticed_by_all_within_a_second(run_ranks, dead):
    outputs = run_ranks("liveness.py", 3, "killed", dead, status=128 + 9)
    for rank in {0, 1, 2} - {dead}:
        assert at(outputs[rank], "PeerLost") - at(outputs[dead], "dies") < 1
        assert f", of rank {dead}: rank {dead} (" in outputs[rank] and "has died" in outputs[rank]


def test_abort_ends_all_waits_within_100_ms(run_ranks):
    seconds = []
    for _ in range(3):
        outputs = run_ranks("liveness.py", 3, "aborts", status=1)
        assert all("of rank 2: rank 2 on " in output and "there is no point" in output for output in outputs)
        seconds.append(max(at(output, "Aborted") for output in outputs) - at(outputs[2], "aborts"))
        if seconds[-1] < 0.1:
            break
    assert min(seconds) < 0.1


@pytest.mark.long
@pytest.mark.parametrize("which, seconds", [(1, 2), (0, 2), (2, 8)])
def test_a_stopped_rank_that_resumes_loses_nothing_and_waiting_ranks_sleep(run_ranks, which, seconds):
    shares = []
    for _ in range(3):
        outputs = run_ranks("liveness.py", 3, "stopped", which, seconds)
        del outputs[which]
        waits = [re.search(r"longest wait ([0-9.]+) s with ([0-9.]+) of a core", output) for output in outputs]
        assert all(float(wait[1]) > seconds - 0.5 for wait in waits), outputs
        shares.append(max(float(wait[2]) for wait in waits))
        if shares[-1] < 0.05:
            break
    assert min(shares) < 0.05


@pytest.mark.long
def test_a_long_wait_names_the_awaited_rank_and_its_position(run_ranks):
    outputs = run_ranks("liveness.py", 2, "late", 4, environment={"MLXDIST_STALL_WARNING": "2.5"})
    notice = re.search(r"rank 1 on \S+ has waited \d+ s in all_sum #2 of float32 \[1000\] for rank 0, (.*)", outputs[1])
    where = r"which has not entered it \(it is between operations for \d\.\d s since all_sum #1 at liveness\.py:\d+\)"
    assert notice and re.fullmatch(where, notice[1])


# Heartbeats.


@pytest.fixture
def fast(monkeypatch):
    """Heartbeats in tests are 20 times as fast."""
    for module in (heartbeat, server):
        monkeypatch.setattr(module, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(heartbeat, "SILENT_SECONDS", 0.5)


def test_every_rank_receives_the_positions_of_the_others(fast):
    with group(3) as members:
        heard = [{} for _ in members]
        for rank, member in enumerate(members):
            member.watch(
                lambda *news: None,
                on_peer_status=lambda other, text, rank=rank: heard[rank].update({other: text}),
                position=lambda rank=rank: f"in step {rank}",
            )
        expected = [{other: f"in step {other}" for other in range(3) if other != rank} for rank in range(3)]
        assert wait_for(lambda: heard == expected), heard


def test_a_member_without_a_position_reports_none(fast):
    with group(2) as members:
        heard = []
        members[0].watch(lambda *news: None)
        beats = []
        members[1].watch(
            lambda *news: None,
            on_peer_status=lambda *news: heard.append(news),
            position=lambda: beats.append(0) or "here",
        )
        assert wait_for(lambda: len(beats) > 5)
        assert heard == []


RANK = """
import time
from mlxdist.base.environment import Environment
from mlxdist.runtime.rendezvous import Rendezvous, heartbeat, server
server.HEARTBEAT_SECONDS = heartbeat.HEARTBEAT_SECONDS = 0.05
heartbeat.SILENT_SECONDS = 0.5
rendezvous = Rendezvous(Environment.read())
rendezvous.watch(lambda *news: None, position=lambda: "in step 7")
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_rank_is_silent_and_no_failure(fast, stopped):
    job = Job(3)
    descriptor = job.listener.fileno()
    variables = job.variables(stopped) | ({"MLXDIST_RENDEZVOUS_FD": str(descriptor)} if stopped == 0 else {})
    process = subprocess.Popen(
        [sys.executable, "-c", RANK], env=variables, stdout=subprocess.PIPE, text=True, pass_fds=[descriptor]
    )
    try:
        if stopped == 0:
            job.listener.close()
            job.listener = None
        members = join(*(job.environment(rank) for rank in range(3) if rank != stopped))
        watchers, heard = [Watcher(member) for member in members], {}
        members[0].watch(lambda *news: watchers[0].failures.append(news), position=lambda: "here")
        members[1].watch(
            lambda *news: watchers[1].failures.append(news),
            on_peer_status=lambda rank, text: heard.update({rank: text}),
            position=lambda: "here",
        )
        assert wait_for(lambda: heard.get(stopped) == "in step 7"), heard
        process.send_signal(signal.SIGSTOP)
        silent = re.compile(r"silent for \d+ s: stopped, overloaded, or cut off from rank 0; before that in step 7")
        assert wait_for(lambda: silent.fullmatch(heard[stopped])), heard
        if stopped == 0:
            assert wait_for(lambda: "rank 0, which forwards them, is silent itself" in heard[1]), heard
        process.send_signal(signal.SIGCONT)
        assert wait_for(lambda: heard[stopped] == "in step 7"), heard
        assert [watcher.failures for watcher in watchers] == [[], []]
    finally:
        process.kill()
        process.communicate()
    at_once(*(lambda m=m: m.close(linger=0.2) for m in members))


@pytest.mark.skipif(sys.platform != "linux", reason="reads an option of Linux")
def test_a_connection_to_a_host_without_power_is_given_up_though_heartbeats_are_under_way():
    with group(2) as members:
        assert members[1]._connection.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000


def test_a_position_that_raises_is_reported_and_heartbeats_go_on(fast, monkeypatch):
    reported, heard = [], []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, traceback: reported.append(kind))
    with group(2) as members:
        members[0].watch(lambda *news: None, position=lambda: 1 / 0)
        members[1].watch(lambda *news: None, on_peer_status=lambda *news: heard.append(news), position=lambda: "here")
        assert wait_for(lambda: len(heard) >= 2)
        assert heard[0] == (0, "") and set(reported) == {ZeroDivisionError}


def test_heartbeats_end_with_the_group(fast):
    with group(2) as members:
        beats, ended = [], []
        for member in members:
            member.watch(lambda *news: ended.append(news), position=lambda: beats.append(0) or "here")
        assert wait_for(lambda: beats)
        members[0].report_failure(Error("enough"))
        assert wait_for(lambda: ended)  # the rank that reports it knows already

        def have_ended() -> bool:
            before = len(beats)
            late(0.2)
            return len(beats) == before

        assert wait_for(have_ended)


def peer(rank, age=1.0, position="in all_sum"):
    return PeerStatus(rank, "host", 4711, age, position, False)


def test_a_peer_status_is_unpacked_as_it_was_packed():
    peers = [peer(0, 0.5, ""), peer(1, 3.25, "in all_sum #4 – μ"), peer(2, None, "x" * MAX_POSITION)]
    assert unpack_peer_status(pack_peer_status(peers, 3, {2, 1})) == (dict(enumerate(peers)), 3, {1, 2})
    assert unpack_peer_status(pack_peer_status([], 3)) == ({}, 3, set())


def test_positions_are_cut_and_cannot_steer_a_terminal():
    assert len(pack_position("ä" * 1000)) == MAX_POSITION
    assert unpack_position(pack_position("ä" * 1000)) == "ä" * (MAX_POSITION // 2)
    assert unpack_position(b"\x1b[2Jhello\n\xff") == "?[2Jhello?\ufffd"


GOOD = pack_peer_status([peer(1)], 3)


@pytest.mark.parametrize(
    "payload",
    [
        GOOD[:-1],
        GOOD + b"{",
        b"[" * 100_000,
        b"\xff",
        pack_peer_status([peer(3)], 3),
        pack_peer_status([peer(1, -1.0)], 3),
        pack_peer_status([peer(1, float("nan"))], 3),
        GOOD.replace(b'"in all_sum"', b"7"),
    ],
    ids=["truncated", "more", "nested", "no text", "no such rank", "the future", "no age", "no position"],
)
def test_a_malformed_peer_status_is_rejected(payload):
    with pytest.raises(ProtocolError):
        unpack_peer_status(payload)


def test_a_rank_that_sends_a_long_position_is_cut_off():
    with group(2) as members:
        watcher = Watcher(members[0])
        members[1]._send(Kind.HEARTBEAT, b"x" * (MAX_POSITION + 1))
        rank, text = watcher.wait()
        assert rank == 1 and "was cut off: it sent a position of 257 bytes" in text
