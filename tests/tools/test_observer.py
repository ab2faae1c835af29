"""Observers of a job: what rank 0 shows to `mlxdist top`, to which clients, and that they do not disturb the job."""

import contextlib
import json
import socket
import threading
import time

import pytest
from meeting import SECRET, Job, at_once, group, join
from waiting import late, seconds_of, wait_for

from mlxdist.base import errors
from mlxdist.runtime.rendezvous import Rendezvous, heartbeat, observer, server
from mlxdist.runtime.rendezvous.authentication import Refused, authenticate, observer_secret
from mlxdist.runtime.rendezvous.observer import MAX_OBSERVERS, observe
from mlxdist.runtime.rendezvous.protocol import Framing, Kind


@pytest.fixture
def private(tmp_path, monkeypatch):
    """The private directory of rank 0, as the launcher makes it."""
    directory = tmp_path / "mlxdist-test" / "0"
    directory.mkdir(parents=True)
    monkeypatch.setenv("TMPDIR", str(directory))
    return directory


@pytest.fixture
def fast(monkeypatch):
    for module in (heartbeat, server):
        monkeypatch.setattr(module, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(heartbeat, "SILENT_SECONDS", 0.5)


def watch(members, **status):
    for rank, member in enumerate(members):
        record = status.get(f"rank_{rank}", json.dumps({"rank": rank, "wall_ns": time.time_ns()}).encode())
        member.watch(lambda *event: None, position=lambda rank=rank: f"in step {rank}", status=lambda r=record: r)


def wait_for_heartbeats(members):
    assert wait_for(lambda: all(m.last_heartbeat is not None for m in members[0]._server._members.values()))


def authenticated(sock, secret=None, role="observer"):
    framing, _ = authenticate(sock, secret or observer_secret(SECRET), role, b"{}", time.monotonic() + 20)
    return framing


def connect(address):
    sock = socket.create_connection(address, timeout=20)
    return sock, authenticated(sock)


@contextlib.contextmanager
def blocked(member):
    """The thread of this rank's rendezvous does nothing meanwhile."""
    reached, release = threading.Event(), threading.Event()
    member._loop.call(lambda: reached.set() or release.wait(60))
    assert reached.wait(10)
    try:
        yield
    finally:
        release.set()


def is_closed(sock, seconds=5.0):
    sock.settimeout(seconds)
    try:
        while sock.recv(65536):
            continue
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


def assert_well(members):
    results = at_once(*(lambda m=m: m.all_gather(b"x", "still well") for m in members))
    assert results == [[b"x"] * len(members)] * len(members)
    assert [member.failure for member in members] == [None] * len(members)


def test_an_observer_gets_what_rank_0_knows_and_a_record_of_each_rank(private, fast):
    with group(3) as members:
        watch(members)
        wait_for_heartbeats(members)
        seconds, found = seconds_of(observe, private, 20)
        assert seconds < 10, "rank 0 ends it, not the deadline"
        assert (found.size, found.requested, found.notes(5)) == (3, {0, 1, 2}, [])
        assert {rank: record["rank"] for rank, record in found.records.items()} == {0: 0, 1: 1, 2: 2}
        assert {rank: found.members[rank].position for rank in range(3)} == {
            rank: f"in step {rank}" for rank in range(3)
        }
        assert {member.host for member in found.members.values()} == {socket.gethostname()}
        assert (private / ".mlxdist-rendezvous").stat().st_mode & 0o777 == 0o600
        assert_well(members)
    assert list(private.iterdir()) == []


def test_the_time_of_a_record_is_that_of_the_observer(private, fast):
    """Another host's clock may be a year ahead, or behind."""
    with group(2) as members:
        year = 365 * 86400 * 10**9
        records = [json.dumps({"wall_ns": time.time_ns() + sign * year}).encode() for sign in (-1, 1)]
        watch(members, rank_0=records[0], rank_1=records[1])
        wait_for_heartbeats(members)
        begin, found, end = time.time_ns(), observe(private, 5), time.time_ns()
        assert all(begin <= record["wall_ns"] <= end for record in found.records.values())


def test_a_rank_that_does_not_respond(private, fast):
    with group(3) as members:
        watch(members)
        wait_for_heartbeats(members)
        with blocked(members[1]):
            found = observe(private, 0.3)
            assert sorted(found.records) == [0, 2]
            assert found.notes(0.3)[0].startswith("rank 1 has not responded for 0.3 s")
            late(0.6)  # it is silent now: it gets no request, and the observer does not wait for it
            seconds, found = seconds_of(observe, private, 20)
            assert seconds < 10 and (sorted(found.records), found.requested) == ([0, 2], {0, 2})
            assert "before that in step 1" in found.members[1].describe()


@pytest.mark.parametrize("status", [b"", b"x" * (2**18 + 1)], ids=["none", "too long"])
def test_a_rank_without_a_record(private, fast, status):
    with group(2) as members:
        watch(members, rank_1=status)
        wait_for_heartbeats(members)
        found = observe(private, 5)
        assert (sorted(found.records), found.notes(5)) == ([0], [])
        assert_well(members)


def test_a_job_that_is_not_complete_yet(private):
    job = Job(3, timeout=1.5)
    forming, found = at_once(
        lambda: join(job.environment(0), job.environment(1)), lambda: late(0.5) or observe(private, 1)
    )
    assert all(isinstance(result, errors.RendezvousError) for result in forming)
    assert found.notes(1) == ["rank 2 has not reached mlxdist.init()"] and found.records == {}
    assert found.members[1].describe() == "has not returned from mlxdist.init()"


def test_a_rank_that_has_left_and_one_that_fails(private, fast):
    with group(3) as members:
        watch(members)
        wait_for_heartbeats(members)
        members[2].close()
        members[1].report_failure(errors.Aborted("no memory"))
        found = observe(private, 5)
        assert sorted(found.records) == [0, 1] and found.members[2].is_gone


@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"host": "127.0.0.1", "port": "x", "secret": "00"}'])
def test_a_file_that_is_none(private, text):
    if text is not None:
        (private / ".mlxdist-rendezvous").write_text(text)
    assert observe(private, 1) is None


