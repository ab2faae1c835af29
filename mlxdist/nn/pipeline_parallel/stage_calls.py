"""Calls of a model in stages: all of it on all stages together, or this stage alone.

mlx-lm's models compute masks, positions and layer types in the code around their layers. So a stage runs that code
with all layers in their places: the layers of other stages hold nothing and compute nothing, and the first of its own
layers takes the arrays that the stage before has sent.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from mlxdist.base.errors import InvalidArgument
from mlxdist.nn.equal_inputs import inputs_of
from mlxdist.runtime.group.group import Group
from mlxdist.runtime.native import bridge
from mlxdist.runtime.operations.ordering import Order

from ..interception import become, derived
from .layers import Boundary, Layers, Like, at, with_value
from .missing_layers import advance
from .stage_plan import StagePlan
from .timeline import Stamps
from .transfer import Transfer

__all__ = ["StageCalls"]


class StageCalls:
    """Calls of the model on this stage: which layers it computes, and which messages it receives and sends.

    Attributes:
        model: in stages.
        index, stages: this stage, and how many there are.
        chunks: the layers of this rank, a range for each of its virtual stages.
        transfer: the messages between stages; None: there is one stage.
        stamps: the times of the actions of the last training step, taken while these are computed; None: there was no
            step.
        chunk: the virtual stage that :meth:`within` and :meth:`shape_of_call` compute; None outside.
    """

    def __init__(self, model: nn.Module, layers: Layers, stage_plan: StagePlan, group: Group) -> None:
        self._layers, self._ranges = layers, stage_plan.ranges
        self.index, self.stages = group.rank(), group.size()
        self.chunks = stage_plan.chunks_of(self.index)
        self.transfer = Transfer.of(group) if self.stages > 1 else None
        self.model = model
        # By the class of now: later the model gets one whose __call__ is `connected`, which would call itself.
        self._model = partial(type(model).__call__, model)
        likes: dict[Like, Like] = {}  # equal ones become one, by whose identity zeros are found
        self._results = [
            tree_map(lambda x: likes.setdefault(x, x) if isinstance(x, Like) else x, result)
            for result in layers.results
        ]
        self.inside = {chunk: self._inside(chunk) for chunk in self.chunks}  # layers that are called as they are
        self._run: _Run | None = None
        self._alone: Callable[..., Any] | None = None  # in place of the model, while a loss calls it
        self.chunk: int | None = None
        self.stamps: Stamps | None = None
        self._calls = 0
        self._receives, self._sends = Order(Transfer.incoming), Order(Transfer.stream)  # of all calls

    def alone(self, tokens: mx.array, hidden: Sequence[mx.array] | None, cache: Any, chunk: int) -> Any:
        """See ``Stage.__call__``."""
        run = self._run_of(chunk, tokens.shape, hidden)
        if cache is not None and len(self.chunks) > 1:
            raise InvalidArgument("virtual stages are for training and have no cache")
        logits = self._called(run, tokens, cache=cache)
        return logits if self.chunks[chunk].stop == len(self._layers.paths) else run.left

    def within(
        self, function: Callable[[], Any], hidden: Sequence[mx.array] | None, chunk: int = 0
    ) -> tuple[Any, list[mx.array]]:
        """Calls a function in which ``model(tokens, ...)`` is this stage alone, once.

        Returns:
            The function's result, and the arrays that the next stage takes. The result is of use on the last stage
            alone: on the others it is made of placeholders with the shape of the logits, which must not be evaluated.

        Raises:
            InvalidArgument: the function does not call the model once.
        """
        runs: list[_Run] = []

        def call(tokens: mx.array, *args: Any, **keywords: Any) -> Any:
            runs.append(self._run_of(chunk, tokens.shape, hidden))
            return self._called(runs[-1], tokens, *args, **keywords)

        value = self._with_model(call, function, chunk)
        if len(runs) != 1:
            raise InvalidArgument(f"what trains a model in stages calls it once, not {len(runs)} times")
        return value, runs[0].left

    def shape_of_call(self, function: Callable[[], Any], chunk: int = 0) -> tuple[Any, tuple[int, int]]:
        """Returns the result of ``function``, not to be evaluated, and the shape of the tokens it gives to the model.

        No layer is called. ``chunk``: the virtual stage whose parameters ``Stage.trainable_parameters`` returns.
        """
        shapes: list[Any] = []

        def call(tokens: mx.array, *args: Any, **keywords: Any) -> Any:
            shapes.append(tokens.shape)
            return self._called(_Run({}, tokens.shape), tokens, *args, **keywords)

        value = self._with_model(call, function, chunk)
        if len(shapes) != 1 or len(shapes[0]) != 2:
            raise InvalidArgument(
                "what trains a model in stages calls it once, with tokens of shape (batch, length), not with "
                f"{', '.join(map(str, shapes)) or 'none'}"
            )
        return value, shapes[0]

    def connected(self, tokens: mx.array, *args: Any, **keywords: Any) -> Any:
        """The logits of the full model, on all ranks, which call it with the same arguments: ``model(...)``."""
        if self._alone is not None:
            return self._alone(tokens, *args, **keywords)
        if self.transfer is None:
            return self._model(tokens, *args, **keywords)
        inputs = inputs_of(tokens, *args, *keywords.values())
        embeddings = keywords.get("input_embeddings")  # of mlx-lm, which may come without tokens
        shape = tokens.shape if embeddings is None else embeddings.shape[:2]
        run = _ConnectedRun(self, self.transfer, shape, inputs)
        logits = self._called(run, tokens, *args, **keywords)
        if self.index < self.stages - 1:  # these are made of zeros: only their shape is right
            (logits,) = mx.depends([mx.zeros(logits.shape, logits.dtype)], run.messages)
        self._calls += 1
        return self.transfer.broadcast(logits, self.stages - 1, self._calls)

    def route(self, layer: nn.Module, number: int) -> None:
        """Routes the calls of ``layer``, number ``number`` of the model, through :meth:`call_layer`."""

        kind: Any = type(layer)

        def __call__(layer: nn.Module, *args: Any, **keywords: Any) -> Any:
            run = self._run
            if run is None or number in run.inside:  # the common case, for each token and layer
                return kind.__call__(layer, *args, **keywords)
            return self.call_layer(run, kind, number, layer, [list(args), keywords])

        become(layer, derived(kind, {"__call__": __call__}))

    def call_layer(self, run: "_Run", kind: Any, number: int, layer: nn.Module, arguments: list[Any]) -> Any:
        """Handles the model's call of a layer: computes it, or stands in for it if another stage has it."""
        taken = self._layers.taken[number]
        if number in run.stops:
            run.leave(number, [at(arguments, passed.at) for passed in taken])
        if number in run.starts:
            run.begin(taken, number)
        if number not in run.computed:
            return self._skip(run, number, arguments)
        for passed in taken:  # where the model has zeros for what has come from another stage
            if passed.origin in run.received:
                arguments = with_value(arguments, passed.at, run.received[passed.origin])
        return kind.__call__(layer, *arguments[0], **arguments[1])

    def _inside(self, chunk: range) -> frozenset[int]:
        """The layers of a virtual stage that nothing begins or ends at, and that take nothing of what it receives."""
        if not chunk.start:
            return frozenset(chunk)
        received = {passed.origin for passed in self._layers.taken[chunk.start]}
        return frozenset(
            number
            for number in chunk[1:]
            if received.isdisjoint(passed.origin for passed in self._layers.taken[number])
        )

    def boundary(self, part: int) -> Boundary:
        """Returns the arrays that virtual stage ``part`` of the model takes from the one before."""
        return self.taken(self._ranges[part][0])

    def taken(self, number: int) -> Boundary:
        """Returns the description of the arrays that layer ``number`` takes."""
        return self._layers.taken[number]

    def _with_model(self, call: Callable[..., Any], function: Callable[[], Any], chunk: int) -> Any:
        self._alone, self.chunk = call, chunk
        try:
            return function()
        finally:
            self._alone = self.chunk = None

    def _run_of(self, chunk: int, shape: Sequence[int], hidden: Sequence[mx.array] | None) -> "_Run":
        own = self.chunks[chunk]
        if (hidden is None) != (own.start == 0):
            raise InvalidArgument("a stage takes what the stage before has returned, and the first takes None")
        return _Run({own: self.inside[own]}, shape, hidden)

    def _skip(self, run: "_Run", number: int, arguments: list[Any]) -> Any:
        """Stands in for a layer of another stage: advances its cache, and returns zeros of its results' shapes."""
        if (path := self._layers.caches[number]) is not None:
            # The cache of a skipped layer grows, too: mlx-lm's models make masks and positions from any layer's cache.
            advance(at(arguments, path), run.nothing())
        result = self._results[number]
        return run.zeros(result) if isinstance(result, Like) else tree_map(run.zeros, result)

    def _called(self, run: "_Run", tokens: mx.array, *args: Any, **keywords: Any) -> Any:
        self._run = run
        try:
            return self._model(tokens, *args, **keywords)
        finally:
            self._run = None


