"""The part of `mlxdist launch` on another host: a call with streams of the server that ssh has started there.

It starts the ranks of its host, sends what they print and how they end, and passes signals to them. When the connection
breaks, or brings nothing any more (ssh does not notice on the server's side that the client's machine is gone), the
ranks are ended as on the launcher's own machine: this process leaves, and the reaper of the job does the rest.
"""

import math
import os
import selectors
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from mlxdist.base.errors import InvalidArgument, ResourceError
from mlxdist.cluster.ssh.protocol import Frames, Kind, pack, pack_json, unpack_json
from mlxdist.runtime import mpi_shim

from .backends import Exports, free_ports
from .executable import CannotRun, check_command
from .job_frames import JobFrame
from .local import LocalJob, LocalRank, base_environment, check_fast_synch, start_with_pipes
from .membership import Epoch
from .stale_jobs import remove_stale_jobs
from .standard_input import Feed
from .wakeup import Wakeup
from .writer import MAX_BACKLOG, Writer

__all__ = ["serve"]

_READ_BYTES = 65536
_OF_EPOCHS = (JobFrame.EPOCH, JobFrame.ANSWER, JobFrame.REFUSED, JobFrame.JOINING, JobFrame.JOIN)
_PAUSE = 0.01
_SECONDS = 1.0  # between two looks at the ranks, should a signal be missed
# Seconds for the launcher to end the job in order, after the agent has reported the signal that ends it.
_REACT_SECONDS = 5.0


def serve(source: int, target: int, frames: Frames, arguments: Mapping[str, Any]) -> None:
    """Runs the ranks of this host. Returns when the job or the connection has ended."""
    Agent(source, target, frames).serve(arguments)


