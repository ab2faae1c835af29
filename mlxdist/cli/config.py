"""The command line of `mlxdist config`."""

import shlex
import sys
from dataclasses import replace
from typing import Any

import click

from mlxdist.base.user_path import USER_PATH
from mlxdist.cluster.hostfile.options import HostSelection, host_options

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
    type=USER_PATH,
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
@click.option("--from", "source", metavar="WHEEL", help="--install this wheel, or from a directory of all wheels only.")
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
@click.option("--ignore-unreachable", is_flag=True, help="Go on without hosts that do not respond.")
@click.option(
    "--dot",
    type=USER_PATH,
    metavar="FILE",
    is_flag=False,
    flag_value="-",
    help="Write the picture as DOT; no FILE: print it.",
)
@click.option("--svg", type=USER_PATH, metavar="FILE", help="Write the picture as SVG.")
@click.option("--json", "as_json", is_flag=True, help="Print what was found as JSON.")
def config(
    selection: HostSelection,
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

    The exit status is 1 if a host does not respond, hosts are not joined, a command fails, or --verify finds something.
    """
    if (source or others or venv) and not installing:
        raise click.UsageError("--from, --with and --venv are for --install; give that, too.")
    if installing and (undo or any(options[name] for name in ("dry_run", "auto_setup", "verifying"))):
        raise click.UsageError("--install goes without --dry-run, --auto-setup, --verify and --undo; leave those out.")
    from mlxdist.cluster.setup import configure

    if undo:
        sys.exit(configure.undo(selection, options["output"], options["dry_run"]))
    if selection.hostfile is None:
        raise click.UsageError("Give --hosts A,B or --hostfile FILE.")
    if installing:
        sys.exit(_install(selection, source or "", venv, others))
    sys.exit(configure.Configuration(selection, configure.Options(**options)).run())


def _install(selection: HostSelection, source: str, venv: str | None, others: tuple[str, ...]) -> int:
    from mlxdist.cluster.setup.install import DIRECTORY, install
    from mlxdist.tools.doctor.diagnose import preflight

    path = install(selection, source, venv or DIRECTORY, others)
    if not path:
        return 1
    status = preflight(replace(selection, python=path), ())
    click.echo(f"next: mlxdist launch --python {shlex.quote(path)}, and the same for doctor, bench and the others")
    return status
