"""What the ranks must agree on before a payload moves: one small message, and the same error on all of them."""

import socket
import zlib
from collections.abc import Mapping, Sequence

import mlx.core as mx
import numpy as np

from ...errors import InvalidArgument, located
from ...group import Group
from ...ops import all_gather

__all__ = ["agree", "on_host"]

_TEXT_BYTES = 512


def agree(
    name: str, group: Group, problem: str | None, equal: Mapping[str, object], facts: Sequence[int] = ()
) -> np.ndarray:
    """All ranks' ``facts``, once it is certain that none has a problem. Collective: one all_gather, awaited.

    It is an operation of MLX, so it keeps its place among those that ``mx.async_eval`` has started.

    Args:
        name: what the messages begin with.
        problem: what is wrong with this rank's arguments; ``None`` for nothing.
        equal: what must be the same on all ranks, as text, by what it is called in messages. How many there are, and
            how many facts, is the same on all ranks.
        facts: what the other ranks should know of this one.

    Returns:
        int64 of shape (ranks, len(facts)).

    Raises:
        InvalidArgument: a rank has a problem, or the ranks disagree; the same text on all ranks.
    """
    texts = [str(value) for value in equal.values()]
    row = [problem is not None, *(zlib.crc32(text.encode()) for text in texts), *facts]
    table = _gathered(np.array(row, np.int64), group)
    if table[:, 0].any():
        text = located(problem, group.rank(), socket.gethostname()) if problem else ""
        raise InvalidArgument(_texts(text, group)[int(np.argmax(table[:, 0]))])
    for what, text, values in zip(equal, texts, table[:, 1:].T):
        if (values != values[0]).any():
            rank = int(np.argmax(values != values[0]))
            said = _texts(text, group)
            raise InvalidArgument(
                f"{name}: the ranks disagree about the {what}: {said[0]} on rank 0, {said[rank]} on rank {rank}"
            )
    return table[:, 1 + len(equal) :]


def on_host(array: mx.array) -> np.ndarray | None:
    """``array`` as NumPy has it, evaluated; ``None`` while ``mx.compile`` or ``mx.vmap`` traces, where it has no value.

    In ``mx.grad`` it has one.
    """
    try:
        return np.array(mx.stop_gradient(array))
    except ValueError as error:
        if "function transformations" not in str(error):
            raise
        return None


def _gathered(row: np.ndarray, group: Group) -> np.ndarray:
    return np.array(all_gather(mx.array(row[None]), group=group))


def _texts(text: str, group: Group) -> list[str]:
    """What each rank has to say."""
    padded = np.zeros(_TEXT_BYTES, np.uint8)
    encoded = np.frombuffer(text.encode()[-_TEXT_BYTES:], np.uint8)
    padded[: len(encoded)] = encoded
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in _gathered(padded, group)]
