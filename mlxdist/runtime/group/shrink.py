"""Goes on without lost ranks: MPI's ULFM has the name (MPI_Comm_shrink), and the launcher the agreement.

This rank leaves the world that has failed, asks the launcher who is left (mlxdist/launch/membership.py), and connects
with these as at the start: new queue pairs, a new secret, other numbers. Nothing of the old world reaches the new one.

Rejected: keeping the queue pairs between survivors. What a lost rank's operations left in flight would have to be
drained from them first, and the connections of a new world take milliseconds.
"""

import itertools
import json
import os
import socket
from typing import Any

from mlxdist.base import errors
from mlxdist.base.environment import VARIABLES, Environment
from mlxdist.base.json_reader import parse_json

from .default_group import replace_world
from .group import Group, engine_of

__all__ = ["shrink"]

_MAX_BYTES = 32 << 20  # of the answer, which may have a device map
# Worlds of the same ranks that may fail one after the other. A rank is left out once it has ended.
_ATTEMPTS = 3
_NAMES = {variable.name for variable in VARIABLES} | {"MLX_RANK", "MLX_GLOBAL_RANK", "MLX_WORLD_SIZE"}

_attempts = itertools.count(1)


def shrink(group: Group) -> Group:
    """See :meth:`mlxdist.Group.shrink`."""
    engine = engine_of(group)
    engine.require_open()
    if not engine.is_world:
        raise errors.InvalidArgument(
            "shrink: a group made by split() cannot go on alone; shrink the group of mlxdist.init(), and split that"
        )
    if group.size() == 1:
        return group
    if Environment.read().membership is None:
        raise errors.InvalidArgument(
            "shrink: no launcher would know which ranks are left; start the job with `mlxdist launch --elastic MIN`"
        )
    timeout = group.timeout
    engine.world.abandon()
    failures: list[object] = []
    while True:
        members = _next_epoch(Environment.read())
        try:
            found = replace_world()
            break
        except errors.Error as error:  # a rank has been lost meanwhile
            failures.append(members)
            if failures.count(members) == _ATTEMPTS:
                raise error
    if timeout is not None:
        found.timeout = timeout
    return found


def _next_epoch(environment: Environment) -> object:
    """Waits for the launcher's answer, and takes over the variables of the next epoch. Returns its members."""
    host = environment.address[0]
    is_here = host in ("127.0.0.1", "::1")
    family = socket.AF_INET6 if ":" in host or not is_here and socket.has_dualstack_ipv6() else socket.AF_INET
    both = family == socket.AF_INET6 and not is_here
    with socket.create_server((host if is_here else "", 0), family=family, dualstack_ipv6=both) as listener:
        answer = _ask(environment, listener.getsockname()[1])
        if error := answer.get("error"):
            raise errors.PeerLost(f"shrink: rank {environment.rank} cannot go on: {error}")
        variables = {name: str(text) for name, text in answer["variables"].items() if name in _NAMES}
        for name in ("MLXDIST_RENDEZVOUS_FD", "MLXDIST_FOLLOWER_FD"):
            os.environ.pop(name, None)
        os.environ.update(variables)
        if variables["MLXDIST_RANK"] == "0" and variables["MLXDIST_WORLD_SIZE"] != "1":
            os.environ["MLXDIST_RENDEZVOUS_FD"] = str(os.dup(listener.fileno()))
    return answer["members"]


def _ask(environment: Environment, port: int) -> dict[str, Any]:
    question = {"member": environment.first_rank, "epoch": environment.epoch, "attempt": next(_attempts), "port": port}
    try:
        with socket.socket(socket.AF_UNIX) as launcher:
            launcher.connect(environment.membership or "")
            launcher.sendall(json.dumps(question).encode() + b"\n")
            with launcher.makefile("rb") as lines:
                answer = parse_json(lines.readline(_MAX_BYTES))
        if not isinstance(answer, dict):
            raise ValueError("it is no object")
        return answer
    except (OSError, ValueError) as error:
        raise errors.RendezvousError(
            f"shrink: the launcher has not answered rank {environment.rank} at {environment.membership}: {error}"
        ) from None
