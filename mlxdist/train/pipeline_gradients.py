"""The gradients of a training step of a pipeline: what a schedule says, with messages between the stages.

MLX is lazy, so one ``mx.vjp`` of a stage is the graph of F, I and W of a micro-batch: evaluating its outputs is F, the
gradient of what the stage has received is I, those of the parameters are W. What is received, and the cotangents, are
messages that arrive while the action before is computed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from mlxdist.base.errors import InvalidArgument
from mlxdist.nn.pipeline_parallel import Schedule, Stage
from mlxdist.nn.pipeline_parallel.layers import Boundary, Passed
from mlxdist.nn.pipeline_parallel.timeline import Action, Stamps
from mlxdist.nn.pipeline_parallel.transfer import GradientTransfer
from mlxdist.runtime.operations.collectives import all_sum

from . import gradient_accumulation
from .gradient_averaging import NAME, Averaging
from .gradient_buckets import sum_dtype
from .lost_terms import LostTerms
from .stage_terms import collecting
from .step_gradients import Part, StepGradients

__all__ = ["PipelineGradients"]

Arrays = list[mx.array]


@dataclass
class _Graph:
    """What is computed, or will be, of a micro-batch on a virtual stage.

    Attributes:
        received, outputs: what the stage takes, and what it returns: for the next one, or the loss.
        cotangents: the gradients of ``outputs``, which the next stage sends.
        sent: the gradients of ``received``.
        gradients: of the parameters, by number.
        kept: sums of gradients that modules of fully_shard keep for the last micro-batch.
        receives: whether the cotangents are on their way.
    """

    received: Arrays
    outputs: Arrays
    cotangents: Arrays
    sent: Arrays
    gradients: dict[int, mx.array]
    kept: Arrays
    receives: bool = False


class PipelineGradients(StepGradients):
    """One call of :func:`value_and_grad` of a model in stages.

    ``fn`` is called on all stages. On those but the last its result is made of zeros, and not evaluated.
    """

    def __init__(self, averaging: Averaging, fn: Callable[..., Any], schedule: Schedule, stage: Stage) -> None:
        super().__init__(averaging, fn, schedule.micro_batches)
        assert stage.transfer is not None  # of more than one stage
        self._schedule, self._stage = schedule, stage
        self._transfer, self._gradients = stage.transfer, GradientTransfer.of(stage.group)
        self._last = schedule.stages * schedule.virtual - 1
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._received: dict[tuple[int, int], Arrays] = {}

    def _begin(self, tree: Any, parts: list[Part], is_new: bool) -> list[int]:
        with collecting() as terms:
            value, self._shape = self._stage.shape_of_call(lambda: self._fn(*parts[0][0], **parts[0][1]))
        self._weighted(value)  # or InvalidArgument
        self._terms = len(terms.sums)
        # What passes between stages besides activations: the sums of these terms, (1, 1, terms).
        self._totals: Boundary = (Passed("", -1, (1, self._terms), mx.float32),) if self._terms else ()
        self._is_weighted, self._values = isinstance(value, tuple), [value] * self._count
        if is_new:
            lost = LostTerms(self._averaging.model, self._stage, self._weighted, self._is_weighted)
            lost.check(self._fn, parts[0], self._shape)
        self._inputs = [gradient_accumulation.arrays_of(part) for part in parts]
        parameters: Any = tree_flatten(tree)
        self._parameters = list(parameters)
        self._places = [
            [place for place, (path, _) in enumerate(parameters) if self._stage.is_in_chunk(path, chunk)]
            for chunk in range(self._schedule.virtual)
        ]
        return list(reversed(range(len(parameters))))

    def _sums(self, tree: Any, parts: list[Part]) -> dict[int, mx.array]:
        sums: dict[int, mx.array] = {}
        if self._stage.stamps is not None:
            self._stage.stamps.report()  # of the step before, which has ended by now, or nearly
        stamps = self._stage.stamps = Stamps()
        actions = self._schedule.actions[self._stage.index]
        for action, following in zip(actions, [*actions[1:], None]):
            self._receive(action)
            if following is not None:  # arrives while this one is computed
                self._receive(following)
            stamps.end(self._started(action, tree, parts, sums, stamps))
        for place, (path, array) in enumerate(self._parameters):
            if place not in sums:
                sums[place] = mx.zeros(array.shape, sum_dtype(array.dtype))
            if (group := self._stage.group_of(path)) is not None:
                sums[place] = all_sum(sums[place], group=group, stream=self._transfer.stream)
                mx.async_eval(sums[place])  # one by one, on all ranks
        return sums

    def _receive(self, action: Action) -> None:
        """Starts to receive what an action needs, if that is not done yet and is known already."""
        key, part = (action.micro_batch, action.chunk), self._schedule.part(self._stage.index, action.chunk)
        if action.kind == "F" and key not in self._received:
            self._received[key] = (
                self._recv(self._transfer, part, -1, self._inputs[action.micro_batch]) if part > 0 else []
            )
            mx.async_eval(self._received[key])
        elif action.kind in "BI" and part < self._last and key in self._graphs and not self._graphs[key].receives:
            self._graphs[key].receives = True
            mx.async_eval(self._graphs[key].cotangents)

    def _started(
        self, action: Action, tree: Any, parts: list[Part], sums: dict[int, mx.array], stamps: Stamps
    ) -> Arrays:
        """Starts an action. Returns what it computes."""
        key, part = (action.micro_batch, action.chunk), self._schedule.part(self._stage.index, action.chunk)
        if action.kind == "F":
            graph = self._graphs[key] = self._graph(*key, part, tree, parts[action.micro_batch])
            stamps.begin(action, graph.received)
            mx.async_eval(graph.outputs)
            if part < self._last:
                self._send(self._transfer, graph.outputs, part, 1, self._inputs[action.micro_batch])
            outputs, graph.outputs = graph.outputs, []  # the backward pass does not need them
            return outputs
        graph = self._graphs[key]
        cotangents = graph.cotangents if part < self._last and action.kind in "BI" else []
        stamps.begin(action, cotangents)
        computed: Arrays = []
        if action.kind in "BI" and part > 0:
            computed += graph.sent
            mx.async_eval(graph.sent)
            self._send(self._gradients, graph.sent, part, -1)
        if action.kind in "BW":
            for place, array in graph.gradients.items():
                wide = array.astype(sum_dtype(array.dtype)) if self._count > 1 else array
                sums[place] = sums[place] + wide if place in sums else wide
                computed.append(sums[place])
            computed += graph.kept
            mx.async_eval(computed)
            del self._graphs[key]
        return computed

    def _graph(self, number: int, chunk: int, part: int, tree: Any, arguments: Part) -> _Graph:
        """Of a micro-batch on this stage: nothing is computed yet."""
        stage, model = self._stage, self._averaging.model
        received = self._received.pop((number, chunk))
        cotangents = self._recv(self._gradients, part + 1, 1) if part < self._last else [mx.array(1.0)]
        places = self._places[chunk]
        values: list[Any] = []

        def run(*arrays: mx.array) -> Arrays:
            own, hidden = arrays[: len(places)], list(arrays[len(places) :])
            model.update(tree_unflatten([(self._parameters[place][0], x) for place, x in zip(places, own)]))
            before = list(hidden.pop().reshape(-1)) if self._terms and part > 0 else []
            with collecting(before) as terms:
                value, outputs = stage.within(lambda: self._called(*arguments), hidden or None, chunk)
            if (found := len(terms.sums)) != self._terms:
                raise InvalidArgument(
                    f"{NAME}: fn calls stage_loss {found} times with the layers of a stage, and {self._terms} times "
                    "without them; call it equally often, with 0 where a stage has no such term"
                )
            values.append(value)
            if part == self._last:
                return [self._weighted(value).astype(mx.float32)]
            return [*outputs, *([mx.stack(terms.sums).reshape(1, 1, -1)] if terms.sums else [])]

        before = dict(self._kept.gradients)
        try:
            with gradient_accumulation.working_on(self._kept, number, self._count):
                inputs = [self._parameters[place][1] for place in places] + received
                outputs, gradients = mx.vjp(run, inputs, cotangents)
        finally:
            model.update(tree)
        if part == self._last or not stage.is_last:  # of its tokens all stages know how many they are
            self._values[number] = values[0]
        found = {place: (self._parameters[place][0], array) for place, array in zip(places, gradients)}
        kept = [array for key, array in self._kept.gradients.items() if before.get(key) is not array]
        return _Graph(received, outputs, cotangents, gradients[len(places) :], self._counted(values[0], found), kept)

    def _recv(self, transfer: Any, part: int, step: int, inputs: Sequence[mx.array] = ()) -> Arrays:
        """What passes between ``part - 1`` and ``part``, or its gradient."""
        boundary = self._stage.boundary(part)
        batch, length = self._shape
        peer = (self._stage.index + step) % self._schedule.stages
        received: Arrays = transfer.recv(boundary, batch, length, peer, inputs=inputs)
        return [*received, *transfer.recv(self._totals, 1, 1, peer, None, *received[-1:])]

    def _send(self, transfer: Any, arrays: Arrays, part: int, step: int, inputs: Sequence[mx.array] = ()) -> None:
        boundary = self._stage.boundary(part + 1 if step == 1 else part)
        peer, count = (self._stage.index + step) % self._schedule.stages, len(boundary)
        sent = transfer.send(arrays[:count], peer, boundary, inputs=inputs)
        mx.async_eval(sent, transfer.send(arrays[count:], peer, self._totals, None, *sent[-1:]))

    def _waiting(self) -> Arrays:
        return []

    def _value(self) -> Any:
        """That of the last stage, on all."""
        value = super()._value()

        def shared(leaf: Any) -> Any:
            if not isinstance(leaf, mx.array):
                return leaf
            own = leaf if self._stage.is_last else mx.zeros(leaf.shape, leaf.dtype)
            found = self._transfer.broadcast(own, self._schedule.stages - 1, 0)
            mx.async_eval(found)
            return found

        return tree_map(shared, value)
