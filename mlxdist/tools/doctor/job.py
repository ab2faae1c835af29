"""A job on the hosts that have passed: with the launcher, hostfile and transport of the user's own job."""

import contextlib
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from mlxdist.base.child_process import module_command
from mlxdist.base.json_reader import parse_json
from mlxdist.cluster.hostfile.hosts import Host
from mlxdist.cluster.hostfile.options import HostSelection
from mlxdist.launch.run_job import JobResult, host_arguments, run_job
from mlxdist.runtime.devices.links import Ports
from mlxdist.runtime.devices.paths import Path

from .checks.variables import FAST_SYNCH
from .cluster import CheckOptions, Job
from .probe_rank import MARK

__all__ = ["RankPlacement", "last_words", "place_ranks", "rank_variables", "run_ranks", "try_job"]

_SECONDS = 60.0
_SECONDS_A_PAIR = 5.0
_ALONE = 2  # ranks, where there is one host
_AT_A_TIME = 8  # smaller jobs
_WORDS = 300
_SHOWN_PROGRAM = "import mlxdist; mlxdist.barrier()"


def try_job(selection: HostSelection, names: list[str], options: CheckOptions) -> Job:
    """Runs a job on these hosts, and smaller jobs if it fails. Never raises: errors are in the result."""
    job = _run_on(names, selection, options)
    if job.error and len(names) > 1:
        job = replace(job, culprits=_culprits(job, selection, replace(options, quick=True)))
    return job


def _culprits(job: Job, selection: HostSelection, options: CheckOptions) -> tuple[Job, ...]:
    """Jobs on one host each that fail; if none does, failing jobs on the first host and one other."""
    first, *others = job.hosts
    with ThreadPoolExecutor(_AT_A_TIME) as threads:

        def failing(groups: list[list[str]]) -> tuple[Job, ...]:
            jobs = threads.map(lambda names: _run_on(names, selection, options), groups)
            return tuple(smaller for smaller in jobs if smaller.error)

        alone = failing([[name] for name in job.hosts])
        return alone or ((job,) if len(others) == 1 else failing([[first, other] for other in others]))


@dataclass(frozen=True)
class RankPlacement:
    """The hosts of ranks: the launcher's options, and options to show to the user, who has no hostfile of the job.

    ``settings``: variables that the ranks need there, in place of the user's.
    """

    hosts: tuple[Host, ...]
    options: list[str]
    shown: list[str]
    settings: Mapping[str, str] = field(default_factory=dict)


@contextlib.contextmanager
def place_ranks(selection: HostSelection, names: Sequence[str]) -> Iterator[RankPlacement]:
    """Places one job on these hosts, with at least two ranks; without a hostfile, two ranks on this machine."""
    given, options = selection.hostfile, []
    # The user's job may have this setting with its one rank on a Mac; the launcher rejects it with the two ranks here.
    settings = {FAST_SYNCH: "0"} if given is None or given.only(names).ranks == 1 else {}
    if given is None:
        on = ["-n", str(_ALONE)]
        yield RankPlacement((Host("localhost", _ALONE),), on, on, settings)
        return
    hostfile = given.only(names).for_mlxdist()  # whatever the user's own job will take
    if len(names) < len(given.hosts):
        options += ["--include", ",".join(names)]
    if hostfile.ranks == 1:  # a rank alone sends nothing
        envs = [setting for setting in hostfile.envs if not setting.startswith(f"{FAST_SYNCH}=")]
        hostfile = replace(hostfile.with_ranks(_ALONE), envs=(*envs, f"{FAST_SYNCH}=0"))
        options += ["-n", str(_ALONE)]
    with host_arguments(replace(selection, hostfile=hostfile)) as on:
        shown = ["--hostfile", "HOSTFILE", *options, *on[2:]]
        yield RankPlacement(hostfile.hosts, on, shown, settings)


def run_ranks(
    placement: RankPlacement, words: Sequence[str], settings: Mapping[str, str], seconds: float, prefix: bool = False
) -> tuple[JobResult, list[Any]]:
    """Runs a module of mlxdist, with its arguments, as the ranks. Returns also the JSON that they print after `MARK`.

    ``settings``: variables of the ranks. ``prefix``: whether each line begins with its rank.
    """
    on, settings = placement.options, {**settings, **placement.settings}
    program = module_command(*words, python=on[on.index("--python") + 1] if "--python" in on else "")
    result = run_job(program, on, variables=settings, directory="/", prefix=prefix, timeout=seconds)
    return result, [parse_json(line.partition(MARK)[2]) for line in result.output.splitlines() if MARK in line]


def _run_on(names: Sequence[str], selection: HostSelection, options: CheckOptions) -> Job:
    with place_ranks(selection, names) as placement:
        return _run(placement, options, selection.hostfile.envs if selection.hostfile is not None else ())


def _run(placement: RankPlacement, options: CheckOptions, envs: Sequence[str]) -> Job:
    hosts = placement.hosts
    names = tuple(host.name for host in hosts)
    ranks = sum(host.slots for host in hosts)
    links = not options.quick and len(hosts) > 1
    seconds = _SECONDS + (_SECONDS_A_PAIR * len(hosts) ** 2 if links else 0)
    parameters = {"hosts": [number for number, host in enumerate(hosts) for _ in range(host.slots)], "links": links}
    words = ["mlxdist.tools.doctor.probe_rank", json.dumps(parameters)]
    again = shlex.join(["mlxdist", "launch", *placement.shown, "--", "python", "-c", _SHOWN_PROGRAM])
    result, printed = run_ranks(placement, words, rank_variables(options, envs), seconds)
    if result.status or not printed:
        return Job(names, ranks, last_words(result.errors), command=again)
    found = printed[0]
    pairs = {(names[int(a)], names[int(b)]): measured for a, b, *measured in found["links"]}
    return Job(
        names,
        ranks,
        command=again,
        wrong=tuple(found["wrong"]),
        tested=found["tested"],
        provider=found["provider"],
        reason=found["reason"],
        latency={pair: latency for pair, (latency, *_) in pairs.items()},
        bandwidth={pair: bandwidth for pair, (_, bandwidth, *_) in pairs.items()},
        paths={pair: Path(int(path)) for pair, (_, _, path, *_) in pairs.items()},
        ports={pair: Ports(rate, bool(thunderbolt)) for pair, (*_, rate, thunderbolt) in pairs.items()},
    )


def rank_variables(options: CheckOptions, envs: Sequence[str]) -> dict[str, str]:
    """The variables of the ranks. ``envs``: those of the hostfile, which reach the ranks anyway.

    Of --env only those that matter here are passed, none private.
    """
    ours = {name: value for name, value in options.variables.items() if f"{name}={value}" not in envs}
    given = {name: value for name, value in ours.items() if name.startswith(("MLX", "OMP"))}
    return given | {"MLXDIST_TIMEOUT": "20", "MLXDIST_RENDEZVOUS_TIMEOUT": "40", "MLXDIST_FLIGHT_DIR": "none"}


def last_words(text: str) -> str:
    """The first error of a rank and the launcher's last line, which says how the job ended."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(("mlxdist.", "Error: "))]
    return " | ".join(dict.fromkeys([*errors[:1], *lines[-1:]]))[:_WORDS] or "it printed no error"
