"""The sections of a report, in their order. A section is filled step by step, so that a stopped one keeps its steps."""

import json
import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from mlxdist.base.child_process import module_command
from mlxdist.base.errors import ResourceError
from mlxdist.base.json_reader import parse_json
from mlxdist.base.validation import build
from mlxdist.cluster.hostfile.options import HostSelection
from mlxdist.cluster.ssh.rpc_client import CallError, Connections
from mlxdist.launch.run_job import run_command
from mlxdist.runtime.devices.device import Device
from mlxdist.runtime.devices.probe import PeerProbe

from ..cluster import CheckOptions, Cluster
from ..diagnose import diagnose, failed_hosts
from ..job import place_ranks
from ..report import as_json
from . import late_rank
from .document import Section, fenced, table
from .runs import Run, alone, probe, rdma_runs, run

__all__ = ["SECTIONS", "Context", "Step"]

LATE_SECONDS = 8.0  # macOS ends GPU work that waits for about 5 s
_BENCH = ["bench", "collectives", "--json", "--api", "engine", "--op", "send_recv,all_sum"]
_BENCH += ["--sizes", "8,4KiB,64KiB,1MiB", "--repeats", "5"]
_BENCH_SECONDS = 120.0
_RDMA_SECONDS = 40.0
_OMITTED_FACTS = ("identity", "printed")  # private; a section of its own


@dataclass
class Context:
    """The state of a report. ``show``: shows the current step. ``cluster``: facts about the hosts, after the checks.

    ``own_names``: the names that the hosts have for themselves, which are private.
    """

    selection: HostSelection
    options: CheckOptions
    show: Callable[[str], None] = lambda step: None
    late_seconds: float = LATE_SECONDS
    cluster: Cluster | None = None
    own_names: list[str] = field(default_factory=list)

    @property
    def hosts(self) -> list[str]:
        return [host.name for host in self.selection.hosts()]


@dataclass(frozen=True)
class Step:
    """A section to fill. ``seconds``: its time limit for one host, ``seconds_a_host``: for each further host."""

    name: str
    title: str
    fill: Callable[[Section, Context], None]
    seconds: float
    seconds_a_host: float = 0.0


def _fill_checks(section: Section, context: Context) -> None:
    on_progress = lambda host, step: context.show(f"{host}: {step}" if step else "")
    cluster, results = diagnose(context.selection, context.options, on_progress)
    context.cluster = cluster
    rows = [
        (result.check, finding.verdict, ", ".join(finding.hosts), finding.what, finding.remedy)
        for result in results
        for finding in result.findings
    ]
    section.text = table(("check", "verdict", "hosts", "what was found", "what to do"), rows)
    for host, facts in cluster.each("facts"):
        section.text += f"\n### {host}\n\n" + table(("what", "version"), list(facts["versions"].items()))
    for host, measured in cluster.each("gpu_sync"):
        section.text += f"\nGPU synchronization on {host}: {_gpu_sync(measured)}\n"
    responses = {step: dict(cluster.each(step)) for step in cluster.responses if step != "listen"}
    responses["facts"] = {host: _without_private(facts) for host, facts in cluster.each("facts")}
    errors = {step: {host: error.text for host, error in of.items()} for step, of in cluster.errors.items()}
    section.data = as_json(cluster, results, failed_hosts(cluster.names, results))
    section.data |= {"responses": responses, "errors": errors}


def _without_private(facts: dict[str, Any]) -> dict[str, Any]:
    """The facts without private ones: command lines of other jobs may contain anything."""
    running = [{"job": job["job"], "ranks": job["ranks"]} for job in facts["jobs"]["running"]]
    kept = {name: value for name, value in facts.items() if name not in _OMITTED_FACTS}
    return kept | {"jobs": facts["jobs"] | {"running": running}}


def _gpu_sync(found: dict[str, Any]) -> str:
    times = [f"{value:.0f} us with MLX_METAL_FAST_SYNCH={name}" for name, value in found["microseconds"].items()]
    return "; ".join([*times, found["skipped"], found["error"]]).strip("; ") or "not measured"


