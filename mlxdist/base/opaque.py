"""Classes without a public constructor."""

from collections.abc import Callable
from typing import Any, NoReturn, ParamSpec, TypeVar

__all__ = ["Opaque", "create"]

P = ParamSpec("P")
T = TypeVar("T")


class Opaque(type):
    """The metaclass of a class whose objects are made by functions, which its ``_made_by`` names.

    A call of the class raises TypeError with these names. The constructor takes internals, and may change in any
    version; :func:`create` calls it.
    """

    _made_by: str

    def __call__(cls, *arguments: Any, **keywords: Any) -> NoReturn:
        raise TypeError(f"{cls.__name__} has no public constructor: it is made by {cls._made_by}")


def create(kind: Callable[P, T], *arguments: P.args, **keywords: P.kwargs) -> T:
    """Calls the constructor of an :class:`Opaque` class, for mlxdist's own modules."""
    constructor: Any = type.__call__
    made: T = constructor(kind, *arguments, **keywords)
    return made
