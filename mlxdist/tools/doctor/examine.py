"""Asks all hosts: each in a thread of its own and at its own pace, so that a slow one holds up nobody.

Every question has a deadline. A host that misses one is lost, which is what the checks find of it; the others go on.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mlxdist.cluster.hostfile import Host
from mlxdist.cluster.ssh.rpc_client import CallError, Connections
from mlxdist.cluster.ssh.ssh import SshConfig, is_this_machine
from mlxdist.version import __version__

from .cluster import Cluster, Question, Trouble, Try

__all__ = ["Say", "examine"]

# host, what it is at; nothing where it is done
Say = Callable[[str, str], None]

_ALLOCATE, _ALLOCATE_QUICK = 1 << 30, 128 << 20
_CONNECT_SECONDS = 5.0
_CLOCK_LOOKS = 5
_DISK_SPEED = 20e6  # bytes a second that even a slow disk reads


class _Lost(Exception):
    """Nothing more can be asked of a host."""


def examine(
    hosts: list[Host], ssh_config: SshConfig, question: Question, say: Say = lambda host, doing: None
) -> Cluster:
    """Everything that the checks need, but for what a job shows."""
    cluster = Cluster(tuple(hosts), question)
    patients = [_Patient(host, ssh_config, cluster, say) for host in hosts]
    with contextlib.ExitStack() as leaving:
        threads = leaving.enter_context(_threads(len(hosts)))
        for patient in patients:
            leaving.enter_context(patient.connection)  # closed first: then no thread waits for an answer
        list(threads.map(_Patient.examine, patients))
        if len(hosts) > 1:
            list(threads.map(lambda patient: patient.connect(patients), patients))
    return cluster


@contextlib.contextmanager
def _threads(count: int) -> Iterator[ThreadPoolExecutor]:
    threads = ThreadPoolExecutor(max(1, count))
    try:
        yield threads
    finally:
        threads.shutdown(cancel_futures=True)


class _Patient:
    """One host, and the connection to it."""

    def __init__(self, host: Host, ssh_config: SshConfig, cluster: Cluster, say: Say) -> None:
        self.name, self.host = host.name, host
        self.connection = Connections([host.name], ssh_config)
        self._cluster, self._question = cluster, cluster.question
        self._say = say

    def examine(self) -> None:
        question = self._question
        with self._until_lost():
            who = self._ask("who", "connecting", call="who")
            if not isinstance(who, dict) or who.get("mlxdist") != __version__:
                return  # what another version says may mean something else
            self._clock()
            self._ask("facts", "versions, memory, disks", {"folder": question.folder}, seconds=120)
            self._ask("rdma", "RDMA devices", seconds=40)
            most = _ALLOCATE_QUICK if question.quick else _ALLOCATE
            self._ask("allocate", "taking memory", {"most": most}, seconds=40)
            if question.command or question.script:
                named = {"command": question.command[:1], "script": question.script, "folder": question.folder}
                self._ask("program", "script", named | {"variables": dict(question.variables)}, seconds=60)
            if question.model:
                self._model()
            if not question.quick:
                self._ask("crossing", "GPU crossings", seconds=90)
            if len(self._cluster.hosts) > 1:
                self._ask("listen", "listening")

    def connect(self, patients: list[_Patient]) -> None:
        """To the others that listen, at every address that they have."""
        targets = []
        for peer in self._peers(patients):
            listening = self._cluster.told.get("listen", {}).get(peer.name)
            if listening:
                targets += [(peer.name, {"address": address} | listening) for address in self._addresses(peer)]
        with self._until_lost():
            if self.name in self._cluster.told.get("listen", {}) and targets:
                seconds = _CONNECT_SECONDS * (1 + len(targets) // 8)
                asked = {"targets": [target for _, target in targets], "seconds": _CONNECT_SECONDS}
                answers = self._ask("connect", "connecting to the others", asked, seconds=60 + 2 * seconds) or []
                tries = zip(targets, answers)
                self._cluster.tries += [self._try(name, target, answer, targets) for (name, target), answer in tries]

    def _peers(self, patients: list[_Patient]) -> list[_Patient]:
        """All others; in MLX's ring only the next one, whose addresses are for this host alone."""
        if self._question.backend == "ring":
            return [patients[(patients.index(self) + 1) % len(patients)]]
        return [peer for peer in patients if peer is not self]

    def _try(self, name: str, target: dict, answer: dict, targets: list[tuple[str, dict]]) -> Try:
        first = next(other for peer, other in targets if peer == name) is target
        return Try(self.name, name, target["address"], first, **answer)

    def _addresses(self, peer: _Patient) -> list[str]:
        """Those of the hostfile; else the one by which ssh has reached it, as a job does."""
        if peer.host.ips:
            return list(peer.host.ips)
        there, here = self._ssh(peer.name), self._ssh(self.name)
        if len(there) == 4:
            return [there[2]]
        return [here[0]] if len(here) == 4 else ["127.0.0.1"]

    def _ssh(self, name: str) -> list[str]:
        """Whence and where ssh has connected: client, its port, server, its port."""
        if is_this_machine(name):
            return []  # what it says is about another connection: that of the user
        return self._cluster.told.get("facts", {}).get(name, {}).get("ssh", [])

    def _clock(self) -> None:
        """Of several looks the one with the shortest round trip says it best."""
        looks = []
        for _ in range(_CLOCK_LOOKS):
            begin = time.time(), time.monotonic()
            theirs = self._ask("clock", "clock", keep=False)
            took = time.monotonic() - begin[1]
            if theirs is None:
                return
            looks.append((took / 2, theirs - (begin[0] + took / 2)))
        unsure, ahead = min(looks)
        self._keep("clock", (ahead, unsure))

    def _model(self) -> None:
        question = self._question
        asked = {"model": question.model, "folder": question.folder}
        listed = self._ask("model", "model", asked, seconds=120, keep=False)
        if listed is None:
            return
        listed["digests"] = {}
        for number, (file, size) in enumerate(listed["files"].items(), 1):
            seconds = 60 + (size / _DISK_SPEED if question.full else 0)
            asked = {"path": f"{listed['path']}/{file}", "how": "full" if question.full else "sampled"}
            doing = f"model, file {number} of {len(listed['files'])}"
            answer = self._ask("digest", doing, asked | {"seconds": seconds}, seconds=seconds + 30, keep=False)
            listed["digests"][file] = answer["sha256"] if answer else f"error: {self._trouble('digest').text}"
        self._keep("model", listed)  # not one of which half is known, should the host be lost

    def _ask(
        self,
        step: str,
        doing: str,
        arguments: dict[str, Any] | None = None,
        *,
        seconds: float = 30.0,
        call: str = "",
        keep: bool = True,
    ) -> Any:
        """The answer, which the cluster keeps. None if the host says that it has none; _Lost if it says nothing."""
        self._say(self.name, doing)
        (answer,) = self.connection.call(call or f"doctor.{step}", arguments or {}, seconds)
        if not isinstance(answer, CallError):
            if keep:
                self._keep(step, answer)
            return answer
        self._cluster.troubles.setdefault(step, {})[self.name] = Trouble(str(answer), answer.connected)
        if not answer.connected:
            raise _Lost
        return None

    def _keep(self, step: str, answer: Any) -> None:
        self._cluster.told.setdefault(step, {})[self.name] = answer

    def _trouble(self, step: str) -> Trouble:
        return self._cluster.troubles[step][self.name]

    @contextlib.contextmanager
    def _until_lost(self) -> Iterator[None]:
        with contextlib.suppress(_Lost):
            yield
        self._say(self.name, "")