def _fill_installation(section: Section, context: Context) -> None:
    with Connections(context.hosts, context.selection.ssh_config) as connections:
        responses = connections.call("doctor.installation", seconds=60.0)
    found = {host: response for host, response in zip(context.hosts, responses) if not isinstance(response, CallError)}
    context.own_names += [installed.pop("host") for installed in found.values()]
    names = dict.fromkeys(name for installed in found.values() for name in installed)
    rows = [[name, *(installed.get(name, "") for installed in found.values())] for name in names]
    section.text, section.data = table(["", *found], rows), found
    section.error = "; ".join(str(response) for response in responses if isinstance(response, CallError))


def _fill_devices(section: Section, context: Context) -> None:
    for host, rdma in _cluster_of(context).each("rdma"):
        rows = [
            (
                device["name"],
                device["state"] or device["error"],
                device["transport"] or device["link_layer"],
                device["speed"] or "",
                device["active_mtu"] or "",
                ", ".join(f"{gid['index']}: {gid['gid']} {gid['interface']}" for gid in device["gids"]),
                ", ".join(f"{name} {value}" for name, value in device["limits"].items()),
                _probe_in_words(device),
            )
            for device in rdma["devices"]
        ]
        columns = ("device", "state", "link", "Gb/s", "MTU", "GIDs", "limits", "found by a probe")
        section.text += f"\n### {host}\n\n" + (table(columns, rows) if rows else "There is no RDMA device.\n")
        findings = [(f["verdict"], f["subject"], f["what"], f["remedy"]) for f in rdma["findings"]]
        section.text += "\n" + table(("verdict", "device", "what was found", "what to do"), findings)
        section.data[host] = rdma


def _probe_in_words(device: dict[str, Any]) -> str:
    """The results of probes since the host has started. The report makes none without a peer itself: other programs,
    which doctor does not know, may need the queue pairs that it would take."""
    words = Device.from_json({one.name: device[one.name] for one in fields(Device)}).found_in_words()
    missing = "not probed: `mlxdist devices --probe` on that host, then the report again"
    return ", ".join(filter(None, (missing * (device["probe"] is None), _in_words(words))))


def _in_words(words: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in words.items())


def _cluster_of(context: Context) -> Cluster:
    if context.cluster is None:
        raise ResourceError("the checks, which collect this, have not come to an end")
    return context.cluster


def _fill_system(section: Section, context: Context) -> None:
    for host, facts in _cluster_of(context).each("facts"):
        section.data[host] = facts["printed"]
        section.text += f"\n### {host}\n\n"
        section.text += "".join(
            f"{name}:\n\n{fenced(text)}\n" for name, text in facts["printed"].items() if text.strip()
        )


def _fill_soft(section: Section, context: Context) -> None:
    for host in context.selection.hosts():
        context.show(host.name)
        settings = {"MLXDIST_PROVIDER": "soft"}
        _add_run(section, probe(host.name, alone(context.selection, host), [host.name], settings))


def _fill_rdma(section: Section, context: Context) -> None:
    devices = {host: rdma["devices"] for host, rdma in _cluster_of(context).each("rdma")}
    runs, notes = rdma_runs(context.selection, devices)
    section.text = "".join(f"{note}\n\n" for note in notes)
    section.data["notes"] = notes
    for planned in runs:
        context.show(planned.name)
        found = probe(planned.name, planned.selection, planned.hosts, planned.settings)
        if planned.is_loop:
            section.text += "Both ranks use one device of one host. A refusal at RTR is no fault of this host.\n\n"
        _add_run(section, found)
    if runs:
        _add_messages(section, context)


def _add_messages(section: Section, context: Context) -> None:
    """Adds what the runs, or jobs before, have found out about messages."""
    with Connections(context.hosts, context.selection.ssh_config) as connections:
        responses = connections.call("doctor.rdma", seconds=_RDMA_SECONDS)
    rows = [
        (host, device["name"], _in_words(build(PeerProbe, device["peer_probe"]).in_words()))
        for host, response in zip(context.hosts, responses)
        if not isinstance(response, CallError)
        for device in response["devices"]
        if device["peer_probe"]
    ]
    section.data["messages"] = rows
    if rows:
        section.text += "### Messages\n\n" + table(("host", "device", "found with a peer"), rows)


