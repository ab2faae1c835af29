"""The arguments of operations, checked: the options that all of them share, and what depends on the group."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypedDict, TypeVar, get_args, get_type_hints

import mlx.core as mx

from mlxdist.base import errors

from ..group.default_group import default_group
from ..group.group import Group, GroupLike, engine_of
from ..label import next_label
from ..timeout import native_timeout

__all__ = ["BarrierOptions", "Call", "Options", "RecvOptions", "SendOptions", "Stream", "group_of", "operation"]

Stream = mx.Stream | mx.ThreadLocalStream | mx.Device | mx.DeviceType | None
Function = TypeVar("Function", bound=Callable[..., Any])

_CONVERTED = (bool, int, float, complex, list, tuple)  # by mx.array
DEFAULTS = {"group": None, "stream": None, "out": None, "dtype": None, "async_op": False, "timeout": None}


class BarrierOptions(TypedDict, total=False):
    group: GroupLike | None
    async_op: bool
    timeout: float | None


class SendOptions(BarrierOptions, total=False):
    stream: Stream
    dtype: Any


class RecvOptions(BarrierOptions, total=False):
    stream: Stream
    out: Any


class Options(RecvOptions, total=False):
    """The options of every collective; :mod:`mlxdist.runtime.operations.collectives` says what they mean."""

    dtype: Any


_options_of: dict[str, frozenset[str]] = {}


def operation(function: Function) -> Function:
    """Gives a function with ``**options: Unpack[Options]`` a signature that shows the options one by one."""
    signature = inspect.signature(function)
    *parameters, options = signature.parameters.values()
    types = get_type_hints(get_args(options.annotation)[0])
    _options_of[function.__name__] = frozenset(types)
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=types[name])
        for name, default in DEFAULTS.items()
        if name in types
    ]
    setattr(function, "__signature__", signature.replace(parameters=parameters))
    return function


class Call:
    """A call of an operation: its name and its options.

    Making one is most of what an operation of an ``mx.array`` costs before it is evaluated, so it takes few steps.
    """

    group: Any = None  # a Group, once the call is made
    stream: Stream = None
    out: Any = None
    dtype: Any = None
    async_op: bool = False
    timeout: float | None = None
    limit = -1.0  # the timeout as the engine takes it

    def __init__(self, name: str, options: Any) -> None:
        """``options``: the keyword arguments of the call, which the object keeps as its attributes."""
        if options:
            if not options.keys() <= _options_of[name]:
                unknown = min(options.keys() - _options_of[name])
                raise TypeError(f"{name}() got an unexpected keyword argument {unknown!r}")
            self.__dict__ = options
            if self.timeout is not None:
                self.limit = native_timeout(name, self.timeout)
        self.name = name
        if type(self.group) is not Group:
            self.group = group_of(self.group)

    def lazy(self, x: Any) -> mx.array | None:
        """``x`` as an ``mx.array``, if it is one, or a number or a list; else None. Checks the options with it."""
        if not isinstance(x, mx.array):
            if type(x) not in _CONVERTED:  # NumPy's numbers are instances of these, too
                if self.stream is not None:
                    raise self.error("stream is for mx.array, and other arrays need none")
                return None
            try:
                x = mx.array(x)
            except (RuntimeError, OverflowError):
                raise self.error("x does not fit int64") from None
            except ValueError as error:
                raise self.error(f"x makes no mx.array: {error}") from None
        if self.out is not None or self.dtype is not None:
            raise self.error("out and dtype are for NumPy arrays and buffers, and x is an mx.array")
        if self.async_op:
            raise self.error(
                "async_op is for NumPy arrays and buffers; for an mx.array leave it out, and start the operation "
                "with mx.async_eval(result)"
            )
        return x

    @property
    def mlx_group(self) -> mx.distributed.Group:
        """The group for MLX's own operations, with the timeout and the label of this call."""
        label = next_label()
        if label == 0 and self.timeout is None:
            mlx_group: mx.distributed.Group = self.group.mlx
            return mlx_group
        return self.connection.mlx_group(self.limit, 0, label)

    @property
    def connection(self) -> Any:
        """The bridge's handle of the group."""
        return engine_of(self.group).connection

    def error(self, problem: str) -> errors.InvalidArgument:
        return errors.InvalidArgument(f"{self.name}: {problem}")

    # What depends on the group.

    def check_root(self, root: int) -> None:
        size = self.group.size()
        if not 0 <= root < size:
            raise self.error(f"root is {root}, but the ranks are 0 to {size - 1}")

    def check_peer(self, argument: str, rank: int) -> None:
        own, size = self.group.rank(), self.group.size()
        if size == 1:
            raise errors.InvalidArgument(f"{self.name} needs a peer, but the group has one rank")
        if rank not in range(size) or rank == own:
            raise self.error(f"{argument} is {rank!r}, but must be another rank than {own}, from 0 to {size - 1}")

    def receive_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        shape = tuple(shape)
        if any(length < 0 for length in shape):
            raise self.error(f"shape {shape} has a negative dimension")
        return shape

    def chunk_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of one of the equal chunks, one per rank, of an array that is divided along its first axis."""
        size = self.group.size()
        if size == 1:
            return tuple(shape)
        if not shape or shape[0] % size != 0:
            raise self.error(f"the first dimension of shape {tuple(shape)} is not a multiple of the {size} ranks")
        return (shape[0] // size, *shape[1:])

    def row_counts(
        self, shape: Sequence[int], send: Sequence[int], receive: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """The counts of all_to_all_v as lists, checked."""
        rank, size = self.group.rank(), self.group.size()
        sent, received = [int(count) for count in send], [int(count) for count in receive]
        for argument, counts in (("send_counts", sent), ("recv_counts", received)):
            if len(counts) != size or any(count < 0 for count in counts):
                raise self.error(f"{argument} must be {size} numbers of rows, one per rank, not {counts}")
        if not shape or shape[0] != sum(sent):
            raise self.error(f"send_counts {sent} are {sum(sent)} rows, but x has shape {tuple(shape)}")
        if sent[rank] != received[rank]:
            raise self.error(f"rank {rank} sends {sent[rank]} rows to itself, but would receive {received[rank]}")
        return sent, received


def group_of(group: GroupLike | None) -> Group:
    """The group of an argument; ``None`` is that of ``mlxdist.init()``. Raises InvalidArgument for anything else."""
    if group is None:
        return default_group()
    if isinstance(group, Group):  # almost always: without a call
        return group
    if not isinstance(group, GroupLike):
        raise errors.InvalidArgument(
            f"group must be what mlxdist.init() or Group.split() returned, not {type(group).__name__}; a group of "
            "mx.distributed goes to the functions of mx.distributed"
        )
    return group._as_group()
