"""The servers of `mlxdist bench serve`: each is a job of its own, with a log, and ends with its context."""

from __future__ import annotations

import contextlib
import http.client
import re
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlxdist.base.child_process import code_command, module_command
from mlxdist.base.errors import ResourceError
from mlxdist.launch.backends import free_ports
from mlxdist.launch.run_job import job_command

from .serve_load import HOST, ask

__all__ = ["ALONE", "DRAFTS", "MLX_LM", "OURS", "OWN_LAYERS", "RING", "Job", "accepted_drafts", "running"]

# `mlxdist serve`, with mlx-lm's own layers, with a draft model; mlx_lm.server on our group, on MLX's, on one process.
OURS, OWN_LAYERS, DRAFTS, MLX_LM, RING, ALONE = "mlxdist", "unsplit", "drafts", "mlx-lm", "ring", "alone"
_READY_SECONDS = 300.0  # to load the model; on Linux MLX compiles its kernels the first time
_END_SECONDS = 60.0
# Keeps the module that it runs on the core of its rank. mlx_lm.server can say nothing of that itself.
_PINNED = """
import os, runpy, sys
if hasattr(os, "sched_setaffinity"):
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["MLX_RANK"]) % len(cores)]})
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


@dataclass(frozen=True)
class Job:
    """The settings with which servers are started.

    Attributes:
        model, draft_model: directories, on every host.
        where: the launcher's options for hosts and ranks.
        python: the Python of other hosts, or empty for this one.
        pinned: whether each rank has a core of its own.
        variables: environment variables for the ranks.
    """

    model: str
    draft_model: str
    where: Sequence[str]
    python: str
    pinned: bool
    variables: Mapping[str, str]

    def command(self, name: str, port: int) -> tuple[list[str], dict[str, str]]:
        """Returns the launcher's command for a server, and its environment."""
        is_ours = name in (OURS, OWN_LAYERS, DRAFTS)
        module = "mlxdist" if is_ours else "mlx_lm"
        words = ["serve", self.model] if is_ours else ["server", "--model", self.model]
        words += {OWN_LAYERS: ["--no-split-blocks"], DRAFTS: ["--draft-model", self.draft_model]}.get(name, [])
        arguments = [module, *words, "--host", HOST, "--port", str(port)]
        if self.pinned:
            program = code_command(_PINNED, *arguments, python=self.python)
        else:
            program = module_command(*arguments, python=self.python)
        where = ["-n", "1"] if name == ALONE else self.where
        return job_command(program, where, self.variables, ["--backend", "ring"] if name == RING else [])


def accepted_drafts(port: int) -> float:
    """The share of drafts so far that became tokens of an answer. Raises OSError: the server does not answer."""
    with contextlib.closing(http.client.HTTPConnection(HOST, port, timeout=60)) as connection:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    drafted, accepted = (
        float(re.findall(rf"^mlxdist_serve_{name}_total (\S+)", text, re.MULTILINE)[0])
        for name in ("draft_tokens", "accepted_draft_tokens")
    )
    return accepted / max(drafted, 1.0)


@contextlib.contextmanager
def running(job: Job, name: str, log: Path) -> Iterator[int]:
    """Runs a server inside the context, and yields its port once it has answered a request.

    Raises:
        ResourceError: the server does not become ready, or a request inside the context fails.
    """
    (port,) = free_ports(1)
    command, environment = job.command(name, port)
    with (
        open(log, "wb") as output,
        subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        ) as process,
    ):
        try:
            _wait_until_ready(process, port)
            yield port
        except (OSError, http.client.HTTPException) as error:
            status = process.poll()
            ended = "" if status is None else f"; it has ended with status {status}: {_last_line(log)}"
            raise ResourceError(f"{error or type(error).__name__}{ended}") from None
        finally:
            process.terminate()
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait_until_ready(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while True:
        try:
            ask(port, {"prompt": "ready?", "max_tokens": 2}, 0.0)
            return
        except OSError:  # it does not listen, or loads the model
            if process.poll() is not None or time.monotonic() > deadline:
                raise
        time.sleep(0.1)


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")[:500]
