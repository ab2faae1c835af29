"""`mlxdist top`: what the ranks of a job do while they do it, and what it costs them."""

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner
from launching import Terminal, nothing_left, running  # noqa: F401  (nothing_left is a fixture of every test)
from rich.console import Console
from waiting import wait_for

from mlxdist import set_step
from mlxdist.base.errors import InvalidArgument
from mlxdist.cli import top as command
from mlxdist.cluster.facts.memory import total_memory
from mlxdist.launch.jobs import find_job, read_job
from mlxdist.runtime.diagnostics.flight_records import check_record
from mlxdist.runtime.diagnostics.memory import RankMemory
from mlxdist.runtime.observation.memory import HostMemory
from mlxdist.runtime.observation.stragglers import RankState
from mlxdist.runtime.observation.view import View
from mlxdist.runtime.rendezvous.observer import observe
from mlxdist.tools.observe.collect import JobRanks
from mlxdist.tools.observe.top import Watch
from mlxdist.tools.observe.top_table import Screenful, rank_table

TOP = [sys.executable, "-m", "mlxdist", "top"]

# Rank 1 comes to no more operations once it has done three, rank 0 waits for it.
LATE = """
import sys, numpy, mlxdist
mlxdist.init()
for step in range(3):
    mlxdist.all_sum(numpy.ones(100_000, numpy.float32))
{step}
print('ready', flush=True)
if rank == 1: stay()
mlxdist.all_sum(numpy.ones(100_000, numpy.float32))
"""
# All go on, one operation after another.
BUSY = """
import mlx.core as mx, numpy, mlxdist
mlxdist.init()
held = mx.ones(1 << 20)
mx.eval(held)
x = numpy.ones(100_000, numpy.float32)
for _ in range(20): mlxdist.all_sum(x)
print('ready', flush=True)
while True: mlxdist.all_sum(x)
"""


def top(*arguments):
    return subprocess.run([*TOP, *arguments], capture_output=True, text=True, timeout=60)


@pytest.fixture(autouse=True)
def records(monkeypatch):
    monkeypatch.delenv("MLXDIST_FLIGHT_DIR", raising=False)


def end(job):
    job.terminate()
    job.communicate(timeout=20)


@pytest.mark.long
def test_a_rank_that_others_wait_for_is_a_straggler():
    with running(2, LATE.format(step="if rank == 0: mlxdist.set_step(5, 100)")) as job:
        ranks = JobRanks(find_job().name)
        watch = Watch(ranks)
        assert wait_for(lambda: watch.refresh(5).ranks[1].is_straggler, 20)
        waits, late = watch.refresh(5).ranks
        assert (waits.step, waits.total_steps, waits.operation, waits.waiting_on) == (5, 100, "all_sum #4", 1)
        assert (late.step, late.operations, late.operation, late.in_operation) == (None, 3, "all_sum #3", False)
        assert (waits.is_straggler, late.is_straggler, waits.gbps) == (False, True, 0.0) and late.elapsed > 0
        shown = top("--once")
        assert shown.returncode == 0 and "\x1b" not in shown.stdout
        title, sentence, *table = shown.stdout.splitlines()
        assert title.startswith("job ") and sentence.startswith("Rank 1 computes since all_sum #3")
        header, first, second = map(str.split, table)
        assert header[:5] == ["rank", "host", "pid", "step", "operation"]
        assert first[3:6] == ["5/100", "all_sum", "#4"] and first[-2:] == ["rank", "1"]
        assert second[3:7] == ["#3", "after", "all_sum", "#3"] and second[-1] == "straggler"
        end(job)


