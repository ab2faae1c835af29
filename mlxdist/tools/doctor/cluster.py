"""All that is known of all hosts when the checks look at it. Nothing is asked here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mlxdist.cluster.hostfile import Host

__all__ = ["Cluster", "Job", "Question", "Trouble", "Try"]


@dataclass(frozen=True)
class Question:
    """What the hosts are examined for.

    Attributes:
        command: what is going to be launched; may be empty.
        script, model: to be the same on all hosts; empty for none.
        guessed: the model is what --model of the command says, which may be something else.
        folder: where the ranks will run.
        variables: what the launcher sets for all ranks.
        backend: of the hostfile.
        quick: no measurements.
        full: weights are compared to the last byte.
    """

    command: tuple[str, ...] = ()
    script: str = ""
    model: str = ""
    folder: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    backend: str = ""
    quick: bool = False
    full: bool = False
    guessed: bool = False


@dataclass(frozen=True)
class Trouble:
    """A question that a host has not answered. ``connected``: it could be asked, and said so itself."""

    text: str
    connected: bool


@dataclass(frozen=True)
class Try:
    """One host has tried to connect to another, at an address and a port where that listens.

    Attributes:
        first: whether the address is the one that a job uses.
        error: the name of an errno; "WRONG" where somebody else answered; empty where it went well.
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
    """What a real job has shown, or why there is none.

    Attributes:
        hosts: on which it ran.
        ranks: how many.
        error: the launcher's last words, if it has failed.
        culprits: smaller jobs that fail then, too, on one host or on two.
        wrong: what was wrong with values, in words.
        tried: how many operations were checked.
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
    tried: int = 0
    provider: str = ""
    reason: str = ""
    latency: Mapping[tuple[str, str], float] = field(default_factory=dict)
    bandwidth: Mapping[tuple[str, str], float] = field(default_factory=dict)


@dataclass
class Cluster:
    """``told[step][host]``: what a host has answered; ``troubles[step][host]``: why it has not."""

    hosts: tuple[Host, ...]
    question: Question = Question()
    told: dict[str, dict[str, Any]] = field(default_factory=dict)
    troubles: dict[str, dict[str, Trouble]] = field(default_factory=dict)
    tries: list[Try] = field(default_factory=list)
    job: Job | None = None

    @property
    def names(self) -> list[str]:
        return [host.name for host in self.hosts]

    def each(self, step: str) -> Iterator[tuple[str, Any]]:
        """The hosts that have answered, in their order, with what they said."""
        told = self.told.get(step, {})
        return ((name, told[name]) for name in self.names if name in told)

    def only(self, names: list[str]) -> list[Host]:
        return [host for host in self.hosts if host.name in names]
