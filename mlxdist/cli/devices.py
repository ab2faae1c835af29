"""The command line of `mlxdist devices`."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mlxdist.base.environment import Environment
from mlxdist.base.errors import ResourceError
from mlxdist.base.gpus import visible_gpus
from mlxdist.cluster.facts.collect import HostFacts, collect_here
from mlxdist.launch.jobs import list_jobs
from mlxdist.runtime.devices.device import REAL_PROVIDER, Device
from mlxdist.runtime.devices.diagnosis import Finding, Verdict, diagnose
from mlxdist.runtime.devices.listing import Listing, list_apart
from mlxdist.runtime.devices.probe_cache import keep_probes

__all__ = ["devices"]

_PROVIDERS = ("soft", "ibverbs", "librdma")
_RECEPTACLE = ("number", "speed", "connected", "interface")
# Verdicts on a device that can be used all the same.
_HARMLESS = (Verdict.OK, Verdict.SLOW_CABLE, Verdict.NO_IPV4, Verdict.BRIDGED)
_WITHOUT_RDMA = (
    "Ranks use shared memory within a host and TCP between hosts (provider soft): `mlxdist devices --provider soft`"
)


@click.command()
@click.option(
    "--provider",
    type=click.Choice([*_PROVIDERS, "all"]),
    help=f"Whose devices: a library's, those of the software provider, or all.  [default: {REAL_PROVIDER}]",
)
@click.option(
    "--probe", is_flag=True, help="Find the limits of each active device by trying; no job may run meanwhile."
)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.option(
    "--timeout",
    "seconds",
    type=click.FloatRange(0.1, 600),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="Time for the driver to respond: some calls never return for a port that is down.",
)
def devices(provider: str | None, probe: bool, as_json: bool, seconds: float) -> None:
    """Show the RDMA devices of this machine: ports, addresses, limits, what is wrong, and what to do. And NVIDIA GPUs.

    \b
        mlxdist devices                     RDMA devices
        mlxdist devices --provider soft     those that work without hardware
        mlxdist devices --probe             with limits found by trying, which jobs then plan by

    The exit status is 1 if RDMA was requested by name (--provider ibverbs, librdma) and no device of it can be used.
    """
    profile = Environment.read().soft_profile
    if probe:
        _check_no_job()
    requested = (REAL_PROVIDER, "soft") if provider == "all" else (provider or REAL_PROVIDER,)
    listings = [list_apart(name, profile, seconds, pyverbs=True, probe=probe) for name in requested]
    facts = collect_here()
    report = [(listing, _diagnose(listing, facts)) for listing in listings]
    note = _keep(listings) if probe else ""
    if as_json:
        click.echo(json.dumps(_as_json(report, facts), indent=2))
        if note:
            click.echo(note, err=True)
    else:
        _print(report, note)
    sys.exit(1 if provider in ("ibverbs", "librdma") and not any(map(_is_usable, *zip(*report))) else 0)


def _check_no_job() -> None:
    """Raises ResourceError: a job runs here, whose ranks may need a queue pair while the probe has them all."""
    if jobs := [job.name for job in list_jobs()]:
        raise ResourceError(
            f"job {jobs[0]} runs on this machine, and a probe takes every queue pair of a device for a moment: probe "
            f"when it has ended, or end it with `mlxdist stop {jobs[0]}`"
        )


def _keep(listings: Sequence[Listing]) -> str:
    """Keeps what a probe has found. Returns a note that says where, or why not."""
    try:
        path = keep_probes(device for listing in listings for device in listing.devices)
    except (OSError, ResourceError) as error:
        return f"What the probe has found is not kept: {error}."
    return "" if path is None else f"What the probe has found is kept in {path} until this machine restarts."


def _diagnose(listing: Listing, facts: HostFacts) -> list[Finding]:
    if listing.provider != REAL_PROVIDER:  # nothing that this machine says is about it
        return [Finding(Verdict.NO_LIBRARY, "", listing.error)] if listing.error else []
    return diagnose(facts, listing.devices, listing.error)


def _is_usable(listing: Listing, findings: Sequence[Finding]) -> bool:
    hindered = {finding.subject for finding in findings if finding.verdict not in _HARMLESS}
    return "" not in hindered and any(device.name not in hindered for device in listing.devices)


def _print(report: Sequence[tuple[Listing, list[Finding]]], note: str) -> None:
    console = Console(width=None if sys.stdout.isatty() else 180, highlight=False, markup=False)
    found = [device for listing, _ in report for device in listing.devices]
    for table in (_ports(found), _addresses(found), _limits(found)) if found else ():
        console.print(table)
    if any(device.found_in_words() for device in found):
        console.print(_probes(found))
    if note:
        console.print(note, soft_wrap=True)
    for gpu in visible_gpus():
        console.print(f"GPU {gpu}", soft_wrap=True)
    for listing, findings in report:
        for finding in findings:
            console.print(_line(listing, finding), soft_wrap=True)
    if not any(device.provider == "soft" or device.is_active for device in found):
        console.print(_WITHOUT_RDMA, soft_wrap=True)


def _line(listing: Listing, finding: Finding) -> Text:
    style = "green" if finding.verdict is Verdict.OK else "yellow" if finding.verdict in _HARMLESS else "red"
    where = "" if finding.subject else f" ({listing.provider})"
    return Text.assemble((finding.verdict, style), f"{where}: {finding}")


def _table(title: str, left: Sequence[str], right: Sequence[str] = ()) -> Table:
    table = Table(title=title, title_justify="left")
    for column in left:
        table.add_column(column, overflow="fold")
    for column in right:
        table.add_column(column, justify="right", overflow="fold")
    return table


def _ports(found: Sequence[Device]) -> Table:
    table = _table("Ports", ("device", "provider", "state", "link", "interface"), ("Gb/s", "MTU"))
    for device in found:
        state = Text(device.state or "error", "green" if device.is_active else "red")
        speed = "" if device.speed is None else f"{device.speed:g}"
        link = device.link_layer if device.transport in ("", device.link_layer) else _link(device)
        mtu = "" if device.active_mtu is None else str(device.active_mtu)
        table.add_row(device.name, device.provider, state, link, ", ".join(device.interfaces), speed, mtu)
    return table


def _link(device: Device) -> str:
    return device.transport if device.link_layer in ("", "unspecified") else f"{device.link_layer} ({device.transport})"


def _addresses(found: Sequence[Device]) -> Table:
    table = _table("Addresses (GIDs)", ("device", "index", "type", "form", "address", "interface"))
    for device in found:
        for gid in device.gids:
            table.add_row(device.name, str(gid.index), gid.type, gid.form, str(gid), gid.interface)
    return table


def _limits(found: Sequence[Device]) -> Table:
    return _kinds("Limits", [(device.name, device.limits) for device in found], _count)


def _probes(found: Sequence[Device]) -> Table:
    return _kinds("Found by a probe", [(device.name, device.found_in_words()) for device in found], str)


def _kinds(title: str, of: Sequence[tuple[str, Mapping[str, Any]]], show: Callable[[Any], str]) -> Table:
    """A table with one column per set of equal values: cards have many ports, and terminals few columns."""
    names = list(dict.fromkeys(name for _, values in of for name in values))
    kinds: dict[tuple, list[str]] = {}
    for device, values in of:
        if values:
            kinds.setdefault(tuple(values.get(name) for name in names), []).append(device)
    table = _table(title, ("",), ["\n".join(devices) for devices in kinds.values()])
    for row in zip(names, *kinds):
        table.add_row(row[0], *("" if value is None else show(value) for value in row[1:]))
    return table


def _count(limit: int) -> str:
    return "none" if limit >= 2**63 else str(limit)


def _as_json(report: Sequence[tuple[Listing, list[Finding]]], facts: HostFacts) -> dict[str, Any]:
    return {
        "providers": [
            {
                "provider": listing.provider,
                "listed_by": listing.source,
                "error": listing.error,
                "usable": _is_usable(listing, findings),
                "devices": [device.to_json() for device in listing.devices],
                "findings": [vars(finding) for finding in findings],
            }
            for listing, findings in report
        ],
        "machine": {
            "system": facts.system,
            "architecture": facts.architecture,
            "macos": facts.macos and facts.release,
            "rdma_ctl": facts.rdma_ctl,
            "thunderbolt": [{name: getattr(port, name) for name in _RECEPTACLE} for port in facts.receptacles],
            "bridged": sorted({member for interface in facts.interfaces for member in interface.members}),
            "kernel_rdma": facts.kernel_rdma,
            "memlock": facts.memlock,
            "gpus": [vars(gpu) for gpu in visible_gpus()],
        },
    }