def test_what_is_sent_and_received_and_the_memory():
    with running(2, BUSY) as job:
        view = json.loads(top("--once", "--json", "--interval", "0.3").stdout)
        assert [row["gbps"] > 0 and row["operations"] > 1 for row in view["ranks"]] == [True, True]
        memories = [row["memory"] for row in view["ranks"]]
        for memory in memories:
            assert 4 << 20 <= memory["active"] <= memory["peak"] and 4 << 20 < memory["private"] <= memory["resident"]
        ((_, together),) = view["memory"].items()
        assert together["ranks"] == [0, 1] and together["used"] == sum(memory["private"] for memory in memories)
        assert memories[0]["resident"] < memories[0]["total"] == together["total"] == total_memory()
        end(job)


def test_rank_0_forwards_a_small_record_of_each_rank_and_nothing_is_written():
    """A full record of the same rank has hundreds of kilobytes."""
    with running(2, BUSY) as job:
        found = find_job()
        observation = observe(Path(read_job(found.directory).temporary, "0"), 10)
        assert (observation.size, observation.requested, observation.notes(10)) == (2, {0, 1}, [])
        assert [observation.members[rank].pid for rank in range(2)] == [found.pids[0], found.pids[1]]
        assert all(len(json.dumps(record)) < 8192 for record in observation.records.values())
        for rank in range(2):
            record = check_record(observation.records[rank], "rank 0")
            assert len(record.operations) == 8 and record.bytes_sent > 0 and record.bytes_received > 0
        assert not list(found.flight_directory.iterdir())
        end(job)


@pytest.mark.long
def test_full_and_short_records_at_once():
    with running(2, BUSY) as job:
        name = find_job().name
        with ThreadPoolExecutor(4) as pool:
            both = list(pool.map(lambda full: JobRanks(name).collect(full, 10), [False, True, False, True]))
        assert all(sorted(found.records) == [0, 1] and found.notes == [] for found in both)
        assert [max(len(r.operations) for r in found.records.values()) > 8 for found in both] == [False, True] * 2
        end(job)


@pytest.mark.long
@pytest.mark.parametrize("which", ["stopped", "no file"])
def test_where_rank_0_does_not_respond_the_others_are_signaled(which):
    with running(2, BUSY) as job:
        found = find_job()
        if which == "stopped":
            os.kill(found.pids[0], signal.SIGSTOP)
            state = ["ps", "-o", "stat=", "-p", str(found.pids[0])]  # its threads on other cores stop a moment later
            assert wait_for(lambda: subprocess.check_output(state, text=True).startswith("T"))
        else:
            (Path(read_job(found.directory).temporary, "0") / ".mlxdist-rendezvous").unlink()
        view = Watch(JobRanks(found.name)).refresh(2)
        assert [row.has_responded for row in view.ranks] == [which == "no file", True]
        assert ("rank 0 has not responded to SIGUSR2 for 2 s" in "".join(view.notes)) == (which == "stopped")
        assert [path.name for path in sorted(found.flight_directory.iterdir())][-1] == "flight-1.json"
        os.kill(found.pids[0], signal.SIGCONT)
        end(job)


@pytest.mark.long
def test_a_rank_that_does_not_respond():
    with running(2, BUSY) as job:
        ranks = JobRanks(find_job().name)
        watch = Watch(ranks)
        pid = watch.refresh(10).ranks[1].pid
        assert wait_for(lambda: "all_sum" in ranks.collect(full=False, seconds=5).members[1].position, 10)
        os.kill(pid, signal.SIGSTOP)
        view = watch.refresh(0.3)
        assert [row.has_responded for row in view.ranks] == [True, False] and view.ranks[1].pid == pid
        assert "rank 1 has not responded for 0.3 s" in view.notes[0]
        assert "last heartbeat of rank 1: " in view.notes[1] and "all_sum #" in view.notes[1]
        shown = top("--once", "--interval", "0.3")
        assert shown.returncode == 1 and "rank 1 has not responded" in shown.stdout, shown
        os.kill(pid, signal.SIGCONT)
        end(job)


