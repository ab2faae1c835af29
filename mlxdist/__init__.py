"""mlxdist: the distributed runtime for MLX.

    import mlxdist

    group = mlxdist.init()
    x = mlxdist.all_sum(x)                              # on mx.array (lazy) and NumPy arrays
    model.shard(group.mlx)                              # group.mlx is an mx.distributed.Group

Names load on first use, and so do mlxdist.nn, train and serve: the launcher needs neither MLX nor the compiled half.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from . import nn as nn
    from . import serve as serve
    from . import train as train
    from .base.errors import *  # noqa: F403
    from .runtime.diagnostics.step import set_step as set_step
    from .runtime.group.default_group import finalize as finalize
    from .runtime.group.default_group import init as init
    from .runtime.group.group import Group as Group
    from .runtime.group.handle import Handle as Handle
    from .runtime.group.registration import Registration as Registration
    from .runtime.mesh import Mesh as Mesh
    from .runtime.mesh import mesh as mesh
    from .runtime.operations.breakpoint import breakpoint as breakpoint
    from .runtime.operations.collectives import *  # noqa: F403
    from .runtime.operations.ordered_print import print as print
    from .runtime.operations.point_to_point import *  # noqa: F403
    from .train import all_reduce_grads as all_reduce_grads
    from .train import average_gradients as average_gradients

_MODULES = {
    "base.errors": """
        Aborted EnvironmentVariableError Error InvalidArgument Mismatch NonFinite PeerLost RendezvousError ResourceError
        Timeout TransportError VersionMismatch
    """.split(),
    "runtime.group.default_group": ("finalize", "init"),
    "runtime.group.group": ("Group",),
    "runtime.group.handle": ("Handle",),
    "runtime.mesh": ("Mesh", "mesh"),
    "runtime.operations.breakpoint": ("breakpoint",),
    "runtime.operations.collectives": """
        all_gather all_max all_min all_reduce all_sum all_to_all all_to_all_v barrier broadcast gather get_rank
        get_world_size is_available meet reduce reduce_scatter scatter sum_scatter
    """.split(),
    "runtime.operations.ordered_print": ("print",),
    "runtime.operations.point_to_point": ("recv", "recv_like", "send", "sendrecv"),
    "runtime.group.registration": ("Registration",),
    "runtime.diagnostics.step": ("set_step",),
    "train": ("all_reduce_grads", "average_gradients"),
}
_PACKAGES = ("nn", "serve", "train")
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

# Public, but `from mlxdist import *` must not replace what every program uses.
_OF_PYTHON = {"breakpoint", "print"}

__all__ = ["__version__", *sorted(_MODULE_OF.keys() - _OF_PYTHON)]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f".{name}", __name__)
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'mlxdist' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *_OF_PYTHON, *_PACKAGES])
