"""A host of a job in the launcher: the connection to its agent, and the ranks there."""

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mlxdist.base.validation import build
from mlxdist.cluster.hostfile.hosts import Host
from mlxdist.cluster.ssh.connection import Connection
from mlxdist.cluster.ssh.protocol import FrameError, Kind, pack, pack_json, unpack_json
from mlxdist.cluster.ssh.ssh import LOST, SshConfig, is_this_machine

from .exit_status import FirstFailure
from .job_frames import AGENT, JobFrame
from .membership_socket import Question

__all__ = ["HostInput", "RemoteHost", "RemoteRank"]


@dataclass
class RemoteRank:
    """A rank on a host of the job. The agent sends its exit status."""

    rank: int
    host: "RemoteHost"
    status: int | None = None

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host.name}"

    def poll(self) -> int | None:
        return self.status

    def signal(self, number: signal.Signals) -> None:
        self.host.send(JobFrame.SIGNAL, self.rank, bytes([number]))


class HostInput:
    """The standard input of the ranks on a host; see `standard_input`. At most one frame is in transit at a time."""

    def __init__(self, host: "RemoteHost", wake: Callable[[], None]) -> None:
        self.name = host.name
        self._host = host
        self._wake = wake
        self._is_under_way = False
        self._is_over = host.closed
        host.input = self

    def offer(self, data: memoryview) -> int:
        if self._is_over:
            raise BrokenPipeError
        if self._is_under_way:
            return 0
        self._is_under_way = True
        self._host.send(JobFrame.INPUT, payload=bytes(data))
        return len(data)

    def close(self) -> None:
        self._host.send(JobFrame.INPUT)

    def acknowledged(self, wants_more: bool) -> None:
        """Notes that the host took the frame, or will take no more. Runs in the thread that reads from the host."""
        self._is_over = self._is_over or not wants_more
        self._is_under_way = False
        self._wake()


