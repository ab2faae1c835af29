"""Levels 2 to 4 of `mlxdist doctor`: traffic between the ranks for a minute to an hour, with the state of each host
before and after."""

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait

from mlxdist.cluster.hostfile.options import HostSelection
from mlxdist.cluster.ssh.rpc_client import CallError, Connections

from .cluster import Cluster, ProbeError, Soak
from .job import last_words, place_ranks, rank_variables, run_ranks
from .probe import OnProgress

__all__ = ["COMPUTES", "LEVEL_SECONDS", "soak"]

LEVEL_SECONDS = {1: 0.0, 2: 60.0, 3: 600.0, 4: 3600.0}
COMPUTES = 3  # from this level on devices multiply matrices, which makes them hot
_MARGIN = 60.0  # for the ranks to start, and to end a round
_HEALTH_SECONDS = 90.0
_REFRESH_SECONDS = 0.5
_BAR = 20  # characters


def soak(selection: HostSelection, names: Sequence[str], cluster: Cluster, on_progress: OnProgress) -> None:
    """Runs the traffic on these hosts, and puts into ``cluster`` what is found. Never raises for an error of a rank."""
    job = cluster.job
    if job is None or job.skipped or job.error or job.wrong:
        cluster.soak = Soak(
            skipped="the short job before has failed" if names else "no host has passed the checks before"
        )
        return
    _read_health(names, selection, cluster, "health_before", 1.0, on_progress)
    begin = time.monotonic()
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(_run, selection, names, cluster)
        while not wait([running], _REFRESH_SECONDS).done:
            for name in names:
                on_progress(name, _bar(time.monotonic() - begin, cluster.options.seconds))
        cluster.soak = running.result()
    _read_health(names, selection, cluster, "health_after", time.monotonic() - begin, on_progress)


def _bar(elapsed: float, seconds: float) -> str:
    done = min(_BAR, int(_BAR * elapsed / seconds))
    return f"soak {'━' * done}{'╌' * (_BAR - done)} {min(elapsed, seconds):.0f} of {seconds:.0f} s"


def _run(selection: HostSelection, names: Sequence[str], cluster: Cluster) -> Soak:
    options = cluster.options
    envs = selection.hostfile.envs if selection.hostfile is not None else ()
    parameters = {"seconds": options.seconds, "compute": options.level >= COMPUTES}
    with place_ranks(selection, names) as placement:
        words = ["mlxdist.tools.doctor.soak_rank", json.dumps(parameters)]
        result, printed = run_ranks(placement, words, rank_variables(options, envs), options.seconds + _MARGIN)
        hosts, ranks = tuple(host.name for host in placement.hosts), sum(host.slots for host in placement.hosts)
    if result.status or not printed:
        return Soak(hosts, ranks, error=last_words(result.errors))
    found = printed[0]
    numbers = {name: found[name] for name in ("seconds", "operations", "bytes")}
    return Soak(hosts, ranks, wrong=tuple(found["wrong"]), **numbers)


def _read_health(
    names: Sequence[str], selection: HostSelection, cluster: Cluster, step: str, seconds: float, show: OnProgress
) -> None:
    for name in names:
        show(name, "counters and kernel log")
    with Connections(names, selection.ssh_config) as connections:
        responses = connections.call("doctor.health", {"seconds": seconds}, _HEALTH_SECONDS)
    for name, response in zip(names, responses):
        if isinstance(response, CallError):
            cluster.errors.setdefault(step, {})[name] = ProbeError(str(response), response.connected)
        else:
            cluster.responses.setdefault(step, {})[name] = response
        show(name, "")
