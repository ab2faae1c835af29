"""`mlxdist bench suite`: all communication, by mlxdist and by MLX's own backends, on one machine or several."""

from __future__ import annotations

import itertools
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import mlx.core as mx
from rich.console import Console

import mlxdist
from mlxdist.base.output_file import OUTPUT_FILE
from mlxdist.runtime.devices import paths
from mlxdist.runtime.group.group import engine_of

from . import hockney
from .bandwidth import IN_PLACE, READ_ONLY, bandwidths, least_copies
from .benchmark import Benchmark
from .machine import describe_command
from .mlx_groups import mlx_group
from .operations import SAME_AS, Inputs, storage
from .results import Comparison, Results, hosts_of, table_of
from .runner import ONE_THREAD, Runner, has_mpirun
from .sizes import SIZES, check_sizes, multiples_of, names_of, size_range, sized_cases
from .suite_layers import EXPERTS, Layer, ep_pipeline, ep_transport, tp_layer
from .suite_ways import Absent, Way, collective, sendrecv
from .timing import Work, exchange
from .workload import OURS, BenchmarkWorkload

__all__ = ["MEASURED", "Suite", "plan", "suite"]

BACKENDS = (OURS, "ring", "mpi", "jaccl")
# Variables that choose what joins two ranks, whatever else is there.
PROVIDERS = {
    "shm": {"MLXDIST_PROVIDER": "soft", "MLXDIST_SOFT_TRANSPORT": "shm"},
    "tcp": {"MLXDIST_PROVIDER": "soft", "MLXDIST_SOFT_TRANSPORT": "tcp"},
    "ibverbs": {"MLXDIST_PROVIDER": "ibverbs"},
    "librdma": {"MLXDIST_PROVIDER": "librdma"},
}
# The dtypes of each, by size; and the tokens of what has layers or rows of tokens.
SIZED = {
    "sendrecv": ["float32"],
    "all_reduce": ["float16", "float32"],
    "all_gather": ["float32"],
    "all_to_all": ["float32"],
    "broadcast": ["float32"],
    "reduce_scatter": ["float32"],
    "all_max": ["float32"],
    "reduce": ["float32"],
    "gather": ["float32"],
    "scatter": ["float32"],
    "all_to_all_v": ["float32"],
}
BARRIER = "barrier"
SMALLEST, LARGEST = 4 << 10, 16 << 20
QUICK_SIZES = [4 << 10, 256 << 10]
WARM_UP, ITERATIONS = 10, 30
QUICK_WARM_UP, QUICK_ITERATIONS = 2, 5
COPY_UP_TO = 64 << 20  # bytes; more is copied no faster
EXPERT_TOKENS = [16, 32, 64, 128, 256, 512]
LAYER_TOKENS = {"tp_decode": 1, "tp_prefill": 32}
MEASURED = (*SIZED, BARRIER, *EXPERTS, *LAYER_TOKENS)


