"""The command line of `mlxdist config`."""

from __future__ import annotations

import json
import os
import sys
from ipaddress import IPv4Network
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import InvalidArgument
from ..hostfile.options import Chosen, host_options

if TYPE_CHECKING:  # what it imports is loaded when the command is run
    from .addresses import Link
    from .ethernet import Choice
    from .steps import Step
    from .survey import Survey
    from .topology import Topology

__all__ = ["config"]

_RANGE = "10.111.0.0/16"  # RANGE of addresses.py


@click.command()
@host_options
@click.option(
    "--over",
    type=click.Choice(["thunderbolt", "ethernet"]),
    default="thunderbolt",
    show_default=True,
    help="Through cables from host to host, with RDMA where they have it; or the network that all are in.",
)
@click.option(
    "--output",
    metavar="PATH",
    default="rmlx-hosts.json",
    show_default=True,
    help="The hostfile to write; - for standard output.",
)
@click.option("--output-hostfile", "output", metavar="PATH", hidden=True)  # MLX's name for it
@click.option("--auto-setup/--no-auto-setup", help="Run the commands that are shown. They need `sudo -n` there.")
@click.option("--dry-run", is_flag=True, help="Look and show; run and write nothing.")
@click.option("--verify", "verifying", is_flag=True, help="Afterwards look whether each end of a cable reaches the other.")
@click.option("--undo", is_flag=True, help="Take back what --auto-setup did, as rmlx-hosts.undo.json has it.")
@click.option(
    "--backend",
    type=click.Choice(["mlxdist", "ring", "jaccl", "jaccl-ring"]),
    default="mlxdist",
    show_default=True,
    help="What the hostfile is for; those of MLX need a ring or a mesh.",
)
@click.option("--env", "envs", metavar="NAME=VALUE", multiple=True, help="A variable for all ranks. May be repeated.")
@click.option("--cable", "named", metavar="A:IF=B:IF", multiple=True, help="A cable that no host tells of, as on Linux.")
@click.option("--range", "within", default=_RANGE, show_default=True, help="Addresses of cables are taken from here.")
@click.option("--without-bridge", is_flag=True, help="Take ports with a cable out of the Thunderbolt Bridge.")
@click.option("--ignore-unreachable", is_flag=True, help="Go on without hosts that do not answer.")
@click.option("--dot", metavar="FILE", is_flag=False, flag_value="-", help="Write the picture as DOT; no FILE: print it.")
@click.option("--svg", metavar="FILE", help="Write the picture as SVG.")
@click.option("--json", "as_json", is_flag=True, help="Print what was found as JSON.")
def config(chosen: Chosen, output: str, undo: bool, named: tuple[str, ...], within: str, **options: Any) -> None:
    """Find the cables between hosts, give their ends addresses, and write the hostfile.

    \b
        mlxdist config --hosts studio-a,studio-b --dry-run            look only
        mlxdist config --hosts studio-a,studio-b --auto-setup --verify
        mlxdist config --hosts node0,node1 --over ethernet
        mlxdist config --undo                                         take the set-up back

    Every command is shown with its host before it is run, and none is run without --auto-setup. Nothing of mlxdist has
    to be installed on the hosts; ssh has to reach them without a password.

    The exit status is 1 if a host does not answer, hosts are not joined, a command fails, or --verify finds something.
    """
    try:
        if undo:
            sys.exit(_undo(chosen, output, options["dry_run"]))
        if chosen.hostfile is None:
            raise click.UsageError("Give --hosts A,B or --hostfile FILE.")
        sys.exit(_Run(chosen, output, named, _network(within), **options).run())
    except InvalidArgument as error:
        raise click.ClickException(str(error)) from None


