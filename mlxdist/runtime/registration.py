"""Memory that is registered with the device: ``Group.register``."""

import threading
from types import TracebackType
from typing import Any

from .native import check, ffi, lib

__all__ = ["Registration"]


class Registration:
    """A buffer that stays where it is, so that large messages may leave from it without a copy. Made by
    :meth:`mlxdist.Group.register`.

    It keeps the buffer alive, and ends with :meth:`release`, at the end of a ``with`` block, when the object is
    dropped, or when the group is finalized.
    """

    def __init__(self, memory: Any, native: Any) -> None:
        # For mlxdist's own modules. `memory` is a cffi buffer; `native` the group, None in a group of one.
        self.nbytes: int = len(memory)
        self._lock = threading.Lock()
        self._memory = memory
        self._region = None
        if native is not None:
            region = ffi.new("mlxdist_region **")
            check(lib.mlxdist_register(native, memory, self.nbytes, region))
            self._region = region[0]

    def release(self) -> None:
        """Ends the registration, once no operation uses the memory. A second call does nothing."""
        with self._lock:
            region, self._region = self._region, None
            memory, self._memory = self._memory, None
        if region is not None:
            lib.mlxdist_unregister(region)
        del memory  # not before

    def __enter__(self) -> "Registration":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def __del__(self) -> None:
        if self._region is not None:
            self.release()

    def __repr__(self) -> str:
        state = "released" if self._memory is None else f"{self.nbytes} bytes"
        return f"<mlxdist.Registration, {state}>"
