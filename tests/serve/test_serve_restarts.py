"""`mlxdist serve` when ranks die: it says so, starts all again, and answers what had no output yet."""

import contextlib
import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from click.testing import CliRunner
from launching import nothing_left  # noqa: F401
from serving import ServerProcess, save_model_folder
from waiting import seconds_of, wait_for

from mlxdist.cli.serve import serve
from mlxdist.launch.exit_status import Ending
from mlxdist.launch.restarts import LASTING, run_with_restarts
from mlxdist.launch.wakeup import Wakeup

ENDLESS = {"256": -100}  # the token that ends an answer
FOUR_PLACES = ["--decode-concurrency", 4, "--prompt-concurrency", 4]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model_folder(tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=8192)


@pytest.fixture(scope="module")
def expected(model):
    """Requests, and what one process answers to each: greedy and seeded ones, of which some are long."""
    bodies = [{"prompt": f"number {i}", "temperature": i % 2, "seed": i, "logit_bias": ENDLESS} for i in range(6)]
    bodies = [body | {"max_tokens": 300 if i < 2 else 6} for i, body in enumerate(bodies)]
    with ServerProcess(model) as server, ThreadPoolExecutor(6) as threads:
        return list(zip(bodies, threads.map(lambda body: server.ask(body)["choices"], bodies)))


class Starts:
    """A follower of a job of which each start was ready for these seconds. It records its calls."""

    def __init__(self, seconds):
        self._seconds = iter(seconds)
        self.told = []

    def seconds_ready(self):
        return next(self._seconds)

    def failed(self, reason, pause, rank):
        assert rank == 1
        self.told.append((reason.removeprefix("rank 1 failed"), pause))


FIRST, SECOND, LAST = "; restart 1 of 2", "; restart 2 of 2", "; it was the last of 2 restarts"


@pytest.mark.parametrize(
    "seconds, told",
    [
        ([0], [("", None)]),  # bad arguments, no such model: it would be the same again
        ([9, 9, 9], [(FIRST, 1), (SECOND, 1), (LAST, None)]),
        ([9, 0, 0], [(FIRST, 1), (SECOND, 2), (LAST, None)]),
        ([9, 9, LASTING, 0, 0], [(FIRST, 1), (SECOND, 1), (FIRST, 1), (SECOND, 2), (LAST, None)]),
    ],
)
def test_which_failures_are_followed_by_a_restart(seconds, told, monkeypatch):
    wakeup, follower, started, said = Wakeup(), Starts(seconds), [], []
    monkeypatch.setattr(wakeup, "wait", lambda seconds: None)

    def run_once(restart):
        started.append(restart)
        return Ending(3, "rank 1 failed; rank 0 left by itself", True, "rank 1 failed", 1)

    assert run_with_restarts("job", run_once, 2, wakeup, said.append, None, follower) == 3
    assert started == list(range(len(seconds))) and follower.told == told
    ends = ["." if pause is None else f" in {pause} s." for _, pause in told]
    assert said == [f"rank 1 failed; rank 0 left by itself{reason}{end}" for (reason, _), end in zip(told, ends)]


def test_one_process_is_not_restarted():
    done = CliRunner().invoke(serve, ["models/qwen", "--max-restarts", "2"])
    assert done.exit_code == 2 and "--max-restarts is for ranks that this command starts" in done.output


@pytest.mark.parametrize("words", [[], ["-n", "2"], ["--print-service=systemd"]])
@pytest.mark.parametrize("seconds", ["3601", "inf"])
def test_drain_has_the_range_that_it_has_for_the_launcher(words, seconds):
    done = CliRunner().invoke(serve, ["models/qwen", *words, "--drain", seconds])
    assert done.exit_code == 2 and f"'--drain': {float(seconds)} is not in the range" in done.output
    assert "Usage: serve" in done.output


@pytest.mark.long
@pytest.mark.parametrize("access_log", [True, False])
def test_ranks_get_the_options_as_they_were_typed(model, access_log):
    """Rank 0 has the application of HTTP where there are no restarts."""
    options = [] if access_log else ["--no-access-log"]
    with ServerProcess(model, 2, "--max-restarts", 0, *options) as server:
        assert server.text("x", 2)
        assert server.stop() == 0
    assert any("/v1/completions" in line for line in server.lines) == access_log


def health(server):
    status, answer, headers = server.request(None, "/health", timeout=10)
    return status, answer.get("reason", ""), headers.get("Retry-After")


def is_ready(server):
    return health(server)[0] == 200


