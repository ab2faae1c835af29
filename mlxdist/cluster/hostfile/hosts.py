"""The content of a hostfile, of any format."""

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mlxdist.base.environment import MAX_RANKS
from mlxdist.base.errors import InvalidArgument

__all__ = [
    "BACKENDS",
    "FORMATS",
    "Host",
    "Hostfile",
    "MAX_MEASURED",
    "Measured",
    "Problems",
    "check_address",
    "check_denied",
    "check_measurement",
    "check_name",
    "check_variable",
    "ring_topology",
]

# json: MLX's hostfile. slots: "host slots=N", as Open MPI, Horovod and DeepSpeed have it. colon: "host:N", as MPICH has
# it. ring: the addresses that MLX's ring reads from MLX_HOSTFILE.
FORMATS = ("json", "slots", "colon", "ring")
BACKENDS = ("any", "auto", "mlxdist", "ring", "jaccl", "jaccl-ring", "mpi", "nccl")

# No leading dash: ssh would take the name for an option. user@name, and IPv6 with a zone.
_NAME = re.compile(r"(?:[A-Za-z0-9._][A-Za-z0-9._-]*@)?[A-Za-z0-9:_][A-Za-z0-9._:%-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=[^\0]*", re.DOTALL)
_NAME_BYTES = 255
_DENIED_CHARACTERS = 200
_TOPOLOGY = "MLXDIST_TOPOLOGY"

# No machine that runs MLX comes near these values: a larger measurement is a mistake.
MAX_MEASURED = {"tflops": 1e4, "memory_gbps": 1e5, "link_gbps": 1e4}


@dataclass(frozen=True)
class Measured:
    """The measurements of a host by `mlxdist calibrate`. GB are 10^9 bytes."""

    tflops: float  # of the fastest matrix product, 10^12 operations a second
    memory_gbps: float  # GB/s at which a product of one row reads its weights, as in decoding
    link_gbps: float | None = None  # GB/s of its slowest link to another host; None where there is no other

    def as_json(self) -> dict[str, float]:
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class Host:
    """A host in a hostfile, with the ranks, addresses and devices that its entry gives it."""

    name: str  # what ssh connects to: a name or address, user@ before it if wanted
    slots: int = 1  # how many ranks run there
    ips: tuple[str, ...] = ()  # addresses that other hosts reach it at, the best first; may be empty
    # for each host of the file the devices whose cables lead there; empty where no device is named
    rdma: tuple[tuple[str, ...], ...] = ()
    line: int = 0  # where it stands, from 1; 0 if it comes from no file
    denied: str = ""  # since when, and why, no job is to run there; empty: jobs may
    ports: tuple[int, ...] = ()  # one for each of ``ips``, where a file for MLX's ring names them


@dataclass(frozen=True)
class Hostfile:
    """Hosts in the order of their ranks."""

    hosts: tuple[Host, ...]
    backend: str = ""  # what the ranks communicate through; empty where the file does not say
    envs: tuple[str, ...] = ()  # NAME=VALUE, to be set for all ranks
    source: str = "hostfile"
    format: str = "json"
    warnings: tuple[str, ...] = ()  # what is probably a mistake and changes nothing, each with its line

    @property
    def ranks(self) -> int:
        return sum(host.slots for host in self.hosts)

    def merged(self) -> "Hostfile":
        """Merges entries of one host, which JSON may repeat for each rank. Raises InvalidArgument: the ranks of a host
        do not follow each other, or a repeated host has devices."""
        merged: list[Host] = []
        for host in self.hosts:
            if merged and merged[-1].name == host.name and not host.rdma:
                merged[-1] = replace(merged[-1], slots=merged[-1].slots + host.slots)
            elif any(other.name == host.name for other in merged):
                wrong = 'a host with "rdma" stands there once; give its ranks as "slots"'
                wrong = wrong if host.rdma else f"the ranks of {host.name} do not follow each other"
                raise InvalidArgument(f"{self.source}, line {host.line}: {wrong}")
            else:
                merged.append(host)
        return replace(self, hosts=tuple(merged))

    def only(self, names: Sequence[str]) -> "Hostfile":
        """The hosts with these names, with their rows and columns of a device map. A ring without one is dropped."""
        kept = [i for i, host in enumerate(self.hosts) if host.name in names]
        hosts = [self.hosts[i] for i in kept]
        hosts = [replace(host, rdma=tuple(host.rdma[j] for j in kept)) if host.rdma else host for host in hosts]
        envs = self.envs
        if len(hosts) < len(self.hosts):
            envs = tuple(setting for setting in envs if not setting.startswith(f"{_TOPOLOGY}="))
        return replace(self, hosts=tuple(hosts), envs=envs)

    def with_denied(self, name: str, denied: str) -> "Hostfile":
        """The hostfile with a host that is ``denied``, or, where that is empty, is not any more. Raises
        InvalidArgument: there is no such host, or the text is too long."""
        if wrong := check_denied(denied):
            raise InvalidArgument(f"{self.source}: {wrong}")
        names = [host.name for host in self.hosts]
        if name not in names:
            raise InvalidArgument(f"{self.source}: {name!r:.80} is none of the hosts {', '.join(dict.fromkeys(names))}")
        return replace(
            self, hosts=tuple(replace(host, denied=denied) if host.name == name else host for host in self.hosts)
        )

    def with_ranks(self, each: int) -> "Hostfile":
        """A hostfile with ``each`` ranks on every host, in a ring topology, too. Raises InvalidArgument: a host has
        another number of slots."""
        for host in self.hosts:
            if host.slots not in (1, each):
                raise InvalidArgument(
                    f"-n {each} is the number of ranks on each host, and {self.source} gives {host.name} "
                    f"{host.slots} slots; leave -n out for one rank on each slot, {self.ranks} in all, or change the "
                    "slots"
                )
        return self._with_slots([each] * len(self.hosts))

    def with_one_rank_each(self) -> "Hostfile":
        """A hostfile with one rank on each host, whatever its slots."""
        return self._with_slots([1] * len(self.hosts))

    def for_mlxdist(self) -> "Hostfile":
        """The hostfile for ranks that mlxdist joins: all must reach rank 0, and not only their neighbors.

        A hostfile for MLX's ring gives each host the addresses by which the previous host reaches it. In a ring of more
        than two hosts, others may not reach it there, so the addresses are dropped, and the one that ssh used is taken.
        """
        hosts = self.hosts
        if self.backend == "ring" and len(hosts) > 2:
            hosts = tuple(replace(host, ips=()) for host in hosts)
        return replace(self, hosts=hosts, backend="mlxdist")

    def _with_slots(self, slots: Sequence[int]) -> "Hostfile":
        hosts = tuple(replace(host, slots=count) for host, count in zip(self.hosts, slots))
        before, after = ring_topology(self.ranks), ring_topology(sum(slots))
        return replace(self, hosts=hosts, envs=tuple(after if setting == before else setting for setting in self.envs))


