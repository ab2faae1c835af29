"""Objects that exist in one process: groups, handles, registrations."""

from typing import Any

from mlxdist.base.errors import InvalidArgument

__all__ = ["ProcessBound"]


class ProcessBound:
    """An object whose copies are the object itself. ``pickle`` raises InvalidArgument."""

    def __copy__(self) -> "ProcessBound":
        return self

    def __deepcopy__(self, memo: Any) -> "ProcessBound":
        return self

    def __reduce__(self) -> Any:
        name = type(self).__name__
        raise InvalidArgument(
            f"a mlxdist.{name} exists in this process alone, and cannot be pickled: leave it out of what is saved or "
            "sent, and call mlxdist.init() where it is needed"
        )