class _Run:
    """One look at the hosts, and what follows from it. ``status``: the exit status so far."""

    def __init__(
        self,
        chosen: Chosen,
        output: str,
        named: tuple[str, ...],
        within: IPv4Network,
        *,
        over: str,
        auto_setup: bool,
        dry_run: bool,
        verifying: bool,
        backend: str,
        envs: tuple[str, ...],
        without_bridge: bool,
        ignore_unreachable: bool,
        dot: str | None,
        svg: str | None,
        as_json: bool,
    ) -> None:
        from ..hostfile.hosts import check_variable

        for setting in envs:
            if problem := check_variable(setting):
                raise click.UsageError(f"--env: {problem}")
        if over == "ethernet" and backend not in ("mlxdist", "ring"):
            raise click.UsageError(f"--backend {backend} needs cables: --over thunderbolt.")
        if auto_setup and dry_run:
            raise click.UsageError("--auto-setup runs commands, and --dry-run runs none.")
        self._chosen, self._output, self._named, self._within = chosen, output, named, within
        self._over, self._auto_setup, self._dry_run, self._verifying = over, auto_setup, dry_run, verifying
        self._backend, self._envs, self._without_bridge = backend, envs, without_bridge
        self._ignore_unreachable, self._dot, self._svg, self._as_json = ignore_unreachable, dot, svg, as_json
        self._status = 0

    def run(self) -> int:
        surveys = self._survey()
        if self._over == "thunderbolt":
            self._cables(surveys)
        else:
            self._ethernet(surveys)
        return self._status

    def _survey(self) -> list[Survey]:
        from .survey import survey_hosts

        names = [host.name for host in self._chosen.hosts()]
        if sys.stderr.isatty():
            click.echo(f"asking {len(names)} host{'s' * (len(names) != 1)} ...", err=True)
        surveys, wrong = survey_hosts(names, self._chosen.reach)
        for text in wrong.values():
            self._warn(text)
        if wrong and not self._ignore_unreachable or not surveys:
            raise InvalidArgument(
                f"{len(wrong)} of {len(names)} hosts did not answer; --ignore-unreachable goes on without them"
            )
        return surveys

    def _cables(self, surveys: list[Survey]) -> None:
        from .addresses import assign_addresses
        from .ethernet import choose_addresses
        from .result import make_hostfile, rdma_notes
        from .steps import plan_steps
        from .topology import Shape, build_topology
        from .verify import checks_of_links

        linux = [survey.name for survey in surveys if not survey.is_mac]
        if linux and not self._named:
            raise InvalidArgument(
                f"{', '.join(linux)}: Linux does not tell which cable leads where; name each, such as --cable "
                f"{surveys[0].name}:eth1={surveys[-1].name}:eth1, or use --over ethernet"
            )
        topology = build_topology(surveys, self._named)
        links = assign_addresses(surveys, topology, self._within)
        steps = plan_steps(surveys, links, self._without_bridge)
        own = [frozenset(c.end(i).interface for c in topology.cables if i in c.pair) for i in range(len(surveys))]
        choices = choose_addresses(surveys, own)
        hostfile = make_hostfile(
            surveys, topology, links, choices, backend=self._backend, envs=self._envs, slots=self._slots(surveys)
        )
        if not self._as_json:
            self._show(topology, links, surveys)
        self._draw(topology)
        for note in (*topology.notes, *rdma_notes(surveys, topology), *_bridges(surveys, links, self._without_bridge)):
            self._warn(note)
        if topology.shape is Shape.APART:
            self._warn("not all hosts are joined by cables; those that are not use the network")
            self._status = 1
        failed = self._set_up(surveys, steps)
        if self._verifying and not failed:
            self._verify(checks_of_links(surveys, links))
        self._finish(surveys, choices, hostfile, topology, links, steps)

    def _ethernet(self, surveys: list[Survey]) -> None:
        from ..hostfile.hosts import Host, Hostfile
        from .ethernet import choose_addresses
        from .verify import checks_of_addresses

        if self._named or self._dot or self._svg or self._without_bridge:
            raise InvalidArgument("--cable, --dot, --svg and --without-bridge are for cables: --over thunderbolt")
        choices = choose_addresses(surveys)
        for survey, choice in zip(surveys, choices):
            if not self._as_json:
                click.echo(f"{survey.name}: {choice or 'no address'}", err=self._output == "-")
            if choice is None:
                self._warn(f"{survey.name} has no IPv4 address; connect it to the network")
                self._status = 1
            elif choice.wireless:
                self._warn(f"{survey.name} is reached by Wi-Fi, which is slow; connect it by cable to where the others are")
        if len({choice.address.network for choice in choices if choice}) > 1:
            self._warn("the hosts are in different networks; between them there must be a router (--verify looks)")
        slots = self._slots(surveys)
        hosts = tuple(
            Host(survey.name, slots[i], (str(choice.address.ip),) if choice else ())
            for i, (survey, choice) in enumerate(zip(surveys, choices))
        )
        if self._verifying:
            self._verify(checks_of_addresses(surveys, choices))
        self._finish(surveys, choices, Hostfile(hosts, self._backend, self._envs), None, [], [])

    def _slots(self, surveys: list[Survey]) -> list[int]:
        slots = {host.name: host.slots for host in self._chosen.hosts()}
        return [slots[survey.name] for survey in surveys]

    def _show(self, topology: Topology, links: list[Link], surveys: list[Survey]) -> None:
        from rich.console import Console

        from .drawing import as_text

        if self._dot == "-":
            return
        to_stderr = self._output == "-"
        stream = sys.stderr if to_stderr else sys.stdout
        console = Console(file=stream, width=None if stream.isatty() else 200, highlight=False, markup=False)
        console.print(as_text(topology), soft_wrap=True)
        ring = f": {', '.join(topology.names[host] for host in topology.ring)}" if topology.shape == "ring" else ""
        cables = len(topology.cables)
        count = f"{cables} cable{'s' * (cables != 1)}"
        console.print(f"{count}, {topology.shape}{ring}", soft_wrap=True)
        for line in topology.advice():
            console.print(line, soft_wrap=True)
        for link in links:
            a, b = (f"{topology.names[host]} {link.address(host)}" for host in link.cable.pair)
            console.print(f"{a} - {b}{' (there already)' if link.kept else ''}", soft_wrap=True)

    def _draw(self, topology: Topology) -> None:
        from .drawing import as_dot, as_svg

        if self._dot == "-":
            click.echo(as_dot(topology), nl=False)
        for path, draw in ((self._dot if self._dot != "-" else None, as_dot), (self._svg, as_svg)):
            if path and not self._dry_run:
                _write(path, draw(topology))

    def _set_up(self, surveys: list[Survey], steps: list[Step]) -> bool:
        """Whether something failed."""
        from .undo import UndoFile, run_steps

        if not self._auto_setup:
            if steps and not self._as_json:
                self._say("To be run" + ("" if self._dry_run else " (--auto-setup does it)") + ":")
            for step in steps if not self._as_json else ():
                self._say(f"  {step.host}: {step}")
            return False
        locked = [survey.name for survey in surveys if not survey.root and not survey.sudo]
        for name in locked:
            mine = [str(step) for step in steps if step.host == name]
            if mine:
                self._warn(f"{name} asks for a password before sudo; type: {_by_hand(self._chosen.ssh, name, mine)}")
        steps_now = [step for step in steps if step.host not in locked]
        undo = UndoFile.beside(self._output if self._output != "-" else "rmlx-hosts.json")

        def remember(step: Step) -> None:
            if step.undone:
                undo.add(step.undone)

        def forget(step: Step) -> None:
            if step.undone:
                undo.remove(step.undone)

        errors = run_steps(steps_now, self._chosen.reach, self._say, before=remember, failed=forget)
        for error in errors:
            self._warn(error)
        if steps_now and undo.steps:
            self._say(f"`mlxdist config --undo` takes this back ({undo.path})")
        failed = bool(errors) or len(steps_now) < len(steps)
        self._status |= failed
        return failed

    def _verify(self, checks: list) -> None:
        from .verify import verify

        if self._dry_run:
            return
        problems = verify(checks, self._chosen.reach)
        for problem in problems:
            self._warn(problem)
        self._say(f"{len(checks) - len(problems)} of {len(checks)} ways work")
        self._status |= bool(problems)

    def _finish(
        self,
        surveys: list[Survey],
        choices: list[Choice | None],
        hostfile: Any,
        topology: Topology | None,
        links: list[Link],
        steps: list[Step],
    ) -> None:
        from ..hostfile.writing import write

        text = write(hostfile, "json")
        if self._as_json:
            click.echo(json.dumps(_plain(surveys, choices, topology, links, steps, json.loads(text)), indent=2))
        elif self._output == "-" and self._dot != "-":
            click.echo(text, nl=False)
        if self._dry_run or self._output == "-" or self._dot == "-":
            return
        _write(self._output, text)
        self._say(f"wrote {self._output}; next: mlxdist doctor --hostfile {self._output}")

    def _say(self, text: str) -> None:
        click.echo(text, err=self._as_json or self._output == "-" or self._dot == "-")

    def _warn(self, text: str) -> None:
        click.secho(text, fg="yellow", err=True)


