"""What the ranks print, as it leaves the launcher."""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launching import LAUNCH, RANK, closing_line, launch, marked_processes, nothing_left, python, running  # noqa: F401
from waiting import late, wait_for

from mlxdist.launch.jobs import list_jobs
from mlxdist.launch.last_lines import LastLines
from mlxdist.launch.tracebacks import TracebackFilter, Tracebacks


def test_every_line_has_the_rank_in_front():
    job = python(3, "import sys; print('out'); print('two'); print('err', file=sys.stderr)")
    assert job.returncode == 0
    assert sorted(job.stdout.splitlines()) == [b"[%d] %s" % (r, t) for r in range(3) for t in (b"out", b"two")]
    assert sorted(job.stderr.splitlines()) == [b"[%d] err" % r for r in range(3)]


def test_prefixes_are_aligned():
    job = launch(11, "echo", "x")
    assert sorted(job.stdout.splitlines())[0] == b"[ 0] x" and b"[10] x" in job.stdout.splitlines()


def test_no_prefix_passes_raw():
    job = python(2, "import sys; sys.stdout.write('a\\rb'); sys.stderr.write('e')", options=["--no-prefix"])
    assert job.stdout == b"a\rb" * 2 and job.stderr == b"ee"


def test_no_prefix_hands_over_the_launcher_s_own_streams(tmp_path):
    with open(tmp_path / "out", "wb") as out:
        launch(
            2,
            sys.executable,
            "-c",
            "import os; os.write(1, b'%d\\n' % os.fstat(1).st_ino)",
            options=["--no-prefix"],
            stdout=out,
            capture_output=False,
        )
    assert (tmp_path / "out").read_text().split() == [str((tmp_path / "out").stat().st_ino)] * 2


def test_lines_of_different_ranks_do_not_mix():
    job = python(4, "for i in range(50):\n for c in 'abc': print(c, end='', flush=True)\n print(i)")
    lines = job.stdout.splitlines()
    assert sorted(lines) == sorted(b"[%d] abc%d" % (rank, i) for rank in range(4) for i in range(50))


def test_a_last_line_without_end_appears():
    job = python(2, "import sys; sys.stdout.write('no end')")
    assert sorted(job.stdout.splitlines(keepends=True)) == [b"[0] no end\n", b"[1] no end\n"]


def test_empty_lines_and_carriage_returns_before_line_feeds():
    job = python(1, "import sys; sys.stdout.write('\\n\\nx\\r\\ny\\r\\n')")
    assert job.stdout == b"[0] \n[0] \n[0] x\r\n[0] y\r\n"


def test_updates_of_a_line_arrive_in_a_file_too():
    program = """
for i in range(5): print(f"\\r{i}%", end="", flush=True)
stay()
"""
    with running(1, program, lines=0) as job:
        text = ""
        while "3%" not in text:
            text += os.read(job.stdout.fileno(), 1000).decode()
        assert text == "\r[0] 0%\r[0] 1%\r[0] 2%\r[0] 3%\r"
        job.terminate()
        job.wait(10)


def test_an_error_that_all_ranks_raise_is_shown_once():
    job = python(3, "def f(): raise ValueError('alike')\nif rank == 2: g()\nf()", options=["--grace-period", "5"])
    lines = [line.decode() for line in job.stderr.splitlines() if line.startswith(b"[")]
    assert sum("Traceback" in line for line in lines) == 2
    assert sorted(line for line in lines if "Error: " in line) == [
        "[0] ValueError: alike",
        "[1] ValueError: alike",
        "[2] NameError: name 'g' is not defined",
    ]
    for rank in (0, 1, 2):  # in one piece, wherever it stands
        frames = [number for number, line in enumerate(lines) if line.startswith(f"[{rank}] Tr")]
        assert all(line.startswith(f"[{rank}] ") for first in frames for line in lines[first : first + 3])


@pytest.mark.parametrize("program, error", [("x = (1\n", "SyntaxError"), ("if 1:\nprint(1)\n", "IndentationError")])
def test_a_program_that_cannot_be_compiled_is_shown_once(tmp_path, program, error):
    """Python prints no traceback of it. The launcher repeated it, too, as the last lines of the first rank."""
    (tmp_path / "train.py").write_text(program)
    job = launch(3, sys.executable, str(tmp_path / "train.py"), options=["--grace-period", "5"])
    *lines, last = job.stderr.decode().splitlines()
    assert sum("train.py" in line for line in lines) == 1 and sum(f"] {error}: " in line for line in lines) == 3
    assert len(lines) == 6 and last.startswith("mlxdist launch: rank ")


