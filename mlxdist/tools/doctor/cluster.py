"""The facts about all hosts that the checks read, as plain data."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mlxdist.cluster.hostfile.hosts import Host
from mlxdist.runtime.devices.links import Ports
from mlxdist.runtime.devices.paths import Path

__all__ = ["CheckOptions", "Cluster", "ConnectAttempt", "Job", "ProbeError", "Soak"]


@dataclass(frozen=True)
class CheckOptions:
    """The subjects of the checks: the command, its files and settings, and which checks are left out."""

    command: tuple[str, ...] = ()  # what is going to be launched; may be empty
    # script, model: files that must be the same on all hosts; empty for none
    script: str = ""
    model: str = ""
    directory: str = ""  # where the ranks will run
    variables: Mapping[str, str] = field(default_factory=dict)  # what the launcher sets for all ranks
    backend: str = ""  # of the hostfile
    quick: bool = False  # no measurements
    full: bool = False  # weights are compared to the last byte
    advertised: float = 0.0  # Gbit/s of each link one way, in place of what ports say; 0 if not given
    level: int = 1  # from 2 on there is a soak
    seconds: float = 0.0  # of the soak
    guessed: bool = False  # the model is what --model of the command says, which may be something else


@dataclass(frozen=True)
class ProbeError:
    """A request that a host has not fulfilled. ``connected``: the host itself sent this error."""

    text: str
    connected: bool


@dataclass(frozen=True)
class ConnectAttempt:
    """A connection that one host has tried to another, at an address and a port where the other listens."""

    source: str
    target: str
    address: str
    first: bool = True  # whether the address is the one that a job uses
    error: str = ""  # the name of an errno; "WRONG" where another program responded; empty where it went well
    text: str = ""
    nc: bool | None = None  # whether /usr/bin/nc reached it, where Python did not; None where that was not tried
    interface: str = ""  # by which the system sends what goes there
    # wifi, ethernet, thunderbolt, infiniband, loopback, bridge, tunnel, virtual, or empty where that is not known
    kind: str = ""
    speed: int | None = None  # Mbit/s


@dataclass(frozen=True)
class Job:
    """The result of a real job, or why there is none."""

    hosts: tuple[str, ...] = ()  # on which it ran
    ranks: int = 0  # how many
    error: str = ""  # the launcher's last words, if it has failed
    culprits: "tuple[Job, ...]" = ()  # smaller jobs that fail then, too, on one host or on two
    skipped: str = ""
    command: str = ""
    wrong: tuple[str, ...] = ()  # which values were wrong, in words
    tested: int = 0  # how many operations were checked
    # provider, reason: the provider that the ranks have chosen, and why
    provider: str = ""
    reason: str = ""
    latency: Mapping[tuple[str, str], float] = field(default_factory=dict)  # microseconds one way, by pair of hosts
    # from the first host of the pair to the second
    bandwidth: Mapping[tuple[str, str], float] = field(default_factory=dict)  # bytes a second
    paths: Mapping[tuple[str, str], Path] = field(default_factory=dict)
    ports: Mapping[tuple[str, str], Ports] = field(default_factory=dict)


@dataclass(frozen=True)
class Soak:
    """The result of traffic for some time, or why there is none."""

    hosts: tuple[str, ...] = ()
    ranks: int = 0
    error: str = ""  # the launcher's last words, if it has failed
    skipped: str = ""
    wrong: tuple[str, ...] = ()  # which values were wrong, in words
    seconds: float = 0.0
    operations: int = 0  # of all ranks
    bytes: int = 0  # that ranks have received from others


@dataclass
class Cluster:
    """The hosts. ``responses[step][host]``: a response to a request; ``errors[step][host]``: why there is none."""

    hosts: tuple[Host, ...]
    options: CheckOptions = CheckOptions()
    responses: dict[str, dict[str, Any]] = field(default_factory=dict)
    errors: dict[str, dict[str, ProbeError]] = field(default_factory=dict)
    attempts: list[ConnectAttempt] = field(default_factory=list)
    job: Job | None = None
    soak: Soak | None = None

    @property
    def names(self) -> list[str]:
        return [host.name for host in self.hosts]

    def each(self, step: str) -> Iterator[tuple[str, Any]]:
        """The hosts that responded to a request, in their order, with their responses."""
        return ((host.name, response) for host, response in self.each_host(step))

    def each_host(self, step: str) -> Iterator[tuple[Host, Any]]:
        responses = self.responses.get(step, {})
        return ((host, responses[host.name]) for host in self.hosts if host.name in responses)