def test_an_address_where_rank_0_is_not(private):
    with socket.create_server(("127.0.0.1", 0)) as other:
        fields = {"host": "127.0.0.1", "port": other.getsockname()[1], "secret": "00" * 32}
        (private / ".mlxdist-rendezvous").write_text(json.dumps(fields))
        seconds, found = seconds_of(observe, private, 0.2)
        assert found is None and seconds < 10


# What an observer cannot do.


def test_the_secret_of_observers_admits_no_rank():
    job = Job(2)
    members = join(job.environment(0), job.environment(1))
    for role in ("rank", "rank 0", ""):
        with socket.create_connection(job.address, timeout=5) as sock, pytest.raises(Refused, match="not this job's"):
            authenticated(sock, role=role)
    with socket.create_connection(job.address, timeout=5) as sock, pytest.raises(Refused, match="not this job's"):
        authenticated(sock, SECRET)
    with pytest.raises(errors.RendezvousError, match="MLXDIST_SECRET is not this job's"):
        Rendezvous(job.environment(1, secret=observer_secret(SECRET)))
    assert SECRET not in observer_secret(SECRET)
    assert_well(members)
    at_once(*(lambda m=m: m.close() for m in members))


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("secured", [True, False])
def test_an_observer_that_sends_is_cut_off(fast, kind, secured):
    with group(2) as members:
        watch(members)
        wait_for_heartbeats(members)
        with blocked(members[1]):  # so that the connection is not over before
            sock, framing = connect(members[0]._environment.rendezvous)
            sock.sendall((framing if secured else Framing()).frame(kind, b'{"error": "Error", "text": "t"}'))
            assert is_closed(sock)
        assert_well(members)


def test_observers_are_few_and_their_time_is_limited(fast, monkeypatch):
    monkeypatch.setattr(observer, "OBSERVER_SECONDS", 60.0)
    monkeypatch.setattr(heartbeat, "SILENT_SECONDS", 60.0)
    with group(2) as members:
        watch(members)
        wait_for_heartbeats(members)
        with blocked(members[1]):
            socks = [connect(members[0]._environment.rendezvous)[0] for _ in range(MAX_OBSERVERS)]
            with pytest.raises(Refused, match="too many observers"):
                connect(members[0]._environment.rendezvous)
            assert not is_closed(socks[0], 0.2)
            for one in members[0]._server._observers._observers:
                one.deadline = 0.0
            assert all(is_closed(sock, 10) for sock in socks)
            sock, _ = connect(members[0]._environment.rendezvous)
            sock.close()
        assert_well(members)


def test_many_observers_one_after_the_other(private, fast):
    with group(2) as members:
        watch(members)
        wait_for_heartbeats(members)
        for _ in range(8):
            assert sorted(observe(private, 5).records) == [0, 1]
        assert wait_for(lambda: not members[0]._server._observers._observers)
        assert_well(members)


def test_a_status_that_raises_is_reported_and_the_job_goes_on(private, fast, monkeypatch):
    reported = []
    monkeypatch.setattr("sys.excepthook", lambda kind, error, traceback: reported.append(kind))
    with group(2) as members:
        for member in members:
            member.watch(lambda *event: None, position=lambda: "here", status=lambda: b"" + 1)
        wait_for_heartbeats(members)
        assert observe(private, 5).records == {} and reported == [TypeError] * 2
        assert_well(members)
