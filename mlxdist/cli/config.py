"""The command line of `mlxdist config`."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass, replace
from ipaddress import IPv4Network
from typing import TYPE_CHECKING, Any

import click

from mlxdist.base.errors import InvalidArgument
from mlxdist.cluster.hostfile.options import HostSelection, host_options

if TYPE_CHECKING:  # what it imports is loaded when the command is run
    from mlxdist.cluster.hostfile.hosts import Hostfile
    from mlxdist.cluster.setup.addresses import Link
    from mlxdist.cluster.setup.ethernet import Choice
    from mlxdist.cluster.setup.steps import Step
    from mlxdist.cluster.setup.survey import Survey
    from mlxdist.cluster.setup.verify import Check
    from mlxdist.cluster.topology.topology import Topology

__all__ = ["config"]

_RANGE = "10.111.0.0/16"  # RANGE of addresses.py
_OUTPUT = "rmlx-hosts.json"
_BACKENDS = ("mlxdist", "ring", "jaccl", "jaccl-ring")


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
    "--output-hostfile",  # MLX's name for it
    "output",
    metavar="PATH",
    default=_OUTPUT,
    show_default=True,
    help="The hostfile to write; - for standard output.",
)
@click.option("--auto-setup/--no-auto-setup", help="Run the commands that are shown. They need `sudo -n` there.")
@click.option("--dry-run", is_flag=True, help="Look and show; run and write nothing.")
@click.option(
    "--verify", "verifying", is_flag=True, help="Afterwards look whether each end of a cable reaches the other."
)
@click.option("--undo", is_flag=True, help="Take back what --auto-setup did, as rmlx-hosts.undo.json has it.")
@click.option("--install", "installing", is_flag=True, help="Only install this mlxdist, MLX and Python on the hosts.")
@click.option("--from", "source", metavar="WHEEL", help="--install this wheel, or from a folder of all wheels only.")
@click.option("--with", "others", metavar="PACKAGE", multiple=True, help="--install this, too. May be repeated.")
@click.option("--venv", metavar="DIR", help="Where --install makes the environment.  [default: ~/.mlxdist/venv]")
@click.option(
    "--backend",
    type=click.Choice(_BACKENDS),
    help="What the hostfile is for; those of MLX need a ring or a mesh.  [default: that of --hostfile, else mlxdist]",
)
@click.option(
    "--env",
    "envs",
    metavar="NAME=VALUE",
    multiple=True,
    help="A variable for all ranks, besides those of --hostfile. May be repeated.",
)
@click.option(
    "--cable", "named", metavar="A:IF=B:IF", multiple=True, help="A cable that no host tells of, as on Linux."
)
@click.option("--range", "within", default=_RANGE, show_default=True, help="Addresses of cables are taken from here.")
@click.option("--without-bridge", is_flag=True, help="Take ports with a cable out of the Thunderbolt Bridge.")
@click.option("--ignore-unreachable", is_flag=True, help="Go on without hosts that do not answer.")
@click.option(
    "--dot", metavar="FILE", is_flag=False, flag_value="-", help="Write the picture as DOT; no FILE: print it."
)
@click.option("--svg", metavar="FILE", help="Write the picture as SVG.")
@click.option("--json", "as_json", is_flag=True, help="Print what was found as JSON.")
def config(
    chosen: HostSelection,
    undo: bool,
    installing: bool,
    source: str | None,
    others: tuple[str, ...],
    venv: str | None,
    **options: Any,
) -> None:
    """Find the cables between hosts, give their ends addresses, and write the hostfile.

    \b
        mlxdist config --hosts studio-a,studio-b --dry-run            look only
        mlxdist config --hosts studio-a,studio-b --auto-setup --verify
        mlxdist config --hosts node0,node1 --over ethernet
        mlxdist config --undo                                         take the set-up back
        mlxdist config --hosts studio-a,studio-b --install            the same versions as here, on all

    Every command that sets a host up is shown with its host before it is run, and none is run without --auto-setup;
    --install shows what each host has afterwards. Nothing of mlxdist has to be installed on the hosts; ssh has to reach
    them without a password.

    The exit status is 1 if a host does not answer, hosts are not joined, a command fails, or --verify finds something.
    """
    if (source or others or venv) and not installing:
        raise click.UsageError("--from, --with and --venv are for --install; give that, too.")
    if installing and (undo or any(options[name] for name in ("dry_run", "auto_setup", "verifying"))):
        raise click.UsageError("--install goes without --dry-run, --auto-setup, --verify and --undo; leave those out.")
    try:
        if undo:
            sys.exit(_undo(chosen, options["output"], options["dry_run"]))
        if chosen.hostfile is None:
            raise click.UsageError("Give --hosts A,B or --hostfile FILE.")
        if installing:
            from mlxdist.cluster.setup.install import DIRECTORY, install

            sys.exit(install(chosen, source or "", venv or DIRECTORY, others))
        sys.exit(_Run(chosen, _Options(**options)).run())
    except InvalidArgument as error:
        raise click.ClickException(str(error)) from None


@dataclass
class _Options:
    """Those of the command line, but for the hosts."""

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
        from mlxdist.cluster.hostfile.hosts import check_variable

        for problem in filter(None, map(check_variable, self.envs)):
            raise click.UsageError(f"--env: {problem}")
        if self.over == "ethernet" and (self.named or self.dot or self.svg or self.without_bridge):
            raise click.UsageError("--cable, --dot, --svg and --without-bridge are for cables: --over thunderbolt.")
        if self.auto_setup and self.dry_run:
            raise click.UsageError("--auto-setup runs commands, and --dry-run runs none.")
        try:
            self.network = IPv4Network(self.within)
        except ValueError as error:
            raise click.UsageError(f"--range {self.within}: {error}; write it as {_RANGE}") from None

    @property
    def text_to_stderr(self) -> bool:
        """Standard output is for the hostfile or JSON alone."""
        return self.as_json or self.output == "-"


class _Run:
    """One look at the hosts, and what follows from it. ``status``: the exit status so far."""

    def __init__(self, chosen: HostSelection, options: _Options) -> None:
        self._chosen, self._options = chosen, options
        self._status = 0
        self._backend, self._envs = _kept(chosen.hostfile, options)
        if options.over == "ethernet" and self._backend not in ("mlxdist", "ring"):
            raise click.UsageError(f"--backend {self._backend} needs cables: --over thunderbolt, or another --backend.")

    def run(self) -> int:
        surveys = self._survey()
        if self._options.over == "thunderbolt":
            self._cables(surveys)
        else:
            self._ethernet(surveys)
        return self._status

    def _survey(self) -> list[Survey]:
        from mlxdist.cluster.setup.survey import survey_hosts

        names = [host.name for host in self._chosen.hosts()]
        if sys.stderr.isatty():
            click.echo(f"asking {len(names)} host{'s' * (len(names) != 1)} ...", err=True)
        surveys, wrong = survey_hosts(names, self._chosen.ssh_config)
        for text in wrong.values():
            _warn(text)
        if wrong and not self._options.ignore_unreachable or not surveys:
            raise InvalidArgument(
                f"{len(wrong)} of {len(names)} hosts did not answer; --ignore-unreachable goes on without them"
            )
        return surveys

    def _cables(self, surveys: list[Survey]) -> None:
        from mlxdist.cluster.setup.addresses import assign_addresses
        from mlxdist.cluster.setup.ethernet import choose_addresses
        from mlxdist.cluster.setup.report import bridge_notes, show
        from mlxdist.cluster.setup.result import make_hostfile, rdma_notes
        from mlxdist.cluster.setup.steps import plan_steps
        from mlxdist.cluster.setup.verify import checks_of_links
        from mlxdist.cluster.topology.topology import Shape, build_topology

        options = self._options
        linux = [survey.name for survey in surveys if not survey.is_mac]
        if linux and not options.named:
            raise InvalidArgument(
                f"{', '.join(linux)}: Linux does not tell which cable leads where; name each, such as --cable "
                f"{surveys[0].name}:eth1={surveys[-1].name}:eth1, or use --over ethernet"
            )
        topology = build_topology(surveys, options.named)
        links = assign_addresses(surveys, topology, options.network)
        steps = plan_steps(surveys, links, options.without_bridge)
        own = [frozenset(c.end(i).interface for c in topology.cables if i in c.pair) for i in range(len(surveys))]
        choices = choose_addresses(surveys, own)
        if not options.as_json and options.dot != "-":
            show(topology, links, options.text_to_stderr)
        if self._draw(topology):
            return
        for note in (*topology.notes, *rdma_notes(surveys, topology)):
            _warn(note)
        for note in bridge_notes(surveys, links, options.without_bridge):
            _warn(note)
        if topology.shape is Shape.APART:
            _warn("not all hosts are joined by cables; those that are not use the network")
            self._status = 1
        common = {"backend": self._backend, "envs": self._envs, "hosts": self._chosen.hosts()}
        hostfile = make_hostfile(surveys, topology, links, choices, **common)
        if self._set_up(surveys, steps) and options.verifying:
            self._verify(checks_of_links(surveys, links))
        self._finish(surveys, choices, hostfile, topology, links, steps)

    def _ethernet(self, surveys: list[Survey]) -> None:
        from mlxdist.cluster.hostfile.hosts import Hostfile
        from mlxdist.cluster.setup.ethernet import choose_addresses
        from mlxdist.cluster.setup.verify import checks_of_addresses

        choices = choose_addresses(surveys)
        entries = {host.name: host for host in self._chosen.hosts()}
        hosts = []
        for survey, choice in zip(surveys, choices):
            if not self._options.as_json:
                self._say(f"{survey.name}: {choice or 'no address'}")
            if choice is None:
                _warn(f"{survey.name} has no IPv4 address; connect it to the network")
                self._status = 1
            elif choice.wireless:
                _warn(f"{survey.name} is reached by Wi-Fi, which is slow; connect it by cable to where the others are")
            ips = (str(choice.address.ip),) if choice else ()
            hosts.append(replace(entries[survey.name], ips=ips, rdma=()))
        if len({choice.address.network for choice in choices if choice}) > 1:
            _warn("the hosts are in different networks; between them there must be a router (--verify looks)")
        if self._options.verifying:
            self._verify(checks_of_addresses(surveys, choices))
        hostfile = Hostfile(tuple(hosts), self._backend, self._envs)
        self._finish(surveys, choices, hostfile, None, [], [])

    def _draw(self, topology: Topology) -> bool:
        """Whether the picture is all that was wanted."""
        from mlxdist.cluster.topology.drawing import as_dot, as_svg

        dot, svg = self._options.dot, self._options.svg
        if dot == "-":
            click.echo(as_dot(topology), nl=False)
            return True
        if dot and not self._options.dry_run:
            _write(dot, as_dot(topology))
        if svg and not self._options.dry_run:
            _write(svg, as_svg(topology))
        return False

    def _set_up(self, surveys: list[Survey], steps: list[Step]) -> bool:
        """Whether nothing went wrong."""
        from mlxdist.cluster.setup.undo import UndoFile, run_steps

        options = self._options
        if not options.auto_setup:
            if steps and not options.as_json:
                self._say("To be run:" if options.dry_run else "To be run (--auto-setup does it):")
                for step in steps:
                    self._say(f"  {step.host}: {step}")
            return True
        locked = [survey.name for survey in surveys if not survey.root and not survey.sudo]
        for name in locked:
            if mine := [str(step) for step in steps if step.host == name]:
                _warn(f"{name} asks for a password before sudo; type: {_by_hand(self._chosen.ssh, name, mine)}")
        runnable = [step for step in steps if step.host not in locked]
        undo = UndoFile.beside(_OUTPUT if options.output == "-" else options.output)
        errors = run_steps(runnable, self._chosen.ssh_config, self._say, before=undo.add_undo, failed=undo.remove_undo)
        for error in errors:
            _warn(error)
        if runnable and undo.steps:
            self._say(f"`mlxdist config --undo` takes this back ({undo.path})")
        went_well = not errors and len(runnable) == len(steps)
        self._status |= not went_well
        return went_well

    def _verify(self, checks: list[Check]) -> None:
        from mlxdist.cluster.setup.verify import verify

        if self._options.dry_run:
            return
        problems = verify(checks, self._chosen.ssh_config)
        for problem in dict.fromkeys(problems):
            _warn(problem)
        self._say(f"{len(checks) - len(problems)} of {len(checks)} ways work")
        self._status |= bool(problems)

    def _finish(
        self,
        surveys: list[Survey],
        choices: list[Choice | None],
        hostfile: Hostfile,
        topology: Topology | None,
        links: list[Link],
        steps: list[Step],
    ) -> None:
        from mlxdist.cluster.hostfile.writing import write
        from mlxdist.cluster.setup.report import as_json

        options = self._options
        text = write(hostfile, "json")
        if options.as_json:
            found = as_json(surveys, choices, topology, links, steps) | {"hostfile": json.loads(text)}
            click.echo(json.dumps(found, indent=2))
        elif options.output == "-":
            click.echo(text, nl=False)
        if options.dry_run or options.output == "-":
            return
        _write(options.output, text, keep_former=True)
        self._say(f"wrote {options.output}; next: mlxdist doctor --hostfile {options.output}")

    def _say(self, text: str) -> None:
        click.echo(text, err=self._options.text_to_stderr)


def _kept(hostfile: Hostfile, options: _Options) -> tuple[str, tuple[str, ...]]:
    """Backend and variables: those of the options, else what the hostfile had, but for the wires, which are found."""
    backend = options.backend or (hostfile.backend if hostfile.backend in _BACKENDS else "mlxdist")
    given = {setting.partition("=")[0] for setting in options.envs} | {"MLXDIST_TOPOLOGY"}
    former = [setting for setting in hostfile.envs if setting.partition("=")[0] not in given]
    return backend, (*former, *options.envs)


def _undo(chosen: HostSelection, output: str, dry_run: bool) -> int:
    """What is taken back leaves the file, so that after a failure the rest can be tried again."""
    from mlxdist.cluster.setup.steps import is_undone
    from mlxdist.cluster.setup.survey import survey_hosts
    from mlxdist.cluster.setup.undo import UndoFile, run_steps

    undo = UndoFile.beside(output)
    if not undo.steps:
        raise InvalidArgument(f"there is no {undo.path}: nothing was set up, or it was taken back already")
    steps = undo.steps[::-1]
    if dry_run:
        for step in steps:
            click.echo(f"{step.host}: {step}")
        return 0
    surveys, _ = survey_hosts(list(dict.fromkeys(step.host for step in steps)), chosen.ssh_config)
    found = {survey.name: survey for survey in surveys}
    for step in [step for step in steps if step.host in found and is_undone(step, found[step.host])]:
        click.echo(f"{step.host}: {step} (not needed any more)")
        undo.remove(step)
    errors = run_steps(undo.steps[::-1], chosen.ssh_config, click.echo, after=undo.remove, go_on=True)
    for error in errors:
        _warn(error)
    if errors:
        _warn(f"what is left stands in {undo.path}; run this again")
    return int(bool(errors))


def _warn(text: str) -> None:
    click.secho(text, fg="yellow", err=True)


def _by_hand(ssh: tuple[str, ...], name: str, commands: list[str]) -> str:
    from mlxdist.cluster.ssh.ssh import is_this_machine

    line = " && ".join(commands)
    return line if is_this_machine(name) else shlex.join([*ssh, "-t", name, line])


def _write(path: str, text: str, keep_former: bool = False) -> None:
    """``keep_former``: a file that is replaced by another one is kept beside it."""
    from mlxdist.base import atomic_file

    try:
        if keep_former and (former := atomic_file.keep_former(path, text)):
            click.echo(f"the former {path} is now {former}", err=True)
        atomic_file.write_whole(path, text)
    except OSError as error:
        raise InvalidArgument(f"{path}: {error.strerror}") from None