def _undo(chosen: Chosen, output: str, dry_run: bool) -> int:
    """What is taken back leaves the file, so that after a failure the rest can be tried again."""
    from .undo import UndoFile, run_steps

    undo = UndoFile.beside(output)
    if not undo.steps:
        raise InvalidArgument(f"there is no {undo.path}: nothing was set up, or it was taken back already")
    steps = undo.steps[::-1]
    if dry_run:
        for step in steps:
            click.echo(f"{step.host}: {step}")
        return 0
    errors = run_steps(steps, chosen.reach, click.echo, after=undo.remove)
    for error in errors:
        click.secho(error, fg="yellow", err=True)
    if errors:
        click.secho(f"what is left stands in {undo.path}; run this again", fg="yellow", err=True)
    return int(bool(errors))


def _bridges(surveys: list[Survey], links: list[Link], without: bool) -> list[str]:
    notes = []
    for host, survey in enumerate(surveys):
        ends = [link.cable.end(host).interface for link in links if host in link.cable.pair]
        bridged = [end for end in ends if survey.bridge_of(end)]
        if bridged and not without:
            notes.append(
                f"{survey.name}: {', '.join(bridged)} stay in {survey.bridge_of(bridged[0])} (Thunderbolt Bridge), which "
                "works with addresses of their own; if RDMA then fails with errno 22, run this with --without-bridge"
            )
        elif bridged:
            notes.append(
                f"{survey.name}: macOS puts {', '.join(bridged)} back into {survey.bridge_of(bridged[0])} at the next "
                "start, unless the bridge is removed in System Settings > Network > Manage Virtual Interfaces"
            )
    return notes