class Suite(BenchmarkWorkload):
    """Cases: operation, with dtype and bytes, or with tokens, those of experts with hidden, too; or the barrier alone.

    Parameters: backends, device, quick, warm_up, iterations.
    """

    def __init__(self, world: mlxdist.Group, parameters: dict[str, Any]) -> None:
        super().__init__(world, parameters)
        self.blocks = {"warm_up": parameters["warm_up"], "repeats": parameters["iterations"], "calls": 1}
        self.device = _device(parameters["device"], world)
        # On a CPU, products of 16 bits are several times slower than those of float32.
        self.dtype = "float16" if self.device == "gpu" else "float32"
        self.groups, absent = _made(
            parameters["backends"], lambda name: world if name == OURS else mlx_group(name, world), world
        )
        self.path = _path(world)
        self.summary = {
            "device": self.device,
            "absent": [{"variant": name, "absent": why} for name, why in absent.items()],
        }

    def __call__(self, case: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns a result for each backend that has the operation, and the reasons why others do not have it."""
        operation, tokens = case["operation"], case.get("tokens", 0)
        try:
            if "bytes" in case:
                return self._operation(case)
            if operation == BARRIER:
                return self._barrier(case)
            if operation == "ep_transport":
                layer = ep_transport(tokens, case["hidden"], self.world, self.groups)
                return self._layer(case | {"dtype": "float16"}, layer)
            mx.set_default_device(getattr(mx, self.device))
            if operation == "ep_pipeline":
                layer = ep_pipeline(tokens, case["hidden"], self.world, self.groups, self.dtype)
            else:
                phase = operation.removeprefix("tp_")
                layer = tp_layer(phase, tokens, self.world, self.groups, self.dtype, self.parameters["quick"])
            return self._layer(case | {"dtype": self.dtype}, layer)
        except Absent as why:
            return _absent(case, dict.fromkeys(self.groups, str(why)))
        finally:
            mx.set_default_device(mx.cpu)

    def _operation(self, case: dict[str, Any]) -> list[dict[str, Any]]:
        operation, ranks = case["operation"], self.world.size()
        data = Inputs(case["dtype"], case["bytes"] // storage(case["dtype"]).itemsize, ranks)

        def way(name: str) -> Way:
            made = (data, self.world, name, self.groups[name])
            found = sendrecv(*made) if operation == "sendrecv" else collective(operation, *made)
            if name != OURS:
                found.call()  # what MLX's backends do not have they may say only now
                found.after()
            return found

        ways, absent = _made(list(self.groups), way, self.world)
        known = SAME_AS.get(operation, operation)  # two messages at once move no fewer bytes than one to and fro
        results = self._time(case, ways, least_copies(known, ranks), moved=case["bytes"])
        return [
            result | bandwidths(result, ranks, known) | {"path": self.path if result["variant"] == OURS else None}
            for result in results
        ] + _absent(case, absent)

    def _barrier(self, case: dict[str, Any]) -> list[dict[str, Any]]:
        absent = dict.fromkeys(self.groups.keys() - {OURS}, f"mx.distributed has no {BARRIER}")
        works = {OURS: Work(self.world.barrier)} if OURS in self.groups else {}
        return self.time(case, works) + _absent(case, absent)

    def _layer(self, case: dict[str, Any], layer: Layer) -> list[dict[str, Any]]:
        copied = max(1, min(layer.read, COPY_UP_TO))
        moves = case["operation"] == "ep_transport"
        copies = layer.read / copied / (IN_PLACE if moves else READ_ONLY)
        results = self._time(case, layer.ways, copies, **{"moved" if moves else "copied": copied})
        return [result | {"described": layer.described} for result in results] + _absent(case, layer.absent)

    def _time(self, case: dict[str, Any], ways: dict[str, Way], copies: float, **limit: Any) -> list[dict[str, Any]]:
        return self.time(case, {name: way.work(copies) for name, way in ways.items()}, **limit)


def _absent(case: dict[str, Any], why: dict[str, str]) -> list[dict[str, Any]]:
    return [{"case": case, "variant": name, "absent": text} for name, text in why.items()]


def _device(wanted: str, world: mlxdist.Group) -> str:
    """The device that layers compute on: the GPU if every rank has one."""
    everywhere = all(exchange(mx.is_available(mx.gpu), world))
    if wanted == "gpu" and not everywhere:
        raise RuntimeError("--device gpu: not every rank has a GPU that its MLX can use")
    return "gpu" if everywhere and wanted != "cpu" else "cpu"


def _path(world: mlxdist.Group) -> str:
    """The path between two ranks of mlxdist: "shared memory", "RDMA", "TCP"; "shared memory and TCP" where hosts have
    several ranks. Collective."""
    own = enumerate(engine_of(world).world.native_group.paths)
    found = exchange([path for rank, path in own if rank != world.rank()], world)
    best_first = sorted({path for row in found for path in row} - {paths.Path.NONE}, reverse=True)
    return " and ".join(paths.Path(path).label for path in best_first)


def _made(names: list[str], make: Callable[[str], Any], world: mlxdist.Group) -> tuple[dict[str, Any], dict[str, str]]:
    """The results of ``make`` by backend, and the reasons why other backends have none: the same on all ranks."""
    made, absent = {}, {}
    for name in names:
        problem = None
        try:
            made[name] = make(name)
        except Absent as why:
            problem = str(why)
        except (RuntimeError, ValueError) as error:
            problem = f"rank {world.rank()}: {error}"
        if problem := next(filter(None, exchange(problem, world)), None):
            made.pop(name, None)
            absent[name] = problem
    return made, absent


# The command.


def plan(
    only: list[str], sizes: list[int], ranks: int, tokens: list[int], hidden: int | None = None
) -> list[dict[str, Any]]:
    """The cases; see `Suite`.

    Args:
        tokens, hidden: of each rank, and their elements, in layers of experts; None: those of the layer.
    """
    cases: list[dict[str, Any]] = []
    for operation in only:
        case: dict[str, Any] = {"operation": operation}
        if operation in SIZED:
            cases += sized_cases([(operation, dtype) for dtype in SIZED[operation]], sizes, ranks)
        elif operation in EXPERTS:
            width = hidden or EXPERTS[operation].hidden_size
            cases += [case | {"tokens": count, "hidden": width} for count in tokens]
        else:
            cases.append(case | ({} if operation == BARRIER else {"tokens": LAYER_TOKENS[operation]}))
    return cases


@dataclass(frozen=True)
class Job:
    """Ranks that measure some backends together.

    Attributes:
        may_fail_as: the variant that is absent if the job fails; None: then so does the whole run.
        variables: of their environment.
    """

    backends: list[str]
    may_fail_as: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)

    def run(self, runner: Runner, cases: list[dict[str, Any]], parameters: dict[str, Any]) -> dict[str, Any]:
        """`Runner.job`; by another provider, "mlxdist" is named after it."""
        if "mpi" in self.backends and not has_mpirun():
            raise click.ClickException("there is no mpirun on the path (Debian: apt install openmpi-bin)")
        found = runner.job(cases, backends=self.backends, variables={**ONE_THREAD, **self.variables}, **parameters)
        if self.variables:
            for result in itertools.chain(*found["rows"], found["absent"]):
                result["variant"] = self.may_fail_as
        return found


def _jobs(backends: list[str], providers: list[str]) -> list[Job]:
    jobs = [Job([OURS], f"{OURS} {name}", PROVIDERS[name]) for name in providers]
    together = [name for name in backends if name != "mpi" and not (providers and name == OURS)]
    jobs += [Job(together)] * bool(together)
    # Open MPI's ranks must be started by mpirun, so it has a job of its own.
    return jobs + [Job(["mpi"], "mpi")] * ("mpi" in backends)


def _measure(
    runner: Runner, cases: list[dict[str, Any]], backends: list[str], providers: list[str], parameters: dict[str, Any]
) -> Results:
    setup, begin = describe_command(), time.monotonic()
    jobs, absent = [], []
    for job in _jobs(backends, providers):
        try:
            jobs.append(job.run(runner, cases, parameters))
        except click.ClickException as error:
            if job.may_fail_as is None:
                raise
            absent.append({"variant": job.may_fail_as, "absent": error.message})
    if not jobs:
        raise click.ClickException("; ".join(f"{entry['variant']}: {entry['absent']}" for entry in absent))
    setup |= parameters | {"device": jobs[0]["device"], "seconds": time.monotonic() - begin, "backends": backends}
    if providers:
        setup["provider"] = f"{', '.join(providers)}: each in a job of its own"
    results = runner.results(jobs, cases, setup)
    results["absent"] += absent
    return results | {"fits": hockney.fits(results)}


_show_times = Comparison(lambda results: f"{results['setup']['ranks']} ranks on {hosts_of(results)}")


def _show(results: Results, console: Console) -> None:
    _show_times(results, console)
    if results["fits"]:
        console.print(table_of("by size", hockney.COLUMNS, hockney.rows_of(results["fits"]), left=3))
        console.print(hockney.EXPLAINED, markup=False, highlight=False)


def _draw(results: Results, path: Path) -> None:
    from .report import write_report

    write_report(results, path)


@Benchmark(Suite, show=_show, draw=_draw, parameters={})
@click.option("--only", type=names_of(MEASURED), default="all", metavar="A,B", help=f"Of {', '.join(MEASURED)}.")
@click.option(
    "--backends",
    type=names_of(BACKENDS),
    default="all",
    metavar="A,B",
    help=f"Of {', '.join(BACKENDS)}.  [default: all]",
)
@click.option(
    "--providers",
    type=names_of(tuple(PROVIDERS)),
    default=(),
    metavar="A,B",
    help=f"Measure mlxdist once by each of {', '.join(PROVIDERS)}.  [default: as MLXDIST_PROVIDER says]",
)
@click.option("--sizes", type=SIZES, help="Sizes of operations.  [default: 4KiB to 16MiB, in steps of 4]")
@click.option(
    "--tokens",
    type=multiples_of(1),
    metavar="N,N",
    help=f"Tokens of each rank in layers of experts.  [default: {','.join(map(str, EXPERT_TOKENS))}]",
)
@click.option(
    "--hidden",
    type=click.IntRange(32, 1 << 16),
    help="Elements of a token there.  [default: "
    + ", ".join(f"{shape.hidden_size} in {name}" for name, shape in EXPERTS.items())
    + "]",
)
@click.option("--quick", is_flag=True, help="Two sizes, one number of tokens, 5 iterations: to see that it works.")
@click.option("--device", type=click.Choice(["auto", "cpu", "gpu"]), default="auto", help="Where layers compute.")
@click.option("--html", "picture", type=OUTPUT_FILE, help="Write a report with plots here.")
def suite(
    runner: Runner,
    only: list[str],
    backends: list[str],
    providers: list[str],
    sizes: list[int] | None,
    tokens: list[int] | None,
    hidden: int | None,
    quick: bool,
    device: str,
) -> Results:
    """Time all communication between the ranks, by mlxdist and by MLX's own backends, and check every result.

    \b
        mlxdist bench suite --quick
        mlxdist bench suite --hostfile rmlx-hosts.json --output today.json --html today.html
        mlxdist bench suite --only ep_transport,ep_pipeline --tokens 16,512 --hidden 4096
        mlxdist bench suite --only sendrecv,all_reduce --providers shm,tcp
        mlxdist bench compare yesterday.json today.json

    10 iterations to warm up, then 30 that count, a barrier before each; the time is that of the slowest rank, and of a
    message the time until it has arrived. Backends alternate in the same processes; Open MPI, which needs mpirun, has
    its own. Where an operation has three sizes or more, a second table has the line through its times (Hockney 1994)
    and the size from which its bandwidth is used. docs/benchmarks.md says what each case is and how to read the
    numbers.

    The exit status is 1 if a result was wrong, a time is shorter than the memory allows, nothing could be measured, or
    a file could not be written; the table is printed all the same.
    """
    if providers and OURS not in backends:
        raise click.BadParameter(f"the backends are {', '.join(backends)}, without {OURS}", param_hint="--providers")
    if sizes:
        check_sizes(sizes, [(name, dtype) for name in only for dtype in SIZED.get(name, ())], runner.ranks)
    sizes = sizes or (QUICK_SIZES if quick else size_range(SMALLEST, LARGEST))
    cases = plan(only, sizes, runner.ranks, tokens or EXPERT_TOKENS[: 1 if quick else None], hidden)
    parameters = {"device": device, "quick": quick, "python": platform.python_version()}
    parameters["warm_up"] = QUICK_WARM_UP if quick else WARM_UP
    parameters["iterations"] = QUICK_ITERATIONS if quick else ITERATIONS
    return _measure(runner, cases, backends, providers, parameters)
