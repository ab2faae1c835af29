"""The group of ``mlxdist.init()``, which operations use that name none."""

import os
import threading

from mlxdist.base import errors
from mlxdist.base.batch_systems import reject_launchers
from mlxdist.base.environment import Environment
from mlxdist.base.opaque import create

from ..diagnostics import flight_recorder
from ..native import bridge
from ..synchronous import evaluate_operations
from ..timeout import native_timeout
from . import at_exit
from .elastic import enter
from .engine_group import EngineGroup
from .group import Group, engine_of
from .world import World

__all__ = ["alone", "current_run", "default_group", "finalize", "init"]

_world: Group | None = None
_world_lock = threading.Lock()


def init(strict: bool = False, backend: str = "any", *, timeout: float | None = None) -> Group:
    """The group of all ranks that the launcher started; without a launcher, a group of one.

    All ranks must call it; the call returns once they are connected. Later calls return the same group. It is taken
    down at exit, or by :meth:`Group.finalize`; after that all ranks may call this again and get a new one. Objects of
    the old one, such as groups split off and arrays not evaluated, raise.

    Args:
        strict: raise instead of making a group of one when there is no launcher.
        backend: "any" or "mlxdist", which are the same; for programs that pass what ``mx.distributed.init`` takes.
        timeout: sets :attr:`Group.timeout`. How long to wait here for ranks that are missing is
            ``MLXDIST_RENDEZVOUS_TIMEOUT``.

    Raises:
        InvalidArgument: ``backend`` is another one; there is no launcher and ``strict`` is set; this process was
            forked from a rank; the ranks are on several hosts that no provider connects.
        EnvironmentVariableError: an ``MLXDIST_*`` variable is malformed or contradicts another one.
        RendezvousError: not all ranks came; or mpirun, srun, mlx.launch or torchrun has started several processes, and
            no job of mlxdist is named.
    """
    global _world
    group = _world
    if group is not None and not engine_of(group).is_over and backend == "any" and timeout is None:
        return group  # the common case
    if backend not in ("any", "mlxdist"):
        raise errors.InvalidArgument(
            f"mlxdist.init: there is no backend {backend!r}; use 'any', or mx.distributed.init"
        )
    native_timeout("mlxdist.init", timeout)  # only to check it
    with _world_lock:
        # A group of one holds nothing, and can be re-created.
        if (
            _world is None
            or (engine_of(_world).world.ended and not engine_of(_world).world.forked)
            or (engine_of(_world).is_over and _world.size() == 1)
        ):
            _world = _create(strict)
        engine_of(_world).require_open()
        if timeout is not None:
            _world.timeout = timeout
        return _world


def default_group() -> Group:
    """The group of operations that name none. After ``finalize`` these do not wait for ranks to come together again.

    Raises:
        InvalidArgument: the group of several ranks has been finalized.
    """
    group = _world
    if group is None or engine_of(group).is_over and group.size() == 1:
        return init()
    engine_of(group).require_open()
    return group


def finalize() -> None:
    """Ends the group of :func:`init`: see :meth:`Group.finalize`. Does nothing where there is none, or it has ended.

    Raises:
        Mismatch, Timeout, PeerLost, Aborted: the other ranks did not come.
    """
    if _world is not None:
        _world.finalize()


def _replace_world() -> Group:
    """Makes the group of a new world in the place of the one that has ended."""
    global _world
    with _world_lock:
        _world = _make_group()
        return _world


def alone() -> Group:
    """A group of this process alone, which is no part of the job: for what a rank that joins does before it does."""
    return _world_of(Environment.read({}))[1]


def current_run() -> str:
    """The run that this process is part of, the same on all ranks: a job with all its restarts."""
    world = _world
    return Environment.read().run if world is None else engine_of(world).world.native_group.run


def _create(strict: bool) -> Group:
    environment = Environment.read()
    if environment.rendezvous is None and "MLXDIST_RANK" not in os.environ:
        reject_launchers(os.environ)
        if strict:
            raise errors.InvalidArgument(
                "mlxdist.init(strict=True): no launcher started this process; run it with "
                "`mlxdist launch -n 2 -- python ...`"
            )
    return enter("join", _make_group) if environment.join else _make_group()


def _make_group() -> Group:
    """Makes the group of a world, as the variables describe it."""
    world, group = _world_of(Environment.read())
    at_exit.register(world)
    return group


def _world_of(environment: Environment) -> tuple[World, Group]:
    world = World(environment, environment.host_name, _replace_world)
    if environment.sync and world.size > 1:
        evaluate_operations()
    group = create(Group, EngineGroup(world, world.connection))
    group._timeout = environment.timeout
    return world, group


def _after_fork() -> None:
    global _world_lock
    _world_lock = threading.Lock()  # another thread of the parent may have held it


bridge.set_error_factory(lambda status, text: flight_recorder.explain(errors.from_status(status, text)))
os.register_at_fork(after_in_child=_after_fork)
