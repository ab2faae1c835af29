"""The rendezvous: how ranks learn that another one has died, failed or left; forks, and what is left afterwards."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from meeting import SECRET, SOON, Job, Watcher, at_once, group, join
from waiting import seconds_of, wait_for

from mlxdist.base import errors
from mlxdist.base.environment import Environment
from mlxdist.runtime.rendezvous import Rendezvous, connect
from mlxdist.runtime.rendezvous.protocol import Kind, pack_json

RANK = """
import os, sys, threading, time
from mlxdist.base.environment import Environment
from mlxdist.base.errors import Aborted
from mlxdist.runtime.rendezvous import Rendezvous
rendezvous = Rendezvous(Environment.read())
rendezvous.watch(lambda *news: None)
print("ready", flush=True)
stay = lambda: time.sleep(60)  # until the test ends it
{body}
"""


@contextlib.contextmanager
def rank_process(job, rank, body="stay()", **options):
    process = subprocess.Popen(
        [sys.executable, "-c", RANK.format(body=body)],
        env=job.variables(rank),
        stdout=subprocess.PIPE,
        text=True,
        **options,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, "exit"])
def test_the_death_of_a_rank_is_noticed_by_all(how):
    job = Job(3)
    body = "sys.exit(3)" if how == "exit" else "stay()"
    with rank_process(job, 2, body) as process:
        members = join(job.environment(0), job.environment(1))
        watchers = [Watcher(member) for member in members]
        process.stdout.readline()
        if how == "exit":
            process.wait(10)
        else:
            process.send_signal(how)
        text = (
            f"rank 2 ({socket.gethostname()}, pid {process.pid}) has died or closed its connection "
            f"[rank 2 on {socket.gethostname()}]"
        )
        assert [watcher.wait() for watcher in watchers] == [(2, text)] * 2
        with pytest.raises(errors.PeerLost, match="rank 2 .* has died"):
            members[1].barrier("next")
    at_once(*(lambda m=m: m.close() for m in members))
    assert [len(watcher.failures) for watcher in watchers] == [1, 1]


def test_the_death_of_rank_0_is_noticed():
    job = Job(2)
    body = "stay()"
    descriptor = job.listener.fileno()
    process = subprocess.Popen(
        [sys.executable, "-c", RANK.format(body=body)],
        env=job.variables(0) | {"MLXDIST_RENDEZVOUS_FD": str(descriptor)},
        pass_fds=[descriptor],
    )
    job.listener.close()
    member = Rendezvous(job.environment(1))
    watcher = Watcher(member)
    process.kill()
    process.wait()
    text = (
        f"rank 0 ({socket.gethostname()}, pid {process.pid}) has died or closed its connection "
        f"[rank 0 on {socket.gethostname()}]"
    )
    assert watcher.wait() == (0, text)
    member.close()


def test_a_death_ends_an_exchange():
    job = Job(2)
    with rank_process(job, 1) as process:
        [member] = join(job.environment(0))
        threading.Timer(0.2, process.kill).start()
        with pytest.raises(errors.PeerLost, match="rank 1"):  # not the job's Timeout
            member.barrier("ready")
    member.close()


def test_a_death_before_the_group_is_complete():
    job = Job(3)
    with ThreadPoolExecutor(1) as pool:
        forming = pool.submit(Rendezvous, job.environment(0))
        sock, _, _ = connect.connect(job.environment(1))
        sock.close()
        error = forming.exception(SOON)
    assert isinstance(error, errors.PeerLost)
    assert "rank 1" in str(error) and "before the group was complete" in str(error)


def test_what_happened_before_watch_is_reported_too():
    job = Job(2)
    with rank_process(job, 1) as process:
        [member] = join(job.environment(0))
        process.stdout.readline()
    assert wait_for(lambda: member.failure is not None)
    assert Watcher(member).wait()[0] == 1
    member.close()


@pytest.mark.parametrize("text", ["the disk is full", ""])
def test_a_rank_that_comes_after_a_failure_gets_its_cause(text):
    """Also where the program has given the failure no text."""
    with group(2) as members:
        assert members[1].report_failure(errors.Aborted(text))
        (late,) = join(members[1]._environment)
        assert isinstance(late, errors.RendezvousError) and f"the group has already failed: {text}" in str(late)


def test_goodbye_is_not_death():
    with group(3) as members:
        watchers = [Watcher(member) for member in members]
        members[1].close()
        for watcher in (watchers[0], watchers[2]):
            rank, text = watcher.wait_leave()
            assert rank == 1 and "has left the group (finalize)" in text
        assert [watcher.wait(0.1) for watcher in watchers] == [None] * 3
        with pytest.raises(errors.PeerLost, match=r"rank 1 .* has left the group \(finalize\)"):
            members[2].barrier("next")


def test_goodbye_ends_an_exchange_that_waits_for_it():
    with group(2) as members:
        threading.Timer(0.2, members[1].close).start()
        with pytest.raises(errors.PeerLost, match="has left the group"):
            members[0].barrier("next")


def test_goodbye_of_rank_0_is_not_death():
    with group(2) as members:
        watcher = Watcher(members[1])
        members[0].close(linger=0)
        assert watcher.wait_leave()[0] == 0
        assert watcher.wait(0.3) is None


def test_rank_0_stays_until_the_others_have_left():
    with group(2) as members:
        leaving = threading.Thread(target=members[0].close, kwargs={"linger": 20})
        leaving.start()
        leaving.join(0.3)
        assert leaving.is_alive()
        members[1].close()
        leaving.join(SOON)
        assert not leaving.is_alive()


def test_rank_0_serves_while_it_lingers():
    """It has left, but the others still hear of each other."""
    with group(3) as members:
        watcher = Watcher(members[2])
        leaving = threading.Thread(target=members[0].close)
        leaving.start()
        assert watcher.wait_leave()[0] == 0
        members[1].report_failure(errors.Aborted("out of luck"))
        assert watcher.wait() == (1, "out of luck")
        members[1].close()
        members[2].close()
        leaving.join(SOON)
        assert not leaving.is_alive()


def test_rank_0_does_not_stay_for_ever():
    with group(2) as members:
        assert 0.2 < seconds_of(members[0].close, linger=0.3)[0] < SOON


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("kind", [errors.Aborted, errors.ResourceError])
def test_an_announcement_reaches_all_others(rank, kind):
    with group(4) as members:
        watchers = [Watcher(member) for member in members]
        members[rank].report_failure(kind("rank such on host so: no memory"))
        for other in range(4):
            expected = None if other == rank else (rank, "rank such on host so: no memory")
            assert watchers[other].wait(SOON if expected else 0.2) == expected
        for member in members:
            with pytest.raises(kind, match="no memory"):
                member.barrier("next")


def test_an_announcement_has_been_passed_on_when_it_returns():
    """The process may end at once, in whatever way."""
    job = Job(3)
    with rank_process(job, 2, "rendezvous.report_failure(Aborted('this is why')); os._exit(1)"):
        members = join(job.environment(0), job.environment(1))
        watchers = [Watcher(member) for member in members]
        assert [watcher.wait(5) for watcher in watchers] == [(2, "this is why")] * 2
    at_once(*(lambda m=m: m.close() for m in members))


def test_only_the_first_failure_is_reported():
    with group(3) as members:
        watcher = Watcher(members[2])
        members[1].report_failure(errors.Aborted("first"))
        assert watcher.wait() == (1, "first")
        members[0].report_failure(errors.Aborted("second"))
        members[1].close()
        assert watcher.wait_leave()[0] == 1  # it comes after all that was reported before
        assert watcher.failures == [(1, "first")]


def test_a_long_announcement_is_cut():
    with group(2) as members:
        watcher = Watcher(members[1])
        members[0].report_failure(errors.Aborted('"\x00' * 500_000))
        rank, text = watcher.wait()
        assert rank == 0 and 1000 < len(text) <= 16384


def test_an_announcement_of_an_unknown_class_is_an_error_all_the_same():
    with group(2) as members:
        watcher = Watcher(members[1])
        members[0]._send_for_ack(Kind.REPORT_FAILURE, pack_json(error="SystemExit", text="from a later version"))
        assert watcher.wait() == (0, "from a later version")
        assert type(members[1].failure) is errors.Error


def test_the_first_failure_is_noted_for_the_launcher(tmp_path):
    note = tmp_path / "first_failure"
    job = Job(3)
    members = join(*(job.environment(rank, error_file=str(note)) for rank in range(3)))
    watchers = [Watcher(member) for member in members]
    members[2].report_failure(errors.Aborted("first"))
    assert watchers[0].wait() is not None
    members[0].report_failure(errors.Aborted("second"))
    assert note.read_text() == "2"
    at_once(*(lambda m=m: m.close() for m in members))


def test_the_first_failure_of_the_next_world_is_noted_too(tmp_path):
    note = tmp_path / "first_failure"
    job = Job(2)
    for first in range(2):
        members = join(*(job.environment(rank, error_file=str(note)) for rank in range(2)))
        assert not note.exists()
        members[first].report_failure(errors.Aborted("first"))
        assert note.read_text() == str(first)
        at_once(*(lambda m=m: m.close() for m in members))


def test_a_rank_that_has_left_a_failed_world_waits_for_the_next():
    job = Job(2)
    members = join(job.environment(0), job.environment(1))
    members[1].report_failure(errors.Aborted("failed"))
    members[1].close()
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(Rendezvous, job.environment(1))
        with pytest.raises(TimeoutError):
            following.result(0.3)
        members[0].close()
        next_members = [Rendezvous(job.environment(0)), following.result(30)]
    at_once(*(lambda m=m: m.close() for m in next_members))


def test_a_consequence_is_not_noted_as_first_failure(tmp_path):
    note = tmp_path / "first_failure"
    job = Job(2)
    members = join(*(job.environment(rank) for rank in range(1)), job.environment(1, error_file=str(note)))
    watcher = Watcher(members[0])
    members[1].report_failure(errors.Aborted("rank 0 has left"), consequence=True)
    assert watcher.wait() == (1, "rank 0 has left")
    assert not note.exists()
    at_once(*(lambda m=m: m.close() for m in members))


@pytest.mark.filterwarnings("ignore")
def test_a_callback_that_raises_is_reported_and_the_watch_goes_on(monkeypatch):
    reported = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, traceback: reported.append(error))
    with group(2) as members:
        left = threading.Event()
        members[1].watch(lambda rank, text: 1 / 0, lambda rank, text: left.set())
        members[0].report_failure(errors.Aborted("x"))
        members[0].close(linger=0)
        assert left.wait(SOON)
        assert [type(error) for error in reported] == [ZeroDivisionError]


def test_a_callback_must_not_call_back():
    with group(2) as members:
        raised = []

        def on_failure(rank, text):
            try:
                members[1].barrier("from the callback")
            except errors.Error as error:
                raised.append(error)

        members[1].watch(on_failure)
        members[0].report_failure(errors.Aborted("x"))
        assert wait_for(lambda: raised)
        assert "must not call the rendezvous" in str(raised[0])


# Ends.


def test_close_leaves_no_thread_and_no_descriptor():
    def descriptors():
        return len(os.listdir("/dev/fd"))

    with group(3):
        pass
    threads, before = threading.active_count(), descriptors()
    with group(3) as members:
        assert threading.active_count() == threads + 3
        at_once(*(lambda m=m: m.barrier("x") for m in members))
    assert (threading.active_count(), descriptors()) == (threads, before)


def test_after_close():
    with group(2) as members:
        members[1].close()
        members[1].close()
        members[1].report_failure(errors.Aborted("too late"))
        with pytest.raises(errors.Error, match="rank 1 has left the group already"):
            members[1].barrier("x")


def test_close_ends_an_exchange_of_another_thread():
    with group(2) as members:
        threading.Timer(0.2, members[1].close).start()
        with pytest.raises(errors.Error, match="rank 1 has left the group already"):
            members[1].barrier("x")


def test_a_program_without_close_ends_at_once_and_counts_as_dead():
    job = Job(2)
    with rank_process(job, 1, "") as process:
        [member] = join(job.environment(0))
        watcher = Watcher(member)
        assert process.wait(5) == 0
        assert watcher.wait()[0] == 1
    member.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_does_not_keep_its_rank_alive():
    job = Job(2)
    body = """
