"""The flight recorder: what the ranks did last, which are stragglers, and the files that say so."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from launching import running
from waiting import wait_for

from mlxdist.base.errors import InvalidArgument
from mlxdist.runtime.diagnostics.flight_records import (
    MAX_OPERATIONS,
    read_directory,
    read_flight_record,
    record_file_name,
)
from mlxdist.runtime.diagnostics.stacks import read_stack_file
from mlxdist.runtime.observation.stack_groups import StackGroup, group_stacks, odd_ones
from mlxdist.runtime.observation.stragglers import analyze
from mlxdist.tools.observe.collect import Collected
from mlxdist.tools.observe.trace import trace

SCRIPT = Path(__file__).parents[1] / "rank_scripts" / "flight.py"
SECOND = 10**9
NOW = 1000 * SECOND  # of the monotonic clock, when a record was written


def operation(name="all_sum", sequence=413, call_site="train.py:90", **fields):
    """In progress for 12 s, unless ``ended_ns`` says something else."""
    return {
        "number": sequence,
        "group": 0,
        "internal": False,
        "collective": True,
        "sequence": sequence,
        "name": name,
        "dtype": "float32",
        "shape": [3, 4],
        "bytes": 48,
        "root": None,
        "destination": None,
        "source": None,
        "algorithm": "direct",
        "started_ns": NOW - 12 * SECOND,
        "ended_ns": None,
        "status": 0,
        "waiting_on": None,
        "call_site": call_site,
    } | fields


def ended(name="all_sum", sequence=411, call_site="train.py:80", **fields):
    return operation(
        name, sequence, call_site, **{"started_ns": NOW - 21 * SECOND, "ended_ns": NOW - 20 * SECOND} | fields
    )


def record(rank, *operations, size=4, **fields):
    return {
        "schema": 4,
        "job": "job",
        "rank": rank,
        "size": size,
        "host": "mac1",
        "pid": 100 + rank,
        "reason": "SIGUSR2",
        "error": None,
        "monotonic_ns": NOW,
        "wall_ns": NOW + 5 * SECOND,
        "step": None,
        "total_steps": None,
        "bubble": None,
        "power": None,
        "memory": {"active": 0, "peak": 0, "resident": None, "private": None, "total": None},
        "computed": [],
        "bytes_sent": 0,
        "bytes_received": 0,
        "groups": {"0": list(range(size))},
        "threads": {},
        "stacks": {},
        "operations": list(operations),
    } | fields


def dumps(directory, *records):
    for fields in records:
        (directory / record_file_name(fields["rank"])).write_text(json.dumps(fields))
    found, problems = read_directory(directory)
    assert problems == []
    return found


# What is said of the ranks of a job.

WAITS = operation()
SCENARIOS = {
    "in the operation before": (
        [record(1, operation("all_gather", 412, "train.py:88")), *(record(rank, WAITS) for rank in (0, 2, 3))],
        [
            "Rank 1 is in all_gather #412 at train.py:88 for 12.0 s, the others wait in all_sum #413 at train.py:90 "
            "for 12.0 s."
        ],
        [1],
    ),
    "computing": (
        [
            record(1, ended(sequence=412), threads={"MainThread": "data.py:33"}),
            *(record(rank, WAITS) for rank in (0, 2, 3)),
        ],
        [
            "Rank 1 computes since all_sum #412 at train.py:80 ended 20.0 s ago (the program is at data.py:33), the "
            "others wait in all_sum #413 at train.py:90 for 12.0 s."
        ],
        [1],
    ),
    "all in the same one": (
        [record(rank, WAITS, size=2) for rank in range(2)],
        ["Ranks 0 and 1 wait in all_sum #413 at train.py:90 for 12.0 s."],
        [],
    ),
    "all computing": (
        [record(rank, ended(), size=2) for rank in range(2)],
        ["No rank is in an operation: all compute, or have ended."],
        [],
    ),
    "a rank has left nothing": (
        [record(0, WAITS), record(1, WAITS), record(3, WAITS)],
        [
            "Rank 2 has left no record: dead, stopped, or not at mlxdist.init() yet.",
            "Ranks 0, 1 and 3 wait in all_sum #413 at train.py:90 for 12.0 s.",
        ],
        [],
    ),
    "different calls": (
        [record(0, WAITS, size=2), record(1, operation("all_max", call_site="eval.py:7"), size=2)],
        [
            "Rank 0 waits in all_sum #413 at train.py:90 for 12.0 s, rank 1 waits in all_max #413 at eval.py:7 for "
            "12.0 s.",
            "The ranks disagree on #413: rank 0 calls all_sum of float32 [3, 4] at train.py:90, rank 1 calls all_max "
            "of float32 [3, 4] at eval.py:7.",
        ],
        [],
    ),
    "a group by split": (
        [
            record(0, operation(sequence=3, group=2), groups={"0": [0, 1, 2], "2": [0, 2]}, size=3),
            record(1, ended(), operation("barrier", 412, dtype=None, shape=None), size=3),
            record(2, ended(), groups={"0": [0, 1, 2], "2": [0, 2]}, size=3),
        ],
        [
            "Rank 0 is in all_sum #3 of group 2 at train.py:90 for 12.0 s, rank 2 computes since all_sum #411 at "
            "train.py:80 ended 20.0 s ago, rank 1 waits in barrier #412 at train.py:90 for 12.0 s.",
            "In group 2 (ranks 0 and 2): rank 2 computes since all_sum #411 at train.py:80 ended 20.0 s ago, rank 0 "
            "waits in all_sum #3 at train.py:90 for 12.0 s.",
        ],
        [0, 2],
    ),
    "between two ranks": (
        [record(0, operation("recv", 5, collective=False, source=1, waiting_on=1), size=2), record(1, ended(), size=2)],
        [
            "Rank 0 waits in recv #5 from rank 1 at train.py:90 for 12.0 s; rank 1 computes since all_sum #411 at "
            "train.py:80 ended 20.0 s ago."
        ],
        [],
    ),
    "failed": (
        [
            record(0, operation(ended_ns=NOW - 2 * SECOND, status=3, waiting_on=1), error="rank 0 waited", size=2),
            record(1, ended(sequence=412), error="rank 0 waited", size=2),
        ],
        [
            "The group has failed: rank 0 waited.",
            "Rank 1 computes since all_sum #412 at train.py:80 ended 20.0 s ago, rank 0 waits in all_sum #413 at "
            "train.py:90 for 10.0 s.",
        ],
        [1],
    ),
    "a job that goes on while it is asked": (
        [
            record(0, ended(ended_ns=NOW - SECOND, sequence=1), operation(sequence=2, started_ns=NOW - SECOND), size=2),
            record(
                1,
                ended(ended_ns=NOW - SECOND, sequence=1),
                operation(sequence=2, started_ns=NOW - SECOND, ended_ns=NOW + SECOND),
                operation(sequence=3, started_ns=NOW + SECOND),
                size=2,
                monotonic_ns=NOW + 2 * SECOND,
                wall_ns=NOW + 7 * SECOND,
            ),
        ],
        ["Ranks 0 and 1 wait in all_sum #2 at train.py:90 for 1.0 s."],
        [],
    ),
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_stragglers_are_found(tmp_path, scenario):
    records, findings, stragglers = SCENARIOS[scenario]
    analysis = analyze(dumps(tmp_path, *records))
    assert analysis.findings == findings
    assert [state.rank for state in analysis.states if state.is_straggler] == stragglers
    assert [state.rank for state in analysis.states] == list(range(records[0]["size"]))


def test_trace_has_a_process_per_rank_and_a_row_per_group(tmp_path):
    first, second = operation(sequence=1), operation(sequence=2, started_ns=NOW - 11 * SECOND)
    other = operation("send", 1, group=2, collective=False, destination=1, ended_ns=NOW - 11 * SECOND)
    records = record(0, first, second, other, groups={"0": [0, 1], "2": [1, 0]}, size=2), record(1, size=2)
    events = json.loads(json.dumps(trace(dumps(tmp_path, *records))))["traceEvents"]
    names = {(e["pid"], e.get("tid")): e["args"]["name"] for e in events if e["name"].endswith("_name")}
    assert names[0, None] == "rank 0 (mac1, pid 100)" and names[1, None] == "rank 1 (mac1, pid 101)"
    assert [names[0, row] for row in range(3)] == ["all ranks", "all ranks, 2", "group 2 (ranks 0 and 1)"]
    spans = [e for e in events if e["ph"] == "X"]
    assert [(e["tid"], e["ts"], e["dur"]) for e in spans] == [(0, 0, 12e6), (1, 1e6, 11e6), (2, 0, 1e6)]
    array = {"dtype": "float32", "shape": [3, 4], "bytes": 48, "algorithm": "direct"}
    assert spans[0]["args"] == {"sequence": 1, "call site": "train.py:90", "in progress": True} | array
    assert spans[2]["args"]["to"] == 1 and spans[2]["name"] == "send"


def test_trace_has_what_a_stage_has_computed(tmp_path):
    computed = [["F0", NOW - 9 * SECOND, NOW - 8 * SECOND], ["B0", NOW - 7 * SECOND, NOW - 6 * SECOND]]
    first = operation(sequence=1, started_ns=NOW - 10 * SECOND)
    events = trace(dumps(tmp_path, record(0, first, computed=computed, bubble=0.25), record(1)))["traceEvents"]
    spans = [(e["name"], e["pid"], e["ts"], e["dur"]) for e in events if e.get("cat") == "compute"]
    assert spans == [("F0", 0, 1e6, 1e6), ("B0", 0, 3e6, 1e6)]
    assert {"name": "computes, bubble 25%"} in [e["args"] for e in events if e["name"] == "thread_name"]


# Stacks.

STEP = ("train.py:88 step", "train.py:120 <module>")
LOAD = ("train.py:33 load", "train.py:119 <module>")


def test_equal_stacks_are_shown_once_and_the_odd_one_is_named():
    loader = ("threading.py:10 wait", "data.py:9 fill")
    threads = {"MainThread": STEP, "loader": loader}
    groups = group_stacks({0: threads, 1: {"MainThread": LOAD}, 2: threads, 3: threads})
    assert groups == [
        StackGroup((0, 2, 3), "MainThread", STEP),
        StackGroup((1,), "MainThread", LOAD),
        StackGroup((0, 2, 3), "loader", loader),
    ]
    assert odd_ones(groups) == ["Rank 1 is not where the others are, but at train.py:119 <module>."]


@pytest.mark.parametrize("stacks", [[STEP, LOAD], [STEP, STEP], [STEP, STEP, LOAD, LOAD], [STEP], []])
def test_without_a_majority_no_rank_is_odd(stacks):
    assert odd_ones(group_stacks({rank: {"MainThread": calls} for rank, calls in enumerate(stacks)})) == []


def test_stacks_that_faulthandler_has_written_are_newer_than_the_record(tmp_path):
    found = dumps(tmp_path, *(record(rank, stacks={"MainThread": STEP}) for rank in range(2)))
    assert Collected(found, written={1: {"MainThread": LOAD}}).stacks == {
        0: {"MainThread": STEP},
        1: {"MainThread": LOAD},
    }


def test_the_stacks_of_a_process_that_holds_the_gil(tmp_path):
    program = f"""
