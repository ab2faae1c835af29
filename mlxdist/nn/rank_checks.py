"""What the ranks must agree on before a payload moves: one small message, and the same error on all of them."""

import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten

from mlxdist.base.errors import InvalidArgument, located
from mlxdist.runtime.group import Group
from mlxdist.runtime.ops import all_gather

__all__ = ["agree", "agreed", "described", "on_host", "texts"]

_TEXT_BYTES = 800  # of a refusal; with the rank behind it less than the engine keeps of an error
_SHOWN_BYTES = 300  # of what the ranks disagree about


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
    values = [str(value) for value in equal.values()]
    table = _gathered([problem is not None, _digest("\0".join(values)), *facts], group)
    refused, digests = table[:, 0], table[:, 1]
    if refused.any():
        text = located(_shortened(problem, _TEXT_BYTES), group.rank(), socket.gethostname()) if problem else ""
        raise InvalidArgument(texts(text, group)[int(np.argmax(refused))])
    if (digests != digests[0]).any():
        _raise_difference(name, list(equal), values, group)
    return table[:, 2:]


@contextmanager
def agreed(name: str, group: Group, *values: object) -> Iterator[None]:
    """A ``with`` block of checks whose outcome, and ``values``, are then compared over the ranks by :func:`agree`.

    Nothing in the block may communicate. ``values`` are compared by their ``repr``. In a group of one the block is all
    there is.

    Raises:
        InvalidArgument: on every rank, if the block raised an exception on one (this one's own keeps its class there),
            with the text of the lowest such rank; or if ``values`` differ.
    """
    refusal: Exception | None = None
    try:
        yield
    except Exception as error:  # the other ranks wait to hear of it
        refusal = error
    if group.size() > 1:
        problem = None if refusal is None else str(refusal) or type(refusal).__name__
        try:
            agree(name, group, problem, {"arguments": repr(values)})
        except InvalidArgument as error:
            if refusal is None or isinstance(refusal, InvalidArgument):
                raise error from refusal
    if refusal is not None:
        raise refusal


def described(module: object) -> object:
    """What must be the same on all ranks of a module, for :func:`agreed`: class, names, shapes, dtypes; not values."""
    if not isinstance(module, nn.Module):
        return type(module).__name__
    arrays = sorted(
        (name, value.shape, str(value.dtype)) for name, value in dict(tree_flatten(module.parameters())).items()
    )
    return type(module).__name__, arrays


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


def _raise_difference(name: str, names: list[str], values: list[str], group: Group) -> None:
    digests = _gathered([_digest(value) for value in values], group)
    place = int(np.argmax((digests != digests[0]).any(axis=0)))
    rank = int(np.argmax(digests[:, place] != digests[0, place]))
    said = texts(_shortened(values[place], _SHOWN_BYTES), group)
    raise InvalidArgument(
        f"{name}: the ranks disagree about the {names[place]}: {said[0]} on rank 0, {said[rank]} on rank {rank}"
    )


def _digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def _gathered(row: Sequence[int], group: Group) -> np.ndarray:
    own = np.array([row], np.int64)
    return own if group.size() == 1 else np.array(all_gather(mx.array(own), group=group))


def texts(text: str, group: Group) -> list[str]:
    """All ranks' ``text``, cut to 1024 bytes. Collective: one all_gather, awaited."""
    rows = _gathered(np.frombuffer(text.encode()[:1024].ljust(1024, b"\0"), np.int64).tolist(), group)
    return [row.tobytes().rstrip(b"\0").decode(errors="ignore") for row in rows]


def _shortened(text: str, most: int) -> str:
    """``text`` in at most that many bytes, with dots for its middle, if it is longer."""
    encoded = text.encode()
    if len(encoded) <= most:
        return text
    half = most // 2 - 2
    return f"{encoded[:half].decode(errors='ignore')} ... {encoded[-half:].decode(errors='ignore')}"
