"""The gradients of a training step of a pipeline, computed by a schedule, with messages between the stages.

MLX is lazy, so one ``mx.vjp`` of a stage is the graph of F, I and W of a micro-batch: evaluating its outputs is F, the
gradient of what the stage has received is I, those of the parameters are W.
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from mlxdist.base.errors import InvalidArgument
from mlxdist.nn.pipeline_parallel import Schedule, Stage
from mlxdist.nn.pipeline_parallel.stage import calls_of, parameters_of
from mlxdist.nn.pipeline_parallel.timeline import Action, Stamps
from mlxdist.runtime.operations.collectives import all_sum

from . import gradient_accumulation
from .gradient_accumulation import MicroBatch
from .gradient_averaging import NAME
from .gradient_buckets import sum_dtype
from .lost_terms import LostTerms
from .stage_messages import StageMessages
from .stage_terms import collecting
from .step_loss import StepLoss

__all__ = ["PipelineGradients"]

Arrays = list[mx.array]
Key = tuple[int, int]  # micro-batch, virtual stage of this rank


@dataclass
class _Graph:
    """The graph of a micro-batch on a virtual stage, parts of which may be computed already.

    Attributes:
        received, outputs: the arrays that the stage takes, and those that it returns: for the next stage, or the loss.
        cotangents: the gradients of ``outputs``.
        sent: the gradients of ``received``.
        gradients: the gradients of the parameters, by number.
        kept: sums of gradients that modules of fully_shard keep for the last micro-batch.
    """

    received: Arrays
    outputs: Arrays
    cotangents: Arrays
    sent: Arrays
    gradients: dict[int, mx.array]
    kept: Arrays


class PipelineGradients:
    """Implements ``GradientSums`` of step_gradients.py, for a model in stages.

    ``fn`` is called on all stages. On those but the last its result is made of zeros, and not evaluated. Made by all
    stages, which then have a group for the gradients that pass.
    """

    def __init__(self, loss: StepLoss, schedule: Schedule, stage: Stage) -> None:
        self._loss, self._schedule, self._stage = loss, schedule, stage
        self._calls, self._held_by = calls_of(stage), parameters_of(stage)
        self._model, self._messages = loss.averaging.model, StageMessages(stage, schedule)
        self._graphs: dict[Key, _Graph] = {}
        self._sums: dict[int, mx.array] = {}
        self.stage_losses = 0

    def prepare(self, tree: Any, micro_batches: list[MicroBatch], is_new: bool) -> list[int]:
        loss, stage = self._loss, self._stage
        self._tree, self._micro_batches = tree, micro_batches
        args, kwargs = micro_batches[0]
        with collecting() as terms:
            value, shape = self._calls.shape_of_call(lambda: loss.fn(*args, **kwargs))
        loss.weighted(value)  # or InvalidArgument
        self.stage_losses = len(terms.sums)
        loss.is_weighted, loss.values = isinstance(value, tuple), [value] * loss.micro_batches
        if is_new:
            LostTerms(self._model, stage, loss.weighted, loss.is_weighted).check(loss.fn, micro_batches[0], shape)
        inputs = [gradient_accumulation.arrays_of(arguments) for arguments in micro_batches]
        self._messages.describe(shape, self.stage_losses, inputs)
        parameters: Any = tree_flatten(tree)
        self._parameters = list(parameters)
        self._places = [
            [place for place, (path, _) in enumerate(parameters) if self._held_by.is_in_chunk(path, chunk)]
            for chunk in range(self._schedule.virtual)
        ]
        return list(reversed(range(len(parameters))))

    def sums(self) -> dict[int, mx.array]:
        calls, sums = self._calls, self._sums
        if calls.stamps is not None:
            calls.stamps.report()  # of the step before, which has ended by now, or nearly
        stamps = calls.stamps = Stamps()
        actions = self._schedule.actions[calls.index]
        for action, following in zip(actions, [*actions[1:], None]):
            self._messages.receive(action)
            if following is not None:  # arrives while this one is computed
                self._messages.receive(following)
            start = self._start_forward if action.kind == "F" else self._start_backward
            stamps.end(start(action, stamps))
        stream = self._messages.stream
        for place, (path, array) in enumerate(self._parameters):
            if place not in sums:
                sums[place] = mx.zeros(array.shape, sum_dtype(array.dtype))
            if (group := self._held_by.group_of(path)) is not None:
                sums[place] = all_sum(sums[place], group=group, stream=stream)
                mx.async_eval(sums[place])  # one by one, on all ranks
        return sums

    def unfinished(self) -> Arrays:
        return []

    def result(self) -> Any:
        """The last stage's result, on all stages."""

        def shared(leaf: Any) -> Any:
            return self._messages.of_last_stage(leaf) if isinstance(leaf, mx.array) else leaf

        return tree_map(shared, self._loss.result())

    def _start_forward(self, action: Action, stamps: Stamps) -> Arrays:
        """Starts F. Returns the arrays that it computes."""
        key = (action.micro_batch, action.chunk)
        graph = self._graphs[key] = self._graph(key)
        stamps.begin(action, graph.received)
        mx.async_eval(graph.outputs)
        self._messages.send_activations(key, graph.outputs)
        outputs, graph.outputs = graph.outputs, []  # the backward pass does not need them
        return outputs

    def _start_backward(self, action: Action, stamps: Stamps) -> Arrays:
        """Starts I, W, or both. Returns the arrays that they compute."""
        key = (action.micro_batch, action.chunk)
        graph, computed = self._graphs[key], Arrays()
        is_last = self._messages.is_last(action.chunk)
        stamps.begin(action, graph.cotangents if action.kind in "BI" and not is_last else [])
        if action.kind in "BI" and not self._messages.is_first(action.chunk):
            computed += graph.sent
            mx.async_eval(graph.sent)
            self._messages.send_gradients(key, graph.sent)
        if action.kind in "BW":
            for place, array in graph.gradients.items():
                wide = array.astype(sum_dtype(array.dtype)) if self._loss.micro_batches > 1 else array
                self._sums[place] = self._sums[place] + wide if place in self._sums else wide
                computed.append(self._sums[place])
            computed += graph.kept
            mx.async_eval(computed)
            del self._graphs[key]
        return computed

    def _graph(self, key: Key) -> _Graph:
        """Builds the graph of a micro-batch on a virtual stage; nothing is computed yet."""
        number, chunk = key
        loss, stage, messages = self._loss, self._stage, self._messages
        places, arguments = self._places[chunk], self._micro_batches[number]
        received, cotangents = messages.take_activations(key), messages.cotangents(key)
        values: list[Any] = []

        def run(*arrays: mx.array) -> Arrays:
            own, hidden = arrays[: len(places)], list(arrays[len(places) :])
            self._model.update(tree_unflatten([(self._parameters[place][0], x) for place, x in zip(places, own)]))
            before = list(hidden.pop().reshape(-1)) if self.stage_losses and not messages.is_first(chunk) else []
            with collecting(before) as terms:
                value, outputs = self._calls.within(lambda: loss.call(*arguments), hidden or None, chunk)
            self._require_stage_losses(len(terms.sums))
            values.append(value)
            if messages.is_last(chunk):
                return [loss.weighted(value).astype(mx.float32)]
            return [*outputs, *([mx.stack(terms.sums).reshape(1, 1, -1)] if terms.sums else [])]

        before = loss.kept_gradients
        try:
            with loss.micro_batch(number):
                inputs = [self._parameters[place][1] for place in places] + received
                outputs, gradients = mx.vjp(run, inputs, cotangents)
        finally:
            self._model.update(self._tree)
        if messages.is_last(chunk) or not stage.is_last:  # of its tokens all stages know how many they are
            loss.values[number] = values[0]
        found = {place: (self._parameters[place][0], array) for place, array in zip(places, gradients)}
        kept = [array for name, array in loss.kept_gradients.items() if before.get(name) is not array]
        return _Graph(received, outputs, cotangents, gradients[len(places) :], loss.counted(values[0], found), kept)

    def _require_stage_losses(self, found: int) -> None:
        if found != self.stage_losses:
            raise InvalidArgument(
                f"{NAME}: fn calls stage_loss {found} times with the layers of a stage, and {self.stage_losses} times "
                "without them; call it equally often, with 0 where a stage has no such term"
            )
