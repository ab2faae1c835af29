"""Everything known of all hosts when the checks run: plain data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mlxdist.cluster.hostfile import Host

__all__ = ["CheckOptions", "Cluster", "ConnectAttempt", "Job", "ProbeError"]


@dataclass(frozen=True)
class CheckOptions:
    """What the hosts are checked for.

    Attributes:
        command: what is going to be launched; may be empty.
        script, model: to be the same on all hosts; empty for none.
        guessed: the model is what --model of the command says, which may be something else.
        directory: where the ranks will run.
        variables: what the launcher sets for all ranks.
        backend: of the hostfile.
        quick: no measurements.
        full: weights are compared to the last byte.
    """

    command: tuple[str, ...] = ()
    script: str = ""
    model: str = ""
    directory: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    backend: str = ""
    quick: bool = False
    full: bool = False
    guessed: bool = False


@dataclass(frozen=True)
class ProbeError:
    """A request that a host has not fulfilled. ``connected``: the host itself sent this error."""

    text: str
    connected: bool


@dataclass(frozen=True)
class ConnectAttempt:
    """One host has tried to connect to another, at an address and a port where that listens.

    Attributes:
        first: whether the address is the one that a job uses.
        error: the name of an errno; "WRONG" where another program answered; empty where it went well.
        nc: whether /usr/bin/nc reached it, where Python did not; None where that was not tried.
        interface: by which the system sends what goes there; kind: wifi, ethernet, thunderbolt, infiniband, loopback,
            bridge, tunnel, virtual, or empty where that is not known; speed: Mbit/s.
    """

    source: str
    target: str
    address: str
    first: bool = True
    error: str = ""
    text: str = ""
    nc: bool | None = None
    interface: str = ""
    kind: str = ""
    speed: int | None = None


@dataclass(frozen=True)
class Job:
    """The result of a real job, or why there is none.

    Attributes:
        hosts: on which it ran.
        ranks: how many.
        error: the launcher's last words, if it has failed.
        culprits: smaller jobs that fail then, too, on one host or on two.
        wrong: which values were wrong, in words.
        tested: how many operations were checked.
        provider, reason: what the ranks have chosen, and why.
        latency: microseconds one way, by pair of hosts; bandwidth: bytes a second from the first to the second.
    """

    hosts: tuple[str, ...] = ()
    ranks: int = 0
    error: str = ""
    culprits: tuple[Job, ...] = ()
    skipped: str = ""
    command: str = ""
    wrong: tuple[str, ...] = ()
    tested: int = 0
    provider: str = ""
    reason: str = ""
    latency: Mapping[tuple[str, str], float] = field(default_factory=dict)
    bandwidth: Mapping[tuple[str, str], float] = field(default_factory=dict)


@dataclass
class Cluster:
    """``responses[step][host]``: a host's response to one request; ``errors[step][host]``: why there is none."""

    hosts: tuple[Host, ...]
    options: CheckOptions = CheckOptions()
    responses: dict[str, dict[str, Any]] = field(default_factory=dict)
    errors: dict[str, dict[str, ProbeError]] = field(default_factory=dict)
    attempts: list[ConnectAttempt] = field(default_factory=list)
    job: Job | None = None

    @property
    def names(self) -> list[str]:
        return [host.name for host in self.hosts]

    def each(self, step: str) -> Iterator[tuple[str, Any]]:
        """The hosts that have responded, in their order, with their responses."""
        return ((host.name, response) for host, response in self.each_host(step))

    def each_host(self, step: str) -> Iterator[tuple[Host, Any]]:
        responses = self.responses.get(step, {})
        return ((host, responses[host.name]) for host in self.hosts if host.name in responses)
