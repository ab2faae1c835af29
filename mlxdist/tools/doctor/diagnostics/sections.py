"""The sections of a report, in their order. Each is filled step by step: one that is stopped keeps what it has."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from mlxdist.base.errors import ResourceError
from mlxdist.base.own_python import own_module
from mlxdist.cluster.hostfile.options import HostSelection
from mlxdist.cluster.setup.survey import SCRIPT, read_parts
from mlxdist.cluster.ssh.rpc_client import CallError, Connections
from mlxdist.cluster.ssh.ssh import run_everywhere
from mlxdist.launch.run_job import run_command

from ..cluster import Cluster, Question
from ..exclude import failed_hosts
from ..findings import Result
from ..job import place_ranks
from ..report import as_json
from . import late_rank
from .cables import alone, cables_of
from .document import Section, fenced, table
from .runs import Run, probe, run

__all__ = ["SECTIONS", "Context", "Step"]

LATE_SECONDS = 8.0  # macOS ends GPU work that waits for about 5 s
# Of what the script of `mlxdist config` prints. Names of network services, such as those of a VPN, are private.
_COMMANDS = ("system", "rdma_ctl", "devices", "ports", "thunderbolt", "interfaces")
_BENCH = ["bench", "collectives", "--json", "--level", "engine", "--op", "send_recv,all_sum"]
_BENCH += ["--sizes", "8,4KiB,64KiB,1MiB", "--rounds", "5"]
_BENCH_SECONDS = 120.0
_PRIVATE_FACTS = ("identity",)


@dataclass
class Context:
    """``say``: shows what is being done. ``diagnose``: the checks of `mlxdist doctor`. ``cluster``: their answers.

    ``own_names``: by which the hosts know themselves, which are private.
    """

    chosen: HostSelection
    question: Question
    diagnose: Callable[..., tuple[Cluster, list[Result]]]
    say: Callable[[str], None] = lambda doing: None
    late_seconds: float = LATE_SECONDS
    cluster: Cluster | None = None
    own_names: list[str] = field(default_factory=list)

    @property
    def hosts(self) -> list[str]:
        return [host.name for host in self.chosen.hosts()]


@dataclass(frozen=True)
class Step:
    """``seconds``: after which the section is given up, for one host and for each more."""

    name: str
    title: str
    fill: Callable[[Section, Context], None]
    seconds: float
    seconds_a_host: float = 0.0


def _fill_checks(section: Section, context: Context) -> None:
    say = lambda host, doing: context.say(f"{host}: {doing}" if doing else "")  # noqa: E731
    cluster, results = context.diagnose(context.chosen, context.question, say)
    context.cluster = cluster
    rows = [
        (result.check, finding.verdict, ", ".join(finding.hosts), finding.what, finding.remedy)
        for result in results
        for finding in result.findings
    ]
    section.text = table(("check", "verdict", "hosts", "what was found", "what to do"), rows)
    for host, facts in cluster.each("facts"):
        section.text += f"\n### {host}\n\n" + table(("what", "version"), list(facts["versions"].items()))
    for host, crossing in cluster.each("crossing"):
        section.text += f"\nGPU crossing on {host}: {_crossing(crossing)}\n"
    section.data = as_json(cluster, results, failed_hosts(cluster.names, results))
    told = {step: dict(cluster.each(step)) for step in cluster.told if step != "listen"}
    told["facts"] = {host: _without_private(facts) for host, facts in cluster.each("facts")}
    troubles = {step: {host: trouble.text for host, trouble in of.items()} for step, of in cluster.troubles.items()}
    section.data |= {"told": told, "troubles": troubles}


def _without_private(facts: dict[str, Any]) -> dict[str, Any]:
    """Command lines of other jobs may have anything in them."""
    running = [{"job": job["job"], "ranks": job["ranks"]} for job in facts["jobs"]["running"]]
    kept = {name: value for name, value in facts.items() if name not in _PRIVATE_FACTS}
    return kept | {"jobs": facts["jobs"] | {"running": running}}


def _crossing(found: dict[str, Any]) -> str:
    times = [f"{value:.0f} us with MLX_METAL_FAST_SYNCH={name}" for name, value in found["microseconds"].items()]
    return "; ".join([*times, found["skipped"], found["error"]]).strip("; ") or "not measured"


def _fill_installation(section: Section, context: Context) -> None:
    with Connections(context.hosts, context.chosen.ssh_config) as connections:
        answers = connections.call("doctor.installation", seconds=60.0)
    found = {name: answer for name, answer in zip(context.hosts, answers) if not isinstance(answer, CallError)}
    context.own_names += [answer.pop("host") for answer in found.values()]
    names = dict.fromkeys(name for answer in found.values() for name in answer)
    rows = [[name, *(answer.get(name, "") for answer in found.values())] for name in names]
    section.text, section.data = table(["", *found], rows), found
    section.error = "; ".join(str(answer) for answer in answers if isinstance(answer, CallError))


def _fill_devices(section: Section, context: Context) -> None:
    for host, found in _devices_of(context).items():
        rows = [
            (
                device["name"],
                device["state"] or device["error"],
                device["transport"] or device["link_layer"],
                device["speed"] or "",
                device["active_mtu"] or "",
                ", ".join(f"{gid['index']}: {gid['gid']} {gid['interface']}" for gid in device["gids"]),
                ", ".join(f"{name} {value}" for name, value in device["limits"].items()),
            )
            for device in found
        ]
        columns = ("device", "state", "link", "Gb/s", "MTU", "GIDs", "limits")
        section.text += f"\n### {host}\n\n" + (table(columns, rows) if rows else "There is no RDMA device.\n")
        told = context.cluster.told["rdma"][host]
        findings = [(f["verdict"], f["subject"], f["what"], f["remedy"]) for f in told["findings"]]
        section.text += "\n" + table(("verdict", "device", "what was found", "what to do"), findings)
        section.data[host] = told


def _devices_of(context: Context) -> dict[str, list[dict[str, Any]]]:
    if context.cluster is None:
        raise ResourceError("the checks, which list the devices, have not come to an end")
    return {host: told["devices"] for host, told in context.cluster.each("rdma")}


def _fill_system(section: Section, context: Context) -> None:
    for answer in run_everywhere(context.hosts, ["sh", "-s"], context.chosen.ssh_config, input=SCRIPT, seconds=60.0):
        parts = read_parts(answer.output)
        section.data[answer.name] = {name: parts.get(name, "") for name in _COMMANDS}
        section.text += f"\n### {answer.name}\n\n"
        for name in _COMMANDS:
            if parts.get(name, "").strip():
                section.text += f"{name}:\n\n{fenced(parts[name])}\n"
        if "end" not in parts:
            section.error += f"{answer.name}: {answer.last_words or 'it has not answered all questions'} "


def _fill_soft(section: Section, context: Context) -> None:
    for host in context.chosen.hosts():
        context.say(host.name)
        settings = {"MLXDIST_PROVIDER": "soft"}
        _add_run(section, probe(host.name, alone(context.chosen, host), [host.name], settings))


def _fill_rdma(section: Section, context: Context) -> None:
    cables, notes = cables_of(context.chosen, _devices_of(context))
    section.text = "".join(f"{note}\n\n" for note in notes)
    section.data["notes"] = notes
    for cable in cables:
        context.say(cable.name)
        found = probe(cable.name, cable.chosen, cable.hosts, cable.settings)
        if cable.is_loop:
            section.text += "Both ranks use one device of one host. A refusal at RTR is no fault of this host.\n\n"
        _add_run(section, found)


def _fill_speed(section: Section, context: Context) -> None:
    with place_ranks(context.chosen, context.hosts) as placement:
        command = own_module("mlxdist", *_BENCH, *placement.options)
        status, output, errors = run_command(command, {**os.environ, **placement.settings}, _BENCH_SECONDS)
    section.text = f"`{shlex.join(['mlxdist', *_BENCH, *placement.shown])}`\n\n"
    if status:
        section.error = f"exit status {status}"
        section.text += fenced(errors)
    if output.lstrip().startswith("{"):
        section.data = json.loads(output)
        rows = [
            (case["operation"], case["bytes"], case["algorithm"], *_measured(case), case["wrong"])
            for case in section.data["cases"]
        ]
        section.text += f"{section.data['ranks']} ranks, {section.data['provider']}\n\n"
        section.text += table(("operation", "bytes", "algorithm", "median, us", "GB/s", "wrong elements"), rows)


def _measured(case: dict[str, Any]) -> tuple[str, str]:
    if case["refused"]:
        return case["refused"], ""
    return f"{case['microseconds']['median']:.1f}", f"{case['busbw']:.3f}"


def _fill_late(section: Section, context: Context) -> None:
    seconds, chosen = context.late_seconds, context.chosen
    if chosen.hostfile is not None and len(chosen.hosts()) > 1:
        chosen = replace(chosen, hostfile=chosen.hostfile.with_one_rank_each())
    elif chosen.hostfile is not None:
        chosen = alone(chosen, chosen.hosts()[0])
    section.text = f"The last rank is {seconds:g} s late for an all_sum whose result the others compute with.\n\n"
    variants = {"ranks meet on the host before": {}, "without that": {"MLXDIST_MEET_AFTER": "0"}}
    for name, settings in variants.items():
        context.say(name)
        words = [late_rank.__name__, f"{seconds:g}"]
        found = run(name, chosen, context.hosts, words, settings | {"MLXDIST_DEBUG": "warn"}, late_rank.MARK)
        # Without the meeting macOS is expected to end the GPU work of the ranks that wait.
        _add_run(section, found, may_fail=bool(settings))
        rows = [(r["rank"], r["late"], r["device"], r["seconds"], r["right"], r["error"]) for r in found.results]
        section.text += table(("rank", "late", "device", "seconds", "right", "error"), rows) + "\n"
        if found.results and all("cpu" in result["device"] for result in found.results):
            section.text += "MLX uses the CPU here: this says nothing about the GPU.\n\n"


def _add_run(section: Section, found: Run, may_fail: bool = False) -> None:
    """``may_fail``: that says nothing against the section."""
    section.data.setdefault("runs", []).append(vars(found))
    settings = " ".join(f"{name}={value}" for name, value in found.settings.items())
    section.text += f"### {found.name}\n\n`{settings}`\n\n"
    if found.error and not may_fail:
        section.error = f"{section.error} {found.name}: {found.error}".strip()
    if found.error:
        section.text += f"**It has failed.** {found.error}\n\n"
        section.text += fenced("\n".join([*found.flight.get("sentences", []), *found.flight.get("notes", [])])) + "\n"
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
    Step("rdma", "RDMA, one run for each cable", _fill_rdma, 900),
    Step("speed", "Latency and bandwidth", _fill_speed, 180),
    Step("late", "A rank that is late", _fill_late, 300),
)
