"""The commands of test_2node.sh, bench_2node.sh and compare_2node.sh: jobs of mlxdist between two nodes."""

import importlib.util
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce, wraps
from pathlib import Path
from typing import Any

import click

from mlxdist.base.errors import InvalidArgument
from mlxdist.cluster.hostfile.parsing import read

ROOT = Path(__file__).resolve().parents[1]
MLXDIST = [sys.executable, "-m", "mlxdist"]
STEPS = ("sendrecv", "registration", "collectives", "experts", "linears")


@dataclass(frozen=True)
class Nodes:
    """``hosts``: the words by which every command of mlxdist finds the nodes. ``directory``: this project on them."""

    hosts: list[str]
    directory: Path
    python: str


def _one_name(context: click.Context, option: click.Parameter, name: str) -> str:
    """This machine is one host, whatever it is called; its two ranks then share it."""
    return "localhost" if name in ("localhost", "127.0.0.1", "::1") else name


# The variables are not MLXDIST_*: every rank would refuse variables of that name that it does not know.
_ON_NODES = (
    click.option("--node0", envvar="RMLX_NODE0", show_envvar=True, required=True, callback=_one_name,
                 help="What ssh connects to for rank 0; localhost is this machine."),
    click.option("--node1", envvar="RMLX_NODE1", show_envvar=True, required=True, callback=_one_name,
                 help="The same for rank 1; may be the same host."),
    click.option("--node0-ip", envvar="RMLX_NODE0_IP", show_envvar=True, metavar="IP", default="",
                 help="Address of its cable, where the other node reaches it; left out: the one that ssh reaches."),
    click.option("--node1-ip", envvar="RMLX_NODE1_IP", show_envvar=True, metavar="IP", default=""),
    click.option("--remote-dir", envvar="RMLX_REMOTE_DIR", show_envvar=True, metavar="PATH",
                 help="This project on the nodes; left out: where it is here."),
    click.option("--python", envvar="RMLX_PYTHON", show_envvar=True, metavar="PATH",
                 help="Python on the nodes that has mlxdist; left out: .venv in --remote-dir, else the one used here."),
    click.option("--ssh", envvar="RMLX_SSH", show_envvar=True, default="ssh", metavar="COMMAND",
                 help='How to reach nodes, such as "ssh -F my_config".'),
)  # fmt: skip
_IN_SUITE = (
    click.option("--quick", is_flag=True, help="Two sizes, few iterations."),
    click.option("--results", type=click.Path(path_type=Path), default=".", help="Directory to make the new one in."),
)


def on_two_nodes(name: str, *more: Callable[[Any], Any]) -> Callable[[Callable[..., None]], click.Command]:
    """Makes the command of a script, which gets `Nodes` and its own options."""

    def decorate(function: Callable[..., None]) -> click.Command:
        @wraps(function)
        def command(
            node0: str, node1: str, node0_ip: str, node1_ip: str, remote_dir: str | None, python: str | None, ssh: str,
            **own: Any,
        ) -> None:  # fmt: skip
            for number in (signal.SIGHUP, signal.SIGTERM):  # the directory is gone then, too
                signal.signal(number, lambda number, frame: sys.exit(128 + number))
            found = python or (f"{remote_dir}/.venv/bin/python" if remote_dir else sys.executable)
            with tempfile.TemporaryDirectory(prefix="mlxdist-two-nodes-") as directory:
                hostfile = Path(directory, "hosts.json")
                pairs = ((node0, node0_ip), (node1, node1_ip))
                hostfile.write_text(json.dumps([{"ssh": name, "ips": [ip] if ip else []} for name, ip in pairs]))
                try:
                    read(str(hostfile))
                except InvalidArgument as error:
                    raise click.UsageError(str(error)) from None
                hosts = ["--hostfile", str(hostfile), "--ssh", ssh, "--python", found]
                function(Nodes(hosts, Path(remote_dir or ROOT), found), **own)

        return click.command(name)(reduce(lambda made, option: option(made), [*more, *_ON_NODES][::-1], command))

    return decorate


