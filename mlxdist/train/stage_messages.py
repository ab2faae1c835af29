"""The messages between the stages of a pipeline in a training step: activations, and their gradients.

A stage receives the messages of an action while it computes the action before.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlxdist.nn.pipeline_parallel import Schedule, Stage
from mlxdist.nn.pipeline_parallel.layers import Boundary, Passed
from mlxdist.nn.pipeline_parallel.stage import calls_of
from mlxdist.nn.pipeline_parallel.timeline import Action
from mlxdist.nn.pipeline_parallel.transfer import GradientTransfer, Transfer

__all__ = ["StageMessages"]

Arrays = list[mx.array]
Key = tuple[int, int]  # micro-batch, virtual stage of this rank


class StageMessages:
    """The messages of this stage in one step, and what it has received. Collective, as ``Channel.of`` is.

    Args:
        stage: one of several stages.
        schedule: the schedule of the step.
    """

    def __init__(self, stage: Stage, schedule: Schedule) -> None:
        assert stage.transfer is not None  # of more than one stage
        self._stage, self._schedule = stage, schedule
        self._forward, self._backward = stage.transfer, GradientTransfer.of(stage.group)
        self._activations: dict[Key, Arrays] = {}
        self._cotangents: dict[Key, Arrays] = {}  # that are not asked for yet

    def describe(self, shape: tuple[int, int], terms: int, inputs: Sequence[Arrays]) -> None:
        """Takes the sizes of the step's messages, and is called before all of them.

        Args:
            shape: of the tokens of a micro-batch: (batch, length).
            terms: how many sums of :func:`stage_loss` pass with the activations, as one array of shape (1, 1, terms).
            inputs: the arguments of each micro-batch, which stages compare.
        """
        self._shape, self._inputs = shape, inputs
        self._totals: Boundary = (Passed("", -1, (1, terms), mx.float32),) if terms else ()

    def is_first(self, chunk: int) -> bool:
        """Whether a virtual stage of this rank is the first of the model."""
        return self._part(chunk) == 0

    def is_last(self, chunk: int) -> bool:
        """Whether a virtual stage of this rank is the last of the model."""
        return self._part(chunk) == self._schedule.stages * self._schedule.virtual - 1

    def receive(self, action: Action) -> None:
        """Starts to receive what an action needs, if that is not done yet and is known already."""
        key = (action.micro_batch, action.chunk)
        if action.kind == "F" and key not in self._activations:
            inputs = self._inputs[action.micro_batch]
            first = self.is_first(action.chunk)
            self._activations[key] = [] if first else self._recv(self._forward, self._part(action.chunk), -1, inputs)
            mx.async_eval(self._activations[key])
        elif action.kind in "BI":
            mx.async_eval(self._cotangents.pop(key, []))

    def take_activations(self, key: Key) -> Arrays:
        """The arrays that F of a micro-batch takes, which :meth:`receive` has begun to receive; none on the first."""
        return self._activations.pop(key)

    def cotangents(self, key: Key) -> Arrays:
        """The gradients of F's outputs: of the loss, or those that the next stage sends, from :meth:`receive` on."""
        if self.is_last(key[1]):
            return [mx.array(1.0)]
        self._cotangents[key] = self._recv(self._backward, self._part(key[1]) + 1, 1)
        return self._cotangents[key]

    def send_activations(self, key: Key, arrays: Arrays) -> None:
        """Sends activations to the next stage; the last stage sends none."""
        if not self.is_last(key[1]):
            self._send(self._forward, arrays, self._part(key[1]) + 1, 1, self._inputs[key[0]])

    def send_gradients(self, key: Key, arrays: Arrays) -> None:
        """Sends the gradients of the activations to the stage before; the first stage sends none."""
        if not self.is_first(key[1]):
            self._send(self._backward, arrays, self._part(key[1]), -1)

    @property
    def stream(self) -> Any:
        """The stream of the activations that leave."""
        return self._forward.stream

    def of_last_stage(self, array: mx.array) -> mx.array:
        """The last stage's array, on all stages; of the others only shape and dtype count."""
        own = array if self._stage.is_last else mx.zeros(array.shape, array.dtype)
        found = self._forward.broadcast(own, self._schedule.stages - 1, 0)
        mx.async_eval(found)
        return found

    def _part(self, chunk: int) -> int:
        return self._schedule.part(self._stage.index, chunk)

    def _recv(self, transfer: Transfer, part: int, step: int, inputs: Arrays | None = None) -> Arrays:
        """Receives the arrays that pass between ``part - 1`` and ``part``, or their gradients."""
        peer = (self._stage.index + step) % self._schedule.stages
        received = transfer.recv(calls_of(self._stage).boundary(part), *self._shape, peer, inputs=inputs or ())
        return [*received, *transfer.recv(self._totals, 1, 1, peer, None, *received[-1:])]

    def _send(self, transfer: Transfer, arrays: Arrays, part: int, step: int, inputs: Arrays | None = None) -> None:
        """Sends the arrays that :meth:`_recv` receives."""
        boundary = calls_of(self._stage).boundary(part)
        peer, count = (self._stage.index + step) % self._schedule.stages, len(boundary)
        sent = transfer.send(arrays[:count], peer, boundary, inputs=inputs or ())
        mx.async_eval(sent, transfer.send(arrays[count:], peer, self._totals, None, *sent[-1:]))
