"""`mlxdist watch` and `mlxdist launch --on-event`: what happens to a job, each thing once."""

import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from launching import RANK, nothing_left, python, running  # noqa: F401, the fixture is for all tests here
from test_flight import NOW, SECOND, ended, operation, record

from mlxdist.base.errors import InvalidArgument
from mlxdist.cluster.facts.power import Power
from mlxdist.launch.event_hook import Event, EventHook
from mlxdist.runtime.diagnostics.flight_records import check_record
from mlxdist.runtime.observation.view import Viewer
from mlxdist.runtime.rendezvous.heartbeat import PeerStatus
from mlxdist.tools.observe.view_events import Conditions, Key, ViewEvents

MEMORY = {"active": 0, "peak": 0, "resident": 10, "private": 480, "total": 1000}

# Conditions.


def test_a_condition_comes_once_and_ends_once():
    conditions = Conditions(10)
    key = Key("straggler", 1)
    times = {0: True, 1: True, 2: False, 9: True, 10: False, 18: False, 19: False, 20: True}
    seen = {now: list(conditions.update({key: f"at {now}"} if active else {}, now)) for now, active in times.items()}
    assert {now: found for now, found in seen.items() if found} == {
        0: [(key, "at 0", False)],
        19: [(key, "", True)],
        20: [(key, "at 20", False)],
    }


# Events of views.


def view_of(*records, notes=()):
    found = {fields["rank"]: check_record(fields, "a test") for fields in records}
    return Viewer().view("job", found, {}, list(notes))


def waits_for_rank_1(seconds):
    waits = operation(started_ns=NOW - seconds * SECOND)
    late = ended(sequence=412, started_ns=NOW - 100 * SECOND, ended_ns=NOW - 90 * SECOND)
    return view_of(record(0, waits, size=2), record(1, late, size=2))


def test_stragglers():
    events = ViewEvents(straggler=5, stall=60, quiet=10)
    assert events.update(waits_for_rank_1(4), 0, 0) == []
    (event,) = events.update(waits_for_rank_1(6), 0, 2)
    assert (event.event, event.rank, event.host, event.over, event.job) == ("straggler", 1, "mac1", False, "job")
    assert event.text.startswith("Others have waited 6.0 s for rank 1. Rank 1 computes since all_sum #412")
    assert events.update(waits_for_rank_1(9), 0, 5) == []
    (event,) = events.update(view_of(*(record(rank, ended(), size=2) for rank in range(2))), 0, 15)
    assert (event.event, event.rank, event.over) == ("straggler", 1, True)
    assert event.text == "Others no longer wait for rank 1."


def test_a_stalled_job_goes_on():
    events = ViewEvents(straggler=500, stall=60, quiet=10)
    assert events.update(waits_for_rank_1(50), 50, 0) == []
    (event,) = events.update(waits_for_rank_1(70), 70, 20)
    assert event.event == "stalled" and event.text.startswith("No rank has gone on for 70 s. Rank 1 computes since")
    (event,) = events.update(waits_for_rank_1(1), 1, 30)
    assert (event.event, event.over, event.text) == ("stalled", True, "Ranks go on again.")


def test_a_rank_that_is_silent():
    events = ViewEvents(straggler=500, stall=600, quiet=10)
    both, one = waits_for_rank_1(1), view_of(record(0, ended(), size=2), notes=["rank 1 is silent"])
    assert events.update(both, 0, 0) == events.update(one, 0, 9) == []
    (event,) = events.update(one, 0, 10)
    assert (event.event, event.rank, event.text) == ("silent", 1, "Rank 1 has not responded for 10 s.")
    assert [event.over for event in events.update(both, 0, 20)] == [True]


def test_a_failure_and_a_slow_mac():
    power = {"low_power": "lowpowermode", "speed": None, "display_sleep": 0}
    events = ViewEvents(straggler=5, stall=60, quiet=10)
    found = events.update(view_of(record(0, ended(), error="rank 1 died", power=power, size=1)), 0, 0)
    assert [(event.event, event.host) for event in found] == [("failed", ""), ("slow", "mac1")]
    assert found[0].text == "The job has failed: rank 1 died"
    assert Power(**power).problems()[0].remedy in found[1].text


