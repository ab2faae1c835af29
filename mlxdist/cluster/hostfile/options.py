"""The options that select the hosts of a command, and the way to reach them: the same for every command."""

from __future__ import annotations

import functools
import itertools
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import click

from mlxdist.base.user_path import USER_PATH

if TYPE_CHECKING:  # a command that is given no hosts does not load what reads hostfiles
    from ..ssh.ssh import SshConfig
    from .hosts import Host, Hostfile


__all__ = ["HostSelection", "host_options"]

_OPTIONS = (
    click.option(
        "--hostfile",
        "file",
        type=USER_PATH,
        metavar="FILE",
        help="The hosts of FILE; see `mlxdist hostfile`.  [default: MLX_HOSTFILE]",
    ),
    click.option("--hosts", metavar="A,B", help="These hosts."),
    click.option("--include", metavar="A,B", help="Of the hosts, only these."),
    click.option("--exclude", metavar="A,B", help="Of the hosts, not these."),
    click.option(
        "--python",
        type=USER_PATH,
        metavar="PATH",
        default="",
        help="Python that has mlxdist, on other hosts.  [default: this]",
    ),
    click.option(
        "--ssh", metavar="COMMAND", default="ssh", show_default=True, help='How to reach hosts: "ssh -F my_config".'
    ),
)


@dataclass(frozen=True)
class HostSelection:
    """The hosts that the user has selected, and how to reach them."""

    hostfile: Hostfile | None = None  # None where neither --hostfile nor --hosts is given, so for this machine alone
    ssh: tuple[str, ...] = ("ssh",)  # the words of the command that reaches other hosts
    python: str = ""  # a Python there; empty for the path of this one
    # the same choice as words, for a `mlxdist launch` that a command starts
    arguments: list[str] = field(default_factory=list)

    @property
    def ssh_config(self) -> SshConfig:
        from ..ssh.ssh import SshConfig

        return SshConfig(self.ssh, self.python)

    def hosts(self) -> list[Host]:
        """The hosts; this machine where none were given."""
        from .hosts import Host

        return list(self.hostfile.hosts) if self.hostfile is not None else [Host("localhost")]

    def with_ranks(self, each: int | None) -> HostSelection:
        """A selection with ``each`` ranks on every host. Raises InvalidArgument: a host has another number of slots."""
        if each is None or self.hostfile is None:
            return self
        return replace(self, hostfile=self.hostfile.with_ranks(each), arguments=[*self.arguments, "-n", str(each)])


def host_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options to a command, which gets a `HostSelection` as ``selection``. Bad ones are usage errors."""

    @functools.wraps(command)
    def wrapped(
        *,
        file: str | None,
        hosts: str | None,
        include: str | None,
        exclude: str | None,
        python: str,
        ssh: str,
        **others: Any,
    ) -> Any:
        python = python or _installed_python()
        file = file or (None if hosts else _mlx_hostfile())
        arguments = {"--hostfile": file, "--hosts": hosts, "--include": include, "--exclude": exclude}
        arguments |= {"--python": python, "--ssh": "" if ssh == "ssh" else ssh}
        words = [word for option, value in arguments.items() if value for word in (option, value)]
        found = _hosts(file, hosts, include, exclude)
        return command(selection=HostSelection(found, _words(ssh), python, words), **others)

    for option in reversed(_OPTIONS):
        wrapped = option(wrapped)
    return wrapped


def _hosts(file: str | None, hosts: str | None, include: str | None, exclude: str | None) -> Hostfile | None:
    if file and hosts:
        raise click.UsageError("Give --hostfile or --hosts, not both.")
    if not file and not hosts:
        if include or exclude:
            raise click.UsageError("--include and --exclude choose among hosts; give --hostfile or --hosts.")
        return None
    from .parsing import parse, read

    found = read(file) if file else parse(_lines(hosts or ""), "--hosts")
    for warning in found.warnings:
        click.secho(f"hostfile {found.source}, {warning}", fg="yellow", err=True)
    return _selected(found.merged(), include, exclude)


def _mlx_hostfile() -> str | None:
    """The value of the user's MLX_HOSTFILE. In a rank of MLX, the launcher has set it, so it is ignored."""
    file = None if "MLX_RANK" in os.environ else os.environ.get("MLX_HOSTFILE")
    if file:
        click.echo(f"hosts of {file} (MLX_HOSTFILE)", err=True)
    return file and os.path.expanduser(file)


def _installed_python() -> str:
    """The link to an environment of `mlxdist config --install`, whose directory is named differently on each host."""
    link, _, suffix = sys.prefix.rpartition(".")
    return f"{link}/bin/python" if len(suffix) == 6 and os.path.islink(link) else ""


def _lines(hosts: str) -> str:
    """The value of --hosts as lines of a hostfile. Repeating a name adds a rank there, as in mlx.launch."""
    counted = [(name, len(list(same))) for name, same in itertools.groupby(hosts.split(","))]
    return "\n".join(name if count == 1 else f"{name} slots={count}" for name, count in counted)


def _selected(found: Hostfile, include: str | None, exclude: str | None) -> Hostfile:
    names = [host.name for host in found.hosts]
    for option, listed in (("--include", include), ("--exclude", exclude)):
        unknown = [name for name in (listed or "").split(",") if name and name not in names]
        if unknown:
            raise click.UsageError(f"{option}: {unknown[0]} is none of the hosts {', '.join(names)}.")
    allowed = []
    for host in found.hosts:
        if host.denied and not include:
            left_out = f"{host.name} is left out: denied since {host.denied}; --include names it all the same"
            click.secho(f"hostfile {found.source}: {left_out}", fg="yellow", err=True)
        else:
            allowed.append(host.name)
    wanted = include.split(",") if include else allowed
    unwanted = (exclude or "").split(",")
    kept = [name for name in names if name in wanted and name not in unwanted]
    if not kept:
        raise click.UsageError("No host is left to run on.")
    return found.only(kept)


def _words(command: str) -> tuple[str, ...]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise click.UsageError(f"--ssh {command!r}: {error}") from None
    if not words:
        raise click.UsageError("--ssh: no command")
    return tuple(words)
