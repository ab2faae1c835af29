"""Jobs that a report makes: ranks with every verb traced, and what their flight recorders have left where they fail."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mlxdist.base.errors import InvalidArgument, ResourceError
from mlxdist.cluster.hostfile.options import HostSelection
from mlxdist.tools.observe.collect import find_ranks
from mlxdist.tools.observe.stragglers import analyze

from ..job import last_words, place_ranks, run_ranks
from ..probe_rank import MARK

__all__ = ["Run", "probe", "run"]

_SECONDS = 60.0
_SETTINGS = {"MLXDIST_DEBUG": "trace:verbs,connection", "MLXDIST_TIMEOUT": "20", "MLXDIST_RENDEZVOUS_TIMEOUT": "30"}
_OPERATIONS = 20  # of each rank's flight record
_REQUEST_SECONDS = 2.0
_FIRST_LINES, _LAST_LINES = 250, 150  # of a job's output


@dataclass
class Run:
    """A job.

    Attributes:
        error: its last words, if it has failed.
        results: of its ranks, at most one each.
        trace: its debug output; output: the rest of its standard error.
        flight: its flight records, if it has failed.
    """

    name: str
    settings: dict[str, str]
    error: str = ""
    results: list[dict[str, Any]] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)
    output: list[str] = field(default_factory=list)
    flight: dict[str, Any] = field(default_factory=dict)


def probe(name: str, chosen: HostSelection, hosts: Sequence[str], settings: Mapping[str, str]) -> Run:
    """Two ranks at least compute checked sums and measure the links between them."""
    ranks = 2 if chosen.hostfile is None else max(2, chosen.hostfile.only(hosts).ranks)
    # Each rank counts as a host of its own: links are measured between ranks of one host, too.
    parameters = {"hosts": list(range(ranks)), "links": True}
    words = ["mlxdist.tools.doctor.probe_rank", json.dumps(parameters)]
    return run(name, chosen, hosts, words, settings, MARK)


def run(
    name: str, chosen: HostSelection, hosts: Sequence[str], words: Sequence[str], settings: Mapping[str, str], mark: str
) -> Run:
    """Runs `python -m WORDS` as the ranks of these hosts. Lines after ``mark`` are results."""
    settings = _SETTINGS | dict(settings)
    found = Run(name, settings)
    with place_ranks(chosen, hosts) as placement:
        found.settings |= placement.settings
        status, output, errors = run_ranks(placement, words, settings, _SECONDS, prefix=True)
    found.results = [json.loads(line.partition(mark)[2]) for line in output.splitlines() if mark in line]
    lines = errors.splitlines()
    others = [line for line in lines if not _DEBUG_LINE.match(line)]
    found.trace = _ends([line for line in lines if _DEBUG_LINE.match(line)])
    found.output = _ends(others)
    if status or not found.results:
        found.error = last_words("\n".join(_PREFIX.sub("", line) for line in others))
        found.flight = _flight(errors, chosen)
    return found


_PREFIX = re.compile(r"^\[[^\]]+\] ")  # the rank, and its host where there are several
_DEBUG_LINE = re.compile(_PREFIX.pattern + r"[\d:.]{15} mlxdist rank ")


def _ends(lines: list[str]) -> list[str]:
    """Where a queue pair is re-created many times, the first and last lines suffice."""
    if len(lines) <= _FIRST_LINES + _LAST_LINES:
        return lines
    note = f"[... {len(lines) - _FIRST_LINES - _LAST_LINES} lines were cut here ...]"
    return [*lines[:_FIRST_LINES], note, *lines[-_LAST_LINES:]]


def _flight(errors: str, chosen: HostSelection) -> dict[str, Any]:
    """The records of all ranks, as `mlxdist dump` reads them, and which rank waited for which."""
    job = re.search(r"/([^/\s]+)/flight/flight-\d+\.json", errors)
    if job is None:
        return {"notes": ["no rank has printed the path of a flight record"]}
    try:
        with find_ranks(job[1], chosen) as ranks:
            left = ranks.collect(full=True, seconds=_REQUEST_SECONDS)
    except (InvalidArgument, ResourceError) as error:
        return {"notes": [str(error)]}
    records = [asdict(record) for record in left.records.values()]
    for record in records:
        record["operations"] = record["operations"][-_OPERATIONS:]
    findings = analyze(left.records).findings if left.records else []
    return {"job": job[1], "findings": findings, "notes": left.notes, "records": records}
