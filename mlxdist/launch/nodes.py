"""A job whose launcher is started on every node by other means: `--nodes`, or srun. They do not use ssh.

Each launcher starts the ranks of its node. Ranks meet at the address of node 0, and prove to each other that they have
the secret, which must be the same everywhere. The launchers have no connection to each other: when a rank fails, ranks
of other nodes get the error from the rendezvous, and fail too.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mlxdist.base.environment import MAX_RANKS, Environment, format_address, parse_address
from mlxdist.base.errors import EnvironmentVariableError, InvalidArgument

from .backends import DEFAULT_PORT

if TYPE_CHECKING:
    from mlxdist.cluster.hostfile.hosts import Hostfile

__all__ = ["Nodes", "allocation", "from_options", "from_slurm_step"]

_FIRST_SLURM_PORT, _SLURM_PORTS = 20000, 10000
_MAX_SECRET_FILE = 4096
_HOW = (
    "type `export MLXDIST_SECRET=$(openssl rand -hex 32)` on one node and export the same value on the others, or give "
    "a file that has it with --secret-file"
)


@dataclass(frozen=True)
class Nodes:
    """This node among ``count``. ``host`` and ``port``: where node 0 listens."""

    count: int
    number: int
    host: str
    port: int
    secret: str = field(repr=False)

    @property
    def address(self) -> str:
        return format_address(self.host, self.port)

    @property
    def interface(self) -> str:
        """The address where node 0 listens; empty for all, if a name was given, which often has several."""
        try:
            socket.inet_pton(socket.AF_INET6 if ":" in self.host else socket.AF_INET, self.host)
        except OSError:
            return ""
        return self.host

    def ranks(self, each: int) -> range:
        """The ranks of this node.

        Raises:
            InvalidArgument: the job would have too many ranks.
        """
        if self.count * each > MAX_RANKS:
            raise InvalidArgument(f"{self.count} nodes with {each} ranks each; at most {MAX_RANKS} ranks are possible")
        return range(self.number * each, (self.number + 1) * each)

    def job(self, name: str) -> str:
        """The name of the job here: a part that all nodes share, then this launcher's own. See `same_job`."""
        import hashlib

        # The launchers share only the secret, and a job's name is public: so the name has a hash of the secret.
        common = hashlib.sha256(b"name of the job" + self.secret.encode()).hexdigest()[:8]
        outer, dot, own = name.rpartition(".")
        return f"{outer}{dot}{common}.node{self.number}.{own}"


def from_options(
    count: int | None, number: int | None, master: str | None, secret_file: str | None, environ: Mapping[str, str]
) -> Nodes | None:
    """The node that --nodes, --node-rank and --master-addr describe; None where they are not given.

    Raises:
        InvalidArgument: one of them is missing or wrong, or there is no secret.
    """
    if count is None:
        given = {"--node-rank": number, "--master-addr": master}
        if alone := [option for option, value in given.items() if value is not None]:
            raise InvalidArgument(f"{alone[0]} goes with --nodes N, the number of nodes")
        return None
    if number is None or master is None:
        raise InvalidArgument(
            "--nodes needs --node-rank R, which of the nodes this is (from 0), and --master-addr HOST[:PORT], where "
            "node 0 listens"
        )
    if not 0 <= number < count:
        raise InvalidArgument(f"--node-rank {number} does not fit --nodes {count}: nodes are 0 to {count - 1}")
    found = Nodes(count, number, *_address(master), _secret(secret_file, environ))
    if number == 0:
        _look_up(found.host)
    return found


def _look_up(host: str) -> None:
    """Checks on node 0 that its name resolves, since it listens there. Other nodes may learn the name later."""
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        raise InvalidArgument(f"--master-addr: node 0 does not know {host}, its own name: {error.strerror}") from None


def from_slurm_step(environ: Mapping[str, str], secret_file: str | None) -> Nodes | None:
    """This node, if srun has started one launcher on each of several nodes; else None.

    Raises:
        InvalidArgument: SLURM's variables do not fit together, or there is no secret.
    """
    if "SLURM_STEP_ID" not in environ or "SLURM_PROCID" not in environ:
        return None
    if "MLXDIST_JOB" in environ:  # a rank of ours has inherited the variables of its launcher
        return None
    count = _number(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    if count is None or count < 2:
        return None
    tasks = _number(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if tasks is not None and tasks != count:
        raise InvalidArgument(
            f"srun has started {tasks} launchers on {count} nodes; one on each is enough: "
            "srun --ntasks-per-node=1 mlxdist launch -n RANKS -- COMMAND"
        )
    number = _number(environ, "SLURM_NODEID")
    if number is None or number >= count:
        raise InvalidArgument(f"SLURM_NODEID={environ.get('SLURM_NODEID')!r:.80} is none of the {count} nodes")
    from mlxdist.cluster.hostfile.slurm import expand

    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    if not nodes:
        raise InvalidArgument("SLURM_JOB_NODELIST is not set: SLURM does not say where node 0 is; give --hostfile")
    job = _number(environ, "SLURM_JOB_ID", "SLURM_JOBID") or 0
    # Steps of one job at the same time have ports of their own.
    port = _FIRST_SLURM_PORT + (16 * job + (_number(environ, "SLURM_STEP_ID") or 0)) % _SLURM_PORTS
    return Nodes(count, number, expand(nodes)[0], port, _secret(secret_file, environ))


def allocation(environ: Mapping[str, str]) -> Hostfile | None:
    """The hosts of the SLURM allocation (salloc, sbatch) that this process runs in, to be reached by ssh."""
    if not (environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")):
        return None
    from mlxdist.cluster.hostfile.slurm import from_slurm

    return from_slurm(environ)


def _address(master: str) -> tuple[str, int]:
    bare = master.strip("[]")
    if ":" not in master or (bare.count(":") > 1 and not master.startswith("[")) or master.endswith("]"):
        master = format_address(bare, DEFAULT_PORT)
    try:
        return parse_address(master)
    except ValueError as error:
        raise InvalidArgument(f"--master-addr: {master!r} {error}") from None


def _secret(file: str | None, environ: Mapping[str, str]) -> str:
    text, where = environ.get("MLXDIST_SECRET"), "MLXDIST_SECRET"
    if file is not None:
        text, where = _read_secret(file), f"--secret-file {file}"
    if text is None:
        raise InvalidArgument(f"a job on several nodes needs a secret that all of them know; {_HOW}")
    try:
        Environment.read({"MLXDIST_SECRET": text})
    except EnvironmentVariableError as error:
        raise InvalidArgument(str(error).replace("MLXDIST_SECRET", where, 1)) from None
    return text


def _read_secret(file: str) -> str:
    try:
        with open(file, "rb") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            data = opened.read(_MAX_SECRET_FILE + 1)
    except OSError as error:
        raise InvalidArgument(f"--secret-file {file}: {error.strerror}") from None
    if stat.S_IMODE(mode) & 0o077:
        raise InvalidArgument(f"--secret-file {file}: others may read it; type: chmod 600 {file}")
    return data.decode("utf-8-sig", errors="replace").strip()


def _number(environ: Mapping[str, str], *names: str) -> int | None:
    """The number in the first of these variables that is set; None if none is."""
    for name in names:
        text = environ.get(name)
        if text:
            if not (text.isascii() and text.isdigit() and len(text) <= 12):
                raise InvalidArgument(f"{name}={text!r:.80} is not a number")
            return int(text)
    return None
