"""What the ranks of `mlxdist bench suite` measure: each case by every backend in turn, single calls after a barrier."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

import mlxdist
from mlxdist.nn.expert_parallel import ExpertParallelSwitchGLU, Placement, combine, dispatch

from .bandwidth import IN_PLACE, READ_ONLY, least_copies
from .mlx_groups import mlx_group
from .operations import CASES, SAME_AS, Inputs, count_off, count_wrong, from_mlx, storage, to_mlx
from .rank import time_case
from .shapes import SHAPES
from .timing import Work, exchange, interleave
from .workloads import OURS, bandwidths

COPY_UP_TO = 64 << 20  # bytes; more is copied no faster
# Of the largest element; the order of additions differs.
TOLERANCE = {"float32": 1e-4, "float16": 2e-2}
NO_ALL_TO_ALL = "mx.distributed has no all_to_all"
TRANSPORT, PIPELINE = SHAPES["qwen3.5-moe"], SHAPES["mixtral"].scaled(None)
# A decoder layer whose heads can be divided among this many ranks, see tp_layers.py.
HIDDEN = {2: 1024, 4: 512}
QUICK_HIDDEN = {2: 256, 4: 512}
CACHED = 128

# Backends of MLX that can send in one thread and receive in another; MPI has been started without threads.
BOTH_WAYS = ("ring",)


class Suite:
    """Cases: operation, with dtype and bytes or with tokens. Parameters: backends, device, quick, warm_up,
    iterations."""

    def __init__(self, world: mlxdist.Group, parameters: dict[str, Any]) -> None:
        self.world, self.quick = world, parameters["quick"]
        self.take = partial(interleave, warm_up=parameters["warm_up"], repeats=parameters["iterations"], calls=1)
        self.device = _device(parameters["device"], world)
        self.dtype = "float16" if self.device == "gpu" else "float32"
        self.groups, absent = _made(
            parameters["backends"], lambda name: world if name == OURS else mlx_group(name, world), world
        )
        self.summary = {
            "device": self.device,
            "absent": [{"variant": name, "absent": why} for name, why in absent.items()],
        }

    def __call__(self, case: dict[str, Any]) -> list[dict[str, Any]]:
        """A result for each backend that has the operation, and why others do not."""
        operation, tokens = case["operation"], case.get("tokens", 0)
        try:
            if "bytes" in case:
                return self._operation(case)
            if operation == "ep_transport":
                return self._layer(case | {"dtype": "float16"}, ep_transport(tokens, self.world, self.groups))
            mx.set_default_device(getattr(mx, self.device))
            if operation == "ep_pipeline":
                layer = ep_pipeline(tokens, self.world, self.groups, self.dtype)
            else:
                phase = operation.removeprefix("tp_")
                layer = tp_layer(phase, tokens, self.world, self.groups, self.dtype, self.quick)
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
        return [result | bandwidths(result, ranks, known) for result in results] + _absent(case, absent)

    def _layer(self, case: dict[str, Any], layer: Layer) -> list[dict[str, Any]]:
        copied = max(1, min(layer.read, COPY_UP_TO))
        moves = case["operation"] == "ep_transport"
        copies = layer.read / copied / (IN_PLACE if moves else READ_ONLY)
        results = self._time(case, layer.ways, copies, **{"moved" if moves else "copied": copied})
        return [result | {"described": layer.described} for result in results] + _absent(case, layer.absent)

    def _time(self, case: dict[str, Any], ways: dict[str, Way], copies: float, **limit: Any) -> list[dict[str, Any]]:
        return time_case(self.world, case, {name: way.work(copies) for name, way in ways.items()}, self.take, **limit)


def _absent(case: dict[str, Any], why: dict[str, str]) -> list[dict[str, Any]]:
    return [{"case": case, "variant": name, "absent": text} for name, text in why.items()]


def _device(wanted: str, world: mlxdist.Group) -> str:
    """Where layers compute: on the GPU if every rank has one."""
    everywhere = all(exchange(mx.is_available(mx.gpu), world))
    if wanted == "gpu" and not everywhere:
        raise RuntimeError("--device gpu: not every rank has a GPU that its MLX can use")
    return "gpu" if everywhere and wanted != "cpu" else "cpu"


def _made(names: list[str], make: Callable[[str], Any], world: mlxdist.Group) -> tuple[dict[str, Any], dict[str, str]]:
    """What ``make`` gives for each backend, and why there is nothing for the others: on all ranks the same."""
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
    """One case by one backend.

    Args:
        start: makes the graph: the result, and what else has to be evaluated, which is not timed. Nothing, on a rank
            that takes no part.
        check: the wrong elements of a result.
    """

    def __init__(self, start: Callable[[], Sequence[mx.array]], check: Callable[[mx.array], int]) -> None:
        self._start, self._check = start, check
        self._outputs: Sequence[mx.array] = ()
        self.wrong = 0

    def call(self) -> None:
        """What is timed: until the result is there."""
        self._outputs = self._start()
        if len(self._outputs) > 1:
            mx.async_eval(self._outputs[1:])
        mx.eval(self._outputs[:1])

    def after(self) -> None:
        """What is not timed: until all is done and checked."""
        mx.eval(self._outputs)
        if self._outputs:
            self.wrong += self._check(self._outputs[0])
        self._outputs = ()

    def work(self, copies: float) -> Work:
        return Work(self.call, after=self.after, wrong=lambda: self.wrong, copies=copies)


def exactly(expected: np.ndarray, result: mx.array) -> int:
    """Elements that are not bit for bit what they must be."""
    return count_wrong(from_mlx(result), expected)


def collective(operation: str, data: Inputs, world: mlxdist.Group, backend: str, group: mx.distributed.Group) -> Way:
    """``group``: of the backend; not used for mlxdist.

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
    """Messages of neighbours, 0 with 1, 2 with 3 and so on, both directions at once.

    Raises:
        Absent: the backend cannot do that.
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
        read: of weights or rows, what the busiest rank must have read at least.
    """

    ways: dict[str, Way]
    absent: dict[str, str]
    described: str
    read: int


