"""The options of `mlxdist launch`: their declarations, and the settings that are derived from them."""

import functools
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from mlxdist.base.environment import MAX_RANKS, MAX_RESTARTS, OF_JOB, PROVIDERS, QP_TYPES
from mlxdist.base.user_path import USER_PATH, UserPath
from mlxdist.base.validation import read_bounded

from .backends import BACKENDS, DEFAULT_PORT
from .standard_input import CHOICES

__all__ = ["LaunchCommand", "Options", "absolute", "launch_options", "parse_settings", "with_python"]

_PORT = click.IntRange(1, 65535)
_SECONDS = click.FloatRange(0, 3600)
_OF_LAUNCHER = OF_JOB | {"MLX_RANK", "MLX_GLOBAL_RANK", "MLX_LOCAL_RANK", "MLX_WORLD_SIZE"}
_VARIABLE = re.compile(r"[!-<>-~]+")  # as env(1) sets them: anything printable without a space
_MAX_ENV_FILE = 1 << 20  # a device has no end
_PYTHON = re.compile(r"python(3(\.\d+)?)?")

# Sections of --help. The options of several hosts are in cluster.hostfile.options: other commands have them too.
_WHERE, _HOSTS, _NODES = "Where", "Several hosts, by ssh", "One launcher on each node, without ssh"
_BACKEND, _INPUT, _OUTPUT = "What joins the ranks", "What the ranks are given", "What they print"
_END, _LAST = "How it ends", "Instead, or before"


class _Option(click.Option):
    def __init__(self, declared: Sequence[str], section: str, **attributes: Any) -> None:
        if not any(flag.startswith("--") for flag in declared):
            declared = [*declared, f"--{declared[-1].replace('_', '-')}"]
        super().__init__(declared, **attributes)
        self.section = section


def _option(section: str, *names: str, **attributes: Any) -> Any:
    return functools.partial(click.option, *names, cls=_Option, section=section, **attributes)


