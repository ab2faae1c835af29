"""A set of ranks for the chaos test: processes that get rounds, are signaled in them, and checked."""

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

from launching import marked_processes, shared_memory_names
from waiting import wait_for

__all__ = ["Failed", "Job"]

RANK = Path(__file__).parent.parent / "rank_scripts" / "chaos.py"
STARTED = 60.0
# A rank that is killed is noticed within a second; this is for a machine that is busy with other things.
NOTICED = 5.0
# For all steps of a round, however often they are repeated and held up.
PLAYED = 90.0
# finalize() of ranks that have lost each other.
ENDED = 20.0


class Failed(Exception):
    """A promise is broken; the text says which."""


class Job:
    """A context manager: afterwards nothing of the job is left, or it raises Failed."""

    def __init__(self, ranks: int, environment: dict[str, str]) -> None:
        self.ranks, self.environment = ranks, environment
        self.slowest = 0.0  # from the event that ended a round to the last error
        self._playing = ""
        self._marker = uuid.uuid4().hex

    def __enter__(self) -> "Job":
        self._names = shared_memory_names()
        self._directory = tempfile.TemporaryDirectory(prefix="chaos-")
        self._temporary = Path(self._directory.name, "tmp")
        self._temporary.mkdir()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self._address = listener.getsockname()
            secret = os.urandom(32).hex()
            self._processes = [self._start(rank, listener, secret) for rank in range(self.ranks)]
        self._selector = selectors.DefaultSelector()
        self._unread = [b""] * self.ranks
        for rank, process in enumerate(self._processes):
            os.set_blocking(process.stdout.fileno(), False)
            self._selector.register(process.stdout, selectors.EVENT_READ, rank)
        return self

    def _start(self, rank: int, listener: socket.socket, secret: str) -> subprocess.Popen:
        variables = {name: value for name, value in os.environ.items() if not name.startswith("MLXDIST_")}
        variables |= {
            "TEST_MARKER": self._marker,
            "TMPDIR": str(self._temporary),
            "MLXDIST_RANK": str(rank),
            "MLXDIST_WORLD_SIZE": str(self.ranks),
            "MLXDIST_RENDEZVOUS": f"127.0.0.1:{self._address[1]}",
            "MLXDIST_SECRET": secret,
            "MLXDIST_TUNING_FILE": "none",
            "MLXDIST_FLIGHT_DIR": self._directory.name,
        } | self.environment
        passed = ()
        if rank == 0:
            passed = (listener.fileno(),)
            variables["MLXDIST_RENDEZVOUS_FD"] = str(listener.fileno())
        log = open(self._log(rank), "wb")
        with log:
            return subprocess.Popen(
                [sys.executable, str(RANK)],
                env=variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                pass_fds=passed,
            )

    def _log(self, rank: int) -> Path:
        return Path(self._directory.name, f"rank-{rank}.log")

    # Rounds.

    def play(self, plan: dict[str, Any]) -> None:
        """Plays a round on ranks that have played others, all well.

        Raises:
            Failed: a result was wrong, an error was not the right one, came too late, or did not come.
        """
        self._victims = {event["rank"] for event in plan["events"] if event["what"] == "kill"}
        self._mortal = {event["rank"] for event in plan["events"] if event["what"] == "die"}
        self._killed: dict[int, float] = {}
        self._resumed = 0.0
        outcomes = self._command({"round": plan}, PLAYED, plan["events"])
        if plan["ends"] is None:
            wrong = {rank: news for rank, news in outcomes.items() if "done" not in news}
            if wrong:
                raise Failed(f"all results should have been right: {wrong}")
            return
        # Some ranks may have had all that they needed before it happened: their next operation fails.
        late = {rank for rank, news in outcomes.items() if "done" in news}
        if plan["ends"].get("maybe") and len(late) == self.ranks:
            return
        if late:
            outcomes |= self._command({"probe": True}, PLAYED, [], late)
        for rank, news in outcomes.items():
            _judge(rank, news, plan["ends"])

    def _command(
        self, command: dict, seconds: float, events: list[dict], ranks: set[int] | None = None
    ) -> dict[int, dict]:
        """Tells the ranks, does to them what is due, and returns how it ended on those that are left."""
        waited = {r for r in range(self.ranks) if r not in self._killed} if ranks is None else set(ranks)
        for rank in waited:
            self._tell(rank, command)
        outcomes: dict[int, dict] = {}
        actions: list[tuple[float, int, int]] = []  # time, rank, signal
        limit = time.monotonic() + seconds
        while waited - outcomes.keys() or actions:
            now = time.monotonic()
            if now > limit:
                self._fail_hanging(waited - outcomes.keys())
            for action in sorted(action for action in actions if action[0] <= now):
                actions.remove(action)
                self._signal(action[1], action[2])
            if self._killed:
                waited -= self._killed.keys()
                last = max(*self._killed.values(), self._resumed) if self._killed.keys() >= self._victims else limit
                limit = min(limit, max(last, self._resumed) + NOTICED) if not actions else limit
            pause = min([time_ - now for time_, _, _ in actions] + [0.05])
            for rank, news in self._news(max(0.0, pause)):
                if "at" in news:
                    actions += _actions(events, rank, news["at"])
                else:
                    outcomes[rank] = news
                    if self._killed and "error" in news:
                        self.slowest = max(self.slowest, time.monotonic() - max(self._killed.values()))
        return {rank: news for rank, news in outcomes.items() if rank not in self._killed}

    def _tell(self, rank: int, command: dict) -> None:
        with contextlib.suppress(BrokenPipeError):  # it says more when it is missing
            self._processes[rank].stdin.write(json.dumps(command).encode() + b"\n")
            self._processes[rank].stdin.flush()

    def _news(self, seconds: float) -> list[tuple[int, dict]]:
        found = []
        for key, _ in self._selector.select(seconds):
            rank, data = key.data, os.read(key.fileobj.fileno(), 1 << 16)
            if not data:
                self._selector.unregister(key.fileobj)
                if rank in self._mortal:
                    self._killed.setdefault(rank, time.monotonic())
                elif rank not in self._killed and not self._ending:
                    raise Failed(f"rank {rank} has ended by itself")
            *lines, self._unread[rank] = (self._unread[rank] + data).split(b"\n")
            found += [(rank, json.loads(line)) for line in lines]
        return found

    def _signal(self, rank: int, number: int) -> None:
        if rank in self._killed:
            return
        self._processes[rank].send_signal(number)
        if number == signal.SIGKILL:
            self._killed[rank] = time.monotonic()
        elif number == signal.SIGCONT:
            self._resumed = time.monotonic()

    def _fail_hanging(self, ranks: set[int]) -> None:
        for rank in ranks:
            for number in (signal.SIGCONT, signal.SIGUSR1):
                self._processes[rank].send_signal(number)
        time.sleep(0.5)
        raise Failed(f"ranks {sorted(ranks)} have not answered in time")

    # The end.

    _ending = False
    _killed: dict[int, float] = {}
    _mortal: set[int] = set()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._ending = True
        try:
            self._end()
            if error is None:
                self._look_for_remains()
        except Failed as failed:
            raise Failed(f"{error or failed}\n{self.logs()}") from None
        finally:
            for process in self._processes:
                process.kill()
                process.wait()
                process.stdin.close()
                process.stdout.close()
            self._selector.close()
            logs = self.logs() if error is not None else ""
            self._directory.cleanup()
        if isinstance(error, Failed):
            raise Failed(f"{error}\n{logs}") from None

    def _end(self) -> None:
        for rank, process in enumerate(self._processes):
            self._tell(rank, {"end": True})
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        limit = time.monotonic() + ENDED
        for rank, process in enumerate(self._processes):
            try:
                status = process.wait(max(0.1, limit - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGUSR1)
                time.sleep(0.5)
                raise Failed(f"rank {rank} does not end") from None
            if rank not in self._killed and status not in (0, 1, *(-signal.SIGKILL,) * (rank in self._mortal)):
                raise Failed(f"rank {rank} ended with status {status}")

    def _look_for_remains(self) -> None:
        if not wait_for(lambda: not marked_processes(self._marker)):
            raise Failed(f"processes are left: {marked_processes(self._marker)}")
        if left := list(self._temporary.rglob("*")):
            raise Failed(f"files are left: {left}")
        # Other jobs of this machine come and go meanwhile.
        if not wait_for(lambda: not self._new_names(), 10):
            raise Failed(f"names are left: {self._new_names()}")
        with socket.socket() as probe:
            if probe.connect_ex(self._address) == 0:
                raise Failed(f"something still listens at {self._address}")

    def _new_names(self) -> set[str]:
        return shared_memory_names() - self._names

    def logs(self) -> str:
        texts = [(rank, self._log(rank).read_text(errors="replace")[-4000:]) for rank in range(self.ranks)]
        return "\n".join(f"--- rank {rank} wrote\n{text}" for rank, text in texts if text)


def _actions(events: list[dict], rank: int, step: int) -> list[tuple[float, int, int]]:
    """What is to be done from outside to a rank that has come to a step."""
    found, now = [], time.monotonic()
    for event in events:
        if event["rank"] != rank or event["at"] != step or "delay" not in event:
            continue
        when = now + event["delay"]
        if event["what"] == "kill":
            found.append((when, rank, signal.SIGKILL))
        else:
            found += [(when, rank, signal.SIGSTOP), (when + event["seconds"], rank, signal.SIGCONT)]
    return found


def _judge(rank: int, news: dict, ends: dict) -> None:
    """Whether a rank got the error that it should."""
    if "error" not in news:
        raise Failed(f"rank {rank} should have got an error: {news}")
    if not news["ours"] or news["error"] not in ends["classes"]:
        raise Failed(f"rank {rank} got {news}, not one of {ends['classes']}")
    if not any(text in news["text"] for text in ends["texts"]) or ends.get("all", "") not in news["text"]:
        raise Failed(f"rank {rank} got {news}, which does not say {ends['texts']} {ends.get('all', '')}")
    kind, text, seconds = news["again"]
    if kind != news["error"] or text != news["text"] or seconds > NOTICED:
        raise Failed(f"rank {rank} got {news}, and then another error, or late")