def test_frames_inside_of_mlxdist_are_left_out(tmp_path):
    program = "from mlxdist.base.environment import Environment\nEnvironment.read({'MLXDIST_RANK': 'x'})"
    job = python(1, program, options=["--log-dir", str(tmp_path)])
    shown, log = job.stderr.decode(), (tmp_path / "rank-0.err").read_text()
    assert shown.startswith('[0] Traceback (most recent call last):\n[0]   File "<string>", line 3, in <module>\n')
    assert "[0] mlxdist.EnvironmentVariableError: MLXDIST_RANK='x'" in shown
    assert "environment.py" not in shown.partition("mlxdist launch: ")[0] and "environment.py" in log


def test_tracebacks_of_several_ranks():
    tracebacks = Tracebacks()
    filters = [TracebackFilter(rank, tracebacks) for rank in range(2)]
    once = b'Traceback (most recent call last):\n  File "a", line 1\nE: x\n'
    chained = once + b"\nDuring handling of the above exception, another exception occurred:\n\n" + once
    assert filters[0].take(chained + b"more\n") == chained + b"more\n"
    assert filters[1].take(chained + b"more\n") == b"E: x\n" * 2 + b"more\n"
    assert filters[1].take(once) == once, "a third time"
    assert filters[0].take(once[:36]) == b"" and filters[0].take_held() == once[:36]


ENDLESS = """
import os, tracemalloc
from mlxdist.launch.output import Output
output = Output(["0"], lambda: None)
(out, end), (err, _) = os.pipe(), os.pipe()
output.add(0, out, err)
tracemalloc.start()
for _ in range(200):
    os.write(end, b"x" * 65536)
    while output.streams[0].read() or not output.is_written(1):
        continue
output.finish()
while not output.is_written(1):
    continue
os.write(2, b"%d" % tracemalloc.get_traced_memory()[1])
"""


def test_a_line_without_end_is_not_kept():
    """13 MB of it. It was copied for each 64 KiB that came: 80 MB took two minutes."""
    job = subprocess.run([sys.executable, "-c", ENDLESS], capture_output=True)
    assert job.stdout.replace(b"\n", b"") == b"[0] " + b"x" * (200 << 16)
    assert int(job.stderr) < 10 << 20  # twice what waits for a slow reader, and the line of 4 KiB


def test_output_that_cannot_be_written():
    """It is no SIGPIPE of a rank, and no success either."""
    with open("/dev/full", "wb") as full:
        for program in ("while True: print('x' * 1000)", "print('x')"):
            job = python(1, program, stdout=full, stderr=subprocess.PIPE, capture_output=False)
            assert job.returncode == 1
            line = "mlxdist launch: the standard output cannot be written: No space left on device."
            assert job.stderr.decode().splitlines()[-1:] == [line], job.stderr


def test_updates_of_several_ranks_share_no_line():
    job = python(2, "for i in range(20):\n print(f'\\r{rank}:{i}%', end='', flush=True); late(0.01)\nprint()")
    for line in job.stdout.split(b"\n"):
        ranks = set(re.findall(rb"(\d):\d", line))
        assert len(ranks) <= 1, line
        assert all(update.startswith(b"[%s] " % ranks.copy().pop()) for update in line.split(b"\r") if update), line
    assert job.stdout.count(b"19%") == 2


def test_an_unfinished_line_does_not_hide_another_one_for_ever(tmp_path):
    program = """
import sys
if rank == 0:
    sys.stdout.write("waiting\\rfor rank 1")
else:
    while not os.path.exists("go"): late(0.01)
    for step in range(10_000):
        sys.stdout.write(f"step {step}\\r")
sys.stdout.flush()
stay()
"""
    with running(2, program, lines=0, cwd=tmp_path) as job:
        text = ""
        while "[1] step 5000" not in text:
            text += os.read(job.stdout.fileno(), 65536).decode()
            if "[0] waiting" in text:
                (tmp_path / "go").touch()
        assert text.startswith("[0] waiting\r\n[1] step 0\r[1] step 1\r")
        job.terminate()
        job.communicate(timeout=10)