class Agent:
    """Serves one launcher. ``source`` and ``target`` are the descriptors of the connection."""

    def __init__(self, source: int, target: int, frames: Frames) -> None:
        self._source, self._target = source, target
        self._frames = frames
        self._wakeup = Wakeup()
        self._writer = Writer(self._wakeup.wake)
        self._selector = selectors.DefaultSelector()
        self._job: LocalJob | None = None
        self._ranks: dict[int, LocalRank] = {}
        self._statuses: dict[int, int] = {}
        self._numbers: range = range(0)
        self._streams: dict[int, tuple[JobFrame, int]] = {}
        self._input = Feed(self._selector, _warn)
        self._owes_ack = False
        self._ending = self._end_sent = False
        self._is_stopped = False  # by a signal
        self._leave_at = math.inf

    def serve(self, arguments: Mapping[str, Any]) -> None:
        self._selector.register(self._source, selectors.EVENT_READ, self._read)
        self._selector.register(self._wakeup, selectors.EVENT_READ, self._take_signals)
        with self._wakeup.signals():
            try:
                self._prepare(arguments)
                self._take_frames(b"")
                # The silence after which the launcher counts as lost is measured only now: preparing may take longer.
                self._silence, self._last_arrival = arguments["silence"], time.monotonic()
                while not self._end_sent:
                    self._step(_SECONDS)
                while not self._writer.wait(_PAUSE):
                    self._step(0)
            except (BrokenPipeError, ConnectionError, EOFError):
                return
            finally:
                if self._job is not None:
                    self._job.__exit__()

    def _step(self, seconds: float) -> None:
        if self._ending and not self._end_sent and self._job is not None and self._job.has_ended():
            self._send_end(self._job)
            return
        full = self._writer.is_full(MAX_BACKLOG)
        for key, _ in self._selector.select(seconds):
            if key.fd not in self._streams:
                key.data()
            elif not full:
                self._relay(key.fd)
        if full:
            time.sleep(_PAUSE)  # what the ranks print stays readable
        # Acknowledged once the ranks have read: the launcher has one frame in transit, so no input piles up here.
        if self._owes_ack and (self._input.wants_more or not self._input.has_readers):
            self._owes_ack = False
            self._put(pack(JobFrame.INPUT_ACK, payload=b"" if self._input.has_readers else b"none"))
        self._pass_questions()
        self._reap()
        now = time.monotonic()
        if now > self._last_arrival + self._silence:
            _warn(f"nothing arrived from the launcher for {self._silence:g} s, so its ranks here are ended")
            raise EOFError
        if now > self._leave_at or self._writer.broken:
            raise EOFError

    def _read(self) -> None:
        data = os.read(self._source, _READ_BYTES)
        if not data:
            raise EOFError
        self._take_frames(data)
        self._last_arrival = time.monotonic()  # to prepare a job may have taken its time

    def _take_signals(self) -> None:
        for number in self._wakeup.read():
            if number == signal.SIGUSR1:
                for rank in self._ranks.values():
                    rank.signal(number)
                continue
            if self._is_stopped:
                raise EOFError
            # Reported, because the launcher treats a connection that ends without a report as a failure, and restarts.
            self._is_stopped = True
            self._leave_at = time.monotonic() + _REACT_SECONDS
            self._put(pack(JobFrame.STOPPED, payload=bytes([number])))

    def _take_frames(self, data: bytes) -> None:
        for kind, rank, payload in self._frames.feed(data):
            self._take(kind, rank, payload)

    def _take(self, kind: int, rank: int, payload: bytes) -> None:
        if kind in (JobFrame.SIGNAL, JobFrame.END):
            self._leave_at = math.inf
        if kind == JobFrame.START and self._job is not None:
            self._start(self._job, unpack_json(payload))
        elif kind == JobFrame.PING and not self._writer.is_full(MAX_BACKLOG):  # else output is on its way, and answers
            self._put(pack(JobFrame.PONG))
        elif kind == JobFrame.SIGNAL and rank in self._ranks:
            self._ranks[rank].signal(signal.Signals(payload[0]))
        elif kind == JobFrame.GONE and self._job is not None:
            self._job.note_end(rank, int(unpack_json(payload)["status"]))
        elif self._job is not None and kind in _OF_EPOCHS:
            self._take_epoch(self._job, kind, rank, payload)
        elif kind == JobFrame.INPUT:
            self._owes_ack = bool(payload)
            self._input.put(payload)
        elif kind == JobFrame.END and self._job is not None:
            self._ending = True
            self._input.close()
            self._job.succeeded = all(status <= 128 for status in self._statuses.values())
            if not any(self._statuses.values()):
                self._job.remove_recordings()
            self._job.end()

    def _prepare(self, fields: Mapping[str, Any]) -> None:
        try:
            _enter(fields["directory"])
            variables = base_environment(os.environ, fields["mpi_shim"])
            if fields["mpi_shim"]:
                mpi_shim.check(variables[mpi_shim.VARIABLE])
            variables |= fields["variables"]
            start = fields["start"]
            check_fast_synch(variables, fields["ranks"])
            check_command(start["command"][0], variables)
            remove_stale_jobs()
            self._numbers = range(start["first"], start["first"] + fields["ranks"])
            job = self._job = LocalJob(**start, variables=variables, piped=True)
            if fields["elastic"]:
                job.let_shrink(self._wakeup.wake)
            ports = free_ports(fields["ports"])  # none is the rendezvous' own
        except (InvalidArgument, ResourceError, CannotRun, OSError) as error:
            self._put(pack_json(JobFrame.FAILED, {"text": str(error), "status": getattr(error, "exit_code", 1)}))
            return
        found = {"address": job.address, "ports": ports, "awake": job.awake(), "directory": str(job.directory)}
        self._put(pack_json(JobFrame.READY, found | {"follower_port": job.follower_port}))

    def _start(self, job: LocalJob, fields: Mapping[str, Any]) -> None:
        job.address = fields["address"]
        job.exports = Exports(**fields["exports"])
        for rank in self._numbers:
            if not self._start_rank(job, rank):
                for missing in range(rank, self._numbers.stop):
                    self._note_exit(job, missing, 126)
                break
        for pipe in job.readers(self._wakeup.wake):
            self._input.add(pipe)
        job.all_started()

    def _start_rank(self, job: LocalJob, rank: int, joins: bool = False) -> bool:
        try:
            self._ranks[rank], *streams = start_with_pipes(partial(job.start, joins=joins), rank)
        except OSError as error:
            self._put(pack_json(JobFrame.FAILED, {"text": f"cannot start rank {rank}: {error}", "status": 126}))
            return False
        for stream, kind in zip(streams, (JobFrame.OUT, JobFrame.ERR)):
            os.set_blocking(stream, False)
            self._streams[stream] = (kind, rank)
            self._selector.register(stream, selectors.EVENT_READ)
        return True

    def _take_epoch(self, job: LocalJob, kind: int, rank: int, payload: bytes) -> None:
        if kind == JobFrame.EPOCH:
            fields = unpack_json(payload)
            epoch = Epoch(fields["number"], tuple(fields["members"]), fields["address"])
            job.begin_epoch(epoch, fields["secret"], fields["variables"])
        elif kind == JobFrame.ANSWER:
            job.answer(rank)
        elif kind == JobFrame.REFUSED:
            job.refuse(rank, unpack_json(payload)["why"])
        elif kind == JobFrame.JOINING:
            job.show_joining(payload != b"\0")
        elif not self._start_rank(job, rank, joins=True):
            self._note_exit(job, rank, 126)

    def _pass_questions(self) -> None:
        """Sends the launcher what ranks here ask for."""
        for question, _ in self._job.questions() if self._job is not None else ():
            self._put(pack_json(JobFrame.QUESTION, asdict(question), question.member))

    def _relay(self, stream: int) -> bool:
        """Reads once and sends the data to the launcher. Returns False if there is no data now, or at the end."""
        kind, rank = self._streams[stream]
        try:
            data = os.read(stream, _READ_BYTES)
        except BlockingIOError:
            return False
        self._put(pack(kind, rank, data))
        if not data:
            self._close(stream)
        return bool(data)

    def _close(self, stream: int) -> None:
        self._selector.unregister(stream)
        del self._streams[stream]
        os.close(stream)

    def _reap(self) -> None:
        for rank, process in list(self._ranks.items()):
            status = process.poll()
            if status is None or self._job is None:
                continue
            for stream in [stream for stream, (_, of) in self._streams.items() if of == rank]:
                while self._relay(stream):  # what it has printed comes before its end
                    continue
            del self._ranks[rank]
            self._job.ended(rank, status)
            self._note_exit(self._job, rank, status)

    def _note_exit(self, job: LocalJob, rank: int, status: int) -> None:
        self._statuses[rank] = status
        self._put(pack_json(JobFrame.EXIT, {"status": status, "first": job.first_failed()}, rank))

    def _send_end(self, job: LocalJob) -> None:
        for stream in list(self._streams):
            while self._relay(stream):
                continue
            if stream in self._streams:
                self._close(stream)
        self._end_sent = True
        self._put(pack_json(Kind.RESULT, {"result": {"recordings": job.recordings()}}))

    def _put(self, data: bytes) -> None:
        self._writer.put(self._target, data)


def _warn(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # the launcher prints it with this host's name


def _enter(directory: str) -> None:
    try:
        os.chdir(directory)
    except OSError as error:
        raise ResourceError(f"the directory {directory} cannot be entered: {error.strerror}; see --cwd") from None
