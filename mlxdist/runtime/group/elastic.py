"""Goes on without lost ranks, and with new ones: MPI's ULFM and NCCL have the names, and the launcher the agreement.

This rank leaves its world, asks the launcher who is in the next one (next_epoch.py), and connects with these as at the
start: new queue pairs, a new secret, other numbers. Nothing of the old world reaches the new one.

Rejected: keeping the queue pairs between survivors. What a lost rank's operations left in flight would have to be
drained from them first, and the connections of a new world take milliseconds.
"""

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from mlxdist.base import errors
from mlxdist.base.environment import Environment

from ..native import ffi, layout, lib
from ..timeout import native_timeout
from .engine_group import EngineGroup
from .next_epoch import do_some_wait, next_epoch

__all__ = ["check", "do_others_join", "enter"]

_Group = TypeVar("_Group")

# Worlds of the same ranks that may fail one after the other. A rank is left out once it has ended.
_ATTEMPTS = 3


def check(name: str, engine: EngineGroup) -> Environment:
    """The variables of the group of ``engine``, which its method ``name`` is to shrink or grow.

    Raises:
        InvalidArgument: it cannot.
    """
    engine.require_open()
    if not engine.is_world:
        raise errors.InvalidArgument(
            f"{name}: a group made by split() cannot go on alone; {name} the group of mlxdist.init(), and split that"
        )
    environment = Environment.read()
    if engine.size > 1 and environment.membership is None:
        raise errors.InvalidArgument(
            f"{name}: no launcher would know who is in the group; start the job with `mlxdist launch --elastic MIN`"
        )
    return environment


def do_others_join(engine: EngineGroup) -> bool:
    """Whether :meth:`mlxdist.Group.grow` would take in processes: whether some wait, as rank 0 sees it. Collective."""
    environment = check("grow", engine)
    waits = np.array([environment.membership is not None and do_some_wait(environment)])
    memory = ffi.cast("void *", waits.ctypes.data)
    engine.call(native_timeout("grow", None), lib.mlxdist_broadcast, memory, layout("bool", (1,)), 0)
    return bool(waits[0])


def enter(kind: str, make_group: Callable[[], _Group]) -> _Group:
    """Connects with the members of the next epoch, and of the one after it where one of them is lost meanwhile.

    Args:
        kind: "shrink", "grow" or "join".
        make_group: makes the group of a world, as the variables describe it; returned is what it has made.
    """
    failures: list[object] = []
    while True:
        members = next_epoch(Environment.read(), kind)
        try:
            return make_group()
        except errors.Error:
            failures.append(members)
            if failures.count(members) == _ATTEMPTS:
                raise
            kind = "shrink" if kind == "join" else kind  # it has been taken in
