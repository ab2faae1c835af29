"""Probes all hosts: each in a thread of its own, so that a slow host delays no other.

Every request has a deadline. A host that misses one is lost, which the checks report; other hosts continue.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mlxdist.cluster.hostfile.hosts import Host
from mlxdist.cluster.ssh.rpc_client import CallError, Connections
from mlxdist.cluster.ssh.ssh import SshConfig, is_this_machine
from mlxdist.version import __version__

from .cluster import CheckOptions, Cluster, ConnectAttempt, ProbeError

__all__ = ["OnProgress", "probe"]

# host, what is requested of it; empty where it is done
OnProgress = Callable[[str, str], None]

_ALLOCATE, _ALLOCATE_QUICK = 1 << 30, 128 << 20
_CONNECT_SECONDS = 5.0
_CLOCK_SAMPLES = 5
_DISK_SPEED = 20e6  # bytes a second that even a slow disk reads


class _Lost(Exception):
    """A host that can fulfill no further request."""


def probe(
    hosts: list[Host], ssh_config: SshConfig, options: CheckOptions, on_progress: OnProgress = lambda host, step: None
) -> Cluster:
    """Probes all hosts for everything that the checks need, except the result of a job."""
    cluster = Cluster(tuple(hosts), options)
    probes = [_HostProbe(host, ssh_config, cluster, on_progress) for host in hosts]
    threads = ThreadPoolExecutor(max(1, len(hosts)))
    try:
        with contextlib.ExitStack() as connections:
            for each in probes:
                connections.enter_context(each.connection)  # closed first: then no thread waits for a response
            list(threads.map(_HostProbe.run, probes))
            if len(hosts) > 1:
                list(threads.map(lambda each: each.connect(probes), probes))
    finally:
        threads.shutdown(cancel_futures=True)
    return cluster


class _HostProbe:
    """The probe of one host, over a connection to it."""

    def __init__(self, host: Host, ssh_config: SshConfig, cluster: Cluster, on_progress: OnProgress) -> None:
        self.name, self.host = host.name, host
        self.connection = Connections([host.name], ssh_config)
        self._cluster, self._options = cluster, cluster.options
        self._on_progress = on_progress

    def run(self) -> None:
        options = self._options
        with self._until_lost():
            who = self._request("who", "connecting", call="who")
            if not isinstance(who, dict) or who.get("mlxdist") != __version__:
                return  # responses of another version may mean something else
            self._clock()
            self._request("facts", "versions, memory, disks", {"directory": options.directory}, seconds=120)
            self._request("rdma", "RDMA devices", seconds=40)
            size = _ALLOCATE_QUICK if options.quick else _ALLOCATE
            self._request("allocate", "taking memory", {"size": size}, seconds=40)
            if options.command or options.script:
                named = {"command": options.command[:1], "script": options.script, "directory": options.directory}
                self._request("program", "script", named | {"variables": dict(options.variables)}, seconds=60)
            if options.model:
                self._model()
            if not options.quick:
                self._request("gpu_sync", "GPU synchronization", seconds=90)
            if len(self._cluster.hosts) > 1:
                self._request("listen", "listening")

    def connect(self, probes: "list[_HostProbe]") -> None:
        """Connects this host to the other hosts that listen, at all of their addresses."""
        listening = self._cluster.responses.get("listen", {})
        targets = [
            (peer.name, {"address": address} | listening[peer.name])
            for peer in self._peers(probes)
            if peer.name in listening
            for address in self._addresses(peer)
        ]
        with self._until_lost():
            if self.name in listening and targets:
                seconds = _CONNECT_SECONDS * (1 + len(targets) // 8)
                arguments = {"targets": [target for _, target in targets], "seconds": _CONNECT_SECONDS}
                found = self._request("connect", "connecting to the others", arguments, seconds=60 + 2 * seconds) or []
                for (name, target), result in zip(targets, found):
                    first = next(other for peer, other in targets if peer == name) is target
                    attempt = ConnectAttempt(self.name, name, target["address"], first, **result)
                    self._cluster.attempts.append(attempt)

    def _peers(self, probes: "list[_HostProbe]") -> "list[_HostProbe]":
        """All other hosts; in MLX's ring only the next one, whose addresses are for this host alone."""
        if self._options.backend == "ring":
            return [probes[(probes.index(self) + 1) % len(probes)]]
        return [peer for peer in probes if peer is not self]

    def _addresses(self, peer: "_HostProbe") -> list[str]:
        """The addresses in the hostfile; else the one that ssh has used, as in a job."""
        if peer.host.ips:
            return list(peer.host.ips)
        there, here = self._ssh(peer.name), self._ssh(self.name)
        if len(there) == 4:
            return [there[2]]
        return [here[0]] if len(here) == 4 else ["127.0.0.1"]

    def _ssh(self, name: str) -> list[str]:
        """The ends of the ssh connection: client, its port, server, its port."""
        if is_this_machine(name):
            return []  # its variable is about another connection: that of the user
        return self._cluster.responses.get("facts", {}).get(name, {}).get("ssh", [])

    def _clock(self) -> None:
        """Measures the clock's offset. The sample with the shortest round trip is the most accurate."""
        samples = []
        for _ in range(_CLOCK_SAMPLES):
            begin = time.time(), time.monotonic()
            theirs = self._request("clock", "clock", keep=False)
            took = time.monotonic() - begin[1]
            if theirs is None:
                return
            samples.append((took / 2, theirs - (begin[0] + took / 2)))
        unsure, ahead = min(samples)
        self._keep("clock", (ahead, unsure))

    def _model(self) -> None:
        options = self._options
        arguments = {"model": options.model, "directory": options.directory}
        listed = self._request("model", "model", arguments, seconds=120, keep=False)
        if listed is None:
            return
        listed["digests"] = {}
        for number, (file, size) in enumerate(listed["files"].items(), 1):
            seconds = 60 + (size / _DISK_SPEED if options.full else 0)
            step = f"model, file {number} of {len(listed['files'])}"
            of_file = {"path": f"{listed['path']}/{file}", "how": "full" if options.full else "sampled"}
            found = self._request("digest", step, of_file | {"seconds": seconds}, seconds=seconds + 30, keep=False)
            error = "" if found else f"error: {self._cluster.errors['digest'][self.name].text}"
            listed["digests"][file] = error or found["sha256"]
        self._keep("model", listed)  # not one of which half is known, should the host be lost

    def _request(
        self,
        step: str,
        shown: str,
        arguments: dict[str, Any] | None = None,
        *,
        seconds: float = 30.0,
        call: str = "",
        keep: bool = True,
    ) -> Any:
        """Sends a request, stores and returns the response; None for an error. Raises _Lost: there is none."""
        self._on_progress(self.name, shown)
        (response,) = self.connection.call(call or f"doctor.{step}", arguments or {}, seconds)
        if not isinstance(response, CallError):
            if keep:
                self._keep(step, response)
            return response
        self._cluster.errors.setdefault(step, {})[self.name] = ProbeError(str(response), response.connected)
        if not response.connected:
            raise _Lost
        return None

    def _keep(self, step: str, response: Any) -> None:
        self._cluster.responses.setdefault(step, {})[self.name] = response

    @contextlib.contextmanager
    def _until_lost(self) -> Iterator[None]:
        with contextlib.suppress(_Lost):
            yield
        self._on_progress(self.name, "")