@pytest.mark.long
def test_a_rank_that_cannot_be_signaled_goes_on():
    """Where init() is not called in the main thread, SIGUSR2 would end the process. The rendezvous needs no signal."""
    program = BUSY.replace("while True: mlxdist.all_sum(x)", "")
    program = f"import threading\nthread = threading.Thread(target=exec, args=({program!r}, {{'rank': rank}}))\n"
    program += "thread.start(); thread.join()\nstay()"
    with running(2, program) as job:
        shown = top("--once", "--interval", "0.3")
        assert shown.returncode == 0 and shown.stdout.count("after all_sum #20") == 2, shown
        found = JobRanks(find_job().name).collect(full=True, seconds=5)
        assert "ranks 0 and 1 cannot be signaled" in found.notes[0] and sorted(found.records) == [0, 1]
        assert found.short == {0, 1} and "ranks 0 and 1 have no full record" in found.notes[1]
        assert len(find_job().pids) == 2 and job.poll() is None
        end(job)


@pytest.mark.long
def test_a_page_shows_the_ranks_until_they_end_and_when_they_are_back():
    def states():
        return [row["state"] for row in view()["ranks"]]

    def view():
        with urllib.request.urlopen(f"{address}/cluster", timeout=30) as answer:
            return json.load(answer)

    with running(2, BUSY, ("--max-restarts", "1")) as job:
        shown = subprocess.Popen([*TOP, "--web", "0"], stderr=subprocess.PIPE, text=True)
        address = re.search(r"http://127\.0\.0\.1:[0-9]+", shown.stderr.readline())[0]
        with urllib.request.urlopen(f"{address}/page/settings") as settings:
            assert json.load(settings) == {"has_key": False, "has_chat": False}
        assert set(states()) <= {"ok", "straggler"} and len(states()) == 2
        first = view()["job"]
        os.kill(view()["ranks"][1]["pid"], signal.SIGKILL)
        assert wait_for(lambda: not view()["is_ready"]) and set(states()) <= {"down", "failed"}
        assert wait_for(lambda: view()["is_ready"] and view()["job"] == f"{first}-1"), view()
        assert wait_for(lambda: set(states()) <= {"ok", "straggler"})
        end(job)
        assert wait_for(lambda: not view()["is_ready"]) and len(view()["ranks"]) == 2
        shown.send_signal(signal.SIGINT)
        assert shown.wait(20) == 0 and shown.stderr.read() == ""
        shown.stderr.close()


@pytest.mark.parametrize("address", ["", "x", "65536", "-1", "localhost:", "[::1]:70000"])
def test_an_address_of_the_page_that_is_none(address):
    done = CliRunner().invoke(command.top, ["--web", address])
    assert done.exit_code == 2 and "write host:port" in done.output


def test_the_page_is_not_for_the_terminal():
    done = CliRunner().invoke(command.top, ["--web", "8081", "--once"])
    assert done.exit_code == 2 and "--once and --json are for the terminal" in done.output


@pytest.mark.long
def test_the_end_of_the_job_ends_it():
    with running(2, BUSY) as job:
        with subprocess.Popen([*TOP, "--json", "--interval", "0.2"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              text=True) as shown:  # fmt: skip
            assert json.loads(shown.stdout.readline())["ranks"]
            end(job)
            _, error = shown.communicate(timeout=20)
            assert shown.returncode == 0 and re.search("Job [0-9a-f]{16} has ended.", error), error


def test_what_is_rejected():
    unknown = top("nothing")
    assert unknown.returncode == 2 and "there is no job 'nothing'" in unknown.stderr
    assert top("--interval", "0").returncode == 2


@pytest.mark.long
@pytest.mark.parametrize("key, status", [(b"q", 0), (b"\x03", 0)])
def test_in_a_terminal(key, status):
    """The table is drawn again and again, in colours; a key ends it, and the terminal is as it was."""
    with running(2, LATE.format(step="")) as job:
        master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (30, 140))
        before = termios.tcgetattr(slave)
        shown = subprocess.Popen(
            [*TOP, "--interval", "0.2"], stdin=slave, stdout=slave, stderr=slave,
            env=os.environ | {"TERM": "xterm"}, preexec_fn=lambda: os.login_tty(slave),
        )  # fmt: skip
        text = b""

        def read():
            nonlocal text
            if select.select([master], [], [], 0.1)[0]:
                text += os.read(master, 65536)

        assert wait_for(lambda: read() or text.count(b"straggler") >= 3 or shown.poll() is not None), text
        assert shown.poll() is None, text
        assert b"\x1b[1;31m" in text
        os.write(master, key)
        assert wait_for(lambda: read() or shown.poll() is not None), text
        assert shown.returncode == status and b"Traceback" not in text and text.count(b"\x1b[?25h") >= 1
        assert termios.tcgetattr(slave) == before
        os.close(master)
        os.close(slave)
        end(job)