@pytest.mark.long
@pytest.mark.parametrize("ranks, victim, hosts", [(2, 1, False), (2, 0, False), (3, 2, False), (2, 0, True)])
def test_a_rank_that_is_killed_under_load(model, expected, ranks, victim, hosts):
    """Streams end with an event that names it; what had no output is answered, as by one process; new requests wait."""
    where = (1, "--hosts", f"localhost:{ranks}") if hosts else (ranks,)
    with ServerProcess(model, *where, *FOUR_PLACES) as server, ThreadPoolExecutor(8) as threads:
        server.ranks = ranks
        body = {"prompt": "x", "max_tokens": 8000, "logit_bias": ENDLESS}
        streams = [threads.submit(server.stream, body) for _ in range(2)]
        assert wait_for(lambda: server.metrics()["running"] == 2, 30)
        others = [threads.submit(server.request, body, timeout=150) for body, _ in expected]
        assert wait_for(lambda: server.metrics()["queued"] > 0, 30)
        assert wait_for(lambda: server.metrics()["generated_tokens_total"] > 60, 30)
        os.kill(server.pids()[victim], signal.SIGKILL)
        assert wait_for(lambda: f"rank {victim} failed first" in health(server)[1], 30)
        status, reason, seconds = health(server)
        assert status == 503 and reason.endswith("; restart 1 of 3") and 1 <= int(seconds) <= 600
        status, answer, headers = server.request(expected[0][0])
        assert (status, answer["error"]["message"]) == (503, reason) and 1 <= int(headers["Retry-After"]) <= 600
        for stream in streams:
            *parts, last = stream.result(60)
            assert len(parts) > 1 and all("text" in json.loads(part)["choices"][0] for part in parts)
            error = {"message": reason, "type": "server_error", "param": None, "code": "service_unavailable"}
            assert json.loads(last)["error"] == error
        for (_, choices), other in zip(expected, others):
            status, answer, _ = other.result(150)
            assert (status, answer["choices"]) == (200, choices)
        assert is_ready(server) and server.metrics()["restarts_total"] == 1
        ready = f"is ready at {server.address}, ranks: {ranks}"
        assert sum(line.startswith("[0") and ready in line for line in server.lines) == 2
        assert server.stop() == 0, "".join(server.lines)


@pytest.mark.long
def test_the_last_restart(model):
    """Its failure ends the server, with the status of the rank; requests get the reason."""
    with ServerProcess(model, 2, "--max-restarts", 1) as server, ThreadPoolExecutor(1) as threads:
        os.kill(server.pids()[1], signal.SIGKILL)
        assert wait_for(lambda: not is_ready(server), 30) and wait_for(lambda: is_ready(server), 60)
        waiting = threads.submit(server.request, {"prompt": "x", "max_tokens": 8000, "logit_bias": ENDLESS})
        assert wait_for(lambda: server.metrics()["running"] == 1, 30)
        os.kill(server.pids()[1], signal.SIGKILL)
        status, answer, _ = waiting.result(60)
        assert status == 503 and answer["error"]["message"].endswith("; it was the last of 1 restarts")
        assert server.process.wait(30) == 128 + signal.SIGKILL


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_restart(model, number):
    with ServerProcess(model, 2) as server:
        os.kill(server.pids()[1], signal.SIGKILL)
        assert wait_for(lambda: "restart 1 of 3" in health(server)[1], 30)
        assert server.stop(number) == 128 + number
        assert any(f"interrupted by {number.name} before restart 1 of 3" in line for line in server.lines)


@pytest.mark.long
def test_twenty_rounds(model, expected, capsys):
    """A rank is killed under load 20 times, each in turn; prints how long it takes until the server is ready again."""
    started = time.monotonic()
    ends, outcomes = threading.Event(), []

    def ask(each):
        body, choices = expected[each % len(expected)]
        while not ends.is_set():
            with contextlib.suppress(OSError):
                status, answer, _ = server.request(body)
                outcomes.append("same" if status == 200 and answer["choices"] == choices else status)
            ends.wait(0.05)

    with ServerProcess(model, 2, "--max-restarts", 20, *FOUR_PLACES) as server, ThreadPoolExecutor(6) as threads:
        load, took = time.monotonic() - started, []
        asking = [threads.submit(ask, each) for each in range(6)]
        try:
            for number in range(20):
                tokens = server.metrics()["generated_tokens_total"]
                assert wait_for(lambda: server.metrics()["generated_tokens_total"] > tokens + 20, 60)
                os.kill(server.pids()[number % 2], signal.SIGKILL)
                seconds, again = seconds_of(
                    lambda: wait_for(lambda: not is_ready(server), 30) and wait_for(lambda: is_ready(server), 90)
                )
                assert again
                took.append(seconds)
        finally:
            ends.set()
        for each in asking:
            each.result(90)
        assert server.metrics()["restarts_total"] == 20
        assert server.stop() == 0
    with capsys.disabled():
        print(f"\nfirst start {load:.2f} s; ready again after {', '.join(f'{seconds:.2f}' for seconds in took)} s")
    assert len(took) == 20 and set(outcomes) <= {"same", 503} and outcomes.count("same") > 20


@pytest.mark.long
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_sigterm_lets_requests_end(model, ranks):
    """A second one ends them. New ones are refused at once."""
    body = {"prompt": "x", "logit_bias": ENDLESS}
    for again in (False, True):
        with ServerProcess(model, ranks, "--drain", 300) as server, ThreadPoolExecutor(1) as threads:
            stream = threads.submit(server.stream, body | {"max_tokens": 8000 if again else 1000})
            assert wait_for(lambda: server.metrics()["generated_tokens_total"] > 0, 30)
            server.process.send_signal(signal.SIGTERM)
            assert wait_for(lambda: health(server)[1] == "the server stops")
            status, answer, headers = server.request(body)
            assert (status, answer["error"]["message"]) == (503, "the server stops")
            assert 1 <= int(headers["Retry-After"]) <= 300
            if again:
                server.process.send_signal(signal.SIGTERM)
            *parts, last = stream.result(250)
            if again:
                assert json.loads(last)["error"]["message"] == "the server stops"
            else:
                assert last == "[DONE]" and json.loads(parts[-1])["choices"][0]["finish_reason"] == "length"
            assert server.process.wait(30) == 0, "".join(server.lines)
