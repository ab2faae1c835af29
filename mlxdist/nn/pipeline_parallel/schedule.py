"""Schedules of a pipeline: in which order each stage computes the micro-batches of a training step, as data.

    F    the forward pass of a micro-batch on one virtual stage
    B    its backward pass: I and W
    I    the gradient of what the stage has received, which the stage before waits for
    W    the gradients of the stage's parameters, which nothing waits for

gpipe        all forward passes, then all backward passes (Huang et al. 2019, "GPipe", arXiv:1811.06965)
1f1b         one forward, one backward pass in turn, so that a stage keeps the activations of no more micro-batches than
             there are stages behind it (Narayanan et al. 2019, "PipeDream"); with virtual stages the interleaved one of
             Megatron-LM (Narayanan et al. 2021, arXiv:2104.04473, section 2.2)
zero_bubble  the same with B as I and W, and W where a stage would wait (Qi et al. 2023, "Zero Bubble Pipeline
             Parallelism", arXiv:2401.10241: ZB-H1)
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mlxdist.base.environment import MAX_RANKS
from mlxdist.base.errors import InvalidArgument
from mlxdist.base.tables import size
from mlxdist.nn.layout.partition import require_counts

from .one_f_one_b import one_f_one_b
from .timeline import Action, Span, Timeline

__all__ = ["SCHEDULES", "Schedule", "pipeline_schedule"]

SCHEDULES = ("gpipe", "1f1b", "zero_bubble")


class _Event(NamedTuple):
    """The end of an action: "F" or "I" of a micro-batch on a virtual stage, numbered through the model."""

    kind: str
    micro_batch: int
    part: int


@dataclass(frozen=True)
class Schedule:
    """The actions of each rank of a pipeline in a training step. ``str(schedule)`` is its timeline.

    Attributes:
        name: for people.
        stages, virtual: virtual stage ``chunk`` of rank r is part ``chunk * stages + r`` of the model.
        micro_batches: how many a step has.
        actions: of each rank, in their order.
    """

    name: str
    stages: int
    micro_batches: int
    virtual: int
    actions: tuple[tuple[Action, ...], ...]

    def __str__(self) -> str:
        return str(self.simulate())

    def part(self, rank: int, chunk: int) -> int:
        """The number, in the order of the model, of virtual stage ``chunk`` of ``rank``."""
        return chunk * self.stages + rank

    def kept(self, rank: int) -> int:
        """The most pairs of virtual stage and micro-batch whose activations ``rank`` keeps at a time."""
        kept = most = 0
        for action in self.actions[rank]:
            kept += action.kind == "F"
            most = max(most, kept)
            kept -= action.kind in "BW"
        return most

    def check(self, *, activations: int | Sequence[int] = 0, memory: int | Sequence[int] | None = None) -> None:
        """Checks that every stage does everything once and no two wait for each other; and that memory suffices.

        Args:
            activations: bytes that a micro-batch leaves on a virtual stage until its backward pass; one number for all
                ranks, or one for each.
            memory: the most bytes of activations on a rank, likewise; ``None``: no limit.

        Raises:
            InvalidArgument: with the rank and the action that is wrong, or by how much the memory is too small.
        """
        require_counts("Schedule", stages=self.stages, micro_batches=self.micro_batches, virtual=self.virtual)
        if len(self.actions) != self.stages:
            raise InvalidArgument(f"Schedule: there are actions for {len(self.actions)} ranks, not {self.stages}")
        for rank in range(self.stages):
            self._check_complete(rank)
        self._check_messages()
        self.simulate()
        for rank, (each, limit) in enumerate(zip(_each(activations, self.stages), _each(memory, self.stages))):
            if limit is not None and (needed := self.kept(rank) * (each or 0)) > limit:
                raise InvalidArgument(
                    f"Schedule: rank {rank} keeps the activations of {self.kept(rank)} micro-batches at a time, "
                    f"{size(needed)}, and has room for {size(limit)}, {size(needed - limit)} less; take 1f1b, more and "
                    "smaller micro-batches, or gradient checkpointing"
                )

    def simulate(
        self,
        *,
        forward: float = 1.0,
        input_gradient: float = 1.0,
        weight_gradient: float = 1.0,
        message: float = 0.0,
        speeds: Sequence[float] | None = None,
    ) -> Timeline:
        """Computes when each action begins and ends, if actions take given times on a virtual stage of speed 1.

        Args:
            forward, input_gradient, weight_gradient: how long F, I and W take; B takes the sum of the last two, and its
                gradient leaves after the first.
            message: how long an activation or gradient is on its way. Ranks compute meanwhile.
            speeds: of each rank; ``None``: all are 1.

        Raises:
            InvalidArgument: ranks wait for each other, with the action that each waits in.
        """
        costs = {"F": forward, "I": input_gradient, "W": weight_gradient, "B": input_gradient + weight_gradient}
        speed = [1.0] * self.stages if speeds is None else list(speeds)
        ends: dict[_Event, float] = {}
        spans: list[list[Span]] = [[] for _ in self.actions]
        while sum(map(len, spans)) < sum(map(len, self.actions)):
            before = sum(map(len, spans))
            for rank, row in enumerate(self.actions):
                while len(spans[rank]) < len(row):
                    action = row[len(spans[rank])]
                    needed = list(self._needed(rank, action))
                    if not all(event in ends for event in needed):
                        break
                    # Virtual stages of one rank pass arrays on without a message.
                    arrivals = [ends[event] + message * (event.part % self.stages != rank) for event in needed]
                    start = max([spans[rank][-1].end if spans[rank] else 0.0, *arrivals])
                    spans[rank].append(Span(action, start, start + costs[action.kind] / speed[rank]))
                    if action.kind != "W":  # what B sends leaves once its I is computed
                        ends[self._event(rank, action)] = start + costs[action.kind.replace("B", "I")] / speed[rank]
            if sum(map(len, spans)) == before:
                stuck = [
                    f"rank {rank} in {row[len(spans[rank])]}"
                    for rank, row in enumerate(self.actions)
                    if len(spans[rank]) < len(row)
                ]
                raise InvalidArgument(f"Schedule: the ranks wait for each other: {', '.join(stuck)}")
        title = f"{self.name}: {self.stages} stages, {self.micro_batches} micro-batches"
        title += f", {self.virtual} virtual stages each" if self.virtual > 1 else ""
        return Timeline(title, tuple(map(tuple, spans)))

    def _event(self, rank: int, action: Action) -> _Event:
        return _Event("F" if action.kind == "F" else "I", action.micro_batch, self.part(rank, action.chunk))

    def _needed(self, rank: int, action: Action) -> Iterator[_Event]:
        """The events that must have happened before an action begins."""
        own = self._event(rank, action)
        if action.kind == "W":
            yield own
        elif action.kind == "F":
            if own.part > 0:
                yield own._replace(part=own.part - 1)
        else:
            yield own._replace(kind="F")
            if own.part < self.stages * self.virtual - 1:
                yield own._replace(part=own.part + 1)

    def _check_complete(self, rank: int) -> None:
        """Checks that a rank has F and B, or F, I and W, of each micro-batch on each virtual stage."""
        done: dict[tuple[int, int], str] = {}
        for action in self.actions[rank]:
            key = action.micro_batch, action.chunk
            before = done.get(key, "")
            if not (0 <= key[0] < self.micro_batches and 0 <= key[1] < self.virtual):
                raise InvalidArgument(f"Schedule: rank {rank} has {action}, a micro-batch or stage that there is not")
            if before + action.kind not in ("F", "FB", "FI", "FIW"):
                raise InvalidArgument(f"Schedule: rank {rank} has {action} after {before or 'nothing'} of the same")
            done[key] = before + action.kind
        for number in range(self.micro_batches):
            for chunk in range(self.virtual):
                if done.get((number, chunk), "") not in ("FB", "FIW"):
                    raise InvalidArgument(
                        f"Schedule: rank {rank} has no complete backward pass of micro-batch {number} on its virtual "
                        f"stage {chunk}"
                    )

    def _check_messages(self) -> None:
        """Checks that two ranks have their messages in one order: the receiver takes the first that was sent."""
        events = [
            [self._event(rank, action) for action in row if action.kind != "W"] for rank, row in enumerate(self.actions)
        ]
        parts = range(self.stages * self.virtual)
        for kind, step in (("F", 1), ("I", -1)):
            for rank in range(self.stages):
                peer = (rank + step) % self.stages
                sent = [(event.micro_batch, event.part + step) for event in events[rank] if event.kind == kind]
                received = [(event.micro_batch, event.part) for event in events[peer] if event.kind == kind]
                if [one for one in sent if one[1] in parts] != [one for one in received if one[1] - step in parts]:
                    raise InvalidArgument(
                        f"Schedule: rank {rank} sends to rank {peer} in another order than that rank receives in"
                    )


def pipeline_schedule(name: str, stages: int, micro_batches: int, virtual: int = 1) -> Schedule:
    """A schedule by its name: "gpipe", "1f1b" or "zero_bubble".

    The bubble is the share of time in which ranks are idle. It is ``(p - 1) / (m v + p - 1)`` at most for p stages that
    are equally fast, m micro-batches, a multiple of p, and v virtual stages, where messages take no time. That is the
    bubble of the papers, where a gradient leaves once all of B is computed. With zero_bubble it is
    ``(p - 1) / (3 m v + p - 1)`` where F, I and W take equally long and v is 1.

    Args:
        name: of the schedule.
        stages: ranks of the pipeline.
        micro_batches: of a step.
        virtual: stages of each rank.

    Raises:
        InvalidArgument: there is no such schedule, or a number is no positive integer.
    """
    if name not in SCHEDULES:
        raise InvalidArgument(f"pipeline_schedule: there is no schedule {name!r}; there are {', '.join(SCHEDULES)}")
    require_counts("pipeline_schedule", stages=stages, micro_batches=micro_batches, virtual=virtual)
    if stages > MAX_RANKS:
        raise InvalidArgument(f"pipeline_schedule: stages must be from 1 to {MAX_RANKS}, not {stages}")
    rows = one_f_one_b(stages, micro_batches, virtual, all_forward=name == "gpipe", splits=name == "zero_bubble")
    return Schedule(name, stages, micro_batches, virtual, tuple(rows))


def _each(value: int | Sequence[int] | None, ranks: int) -> Sequence[int | None]:
    """The values for each rank, from one for all ranks or one for each."""
    values = list(value) if isinstance(value, Sequence) else [value] * ranks
    if len(values) != ranks or any(one is not None and (type(one) is not int or one < 0) for one in values):
        raise InvalidArgument(f"Schedule: activations and memory are bytes, one number or {ranks}, not {value!r}")
    return values