def row(rank, **other):
    values = {"host": "studio0", "pid": 1, "step": 1, "total_steps": None, "operations": 1, "operation": "all_sum #1"}
    values |= {"in_operation": True, "call_site": "train.py:90", "elapsed": 1.0, "gbps": 1.0, "waiting_on": 40}
    return RankState(**{"rank": rank, "is_straggler": False, "has_responded": True} | values | other)


@pytest.mark.parametrize("height", [4, 12, 24, 80])
def test_a_terminal_with_fewer_lines_than_ranks(height):
    """What matters is on the screen: the findings, the straggler, the silent rank; and how many are not."""
    rows = [row(rank, is_straggler=rank == 40, has_responded=rank != 50) for rank in range(64)]
    view = View("741b468f6c659879", rows, ["Rank 40 computes."], ["rank 50 has not responded"], False)
    console = Console(width=100, height=height, file=io.StringIO())
    console.print(Screenful(view))
    lines = console.file.getvalue().splitlines()
    assert len(lines) <= height and lines[0].startswith("job 741b468f6c659879, 64 ranks")
    if height == 80:
        assert [line.split()[0] for line in lines[4:]] == [str(rank) for rank in range(64)]
    elif height == 4:
        assert lines[-1] == "... 64 more"
    else:
        assert lines[1:3] == ["Rank 40 computes.", "rank 50 has not responded"]
        assert [line.split()[0] for line in lines[4:7]] == ["40", "50", "0"] and len(lines) == height
        assert lines[-1] == f"... {64 - (height - 5)} more"


def test_stages_of_a_pipeline_have_a_column_more():
    console = Console(width=120, file=io.StringIO())
    console.print(rank_table([row(0, bubble=0.25), row(1)]))
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    assert lines[0][4] == "bubble" and lines[1][4] == "25%"
    assert "bubble" not in [column.header for column in rank_table([row(0)]).columns]


GIB = 1 << 30
MEMORY = RankMemory(active=10 * GIB, peak=12 * GIB, resident=13 * GIB, private=11 * GIB, total=16 * GIB)


@pytest.mark.parametrize("width, is_short, columns", [
    (120, False, ["active", "peak", "resident", "of host"]),
    (100, False, ["resident", "of host"]),
    (80, False, []),
    (80, True, ["resident", "of host"]),
])  # fmt: skip
def test_columns_of_memory_are_those_that_fit(width, is_short, columns):
    """No line is longer than the terminal, and none is folded unless a host is short of memory."""
    rows = [row(rank, memory=MEMORY) for rank in range(2)]
    memory = {"studio0": HostMemory((15 + is_short) * GIB, 16 * GIB, (0, 1))}
    view = View("741b", rows, [], [], False, memory=memory)
    console = Console(width=width, height=24, file=io.StringIO())
    console.print(Screenful(view))
    lines = console.file.getvalue().splitlines()
    head = next(line for line in lines if line.startswith("rank"))
    assert [name for name in ("active", "peak", "resident", "of host") if name in head] == columns
    assert all(len(line) <= width for line in lines)
    table = lines[lines.index(head) + 1 :]
    assert len(table) == 2 or is_short
    cells = {"active": "10.0 GiB", "peak": "12.0 GiB", "resident": "13.0 GiB", "of host": "81%"}
    assert [cell for name, cell in cells.items() if cell in table[0]] == [cells[name] for name in columns]
    above = " ".join(" ".join(lines[: lines.index(head)]).split())
    assert ("memory pressure" in above) == is_short


