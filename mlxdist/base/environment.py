"""The MLXDIST_* variables: the only module that declares and reads them.

`mlxdist launch` sets those that say which rank of which job a process is; the others are the user's. Unknown, malformed
and contradictory variables are rejected here, before any work: a job whose ranks understood their variables differently
would hang, or silently run as several groups of one.
"""

import functools
import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from mlxdist._built import MAX_LINKS, MAX_RANKS

from .batch_systems import scheduler_rank
from .errors import EnvironmentVariableError
from .validation import nearest

__all__ = [
    "ALGORITHMS",
    "DEBUG_LEVELS",
    "DEBUG_SUBSYSTEMS",
    "MAX_LINKS",
    "MAX_RANKS",
    "MAX_RESTARTS",
    "OF_JOB",
    "PROVIDERS",
    "QP_TYPES",
    "SOFT_PROFILES",
    "VARIABLES",
    "Environment",
    "Variable",
    "format_address",
    "parse_address",
    "same_job",
]

MAX_RESTARTS = 1000
# enum mlxdist_algorithm of mlxdist.h
ALGORITHMS = ("auto", "direct", "mesh", "ring", "recursive_doubling", "tree", "hierarchical")
DEBUG_LEVELS = ("off", "warn", "info", "trace")  # enum debug_level of native/transport/debug.h
DEBUG_SUBSYSTEMS = (
    "connection", "deadline", "deadlock", "failure", "flight", "link", "load", "meeting", "message", "operation",
    "reconnect", "rendezvous", "verbs",
)  # fmt: skip
PROVIDERS = ("auto", "soft", "ibverbs", "librdma")
QP_TYPES = ("uc", "rc")
# soft/emulation/device_profile.h
SOFT_PROFILES = ("ideal", "apple-tb5", "apple-tb5-26.2", "apple-tb5-27", "apple-odd", "rxe")
SOFT_TRANSPORTS = ("auto", "shm", "tcp")
_UNNAMED_RUN = os.urandom(8).hex()

# Takes the text of a variable and returns its value. Raises ValueError with words that follow the name and the text.
Parser = Callable[[str], Any]


def parse_address(text: str) -> tuple[str, int]:
    """``host:port`` or ``[IPv6 address]:port`` as a pair.

    Raises:
        ValueError: ``text`` has neither form, or the port is not 1 to 65535. The message follows the text.
    """
    match = re.fullmatch(r"(?:\[([^\[\]]+)\]|([^\[\]:\s]+)):([0-9]{1,5})", text)
    if match is None or not 1 <= int(match[3]) <= 65535:
        raise ValueError("is not an address; write host:port, or [address]:port for IPv6")
    return match[1] or match[2], int(match[3])


def format_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _matching(pattern: str, problem: str, convert: Callable[[str], Any] = str) -> Parser:
    def parse(text: str) -> Any:
        if not re.fullmatch(pattern, text, re.ASCII):
            raise ValueError(problem)
        return convert(text)

    return parse


def _integer(low: int, high: int, multiple: int = 1) -> Parser:
    steps = f", a multiple of {multiple}" if multiple > 1 else ""

    def parse(text: str) -> int:
        # Not int(): it also takes " 1", "1_0" and the digits of other scripts.
        value = int(text) if re.fullmatch(r"[0-9]{1,10}", text, re.ASCII) else None
        if value is None or not low <= value <= high or value % multiple != 0:
            raise ValueError(f"is not a whole number from {low} to {high}{steps}")
        return value

    return parse


def _one_of(values: tuple[str, ...]) -> Parser:
    return _matching("|".join(map(re.escape, values)), f"is none of {', '.join(values)}")


def _pairs(text: str) -> frozenset[tuple[int, int]]:
    """Both orders of each pair: "0-1" gives (0, 1) and (1, 0)."""
    pairs = [(int(a), int(b)) for a, b in (pair.split("-") for pair in text.split(","))]
    return frozenset(pairs) | frozenset((b, a) for a, b in pairs)


