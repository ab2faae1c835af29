"""The compiled half of mlxdist, checked before first use: the engine through cffi (``ffi``, ``lib``), the MLX bridge.

Importing this module imports MLX. The launcher does not need it.

Raises at import:
    VersionMismatch: the installed MLX, or the Python half of mlxdist, is not the one that the compiled half is for.
    ImportError: mlxdist has not been built.
"""

import importlib
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxdist.base import errors
from mlxdist.version import HOW_TO_BUILD, __version__, install_command

__all__ = ["bridge", "check", "dtype_number", "ffi", "last_error", "layout", "lib"]


def _check_mlx(installed: str) -> None:
    # Before the bridge is loaded: with the C++ of another MLX, loading is the first thing that may fail.
    if installed in MLX_VERSIONS:
        return
    # libmlx is another package than mlx: on Linux the extra, on macOS a dependency.
    package = "mlx[cpu]" if sys.platform == "linux" else "mlx"
    raise errors.VersionMismatch(
        f"mlxdist {__version__}, as built here, fits MLX {' and '.join(MLX_VERSIONS)}, but MLX {installed} is "
        f"installed; type `{install_command(f'{package}=={MLX_VERSIONS[-1]}')}`, or, for an mlxdist that fits MLX "
        f"{installed}, `{install_command('--upgrade', 'mlxdist', f'{package}=={installed}')}`"
    )


def _check_library() -> None:
    built = ffi.string(lib.mlxdist_version()).decode()
    if built != __version__:
        raise errors.VersionMismatch(
            f"the compiled half of mlxdist has version {built}, the Python half {__version__}; rebuild: {HOW_TO_BUILD}"
        )


try:
    # MLX_VERSIONS is written by CMake from the table that the build was checked against.
    from mlxdist._built import MLX_VERSIONS

    _check_mlx(vars(mx)["__version__"])
    from mlxdist._native import ffi, lib

    _check_library()
    bridge = importlib.import_module("mlxdist._bridge")
except errors.VersionMismatch:
    raise
except ImportError as error:
    raise ImportError(f"mlxdist's compiled half does not load ({error}); build it: {HOW_TO_BUILD}") from error

_PACKAGE = Path(__file__).absolute().parents[1]

# The call site of an operation is the first frame that is in neither of these packages.
bridge.set_own_directories(
    *(f"{directory}{os.sep}" for directory in (_PACKAGE, Path(str(mx.__file__)).absolute().parent))
)

_DTYPES = {ffi.string(lib.mlxdist_dtype_name(number)).decode(): number for number in range(lib.MLXDIST_COMPLEX64 + 1)}
_LAYOUT_DIMENSIONS = dict(ffi.typeof("mlxdist_layout").fields)["shape"].type.length


def check(status: int) -> None:
    """Raises the exception for a status of the engine other than MLXDIST_OK, with the text of its last error."""
    if status != lib.MLXDIST_OK:
        raise errors.from_status(status, last_error())


def last_error() -> str:
    """The text of this thread's last error in the engine."""
    return ffi.string(lib.mlxdist_last_error()).decode(errors="replace")


def dtype_number(name: str) -> int:
    """The engine's number of a dtype, by the name that MLX and NumPy use ("float32").

    Raises:
        InvalidArgument: the engine has no such dtype.
    """
    if name not in _DTYPES:
        raise errors.InvalidArgument(f"dtype {name} is not supported; supported are {', '.join(_DTYPES)}")
    return _DTYPES[name]


def layout(dtype: str, shape: Sequence[int]) -> Any:
    """dtype and shape as a ``mlxdist_layout *``; dimensions that do not fit are folded into the last one."""
    if len(shape) > _LAYOUT_DIMENSIONS:
        shape = (*shape[: _LAYOUT_DIMENSIONS - 1], math.prod(shape[_LAYOUT_DIMENSIONS - 1 :]))
    return ffi.new("mlxdist_layout *", {"dtype": dtype_number(dtype), "ndim": len(shape), "shape": list(shape)})
