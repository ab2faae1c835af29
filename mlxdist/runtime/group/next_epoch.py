"""How a rank asks the launcher for the next epoch of an elastic job, and takes over the variables of its new world.

mlxdist/launch/membership.py decides, and membership_socket.py has the format of the question.
"""

import json
import os
import socket
import time
from typing import Any

from mlxdist.base import errors
from mlxdist.base.environment import VARIABLES, Environment
from mlxdist.base.json_reader import parse_json
from mlxdist.base.rank_listener import listen_for_ranks

from ..rendezvous.connect import close_inherited

__all__ = ["do_some_wait", "next_epoch"]

_MAX_BYTES = 32 << 20  # of the answer, which may have a device map
_NAMES = {variable.name for variable in VARIABLES} | {"MLX_RANK", "MLX_GLOBAL_RANK", "MLX_WORLD_SIZE"}


def do_some_wait(environment: Environment) -> bool:
    """Whether processes wait to join, as far as this host knows."""
    path, _ = _membership(environment)
    return os.path.exists(f"{path}.joining")


def next_epoch(environment: Environment, kind: str) -> object:
    """Waits for the launcher's answer, and takes over the variables of the next epoch. Returns its members.

    Args:
        environment: of the last epoch.
        kind: "shrink", "grow" or "join".

    Raises:
        PeerLost: this rank cannot go on, and why.
        RendezvousError: the launcher does not answer.
    """
    host = environment.address[0]
    interface = host if host in ("127.0.0.1", "::1") else ""
    with listen_for_ranks(interface, 0, environment.world_size) as listener:
        answer = _ask(environment, kind, listener.getsockname()[1])
        if error := answer.get("error"):
            raise errors.PeerLost(f"{kind}: rank {environment.rank} cannot go on: {error}")
        variables = {name: str(text) for name, text in answer["variables"].items() if name in _NAMES}
        if environment.rendezvous_fd is not None:
            close_inherited(environment.rendezvous_fd)
        for name in ("MLXDIST_JOIN", "MLXDIST_RENDEZVOUS_FD", "MLXDIST_FOLLOWER_FD"):
            os.environ.pop(name, None)
        os.environ.update(variables)
        if variables["MLXDIST_RANK"] == "0" and variables["MLXDIST_WORLD_SIZE"] != "1":
            os.environ["MLXDIST_RENDEZVOUS_FD"] = str(os.dup(listener.fileno()))
    return answer["members"]


def _ask(environment: Environment, kind: str, port: int) -> dict[str, Any]:
    path, token = _membership(environment)
    question = {
        "kind": kind,
        "member": environment.first_rank,
        "token": token,
        "epoch": environment.epoch,
        "attempt": time.monotonic_ns(),
        "port": port,
    }
    try:
        with socket.socket(socket.AF_UNIX) as launcher:
            launcher.connect(path)
            launcher.sendall(json.dumps(question).encode() + b"\n")
            with launcher.makefile("rb") as lines:
                answer = parse_json(lines.readline(_MAX_BYTES))
        if not isinstance(answer, dict):
            raise ValueError("it is no object")
        return answer
    except (OSError, ValueError) as error:
        raise errors.RendezvousError(
            f"{kind}: the launcher has not answered rank {environment.rank} at {path}: {error}"
        ) from None


def _membership(environment: Environment) -> tuple[str, str]:
    """The launcher's socket, and by what it knows this process."""
    path, _, token = (environment.membership or "").rpartition(":")
    return path, token