_NOT_ZERO = r"(?![0.]+(?:,|$))"
_PAIR, _SHARE, _FAULT = r"[0-9]{1,4}-[0-9]{1,4}", _NOT_ZERO + r"[0-9]{1,20}(\.[0-9]{1,9})?", "[a-z_]+(=[a-z0-9/]+)?"
_SECONDS = r"[0-9]{1,9}(\.[0-9]*)?"

_seconds = _matching(_NOT_ZERO + _SECONDS, "is not a number of seconds above 0", float)
_seconds_or_never = _matching(_SECONDS, "is not a number of seconds (0 waits for ever)", float)
_topology = _matching(f"{_PAIR}(,{_PAIR})*", "is not a list of pairs of ranks, such as 0-1,1-2,2-0", _pairs)
_shares = _matching(
    f"{_SHARE}(,{_SHARE})*",
    "is not a number above 0 for each rank, such as 1.5,1",
    lambda text: tuple(map(float, text.split(","))),
)
# The provider checks the names of faults; this check rejects only a text that is no list of faults.
_faults = _matching(f"([0-9]:)?{_FAULT}(,{_FAULT})*", "is not a list of faults, such as drop=1/100,corrupt_next=1")
_job = _matching("[A-Za-z0-9._-]{0,256}", "must be at most 256 letters, digits, dots, dashes or underlines")
_file = _matching("(?s).+", "is empty; give a name, write none, or unset it for the default", os.path.expanduser)
_secret = _matching(
    "([0-9a-fA-F]{2}){16,128}",
    "must be 32 to 256 hex digits, an even number of them; `openssl rand -hex 32` makes one",
    bytes.fromhex,
)
_api_key = _matching("[!-~]{8,256}", "must be 8 to 256 letters, digits and signs of ASCII, without spaces")


def _debug(text: str) -> str:
    level, colon, names = text.partition(":")
    if level not in DEBUG_LEVELS:
        levels = ", ".join(DEBUG_LEVELS)
        raise ValueError(f"has no level of {levels}; subsystems follow a colon, as in info:link,rendezvous")
    unknown = [subsystem for subsystem in names.split(",") if subsystem not in DEBUG_SUBSYSTEMS]
    if colon and unknown:
        raise ValueError(f"is wrong: there is no subsystem {unknown[0]!r}; there are {', '.join(DEBUG_SUBSYSTEMS)}")
    return text


def _pattern(text: str) -> str:
    if text == "":
        raise ValueError("is empty; name a file, or unset it for stderr")
    if wrong := re.search(r"%(?![hpr%])", text.replace("%%", "")):
        raise ValueError(f"has a % at {wrong.start()} that is none of %h (host), %p (process), %r (rank) and %%")
    return os.path.expanduser(text)


@dataclass(frozen=True)
class Variable:
    """An MLXDIST_* variable. ``of_job``: it belongs to one job, so a job that is started inside another drops it."""

    name: str
    meaning: str
    default: str
    parse: Parser
    of_job: bool

    @property
    def field(self) -> str:
        """The name of the attribute of `Environment` that holds this variable."""
        return self.name.removeprefix("MLXDIST_").lower()

    @property
    def is_secret(self) -> bool:
        return self.parse in (_secret, _api_key)

    def value(self, text: str) -> Any:
        """The value that ``text`` stands for. Raises EnvironmentVariableError: the text is malformed."""
        try:
            return self.parse(text)
        except ValueError as error:
            # Secrets stay out of the message, which would end in a log.
            shown = self.name if self.is_secret else f"{self.name}={text!r}"
            raise EnvironmentVariableError(f"{shown} {error}") from None


def _of_user(meaning: str, shown: str, parse: Parser, default: Any = None, of_job: bool = False) -> Any:
    """A field for a variable of the user. ``shown``: its default in words, the native one if ``default`` is None."""
    about = {"meaning": meaning, "default": shown, "parse": parse, "of_job": of_job}
    return field(default=default, metadata=about, repr=parse not in (_secret, _api_key))


_of_job = functools.partial(_of_user, of_job=True)