def _by_hand(ssh: tuple[str, ...], name: str, commands: list[str]) -> str:
    import shlex

    from ..remote.ssh import is_this_machine

    line = " && ".join(commands)
    return line if is_this_machine(name) else shlex.join([*ssh, "-t", name, line])


def _plain(
    surveys: list[Survey],
    choices: list[Choice | None],
    topology: Topology | None,
    links: list[Link],
    steps: list[Step],
    hostfile: dict,
) -> dict:
    plain: dict[str, Any] = {
        "hosts": [
            {"name": s.name, "system": s.system, "address": choice and str(choice.address), "rdma_ctl": s.rdma_ctl}
            | {"interface": choice and choice.interface, "wireless": bool(choice and choice.wireless)}
            for s, choice in zip(surveys, choices)
        ]
    }
    if topology is not None:
        plain["shape"] = topology.shape.value
        plain["missing"] = [[topology.names[a], topology.names[b]] for a, b in topology.missing]
        plain["notes"] = list(topology.notes)
        addresses = {link.cable: link for link in links}
        plain["cables"] = [
            {
                "ends": [
                    {
                        "host": topology.names[end.host],
                        "port": end.port,
                        "interface": end.interface,
                        "address": str(addresses[cable].address(end.host)) if cable in addresses else None,
                    }
                    for end in (cable.a, cable.b)
                ],
                "gbps": cable.speed,
                "rdma": cable.rdma,
            }
            for cable in topology.cables
        ]
        plain["steps"] = [{"host": step.host, "command": step.words} for step in steps]
    return plain | {"hostfile": hostfile}


def _network(text: str) -> IPv4Network:
    try:
        return IPv4Network(text)
    except ValueError as error:
        raise click.UsageError(f"--range {text}: {error}; write it as {_RANGE}") from None


def _write(path: str, text: str) -> None:
    """A hostfile that is replaced is kept beside the new one."""
    from .undo import write_whole

    target = Path(path)
    try:
        if target.exists() and target.read_text(encoding="utf-8", errors="replace") != text:
            os.replace(target, f"{target}.old")
            click.echo(f"the former {path} is now {path}.old", err=True)
        write_whole(target, text)
    except OSError as error:
        raise InvalidArgument(f"{path}: {error.strerror}") from None
