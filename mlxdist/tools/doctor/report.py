"""The results of the checks, as a table for people and as JSON for programs."""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .checks.job import Outlier, late_pairs, slow_pairs
from .cluster import Cluster
from .findings import Finding, Result, Verdict

__all__ = ["as_json", "print_problems", "print_report"]

_STYLES = {"ok": "green", "note": "cyan", "warn": "yellow", "fail": "bold red", "skip": "dim"}
_SHOWN_HOSTS = 4
_SHOWN_TEXTS = 3
_MATRIX_HOSTS = 16
_PROBLEMS = (Verdict.FAIL, Verdict.WARN)


def print_report(cluster: Cluster, results: Sequence[Result]) -> None:
    """Prints all checks; below them remedies, differences between hosts, and the matrix of pairs."""
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    console.print(_checks(cluster, results, console.width))
    _print_details(console, cluster, results)
    if cluster.job is not None:
        in_gigabytes = {pair: value / 1e9 for pair, value in cluster.job.bandwidth.items()}
        for title, values, digits, outliers in (
            ("Latency, us one way (8 bytes, median)", cluster.job.latency, 1, late_pairs(cluster)),
            ("Bandwidth, GB/s from row to column", in_gigabytes, 2, slow_pairs(cluster)),
        ):
            if values:
                console.print()
                console.print(_matrix(title, cluster.job.hosts, values, digits, outliers))
    console.print()
    console.print(_summary(cluster, results))


def print_problems(cluster: Cluster, results: Sequence[Result], stream: TextIO) -> None:
    """Prints the problems, if there are any, and a summary line."""
    console = Console(file=stream, width=None if stream.isatty() else 200, highlight=False)
    wrong = [result for result in results if result.verdict in _PROBLEMS]
    if wrong:
        console.print(_checks(cluster, wrong, console.width))
        _print_details(console, cluster, wrong)
        console.print()
    console.print(_summary(cluster, results))


def as_json(cluster: Cluster, results: Sequence[Result], failed: Sequence[str]) -> dict[str, Any]:
    checks = [
        {
            "check": result.check,
            "verdict": str(result.verdict),
            "findings": [asdict(finding) | {"differences": _differences(finding)} for finding in result.findings],
        }
        for result in results
    ]
    found: dict[str, Any] = {
        "verdict": str(_worst(results)),
        "hosts": cluster.names,
        "failed": list(failed),
        "checks": checks,
    }
    if cluster.soak is not None:
        steps = {"before": "health_before", "after": "health_after"}
        soak: dict[str, Any] = {when: cluster.responses.get(step, {}) for when, step in steps.items()}
        found |= {"soak": asdict(cluster.soak) | soak}
    if (job := cluster.job) is None:
        return found | {"job": None}
    rates = {pair: ports.rate for pair, ports in job.ports.items()}
    pairs = {"latency_us": job.latency, "bandwidth": job.bandwidth, "port_gigabits": rates}
    links = {
        name: [{"from": a, "to": b, "value": value} for (a, b), value in values.items()]
        for name, values in pairs.items()
    }
    return found | {"job": {"hosts": list(job.hosts), "ranks": job.ranks, "provider": job.provider} | links}


def _differences(finding: Finding) -> list[dict[str, Any]]:
    return [
        {"what": d.what, "values": [{"value": value, "hosts": list(hosts)} for value, hosts in d.values]}
        for d in finding.differences
    ]