def with_memory(*shares, **fields):
    """Ranks of one host, each with this part of its memory."""
    memory = {"active": 0, "peak": 0, "resident": 10**9, "total": 10**9}
    records = (
        record(rank, ended(), memory=memory | {"private": int(share * 10**9)}, size=2)
        for rank, share in enumerate(shares)
    )
    return view_of(*records, **fields)


def test_memory_pressure():
    """It begins at 95 % and ends below 90 %: what goes up and down between them is one event."""
    events = ViewEvents(straggler=5, stall=60, quiet=10)
    found = {}
    for now, shares in ((0, (0.5, 0.4)), (10, (0.5, 0.46)), (20, (0.5, 0.41)), (40, (0.5, 0.5)), (60, (0.5, 0.39)),
                        (80, (0.5, 0.44))):  # fmt: skip
        found[now] = events.update(with_memory(*shares), 0, now)
    assert {now: [(e.event, e.host, e.over) for e in seen] for now, seen in found.items() if seen} == {
        10: [("memory_pressure", "mac1", False)],
        60: [("memory_pressure", "mac1", True)],
    }
    assert found[10][0].text.startswith("mac1: ranks 0 and 1 have 915.53 MiB of its 953.67 MiB of memory (96 %); ")
    assert found[60][0].text == "mac1 has memory again."


def test_the_memory_of_ranks_that_do_not_respond():
    """A host that pages may silence its ranks: they have what they had, until they are gone."""
    both, one = ({rank: check_record(record(rank, memory=MEMORY, size=2), "a test") for rank in ranks}
                 for ranks in ((0, 1), (0,)))  # fmt: skip
    gone = {1: PeerStatus(1, "mac1", 101, None, "", is_gone=True)}
    viewer = Viewer()
    seen = [viewer.view("job", both, {}, []), viewer.view("job", one, {}, []), viewer.view("job", one, gone, [])]
    assert [view.memory["mac1"].used for view in seen] == [960, 960, 480]
    assert [len(view.warnings) for view in seen] == [1, 1, 0]


# Where events go.

EVENT = Event("failed", "741b", "Rank 1 failed first.", rank=1, status=3, restart=0, time=7.0)


def test_a_command_gets_events_in_their_order(tmp_path):
    problems = []
    with EventHook(f"cat >> {tmp_path}/seen; echo >> {tmp_path}/seen", problems.append) as hook:
        for rank in range(3):
            hook.send(Event("silent", "741b", "", rank=rank))
        hook.send(EVENT)
    seen = [json.loads(line) for line in (tmp_path / "seen").read_text().splitlines()]
    assert [event["rank"] for event in seen] == [0, 1, 2, 1] and problems == []
    assert seen[3] == {
        "event": "failed", "job": "741b", "text": "Rank 1 failed first.", "over": False, "rank": 1, "host": "",
        "restart": 0, "status": 3, "time": 7.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("echo no mail here >&2; exit 3", "it has ended with status 3 (no mail here), on 'failed'"),
        ("kill -9 $$", "it has ended with status -9, on 'failed'"),
        ("http://127.0.0.1:9/hook", "refused"),
    ],
)
def test_a_hook_that_fails_is_reported(command, words):
    problems = []
    with EventHook(command, problems.append) as hook:
        hook.send(EVENT)
    assert len(problems) == 1 and problems[0].startswith(f"--on-event {command}: ") and words in problems[0]


@pytest.mark.parametrize(
    ("target", "words"), [("http://[", "Invalid IPv6 URL"), ("https:///hook", "names no host"), (" ", "is empty")]
)
def test_a_target_that_is_none(target, words):
    with pytest.raises(InvalidArgument, match=words):
        EventHook(target, print)
    job = python(1, "print('ran')", options=["--on-event", target])
    assert job.returncode == 2 and words.encode() in job.stderr and job.stdout == b""