def ep_transport(tokens: int, world: mlxdist.Group, groups: dict[str, mx.distributed.Group]) -> Layer:
    """Rows to the owners of their experts and back, weighted and added up, with nothing computed in between."""
    hidden, experts, top_k = TRANSPORT.hidden_size, TRANSPORT.num_experts, TRANSPORT.num_experts_per_tok
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
    described = f"{tokens} tokens of {hidden} each, top {top_k} of {experts}"
    ways = {OURS: Way(start, partial(exactly, mine))} if OURS in groups else {}
    return Layer(ways, dict.fromkeys(groups.keys() - {OURS}, NO_ALL_TO_ALL), described, read)


def ep_pipeline(tokens: int, world: mlxdist.Group, groups: dict[str, mx.distributed.Group], dtype: str) -> Layer:
    """Router, dispatch, experts, combine: ``tokens`` of each rank; on MLX's backends mlx-lm's sharding, on all tokens.

    Raises:
        Absent: there is no mlx-lm.
    """
    _require_mlx_lm()
    from .expert_layer import make_block, route, shard_as_mlx_lm

    shape, ranks, rank = PIPELINE, world.size(), world.rank()
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
    return Layer(ways, absent, f"{tokens} tokens of each rank, {shape.described}", read)


def tp_layer(
    phase: str, tokens: int, world: mlxdist.Group, groups: dict[str, mx.distributed.Group], dtype: str, quick: bool
) -> Layer:
    """A decoder layer: SplitBlock by mlxdist, mlx-lm's sharded layer on MLX's backends.

    Raises:
        Absent: there is no mlx-lm, or no size for this many ranks.
    """
    _require_mlx_lm()
    from .tp_layers import make_model, variants

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