def test_all_bytes_pass_through():
    """Not only UTF-8. Without carriage return and escape, which belong to the line's drawing."""
    data = bytes(b for b in range(256) if b not in (10, 13, 27)) + "\u20ac\U0001f600".encode()[:-1]
    job = launch(2, sys.executable, "-c", f"import sys; sys.stdout.buffer.write({data!r} + b'\\n')")
    assert sorted(job.stdout.split(b"\n")) == [b"", b"[0] " + data, b"[1] " + data]


def test_a_line_of_ten_million_bytes():
    job = python(2, "print(str(rank) * 10_000_000)")
    for digit in (b"0", b"1"):
        body = job.stdout.replace(b"[0] ", b"").replace(b"[1] ", b"")
        assert body.count(digit) == 10_000_000
    assert job.stdout.count(b"\n") < 700, "broken only where the other rank came between"


def test_a_rank_that_writes_a_lot_does_not_stall_the_others():
    with running(
        2,
        "import sys\nprint('start', flush=True)\n"
        "if rank == 0:\n while True: sys.stdout.write('x' * 1000 + '\\n')\n"
        "late(0.3); print('here', flush=True); stay()",
    ) as job:
        assert wait_for(lambda: any(job.stdout.readline() == "[1] here\n" for _ in range(1000)))
        job.terminate()
        job.communicate(timeout=15)


def test_a_reader_that_stops_does_not_stop_the_supervision():
    """The pipe has no reader, and yet the failure of rank 1 ends rank 0."""
    with running(
        2,
        "import sys\nprint('start', flush=True)\n"
        "if rank == 0:\n while True: sys.stdout.write('x' * 1000 + '\\n')\n"
        "late(0.5); sys.exit(3)",
        options=["--grace-period", "0.3"],
    ) as job:
        assert wait_for(lambda: len(marked_processes(os.environ["TEST_MARKER"])) == 1, 8), "only the launcher is left"
        job.communicate(timeout=5)
        assert job.returncode == 3


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_reader_that_stops_costs_no_processor_time():
    with running(1, "while True: print('x' * 10_000)") as job:
        assert wait_for(lambda: clock_ticks_in(job.pid, 0.3) <= 3, 20)  # of 30: once its memory is full
        job.terminate()
        job.stdout.close()
        assert job.wait(10) == 143


def clock_ticks_in(pid, seconds):
    def used():
        return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))

    before = used()
    late(seconds)
    return used() - before


@pytest.mark.long
def test_a_job_on_hosts_whose_output_has_no_reader_ends_at_once(tmp_path):
    """Behind all that its ranks have printed comes how they have ended."""
    program = f"open({str(tmp_path / 'begun')!r}, 'w').close(); print('x' * 40_000_000, flush=True); stay()"
    with running(1, program, options=["--hosts", "localhost", "--grace-period", "30"], lines=0) as job:
        assert wait_for((tmp_path / "begun").exists, 60)
        late(1)
        job.send_signal(signal.SIGINT)
        assert wait_for(lambda: list_jobs() == [], 10)
        out, err = job.communicate(timeout=20)
    assert job.returncode == 130 and "rank 0 ended after SIGINT" in err, err


def test_a_reader_that_goes_away_ends_the_job_as_in_a_pipe():
    program = "import signal, sys\nsignal.signal(signal.SIGPIPE, signal.SIG_DFL)\nwhile True: print('x' * 1000)"
    with running(2, program, options=["--grace-period", "1"]) as job:
        job.stdout.close()
        assert job.wait(10) == 128 + signal.SIGPIPE


def test_python_ranks_are_unbuffered():
    with running(1, "print('at once'); stay()") as job:
        assert job.first_lines == ["[0] at once\n"]
        job.terminate()
        job.wait(10)


@pytest.mark.long
@pytest.mark.parametrize("options", [["--log-dir", "logs"], ["--hosts", "localhost"]])
def test_files_that_are_open_at_the_limit_of_macos(tmp_path, options):
    command = shlex.join([*LAUNCH, *options, "-n", "64", "--", "echo", "x"])
    limited = ["sh", "-c", f"ulimit -Sn 256; exec {command}"]
    job = subprocess.run(limited, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
    assert job.returncode == 0 and len(job.stdout.splitlines()) == 64, job.stderr


def test_64_ranks_print():
    job = python(64, "print('rank', rank)")
    assert sorted(job.stdout.splitlines()) == [b"[%2d] rank %d" % (rank, rank) for rank in range(64)]
    assert job.stderr == b"" and job.returncode == 0


@pytest.mark.parametrize("options", ["", "--no-prefix"])
def test_closed_streams(options):
    line = f"{sys.executable} -m mlxdist launch -n 2 {options} -- sh -c 'echo $MLXDIST_RANK; exit 3' <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", line], timeout=30).returncode == 3