def test_a_command_that_does_not_end_is_ended(monkeypatch):
    monkeypatch.setattr("mlxdist.launch.event_hook.HOOK_SECONDS", 0.2)
    problems = []
    with EventHook("sleep 1000 & sleep 1000", problems.append) as hook:
        hook.send(EVENT)
    assert problems and "it was ended after 0.2 s" in problems[0]


def test_a_web_hook():
    seen, problems = [], []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            seen.append((self.path, self.headers["Content-Type"], json.loads(body)["event"]))
            self.send_response(204 if len(seen) == 1 else 500)
            self.end_headers()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with EventHook(f"http://127.0.0.1:{server.server_port}/hook", problems.append) as hook:
            hook.send(EVENT)
            hook.send(EVENT)
        server.shutdown()
    assert seen == [("/hook", "application/json", "failed")] * 2
    assert len(problems) == 1 and "it has responded 500" in problems[0]


# The commands.


def test_events_of_the_launcher(tmp_path):
    """A job that fails, is started again, and ends."""
    hook = f"cat >> {tmp_path}/seen; echo >> {tmp_path}/seen"
    program = "raise SystemExit(3 if rank and os.environ['MLXDIST_RESTART_COUNT'] == '0' else 0)"
    job = python(2, program, options=["--max-restarts", "1", "--on-event", hook])
    assert job.returncode == 0, job.stderr
    seen = [json.loads(line) for line in (tmp_path / "seen").read_text().splitlines()]
    assert [(e["event"], e["restart"], e["rank"], e["status"]) for e in seen] == [
        ("started", 0, None, None),
        ("failed", 0, 1, 3),
        ("started", 1, None, None),
        ("ended", 1, None, 0),
    ]
    assert seen[1]["text"].startswith("Rank 1 failed first, with exit status 3 after ")
    assert seen[2]["job"] == f"{seen[0]['job']}-1" and seen[3]["text"] == "All ranks succeeded."


def test_there_is_no_job():
    command = [sys.executable, "-m", "mlxdist", "watch"]
    found = subprocess.run([*command, "no-such-job"], capture_output=True, text=True, timeout=60)
    assert found.returncode == 2 and "there is no job 'no-such-job'" in found.stderr


@pytest.mark.long
def test_watch(tmp_path):
    """A rank that others wait for, and a restart, in the lines of the command and for its hook."""
    go_on = [tmp_path / "first", tmp_path / "second"]
    program = f"""
import mlxdist, mlx.core as mx
mlxdist.init()
restart = int(os.environ["MLXDIST_RESTART_COUNT"])
mx.eval(mlxdist.all_sum(mx.ones(3)))
print("ready", flush=True)
while rank == 1 and not os.path.exists(({str(go_on[0])!r}, {str(go_on[1])!r})[restart]):
    late(0.01)
if rank == 1 and restart == 0:
    raise SystemExit(3)
mx.eval(mlxdist.all_sum(mx.ones(3)))
"""
    with running(2, program, options=["--max-restarts", "1"]) as job:
        command = [sys.executable, "-m", "mlxdist", "watch", "--json", "--interval", "0.2", "--straggler-after", "1"]
        command += ["--on-event", f"cat > {tmp_path}/event; mv {tmp_path}/event {tmp_path}/passed-on"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watch:
            events = []
            for line in watch.stdout:
                events.append(json.loads(line))
                name, is_first = events[-1]["event"], not events[-1]["job"].endswith("-1")
                if name == "straggler" and not events[-1]["over"]:
                    go_on[not is_first].touch()
            assert watch.wait(60) == 0
        assert job.wait(60) == 0
    names = [(event["event"], event["job"].endswith("-1")) for event in events if not event["over"]]
    assert [name for name in names if name[0] != "failed"] == [
        ("watched", False), ("straggler", False), ("ended", False),
        ("watched", True), ("straggler", True), ("ended", True),
    ]  # fmt: skip
    assert json.loads((tmp_path / "passed-on").read_text()) == events[-1]