def ring_topology(ranks: int) -> str:
    """The MLXDIST_TOPOLOGY setting for a ring: each rank is adjacent to the previous and the next rank."""
    return f"{_TOPOLOGY}={','.join(f'{rank}-{(rank + 1) % ranks}' for rank in range(ranks))}"


class Problems:
    """Errors and warnings of a file. All of them are collected, not only the first, each with its line."""

    LIMIT = 20

    def __init__(self) -> None:
        self.errors: list[tuple[int, str]] = []
        self.warnings: list[tuple[int, str]] = []

    def error(self, line: int, text: str) -> None:
        self.errors.append((line, text))

    def warn(self, line: int, text: str) -> None:
        self.warnings.append((line, text))

    def check_hosts(self, hosts: list[Host], repeated: bool) -> None:
        """Checks what all formats require. ``repeated``: a host may be listed once for each of its ranks."""
        if not hosts and not self.errors:
            self.error(1, "there is no host in it")
        if sum(host.slots for host in hosts) > MAX_RANKS:
            self.error(hosts[-1].line, f"{sum(host.slots for host in hosts)} ranks; at most {MAX_RANKS} are possible")
        seen: dict[str, int] = {}
        for host in () if repeated else hosts:
            if host.name in seen:
                slots = sum(other.slots for other in hosts if other.name == host.name)
                where = f"first in line {seen[host.name]}; write it once, with {slots} slots"
                self.error(host.line, f"{host.name} is there twice, {where}")
            seen.setdefault(host.name, host.line)

    def lines(self, found: list[tuple[int, str]]) -> list[str]:
        lines = [f"line {line}: {text}" for line, text in sorted(found)]
        more = len(lines) - self.LIMIT
        return lines if more <= 0 else [*lines[: self.LIMIT], f"... and {more} more"]


def check_name(name: object) -> str | None:
    """The reason why a host's name is malformed; None if it is valid."""
    if not isinstance(name, str):
        return f"a host's name must be text, not {name!r:.80}"
    if not name:
        return "a host's name is empty"
    if len(name) > _NAME_BYTES or not _NAME.fullmatch(name):
        return f"{name!r:.80} is no name or address of a host: letters, digits and . _ - : are allowed, user@ before it"
    if name.count(":") == 1:  # an address of IPv6 has more
        return f"{name!r:.80} has a port; write it in ~/.ssh/config (Port {name.partition(':')[2]:.20})"
    return None


def check_denied(denied: object) -> str | None:
    """The reason why what a host is denied for cannot be in a hostfile; None if it can."""
    if isinstance(denied, str) and denied.isprintable() and len(denied) <= _DENIED_CHARACTERS:
        return None
    return f"why a host is denied is a text of at most {_DENIED_CHARACTERS} characters, not {denied!r:.80}"


def check_address(address: object) -> str | None:
    """The reason why an IP address is malformed; None if it is valid."""
    try:
        if not isinstance(address, str):
            raise ValueError
        ipaddress.ip_address(address)
    except ValueError:
        return f"{address!r:.80} is no IP address; write one such as 192.168.1.10"
    return None


def check_variable(setting: object) -> str | None:
    """The reason why a NAME=VALUE setting is malformed; None if it is valid."""
    if not isinstance(setting, str) or not _VARIABLE.fullmatch(setting):
        return f"{setting!r:.80} sets no environment variable; write NAME=VALUE"
    return None


def check_measurement(name: str, value: object) -> str | None:
    """The reason why one measurement of a host is invalid; None if it is valid."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < MAX_MEASURED[name]:
        return f"{name!r} is {value!r:.80}; it must be a number above 0 and below {MAX_MEASURED[name]:g}"
    return None
