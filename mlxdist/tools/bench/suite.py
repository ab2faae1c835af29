"""`mlxdist bench suite`: all communication, by mlxdist and by MLX's own backends, on one machine or several."""

from __future__ import annotations

import importlib.util
import itertools
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import mlx.core as mx
import numpy as np
from rich.console import Console

import mlxdist
from mlxdist.base.output_file import OUTPUT_FILE
from mlxdist.runtime.devices import paths
from mlxdist.runtime.group.group import engine_of

from . import hockney
from .bandwidth import IN_PLACE, READ_ONLY, bandwidths, least_copies
from .benchmark import Benchmark
from .ep import SHAPES, make_block, route, shard_as_mlx_lm
from .machine import describe_command
from .mlx_groups import mlx_group
from .operations import CASES, SAME_AS, TOLERANCE, Inputs, count_off, count_wrong, from_mlx, storage, to_mlx
from .results import Comparison, Results, hosts_of, table_of
from .runner import ONE_THREAD, Runner, has_mpirun
from .sizes import SIZES, check_sizes, multiples_of, names_of, size_range, sized_cases
from .timing import Work, exchange
from .workload import OURS, BenchmarkWorkload

__all__ = ["MEASURED", "Suite", "Way", "collective", "exactly", "plan", "suite"]

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
NO_ALL_TO_ALL = "mx.distributed has no all_to_all"
EXPERTS = {"ep_transport": SHAPES["qwen3.5-moe"], "ep_pipeline": SHAPES["mixtral"].scaled(None)}
EXPERT_TOKENS = [16, 32, 64, 128, 256, 512]
LAYER_TOKENS = {"tp_decode": 1, "tp_prefill": 32}
MEASURED = (*SIZED, BARRIER, *EXPERTS, *LAYER_TOKENS)
# A decoder layer whose heads can be divided among this many ranks, see tp_layers.py.
HIDDEN = {2: 1024, 4: 512}
QUICK_HIDDEN = {2: 256, 4: 512}
CACHED = 128

# Backends of MLX that can send in one thread and receive in another; MPI has been started without threads.
BOTH_WAYS = ("ring",)


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


# Operations by mlxdist and by MLX's own backends, each with its data and its check.


class Absent(Exception):
    """A backend does not have an operation; the text says why."""


class Way:
    """A case by one backend.

    Args:
        start: builds the graph. Returns the result, then further arrays to evaluate, which are not timed; nothing on a
            rank that takes no part.
        check: counts the wrong elements of a result.
    """

    def __init__(self, start: Callable[[], Sequence[mx.array]], check: Callable[[mx.array], int]) -> None:
        self._start, self._check = start, check
        self._outputs: Sequence[mx.array] = ()
        self.wrong = 0

    def call(self) -> None:
        """Runs the timed part: builds the graph, and waits for the result."""
        self._outputs = self._start()
        if len(self._outputs) > 1:
            mx.async_eval(self._outputs[1:])
        mx.eval(self._outputs[:1])

    def after(self) -> None:
        """Runs the part that is not timed: waits for the other arrays, and checks the result."""
        mx.eval(self._outputs)
        if self._outputs:
            self.wrong += self._check(self._outputs[0])
        self._outputs = ()

    def work(self, copies: float) -> Work:
        return Work(self.call, after=self.after, wrong=lambda: self.wrong, copies=copies)


def exactly(expected: np.ndarray, result: mx.array) -> int:
    """Counts the elements that differ in any bit from the expected ones."""
    return count_wrong(from_mlx(result), expected)


def collective(operation: str, data: Inputs, world: mlxdist.Group, backend: str, group: mx.distributed.Group) -> Way:
    """Returns the way to run a collective by a backend. ``group``: the backend's group; not used for mlxdist.

    Raises:
        Absent: MLX has no such operation.
    """
    name = SAME_AS.get(operation, operation)
    case = CASES[name]
    x = to_mlx(case.given(data, world.rank()), data.dtype)
    mx.eval(x)
    if backend == OURS:
        function = partial(case.call, x, group=world)
    elif hasattr(mx.distributed, name):
        function = partial(getattr(mx.distributed, name), x, group=group)
    else:
        raise Absent(f"mx.distributed has no {operation}")
    return Way(lambda: [function()], partial(exactly, case.expected(data, world.rank())))


def sendrecv(data: Inputs, world: mlxdist.Group, backend: str, group: mx.distributed.Group) -> Way:
    """Returns the way to exchange messages between ranks 0 and 1, 2 and 3 and so on, both directions at once.

    Raises:
        Absent: the backend cannot send and receive at the same time.
    """
    partner = world.rank() ^ 1
    if backend != OURS and backend not in BOTH_WAYS:
        raise Absent(f"MLX's {backend} cannot send and receive at the same time")
    if partner >= world.size():
        return Way(list, lambda result: 0)
    x = to_mlx(data[world.rank()], data.dtype)
    mx.eval(x)
    if backend == OURS:

        def start() -> list[mx.array]:
            return [mlxdist.sendrecv(x, partner, partner, group=world)]

    else:
        # Two streams, or each would wait for the other's receive before it begins its own.
        receiving, sending = mx.new_stream(mx.cpu), mx.new_stream(mx.cpu)

        def start() -> list[mx.array]:
            received = mx.distributed.recv_like(x, partner, group=group, stream=receiving)
            return [received, mx.distributed.send(x, partner, group=group, stream=sending)]

    return Way(start, partial(exactly, data[partner]))


