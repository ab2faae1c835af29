"""The commands of test_2node.sh, bench_2node.sh and compare_2node.sh: jobs of mlxdist between two nodes."""

import argparse
import importlib.util
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MLXDIST = [sys.executable, "-m", "mlxdist"]
STEPS = ("sendrecv", "registration", "collectives", "experts", "linears")
# Not MLXDIST_*: every rank would refuse variables of that name that it does not know.
VARIABLE = "RMLX_"


@dataclass(frozen=True)
class Nodes:
    """``hosts``: the words by which every command of mlxdist finds the nodes. ``directory``: this project on them."""

    hosts: list[str]
    directory: Path
    python: str


# argparse: --help is also for those who have not run `make setup`, and have nothing but Python.
def parser_of(name: str, function: Callable[..., object]) -> argparse.ArgumentParser:
    """The command's options for the nodes; its help is the function's docstring."""
    made = argparse.ArgumentParser(
        prog=name,
        description=inspect.cleandoc(function.__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )

    def add(option: str, metavar: str, text: str, default: str = "") -> None:
        variable = VARIABLE + option.removeprefix("--").replace("-", "_").upper()
        text += f" [env var: {variable}]"
        made.add_argument(option, metavar=metavar, default=os.environ.get(variable) or default, help=text)

    for number, other in ((0, 1), (1, 0)):
        node = f"--node{number}"
        add(node, "HOST", f"What ssh connects to for rank {number}; localhost is this machine, which may be both.")
        add(f"{node}-ip", "IP", f"Address of its cable, where node {other} reaches it; left out: the one of ssh.")
        add(f"{node}-device", "NAME", f"Its RDMA device whose cable leads to node {other}, such as rdma_en5.")
    add("--hostfile", "FILE", "Two hosts, in place of the options above.")
    add("--remote-dir", "PATH", "This project on the nodes; left out: where it is here.")
    add("--python", "PATH", "Python on the nodes that has mlxdist; left out: .venv in --remote-dir, else this one.")
    add("--ssh", "COMMAND", 'How to reach nodes, such as "ssh -F my_config"; left out: ssh.', default="ssh")
    return made


def add_suite_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="Two sizes, few iterations.")
    parser.add_argument("--results", type=Path, default=".", metavar="DIR", help="Directory to make the new one in.")


@contextmanager
def nodes_of(parser: argparse.ArgumentParser, given: argparse.Namespace) -> Iterator[Nodes]:
    """The two nodes; a wrong option ends the program with status 2."""
    remote = os.path.expanduser(given.remote_dir)
    python = os.path.expanduser(given.python) or (f"{remote}/.venv/bin/python" if remote else sys.executable)
    with tempfile.TemporaryDirectory(prefix="mlxdist-two-nodes-") as directory:
        hostfile = os.path.expanduser(given.hostfile) or str(Path(directory, "hosts.json"))
        if not given.hostfile:
            Path(hostfile).write_text(json.dumps(_entries(parser, given)))
        elif given.node0 or given.node1:
            parser.error("give --hostfile, or --node0 and --node1")
        _check(parser, hostfile)
        yield Nodes(["--hostfile", hostfile, "--ssh", given.ssh, "--python", python], Path(remote or ROOT), python)


def _entries(parser: argparse.ArgumentParser, given: argparse.Namespace) -> list[dict[str, object]]:
    """MLX's hostfile."""
    names = [_one_name(given.node0), _one_name(given.node1)]
    if not all(names):
        parser.error(f"--node{names.index('')} is missing: what ssh connects to; or give --hostfile")
    entries: list[dict[str, object]] = [
        {"ssh": name, "ips": [ip] if ip else []} for name, ip in zip(names, (given.node0_ip, given.node1_ip))
    ]
    if given.node0_device or given.node1_device:
        if not (given.node0_device and given.node1_device):
            parser.error("a cable has two ends: give --node0-device and --node1-device")
        entries[0]["rdma"], entries[1]["rdma"] = [None, given.node0_device], [given.node1_device, None]
    return entries


def _one_name(name: str) -> str:
    """This machine is one host, whatever it is called; its two ranks then share it."""
    return "localhost" if name in ("localhost", "127.0.0.1", "::1") else name


def _check(parser: argparse.ArgumentParser, hostfile: str) -> None:
    if importlib.util.find_spec("mlxdist") is None or importlib.util.find_spec("click") is None:
        sys.exit(f"{parser.prog}: this Python has no mlxdist; in {ROOT} type: make setup")
    from mlxdist.base.errors import InvalidArgument
    from mlxdist.cluster.hostfile.parsing import read

    try:
        found = read(hostfile).merged()
    except InvalidArgument as error:
        parser.error(str(error))
    if found.ranks != 2:
        parser.error(f"hostfile {hostfile}: it has {found.ranks} ranks, and this needs one on each of two hosts")


