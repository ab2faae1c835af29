"""The MLXDIST_* variables: the one place that knows and reads them.

`mlxdist launch` sets those that tell a process which rank of which job it is; the others are the user's.
Whatever is unknown, malformed or contradictory is refused here, before anything is opened: a job whose ranks
understood their variables differently would hang, or silently run as several groups of one.
"""

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from .errors import EnvironmentVariableError
from .schedulers import find_place

__all__ = [
    "ALGORITHMS",
    "DEBUG_LEVELS",
    "DEBUG_SUBSYSTEMS",
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

MAX_RANKS = 1024
MAX_RESTARTS = 1000
ALGORITHMS = ("auto", "direct", "mesh", "ring", "doubling", "tree")  # enum mlxdist_algorithm of mlxdist.h
DEBUG_LEVELS = ("off", "warn", "info", "trace")  # enum debug_level of native/transport/debug.h
DEBUG_SUBSYSTEMS = (
    "connection", "deadline", "failure", "flight", "link", "load", "meeting", "message", "operation", "reconnect",
    "rendezvous", "verbs",
)  # fmt: skip
PROVIDERS = ("auto", "soft", "ibverbs", "librdma")
QP_TYPES = ("uc", "rc")
SOFT_PROFILES = ("ideal", "apple-tb5", "apple-tb5-26.2", "apple-odd", "rxe")  # native/providers/soft/profile.h
SOFT_TRANSPORTS = ("auto", "shm", "tcp")
_UNNAMED_RUN = os.urandom(8).hex()


@dataclass(frozen=True)
class Variable:
    """One variable. ``of_job`` marks those that belong to one job: a job started inside another drops them."""

    name: str
    meaning: str
    default: str
    of_job: bool = False


VARIABLES = (
    Variable("MLXDIST_RANK", "number of this process, from 0", "a group of one", of_job=True),
    Variable("MLXDIST_WORLD_SIZE", "number of processes of the job", "a group of one", of_job=True),
    Variable("MLXDIST_RENDEZVOUS", "address of rank 0: host:port, [IPv6 address]:port", "none", of_job=True),
    Variable(
        "MLXDIST_RENDEZVOUS_FD", "rank 0: descriptor of a socket that listens at that address", "none", of_job=True
    ),
    Variable("MLXDIST_SECRET", "key that all ranks of the job share, at least 32 hex digits", "none", of_job=True),
    Variable("MLXDIST_JOB", "name of the job, recorded in its checkpoints", "empty", of_job=True),
    Variable("MLXDIST_RESTART_COUNT", "number of times the job has been restarted", "0", of_job=True),
    Variable(
        "MLXDIST_RANK_SHARES_MEMORY", "share of the work of each rank in decoding, such as 1.5,1", "none", of_job=True
    ),
    Variable(
        "MLXDIST_RANK_SHARES_COMPUTE", "share of the work of each rank in training and for prompts", "none", of_job=True
    ),
    Variable("MLXDIST_ERROR_FILE", "file that names the first rank that failed", "none", of_job=True),
    Variable("MLXDIST_TIMEOUT", "seconds without progress before an operation fails, 0 for never", "30"),
    Variable("MLXDIST_STALL_WARNING", "seconds until a stalled operation logs the rank it waits on, 0 for never", "10"),
    Variable("MLXDIST_CHECKSUM", "1: each message carries a CRC32C; damaged messages are retransmitted", "0"),
    Variable("MLXDIST_RENDEZVOUS_TIMEOUT", "seconds to wait for missing ranks", "60"),
    Variable("MLXDIST_BULK_SLOT_BYTES", "bytes of a slot for large messages: multiple of 4096 up to 1048576", "131072"),
    Variable("MLXDIST_BULK_SLOTS", "slots for large messages, per peer and direction: 2 to 64", "6"),
    Variable("MLXDIST_EAGER_SLOTS", "slots for small messages, per peer and direction: 4 to 256", "32"),
    Variable("MLXDIST_PROVIDER", "verbs provider: auto, soft, ibverbs (Linux), librdma (macOS)", "auto"),
    Variable("MLXDIST_DEVICE_MAP", "matrix of RDMA devices as JSON, or a file with it, or a hostfile", "by address"),
    Variable("MLXDIST_QP_TYPE", "queue pair type: uc (unreliable connection) or rc (reliable, on Linux)", "uc"),
    Variable("MLXDIST_MEET_AFTER", "idle seconds after which ranks with a GPU synchronize first, 0 for never", "2"),
    Variable("MLXDIST_KEEPALIVE", "seconds between keepalive messages of an idle queue pair, 0 for none", "60"),
    Variable("MLXDIST_LINKS_PER_PEER", "links per peer that large messages are striped over: 1 or 2", "1"),
    Variable("MLXDIST_TOPOLOGY", "pairs of ranks that a link connects, such as 0-1,1-2,2-0", "every pair"),
    Variable(
        "MLXDIST_ON_DEMAND_THRESHOLD",
        "largest job in which all pairs connect at the start, not on demand: 1 to 256",
        "8",
    ),
    Variable("MLXDIST_ALGO", "algorithm of collectives: auto, direct, mesh, ring, doubling or tree", "auto"),
    Variable("MLXDIST_SOFT_PROFILE", f"device that the soft provider emulates: {', '.join(SOFT_PROFILES)}", "ideal"),
    Variable("MLXDIST_SOFT_TRANSPORT", "transport of the soft provider: auto, shm or tcp", "auto"),
    Variable("MLXDIST_INJECT_FAULTS", "faults of the soft provider, for tests: a list as in soft/faults.h", "none"),
    Variable("MLXDIST_TUNING_FILE", "rank 0: file of the tuning table, or none", "~/.config/mlxdist/tuning.json"),
    Variable("MLXDIST_DEBUG", "debug output: off, warn, info or trace, and subsystems: info:link,rendezvous", "warn"),
    Variable("MLXDIST_DEBUG_FILE", "file for debug output; %h is the host, %p the process, %r the rank", "stderr"),
    Variable("MLXDIST_FLIGHT_DIR", "directory of the flight recorder's files, or none", "the current directory"),
)
OF_JOB = frozenset(variable.name for variable in VARIABLES if variable.of_job)


@dataclass(frozen=True)
class Environment:
    """What the variables say. ``None`` means not set: the native library's own default holds."""

    rank: int = 0
    world_size: int = 1
    rendezvous: tuple[str, int] | None = None
    rendezvous_fd: int | None = None
    secret: bytes = field(default=b"", repr=False)
    job: str = ""
    restart_count: int = 0
    error_file: str | None = None
    timeout: float | None = None
    stall_warning: float | None = None
    checksum: int | None = None
    rendezvous_timeout: float = 60.0
    bulk_slot_bytes: int | None = None
    bulk_slots: int | None = None
    eager_slots: int | None = None
    links_per_peer: int | None = None
    topology: frozenset[tuple[int, int]] | None = None
    on_demand_threshold: int | None = None
    algo: str | None = None
    provider: str = "auto"
    device_map: str | None = None
    qp_type: str = "uc"
    meet_after: float | None = None
    keepalive: float | None = None
    soft_profile: str = "ideal"
    soft_transport: str = "auto"
    inject_faults: str | None = None
    tuning_file: str | None = None
    debug: str | None = None
    debug_file: str | None = None
    flight_dir: str | None = None
    rank_shares_memory: tuple[float, ...] | None = None
    rank_shares_compute: tuple[float, ...] | None = None

    @property
    def run(self) -> str:
        """What all starts of a job have in common: its first name. Of a process without one, a name of its own."""
        return self.job.removesuffix(f"-{self.restart_count}" if self.restart_count else "") or _UNNAMED_RUN

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> "Environment":
        """Reads and checks all variables.

        Raises:
            EnvironmentVariableError: a variable is unknown or malformed, or two contradict each other.
        """
        _refuse_unknown(environ)
        environ = _numbered(environ)
        environment = cls(
            rank=_integer(environ, "MLXDIST_RANK", 0, MAX_RANKS - 1) or 0,
            world_size=_integer(environ, "MLXDIST_WORLD_SIZE", 1, MAX_RANKS) or 1,
            rendezvous=_address(environ, "MLXDIST_RENDEZVOUS"),
            rendezvous_fd=_integer(environ, "MLXDIST_RENDEZVOUS_FD", 0, 2**31 - 1),
            secret=_secret(environ, "MLXDIST_SECRET"),
            job=_job(environ, "MLXDIST_JOB"),
            restart_count=_integer(environ, "MLXDIST_RESTART_COUNT", 0, MAX_RESTARTS) or 0,
            error_file=environ.get("MLXDIST_ERROR_FILE"),
            timeout=_seconds(environ, "MLXDIST_TIMEOUT", zero=True),
            stall_warning=_seconds(environ, "MLXDIST_STALL_WARNING", zero=True),
            checksum=_integer(environ, "MLXDIST_CHECKSUM", 0, 1),
            rendezvous_timeout=_seconds(environ, "MLXDIST_RENDEZVOUS_TIMEOUT", zero=False) or 60.0,
            bulk_slot_bytes=_integer(environ, "MLXDIST_BULK_SLOT_BYTES", 4096, 1 << 20, multiple=4096),
            bulk_slots=_integer(environ, "MLXDIST_BULK_SLOTS", 2, 64),
            eager_slots=_integer(environ, "MLXDIST_EAGER_SLOTS", 4, 256),
            links_per_peer=_integer(environ, "MLXDIST_LINKS_PER_PEER", 1, 2),
            topology=_pairs(environ, "MLXDIST_TOPOLOGY"),
            on_demand_threshold=_integer(environ, "MLXDIST_ON_DEMAND_THRESHOLD", 1, 256),
            algo=_one_of(environ, "MLXDIST_ALGO", ALGORITHMS),
            provider=_one_of(environ, "MLXDIST_PROVIDER", PROVIDERS) or "auto",
            device_map=_file(environ, "MLXDIST_DEVICE_MAP"),
            qp_type=_one_of(environ, "MLXDIST_QP_TYPE", QP_TYPES) or "uc",
            meet_after=_seconds(environ, "MLXDIST_MEET_AFTER", zero=True),
            keepalive=_seconds(environ, "MLXDIST_KEEPALIVE", zero=True),
            soft_profile=_one_of(environ, "MLXDIST_SOFT_PROFILE", SOFT_PROFILES) or "ideal",
            soft_transport=_one_of(environ, "MLXDIST_SOFT_TRANSPORT", SOFT_TRANSPORTS) or "auto",
            inject_faults=_faults(environ, "MLXDIST_INJECT_FAULTS"),
            tuning_file=_file(environ, "MLXDIST_TUNING_FILE"),
            debug=_debug(environ, "MLXDIST_DEBUG"),
            debug_file=_pattern(environ, "MLXDIST_DEBUG_FILE"),
            flight_dir=_file(environ, "MLXDIST_FLIGHT_DIR"),
            rank_shares_memory=_numbers(environ, "MLXDIST_RANK_SHARES_MEMORY"),
            rank_shares_compute=_numbers(environ, "MLXDIST_RANK_SHARES_COMPUTE"),
        )
        _refuse_contradictions(environ, environment)
        return environment


def parse_address(text: str) -> tuple[str, int]:
    """``host:port`` or ``[IPv6 address]:port`` as a pair.

    Raises:
        ValueError: it is neither, or the port is not 1 to 65535.
    """
    match = re.fullmatch(r"(?:\[([^\[\]]+)\]|([^\[\]:\s]+)):([0-9]{1,5})", text)
    if match is None or not 1 <= int(match[3]) <= 65535:
        raise ValueError(f"{text!r} is not an address; write host:port, or [address]:port for IPv6")
    return match[1] or match[2], int(match[3])


def format_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def same_job(name: str, other: str) -> bool:
    """Whether two values of MLXDIST_JOB name one job. Where each node has a launcher (--nodes), names differ a bit."""
    return _common_name(name) == _common_name(other)


def _common_name(job: str) -> str:
    match = re.search(r"([0-9a-f]{8})\.node[0-9]+\.[0-9a-f]+$", job)
    return match[1] if match else job


def _refuse_unknown(environ: Mapping[str, str]) -> None:
    known = [variable.name for variable in VARIABLES]
    for name in sorted(environ):
        if not name.startswith("MLXDIST_") or name in known:
            continue
        import difflib  # seldom needed, and the launcher starts fast

        close = difflib.get_close_matches(name, known, n=1)
        advice = f"did you mean {close[0]}?" if close else "unset it; `mlxdist env` lists those that exist"
        raise EnvironmentVariableError(f"{name} is set, but there is no such variable; {advice}")


def _numbered(environ: Mapping[str, str]) -> Mapping[str, str]:
    """With the rank and size that mpirun or srun has given, where a job is named but no rank of it."""
    if "MLXDIST_RANK" in environ or "MLXDIST_RENDEZVOUS" not in environ:
        return environ
    place = find_place(environ)
    if place is None:
        return environ
    given = _integer(environ, "MLXDIST_WORLD_SIZE", 1, MAX_RANKS)
    size = given if place.size is None else place.size
    if size is None:
        raise EnvironmentVariableError(
            f"{place.source} numbers this process, but nothing says how many there are; set MLXDIST_WORLD_SIZE"
        )
    if given not in (None, size):
        raise EnvironmentVariableError(
            f"MLXDIST_WORLD_SIZE={given} contradicts the {size} processes of {place.source}; unset it"
        )
    return {**environ, "MLXDIST_RANK": str(place.rank), "MLXDIST_WORLD_SIZE": str(size)}


def _refuse_contradictions(environ: Mapping[str, str], environment: Environment) -> None:
    has_rank, has_size = "MLXDIST_RANK" in environ, "MLXDIST_WORLD_SIZE" in environ
    rank, size = environment.rank, environment.world_size
    if has_rank and not has_size:
        raise EnvironmentVariableError(
            f"MLXDIST_RANK={rank} is set, but MLXDIST_WORLD_SIZE is not; set both, or neither for a group of one"
        )
    if has_size and not has_rank:
        raise EnvironmentVariableError(
            f"MLXDIST_WORLD_SIZE={size} is set, but MLXDIST_RANK is not; set both, or neither for a group of one"
        )
    if not has_rank:
        for name in ("MLXDIST_RENDEZVOUS", "MLXDIST_RENDEZVOUS_FD"):
            if name in environ:
                raise EnvironmentVariableError(
                    f"{name}={environ[name]} is set, but MLXDIST_RANK and MLXDIST_WORLD_SIZE are not, and no mpirun or "
                    "srun says which rank this is; set them too, or unset it for a group of one"
                )
    if rank >= size:
        raise EnvironmentVariableError(
            f"MLXDIST_RANK={rank} does not fit MLXDIST_WORLD_SIZE={size}; ranks are numbered from 0 to {size - 1}"
        )
    for pair in sorted(environment.topology or ()) if has_rank else ():
        if max(pair) >= size or pair[0] == pair[1]:
            raise EnvironmentVariableError(
                f"MLXDIST_TOPOLOGY={environ['MLXDIST_TOPOLOGY']} has the pair {pair[0]}-{pair[1]}, but the ranks are 0 "
                f"to {size - 1}, and a link connects two different ranks"
            )
    for name, weights in (
        ("MLXDIST_RANK_SHARES_MEMORY", environment.rank_shares_memory),
        ("MLXDIST_RANK_SHARES_COMPUTE", environment.rank_shares_compute),
    ):
        if has_rank and weights is not None and len(weights) != size:
            raise EnvironmentVariableError(
                f"{name}={environ[name]} has {len(weights)} numbers, but there are {size} ranks (MLXDIST_WORLD_SIZE)"
            )
    if size > 1 and environment.rendezvous is None:
        raise EnvironmentVariableError(
            f"MLXDIST_WORLD_SIZE={size} needs MLXDIST_RENDEZVOUS, the host:port of rank 0; "
            "`mlxdist launch` sets it, or set it to the same value on every rank"
        )
    if size > 1 and not environment.secret:
        raise EnvironmentVariableError(
            f"MLXDIST_WORLD_SIZE={size} needs MLXDIST_SECRET, the key of the job; `mlxdist launch` sets it, "
            "or set it to the same value on every rank, for example from `openssl rand -hex 32`"
        )
    if rank != 0 and environment.rendezvous_fd is not None:
        raise EnvironmentVariableError(
            f"MLXDIST_RENDEZVOUS_FD={environment.rendezvous_fd} is for rank 0, but MLXDIST_RANK={rank}; unset it here"
        )


def _integer(environ: Mapping[str, str], name: str, low: int, high: int, multiple: int = 1) -> int | None:
    if name not in environ:
        return None
    text = environ[name]
    # Not int(): it also takes " 1", "1_0" and the digits of other scripts.
    value = int(text) if re.fullmatch(r"[0-9]{1,10}", text, re.ASCII) else None
    if value is None or not low <= value <= high or value % multiple != 0:
        steps = f", a multiple of {multiple}" if multiple > 1 else ""
        raise EnvironmentVariableError(f"{name}={text!r} is not a whole number from {low} to {high}{steps}")
    return value


def _pairs(environ: Mapping[str, str], name: str) -> frozenset[tuple[int, int]] | None:
    """Each pair both ways."""
    if name not in environ:
        return None
    text = environ[name]
    if not re.fullmatch(r"[0-9]{1,4}-[0-9]{1,4}(,[0-9]{1,4}-[0-9]{1,4})*", text, re.ASCII):
        raise EnvironmentVariableError(f"{name}={text!r} is not a list of pairs of ranks, such as 0-1,1-2,2-0")
    pairs = [(int(a), int(b)) for a, b in (pair.split("-") for pair in text.split(","))]
    return frozenset(pairs) | frozenset((b, a) for a, b in pairs)


def _numbers(environ: Mapping[str, str], name: str) -> tuple[float, ...] | None:
    if name not in environ:
        return None
    text = environ[name]
    number = r"[0-9]{1,20}(\.[0-9]{1,9})?"
    numbers = tuple(map(float, text.split(","))) if re.fullmatch(f"{number}(,{number})*", text, re.ASCII) else ()
    if not numbers or not min(numbers) > 0:
        raise EnvironmentVariableError(f"{name}={text!r} is not a number above 0 for each rank, such as 1.5,1")
    return numbers


def _one_of(environ: Mapping[str, str], name: str, values: tuple[str, ...]) -> str | None:
    text = environ.get(name)
    if text is not None and text not in values:
        raise EnvironmentVariableError(f"{name}={text!r} is none of {', '.join(values)}")
    return text


def _faults(environ: Mapping[str, str], name: str) -> str | None:
    """The provider knows which faults there are; here only what cannot be a list of any is refused."""
    text = environ.get(name)
    fault = "[a-z_]+(=[a-z0-9/]+)?"
    if text is not None and not re.fullmatch(f"([0-9]:)?{fault}(,{fault})*", text, re.ASCII):
        raise EnvironmentVariableError(f"{name}={text!r} is not a list of faults, such as drop=1/100,corrupt_next=1")
    return text


def _seconds(environ: Mapping[str, str], name: str, zero: bool) -> float | None:
    if name not in environ:
        return None
    text = environ[name]
    value = float(text) if re.fullmatch(r"[0-9]{1,9}(\.[0-9]*)?", text, re.ASCII) else math.nan
    if math.isnan(value) or (value == 0 and not zero):
        wanted = "a number of seconds (0 waits for ever)" if zero else "a number of seconds above 0"
        raise EnvironmentVariableError(f"{name}={text!r} is not {wanted}")
    return value


def _address(environ: Mapping[str, str], name: str) -> tuple[str, int] | None:
    if name not in environ:
        return None
    try:
        return parse_address(environ[name])
    except ValueError as error:
        raise EnvironmentVariableError(f"{name}: {error}") from None


def _secret(environ: Mapping[str, str], name: str) -> bytes:
    text = environ.get(name)
    if text is None:
        return b""
    # The value stays out of the message: it would end in a log.
    if not re.fullmatch(r"([0-9a-fA-F]{2}){16,128}", text, re.ASCII):
        raise EnvironmentVariableError(
            f"{name} must be 32 to 256 hex digits, an even number of them; `openssl rand -hex 32` makes one"
        )
    return bytes.fromhex(text)


def _job(environ: Mapping[str, str], name: str) -> str:
    text = environ.get(name, "")
    if not re.fullmatch(r"[A-Za-z0-9._-]{0,256}", text, re.ASCII):
        raise EnvironmentVariableError(
            f"{name}={text!r} must be at most 256 letters, digits, dots, dashes or underlines"
        )
    return text


def _file(environ: Mapping[str, str], name: str) -> str | None:
    if environ.get(name) == "":
        raise EnvironmentVariableError(f"{name} is empty; give a name, write none, or unset it for the default")
    return environ.get(name)


def _debug(environ: Mapping[str, str], name: str) -> str | None:
    text = environ.get(name)
    if text is None:
        return None
    level, colon, names = text.partition(":")
    if level not in DEBUG_LEVELS:
        raise EnvironmentVariableError(
            f"{name}={text!r}: the level must be one of {', '.join(DEBUG_LEVELS)}, and subsystems follow a colon, as "
            "in info:link,rendezvous"
        )
    unknown = [subsystem for subsystem in names.split(",") if subsystem not in DEBUG_SUBSYSTEMS]
    if colon and unknown:
        raise EnvironmentVariableError(
            f"{name}={text!r}: there is no subsystem {unknown[0]!r}; there are {', '.join(DEBUG_SUBSYSTEMS)}"
        )
    return text


def _pattern(environ: Mapping[str, str], name: str) -> str | None:
    text = environ.get(name)
    if text == "":
        raise EnvironmentVariableError(f"{name} is empty; name a file, or unset it for stderr")
    if text is not None and (wrong := re.search(r"%(?![hpr%])", text.replace("%%", ""))):
        raise EnvironmentVariableError(
            f"{name}={text!r} has a % at {wrong.start()} that is none of %h (host), %p (process), %r (rank) and %%"
        )
    return text