# Layers: expert and tensor parallelism, by mlxdist and as mlx-lm does it on MLX.


@dataclass(frozen=True)
class Layer:
    """A case by all backends that have it.

    Attributes:
        read: the least bytes of weights or rows that the busiest rank must read.
    """

    ways: dict[str, Way]
    absent: dict[str, str]
    described: str
    read: int


def ep_transport(tokens: int, hidden: int, world: mlxdist.Group, groups: dict[str, mx.distributed.Group]) -> Layer:
    """Rows to the owners of their experts and back, weighted and added up, with nothing computed in between."""
    from mlxdist.nn.expert_parallel import Placement, combine, dispatch

    experts, top_k = EXPERTS["ep_transport"].num_experts, EXPERTS["ep_transport"].num_experts_per_tok
    data = Inputs("float16", tokens * hidden, world.size())
    mine = data[world.rank()].reshape(tokens, hidden)
    x, placement = to_mlx(mine, "float16"), Placement(experts, world.size())
    selected = np.argsort(np.random.default_rng(world.rank()).random((tokens, experts)), axis=1)[:, :top_k]
    indices = mx.array(selected.astype(np.int32))
    scores = mx.full((tokens, top_k), 1 / top_k)  # a power of 2: the sums are exact
    mx.eval(x, indices, scores)

    def start() -> list[mx.array]:
        received, _, handle = dispatch(x, indices, placement, group=world)
        return [combine(received, handle, scores)]

    away = [int((placement.owners[selected] == rank).any(axis=1).sum()) for rank in range(world.size())]
    away[world.rank()] = 0
    read = int(mlxdist.all_max(np.array([2 * sum(away) * hidden * 2], np.int64), group=world)[0])
    described = f"tokens of each rank, top {top_k} of {experts}"
    ways = {OURS: Way(start, partial(exactly, mine))} if OURS in groups else {}
    return Layer(ways, dict.fromkeys(groups.keys() - {OURS}, NO_ALL_TO_ALL), described, read)


def ep_pipeline(
    tokens: int, hidden: int, world: mlxdist.Group, groups: dict[str, mx.distributed.Group], dtype: str
) -> Layer:
    """Router, dispatch, experts, combine: ``tokens`` of each rank; on MLX's backends mlx-lm's sharding, on all tokens.

    Raises:
        Absent: there is no mlx-lm.
    """
    _require_mlx_lm()
    from mlxdist.nn.expert_parallel import ExpertParallelSwitchGLU

    shape, ranks, rank = replace(EXPERTS["ep_pipeline"], hidden_size=hidden), world.size(), world.rank()
    mx.random.seed(0)
    full = make_block(shape, dtype)
    x = mx.random.normal((tokens * ranks, shape.hidden_size), key=mx.random.key(tokens)).astype(getattr(mx, dtype))
    expected = full(x)
    mine = slice(tokens * rank, tokens * (rank + 1))
    part = x[mine]
    mx.eval(x, part, expected)
    ways, absent = {}, {}
    for name, group in groups.items():
        if name == OURS:
            experts = ExpertParallelSwitchGLU.from_switch(
                full.switch_mlp, group=world, mode="dispatch", tokens="sharded"
            )
            mx.eval(experts.parameters())
            start = partial(_listed, lambda: experts(part, *route(full, part)))
            ways[name] = Way(start, partial(count_off, expected[mine], TOLERANCE[dtype]))
            continue
        try:
            block = shard_as_mlx_lm(full, shape, group)
        except ValueError as error:
            absent[name] = f"mlx-lm cannot shard it: {error}"
            continue
        ways[name] = Way(partial(_listed, partial(block, x)), partial(count_off, expected, TOLERANCE[dtype]))
    each = 3 * shape.hidden_size * shape.moe_intermediate_size * x.itemsize
    read = len(np.unique(np.array(route(full, x)[0]))) * each // ranks
    return Layer(ways, absent, f"tokens of each rank, {shape.described}", read)


def tp_layer(
    phase: str, tokens: int, world: mlxdist.Group, groups: dict[str, mx.distributed.Group], dtype: str, quick: bool
) -> Layer:
    """A decoder layer: SplitBlock by mlxdist, mlx-lm's sharded layer on MLX's backends.

    Raises:
        Absent: there is no mlx-lm, or no size for this many ranks.
    """
    _require_mlx_lm()
    from .models import make_model
    from .tp_layers import variants

    hidden = (QUICK_HIDDEN if quick else HIDDEN).get(world.size())
    if hidden is None:
        raise Absent(f"its heads cannot be divided among {world.size()} ranks, only among 2 or 4")
    cached = CACHED if phase == "decode" else 0
    model = make_model("mixtral", hidden, getattr(mx, dtype))
    calls, expected, weights = variants(model, tokens, cached, world, {n: g for n, g in groups.items() if n != OURS})
    names = {name: "lazy" if name == OURS else name for name in groups}
    check = partial(count_off, expected, TOLERANCE[dtype])
    ways = {name: Way(partial(_listed, calls[known]), check) for name, known in names.items()}
    length = f"{cached} in the cache" if cached else f"{tokens} tokens"
    return Layer(ways, {}, f"Mixtral's layer, hidden {hidden}, {length}", weights)


def _require_mlx_lm() -> None:
    if importlib.util.find_spec("mlx_lm") is None:
        raise Absent("this needs mlx-lm: pip install 'mlxdist[lm]'")


def _listed(call: Any) -> list[mx.array]:
    return [call()]


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
