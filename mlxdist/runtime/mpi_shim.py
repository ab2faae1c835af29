"""The MPI shim: programs that call ``mx.distributed.init()`` run on mlxdist's transport without changes.

MLX opens the library that ``MLX_MPI_LIBNAME`` names, if that speaks the C ABI of Open MPI. `mlxdist launch` names
mlxdist's (native/bindings/mpi), and unsets what would make MLX choose another backend. docs/mpi-shim.md is for users.

The launcher uses ``variables``, ``diverts`` and ``check``, which need neither MLX nor the compiled half; the library
calls ``join`` and ``wait_for_stream``.
"""

import ctypes
import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlxdist.base.errors import Error, ResourceError, to_tagged_text
from mlxdist.version import HOW_TO_BUILD

__all__ = [
    "FUNCTIONS",
    "OBJECTS",
    "VARIABLE",
    "check",
    "diverts",
    "find_library",
    "join",
    "variables",
    "wait_for_stream",
]

VARIABLE = "MLX_MPI_LIBNAME"

# The names that MLX looks up. If one is missing, MLX goes on without MPI and without a word, as a group of one.
FUNCTIONS = (
    "MPI_Allgather",
    "MPI_Allreduce",
    "MPI_Comm_free",
    "MPI_Comm_rank",
    "MPI_Comm_size",
    "MPI_Comm_split",
    "MPI_Finalize",
    "MPI_Get_library_version",
    "MPI_Init",
    "MPI_Op_create",
    "MPI_Recv",
    "MPI_Send",
    "MPI_Type_commit",
    "MPI_Type_contiguous",
)
OBJECTS = (
    "ompi_mpi_c_bool",
    "ompi_mpi_c_complex",
    "ompi_mpi_comm_world",
    "ompi_mpi_double",
    "ompi_mpi_float",
    "ompi_mpi_int16_t",
    "ompi_mpi_int32_t",
    "ompi_mpi_int64_t",
    "ompi_mpi_int8_t",
    "ompi_mpi_op_max",
    "ompi_mpi_op_min",
    "ompi_mpi_op_sum",
    "ompi_mpi_uint16_t",
    "ompi_mpi_uint32_t",
    "ompi_mpi_uint64_t",
    "ompi_mpi_uint8_t",
)

# MLX's backend "any" is NCCL, ring, MPI or JACCL, the first one all of whose variables are set: besides MLX_RANK, for
# NCCL MLX_WORLD_SIZE, NCCL_HOST_IP and NCCL_PORT, for the ring MLX_HOSTFILE, for JACCL MLX_IBV_DEVICES and its
# coordinator. JACCL reads names without MLX_, too. The launcher gives every rank a MLX_RANK and MLX_WORLD_SIZE of its
# own, which choose nothing by themselves; what a user's shell has would be another job's, and goes like the others.
_DIVERTING = frozenset(
    {"MLX_RANK", "MLX_GLOBAL_RANK", "MLX_LOCAL_RANK", "MLX_SIZE", "MLX_WORLD_SIZE"}
    | {"MLX_HOSTFILE", "MLX_IBV_DEVICES", "NCCL_HOST_IP", "NCCL_PORT"}
)
_DIVERTING_PREFIXES = ("MLX_JACCL_", "JACCL_")


def diverts(name: str) -> bool:
    """Whether an environment variable of this name may make MLX choose a backend of its own."""
    return name in _DIVERTING or name.startswith(_DIVERTING_PREFIXES)


def variables() -> dict[str, str]:
    """The variable that makes MLX load this library.

    Raises:
        ResourceError: mlxdist has not been built.
    """
    return {VARIABLE: str(find_library())}


def find_library() -> Path:
    """The path of the library: next to mlxdist's other compiled modules, which need not be next to this file.

    Raises:
        ResourceError: mlxdist has not been built.
    """
    module = importlib.util.find_spec("mlxdist._native")
    if module is None or module.origin is None:
        raise ResourceError(f"mlxdist's compiled half is missing; build it: {HOW_TO_BUILD}")
    suffix = "dylib" if sys.platform == "darwin" else "so"
    return Path(module.origin).with_name(f"libmlxdist_mpi.{suffix}")


def check(path: str | Path) -> None:
    """Loads the library into this process and looks up all that MLX will look up.

    Raises:
        ResourceError: it does not load, or lacks a name.
    """
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise ResourceError(
            f"mlxdist's MPI shim does not load ({error}), so programs that call mx.distributed.init() would run as "
            f"groups of one; build it: {HOW_TO_BUILD}"
        ) from None
    missing = [name for name in (*FUNCTIONS, *OBJECTS) if not _exports(loaded, name)]
    if missing:
        raise ResourceError(
            f"mlxdist's MPI shim {path} does not export {', '.join(missing)}, so programs that call "
            f"mx.distributed.init() would run as groups of one; build it: {HOW_TO_BUILD}"
        )


def _exports(loaded: ctypes.CDLL, name: str) -> bool:
    try:
        ctypes.c_char.in_dll(loaded, name)
    except ValueError:
        return False
    return True