class _Run:
    """A call of the model: which layers this rank computes, and what happens where they begin and end.

    ``chunks``: with the layers of each that are called as they are. ``messages``: the messages of this call so far.
    """

    def __init__(
        self, chunks: Mapping[range, frozenset[int]], shape: Sequence[int], hidden: Sequence[mx.array] | None = None
    ) -> None:
        self.shape = shape
        self.inside, self.computed = frozenset[int]().union(*chunks.values()), frozenset[int]().union(*chunks)
        self.starts = {chunk.start for chunk in chunks if chunk.start}
        self.stops = {chunk.stop for chunk in chunks}
        self.messages: list[mx.array] = []
        self.received: dict[int, mx.array] = {}  # of the chunk that is computed, by origin
        self.hidden, self.left = list(hidden or ()), list[mx.array]()
        self._zeros: dict[int, mx.array] = {}  # by the identity of what they are like
        self._nothing: dict[int, mx.array] = {}  # by the number of messages that it waits for

    def zeros(self, like: Any) -> Any:
        """Returns zeros like what a layer of another stage returns, the same for all layers; anything else as it is."""
        if not isinstance(like, Like):
            return like
        if id(like) not in self._zeros:
            self._zeros[id(like)] = like.zeros(*self.shape)
        return self._zeros[id(like)]

    def nothing(self) -> mx.array:
        """Returns the keys and values of layers of other stages: of width zero, behind the messages so far."""
        behind = len(self.messages)
        if behind not in self._nothing:
            batch, length = self.shape
            nothing = mx.zeros((batch, 1, length, 0))
            self._nothing[behind] = mx.depends([nothing], self.messages)[0] if behind else nothing
        return self._nothing[behind]

    def begin(self, taken: Boundary, number: int) -> None:
        """Takes in the arrays for layer ``number``, the first of a chunk."""
        self.received = {passed.origin: x for passed, x in zip(taken, self.enter(number), strict=True)}

    def enter(self, number: int) -> list[mx.array]:
        """Returns the arrays that layer ``number``, the first of a chunk, takes."""
        return self.hidden

    def leave(self, number: int, arrays: list[mx.array]) -> None:
        """Hands on ``arrays``, which layer ``number``, the first one after a chunk, takes from the chunk."""
        self.left = arrays


