"""A job on the hosts that have passed: with the launcher, hostfile and transport that the user's own job will have."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from ..hostfile import Host, save
from ..hostfile.options import Chosen
from .cluster import Job, Question
from .probe_rank import MARK

__all__ = ["run_job"]

_SECONDS = 60.0
_SECONDS_A_PAIR = 5.0
_ALONE = 2  # ranks, where there is one host
_AT_A_TIME = 8  # smaller jobs
_MARGIN = 30.0
_WORDS = 300


def run_job(chosen: Chosen, names: list[str], question: Question) -> Job:
    """Runs it on these hosts, and smaller ones where it fails. Never raises: what went wrong is in the answer."""
    if chosen.hostfile is None:
        on = ["-n", str(_ALONE)]
        return _run([Host("localhost", _ALONE)], on, on, question)
    job = _run_on(names, chosen, question)
    if job.error and len(names) > 1:
        job = replace(job, culprits=_culprits(job, chosen, replace(question, quick=True)))
    return job


def _culprits(job: Job, chosen: Chosen, question: Question) -> tuple[Job, ...]:
    """Of jobs on one host each those that fail; if none does, of jobs on the first host and another one."""
    first, *others = job.hosts
    with ThreadPoolExecutor(_AT_A_TIME) as threads:

        def failing(groups: list[list[str]]) -> tuple[Job, ...]:
            jobs = threads.map(lambda names: _run_on(names, chosen, question), groups)
            return tuple(smaller for smaller in jobs if smaller.error)

        alone = failing([[name] for name in job.hosts])
        return alone or ((job,) if len(others) == 1 else failing([[first, other] for other in others]))


def _run_on(names: list[str], chosen: Chosen, question: Question) -> Job:
    given, options = chosen.hostfile, []
    hostfile = given.only(names).for_mlxdist()  # whatever the user's own job will take
    if len(names) < len(given.hosts):
        options += ["--include", ",".join(names)]
    if hostfile.ranks == 1 < len(given.hosts):  # a rank alone sends nothing
        hostfile = hostfile.with_ranks(_ALONE)
        options += ["-n", str(_ALONE)]
    reach = ["--ssh", shlex.join(chosen.ssh)] if chosen.ssh != ("ssh",) else []
    reach += ["--python", chosen.python] if chosen.python else []
    # Of what the hostfile sets, only what it sets for these hosts.
    left = {name: value for name, value in question.variables.items() if f"{name}={value}" not in given.envs}
    with tempfile.TemporaryDirectory(prefix="mlxdist-doctor-") as folder:
        path = Path(folder, "hosts.json")
        save(hostfile, path)
        on, shown = ["--hostfile", str(path), *reach], ["--hostfile", "HOSTFILE", *options, *reach]
        return _run(list(hostfile.hosts), on, shown, replace(question, variables=left))


def _run(hosts: list[Host], on: list[str], shown: list[str], question: Question) -> Job:
    """``on``: the launcher's options; ``shown``: what the user types, for whom the hostfile of this job is gone."""
    names = tuple(host.name for host in hosts)
    ranks = sum(host.slots for host in hosts)
    links = not question.quick and len(hosts) > 1
    seconds = _SECONDS + (_SECONDS_A_PAIR * len(hosts) ** 2 if links else 0)
    settings = {"MLXDIST_TIMEOUT": "20", "MLXDIST_RENDEZVOUS_TIMEOUT": "40", "MLXDIST_FLIGHT": "none"}
    # What the hostfile and this shell set reaches the ranks anyway; of --env what matters here, and nothing private.
    given = {name: value for name, value in question.variables.items() if name.startswith(("MLX", "OMP"))} | settings
    parameters = {"hosts": [number for number, host in enumerate(hosts) for _ in range(host.slots)], "links": links}
    python = on[on.index("--python") + 1] if "--python" in on else sys.executable
    command = [sys.executable, "-m", "mlxdist", "launch", *on, "--cwd", "/", "--timeout", f"{seconds:g}", "--no-prefix"]
    command += [word for name, value in given.items() for word in ("--env", f"{name}={value}")]
    command += ["--", python, "-m", "mlxdist.doctor.probe_rank", json.dumps(parameters)]
    again = shlex.join(["mlxdist", "launch", *shown, "--", "python", "-c", "import mlxdist; mlxdist.barrier()"])
    environment = {name: value for name, value in os.environ.items() if name not in given}
    status, output, errors = _output_of(command, environment, seconds + _MARGIN)
    results = [line.partition(MARK)[2] for line in output.splitlines() if MARK in line]
    if status or not results:
        return Job(names, ranks, _last_words(errors), command=again)
    found = json.loads(results[0])
    pairs = {(names[int(a)], names[int(b)]): (latency, rate) for a, b, latency, rate in found["links"]}
    return Job(
        names,
        ranks,
        command=again,
        wrong=tuple(found["wrong"]),
        tried=found["tried"],
        provider=found["provider"],
        reason=found["reason"],
        latency={pair: latency for pair, (latency, _) in pairs.items()},
        bandwidth={pair: rate for pair, (_, rate) in pairs.items()},
    )


def _output_of(command: list[str], environment: dict[str, str], seconds: float) -> tuple[int, str, str]:
    """Of the launcher, which is never killed: it ends its ranks itself, whatever happens here."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe) as process:
        try:
            output, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.terminate()
            output, errors = process.communicate()
            errors += f"\nit had not ended after {seconds:g} s".encode()
        except BaseException:
            process.terminate()
            raise
    return process.returncode, output.decode(errors="replace"), errors.decode(errors="replace")


def _last_words(text: str) -> str:
    """The errors of the ranks come before what the launcher says of their ends; both matter."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(("mlxdist.errors.", "Error: "))]
    return " | ".join(dict.fromkeys([*errors[:1], *lines[-1:]]))[:_WORDS] or "it has said nothing"