class _MpiShim:
    """The library's operations that are under way, as finalize() sees them: see :attr:`World.mpi_shims`."""

    def __init__(self, address: int) -> None:
        """``address``: of the library's ``Shim``, a struct of pointers to functions."""
        from .native import bridge, ffi

        functions = ffi.cast("uintptr_t *", address)
        self._bridge = bridge
        self._drain: Callable[[float], int] = ffi.cast("int (*)(double)", functions[0])
        self.close: Callable[[], None] = ffi.cast("void (*)(void)", functions[1])
        self._error_reported: Callable[[], int] = ffi.cast("int (*)(void)", functions[2])
        self._is_busy: Callable[[], int] = ffi.cast("int (*)(void)", functions[3])
        self.label_thread = int(functions[4])

    @property
    def error_reported(self) -> bool:
        """Whether MLX has been given an error to raise."""
        return bool(self._error_reported())

    @property
    def is_busy(self) -> bool:
        """Whether an operation of MLX runs."""
        return bool(self._is_busy())

    def defer_errors(self) -> None:
        """Defers errors: from now on one is raised only where something is evaluated."""
        self._drain(0)

    def drain(self, seconds: float) -> bool:
        """Waits for what is in MLX's streams, and then at most ``seconds`` for what still runs.

        A program may never look at the last of what it has begun: mlx-lm's generation is one token ahead, in a stream
        of its own.
        """
        self.defer_errors()  # they are for finalize() from now on, which reads the group's own error
        self._bridge.wait_for_cpu_streams()
        return bool(self._drain(seconds))


def _returns_errors(function: Callable[[int], tuple[int, int]]) -> Callable[..., tuple[str, int, int]]:
    """Makes ``function`` return an error's text, or "", with its results, or two zeros: C++ calls it."""

    @functools.wraps(function)
    def returning(argument: int, *unused: int) -> tuple[str, int, int]:
        try:
            return "", *function(argument)
        except KeyboardInterrupt:
            raise  # the library knows what to do with it
        except BaseException as error:
            # Into C++ and back; other exceptions than mlxdist.Error arrive as Aborted, with the class in the text.
            mapped = error if isinstance(error, Error) else Error(f"{type(error).__name__}: {error}")
            return to_tagged_text(mapped), 0, 0

    return returning


@_returns_errors
def join(shim: int) -> tuple[int, int]:
    """Makes this process a rank, for the library's ``MPI_Init``, which gives the address of its ``Shim``.

    Returns the address of the engine's group, and that of the bridge's ``operation_failed``.
    """
    from .group.default_group import init
    from .group.group import engine_of
    from .native import bridge

    engine = engine_of(init())
    mpi_shim = _MpiShim(shim)
    engine.add_mpi_shim(mpi_shim)
    _give_streams(mpi_shim.label_thread)
    _add_sum_scatter()
    return engine.connection.group, bridge.operation_failed()


# The place of the other rank's number among the arguments of MLX's messages.
_PEERS = {"send": ("dst", 1), "recv": ("src", 2), "recv_like": ("src", 1)}


def _give_streams(label_thread: int) -> None:
    """Operations have their place in the order when the thread of their stream comes to them, and two streams come in
    another order on each rank. So the collectives of a group have one stream, that of the first one, and so have the
    messages to a rank and those from it: MLX gives it what is evaluated in that order, which is alike on all ranks.

    Operations of functions that were imported before, and of mx.import_function, do not come this way: they may use
    the streams that MLX has now for collectives, where the label of the stream makes another order a Mismatch. Messages
    have no such label, since the other rank may have another stream: they may use the default stream of this thread
    alone, where this thread's other messages are, too.
    """
    import mlx.core as mx

    from .native import bridge

    mx.default_stream(mx.cpu)  # there is none before it is used
    bridge.label_streams(label_thread)

    def in_one_stream(name: str) -> None:
        of_mlx = getattr(mx.distributed, name)
        keyword, position = _PEERS.get(name, ("", 0))

        @functools.wraps(of_mlx)
        def operation(*arguments: Any, group: Any = None, stream: Any = None, **keywords: Any) -> mx.array:
            peer = keywords.get(keyword, *arguments[position : position + 1])
            way = 2 * peer + (name == "send") if keyword and isinstance(peer, int) else -1
            stream = bridge.one_stream(group, way, stream, label_thread)
            return of_mlx(*arguments, group=group, stream=stream, **keywords)

        setattr(mx.distributed, name, operation)

    for name in ("all_sum", "all_max", "all_min", "all_gather", *_PEERS):
        in_one_stream(name)


def _add_sum_scatter() -> None:
    """Adds a sum_scatter, where MLX's backend for MPI raises: each rank keeps its part of an all_sum."""
    import mlx.core as mx

    from .native import bridge

    of_mlx = mx.distributed.sum_scatter

    @functools.wraps(of_mlx)
    def sum_scatter(x: Any, *, group: Any = None, stream: Any = None) -> mx.array:
        members = mx.distributed.init() if group is None else group
        if members.size() == 1 or bridge.is_own(members):
            return of_mlx(x, group=group, stream=stream)
        # Rejects what MLX rejects. It is never evaluated, also where MLXDIST_SYNC evaluates operations.
        scattered = inspect.unwrap(of_mlx)(x, group=group, stream=stream)
        rows = scattered.shape[0]
        begin = members.rank() * rows

        part: Any = mx.custom_function(
            lambda x: mx.distributed.all_sum(x, group=members, stream=stream)[begin : begin + rows]
        )
        part.vjp(lambda x, cotangent, result: mx.distributed.all_gather(cotangent, group=members, stream=stream))
        return part(x)

    mx.distributed.sum_scatter = sum_scatter


@_returns_errors
def wait_for_stream(unused: int) -> tuple[int, int]:
    """Returns when MLX's CPU stream of this thread has done what it had to do; for ``MPI_Comm_split``."""
    import mlx.core as mx

    mx.synchronize(mx.default_stream(mx.cpu))
    return 0, 0
