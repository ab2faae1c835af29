"""A host of a job, as the launcher sees it: an agent at the other end of an ssh connection, and the ranks there."""

import contextlib
import os
import select
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mlxdist.base.errors import ResourceError
from mlxdist.cluster.hostfile import Host
from mlxdist.cluster.ssh.ssh import LOST, SshConfig, cannot_run, is_this_machine, why_lost

from .frames import GREETING, FrameError, Frames, Kind, pack, pack_json, unpack_json

__all__ = ["AGENT", "HostInput", "RemoteHost", "RemoteRank"]

AGENT = "mlxdist.launch.agent"

# What the start files of a shell may print before the agent greets.
_MAX_NOISE = 1 << 16
_READ_BYTES = 1 << 16
_LAST_LINES = 20


@dataclass
class RemoteRank:
    """A rank on a host of the job. Its exit status comes with the connection."""

    rank: int
    host: "RemoteHost"
    status: int | None = None

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host.name}"

    def poll(self) -> int | None:
        return self.status

    def signal(self, number: signal.Signals) -> None:
        self.host.send(pack(Kind.SIGNAL, self.rank, bytes([number])))


class HostInput:
    """The standard input of the ranks on a host; see `standard_input`. One frame is under way at a time."""

    def __init__(self, host: "RemoteHost", wake: Callable[[], None]) -> None:
        self.name = host.name
        self._host = host
        self._wake = wake
        self._is_under_way = False
        self._is_over = host.state.closed
        host.input = self

    def offer(self, data: memoryview) -> int:
        if self._is_over:
            raise BrokenPipeError
        if self._is_under_way:
            return 0
        self._is_under_way = True
        self._host.send(pack(Kind.INPUT, payload=bytes(data)))
        return len(data)

    def close(self) -> None:
        self._host.send(pack(Kind.INPUT))

    def taken(self, wants_more: bool) -> None:
        """The host has said so, or will say nothing any more. In the thread that reads from it."""
        self._is_over = self._is_over or not wants_more
        self._is_under_way = False
        self._wake()


@dataclass
class _State:
    """What the agent has said. Changed by the thread that reads, under the condition of the job."""

    hello: dict[str, Any] | None = None
    ready: dict[str, Any] | None = None
    ended: dict[str, Any] | None = None
    failed: str | None = None
    exit_code: int = 1
    first_failed: int | None = None
    stopped: signal.Signals | None = None
    closed: bool = False
    streams: dict[tuple[Kind, int], int] = field(default_factory=dict)
    ranks: dict[int, RemoteRank] = field(default_factory=dict)


