"""Checks that end alike on all ranks, however different the arguments that the ranks were given."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from mlx import nn
from mlx.utils import tree_flatten

from ..errors import InvalidArgument
from ..group import Group
from ..ops import all_gather, broadcast

__all__ = ["agreed", "described"]

_FINE, _REFUSED = 0, 1
_TEXT_BYTES = 800  # of a refusal, with the rank in front of it less than the engine keeps of an error


@contextmanager
def agreed(name: str, group: Group, *values: object) -> Iterator[None]:
    """A ``with`` block of checks whose outcome, and ``values``, are then compared over the ranks: one small all_gather.

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
        digest = hashlib.sha256(repr(values).encode()).digest()[:15]
        mine = np.frombuffer(bytes([_FINE if refusal is None else _REFUSED]) + digest, np.uint8)
        everyone = all_gather(mine, group=group).reshape(group.size(), -1)
        refused = np.flatnonzero(everyone[:, 0] == _REFUSED)
        if len(refused) > 0:
            text = _text_of(int(refused[0]), refusal, group)
            if refusal is None or isinstance(refusal, InvalidArgument):
                raise InvalidArgument(f"{text} [said by rank {refused[0]} of {group.size()}]") from refusal
        differing = np.flatnonzero((everyone[:, 1:] != everyone[0, 1:]).any(axis=1))
        if refusal is None and len(differing) > 0:
            raise InvalidArgument(
                f"{name}: the arguments of rank {differing[0]} are not those of rank 0; give all ranks the same "
                f"(rank {group.rank()} has {_shortened(values)})"
            )
    if refusal is not None:
        raise refusal


def described(module: object) -> object:
    """What must be the same on all ranks of a module, for :func:`agreed`: class, names, shapes, dtypes; not values."""
    if not isinstance(module, nn.Module):
        return type(module).__name__
    arrays = sorted((name, value.shape, str(value.dtype)) for name, value in tree_flatten(module.parameters()))
    return type(module).__name__, arrays


def _text_of(rank: int, refusal: Exception | None, group: Group) -> str:
    """The text of that rank's refusal, on all ranks."""
    buffer = np.zeros(_TEXT_BYTES, np.uint8)
    if group.rank() == rank:
        encoded = str(refusal).encode()[:_TEXT_BYTES]
        buffer[: len(encoded)] = np.frombuffer(encoded, np.uint8)
    return broadcast(buffer, rank, group=group).tobytes().rstrip(b"\0").decode(errors="ignore")


def _shortened(values: tuple[object, ...]) -> str:
    text = ", ".join(map(repr, values))
    return text if len(text) <= 200 else f"{text[:200]} ..."
