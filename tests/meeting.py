"""What the tests of the rendezvous share: ranks that are threads of this process, each with its own Rendezvous."""

import contextlib
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from mlxdist.environment import Environment
from mlxdist.rendezvous import Rendezvous, connect

SECRET = b"\x5e" * 32
SOON = 1.0


class Job:
    """The environments of a job whose rank 0 gets a listening socket, as from the launcher."""

    def __init__(self, size, timeout=20.0, host="127.0.0.1"):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.listener = socket.create_server((host, 0), family=family, backlog=256)
        self.address = self.listener.getsockname()[:2]
        self._descriptor = self.listener.fileno()
        self._base = Environment(
            world_size=size, rendezvous=self.address, secret=SECRET, job="test", rendezvous_timeout=timeout
        )

    def environment(self, rank, **changes):
        if rank == 0 and self.listener is not None:
            connect._used_descriptors.discard(self._descriptor)  # numbers come again within one process
            self.listener.detach()
            self.listener = None
            changes = {"rendezvous_fd": self._descriptor} | changes
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
        self.failures, self.leaves = [], []
        self._changed = threading.Condition()
        rendezvous.watch(lambda *news: self._add(self.failures, news), lambda *news: self._add(self.leaves, news))

    def _add(self, list_, news):
        with self._changed:
            list_.append(news)
            self._changed.notify_all()

    def wait(self, seconds=SOON):
        """The first failure, or None."""
        with self._changed:
            self._changed.wait_for(lambda: self.failures, seconds)
            return self.failures[0] if self.failures else None

    def wait_leave(self, seconds=SOON):
        with self._changed:
            self._changed.wait_for(lambda: self.leaves, seconds)
            return self.leaves[0] if self.leaves else None
