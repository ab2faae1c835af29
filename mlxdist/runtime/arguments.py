"""What the arguments of operations must be, whatever kind of array they come with."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlxdist.base import errors

from .group import Group, default_group
from .timeout import checked_timeout

__all__ = ["as_mlx", "check_peer", "check_root", "group_of", "mlx_group", "part_shape", "row_counts"]

_NUMBERS = (bool, int, float, complex)


def group_of(group: Group | None) -> Group:
    """``None`` is the group of ``mlxdist.init()``."""
    if group is None:
        return default_group()
    if not isinstance(group, Group):
        raise errors.InvalidArgument(
            f"group must be what mlxdist.init() or Group.split() returned, not {type(group).__name__}; a group of "
            "mx.distributed goes to the functions of mx.distributed"
        )
    return group


def as_mlx(name: str, x: Any, stream: Any, out: Any, dtype: Any, async_op: bool) -> mx.array | None:
    """``x``, if it is an array of MLX or a number, which becomes one, else None; checks what is given with it."""
    if type(x) in _NUMBERS:  # NumPy's are instances of these, too
        x = _number(name, x)
    if not isinstance(x, mx.array):
        if stream is not None:
            raise errors.InvalidArgument(f"{name}: stream is for mx.array, and other arrays need none")
        return None
    if out is not None or dtype is not None:
        raise errors.InvalidArgument(f"{name}: out and dtype are for NumPy arrays and buffers, and x is an mx.array")
    if async_op:
        raise errors.InvalidArgument(
            f"{name}: async_op is for NumPy arrays and buffers; for an mx.array leave it out, and start the operation "
            "with mx.async_eval(result)"
        )
    return x


def _number(name: str, x: Any) -> mx.array:
    try:
        return mx.array(x)
    except (RuntimeError, ValueError, OverflowError):
        raise errors.InvalidArgument(f"{name}: x does not fit int64") from None


def mlx_group(name: str, group: Group, timeout: float | None, label: int = 0) -> mx.distributed.Group:
    """For an operation of MLX's own, which has no argument for a timeout and a label: they go with the group.

    ``label``: of less than 63 bits; of an all_sum, all_max or all_min it must be equal on all ranks, as its shape must.
    """
    if timeout is None and label == 0:
        return group.mlx
    return group.connection.mlx_group(-1.0 if timeout is None else checked_timeout(name, timeout), label)


def check_root(name: str, root: int, group: Group) -> None:
    if not 0 <= root < group.size():
        raise errors.InvalidArgument(f"{name}: root is {root}, but the ranks are 0 to {group.size() - 1}")


def check_peer(name: str, argument: str, rank: int, group: Group) -> None:
    if group.size() == 1:
        raise errors.InvalidArgument(f"{name}: there is nobody to talk to in a group of one")
    if not 0 <= rank < group.size() or rank == group.rank():
        raise errors.InvalidArgument(
            f"{name}: {argument} is {rank}, but must be another rank than {group.rank()}, from 0 to {group.size() - 1}"
        )


def part_shape(name: str, shape: Sequence[int], group: Group) -> tuple[int, ...]:
    """The shape of one of the equal parts, one per rank, of an array that is cut along its first axis."""
    if group.size() == 1:
        return tuple(shape)
    if not shape or shape[0] % group.size() != 0:
        raise errors.InvalidArgument(
            f"{name}: the first dimension of shape {tuple(shape)} is not a multiple of the {group.size()} ranks"
        )
    return (shape[0] // group.size(), *shape[1:])


def row_counts(shape: Sequence[int], send: Sequence[int], receive: Sequence[int], group: Group) -> tuple[list, list]:
    """The counts of all_to_all_v as lists, checked."""
    lists = []
    for argument, counts in (("send_counts", send), ("recv_counts", receive)):
        counts = [int(count) for count in counts]
        if len(counts) != group.size() or any(count < 0 for count in counts):
            raise errors.InvalidArgument(
                f"all_to_all_v: {argument} must be {group.size()} numbers of rows, one per rank, not {counts}"
            )
        lists.append(counts)
    rows = shape[0] if shape else None
    if rows != sum(lists[0]):
        raise errors.InvalidArgument(
            f"all_to_all_v: send_counts {lists[0]} are {sum(lists[0])} rows, but x has shape {tuple(shape)}"
        )
    rank = group.rank()
    if lists[0][rank] != lists[1][rank]:
        raise errors.InvalidArgument(
            f"all_to_all_v: rank {rank} sends {lists[0][rank]} rows to itself, but would receive {lists[1][rank]}"
        )
    return lists[0], lists[1]
