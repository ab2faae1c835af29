"""What each rank of `mlxdist bench suite` runs: every case by every backend in turn, single calls behind a barrier."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx

import mlxdist

from .bandwidth import IN_PLACE, algorithm_bandwidth, bus_bandwidth, impossible
from .exchange import exchange
from .job import serve
from .limits_rank import copy_work, limit_works, take_limits
from .machine import describe_machine
from .mlx_groups import mlx_group
from .operations import Inputs, storage, total_wrong
from .suite_layers import Layer, ep_pipeline, ep_transport, tp_layer
from .suite_operations import KNOWN_AS, OURS, Absent, Way, collective, sendrecv
from .timing import Work, one_by_one, quantiles, slowest

COPY_UP_TO = 64 << 20  # bytes; more is copied no faster
# A copy moves three bytes per byte, read, read for ownership and written, and reading weights moves one.
READ_ONLY = 3

Groups = dict[str, Any]


def measure(world: mlxdist.Group, parameters: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Parameters: plan (what `suite.plan` gives), backends, device, quick, warm_up, iterations.

    First what the machines are and which backends are there; then, of each line of the plan, its cases.
    """
    device = _device(parameters["device"], world)
    groups, absent = _groups(parameters["backends"], world)
    yield {"machines": exchange(describe_machine(), world), "device": device, "absent": absent}
    suite = Suite(world, groups, device, parameters)
    for line in parameters["plan"]:
        yield suite.case(**line)
        mx.clear_cache()


def _device(wanted: str, world: mlxdist.Group) -> str:
    """Where layers compute: on the GPU if every rank has one."""
    everywhere = all(exchange(mx.is_available(mx.gpu), world))
    if wanted == "gpu" and not everywhere:
        raise RuntimeError("--device gpu: not every rank has a GPU that its MLX can use")
    return "gpu" if everywhere and wanted != "cpu" else "cpu"


def _groups(names: list[str], world: mlxdist.Group) -> tuple[Groups, dict[str, str]]:
    """The group of each backend, and why there is none of the others: on all ranks the same."""
    groups, absent = {}, {}
    for name in names:
        problem = None
        try:
            group = world if name == OURS else mlx_group(name, world)
        except (RuntimeError, ValueError) as error:
            problem = f"rank {world.rank()}: {error}"
        problems = list(filter(None, exchange(problem, world)))
        if problems:
            absent[name] = problems[0]
        else:
            groups[name] = group
    return groups, absent


class Suite:
    def __init__(self, world: mlxdist.Group, groups: Groups, device: str, parameters: dict[str, Any]) -> None:
        self.world, self.groups = world, groups
        self.device, self.dtype = device, "float16" if device == "gpu" else "float32"
        self.quick, self.turns = parameters["quick"], (parameters["warm_up"], parameters["iterations"])

    def case(self, operation: str, dtype: str = "", bytes: int = 0, tokens: int = 0) -> dict[str, Any]:
        """{"cases": one for each backend that has the operation, "absent": why others do not}."""
        try:
            if operation in KNOWN_AS:
                return self._operation(operation, dtype, bytes)
            if operation == "ep_transport":
                return self._layer(operation, tokens, "float16", ep_transport(tokens, self.world, self.groups))
            mx.set_default_device(getattr(mx, self.device))
            if operation == "ep_pipeline":
                layer = ep_pipeline(tokens, self.world, self.groups, self.dtype)
            else:
                phase = operation.removeprefix("tp_")
                layer = tp_layer(phase, tokens, self.world, self.groups, self.dtype, self.quick)
            return self._layer(operation, tokens, self.dtype, layer)
        except Absent as why:
            return {"cases": [], "absent": self._absent(operation, dict.fromkeys(self.groups, str(why)))}
        finally:
            mx.set_default_device(mx.cpu)

    def _operation(self, operation: str, dtype: str, size: int) -> dict[str, Any]:
        ranks = self.world.size()
        data = Inputs(dtype, size // storage(dtype).itemsize, ranks)
        ways, absent = {}, {}
        for name, group in self.groups.items():
            problem = None
            try:
                made = (operation, data, self.world, name, group)
                way = sendrecv(*made[1:]) if operation == "sendrecv" else collective(*made)
                if name != OURS:
                    way.call()  # what MLX's backends do not have they may say only now
                    way.after()
                ways[name] = way
            except (Absent, RuntimeError) as why:
                problem = str(why)
            if problem := next(filter(None, exchange(problem, self.world)), None):
                ways.pop(name, None)
                absent[name] = problem
        common = {"operation": operation, "dtype": dtype, "bytes": size}
        known = KNOWN_AS[operation]

        def refused(median: float, memcpy: float) -> str | None:
            return impossible(known, ranks, size, median, memcpy)

        cases = self._time(ways, limit_works(size, self.world), common, refused)
        for case in cases:
            median = case["microseconds"] and case["microseconds"]["median"]
            case["busbw"] = bus_bandwidth(known, ranks, size, median) if median else None
        return {"cases": cases, "absent": self._absent(operation, absent)}

    def _layer(self, operation: str, tokens: int, dtype: str, layer: Layer) -> dict[str, Any]:
        copied = max(1, min(layer.read, COPY_UP_TO))
        moves = operation == "ep_transport"
        moved = IN_PLACE if moves else READ_ONLY
        limits = limit_works(copied, self.world) if moves else {"memcpy": copy_work(copied)}

        def refused(median: float, memcpy: float) -> str | None:
            least = memcpy * layer.read / copied / moved
            if median >= least:
                return None
            return (
                f"{operation} moved {layer.read} bytes in {median:.2f} us, but copies in the same run say that this "
                f"takes {least:.2f} us at least; the clock or the work is wrong, so this is no result"
            )

        common = {"operation": operation, "dtype": dtype, "bytes": layer.bytes, "tokens": tokens}
        cases = self._time(layer.ways, limits, common | {"described": layer.described}, refused)
        return {"cases": cases, "absent": self._absent(operation, layer.absent)}

    def _time(
        self,
        ways: dict[str, Way],
        limits: dict[str, Work],
        common: dict[str, Any],
        refused: Callable[[float, float], str | None],
    ) -> list[dict[str, Any]]:
        works = {name: Work(way.call, after=way.after) for name, way in ways.items()}
        taken = one_by_one(works | limits, *self.turns, self.world)
        # At the slowest rank: whoever only sends is done before the others.
        times = {name: quantiles(slowest(samples, self.world)) for name, samples in taken.items()}
        allowed = take_limits(times)
        cases = []
        for name, measured in times.items():
            wrong = total_wrong(ways[name].wrong, self.world)
            why = f"{wrong} elements of all ranks and calls together are wrong" if wrong else None
            why = why or refused(measured["median"], allowed["memcpy"]["min"])
            case = common | allowed | {"backend": name, "wrong": wrong, "verified": not wrong, "refused": why}
            # Nobody shall find in a file what cannot be.
            case["microseconds"] = None if why else measured
            case["gbps"] = None if why else algorithm_bandwidth(common["bytes"], measured["median"])
            cases.append(case)
        return cases

    def _absent(self, operation: str, why: dict[str, str]) -> list[dict[str, str]]:
        return [{"operation": operation, "backend": name, "why": text} for name, text in why.items()]


if __name__ == "__main__":
    serve(measure)
