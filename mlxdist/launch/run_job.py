"""Starts a job with `mlxdist launch` and waits for its end: for commands that measure or check something with ranks.

The launcher is a process of its own, which is never killed: it ends its ranks itself, whatever happens here.
"""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mlxdist.base.child_process import module_command
from mlxdist.base.errors import ResourceError

if TYPE_CHECKING:
    from mlxdist.cluster.hostfile.options import HostSelection

__all__ = ["JobResult", "host_arguments", "job_command", "run_command", "run_job"]

_READ_BYTES = 1 << 16
_MARGIN = 30.0  # seconds for the launcher to start, and to end the job


class JobResult(NamedTuple):
    """The exit status of a job and what it printed; both texts are empty where ``on_line`` got the lines."""

    status: int
    output: str = ""
    errors: str = ""


def run_job(
    program: Sequence[str],
    where: Sequence[str],
    *,
    variables: Mapping[str, str] | None = None,
    directory: str = "",
    prefix: bool = True,
    options: Sequence[str] = (),
    timeout: float | None = None,
    on_line: Callable[[str], None] | None = None,
    silence: float | None = None,
) -> JobResult:
    """Runs a program as the ranks of a job.

    Args:
        program: the command of each rank; see `mlxdist.base.child_process.module_command`.
        where: the launcher's options for the hosts: ``["-n", "2"]``, or see `host_arguments`.
        variables: set for the ranks, in place of this process's own of the same names.
        directory: where the ranks run; ``"/"`` for ranks that need none, as this one may not exist on other hosts.
        prefix: put the rank in front of each line.
        options: other options of the launcher.
        timeout: seconds until the launcher ends the job, with status 124.
        on_line, silence: see `run_command`.
    """
    words = [*options, *(["--cwd", directory] if directory else [])]
    words += [] if prefix else ["--no-prefix"]
    words += ["--timeout", f"{timeout:g}"] if timeout is not None else []
    command, environment = job_command(program, where, variables, words)
    seconds = None if timeout is None else timeout + _MARGIN
    return run_command(command, environment, seconds, on_line, silence)


def job_command(
    program: Sequence[str],
    where: Sequence[str],
    variables: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
) -> tuple[list[str], dict[str, str]]:
    """The launcher's command line and environment. Arguments have the meaning that they have in `run_job`."""
    variables = variables or {}
    command = module_command("mlxdist", "launch", *where, *options)
    command += [word for name, value in variables.items() for word in ("--env", f"{name}={value}")]
    given = {*variables, "MLX_HOSTFILE"}  # `where` names the hosts
    return [*command, "--", *program], {name: value for name, value in os.environ.items() if name not in given}


def run_command(
    command: Sequence[str],
    environment: Mapping[str, str] | None = None,
    timeout: float | None = None,
    on_line: Callable[[str], None] | None = None,
    silence: float | None = None,
) -> JobResult:
    """Runs a command of mlxdist that starts a job. Ends it with SIGTERM after ``timeout`` seconds, or on an exception.

    Args:
        on_line: called with each line of the standard output as it arrives; the standard error is then this process's.
        silence: with ``on_line``: seconds without a line after which the job is ended.

    Raises:
        ResourceError: the job was silent.
    """
    pipe = subprocess.PIPE
    errors = pipe if on_line is None else None
    with subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=pipe, stderr=errors) as process:
        try:
            if on_line is not None and process.stdout is not None:
                for line in _lines(process.stdout.fileno(), silence):
                    on_line(line)
                return JobResult(process.wait())
            late = b""
            try:
                texts = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                process.terminate()
                texts = process.communicate()
                late = f"\nit had not ended after {timeout:g} s".encode()
        except BaseException:
            process.terminate()
            raise
    return JobResult(process.returncode, texts[0].decode(errors="replace"), (texts[1] + late).decode(errors="replace"))


@contextlib.contextmanager
def host_arguments(selection: HostSelection) -> Iterator[list[str]]:
    """The options that select the same hosts for another command of mlxdist, by a temporary hostfile."""
    from mlxdist.cluster.hostfile.writing import save

    with tempfile.TemporaryDirectory(prefix="mlxdist-hosts-") as directory:
        path = Path(directory, "hosts.json")
        assert selection.hostfile is not None, "this machine alone has no hostfile"
        save(selection.hostfile, path)
        ssh = ["--ssh", shlex.join(selection.ssh)] if selection.ssh != ("ssh",) else []
        yield ["--hostfile", str(path), *ssh, *(["--python", selection.python] if selection.python else [])]


def _lines(output: int, silence: float | None) -> Iterator[str]:
    held = b""
    while select.select([output], [], [], silence)[0]:
        data = os.read(output, _READ_BYTES)
        *lines, held = (held + data).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace") + "\n"
        if not data:
            yield from [held.decode(errors="replace")] if held else []
            return
    raise ResourceError(f"the ranks printed nothing for {silence:.0f} s")
