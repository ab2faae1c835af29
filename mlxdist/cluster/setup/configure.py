"""The steps of `mlxdist config`: collect facts, find cables, give them addresses, write the hostfile; and the undo."""

import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from ipaddress import IPv4Network

import click

from mlxdist.base import atomic_file
from mlxdist.base.errors import InvalidArgument, ResourceError
from mlxdist.base.json_reader import parse_json

from ..facts.collect import HostFacts, collect_hosts
from ..hostfile.hosts import Hostfile, check_variable
from ..hostfile.options import HostSelection
from ..hostfile.writing import write
from ..ssh.ssh import is_this_machine
from ..topology.drawing import as_dot, as_svg
from ..topology.topology import Shape, Topology, build_topology
from .addresses import Link, assign_addresses
from .ethernet import Choice, choose_addresses
from .make_hostfile import BACKENDS, make_hostfile, rdma_notes
from .report import as_json, bridge_notes, show
from .steps import Step, is_undone, plan_steps
from .undo import UndoFile, run_steps
from .verify import Check, checks_of_addresses, checks_of_links, verify

__all__ = ["Configuration", "Options", "undo", "write_hostfile"]

_OUTPUT = "rmlx-hosts.json"


@dataclass
class Options:
    """The options of the command line, except those that select hosts."""

    over: str
    output: str
    named: tuple[str, ...]
    within: str
    auto_setup: bool
    dry_run: bool
    verifying: bool
    backend: str | None
    envs: tuple[str, ...]
    without_bridge: bool
    ignore_unreachable: bool
    dot: str | None
    svg: str | None
    as_json: bool

    def __post_init__(self) -> None:
        for problem in filter(None, map(check_variable, self.envs)):
            raise click.UsageError(f"--env: {problem}")
        if self.over == "ethernet" and (self.named or self.dot or self.svg or self.without_bridge):
            raise click.UsageError("--cable, --dot, --svg and --without-bridge are for cables: --over thunderbolt.")
        if self.auto_setup and self.dry_run:
            raise click.UsageError("--auto-setup runs commands, and --dry-run runs none.")
        try:
            self.network = IPv4Network(self.within)
        except ValueError as error:
            raise click.UsageError(f"--range {self.within}: {error}; write it as 10.111.0.0/16") from None

    @property
    def text_to_stderr(self) -> bool:
        """Whether messages go to standard error, because standard output is for the hostfile or JSON alone."""
        return self.as_json or self.output == "-"