@dataclass(frozen=True)
class Environment:
    """The values of the variables: ``rank`` is that of MLXDIST_RANK. ``None``: not set."""

    rank: int = _of_job("number of this process, from 0", "a group of one", _integer(0, MAX_RANKS - 1), 0)
    world_size: int = _of_job("number of processes of the job", "a group of one", _integer(1, MAX_RANKS), 1)
    rendezvous: tuple[str, int] | None = _of_job(
        "address of rank 0: host:port, [IPv6 address]:port", "none", parse_address
    )
    rendezvous_fd: int | None = _of_job(
        "rank 0: descriptor of a socket that listens at that address", "none", _integer(0, 2**31 - 1)
    )
    follower_fd: int | None = _of_job(
        "rank 0 of `mlxdist serve`: descriptor of a socket for the launcher on another host",
        "none",
        _integer(0, 2**31 - 1),
    )
    secret: bytes = _of_job("key that all ranks of the job share, at least 32 hex digits", "none", _secret, b"")
    job: str = _of_job("name of the job, recorded in its checkpoints", "empty", _job, "")
    restart_count: int = _of_job("number of times the job has been restarted", "0", _integer(0, MAX_RESTARTS), 0)
    rank_shares_memory: tuple[float, ...] | None = _of_job(
        "share of the work of each rank in decoding, such as 1.5,1", "none", _shares
    )
    rank_shares_compute: tuple[float, ...] | None = _of_job(
        "share of the work of each rank in training and for prompts", "none", _shares
    )
    memory_gbps: tuple[float, ...] | None = _of_job(
        "GB/s at which each rank reads weights, such as 400,200", "none", _shares
    )
    emulated_node: int | None = _of_job(
        "virtual host of this rank, of `mlxdist launch --emulate-nodes`", "none", _integer(0, MAX_RANKS - 1)
    )
    membership: str | None = _of_job("socket of the launcher for `Group.shrink` and `grow`", "none", str)
    epoch: int = _of_job("number of times the group of all ranks has shrunk or grown", "0", _integer(0, 2**31 - 1), 0)
    join: int = _of_job("1: `init` waits until the others call `Group.grow`", "0", _integer(0, 1), 0)
    member: int | None = _of_job(
        "number of this process at the start of the job", "MLXDIST_RANK", _integer(0, MAX_RANKS - 1)
    )
    error_file: str | None = _of_job("file that names the first rank that failed", "none", str)
    timeout: float | None = _of_user(
        "seconds without progress before an operation fails, 0 for never", "30", _seconds_or_never
    )
    stall_warning: float | None = _of_user(
        "seconds until a stalled operation logs the rank it waits on, 0 for never", "10", _seconds_or_never
    )
    deadlock_grace: float = _of_user(
        "seconds that ranks may wait for each other while one has an idle thread, 0 for ever",
        "20",
        _seconds_or_never,
        20.0,
    )
    checksum: int | None = _of_user(
        "1: each message carries a CRC32C; damaged messages are retransmitted", "0", _integer(0, 1)
    )
    rendezvous_timeout: float = _of_user("seconds to wait for missing ranks", "60", _seconds, 60.0)
    bulk_slot_bytes: int | None = _of_user(
        "bytes of a slot for large messages: multiple of 4096 up to 1048576",
        "131072",
        _integer(4096, 1 << 20, multiple=4096),
    )
    bulk_slots: int | None = _of_user("slots for large messages, per peer and direction: 2 to 64", "6", _integer(2, 64))
    eager_slots: int | None = _of_user(
        "slots for small messages, per peer and direction: 4 to 256", "32", _integer(4, 256)
    )
    provider: str = _of_user(
        "verbs provider: auto, soft, ibverbs (Linux), librdma (macOS)", "auto", _one_of(PROVIDERS), "auto"
    )
    device_map: str | None = _of_user(
        "matrix of RDMA devices as JSON, or a file with it, or a hostfile", "by address", _file
    )
    qp_type: str = _of_user(
        "queue pair type: uc (unreliable connection) or rc (reliable; not on Thunderbolt)",
        "uc",
        _one_of(QP_TYPES),
        "uc",
    )
    meet_after: float | None = _of_user(
        "idle seconds after which ranks with a GPU synchronize first, 0 for never", "2", _seconds_or_never
    )
    keepalive: float | None = _of_user(
        "seconds between keepalive messages of an idle queue pair, 0 for none", "60", _seconds_or_never
    )
    links_per_peer: int | None = _of_user(
        f"links per peer that large messages are striped over: 1 to {MAX_LINKS}", "1", _integer(1, MAX_LINKS)
    )
    topology: frozenset[tuple[int, int]] | None = _of_user(
        "pairs of ranks that a link connects, such as 0-1,1-2,2-0", "every pair", _topology
    )
    on_demand_threshold: int | None = _of_user(
        "largest job in which all pairs connect at the start, not on demand: 1 to 256", "8", _integer(1, 256)
    )
    algo: str | None = _of_user(
        "algorithm of collectives: auto, direct, mesh, ring, recursive_doubling, tree or hierarchical",
        "auto",
        _one_of(ALGORITHMS),
    )
    soft_profile: str = _of_user(
        f"device that the soft provider emulates: {', '.join(SOFT_PROFILES)}", "ideal", _one_of(SOFT_PROFILES), "ideal"
    )
    soft_transport: str = _of_user(
        "transport of the soft provider: auto, shm or tcp", "auto", _one_of(SOFT_TRANSPORTS), "auto"
    )
    inject_faults: str | None = _of_user(
        "faults of the soft provider, for tests: a list as in native/providers/soft/emulation/fault_injection.h",
        "none",
        _faults,
    )
    tuning_file: str | None = _of_user(
        "rank 0: file of the tuning table, or none", "~/.config/mlxdist/tuning.json", _file
    )
    debug: str | None = _of_user(
        "debug output: off, warn, info or trace, and subsystems: info:link,rendezvous", "warn", _debug
    )
    debug_file: str | None = _of_user(
        "file for debug output; %h is the host, %p the process, %r the rank", "stderr", _pattern
    )
    sync: int | None = _of_user(
        "1: operations on mx.array are evaluated where they are called, to find errors", "0", _integer(0, 1)
    )
    api_key: str = _of_user("key that clients of `mlxdist serve` send", "none", _api_key, "")
    flight_dir: str | None = _of_user(
        "directory of the flight recorder's files, or none", "the current directory", _file
    )

    @property
    def run(self) -> str:
        """The name that all starts of a job share: its first name. A process without a job gets a unique one."""
        return self.job.removesuffix(f"-{self.restart_count}" if self.restart_count else "") or _UNNAMED_RUN

    @property
    def first_rank(self) -> int:
        """The rank that this process had at the start of the job, by which the launcher knows it."""
        return self.rank if self.member is None else self.member

    @property
    def address(self) -> tuple[str, int]:
        """The host and port where rank 0 of a job of several ranks listens."""
        assert self.rendezvous is not None  # of several ranks: checked by `read`
        return self.rendezvous

    @property
    def host_name(self) -> str:
        """The name of this rank's host, or of its virtual host, for other ranks to read."""
        return socket.gethostname() if self.emulated_node is None else f"node{self.emulated_node}"

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> "Environment":
        """Reads and checks all variables.

        Raises:
            EnvironmentVariableError: a variable is unknown or malformed, or two contradict each other.
        """
        _reject_unknown(environ)
        environ = _with_scheduler_rank(environ)
        environment = cls(**{v.field: v.value(environ[v.name]) for v in VARIABLES if v.name in environ})
        _reject_contradictions(environ, environment)
        return environment