class _ConnectedRun(_Run):
    """A call that receives from the stage before and sends to the stage behind.

    Each message waits for the one before it in the same call. A receive also waits for the receives of earlier calls,
    and a send for their sends, because MLX may evaluate several calls together, in an order of its own. A receive does
    not wait for the send of an earlier call, so that one call arrives while another leaves.

    ``inputs``: the model's arguments, such as tokens that each rank has sampled for itself, which stages compare.
    """

    def __init__(self, calls: StageCalls, transfer: Transfer, shape: Sequence[int], inputs: Sequence[mx.array]) -> None:
        super().__init__(calls.inside, shape)
        self.calls, self.transfer, self.inputs = calls, transfer, inputs
        self.receives, self.sends = calls._receives, calls._sends
        if bridge.traces():  # no call behind the trace may wait for what is in it, nor one in it for those before
            self.receives, self.sends = Order(transfer.incoming), Order(transfer.stream)

    def enter(self, number: int) -> list[mx.array]:
        calls, taken = self.calls, self.calls.taken(number)
        batch, length = self.shape
        before = (calls.index - 1) % calls.stages
        received = self.transfer.recv(
            taken, batch, length, before, self.receives, *self.messages[-1:], inputs=self.inputs
        )
        self.messages += received
        return received

    def leave(self, number: int, arrays: list[mx.array]) -> None:
        calls = self.calls
        behind = (calls.index + 1) % calls.stages
        to, before = calls.taken(number), self.messages[-1:]
        self.messages += self.transfer.send(arrays, behind, to, self.sends, *before, inputs=self.inputs)