def _checks(cluster: Cluster, results: Sequence[Result], width: int) -> Table:
    """A line for each check and verdict: hosts with equal results share one."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("check", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("hosts", overflow="fold", max_width=max(12, width // 4))
    table.add_column("what was found", overflow="fold", ratio=1)
    for result in results:
        name = result.check
        for verdict, hosts, text in _lines(cluster, result):
            table.add_row(name, Text(verdict, _STYLES[verdict]), Text(hosts), Text(text))
            name = ""
    return table


def _lines(cluster: Cluster, result: Result) -> list[tuple[Verdict, str, str]]:
    order = list(Verdict)
    lines: list[tuple[Verdict, str, str]] = []
    for verdict in sorted({f.verdict for f in result.findings}, key=order.index, reverse=True):
        alike: dict[str, list[Finding]] = {}
        for finding in result.findings:
            if finding.verdict is verdict:
                alike.setdefault(finding.what, []).append(finding)
        if verdict is Verdict.OK and len(alike) > 1:  # each host says something else, and all is well
            hosts = [name for findings in alike.values() for finding in findings for name in finding.hosts]
            texts = [f"{text} ({_name(cluster, f[0].hosts)})" for text, f in list(alike.items())[:_SHOWN_TEXTS]]
            more = [f"{len(alike) - _SHOWN_TEXTS} more"] if len(alike) > _SHOWN_TEXTS else []
            lines.append((verdict, _name(cluster, hosts), ", ".join(texts + more)))
            continue
        for text, findings in alike.items():
            lines.append((verdict, _where(cluster, findings), text))
    return lines


def _where(cluster: Cluster, findings: Sequence[Finding]) -> str:
    if all(finding.is_way for finding in findings):
        return ", ".join(" > ".join(finding.hosts) for finding in findings)
    return _name(cluster, [name for finding in findings for name in finding.hosts])


def _name(cluster: Cluster, hosts: Sequence[str]) -> str:
    if not hosts:
        return ""
    names = [name for name in cluster.names if name in hosts]
    missing = [name for name in cluster.names if name not in hosts]
    if not missing and len(names) > 1:
        return f"all {len(names)}"
    if len(missing) == 1 and len(names) > 2:
        return f"all but {missing[0]}"
    more = len(names) - _SHOWN_HOSTS
    return ", ".join(names[:_SHOWN_HOSTS]) + (f" and {more} more" if more > 0 else "")


def _print_details(console: Console, cluster: Cluster, results: Sequence[Result]) -> None:
    alike: dict[tuple[str, str, Verdict], list[Finding]] = {}
    for result in results:
        for finding in result.findings:
            if finding.remedy:
                alike.setdefault((result.check, finding.remedy, finding.verdict), []).append(finding)
    if alike:
        console.print("\n[bold]What to do[/bold]")
    for (check, remedy, verdict), findings in alike.items():
        where = _where(cluster, findings)
        line = Text.assemble((check, _STYLES[verdict]), f" ({where})" if where else "", f": {remedy}")
        console.print(line, soft_wrap=not console.is_terminal)
    differences = dict.fromkeys(d for r in results for f in r.findings for d in f.differences)
    if differences:
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("differs", overflow="fold")
        table.add_column("hosts", overflow="fold")
        table.add_column("value", overflow="fold", ratio=1)
        for found in differences:
            what = found.what
            for value, hosts in found.values:
                table.add_row(Text(what), _name(cluster, hosts), Text(value))
                what = ""
        console.print()
        console.print(table)


def _matrix(
    title: str,
    hosts: Sequence[str],
    values: Mapping[tuple[str, str], float],
    digits: int,
    outliers: Mapping[tuple[str, str], Outlier],
) -> Table:
    """A matrix with a row for each sender. An outlier is marked with its share of what it should be."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    table.add_column("", overflow="fold")
    shown = hosts[:_MATRIX_HOSTS]
    for host in shown:
        table.add_column(host, justify="right", overflow="fold")
    for a in shown:
        cells = []
        for b in shown:
            value = values.get((a, b))
            if value is None:
                cells.append(Text("-", "dim"))
                continue
            text, outlier = f"{value:.{digits}f}", outliers.get((a, b))
            cells.append(Text(f"{text} ({outlier.share:.0%})", "yellow") if outlier else Text(text))
        table.add_row(a, *cells)
    if len(hosts) > len(shown):
        table.caption = f"{len(hosts) - len(shown)} more hosts: --json has all"
    return table


def _worst(results: Sequence[Result]) -> Verdict:
    found = {result.verdict for result in results}
    return next((v for v in (Verdict.FAIL, Verdict.WARN, Verdict.NOTE) if v in found), Verdict.OK)


def _summary(cluster: Cluster, results: Sequence[Result]) -> Text:
    counts = Counter(result.verdict for result in results)
    parts = [f"{counts[verdict]} {verdict}" for verdict in Verdict if counts[verdict]]
    hosts = f"{len(cluster.hosts)} hosts" if len(cluster.hosts) > 1 else cluster.names[0]
    worst = _worst(results)
    return Text.assemble("mlxdist doctor: ", (str(worst), _STYLES[worst]), f", {hosts}, checks: {', '.join(parts)}")
