"""What the ranks must agree on before a payload moves: one small message, and the same error on all of them."""

import socket
from collections.abc import Mapping, Sequence

import mlx.core as mx
import numpy as np

from ...errors import InvalidArgument, located
from ...group import Group
from ...ops import all_gather

__all__ = ["agree", "on_host"]

_TEXT_BYTES = 512


def agree(
    name: str, group: Group, problem: str | None, equal: Mapping[str, int], facts: Sequence[int] = ()
) -> np.ndarray:
    """All ranks' ``facts``, once it is certain that none has a problem. Collective: one all_gather, awaited.

    It is an operation of MLX, so it keeps its place among those that ``mx.async_eval`` has started.

    Args:
        name: what the messages begin with.
        problem: what is wrong with this rank's arguments; ``None`` for nothing.
        equal: numbers that must be the same on all ranks, by what they are called in messages. Their names, and the
            number of facts, are the same on all ranks.
        facts: what the other ranks should know of this one.

    Returns:
        int64 of shape (ranks, len(facts)).

    Raises:
        InvalidArgument: a rank has a problem, or the ranks disagree; the same text on all ranks.
    """
    row = [problem is not None, *equal.values(), *facts]
    table = _gathered(np.array(row, np.int64), group)
    if table[:, 0].any():
        raise InvalidArgument(_first_problem(problem, group, int(np.argmax(table[:, 0]))))
    for column, what in enumerate(equal, 1):
        values = table[:, column]
        if (values != values[0]).any():
            other = int(np.argmax(values != values[0]))
            raise InvalidArgument(
                f"{name}: the ranks disagree about the {what}: {values[0]} on rank 0, {values[other]} on rank {other}"
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
    if group.size() == 1:
        return row[None]
    return np.array(all_gather(mx.array(row[None]), group=group))


def _first_problem(problem: str | None, group: Group, rank: int) -> str:
    """The text of ``rank``, which has a problem, with its place behind it."""
    text = located(problem, group.rank(), socket.gethostname()) if problem else ""
    padded = np.zeros(_TEXT_BYTES, np.uint8)
    encoded = np.frombuffer(text.encode()[-_TEXT_BYTES:], np.uint8)
    padded[: len(encoded)] = encoded
    return bytes(_gathered(padded, group)[rank]).rstrip(b"\0").decode(errors="replace")