class RemoteHost:
    """The agent of one host. Starts it by ssh, or next to the launcher where the host is this machine.

    Attributes hold what the agent has sent so far. The thread that reads changes them, under ``changed``.
    """

    def __init__(self, host: Host, ssh_config: SshConfig, changed: threading.Condition) -> None:
        self.name = host.name
        self.is_local = is_this_machine(host.name)
        self.hello: dict[str, Any] = {}
        self.ready: dict[str, Any] = {}
        self.recordings: str | None = None
        self.failed: str | None = None
        self.exit_code = 1
        self.first_failed: FirstFailure | None = None
        self.questions: list[Question] = []  # that the launcher has not taken yet
        self.stopped: signal.Signals | None = None
        self.closed = False
        self.unanswered = 0  # pings since anything has arrived
        self.input: HostInput | None = None
        self.say: Callable[[str], None] = lambda text: None
        self._ranks: dict[int, RemoteRank] = {}
        self._streams: dict[tuple[int, int], int] = {}
        self._ssh_config = ssh_config
        self._changed = changed
        self._error = ""
        self._is_called = self._is_taking = False

    def connect(self, wake: Callable[[], None]) -> None:
        """Starts the agent. ``wake`` is called when a rank, or the connection, has ended."""
        self._wake = wake
        self._connection = Connection(self.name, self._ssh_config, lambda text: self.say(f"{self.name}: {text}"))
        self._reader = threading.Thread(target=self._read, name=f"mlxdist {self.name}", daemon=True)
        self._reader.start()

    def send(self, kind: JobFrame, rank: int = 0, payload: bytes = b"") -> None:
        self._connection.send(pack(kind, rank, payload))

    def send_json(self, kind: JobFrame, fields: dict[str, Any], rank: int = 0) -> None:
        self._connection.send(pack_json(kind, fields, rank))

    @property
    def is_mac(self) -> bool:
        """Whether the host's greeting says that it is a Mac."""
        return self.hello.get("system") == "darwin"

    def ping(self) -> None:
        """Sends a keepalive. Never waits: bytes that are still in transit have the same effect."""
        if self._is_called:
            self._connection.try_send(pack(JobFrame.PING))
            # It answers once it is ready. While what has arrived waits to be printed, nothing else is read.
            self.unanswered = self.unanswered + 1 if self.ready and not self._is_taking else 0

    def prepare(self, arguments: dict[str, Any]) -> None:
        self._connection.send(pack_json(Kind.CALL, {"call": AGENT, "arguments": arguments}))
        self._is_called = True

    def add_rank(self, rank: int, stdout: int, stderr: int) -> RemoteRank:
        """Adds a rank. Its output is written to the two descriptors, which belong to this object from now on."""
        added = RemoteRank(rank, self)
        self._ranks[rank] = added
        self._streams |= {(JobFrame.OUT, rank): stdout, (JobFrame.ERR, rank): stderr}
        return added

    def close(self, seconds: float) -> None:
        """Waits until the agent has left, and ends the connection if it does not."""
        self._connection.close(seconds, self._reader)

    def why_lost(self) -> str:
        """The reason for the end of the connection, in words, once it has ended."""
        return self._error or self._connection.why_lost()

    def _read(self) -> None:
        try:
            while True:
                frames = self._connection.receive()
                self._is_taking, self.unanswered = True, 0
                for kind, rank, payload in frames:
                    self._take(kind, rank, payload)
                self._is_taking = False
        except EOFError:
            return
        except (FrameError, LookupError, TypeError, ValueError) as error:
            self._error = f"what {self.name} sends is not understood: {error}"
            self._connection.kill()
        finally:
            self._close_all()

    def _take(self, kind: int, rank: int, payload: bytes) -> None:
        if kind in (JobFrame.OUT, JobFrame.ERR):
            self._print(kind, rank, payload)
            return
        if kind == JobFrame.INPUT_ACK:
            if self.input is not None:
                self.input.acknowledged(wants_more=not payload)
            return
        if kind == JobFrame.PONG:
            return
        fields = {} if kind == JobFrame.STOPPED else unpack_json(payload)
        with self._changed:
            if kind == Kind.HELLO:
                self.hello = fields
            elif kind == JobFrame.READY:
                self.ready = fields
            elif kind == JobFrame.FAILED:
                self.failed, self.exit_code = str(fields["text"]), int(fields["status"])
            elif kind == Kind.ERROR:
                self.failed = str(fields["error"])
            elif kind == JobFrame.EXIT:
                if self.first_failed is None and fields["first"] is not None:
                    self.first_failed = FirstFailure(*fields["first"])
                self._ranks[rank].status = int(fields["status"])
            elif kind == JobFrame.QUESTION:
                self.questions.append(build(Question, fields))
            elif kind == JobFrame.STOPPED:
                self.stopped = signal.Signals(payload[0])
            elif kind == Kind.RESULT:
                self.recordings = fields["result"].get("recordings")
            else:
                raise FrameError(f"a frame of kind {kind}")
            self._changed.notify_all()
        self._wake()

    def _print(self, kind: int, rank: int, data: bytes) -> None:
        stream = self._streams.get((kind, rank))
        if stream is None:
            return
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(stream, view) :]
        except BrokenPipeError:  # nothing reads the launcher's output any more
            data = b""
        if not data:
            os.close(self._streams.pop((kind, rank)))

    def _close_all(self) -> None:
        for stream in self._streams.values():
            os.close(stream)
        self._streams.clear()
        # Before `closed` is set: the thread that waits for that then reads the reason.
        self._error = self._error or self._connection.why_lost()  # with what ssh has said of it
        with self._changed:
            self.closed = True
            for rank in self._ranks.values():
                if rank.status is None:
                    rank.status = LOST
            self._changed.notify_all()
        if self.input is not None:
            self.input.acknowledged(wants_more=False)
        self._wake()