class Configuration:
    """A run of `mlxdist config`. Values that the options leave open come from the hosts or the hostfile."""

    def __init__(self, selection: HostSelection, options: Options) -> None:
        self._selection, self._options = selection, options
        self._status = 0
        # The hostfile supplies the settings that options leave open; except the topology, which this run detects.
        hostfile = selection.hostfile or Hostfile(())
        self._backend = options.backend or (hostfile.backend if hostfile.backend in BACKENDS else "mlxdist")
        given = {setting.partition("=")[0] for setting in options.envs} | {"MLXDIST_TOPOLOGY"}
        former = [setting for setting in hostfile.envs if setting.partition("=")[0] not in given]
        self._envs = (*former, *options.envs)
        if options.over == "ethernet" and self._backend not in ("mlxdist", "ring"):
            raise click.UsageError(f"--backend {self._backend} needs cables: --over thunderbolt, or another --backend.")

    def run(self) -> int:
        """Returns the exit status. Raises ResourceError: hosts do not respond; InvalidArgument: options do not fit."""
        machines = self._collect()
        (self._cables if self._options.over == "thunderbolt" else self._ethernet)(machines)
        return self._status

    def _collect(self) -> list[HostFacts]:
        names = [host.name for host in self._selection.hosts()]
        if sys.stderr.isatty():
            click.echo(f"collecting facts of {len(names)} host{'s' * (len(names) != 1)} ...", err=True)
        machines, wrong = collect_hosts(names, self._selection.ssh_config)
        _warn(*wrong.values())
        if wrong and not self._options.ignore_unreachable or not machines:
            raise ResourceError(
                f"{len(wrong)} of {len(names)} hosts did not respond; --ignore-unreachable goes on without them"
            )
        return machines

    def _cables(self, machines: list[HostFacts]) -> None:
        options = self._options
        linux = [machine.name for machine in machines if not machine.is_mac]
        if linux and not options.named:
            raise InvalidArgument(
                f"{', '.join(linux)}: Linux does not report which cable leads where; name each, such as --cable "
                f"{machines[0].name}:eth1={machines[-1].name}:eth1, or use --over ethernet"
            )
        topology = build_topology(machines, options.named)
        links = assign_addresses(machines, topology, self._options.network)
        steps = plan_steps(machines, links, options.without_bridge)
        own = [frozenset(c.end(i).interface for c in topology.cables if i in c.pair) for i in range(len(machines))]
        choices = choose_addresses(machines, own)
        if not options.as_json and options.dot != "-":
            show(topology, links, options.text_to_stderr)
        if options.dot == "-":
            click.echo(as_dot(topology), nl=False)
            return
        for path, draw in ((options.dot, as_dot), (options.svg, as_svg)):
            if path and not options.dry_run:
                try:
                    atomic_file.atomic_write(path, draw(topology))
                except OSError as error:
                    raise InvalidArgument(f"{path}: {error.strerror}") from None
        _warn(*topology.notes, *rdma_notes(machines, topology))
        _warn(*bridge_notes(machines, links, options.without_bridge))
        if topology.shape is Shape.APART:
            _warn("not all hosts are connected by cables; those that are not use the network")
            self._status = 1
        entries = self._selection.hosts()
        hostfile = make_hostfile(
            machines, topology, links, choices, backend=self._backend, envs=self._envs, hosts=entries
        )
        if self._set_up(machines, steps) and options.verifying:
            self._verify(checks_of_links(machines, links))
        self._finish(machines, choices, hostfile, topology, links, steps)

    def _ethernet(self, machines: list[HostFacts]) -> None:
        choices = choose_addresses(machines)
        entries = {host.name: host for host in self._selection.hosts()}
        hosts = []
        for machine, choice in zip(machines, choices):
            if not self._options.as_json:
                self._say(f"{machine.name}: {choice or 'no address'}")
            if choice is None:
                _warn(f"{machine.name} has no IPv4 address; connect it to the network")
                self._status = 1
            elif choice.wireless:
                _warn(f"{machine.name} is reached by Wi-Fi, which is slow; connect it by cable to where the others are")
            hosts.append(replace(entries[machine.name], ips=(str(choice.address.ip),) if choice else (), rdma=()))
        if len({choice.address.network for choice in choices if choice}) > 1:
            _warn("the hosts are in different networks; between them there must be a router (--verify looks)")
        if self._options.verifying:
            self._verify(checks_of_addresses(machines, choices))
        self._finish(machines, choices, Hostfile(tuple(hosts), self._backend, self._envs))

    def _set_up(self, machines: list[HostFacts], steps: list[Step]) -> bool:
        """Runs the steps, or shows them where --auto-setup is missing. Returns whether none failed or was left out."""
        options = self._options
        if not options.auto_setup:
            if steps and not options.as_json:
                self._say("To be run:" if options.dry_run else "To be run (--auto-setup does it):")
                for step in steps:
                    self._say(f"  {step.host}: {step}")
            return True
        locked = [machine.name for machine in machines if not machine.root and not machine.sudo]
        for name in locked:
            if mine := [str(step) for step in steps if step.host == name]:
                line = " && ".join(mine)
                line = line if is_this_machine(name) else shlex.join([*self._selection.ssh, "-t", name, line])
                _warn(f"{name} needs a password for sudo; type: {line}")
        runnable = [step for step in steps if step.host not in locked]
        file = UndoFile.beside(_OUTPUT if options.output == "-" else options.output)
        config = self._selection.ssh_config
        errors = run_steps(runnable, config, self._say, file)
        _warn(*errors)
        if runnable and file.steps:
            self._say(f"`mlxdist config --undo` takes this back ({file.path})")
        went_well = not errors and len(runnable) == len(steps)
        self._status |= not went_well
        return went_well

    def _verify(self, checks: list[Check]) -> None:
        if self._options.dry_run:
            return
        problems = verify(checks, self._selection.ssh_config)
        _warn(*dict.fromkeys(problems))
        self._say(f"{len(checks) - len(problems)} of {len(checks)} ways work")
        self._status |= bool(problems)

    def _finish(
        self,
        machines: list[HostFacts],
        choices: list[Choice | None],
        hostfile: Hostfile,
        topology: Topology | None = None,
        links: Sequence[Link] = (),
        steps: Sequence[Step] = (),
    ) -> None:
        options, text = self._options, write(hostfile, "json")
        if options.as_json:
            found = as_json(machines, choices, topology, links, steps) | {"hostfile": parse_json(text)}
            click.echo(json.dumps(found, indent=2))
        elif options.output == "-":
            click.echo(text, nl=False)
        if not options.dry_run and options.output != "-":
            write_hostfile(options.output, text, self._say)

    def _say(self, text: str) -> None:
        click.echo(text, err=self._options.text_to_stderr)


def undo(selection: HostSelection, output: str, dry_run: bool) -> int:
    """Takes back what --auto-setup did. A step that succeeds is removed from the file, so a second run does the rest.
    Raises InvalidArgument: there is no file of steps next to ``output``."""
    file = UndoFile.beside(output)
    if not file.steps:
        raise InvalidArgument(f"there is no {file.path}: nothing was set up, or it was taken back already")
    steps = file.steps[::-1]
    if dry_run:
        for step in steps:
            click.echo(f"{step.host}: {step}")
        return 0
    machines, _ = collect_hosts(list(dict.fromkeys(step.host for step in steps)), selection.ssh_config)
    found = {machine.name: machine for machine in machines}
    for step in [step for step in steps if step.host in found and is_undone(step, found[step.host])]:
        click.echo(f"{step.host}: {step} (not needed any more)")
        file.remove(step)
    errors = run_steps(file.steps[::-1], selection.ssh_config, click.echo, file, undoing=True)
    _warn(*errors, *([f"the remaining steps are in {file.path}; run this again"] if errors else []))
    return int(bool(errors))


def write_hostfile(path: str, text: str, say: Callable[[str], None]) -> None:
    """Writes a hostfile, and keeps a different one as PATH.old. Raises InvalidArgument: it cannot be written."""
    try:
        if former := atomic_file.back_up(path, text):
            click.echo(f"the former {path} is now {former}", err=True)
        atomic_file.atomic_write(path, text)
    except OSError as error:
        raise InvalidArgument(f"{path}: {error.strerror}") from None
    say(f"wrote {path}; next: mlxdist doctor --hostfile {path}")


def _warn(*texts: str) -> None:
    for text in texts:
        click.secho(text, fg="yellow", err=True)