def _fill_speed(section: Section, context: Context) -> None:
    with place_ranks(context.selection, context.hosts) as placement:
        command = module_command("mlxdist", *_BENCH, *placement.options)
        status, output, errors = run_command(command, {**os.environ, **placement.settings}, _BENCH_SECONDS)
    section.text = f"`{shlex.join(['mlxdist', *_BENCH, *placement.shown])}`\n\n"
    if status:
        section.error = f"exit status {status}"
        section.text += fenced(errors)
    if output.lstrip().startswith("{"):
        section.data = parse_json(output)
        rows = [
            (*(result["case"][name] for name in ("operation", "bytes")), result["algorithm"], *_measured(result))
            + (result["wrong"],)
            for result in section.data["cases"]
        ]
        section.text += f"{section.data['setup']['ranks']} ranks, {section.data['setup']['provider']}\n\n"
        section.text += table(("operation", "bytes", "algorithm", "median, us", "GB/s", "wrong elements"), rows)


def _measured(case: dict[str, Any]) -> tuple[str, str]:
    if case["refused"]:
        return case["refused"], ""
    return f"{case['microseconds']['median']:.1f}", f"{case['busbw']:.3f}"


def _fill_late(section: Section, context: Context) -> None:
    seconds, selection = context.late_seconds, context.selection
    if selection.hostfile is not None and len(selection.hosts()) > 1:
        selection = replace(selection, hostfile=selection.hostfile.with_one_rank_each())
    elif selection.hostfile is not None:
        selection = alone(selection, selection.hosts()[0])
    section.text = f"The last rank is {seconds:g} s late for an all_sum whose result the others compute with.\n\n"
    variants = {"ranks meet on the host before": {}, "without that": {"MLXDIST_MEET_AFTER": "0"}}
    for name, settings in variants.items():
        context.show(name)
        words = [late_rank.__name__, f"{seconds:g}"]
        found = run(name, selection, context.hosts, words, settings | {"MLXDIST_DEBUG": "warn"})
        # Without the meeting, macOS is expected to end the GPU work of the waiting ranks, so that run may fail.
        _add_run(section, found, may_fail=bool(settings))
        rows = [(r["rank"], r["late"], r["device"], r["seconds"], r["right"], r["error"]) for r in found.results]
        section.text += table(("rank", "late", "device", "seconds", "right", "error"), rows) + "\n"
        if found.results and all("cpu" in result["device"] for result in found.results):
            section.text += "MLX uses the CPU here: this says nothing about the GPU.\n\n"


def _add_run(section: Section, found: Run, may_fail: bool = False) -> None:
    """Adds a run to a section. ``may_fail``: its failure is no error of the section."""
    section.data.setdefault("runs", []).append(vars(found))
    settings = " ".join(f"{name}={value}" for name, value in found.settings.items())
    section.text += f"### {found.name}\n\n`{settings}`\n\n"
    if found.error and not may_fail:
        section.error = f"{section.error} {found.name}: {found.error}".strip()
    if found.error:
        section.text += f"**It has failed.** {found.error}\n\n"
        section.text += fenced("\n".join([*found.flight.get("findings", []), *found.flight.get("notes", [])])) + "\n"
        section.text += fenced("\n".join(_operations(found.flight))) + "\n"
    for result in found.results:
        section.text += f"{json.dumps(result)}\n\n"
    for title, lines in (("Verbs", found.trace), ("Other output", found.output)):
        if lines:
            section.text += f"{title}:\n\n{fenced(chr(10).join(lines))}\n"


def _operations(flight: dict[str, Any]) -> list[str]:
    return [
        f"rank {record['rank']}: error: {record['error']}; last operations: "
        + ", ".join(f"{operation['name']} #{operation['sequence']}" for operation in record["operations"])
        for record in flight.get("records", [])
    ]


SECTIONS = (
    Step("checks", "Checks of mlxdist doctor", _fill_checks, 600, 60),
    Step("installation", "Installation", _fill_installation, 120),
    Step("devices", "RDMA devices", _fill_devices, 10),
    Step("system", "What commands of the system print", _fill_system, 90),
    Step("soft", "Two ranks of each host, software provider", _fill_soft, 120, 120),
    Step("rdma", "RDMA, one run for each link", _fill_rdma, 900),
    Step("speed", "Latency and bandwidth", _fill_speed, 180),
    Step("late", "A rank that is late", _fill_late, 300),
)
