"""The launcher's standard input on its way to the ranks."""

import os
import selectors
import subprocess

import pytest
from launching import nothing_left, python, running  # noqa: F401

from mlxdist.launch import standard_input
from mlxdist.launch.standard_input import Feed, Pipe


@pytest.fixture
def feed():
    """A feed, what it says, and a function that adds a reader and returns the end that a rank would read from."""
    said = []
    feed = Feed(selectors.DefaultSelector(), said.append)
    ends = []

    def add(name):
        source, target = os.pipe()
        ends.append(os.fdopen(source, "rb", buffering=0))
        feed.add(Pipe(name, target))
        return ends[-1]

    yield feed, said, add
    feed.close()
    for end in ends:
        end.close()


def test_every_reader_gets_all_at_its_own_pace(feed):
    feed, said, add = feed
    fast, slow = add("fast"), add("slow")
    taken = b""
    chunks = [bytes([i]) * 10_000 for i in range(50)]
    for chunk in chunks:
        assert feed.wants_more
        feed.put(chunk)
        taken += fast.read(len(chunk))
        feed.push_all()
    feed.put(b"")
    assert taken == b"".join(chunks) and fast.read(1) == b""
    late = b""
    while data := slow.read(65536):
        late += data
        feed.push_all()
    assert late == taken and said == [] and not feed.has_readers


def test_nothing_is_read_while_all_readers_lag(feed):
    feed, said, add = feed
    readers = [add("one"), add("other")]
    while feed.wants_more:
        feed.put(b"x" * 10_000)
    readers[0].read(65536)
    feed.push_all()
    assert feed.wants_more or readers[0].read(65536)


def test_a_reader_that_has_gone_is_dropped(feed):
    feed, said, add = feed
    gone, there = add("gone"), add("there")
    gone.close()
    feed.put(b"hello")
    assert there.read(5) == b"hello"
    there.close()
    feed.put(b"hello")
    assert not feed.has_readers and not feed.wants_more and said == []


def test_what_waits_is_bounded(feed, monkeypatch):
    monkeypatch.setattr(standard_input, "MAX_BEHIND", 1 << 20)
    feed, said, add = feed
    fast, never = add("rank 0"), add("rank 1")
    for _ in range(200):
        feed.put(b"x" * 10_000)
        assert len(fast.read(10_000)) == 10_000
    assert said == ["rank 1 has left 1 MiB of the standard input unread; it gets no more"]
    assert len(never.read(1 << 20)) < 1 << 20 and never.read(1) == b""


def test_one_who_comes_after_the_end_finds_it(feed):
    feed, said, add = feed
    feed.put(b"")
    assert add("late").read(1) == b""


def test_a_rank_that_does_not_read_delays_no_other():
    program = "import sys\nif rank == 0: sys.stdin.close()\nelif rank == 1: print(len(sys.stdin.read()))\n"
    program += "else: late(0.5)\nprint('done')"
    job = python(3, program, stdin=None, input=b"x" * 5_000_000)
    assert job.returncode == 0 and sorted(job.stdout.splitlines()) == [
        b"[0] done",
        b"[1] 5000000",
        b"[1] done",
        b"[2] done",
    ]


@pytest.mark.parametrize("choice", ["all", pytest.param("0", marks=pytest.mark.long)])
def test_a_restart_goes_on_reading(choice):
    program = "print('ready', flush=True)\nif rank == 0: print('got', os.read(0, 100).decode(), end='')\n"
    program += "raise SystemExit(rank == 0 and os.environ['MLXDIST_RESTART_COUNT'] == '0')"
    options = ["--max-restarts", "1", "--stdin", choice]
    with running(2, program, options, stdin=subprocess.PIPE) as job:
        job.stdin.write("one\n")
        job.stdin.flush()
        lines = [job.stdout.readline() for _ in range(3)]
        assert "[0] got one\n" in lines and lines.count("[0] ready\n") + lines.count("[1] ready\n") == 2
        job.stdin.write("two\n")
        job.stdin.flush()
        assert job.stdout.readline() == "[0] got two\n"
        assert job.wait(10) == 0


def test_an_end_of_input_that_only_the_first_start_saw():
    program = "import sys; sys.stdin.read(); raise SystemExit(os.environ['MLXDIST_RESTART_COUNT'] == '0')"
    job = python(2, program, options=["--max-restarts", "1"])
    assert job.returncode == 0 and job.stderr.count(b"mlxdist launch: ") == 1