VARIABLES = tuple(Variable(f"MLXDIST_{each.name.upper()}", **each.metadata) for each in fields(Environment))
OF_JOB = frozenset(variable.name for variable in VARIABLES if variable.of_job)
_BY_NAME = {variable.name: variable for variable in VARIABLES}


def same_job(name: str, other: str) -> bool:
    """Whether two values of MLXDIST_JOB name one job. With a launcher on each node (--nodes), names vary."""
    return _common_name(name) == _common_name(other)


def _common_name(job: str) -> str:
    match = re.search(r"([0-9a-f]{8})\.node[0-9]+\.[0-9a-f]+$", job)
    return match[1] if match else job


def _reject_unknown(environ: Mapping[str, str]) -> None:
    for name in sorted(environ):
        if not name.startswith("MLXDIST_") or name in _BY_NAME:
            continue
        close = nearest(name, _BY_NAME)
        advice = f"did you mean {close}?" if close else "unset it; `mlxdist env` lists those that exist"
        raise EnvironmentVariableError(f"{name} is set, but there is no such variable; {advice}")


def _with_scheduler_rank(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Adds the rank and size that mpirun or srun has given, where the variables name a job but no rank of it."""
    if "MLXDIST_RANK" in environ or "MLXDIST_RENDEZVOUS" not in environ:
        return environ
    found = scheduler_rank(environ)
    if found is None:
        return environ
    text = environ.get("MLXDIST_WORLD_SIZE")
    given = None if text is None else _BY_NAME["MLXDIST_WORLD_SIZE"].value(text)
    size = given if found.size is None else found.size
    if size is None:
        raise EnvironmentVariableError(
            f"{found.source} numbers this process, but nothing says how many there are; set MLXDIST_WORLD_SIZE"
        )
    if given not in (None, size):
        raise EnvironmentVariableError(
            f"MLXDIST_WORLD_SIZE={given} contradicts the {size} processes of {found.source}; unset it"
        )
    return {**environ, "MLXDIST_RANK": str(found.rank), "MLXDIST_WORLD_SIZE": str(size)}


def _reject_contradictions(environ: Mapping[str, str], environment: Environment) -> None:
    def reject(name: str, problem: str) -> None:
        raise EnvironmentVariableError(f"{name}={environ[name]} {problem}")

    has_rank, has_size = "MLXDIST_RANK" in environ, "MLXDIST_WORLD_SIZE" in environ
    rank, size = environment.rank, environment.world_size
    if has_rank != has_size:
        given, other = ("MLXDIST_RANK", "MLXDIST_WORLD_SIZE")[:: 1 if has_rank else -1]
        reject(given, f"is set, but {other} is not; set both, or neither for a group of one")
    if not has_rank:
        for name in ("MLXDIST_RENDEZVOUS", "MLXDIST_RENDEZVOUS_FD"):
            if name in environ:
                reject(
                    name,
                    "is set, but MLXDIST_RANK and MLXDIST_WORLD_SIZE are not, and no mpirun or srun says which rank "
                    "this is; set them too, or unset it for a group of one",
                )
        return
    if rank >= size:
        reject("MLXDIST_RANK", f"does not fit MLXDIST_WORLD_SIZE={size}; ranks are numbered from 0 to {size - 1}")
    for a, b in sorted(environment.topology or ()):
        if max(a, b) >= size or a == b:
            reject(
                "MLXDIST_TOPOLOGY",
                f"has the pair {a}-{b}, but the ranks are 0 to {size - 1}, and a link connects two different ranks",
            )
    shares = {
        "MLXDIST_RANK_SHARES_MEMORY": environment.rank_shares_memory,
        "MLXDIST_RANK_SHARES_COMPUTE": environment.rank_shares_compute,
        "MLXDIST_MEMORY_GBPS": environment.memory_gbps,
    }
    for name, numbers in shares.items():
        if numbers is not None and len(numbers) != size:
            reject(name, f"has {len(numbers)} numbers, but there are {size} ranks (MLXDIST_WORLD_SIZE)")
    needed = {
        "MLXDIST_RENDEZVOUS, the host:port of rank 0": environment.rendezvous,
        "MLXDIST_SECRET, the key of the job, for example from `openssl rand -hex 32`": environment.secret,
    }
    for what, value in needed.items():
        if size > 1 and not value:
            advice = "`mlxdist launch` sets it, or set it to the same value on every rank"
            reject("MLXDIST_WORLD_SIZE", f"needs {what}; {advice}")
    for name in ("MLXDIST_RENDEZVOUS_FD", "MLXDIST_FOLLOWER_FD"):
        if rank != 0 and name in environ:
            reject(name, f"is for rank 0, but MLXDIST_RANK={rank}; unset it here")
