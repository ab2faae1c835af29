"""What the tests of `mlxdist launch` share: the real command, with ranks that are small programs without mlxdist."""

import contextlib
import os
import pty
import re
import select
import subprocess
import sys
import tempfile
import termios
import uuid
from pathlib import Path

import pytest
from waiting import wait_for

RANK_SCRIPTS = Path(__file__).parents[1] / "rank_scripts"
LAUNCH = [sys.executable, "-m", "mlxdist", "launch"]
# One line, so that numbers of lines in tracebacks stay readable. stay(): until something ends the rank; the job is to
# do that. late(): as that of waiting.py.
RANK = "import os, time; rank = int(os.environ['MLXDIST_RANK']); late = time.sleep; stay = lambda: late(300)\n"
# Of a rank that goes on until SIGUSR1 has come.
ASKED = """
import signal
asked = []
signal.signal(signal.SIGUSR1, lambda *_: asked.append(print('asked', flush=True)))
"""


@pytest.fixture(autouse=True)
def nothing_left(tmp_path, monkeypatch):
    """Whatever a test does: no process of its job is left, no directory but for recordings, and no shared memory."""
    marker = uuid.uuid4().hex
    monkeypatch.setenv("TEST_MARKER", marker)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    runtime = tmp_path / "runtime"
    runtime.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.delenv("NO_COLOR", raising=False)
    shared_memory = shared_memory_names()
    # A short name, no part of tmp_path: ranks make sockets inside, whose paths have about 100 characters at most.
    with tempfile.TemporaryDirectory(prefix="mlxdist-test-", dir="/tmp") as temporary:
        monkeypatch.setenv("TMPDIR", temporary)
        yield
        left = wait_for(lambda: not marked_processes(marker), 10) or marked_processes(marker)
        assert left is True, f"left running: {left}"
        assert os.listdir(temporary) == []
    assert [path for path in runtime.glob("mlxdist/*") if not list(path.glob("flight/*"))] == []
    assert shared_memory_names() <= shared_memory


def shared_memory_names():
    names = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    return {name for name in names if "mlxdist" in name}


def marked_processes(marker):
    """pid and command of the processes that have the marker in their environment, but for this one."""
    if sys.platform != "linux":
        lines = subprocess.run(
            ["ps", "-axwwE", "-o", "pid=,command="], capture_output=True, text=True
        ).stdout.splitlines()
        return [line for line in lines if marker in line and int(line.split()[0]) != os.getpid()]
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if marker.encode() in (directory / "environ").read_bytes() and int(directory.name) != os.getpid():
                found.append(f"{directory.name} {(directory / 'cmdline').read_bytes()}")
    return found


def launch(ranks, *command, options=(), timeout=30, **keywords):
    arguments = [*LAUNCH, "-n", str(ranks), *options, "--", *command]
    keywords = {"stdin": subprocess.DEVNULL, "capture_output": True} | keywords
    return subprocess.run(arguments, timeout=timeout, **keywords)


def python(ranks, program, **keywords):
    return launch(ranks, sys.executable, "-c", RANK + program, **keywords)


@contextlib.contextmanager
def running(ranks, program, options=(), lines=None, **keywords):
    """The launcher as a process, once ``lines`` have been printed, or one by every rank."""
    arguments = [*LAUNCH, "-n", str(ranks), *options, "--", sys.executable, "-c", RANK + program]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **keywords)
    try:
        process.first_lines = [process.stdout.readline() for _ in range(ranks if lines is None else lines)]
        yield process
    finally:
        process.kill()
        process.communicate()


def closing_line(job):
    lines = [line for line in job.stderr.decode().splitlines() if line.startswith("mlxdist launch: ")]
    assert len(lines) == 1, job.stderr
    return lines[0]


class Terminal:
    """The launcher, or another command, with a terminal of its own, 80 columns wide."""

    def __init__(self, *arguments, command=LAUNCH, **variables):
        self._master, slave = pty.openpty()
        subprocess.run(["stty", "cols", "80", "rows", "24"], stdin=slave, check=True)
        environ = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR")}
        self.process = subprocess.Popen(
            [*command, *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environ | {"TERM": "xterm"} | variables,
            preexec_fn=lambda: os.login_tty(slave),
        )
        os.close(slave)
        self.text = b""

    def type(self, data):
        os.write(self._master, data)

    def resize(self, rows, columns):
        termios.tcsetwinsize(self._master, (rows, columns))

    def read_until(self, words, seconds=30, times=1):
        def has_come():
            if self.text.count(words) < times:
                self._read(0.1)
            return self.text.count(words) >= times

        assert wait_for(has_come, seconds), self.text

    def _read(self, seconds):
        if not select.select([self._master], [], [], seconds)[0]:
            return True
        try:
            data = os.read(self._master, 65536)
        except OSError:  # Linux: the other side is closed
            data = b""
        self.text += data
        return bool(data)

    def finish(self, seconds=30):
        def has_ended():
            at_end = not self._read(0.1)
            return at_end or (self.process.poll() is not None and not select.select([self._master], [], [], 0.1)[0])

        wait_for(has_ended, seconds)
        status = self.process.wait(seconds)
        os.close(self._master)
        return status

    def lines(self):
        """What stands on the screen in the end, without colours."""
        screen = []
        for line in re.sub(rb"\x1b\[[0-9;]*m", b"", self.text).split(b"\n"):
            shown = b""
            for part in line.rstrip(b"\r").split(b"\r"):
                part = part.rpartition(b"\x1b[2K")[2] if b"\x1b[2K" in part else part + shown[len(part) :]
                shown = part
            screen.append(shown.decode())
        return screen