def test_a_copy_of_what_each_rank_prints(tmp_path):
    """As it is printed, without prefix; of a job that starts again, one after the other."""
    directory = tmp_path / "logs" / "of this job"
    program = (
        "import sys; print('out', rank, os.environ['MLXDIST_RESTART_COUNT']); print('\\x1b[1merr', file=sys.stderr)\n"
    )
    program += "raise SystemExit(os.environ['MLXDIST_RESTART_COUNT'] == '0')"
    job = python(2, program, options=["--log-dir", str(directory), "--max-restarts", "1"])
    assert job.returncode == 0 and job.stdout.count(b"out") == 4
    written = {path.name: path.read_text() for path in directory.iterdir()}
    assert written == {f"rank-{r}.out": f"out {r} 0\nout {r} 1\n" for r in range(2)} | {
        f"rank-{r}.err": "\x1b[1merr\n" * 2 for r in range(2)
    }
    refused = python(1, "", options=["--log-dir", str(directory), "--no-prefix"])
    assert refused.returncode == 2 and b"--log-dir copies what passes the launcher" in refused.stderr


# Rank 1 prints, then rank 0, and then rank 1 fails without a word.
FAILS = """
import pathlib, sys
def wait(name):
    while not pathlib.Path(sys.argv[1], name).exists(): late(0.01)
    late(0.3)  # for the launcher to read what was printed before
restart = os.environ['MLXDIST_RESTART_COUNT']
if rank == 1:
    for i in range(30): print('line', i, 'of start', restart)
    print('bar 1\\rbar 2\\r\\x1b[1mbar 3', file=sys.stderr)
    print('x' * 100_000)
    print('no end', end='', flush=True)
    pathlib.Path(sys.argv[1], 'printed' + restart).touch()
    wait('other' + restart)
    sys.exit(3)
wait('printed' + restart)
print('other')
pathlib.Path(sys.argv[1], 'other' + restart).touch()
stay()
"""


@pytest.mark.parametrize(
    "streams", [{"stderr": subprocess.STDOUT, "stdout": subprocess.PIPE}, pytest.param({}, marks=pytest.mark.long)]
)
def test_last_lines_of_the_rank_that_failed(tmp_path, streams):
    options = ["--max-restarts", "1", "--grace-period", "0.1"]
    keywords = {"options": options} | ({"capture_output": False} | streams if streams else {})
    job = launch(2, sys.executable, "-c", RANK + FAILS, str(tmp_path), **keywords)
    assert job.returncode == 3
    text = (job.stdout if streams else job.stderr).decode()
    for restart in range(2):
        lines = [f"    line {i} of start {restart}\n" for i in range(13, 30)]
        lines += ["    bar 3\n", f"    {'x' * 1000}...\n", "    no end\n"]
        block = re.search(r"Last lines of rank 1 \(pid \d+\):\n((?:    .*\n)*)mlxdist launch: rank 1", text).group(1)
        assert sorted(block.splitlines(keepends=True)) == sorted(lines)
        text = text.partition(block)[2]
    assert "Last" not in text


def test_a_python_without_mlxdist_is_named():
    """As in `mlxdist launch -- /usr/bin/python3 program.py`; -S leaves out what is installed."""
    job = launch(2, sys.executable, "-S", "-c", "import mlxdist", cwd="/")
    assert job.returncode == 1
    assert "that Python has no mlxdist: write `python` without a path" in closing_line(job)


