"""What the tests of the rendezvous share: ranks that are threads of this process, each with its own Rendezvous."""

import contextlib
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from mlxdist.base.environment import Environment
from mlxdist.runtime.rendezvous import Rendezvous
from mlxdist.runtime.rendezvous.authentication import ServerHandshake
from mlxdist.runtime.rendezvous.protocol import Framing, Kind, pack_json

SECRET = b"\x5e" * 32
SOON = 5.0  # seconds: half of what rank 0 gives a stranger, a quarter of what a job gives its ranks


class Job:
    """The environments of a job whose rank 0 gets a listening socket, as from the launcher."""

    def __init__(self, size, timeout=20.0, host="127.0.0.1"):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.listener = socket.create_server((host, 0), family=family, backlog=256)
        self.address = self.listener.getsockname()[:2]
        self._base = Environment(
            world_size=size, rendezvous=self.address, secret=SECRET, job="test", rendezvous_timeout=timeout
        )

    def environment(self, rank, **changes):
        if rank == 0 and self.listener is not None:
            changes = {"rendezvous_fd": self.listener.fileno()} | changes
        return replace(self._base, rank=rank, **changes)

    def variables(self, rank):
        """For a rank that is a process."""
        return os.environ | {
            "MLXDIST_RANK": str(rank),
            "MLXDIST_WORLD_SIZE": str(self._base.world_size),
            "MLXDIST_RENDEZVOUS": f"{self.address[0]}:{self.address[1]}",
            "MLXDIST_SECRET": SECRET.hex(),
            "MLXDIST_JOB": "test",
        }


def at_once(*calls):
    """Calls all in threads of their own and returns their results, or what they raised."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        return [future.exception(30) or future.result() for future in futures]


def join(*environments):
    return at_once(*(lambda e=environment: Rendezvous(e) for environment in environments))


@contextlib.contextmanager
def group(size, **options):
    job = Job(size, **options)
    members = join(*(job.environment(rank) for rank in range(size)))
    assert all(isinstance(member, Rendezvous) for member in members), members
    try:
        yield members
    finally:
        at_once(*(lambda m=member: m.close(linger=0.2) for member in members))


class Watcher:
    """Records what watch() reports."""

    def __init__(self, rendezvous):
        self.failures, self.leaves, self.messages = [], [], []
        self._changed = threading.Condition()
        rendezvous.watch(
            lambda *news: self._add(self.failures, news),
            lambda *news: self._add(self.leaves, news),
            lambda *news: self._add(self.messages, news),
        )

    def _add(self, list_, news):
        with self._changed:
            list_.append(news)
            self._changed.notify_all()

    def wait(self, seconds=SOON):
        """The first failure, or None."""
        self._wait(self.failures, 1, seconds)
        return self.failures[0] if self.failures else None

    def wait_leave(self, seconds=SOON):
        self._wait(self.leaves, 1, seconds)
        return self.leaves[0] if self.leaves else None

    def wait_messages(self, count, seconds=2 * SOON):
        """The first ``count`` messages, or as many as came."""
        self._wait(self.messages, count, seconds)
        return self.messages[:count]

    def _wait(self, list_, count, seconds):
        with self._changed:
            self._changed.wait_for(lambda: len(list_) >= count, seconds)


def pose_as_rank_0(listener):
    """Accepts a rank of a job with SECRET, as rank 0 does. Returns the connection, its framing, and the frame that
    welcomes the rank, which is to be sent first."""
    sock, _ = listener.accept()
    handshake, framing = ServerHandshake({"rank": SECRET}), Framing()
    sock.sendall(framing.frame(Kind.CHALLENGE, handshake.challenge()))
    kind = Kind.KNOCK
    while kind != Kind.HELLO:
        while (frame := framing.next_frame()) is None:
            framing.feed(sock.recv(4096))
        kind, payload = frame
    assert handshake.verify(payload)
    welcome = framing.frame(Kind.WELCOME, handshake.welcome(pack_json(host="h", pid=1, seconds=9.0, received=0)))
    to_server, from_server = handshake.session_keys()
    framing.secure(send_key=from_server, receive_key=to_server)
    return sock, framing, welcome