def test(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Check that two nodes compute together what one process computes, in five steps, each a job with one rank on each.

    sendrecv     messages of different sizes both ways at once, 1 KB against 2 KB and odd ones
    registration memory that is registered once is not registered again (memory regions are kept)
    collectives  every operation, float16 and float32, against NumPy
    experts      dispatch, experts and combine of a mixture of experts against one process
    linears      column- and row-parallel linear layers against one process

        scripts/test_2node.sh --node0 mac0 --node1 mac1 --node0-ip 192.168.0.1 --node1-ip 192.168.0.2

    The exit status is 0 if all steps have succeeded, 1 if not, 2 if the options are wrong. What a failed step has
    printed is shown.
    """
    parser.add_argument("--only", choices=STEPS, metavar="STEP", help=f"This step alone, of {', '.join(STEPS)}.")
    parser.add_argument("--timeout", type=float, default=120, metavar="SECONDS", help="For each step, 120 by default.")
    given = parser.parse_args(words)
    with nodes_of(parser, given) as nodes:
        sys.exit(_steps(nodes, [given.only] if given.only else STEPS, given.timeout))


def _steps(nodes: Nodes, steps: Sequence[str], timeout: float) -> int:
    """The exit status."""
    table, failed = [f"{'step':13} {'result':25} {'seconds':>7}"], False
    launch = [*MLXDIST, "launch", *nodes.hosts, "--cwd", str(nodes.directory), "--timeout", f"{timeout:g}", "--"]
    program = [nodes.python, str(nodes.directory / "scripts" / "check_two_nodes.py")]
    for step in steps:
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
            print(f"--- {step} {result}; it printed:\n{job.stdout}---", flush=True)
        table.append(f"{step:13} {result:25} {time.monotonic() - begin:7.0f}")
    print("\n".join(table))
    return int(failed)


def bench(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Run `mlxdist bench suite` between two nodes, one rank on each, by mlxdist and by MLX's backends that work there.

    Writes suite.json, table.txt and, where there is matplotlib, report.html into a new directory, named by the time.

        scripts/bench_2node.sh --node0 mac0 --node1 mac1 --node0-ip 192.168.0.1 --node1-ip 192.168.0.2 \\
            --node0-device rdma_en5 --node1-device rdma_en5       with JACCL, which needs the cable's devices
        mlxdist bench compare bench-2node-*/suite.json            two of them

    The exit status is 0 if every result was right, 1 if not, 2 if the options are wrong.
    """
    parser.add_argument("--only", metavar="A,B", help="These operations, see `mlxdist bench suite --help`.")
    parser.add_argument("--backends", metavar="A,B", help="These of mlxdist, ring, mpi, jaccl.")
    add_suite_options(parser)
    given = parser.parse_args(words)
    with nodes_of(parser, given) as nodes:
        _written(_suite(nodes, "bench-2node", given))


def compare(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Compare mlxdist with MLX's own backends between two nodes, one rank on each, in the same run.

    Writes what bench_2node.sh writes, and with --baseline a comparison with an earlier run.

        scripts/compare_2node.sh --hostfile rmlx-hosts.json --ep-only

    The exit status is 0 if every result was right, 1 if not, or if a case became slower by more than --max-slowdown, 2
    if the options are wrong.
    """
    for name, flags in {
        "only": {
            "--ep-only": ("ep_transport,ep_pipeline", "Expert parallelism alone: transport and pipeline."),
            "--tp-only": ("tp_decode,tp_prefill", "Tensor parallelism alone: a decoder layer, decode and prefill."),
            "--decode-only": ("tp_decode", "Of that, decode alone."),
        },
        "backends": {
            "--mlx-only": ("ring,mpi,jaccl", "MLX's backends alone."),
            "--mlxdist-only": ("mlxdist", "mlxdist alone."),
        },
    }.items():
        group = parser.add_mutually_exclusive_group()
        for flag, (value, text) in flags.items():
            group.add_argument(flag, dest=name, action="store_const", const=value, help=text)
    parser.add_argument("--baseline", metavar="FILE", help="suite.json of an earlier run, to compare with.")
    slower = "With --baseline: exit with status 1 if a case takes more than N times as long as there."
    parser.add_argument("--max-slowdown", metavar="N", help=slower)
    add_suite_options(parser)
    given = parser.parse_args(words)
    if given.baseline and not Path(given.baseline).is_file():
        parser.error(f"--baseline: there is no file {given.baseline}")
    if given.max_slowdown and not given.baseline:
        parser.error("--max-slowdown needs --baseline, the earlier run")
    with nodes_of(parser, given) as nodes:
        target = _suite(nodes, "compare-2node", given)
        if given.baseline:
            limit = ["--max-slowdown", given.max_slowdown] if given.max_slowdown else []
            pair = [given.baseline, str(target / "suite.json")]
            _tee([*MLXDIST, "bench", "compare", *pair, *limit], target / "compare.txt")
        _written(target)


def _suite(nodes: Nodes, name: str, given: argparse.Namespace) -> Path:
    """Runs `mlxdist bench suite`; the new directory with what it writes."""
    target = given.results / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    target.mkdir(parents=True)
    words = [*nodes.hosts, "--output", str(target / "suite.json"), *["--quick"] * given.quick]
    words += ["--only", given.only] if given.only else []
    words += ["--backends", given.backends] if given.backends else []
    if importlib.util.find_spec("matplotlib"):
        words += ["--html", str(target / "report.html")]
    else:
        print("no report.html: this needs matplotlib, pip install 'mlxdist[bench]'", file=sys.stderr)
    _tee([*MLXDIST, "bench", "suite", *words], target / "table.txt")
    return target


def _tee(command: Sequence[str], path: Path) -> None:
    """Shows and writes what a command prints, and exits with its status if it fails."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process, path.open("w") as file:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            file.write(line)
    if process.returncode:
        sys.exit(process.returncode)


def _written(target: Path) -> None:
    print(f"Written: {target}")


if __name__ == "__main__":
    for number in (signal.SIGHUP, signal.SIGTERM):  # the temporary directory is gone then, too
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    name = sys.argv[1]
    main = {"test_2node.sh": test, "bench_2node.sh": bench, "compare_2node.sh": compare}[name]
    main(parser_of(name, main), sys.argv[2:])
