"""`mlxdist dump` by py-spy: the stacks of processes that do not write them themselves."""

import json
import os
import signal
import subprocess
import sys

import pytest
from waiting import wait_for

from mlxdist.tools.observe import py_spy
from mlxdist.tools.observe.py_spy import stacks_by_py_spy

PROGRAM = """
import threading
def loads():
    print("ready", flush=True)
    threading.Event().wait()
threading.Thread(target=threading.Event().wait, name="waits", daemon=True).start()
loads()
"""


@pytest.fixture(params=[[], ["sh", "-c", '"$@"; true', "sh"]], ids=["program", "by a shell"])
def process(request):
    """A program that a launcher has started: it leads a session, or a shell does."""
    words = [*request.param, sys.executable, "-c", PROGRAM]
    with subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True) as started:
        started.stdout.readline()
        yield started
        os.killpg(started.pid, signal.SIGKILL)


@pytest.mark.parametrize("is_stopped", [False, True])
def test_stacks_of_a_process(process, is_stopped):
    if is_stopped:
        os.killpg(process.pid, signal.SIGSTOP)
    found, why = stacks_by_py_spy({3: process.pid})
    if "ermission" in why:
        pytest.skip(f"this user may not read other processes: {why}")
    assert (list(found), why) == ([3], "")
    assert list(found[3]) == ["MainThread", "waits"]
    functions = [call.rpartition(" ")[2] for call in found[3]["MainThread"]]
    assert functions[-2:] == ["loads", "<module>"] and found[3]["MainThread"][-2] == "<string>:5 loads"
    if is_stopped:  # nothing has let it run on
        assert wait_for(lambda: open(f"/proc/{process.pid}/stat").read().rpartition(")")[2].split()[0] == "T", 10)


def test_it_says_why_not(monkeypatch, tmp_path, process):
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert stacks_by_py_spy({}) == ({}, "")
    found, why = stacks_by_py_spy({0: ended.pid})
    assert found == {} and why.startswith("py-spy: ")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert stacks_by_py_spy({0: process.pid}) == (
        {},
        "py-spy, which would show their stacks, is not installed here: pip install py-spy",
    )


FRAME = {"filename": "a\x1b.py", "line": 3, "name": "f"}
THREAD = {"thread_name": None, "thread_id": 7, "frames": [FRAME]}


@pytest.mark.parametrize("value", [None, {}, [3], [{}], [THREAD | {"frames": [{}]}], [THREAD | {"frames": 3}]])
def test_what_py_spy_does_not_write_is_refused(value):
    with pytest.raises(ValueError):
        py_spy._stacks(json.loads(json.dumps(value)))


def test_what_steers_a_terminal_is_not_shown():
    assert py_spy._stacks([THREAD]) == {"7": ("a?.py:3 f",)}