def test_a_host_under_memory_pressure():
    memory = HostMemory(15 * GIB + GIB // 2, 16 * GIB, (0, 1))
    (warning,) = View("job", [], [], [], False, memory={"studio0": memory, "b": HostMemory(0, 1, (2,))}).warnings
    assert warning.startswith("studio0: ranks 0 and 1 have 15.5 GiB of its 16 GiB of memory (97 %): memory pressure; ")


def test_rows_and_findings_that_take_several_lines():
    rows = [row(rank, call_site=f"/a/long/path/of/many/directories/{'x' * 40}/train.py:{rank}") for rank in range(10)]
    view = View("741b468f6c659879", rows, ["word " * 60] * 5, [], False)
    console = Console(width=90, height=20, file=io.StringIO())
    console.print(Screenful(view))
    lines = console.file.getvalue().splitlines()
    assert len(lines) <= 20 and "more lines" in lines[12] and re.fullmatch(r"\.\.\. \d more", lines[-1]), lines


@pytest.mark.long
def test_a_terminal_whose_size_changes():
    """It is drawn again at once, not at the next refresh."""
    with running(2, LATE.format(step="")) as job:
        terminal = Terminal("--interval", "300", command=TOP)
        terminal.read_until(b"ranks, ", 30)
        terminal.resize(3, 60)
        terminal.read_until(b"... 2 more", 20)
        terminal.type(b"q")
        assert terminal.finish() == 0 and b"Traceback" not in terminal.text
        end(job)


def test_the_example_in_the_documentation(capsys):
    """What docs/debugging.md shows is what the command prints, but for blanks at the ends of lines and long lines."""
    page = (Path(__file__).parents[2] / "docs" / "debugging.md").read_text()
    shown = re.search(r"    \$ mlxdist top\n(.*?)\n\n", page, re.DOTALL)[1].split()
    rows = []
    for rank in range(4):
        late = rank == 2
        does = {"operation": "all_sum #823" if late else "all_sum #824", "in_operation": not late}
        does |= {"call_site": "train.py:80" if late else "train.py:90"}
        does |= {"waiting_on": None if late else 2, "is_straggler": late}
        who = {
            "rank": rank,
            "host": f"studio{rank}",
            "pid": 4710 + rank,
            "step": 412,
            "total_steps": 1000,
            "operations": 824,
        }
        who["memory"] = RankMemory(int(88.1 * GIB), int(97.4 * GIB), int(89.6 * GIB), 87 * GIB, 128 * GIB)
        rows.append(RankState(**who, **does, elapsed=2.1, gbps=1.22 if late else 1.24, has_responded=True))
    sentence = "Rank 2 computes since all_sum #823 at train.py:80 ended 2.1 s ago, the others wait in all_sum #824 at "
    command._print(View("741b468f6c659879", rows, [sentence + "train.py:90 for 2.1 s."], [], False))
    assert re.sub(r"\d\d:\d\d:\d\d", "12:34:56", capsys.readouterr().out).split() == shown


@pytest.mark.parametrize("arguments", [(-1,), (1.5,), ("1",), (True,), (1, -1), (1, "x"), (None,), (2**70,)])
def test_a_step_that_is_none(arguments):
    with pytest.raises(InvalidArgument, match="set_step: (step|total) is .*, not an integer from 0"):
        set_step(*arguments)
