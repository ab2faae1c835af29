"""``print`` on all ranks, in the order of the ranks.

Standard output of ranks has no order between them, however they call it: each has a pipe, or a host, of its own. So
rank 0 prints all of it.
"""

import builtins
import io
from typing import Any

from mlxdist.base.errors import InvalidArgument, ResourceError

from ..group.group import Group, GroupLike, engine_of
from .arguments import group_of
from .blobs import broadcast_blob, gather_blobs

__all__ = ["print"]

_MAX_BYTES = 65536  # of one rank's text
_MAX_ERROR_BYTES = 800  # of a text that becomes an error; the engine keeps about as much of its own
_RIGHT, _WRONG = b"+", b"-"  # before a text, and before the error in its place


def print(
    *values: object,
    sep: str | None = " ",
    end: str | None = "\n",
    file: Any = None,
    flush: bool = False,
    group: GroupLike | None = None,
) -> None:
    """Prints the values of all ranks, in the order of the ranks, each line with its rank in front: "rank 1: loss 2.5".

    Collective: all ranks of the group must call it, and it returns when rank 0 has printed. Arrays are evaluated. At
    most 65536 bytes of each rank are shown. In a group of one it is Python's ``print``.

    Args:
        values: as for Python's ``print``; other ranks may have others, or none.
        sep, end: as for Python's ``print``: between the values, and at the end of each rank's text.
        file, flush: as for Python's ``print``, on rank 0 alone.
        group: a :class:`mlxdist.Group`; ``None`` is the group of ``mlxdist.init()``.

    Raises:
        InvalidArgument: on all ranks: the values of one have no text, because ``str`` raises an exception.
        ResourceError: on all ranks: rank 0 cannot write.
    """
    members = group_of(group)
    if members.size() == 1:
        builtins.print(*values, sep=sep, end=end, file=file, flush=flush)
        return
    failure: Exception | None = None
    try:
        text = io.StringIO()
        builtins.print(*values, sep=sep, end=end, file=text)
        own = _RIGHT + _bounded(text.getvalue())
    except Exception as error:  # the other ranks wait for this one's text
        failure, own = error, _WRONG + _described("print: the values have no text", error, members)
    texts = gather_blobs(own, members)
    if wrong := next((text for text in texts if text.startswith(_WRONG)), None):
        raise InvalidArgument(_decoded(wrong)) from failure
    _write([_decoded(text) for text in texts], file, flush, members)


def _write(texts: list[str], file: Any, flush: bool, group: Group) -> None:
    failure, outcome = None, b""
    if group.rank() == 0:
        try:
            builtins.print(*map(_with_rank, range(len(texts)), texts), sep="", end="", file=file, flush=flush)
        except Exception as error:  # as above
            failure, outcome = error, _WRONG + _described("print: rank 0 cannot write", error, group)
    if outcome := broadcast_blob(outcome, group):
        raise ResourceError(_decoded(outcome)) from failure


def _with_rank(rank: int, text: str) -> str:
    return "".join(f"rank {rank}: {line}" for line in text.splitlines(keepends=True))


def _bounded(text: str) -> bytes:
    encoded = text.encode(errors="surrogatepass")
    if len(encoded) <= _MAX_BYTES:
        return encoded
    left_out = f" ... ({len(encoded) - _MAX_BYTES} bytes more)\n".encode()
    return encoded[:_MAX_BYTES].decode(errors="ignore").encode() + left_out


def _described(what: str, error: Exception, group: Group) -> bytes:
    text = f"{what}: {type(error).__name__}: {error}".encode(errors="replace")[:_MAX_ERROR_BYTES].decode(
        errors="ignore"
    )
    return engine_of(group).located(text).encode()


def _decoded(text: bytes) -> str:
    return text[1:].decode(errors="surrogatepass")