import re, threading
from pathlib import Path
from mlxdist.runtime.diagnostics.stacks import StackFile
threading.Thread(target=threading.Event().wait, name="waits", daemon=True).start()
StackFile(Path({str(tmp_path / "stacks")!r}))
re.compile("(a+)+$")  # by Python's code, which holds no lock for long
def holds():
    print("ready", flush=True)
    re.match("(a+)+$", "a" * 60 + "b")  # for longer than any test
holds()
"""
    ignored = signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # what is called behind faulthandler's
    try:
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    finally:
        signal.signal(signal.SIGUSR2, ignored)
    with process:
        process.stdout.readline()
        process.send_signal(signal.SIGUSR2)
        assert wait_for(lambda: "MainThread" in read_stack_file(tmp_path / "stacks"), 60)
        main, other = read_stack_file(tmp_path / "stacks").values()
        process.kill()
    assert [call.rpartition(" ")[2] for call in main] in (["match", "holds", "<module>"], ["holds", "<module>"])
    assert [call.rpartition(" ")[2] for call in other][-2:] == ["_bootstrap_inner", "_bootstrap"]


@pytest.mark.parametrize(
    ("text", "stacks"),
    [
        ("", {}),
        ("Thread 0xb (most recent call first):\n  <no Python frame>\n", {}),
        ('  File "x.py", line 1 in f\n', {}),
        (
            'Thread 0xb [loader] (most recent call first):\n  File "d.py", line 7 in fill\n\n'
            "Current thread 0xa (most recent call first):\n"
            '  File "/v/mlxdist/runtime/signals.py", line 9 in _do_nothing\n'
            '  File "a b.py", line 3 in f\n  File "t.py", line 4 in <module>\n',
            {"MainThread": ("a b.py:3 f", "t.py:4 <module>"), "0xb": ("d.py:7 fill",)},
        ),
        (
            'Thread 0xc (most recent call first):\n  File "/p/selectors.py", line 4 in select\n'
            '  File "/v/mlxdist/runtime/rendezvous/event_loop.py", line 1 in _run\n'
            '  File "/p/threading.py", line 2 in run\n',
            {},
        ),
    ],
)
def test_what_faulthandler_writes(tmp_path, text, stacks):
    (tmp_path / "stacks").write_text(text)
    assert read_stack_file(tmp_path / "stacks") == stacks
    assert read_stack_file(tmp_path / "none") == {}


# Files from anywhere.


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "Expecting value"),
        ("[]", "object"),
        ("[" * 100_000, "nested too deeply"),
        (b'{"schema": "\xff"}', "byte 12 is not UTF-8"),
        (json.dumps(record(0, schema=1)), "schema is 1"),
        (json.dumps(record(1)), "rank is 1"),
        (json.dumps(record(0, size=0)), "size is 0"),
        (json.dumps(record(0, wall_ns=10**30)), "wall_ns is 1000"),
        (json.dumps(record(True)), "rank is True"),
        (json.dumps(record(0, host=7)), "host is 7"),
        (json.dumps(record(0, groups={"0": [5000]})), "groups is 5000"),
        (json.dumps(record(0, groups={"world": [0]})), "groups is -1"),
        (json.dumps(record(0, stacks={"MainThread": "step"})), "stacks is no list"),
        (json.dumps(record(0, stacks={"MainThread": ["f"] * 101})), "stacks is no list of at most 100"),
        (json.dumps(record(0, operation(shape=[-1]))), "shape is -1"),
        (json.dumps(record(0, operation(shape=[1] * 7))), "shape is no list"),
        (json.dumps(record(0, operation(status="bad"))), "status is 'bad'"),
        (json.dumps(record(0, {"number": 1})), "is missing"),
        (json.dumps(record(0, *[operation()] * (MAX_OPERATIONS + 1))), "operations is no list of at most 4096"),
        (json.dumps(record(0, pid=None)).replace("null", "1" * 5000), "digits"),
        (" " * (16 << 20) + "{}", "more than 16777216 bytes"),
    ],
)
def test_malformed_files_are_rejected(tmp_path, text, words):
    path = tmp_path / "flight-0.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InvalidArgument, match=re.escape(str(path))) as caught:
        read_flight_record(path)
    assert words in str(caught.value) and len(str(caught.value)) < 400 + len(str(path))


def test_text_of_a_file_cannot_steer_a_terminal(tmp_path):
    found = dumps(tmp_path, record(0, operation(call_site="\x1b[2Jx.py:1"), host="\x1b]0;", size=1))
    assert found[0].host == "?]0;" and found[0].operations[0].call_site == "?[2Jx.py:1"


def test_of_several_jobs_the_last_one_counts(tmp_path):
    for fields in (record(0, job="old"), record(1, wall_ns=NOW + 9 * SECOND)):
        (tmp_path / record_file_name(fields["rank"])).write_text(json.dumps(fields))
    (tmp_path / "flight-3.json").write_text("{")
    found, problems = read_directory(tmp_path)
    assert list(found) == [1]
    assert "flight-3.json" in problems[0] and "flight-0.json is of another job (old)" in problems[1]


# The command.


def dump(*arguments, **keywords):
    command = [sys.executable, "-m", "mlxdist", "dump", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **keywords)


def test_dump_of_files(tmp_path):
    records, findings, _ = SCENARIOS["in the operation before"]
    dumps(tmp_path, *records)
    shown = dump("--files", tmp_path, "--trace", tmp_path / "trace.json")
    assert shown.returncode == 0, shown.stderr
    assert findings[0] in shown.stdout and "all_gather #412" in shown.stdout and "mac1" in shown.stdout
    assert len(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) > 4
    result = json.loads(dump("--files", tmp_path, "--json").stdout)
    assert result["findings"] == findings and result["ranks"][1]["is_straggler"]
    (tmp_path / record_file_name(3)).unlink()
    shown = dump("--files", tmp_path)
    assert shown.returncode == 1 and "Rank 3 has left no record" in shown.stdout


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--files", "nowhere"], "nowhere: No such file"),
        (["--files", "."], "no file flight-<rank>.json"),
        (["no-such-job"], "there is no job 'no-such-job'"),
        (["a", "--files", "b"], "not both"),
    ],
)
def test_dump_rejects(tmp_path, arguments, words):
    shown = dump(*arguments, cwd=tmp_path)
    assert shown.returncode != 0 and words in shown.stderr


# What the ranks write.


def recorded(directory, rank):
    return json.loads((directory / record_file_name(rank)).read_text())


def line_of(comment):
    lines = SCRIPT.read_text().splitlines()
    return f"flight.py:{next(i for i, line in enumerate(lines, 1) if line.endswith(f'  # {comment}'))}"


def test_every_operation_is_recorded_with_its_line(run_ranks, tmp_path):
    run_ranks("flight.py", 3, "operations", environment={"MLXDIST_FLIGHT_DIR": str(tmp_path)})
    for rank in range(3):
        found = recorded(tmp_path, rank)
        shown = [(o["name"], o["group"], o["internal"], o["sequence"], o["call_site"]) for o in found["operations"]]
        wanted = [
            ("all_sum", 0, False, 1, line_of("eager")),
            ("all_gather", 0, False, 2, line_of("started")),
            ("barrier", 0, False, 3, line_of("barrier")),
            ("broadcast", 0, False, 4, line_of("ours")),
            ("all_gather", 0, False, 5, line_of("ours, in nn")),
            ("all_sum", 0, False, 6, "near " + line_of("of MLX")),
            ("split", 0, True, 1, line_of("split")),  # what the ranks ask for, and whether the number is free on all
            ("split", 0, True, 2, line_of("split")),
            ("sendrecv", 0, False, 1, line_of("sendrecv")),
        ]
        if rank != 1:
            wanted.append(("all_max", 1, False, 1, line_of("part")))
        assert shown == wanted
        assert [o["number"] for o in found["operations"]] == list(range(1, len(wanted) + 1))
        first, exchange = found["operations"][0], found["operations"][8]
        assert (first["dtype"], first["shape"], first["bytes"]) == ("float32", [3, 4], 48)
        assert (exchange["destination"], exchange["source"]) == ((rank + 1) % 3, (rank - 1) % 3)
        assert all(o["started_ns"] < o["ended_ns"] <= found["monotonic_ns"] for o in found["operations"])
        assert all(o["status"] == 0 for o in found["operations"])
        assert found["groups"]["0"] == [0, 1, 2] and (rank == 1 or found["groups"]["1"] == [0, 2])
        assert found["threads"]["MainThread"].startswith("flight.py:")
        functions = [call.rpartition(" ")[2] for call in found["stacks"]["MainThread"]]
        assert functions.index("show") + 1 == functions.index("operations")
    assert len(read_directory(tmp_path)[0]) == 3


def test_an_operation_in_progress_is_not_lost_among_others(run_ranks, tmp_path):
    run_ranks("flight.py", 2, "many", environment={"MLXDIST_FLIGHT_DIR": str(tmp_path)})
    first, *others = recorded(tmp_path, 0)["operations"]
    assert first["ended_ns"] is None and first["group"] == 1 and first["waiting_on"] == 1
    assert len(others) == 1000 and [o["sequence"] for o in others] == list(range(501, 1501))


@pytest.mark.parametrize("kind", [pytest.param("numpy", marks=pytest.mark.long), "mlx"])
def test_a_failure_is_recorded_by_every_rank_and_its_error_names_the_file(run_ranks, tmp_path, kind):
    variables = {"MLXDIST_FLIGHT_DIR": str(tmp_path / "new"), "MLXDIST_TIMEOUT": "0.5"}
    outputs = run_ranks("flight.py", 3, "fails", kind, status=1, environment=variables)
    for rank, output in enumerate(outputs):
        assert "written True" in output, output
        assert f"; flight recorder: {tmp_path}/new/flight-{rank}.json; `mlxdist dump --files" in output
    found, problems = read_directory(tmp_path / "new")
    assert sorted(found) == [0, 1, 2] and problems == []
    assert all("all_sum" in dump.error and dump.reason == dump.error for dump in found.values())
    analysis = analyze(found)
    assert [state.rank for state in analysis.states if state.is_straggler] == [1]
    assert "Rank 1 has not been in an operation yet" in analysis.findings[1]


@pytest.mark.long
def test_no_file_where_none_is_requested(run_ranks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    variables = {"MLXDIST_FLIGHT_DIR": "none", "MLXDIST_TIMEOUT": "0.5"}
    for output in run_ranks("flight.py", 2, "fails", "numpy", status=1, environment=variables):
        assert "written False" in output and "flight recorder" not in output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_without_a_launcher_files_go_to_the_current_directory(tmp_path):
    environ = {name: value for name, value in os.environ.items() if name != "MLXDIST_FLIGHT_DIR"}
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    environ |= {"MLXDIST_WORLD_SIZE": "2", "MLXDIST_RENDEZVOUS": address, "MLXDIST_SECRET": "ab" * 32}
    environ["MLXDIST_TIMEOUT"] = "0.5"
    command = [sys.executable, str(SCRIPT), "fails", "numpy"]
    ranks = [
        subprocess.Popen(
            command, env=environ | {"MLXDIST_RANK": rank}, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for rank in "01"
    ]
    for rank, process in enumerate(ranks):
        output, _ = process.communicate(timeout=60)
        assert f"flight recorder: {tmp_path}/flight-{rank}.json".encode() in output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["flight-0.json", "flight-1.json"]


@pytest.mark.long
def test_dump_of_a_running_job(tmp_path, monkeypatch):
    """Ranks answer from inside an evaluation; one that is stopped is named; the job goes on."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("MLXDIST_FLIGHT_DIR", raising=False)
    go_on = tmp_path / "go_on"
    program = f"import sys, runpy; sys.argv = ['', 'asked', {str(go_on)!r}]; runpy.run_path({str(SCRIPT)!r})"
    with running(3, program) as launcher:
        ready = dict(re.match(r"\[(\d)\] ready (\S+) (\d+)", line).group(1, 3) for line in launcher.first_lines)
        assert wait_for(lambda: "wait in all_sum #2" in dump("--json").stdout, 20)
        # What rank 2 has from rank 0 waits for what comes from rank 1.
        assert [rank["waiting_on"] for rank in json.loads(dump("--json").stdout)["ranks"]] == [1, None, 1]
        shown = dump()
        assert shown.returncode == 0, shown.stdout + shown.stderr
        assert "the others wait in all_sum #2" in shown.stdout and "Rank 1 computes since all_sum #1" in shown.stdout
        assert "(the program is at flight.py:" in shown.stdout
        assert "Rank 1 is not where the others are, but at " in shown.stdout
        assert re.search(r"ranks 0 and 2, MainThread\n    \S+flight.py:\d+  asked\n", shown.stdout)
        os.kill(int(ready["2"]), signal.SIGSTOP)
        shown = dump("--timeout", "0.5")
        assert "rank 2 has not responded to SIGUSR2 for 0.5 s" in shown.stdout
        os.kill(int(ready["2"]), signal.SIGCONT)
        go_on.touch()
        assert launcher.wait(20) == 0


def test_the_example_in_the_documentation(tmp_path):
    """What docs/debugging.md shows is what the command prints."""
    page = (SCRIPT.parents[2] / "docs" / "debugging.md").read_text()
    shown = re.search(r"    \$ mlxdist dump\n(.*?)\n\n.*?(    Rank 1 is not .*?)\n\n`--no-stacks`", page, re.DOTALL)
    waits = {"waiting_on": 1, "call_site": "train.py:90"}
    late = operation("all_gather", 412, "train.py:88", waiting_on=2)
    dumps(
        tmp_path,
        *(record(rank, operation(**waits), host=f"studio{rank}", stacks={"MainThread": STEP}) for rank in (0, 2, 3)),
        record(1, late, host="studio1", stacks={"MainThread": LOAD}),
    )
    printed = dump("--files", tmp_path).stdout
    assert _lines(f"{shown[1]}\n{shown[2]}") == _lines(printed)
    assert _lines(shown[1]) == _lines(dump("--files", tmp_path, "--no-stacks").stdout)


def _lines(text):
    return [line.strip() for line in text.splitlines()]