@on_two_nodes(
    "test_2node.sh",
    click.option("--only", type=click.Choice(STEPS), help="This step alone."),
    click.option("--timeout", type=float, default=120, show_default=True, help="Seconds for each step."),
)
def test(nodes: Nodes, only: str | None, timeout: float) -> None:
    """Check that two nodes compute together what one process computes, in five steps, each a job with one rank on each.

    \b
    sendrecv     messages of different sizes both ways at once, 1 KB against 2 KB and odd ones
    registration memory that is registered once is not registered again (memory regions are kept)
    collectives  every operation, float16 and float32, against NumPy
    experts      dispatch, experts and combine of a mixture of experts against one process
    linears      column- and row-parallel linear layers against one process

    \b
        scripts/test_2node.sh --node0 mac0 --node1 mac1 --node0-ip 192.168.0.1 --node1-ip 192.168.0.2

    The exit status is 0 if all steps have succeeded, 1 if not, 2 if the options are wrong. What a failed step has
    printed is shown.
    """
    table, failed = [f"{'step':13} {'result':25} {'seconds':>7}"], False
    launch = [*MLXDIST, "launch", *nodes.hosts, "--cwd", str(nodes.directory), "--timeout", f"{timeout:g}", "--"]
    program = [nodes.python, str(nodes.directory / "scripts" / "check_two_nodes.py")]
    for step in [only] if only else STEPS:
        begin = time.monotonic()
        job = subprocess.run(
            [*launch, *program, step],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        said = {0: "ok", 124: f"not done within {timeout:g} s"}
        result = said.get(job.returncode, f"failed with status {job.returncode}")
        if job.returncode:
            failed = True
            click.echo(f"--- {step} {result}; it printed:\n{job.stdout}---")
        table.append(f"{step:13} {result:25} {time.monotonic() - begin:7.0f}")
    click.echo("\n".join(table))
    sys.exit(int(failed))


@on_two_nodes(
    "bench_2node.sh",
    click.option("--only", metavar="A,B", help="These operations, see `mlxdist bench suite --help`."),
    click.option("--backends", metavar="A,B", help="These of mlxdist, ring, mpi, jaccl."),
    *_IN_SUITE,
)
def bench(nodes: Nodes, only: str | None, backends: str | None, quick: bool, results: Path) -> None:
    """Run `mlxdist bench suite` between two nodes, one rank on each, by mlxdist and by MLX's backends that work there.

    Writes suite.json, table.txt and, where there is matplotlib, report.html into a new directory, named by the time.

    \b
        scripts/bench_2node.sh --node0 mac0 --node1 mac1 --node0-ip 192.168.0.1 --node1-ip 192.168.0.2
        mlxdist bench compare bench-2node-*/suite.json            two of them

    The exit status is 0 if every result was right, 1 if not, 2 if the options are wrong.
    """
    _written(_suite(nodes, "bench-2node", results, quick, only, backends))


@on_two_nodes(
    "compare_2node.sh",
    click.option("--ep-only", is_flag=True, help="Expert parallelism alone: transport and pipeline."),
    click.option("--tp-only", is_flag=True, help="Tensor parallelism alone: a decoder layer, decode and prefill."),
    click.option("--decode-only", is_flag=True, help="Of that, decode alone."),
    click.option("--mlx-only", is_flag=True, help="MLX's backends alone."),
    click.option("--mlxdist-only", is_flag=True, help="mlxdist alone."),
    click.option("--baseline", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
                 help="suite.json of an earlier run, to compare with."),
    click.option("--max-slowdown", metavar="N",
                 help="With --baseline: exit with status 1 if a case takes more than N times as long as there."),
    *_IN_SUITE,
)  # fmt: skip
def compare(
    nodes: Nodes, quick: bool, results: Path, baseline: Path | None, max_slowdown: str | None, **only: bool
) -> None:
    """Compare mlxdist with MLX's own backends between two nodes, one rank on each, in the same run.

    Writes what bench_2node.sh writes, and with --baseline a comparison with an earlier run.

    \b
        scripts/compare_2node.sh --node0 mac0 --node1 mac1 --ep-only

    The exit status is 0 if every result was right, 1 if not, or if a case became slower by more than --max-slowdown, 2
    if the options are wrong.
    """
    operations = {"ep_only": "ep_transport,ep_pipeline", "tp_only": "tp_decode,tp_prefill", "decode_only": "tp_decode"}
    backends = {"mlx_only": "ring,mpi,jaccl", "mlxdist_only": "mlxdist"}
    if max_slowdown and not baseline:
        raise click.UsageError("--max-slowdown needs --baseline, the earlier run")
    selection = [_one_of(only, operations), _one_of(only, backends)]
    target = _suite(nodes, "compare-2node", results, quick, *selection)
    if baseline:
        limit = ["--max-slowdown", max_slowdown] if max_slowdown else []
        _tee([*MLXDIST, "bench", "compare", str(baseline), str(target / "suite.json"), *limit], target / "compare.txt")
    _written(target)


def _one_of(flags: dict[str, bool], values: dict[str, str]) -> str | None:
    found = [value for name, value in values.items() if flags[name]]
    if len(found) > 1:
        raise click.UsageError(" and ".join(f"--{name.replace('_', '-')}" for name in values) + " exclude each other")
    return found[0] if found else None


def _suite(nodes: Nodes, name: str, results: Path, quick: bool, only: str | None, backends: str | None) -> Path:
    """Runs `mlxdist bench suite`; the new directory with what it writes."""
    target = results / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    target.mkdir(parents=True)
    words = [*nodes.hosts, "--output", str(target / "suite.json"), *["--quick"] * quick]
    words += ["--only", only] if only else []
    words += ["--backends", backends] if backends else []
    if importlib.util.find_spec("matplotlib"):
        words += ["--html", str(target / "report.html")]
    else:
        click.echo("no report.html: this needs matplotlib, pip install 'mlxdist[bench]'", err=True)
    _tee([*MLXDIST, "bench", "suite", *words], target / "table.txt")
    return target


def _tee(command: Sequence[str], path: Path) -> None:
    """Shows and writes what a command prints, and exits with its status if it fails."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process, path.open("w") as file:
        for line in process.stdout or ():
            click.echo(line, nl=False)
            file.write(line)
    if process.returncode:
        sys.exit(process.returncode)


def _written(target: Path) -> None:
    click.echo(f"Written: {target}")


if __name__ == "__main__":
    {command.name: command for command in (test, bench, compare)}[sys.argv[1]](sys.argv[2:], prog_name=sys.argv[1])
