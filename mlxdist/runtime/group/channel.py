"""Groups of their own for what travels while others are computed."""

from typing import Any, ClassVar, Self
from weakref import WeakKeyDictionary

import mlx.core as mx

from mlxdist.runtime.group.group import Group

__all__ = ["Channel"]


class Channel:
    """A group, and the stream, that the messages of one kind travel in and nothing else.

    A group has one order of operations. These messages come in another order than the program's operations, which are
    on other streams, so they have a group of their own. So has each subclass, which is one kind.

    Attributes:
        stream: of the CPU.
        group: the ranks.
        size: how many they are.
    """

    stream = mx.new_thread_local_stream(mx.cpu)
    _of: ClassVar[WeakKeyDictionary[Group, Any]]

    def __init_subclass__(cls) -> None:
        cls._of = WeakKeyDictionary()

    def __init__(self, group: Group) -> None:
        own = group.split(0)
        assert own is not None  # the color is not negative
        self.group, self.size = own, group.size()

    @classmethod
    def of(cls, group: Group) -> Self:
        """The channel of ``group``. Collective where there is none yet."""
        if group not in cls._of:
            cls._of[group] = cls(group)
        return cls._of[group]
