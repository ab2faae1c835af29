"""A plan of a pipeline: which stage has which layers. :func:`plan_stages` makes one, :func:`pipeline_parallel` and
:func:`load_sharded` carry it out."""

import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn
from rich.table import Table

from mlxdist.base import validation
from mlxdist.base.environment import MAX_RANKS
from mlxdist.base.errors import InvalidArgument
from mlxdist.base.json_reader import parse_json
from mlxdist.base.tables import size, text
from mlxdist.nn.layout.partition import checked_rank_shares

from ..layout.cut import Range
from ..layout.measured_shares import RankShares, resolve_stages
from ..layout.modules import parameters
from .layers import Layers, find_layers

__all__ = ["StagePlan", "plan_of_layers", "plan_stages", "stages_of"]


@dataclass(frozen=True)
class StagePlan:
    """Which stage has which layers. ``str(plan)`` is a table.

    Attributes:
        model_type: of the model's configuration.
        stages: how many there are.
        ranges: ``(start, stop)`` of layers, in the model's order. Range k is on stage ``k % stages``: with virtual
            stages each rank has several.
        rank_shares: how fast the stages are; None: equally fast.
        layer_bytes: parameters of each layer, in bytes.
        outside_bytes: parameters in no layer, by when they are used: "before" (the embedding), "after" (norm and
            head), "both" (an embedding that is the head, too), "all" (on every stage).
        message_bytes: of one token, for each range what its first layer takes from the range before; 0 for the first.
    """

    model_type: str
    stages: int
    ranges: tuple[Range, ...]
    rank_shares: tuple[float, ...] | None
    layer_bytes: tuple[int, ...]
    outside_bytes: Mapping[str, int]
    message_bytes: tuple[int, ...]

    def chunks_of(self, stage: int) -> list[range]:
        """The layers of a stage, a range for each of its virtual stages."""
        return [range(*pair) for pair in self.ranges[stage :: self.stages]]

    @property
    def virtual(self) -> int:
        """How many ranges a stage has."""
        return len(self.ranges) // self.stages

    def layers(self, stage: int) -> list[int]:
        """The layers of a stage."""
        return [number for chunk in self.chunks_of(stage) for number in chunk]

    def bytes(self, stage: int) -> int:
        """How many bytes of parameters a stage holds."""
        held = sum(self.layer_bytes[number] for number in self.layers(stage))
        return held + _held_outside(self.outside_bytes, stage == 0, stage == self.stages - 1)

    def work(self, stage: int) -> int:
        """How many bytes of parameters a stage reads for a token; of an embedding that is one row."""
        head = _head(self.outside_bytes) if stage == self.stages - 1 else 0
        return sum(self.layer_bytes[number] for number in self.layers(stage)) + head

    def __str__(self) -> str:
        return text(self.__rich__(), ())

    def __rich__(self) -> Table:
        each = f", {self.virtual} virtual stages each" if self.virtual > 1 else ""
        title = f"{self.model_type}: {len(self.layer_bytes)} layers in {self.stages} stages{each}"
        table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
        for name in ("stage", "layers", "and", "speed", "work", "parameters", "sends a token"):
            table.add_column(name, justify="left" if name in ("layers", "and") else "right", no_wrap=True)
        total = sum(map(self.work, range(self.stages)))
        speeds = self.rank_shares or (1.0,) * self.stages
        for stage in range(self.stages):
            sent = sum(self.message_bytes[number + 1] for number in self._sending(stage))
            table.add_row(
                str(stage),
                ", ".join(_shown(pair) for pair in self.ranges[stage :: self.stages]),
                self._outside(stage),
                f"{speeds[stage] / sum(speeds):.0%}",
                f"{self.work(stage) / max(1, total):.0%}",
                size(self.bytes(stage)),
                size(sent) if sent else "",
            )
        return table

    def _sending(self, stage: int) -> range:
        return range(stage, len(self.ranges) - 1, self.stages)

    def _outside(self, stage: int) -> str:
        embedding = stage == 0 and (self.outside_bytes["before"] or self.outside_bytes["both"])
        names = ["embedding"] if embedding else []
        return " and ".join(names + (["head"] if stage == self.stages - 1 else []))

    def check(self, model: nn.Module, layers: Layers) -> None:
        """Raises InvalidArgument if ``model`` is not the model of this plan; its layers may be sharded by now."""
        name, number = _name_of(model), len(layers.paths)
        if (name, number) != (self.model_type, len(self.layer_bytes)):
            raise InvalidArgument(
                f"the plan of stages is for another model: {self.model_type} with {len(self.layer_bytes)} layers; this "
                f"is {name} with {number}"
            )
        for start, _ in self.ranges[1:]:
            if reason := layers.refused[start]:
                raise InvalidArgument(f"the plan of stages begins one with layer {start}, which cannot be: {reason}")

    def to_json(self) -> str:
        """The plan as JSON, which :meth:`from_json` reads."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "StagePlan":
        """Reads ``text``, which :meth:`to_json` wrote. Raises InvalidArgument where that is no plan."""
        try:
            return _read(text)
        except ValueError as error:
            raise InvalidArgument(f"StagePlan.from_json: this is not the JSON of a plan: {error}") from None


def plan_stages(
    model: nn.Module,
    stages: int,
    *,
    rank_shares: RankShares | None = None,
    link: float | None = None,
    memory: int | Sequence[int] | None = None,
    virtual: int = 1,
) -> StagePlan:
    """Plans which stage of a pipeline has which layers, so that the slowest is as fast as can be. Needs no group.

    A stage takes as long as its parameters need to be read at its speed, with those of the head on the last stage, and
    what it receives to arrive. Among equally fast plans it takes the one that sends least.

    Args:
        model: of mlx-lm, full; its parameters may be lazy.
        stages: how many.
        rank_shares: how fast the stages are, one positive number for each; None: equally fast. "memory" and "compute"
            are the speeds of this job's ranks as `mlxdist calibrate` has measured them, for decoding, and for prompts
            and training; of the ranks of a stage the slowest counts.
        link: how fast messages are, in the unit of ``rank_shares``: bytes per second where these are; None: as if they
            took no time.
        memory: the most bytes of parameters that a stage can hold; one number for all, or one for each. With virtual
            stages it is a check of the plan: each range is kept below it, and not yet their sum.
        virtual: with more than 1, each rank has that many stages, one after each pass through all ranks (Megatron-LM,
            Narayanan et al. 2021, section 2.2).

    Raises:
        InvalidArgument: an argument is none of these; the model has fewer places to cut it than that; its layers take
            more than what the layer before returns, which the text names; ``memory`` is too small, and by how much.
    """
    for name, number in (("stages", stages), ("virtual", virtual)):
        if type(number) is not int or not 1 <= number <= MAX_RANKS:
            raise InvalidArgument(f"plan_stages: {name} must be from 1 to {MAX_RANKS}, not {number!r}")
    rank_shares = resolve_stages("plan_stages", rank_shares, stages)
    if rank_shares is not None:
        checked_rank_shares("plan_stages", rank_shares, stages, "stage")
        rank_shares = tuple(map(float, rank_shares))
    if link is not None and not (isinstance(link, int | float) and link > 0):
        raise InvalidArgument(f"plan_stages: link must be a positive number, not {link!r}")
    limits = _limits(memory, stages)
    return plan_of_layers(
        model, find_layers(model), stages, rank_shares=rank_shares, link=link, limits=limits, virtual=virtual
    )


def plan_of_layers(
    model: nn.Module,
    layers: Layers,
    stages: int,
    *,
    rank_shares: tuple[float, ...] | None = None,
    link: float | None = None,
    limits: Sequence[int] | None = None,
    virtual: int = 1,
) -> StagePlan:
    """:func:`plan_stages`, for a model whose layers are found, and arguments that are checked."""
    layer_bytes, outside = _bytes_of(model, layers)
    taken = [sum(passed.bytes for passed in boundary) for boundary in layers.taken]
    messages = [0, *(None if why else size for size, why in zip(taken[1:], layers.refused[1:]))]
    problem = _Problem(stages, virtual, rank_shares or (1.0,) * stages, link, layer_bytes, outside, messages)
    name = _name_of(model)
    ranges = problem.best(limits) or problem.smallest(limits)
    if ranges is None:
        why = next((f" ({why})" for why in layers.refused if why), "")
        raise InvalidArgument(
            f"plan_stages: {name} can be cut in {len(messages) - messages.count(None)} stages at most{why}, and "
            f"{stages * virtual} were asked for"
        )
    passed = tuple(messages[start] or 0 for start, _ in ranges)
    plan = StagePlan(name, stages, ranges, rank_shares, layer_bytes, outside, passed)
    if limits is not None:
        _require_room(plan, limits)
    return plan


def stages_of(when: Collection[str], stages: int) -> list[int]:
    """Which stages hold a module that is in no layer."""
    if "between" in when:
        return list(range(stages))
    return sorted({0 if name == "before" else stages - 1 for name in when})


class _Problem:
    """The search for a plan: contiguous ranges of layers, so that the slowest range is as fast as can be."""

    def __init__(
        self,
        stages: int,
        virtual: int,
        rank_shares: Sequence[float],
        link: float | None,
        layer_bytes: Sequence[int],
        outside: Mapping[str, int],
        messages: Sequence[int | None],
    ) -> None:
        self.stages, self.chunks, self.rank_shares, self.link = stages, stages * virtual, rank_shares, link
        self.outside, self.messages = outside, messages
        self.sums = [sum(layer_bytes[:number]) for number in range(len(layer_bytes) + 1)]

    def best(self, limits: Sequence[int] | None) -> tuple[Range, ...] | None:
        """The ranges, or None where there are none."""
        return self._least(lambda chunk, start, stop: self._cost(chunk, start, stop, limits))

    def smallest(self, limits: Sequence[int] | None) -> tuple[Range, ...] | None:
        """The ranges that exceed the limits least; None: there are none without limits, either."""
        if limits is None:
            return None
        over = lambda chunk, start, stop: (max(0, self._held(chunk, start, stop) - limits[chunk % self.stages]), 0)
        return self._least(over)

    def _least(self, cost: Any) -> tuple[Range, ...] | None:
        """The ranges whose greatest cost is least, or None, by dynamic programming over chunks and layers."""
        number = len(self.sums) - 1
        ends: list[dict[int, tuple[float, int, int]]] = [{0: (0.0, 0, 0)}]  # cost, bytes sent, where the chunk begins
        for chunk in range(self.chunks):
            found: dict[int, tuple[float, int, int]] = {}
            last = chunk == self.chunks - 1
            for start, (before, sent, _) in ends[-1].items():
                if self.messages[start] is None or start == number:
                    continue
                for stop in [number] if last else range(start + 1, number):
                    if (of_this := cost(chunk, start, stop)) is None:
                        continue
                    # The slowest range counts; where plans are equally fast, the bytes that they send.
                    key = max(before, of_this[0]), sent + of_this[1], start
                    found[stop] = min(found.get(stop, key), key)
            ends.append(found)
        if number not in ends[-1]:
            return None
        stop, ranges = number, list[Range]()
        for found in reversed(ends[1:]):
            ranges.append((found[stop][2], stop))
            stop = found[stop][2]
        return tuple(reversed(ranges))

    def _cost(self, chunk: int, start: int, stop: int, limits: Sequence[int] | None) -> tuple[float, int] | None:
        """How long a chunk takes, and what it receives; None: it does not fit."""
        if limits is not None and self._held(chunk, start, stop) > limits[chunk % self.stages]:
            return None
        received = self.messages[start] or 0
        work = self.sums[stop] - self.sums[start]
        if chunk == self.chunks - 1:
            work += _head(self.outside)
        return work / self.rank_shares[chunk % self.stages] + (received / self.link if self.link else 0), received

    def _held(self, chunk: int, start: int, stop: int) -> int:
        held = self.sums[stop] - self.sums[start]
        return held + _held_outside(self.outside, chunk == 0, chunk == self.chunks - 1)


def _held_outside(outside: Mapping[str, int], first: bool, last: bool) -> int:
    """How many bytes a stage holds of what is in no layer."""
    held = outside["all"] + first * outside["before"] + last * outside["after"]
    return held + (first or last) * outside["both"]


def _head(outside: Mapping[str, int]) -> int:
    """How many bytes the last stage reads of what is in no layer."""
    return outside["after"] + outside["both"]


def _require_room(plan: StagePlan, limits: Sequence[int]) -> None:
    """Raises InvalidArgument where a stage has too little memory. With virtual stages it holds all of its ranges."""
    held = [plan.bytes(stage) for stage in range(plan.stages)]
    stage = max(range(plan.stages), key=lambda stage: held[stage] - limits[stage])
    if held[stage] > limits[stage]:
        raise InvalidArgument(
            f"plan_stages: the memory is too small: stage {stage} would hold {size(held[stage])} of parameters and has "
            f"room for {size(limits[stage])}, {size(held[stage] - limits[stage])} less; more stages need less each"
        )


def _limits(memory: int | Sequence[int] | None, stages: int) -> Sequence[int] | None:
    if memory is None:
        return None
    limits = list(memory) if isinstance(memory, Sequence) else [memory] * stages
    if len(limits) != stages or any(type(limit) is not int or limit < 1 for limit in limits):
        raise InvalidArgument(f"plan_stages: memory must be bytes, one number or {stages}, not {memory!r}")
    return limits


def _bytes_of(model: nn.Module, layers: Layers) -> tuple[tuple[int, ...], dict[str, int]]:
    """Bytes of the parameters of each layer, and of those in no layer by when they are used."""
    modules = dict(model.named_modules())
    each = tuple(_bytes(modules[path]) for path in layers.paths)
    outside = {"before": 0, "after": 0, "both": 0, "all": 0}
    for path, when in layers.outside.items():
        name = "all" if "between" in when else "both" if len(when) > 1 else min(when)
        outside[name] += _bytes(modules[path])
    outside["all"] += _bytes(model) - sum(each) - sum(outside.values())
    return each, outside


def _name_of(model: nn.Module) -> str:
    return str(getattr(model, "model_type", type(model).__name__))


def _bytes(module: nn.Module) -> int:
    return sum(array.nbytes for array in parameters(module).values())


def _shown(pair: Range) -> str:
    start, stop = pair
    return str(start) if stop == start + 1 else f"{start}-{stop - 1}"


_LARGEST = 2**62
_BYTES = validation.number(0, _LARGEST)
_FIELDS: Mapping[str, validation.Check] = {
    "model_type": validation.plain_text(1000, steering=""),
    "stages": validation.number(1, MAX_RANKS),
    "ranges": validation.list_of(validation.row_of(_BYTES, _BYTES), MAX_RANKS**2),
    "rank_shares": validation.or_null(validation.list_of(validation.positive(1e300), MAX_RANKS)),
    "layer_bytes": validation.list_of(_BYTES, 10**6),
    "outside_bytes": validation.object_of(dict.fromkeys(("before", "after", "both", "all"), _BYTES)),
    "message_bytes": validation.list_of(_BYTES, MAX_RANKS**2),
}


def _read(text: str) -> StagePlan:
    plan = StagePlan(**validation.fields_of(_FIELDS, parse_json(text)))
    stops = [0, *(stop for _, stop in plan.ranges)]
    if [start for start, _ in plan.ranges] != stops[:-1] or stops[-1] != len(plan.layer_bytes):
        raise ValueError("the ranges do not have each layer once")
    if any(start >= stop for start, stop in plan.ranges):
        raise ValueError("a range is empty")
    if not plan.ranges or len(plan.ranges) % plan.stages or len(plan.message_bytes) != len(plan.ranges):
        raise ValueError(f"there must be equally many ranges for each of the {plan.stages} stages")
    if plan.rank_shares is not None and len(plan.rank_shares) != plan.stages:
        raise ValueError("rank_shares must be one number per stage")
    return plan
