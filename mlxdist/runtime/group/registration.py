"""Memory that is registered with the device: ``Group.register``."""

import sys
import threading
from types import TracebackType
from typing import Any

import mlx.core as mx

from mlxdist.base import errors
from mlxdist.base.opaque import Opaque

from ..native import check, ffi, lib
from .process_bound import ProcessBound

__all__ = ["Registration"]


class Registration(ProcessBound, metaclass=Opaque):
    """A buffer that stays where it is, so that large messages may leave from it without a copy. Made by
    :meth:`mlxdist.Group.register`.

    It keeps the buffer alive, and ends with :meth:`release`, at the end of a ``with`` block, when the object is
    dropped, or when the group is finalized.
    """

    _made_by = "Group.register"

    def __init__(self, buffer: Any, native: Any) -> None:  # `native`: the engine's group, None in a group of one
        self._region = None  # first, for __del__
        memory = _memory(buffer)
        self.nbytes: int = len(memory)
        self._lock = threading.Lock()
        self._memory = memory
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


def _memory(buffer: Any) -> Any:
    """The bytes of a buffer, for cffi: they stay where they are as long as the result lives."""
    kind = type(buffer).__name__
    if isinstance(buffer, mx.array):
        # An array of its own on the same memory: x += 1 would let go of that of x.
        own: Any = mx.stop_gradient(buffer)
        mx.eval(buffer, own)
        buffer = memoryview(own)
    # Importing NumPy is half of the time that a program takes to become a rank, and a program that passes one of its
    # arrays has imported it.
    np = sys.modules.get("numpy")
    if np is not None and isinstance(buffer, np.ndarray) and buffer.flags.c_contiguous:
        buffer = buffer.reshape(-1).view(np.uint8)  # also where NumPy has no buffer for the dtype
    try:
        return ffi.from_buffer(buffer)
    except (TypeError, ValueError, BufferError) as error:
        raise errors.InvalidArgument(
            f"register: this {kind} gives no contiguous memory ({error}); pass a contiguous array"
        ) from None