# Lines of public reports: Acelogic/LTX-2-MLX#5; Blaizzy/mlx-vlm#1064 (twice) and #270; SceneWorks/SceneWorks#2763;
# flutter/flutter#155538; ggml-org/llama.cpp#9701; cubist38/mlx-openai-server#188.
ENDS_OF_GPU_WORK = {
    "Impacting Interactivity (0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)": "the display sleep",
    "Caused GPU Hang Error (00000003:kIOGPUCommandBufferCallbackErrorHang)": "no progress",
    "Caused GPU Address Fault Error (0000000b:kIOGPUCommandBufferCallbackErrorPageFault)": "outside of its memory",
    "Invalid Resource (00000009:kIOGPUCommandBufferCallbackErrorInvalidResource)": "a buffer of it was not there",
    "Ignored (for causing prior/excessive GPU errors) (00000004:kIOGPUCommandBufferCallbackErrorSubmissionsIgnored)": (
        "takes no more work"
    ),
    "Discarded (victim of GPU error/recovery) (00000005:kIOGPUCommandBufferCallbackErrorInnocentVictim)": "other work",
    "Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)": "--rank-shares",
    "Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout)": "mlxdist.meet()",
    "New in macOS 28 (000000ff:kIOGPUCommandBufferCallbackErrorNew)": "macOS ended GPU work of this rank: New",
    "[metal::malloc] Resource limit (499000) exceeded.": "mx.set_cache_limit",
    "Command buffer execution failed": "",
}


@pytest.mark.parametrize("text", ENDS_OF_GPU_WORK)
def test_an_end_of_gpu_work_is_explained(text):
    lines = LastLines()
    lines.take(2, f"libc++abi: terminating due to uncaught exception [METAL] failed: {text}\n".encode())
    assert (ENDS_OF_GPU_WORK[text] in lines.advice()) if ENDS_OF_GPU_WORK[text] else lines.advice() == ""


def test_the_first_end_of_gpu_work_is_the_cause():
    """MLX aborts the process; what macOS ignores or discards afterwards is a consequence."""
    ignored, victim, memory = (
        next(text for text in ENDS_OF_GPU_WORK if name in text) for name in ("Ignored", "Innocent", "Insufficient")
    )
    program = f"if rank == 1:\n  for line in {[ignored, memory, victim]}: print(line, flush=True)\n  os.abort()\nstay()"
    job = python(2, program, options=["--grace-period", "0.2"])
    line = closing_line(job)
    assert "rank 1 failed first, killed by SIGABRT" in line
    assert "macOS ended GPU work of this rank (OutOfMemory): there was no memory" in line and "ignored" not in line


@pytest.mark.parametrize("ranks", [1, 2])
def test_last_lines_are_not_printed_twice_in_a_row(ranks):
    job = python(ranks, f"import sys\nif rank == {ranks - 1}: print('a'); sys.exit('that is why')")
    *shown, closing = job.stderr.decode().splitlines()
    assert shown == [f"[{ranks - 1}] that is why"] and closing.startswith(f"mlxdist launch: rank {ranks - 1} failed")


def test_no_last_lines_after_an_interrupt():
    program = "try:\n print('start')\n stay()\nexcept KeyboardInterrupt: raise SystemExit(3)"
    with running(3, program) as job:
        job.send_signal(signal.SIGINT)
        _, errors = job.communicate(timeout=10)
        assert job.returncode == 130 and len(errors.splitlines()) == 1


# Rank 1 notes that it is the cause, and ends after rank 0.
NOTED = """
import pathlib, sys
directory = pathlib.Path(sys.argv[1])
if rank == 1:
    print('the cause', flush=True)
    pathlib.Path(os.environ['MLXDIST_ERROR_FILE']).write_text('1')
    (directory / 'noted').touch()
    while not (found := [path.name for path in directory.glob('pid-*')]): late(0.01)
    while os.path.exists('/proc/' + found[0].removeprefix('pid-')): late(0.01)
    sys.exit(4)
while not (directory / 'noted').exists(): late(0.01)
late(0.3)  # for the launcher to read what was printed before
print('the consequence', flush=True)
(directory / f'pid-{os.getpid()}').touch()
sys.exit(3)
"""


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs Linux's /proc, to see that a process has ended")
def test_last_lines_of_the_rank_that_failed_first_by_its_note(tmp_path):
    """The note lies in the directory of the job, which is gone when they are printed."""
    job = launch(2, sys.executable, "-c", RANK + NOTED, str(tmp_path), options=["--grace-period", "60"])
    assert job.returncode == 4
    assert "rank 1 failed first" in closing_line(job)
    assert re.search(r"Last line of rank 1 \(pid \d+\):\n    the cause\n", job.stderr.decode()), job.stderr
