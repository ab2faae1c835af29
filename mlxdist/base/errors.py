"""The exceptions of mlxdist: one family, so that ``except mlxdist.Error`` catches all errors of mlxdist.

Every message says what happened, on which rank and host, and what to do next. Where Python has a class of its own
for the case (``ValueError``, ``TimeoutError``, ``ImportError``), ours is also that one. docs/errors.md is for users.
"""

import re
import signal
from collections.abc import Collection, Iterable

__all__ = [
    "Aborted",
    "EnvironmentVariableError",
    "Error",
    "InvalidArgument",
    "Mismatch",
    "NonFinite",
    "PeerLost",
    "RendezvousError",
    "ResourceError",
    "Timeout",
    "TransportError",
    "VersionMismatch",
    "by_name",
    "exit_status",
    "from_status",
    "interruption",
    "located",
    "name_ranks",
    "ranks_have",
    "to_status",
    "to_tagged_text",
]


# The origin at the end of a message. Errors pass as text through C and C++ and from rank to rank, without attributes.
_ORIGIN = re.compile(r" \[rank (\d{1,9}) on ([^\s\]]+)(?: in (.+?)(?: #(\d{1,19})(?: .*)?)?)?\]$", re.DOTALL)

# The engine truncates a message to 1023 bytes.
_MAX_BYTES = 1000


class Error(RuntimeError):
    """Base of the family. A RuntimeError, because that is what MLX turns every C++ exception into.

    Attributes have the origin of the first cause; each is ``None`` where it is not known or does not apply.
    """

    __module__ = "mlxdist"  # a traceback shows the name by which users catch it

    def __init_subclass__(cls) -> None:
        cls.__module__ = "mlxdist"

    @property
    def rank(self) -> int | None:
        """The rank on which the first cause was found, in the group of ``mlxdist.init()``."""
        found = self._origin()
        return found and int(found[1])

    @property
    def host(self) -> str | None:
        """The name of that rank's machine."""
        found = self._origin()
        return found and found[2]

    @property
    def operation(self) -> str | None:
        """The operation that ran on that rank, such as "all_sum"."""
        found = self._origin()
        return found and found[3]

    @property
    def sequence(self) -> int | None:
        """The number of that operation among the collectives, or the messages, of its group on that rank, from 1."""
        found = self._origin()
        return int(found[4]) if found and found[4] else None

    def _origin(self) -> re.Match[str] | None:
        return _ORIGIN.search(str(self))


class InvalidArgument(Error, ValueError):
    """An argument was rejected before any work."""


class Mismatch(Error):
    """The ranks disagree: on the operation, its dtype, shape or root; on what an object is made of; or on the step of
    the rendezvous."""


class Timeout(Error, TimeoutError):
    """An operation made no progress until its deadline (``timeout=``, :attr:`Group.timeout`, ``MLXDIST_TIMEOUT``)."""


class Aborted(Error):
    """This rank or another one failed, and with it the group."""


class PeerLost(Error):
    """Another rank died, was silent on all paths, or left the group while this one still waited for it."""


class TransportError(Error):
    """A queue pair, a completion or a message was wrong."""


class ResourceError(Error):
    """Memory is exhausted, or objects of which the device has a limited number."""


class RendezvousError(Error):
    """The rendezvous of the ranks failed: some ranks are missing, or one was rejected."""


class NonFinite(Error, FloatingPointError):
    """Gradients, activations or a loss are NaN or infinite."""


class VersionMismatch(Error, ImportError):
    """The installed MLX is not the one that mlxdist was built for."""


class EnvironmentVariableError(Error, ValueError):
    """An ``MLXDIST_*`` variable is unknown, malformed, or contradicts another one."""


# enum mlxdist_status of mlxdist.h. Numbers from 101 on exist only here, for errors that pass through C++ alone.
_STATUS_OF: dict[type[Error], int] = {
    InvalidArgument: 1,
    Mismatch: 2,
    Timeout: 3,
    Aborted: 4,
    PeerLost: 5,
    TransportError: 6,
    ResourceError: 7,
    RendezvousError: 101,
    EnvironmentVariableError: 102,
    VersionMismatch: 103,
    NonFinite: 104,
}


def from_status(status: int, text: str) -> Error:
    """The exception for a status of the native library and the text of ``mlxdist_last_error()``."""
    if status == 0:
        raise ValueError("status 0 is success, there is no exception for it")
    for kind, number in _STATUS_OF.items():
        if number == status:
            return kind(text)
    return Error(f"{text} (status {status}, which this version of mlxdist does not know)")


def to_status(error: Error) -> int:
    """The status of the native library for an exception; that of Aborted for classes that it does not have."""
    status = _STATUS_OF.get(type(error), 4)
    return status if status < 101 else 4


def to_tagged_text(error: Error) -> str:
    """The text of a C++ exception that comes back from MLX as ``error``: ``[mlxdist 3] rank 1 waited ...``."""
    return f"[mlxdist {_STATUS_OF.get(type(error), 4)}] {error}"


def by_name(name: str) -> type[Error]:
    """The class of the family with this name, for errors from another rank; Error itself for an unknown name."""
    kind = globals().get(name) if name in __all__ else None
    return kind if isinstance(kind, type) and issubclass(kind, Error) else Error


def located(text: str, rank: int, host: str) -> str:
    """``text`` with rank and host appended as the attributes of Error read them, unless it names a rank already."""
    if _ORIGIN.search(text):
        return text
    where = f" [rank {rank} on {host}]"
    # Truncation shortens the message and never the origin, which other ranks parse from the end of the text.
    kept = text.encode()[: _MAX_BYTES - len(where.encode())].decode(errors="ignore")
    return f"{kept}{where}"


def interruption(error: BaseException, rank: int, host: str) -> Error:
    """The error that other ranks get when ``error``, which is not of this family, has ended this rank."""
    if isinstance(error, KeyboardInterrupt):
        what = "was interrupted (SIGINT)"
    elif isinstance(error, SystemExit):
        status = exit_status(error)
        what = "was terminated (SIGTERM)" if status == 128 + signal.SIGTERM else f"exited with status {status}"
    else:
        what = f"has failed: {type(error).__name__}: {error}"
    return Aborted(located(f"rank {rank} on {host} {what}", rank, host))


def exit_status(error: SystemExit) -> int:
    """The status with which Python ends a process that raises ``error``."""
    if error.code is None:
        return 0
    # The kernel keeps the low byte of a status; Python prints any other object and exits with 1.
    return error.code & 0xFF if isinstance(error.code, int) else 1


def name_ranks(ranks: Iterable[int]) -> str:
    """Ranks in words, for messages: ``rank 2``, ``ranks 2 and 3``, ``ranks 1, 2, 3, 4 and 60 more``."""
    numbers = sorted(ranks)
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    shown = [str(number) for number in numbers] if len(numbers) <= 8 else [str(number) for number in numbers[:4]]
    if len(numbers) > 8:
        shown.append(f"{len(numbers) - 4} more")
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"


def ranks_have(ranks: Collection[int]) -> str:
    """The subject and verb of a sentence about ranks: ``rank 2 has``, ``ranks 2 and 3 have``."""
    return f"{name_ranks(ranks)} {'have' if len(ranks) > 1 else 'has'}"