class RemoteHost:
    """Starts an agent by ssh, or beside the launcher where the host is this machine."""

    def __init__(self, host: Host, ssh_config: SshConfig, changed: threading.Condition) -> None:
        self.name = host.name
        self.is_local = is_this_machine(host.name)
        self.state = _State()
        self._command = ssh_config.module(host.name, AGENT)
        self._changed = changed
        self._frames = Frames()
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._wake: Callable[[], None] = lambda: None
        self.input: HostInput | None = None
        self._sending = threading.Lock()
        self.say: Callable[[str], None] = lambda text: None

    def connect(self, wake: Callable[[], None]) -> None:
        """``wake`` is called when a rank has ended, or the connection."""
        self._wake = wake
        pipe = subprocess.PIPE
        try:
            self.process = subprocess.Popen(
                self._command, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True
            )
        except OSError as error:
            raise ResourceError(cannot_run(self.name, error)) from None
        self._errors, self._reader = (
            threading.Thread(target=read, name=f"mlxdist {self.name}", daemon=True)
            for read in (self._read_errors, self._read_frames)
        )
        self._errors.start()
        self._reader.start()  # waits for the other one in the end

    def send(self, data: bytes) -> None:
        try:
            view = memoryview(data)
            with self._sending:
                while view:
                    view = view[self.process.stdin.write(view) :]
        except (BrokenPipeError, ValueError):  # the end of the connection is noticed by who reads
            return

    @property
    def is_mac(self) -> bool:
        """As the agent says, once it has greeted."""
        return self.state.hello is not None and self.state.hello.get("system") == "darwin"

    def ping(self, silence: float) -> None:
        """Says that the launcher lives. Never waits: what is under way to the host says so as well."""
        if not self._sending.acquire(blocking=False):
            return
        try:
            writable = select.poll()  # a pipe that is: it takes this much
            writable.register(self.process.stdin, select.POLLOUT)
            if writable.poll(0):
                self.process.stdin.write(pack_json(Kind.PING, {"seconds": silence}))
        except (BrokenPipeError, ValueError):  # the end of the connection is noticed by who reads
            return
        finally:
            self._sending.release()

    def prepare(self, fields: dict[str, Any]) -> None:
        self.send(pack_json(Kind.PREPARE, fields))

    def start(self, fields: dict[str, Any]) -> None:
        self.send(pack_json(Kind.START, fields))

    def add_rank(self, rank: int, stdout: int, stderr: int) -> RemoteRank:
        """What the rank prints will be written to the descriptors, which belong to this object from now on."""
        added = RemoteRank(rank, self)
        self.state.ranks[rank] = added
        self.state.streams |= {(Kind.OUT, rank): stdout, (Kind.ERR, rank): stderr}
        return added

    def note_end(self, rank: RemoteRank) -> None:
        """That rank is another host's."""
        self.send(pack_json(Kind.GONE, {"status": rank.status}, rank.rank))

    def end(self) -> None:
        self.send(pack(Kind.END))

    def close(self, seconds: float) -> None:
        """Waits until the agent has left, and ends the connection if it does not."""
        with contextlib.suppress(BrokenPipeError):  # it has left already
            self.process.stdin.close()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join()
        self.process.stdout.close()
        self.process.stderr.close()

    def why_lost(self) -> str:
        """In words, once the connection has ended."""
        words = next((line for line in reversed(self._last_lines) if line), "")
        return why_lost(self.name, self.state.hello is not None, words)

    def _read_frames(self) -> None:
        try:
            if (data := self._skip_noise()) is not None:
                while True:
                    for kind, rank, payload in self._frames.feed(data):
                        self._take(kind, rank, payload)
                    if not (data := self.process.stdout.read(_READ_BYTES)):
                        break
        except (FrameError, LookupError, TypeError, ValueError) as error:
            self._last_lines.append(f"what it sends is not understood: {error}")
            self.process.kill()
        finally:
            self._close_all()

    def _skip_noise(self) -> bytes | None:
        """What follows the agent's greeting; None if it does not greet."""
        noise = b"\n"
        while GREETING not in noise:
            data = self.process.stdout.read(_READ_BYTES)
            if not data or len(noise) > _MAX_NOISE:
                self._last_lines.extend(noise.decode(errors="replace").split("\n"))
                return None
            noise += data
        return noise.partition(GREETING)[2]

    def _read_errors(self) -> None:
        """What ssh and the agent itself say."""
        for line in self.process.stderr:
            text = line.decode(errors="replace").rstrip()
            self._last_lines.append(text)
            if self.state.hello is not None:
                self.say(f"{self.name}: {text}")

    def _take(self, kind: Kind, rank: int, payload: bytes) -> None:
        state = self.state
        if kind in (Kind.OUT, Kind.ERR):
            self._print(kind, rank, payload)
            return
        if kind == Kind.TAKEN:
            if self.input is not None:
                self.input.taken(wants_more=not payload)
            return
        fields = {} if kind == Kind.STOPPED else unpack_json(payload)
        with self._changed:
            if kind == Kind.HELLO:
                state.hello = fields
            elif kind == Kind.READY:
                state.ready = fields
            elif kind == Kind.FAILED:
                state.failed, state.exit_code = str(fields["text"]), int(fields["status"])
            elif kind == Kind.EXIT:
                state.first_failed = fields["first"] if state.first_failed is None else state.first_failed
                state.ranks[rank].status = int(fields["status"])
            elif kind == Kind.STOPPED:
                state.stopped = signal.Signals(payload[0])
            elif kind == Kind.ENDED:
                state.ended = fields
            self._changed.notify_all()
        self._wake()

    def _print(self, kind: Kind, rank: int, data: bytes) -> None:
        stream = self.state.streams.get((kind, rank))
        if stream is None:
            return
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(stream, view) :]
        except BrokenPipeError:  # nobody reads the launcher's output any more
            data = b""
        if not data:
            os.close(self.state.streams.pop((kind, rank)))

    def _close_all(self) -> None:
        for stream in self.state.streams.values():
            os.close(stream)
        self.state.streams.clear()
        self.process.wait()
        self._errors.join()  # what ssh has said of it
        with self._changed:
            self.state.closed = True
            for rank in self.state.ranks.values():
                if rank.status is None:
                    rank.status = LOST
            self._changed.notify_all()
        if self.input is not None:
            self.input.taken(wants_more=False)
        self._wake()