class Options(NamedTuple):  # a dataclass of this size takes a millisecond to be made
    """Options of the user, except hosts and command, each with its declaration for click."""

    ranks: int | None = _option(
        _WHERE,
        "-n",
        "-np",
        "--repeat-hosts",
        "--gpus",
        type=click.IntRange(1, MAX_RANKS),
        metavar="N",
        help="Number of ranks; with hosts: on each of them, as many as it has slots, if the hostfile gives any.",
    )
    emulate_nodes: int | None = _option(
        _WHERE,
        type=click.IntRange(2, MAX_RANKS),
        metavar="N",
        help="Split the ranks of this machine among N virtual hosts: shared memory within each, TCP between them.",
    )
    cwd: str | None = _option(
        _WHERE,
        type=USER_PATH,
        metavar="DIR",
        help="Where the ranks run, on every host.  [default: the current directory]",
    )
    nodes: int | None = _option(
        _NODES, type=click.IntRange(1, MAX_RANKS), metavar="N", help="Number of nodes, each with -n."
    )
    node_rank: int | None = _option(_NODES, type=int, metavar="R", help="Which of them this is, from 0.")
    master_addr: str | None = _option(
        _NODES, metavar="HOST[:PORT]", help=f"Where node 0 listens.  [default port: {DEFAULT_PORT}]"
    )
    secret_file: str | None = _option(
        _NODES, type=USER_PATH, metavar="FILE", help="Has the secret that MLXDIST_SECRET would have, mode 0600."
    )
    backend: str = _option(
        _BACKEND,
        type=click.Choice(BACKENDS),
        default="auto",
        show_default=True,
        help="auto: the hostfile's, else mlxdist. The others are MLX's own.",
    )
    provider: str | None = _option(
        _BACKEND,
        type=click.Choice(PROVIDERS),
        help="mlxdist: verbs that carry the messages. auto, the default: shared memory on one host, RDMA between "
        "hosts where it is there, else TCP; prints the choice and its reason.",
    )
    qp_type: str | None = _option(
        _BACKEND, type=click.Choice(QP_TYPES), help="mlxdist: queue pairs, unreliable (default) or reliable."
    )
    starting_port: int | None = _option(
        _BACKEND,
        "-p",
        type=_PORT,
        metavar="PORT",
        help="mlxdist, jaccl, mpi: port of rank 0; ring: of rank 0, counting up.  [default: free ones]",
    )
    connections: int = _option(
        _BACKEND,
        "--connections-per-ip",
        type=click.IntRange(1, 64),
        metavar="K",
        default=1,
        show_default=True,
        help="ring: connections for each address.",
    )
    nccl_port: int | None = _option(
        _BACKEND, type=_PORT, metavar="PORT", help="nccl: port of rank 0.  [default: a free one]"
    )
    mpi_args: tuple[str, ...] = _option(
        _BACKEND, "--mpi-arg", multiple=True, metavar="WORDS", help="mpi: for mpirun; repeatable."
    )
    settings: tuple[str, ...] = _option(
        _INPUT, "--env", multiple=True, metavar="NAME=VALUE", help="Set a variable for all ranks; repeatable."
    )
    env_file: str | None = _option(
        _INPUT, type=USER_PATH, metavar="FILE", help="Lines NAME=VALUE, set for all ranks; --env comes after it."
    )
    stdin: str = _option(
        _INPUT,
        type=click.Choice(CHOICES),
        default="all",
        show_default=True,
        help="Ranks that get what the launcher reads from its standard input: all, or rank 0 alone.",
    )
    prefix: bool = _option(
        _OUTPUT, "--prefix/--no-prefix", default=True, help="The rank in front of each line, or output as it is."
    )
    logs: str | None = _option(
        _OUTPUT,
        "--log-dir",
        type=USER_PATH,
        metavar="DIR",
        help="Write what rank N prints also to rank-N.out and .err there.",
    )
    verbose: bool = _option(_OUTPUT, is_flag=True, help="Report the start and the end of every rank.")
    on_event: str | None = _option(
        _OUTPUT,
        metavar="CMD",
        help="Run CMD when the job has started, stands still, has failed or ended, with the event as JSON on its "
        "standard input; or POST that to CMD, a URL.",
    )
    limit: float | None = _option(
        _END,
        "--timeout",
        type=click.FloatRange(0, 1e9, min_open=True),
        metavar="SECONDS",
        help="End a job that runs for longer, with exit status 124.",
    )
    elastic: int | None = _option(
        _END,
        type=click.IntRange(1, MAX_RANKS),
        metavar="MIN",
        help="When a rank has failed and at least MIN are left, let these go on by themselves: the program calls "
        "mlxdist.Group.shrink().",
    )
    stall_timeout: float | None = _option(
        _END,
        type=click.FloatRange(1, 1e9),
        metavar="SECONDS",
        help="End a job in which no rank begins or ends an operation, moves data or comes to another step for so long, "
        "with exit status 124, after showing the Python stacks of all ranks; it may be restarted.",
    )
    grace_period: float | None = _option(
        _END,
        type=_SECONDS,
        metavar="SECONDS",
        help="When a rank has failed: time for the others to leave by themselves, then again between SIGTERM and "
        "SIGKILL.  [default: 5, or 15 with ranks on Macs]",
    )
    control_grace: float | None = _option(
        _END,
        type=click.FloatRange(5, 86400),
        metavar="SECONDS",
        help="How long ssh may carry nothing between the launcher and a host before that host's ranks are ended.  "
        "[default: 300; 15 with backends of MLX, whose ranks do not notice that a host is lost]",
    )
    drain: float = _option(
        _END,
        type=_SECONDS,
        default=0.0,
        metavar="SECONDS",
        help="Time after SIGTERM for ranks that finish what they do, as `mlxdist serve` does; then comes a second one.",
    )
    max_restarts: int = _option(
        _END,
        type=click.IntRange(0, MAX_RESTARTS),
        default=0,
        show_default=True,
        metavar="K",
        help="When a rank has failed, whatever the reason, start all of them again, at most K times.",
    )
    pass_sigint: bool = _option(
        _END, is_flag=True, help="Ctrl-C does not end the job: the ranks get SIGINT, and decide what it means."
    )
    record: Path | None = _option(
        _LAST,
        type=UserPath(path_type=Path),
        metavar="DIR",
        help="Write versions, packages, hardware, variables and the state of git of each host to DIR/HOST.json first, "
        "and show what differs between hosts.",
    )
    preflight: bool = _option(
        _LAST, is_flag=True, help="Run the checks of `mlxdist doctor` first; start nothing if one fails."
    )
    dry_run: bool = _option(_LAST, is_flag=True, help="Show what would be started, and start nothing.")
    print_python: bool = _option(_LAST, is_flag=True, help="Show the Python of the ranks' hosts, and start nothing.")

    def variables(self) -> dict[str, str]:
        """The variables that the options set for all ranks."""
        given = parse_settings(_lines(self.env_file), "--env-file") | parse_settings(self.settings, "--env")
        named = {"MLXDIST_PROVIDER": self.provider, "MLXDIST_QP_TYPE": self.qp_type}
        return given | {name: value for name, value in named.items() if value is not None}

    def mpi_words(self) -> list[str]:
        try:
            return [word for argument in self.mpi_args for word in shlex.split(argument)]
        except ValueError as error:
            raise click.UsageError(f"--mpi-arg: {error}") from None

    def log_directory(self) -> Path | None:
        if self.logs is None:
            return None
        if not self.prefix:
            raise click.UsageError("--log-dir copies what passes the launcher; with --no-prefix nothing does.")
        return Path(absolute(self.logs, "--log-dir"))