if os.fork() == 0:
    try:
        rendezvous.barrier("child")
    except Exception as error:
        print(error, flush=True)
    rendezvous.close()
    print("closed", flush=True)
stay()
"""
    with rank_process(job, 1, body, start_new_session=True) as process:
        [member] = join(job.environment(0))
        watcher = Watcher(member)
        assert process.stdout.readline() == "ready\n"
        assert "forked child of rank 1" in process.stdout.readline()
        assert process.stdout.readline() == "closed\n"
        assert watcher.wait(0.2) is None, "the child must not speak for its parent"
        process.kill()
        assert watcher.wait()[0] == 1
        os.killpg(process.pid, signal.SIGKILL)
    member.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.parametrize("finalized", [False, True])
def test_a_forked_child_does_not_keep_the_port(finalized):
    job = Job(2)
    descriptor = job.listener.fileno()
    body = f"""
if {finalized}:
    rendezvous.close()
if os.fork() == 0:
    print("forked", flush=True)
stay()
"""
    variables = job.variables(0) | {"MLXDIST_RENDEZVOUS_FD": str(descriptor)}
    command = [sys.executable, "-c", RANK.format(body=body)]
    with subprocess.Popen(
        command, env=variables, pass_fds=[descriptor], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        job.listener.close()
        member = Rendezvous(job.environment(1))
        Watcher(member)
        if finalized:
            member.close()
        assert [process.stdout.readline() for _ in range(2)] == ["ready\n", "forked\n"]
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(job.address, timeout=SOON)
        os.killpg(process.pid, signal.SIGKILL)
    member.close()


def test_a_descriptor_that_a_wrapper_has_closed():
    job = Job(2)
    read_end, write_end = os.pipe()
    try:
        with pytest.raises(errors.RendezvousError, match="a wrapper .* has closed it"):
            Rendezvous(replace(job.environment(1), rank=0, rendezvous_fd=read_end))
        os.fstat(read_end)  # it was not ours to close
    finally:
        os.close(read_end)
        os.close(write_end)
    job.listener.close()


def test_an_address_of_another_machine():
    with pytest.raises(errors.RendezvousError, match="not this machine's; MLXDIST_RENDEZVOUS must name"):
        Rendezvous(Environment(world_size=2, rendezvous=("192.0.2.1", 4711), secret=SECRET))


def test_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(errors.RendezvousError, match="another process listens there"):
            Rendezvous(Environment(world_size=2, rendezvous=taken.getsockname(), secret=SECRET))