def absolute(directory: str, option: str) -> str:
    """The absolute form of a path. Raises UsageError: the path is relative, and the current directory is gone."""
    try:
        return os.path.abspath(directory)
    except FileNotFoundError:
        raise click.UsageError(
            f"The current directory does not exist any more; change to another one, or give {option} an absolute name."
        ) from None


def launch_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options to a click command. Its function makes an `Options` of the values."""
    for name, option in reversed(Options._field_defaults.items()):
        command = option(name)(command)
    return command


class LaunchCommand(click.Command):
    """A command whose --help has sections. Options that are not in any of them select hosts."""

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {_WHERE: [], _HOSTS: []}
        for parameter in self.get_params(context):
            section = _LAST if "--help" in parameter.opts else getattr(parameter, "section", _HOSTS)
            record = parameter.get_help_record(context)
            if record is not None and isinstance(parameter, click.Option):
                sections.setdefault(section, []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


def with_python(command: list[str], python: str) -> list[str]:
    """The command to run. ``python``, or this Python, runs a script, -m and -c. A given ``python`` replaces `python`.

    mlx.launch puts its --python in front of every command, and its documentation shows scripts without an interpreter.
    """
    first = command[0]
    if first in ("-m", "-c") or first.endswith(".py"):
        return [python or sys.executable, *command]
    return [python, *command[1:]] if python and _PYTHON.fullmatch(first) else command


def parse_settings(settings: Iterable[str], where: str) -> dict[str, str]:
    variables = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not name or not equals:
            raise click.UsageError(f"Invalid value for '{where}': {setting!r} is not NAME=VALUE.")
        if not _VARIABLE.fullmatch(name):
            hint = "; leave `export` out" if name.startswith("export ") else ""
            raise click.UsageError(f"Invalid value for '{where}': {name!r:.80} is no name of a variable{hint}.")
        if name in _OF_LAUNCHER:
            raise click.UsageError(f"Invalid value for '{where}': {name} is set by the launcher, for each rank.")
        variables[name] = value
    return variables


def _lines(file: str | None) -> list[str]:
    if file is None:
        return []
    try:
        lines = read_bounded(file, _MAX_ENV_FILE).decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise click.UsageError(f"--env-file {file}: byte {error.start} is not of UTF-8; write it as UTF-8.") from None
    except ValueError as error:
        raise click.UsageError(f"--env-file {file}: {error}.") from None
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
