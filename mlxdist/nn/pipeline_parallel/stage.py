"""A stage of a pipeline: some layers of a model, and the model around them as it is.

mlx-lm's models compute masks, positions and layer types in the code around their layers. So a stage runs that code
with all layers in their places: those of other stages hold nothing and do nothing, and the first of its own takes the
arrays that the stage before has sent. Rank s of the group is stage s, so rank 0 has the embedding. (mlx-lm's own
pipelines are the other way round.)
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from mlxdist.base.errors import InvalidArgument
from mlxdist.nn.equal_inputs import inputs_of
from mlxdist.runtime.group.group import Group
from mlxdist.runtime.native import bridge
from mlxdist.runtime.operations.ordering import Order

from .layers import Boundary, Layers, Like, at, with_value
from .missing_layers import advance
from .stage_plan import StagePlan, stages_of
from .timeline import Stamps, Timeline
from .transfer import Transfer

__all__ = ["Stage", "stage_of"]


def stage_of(model: Any) -> "Stage | None":
    """``model.stage``; None: :func:`pipeline_parallel` has not made the model."""
    stage = getattr(model, "stage", None)
    return stage if isinstance(stage, Stage) else None


class Stage:
    """This rank's part of a pipeline; made by :func:`pipeline_parallel`.

    Attributes:
        group: the ranks; rank s is stage s.
        index, stages: this stage, and how many there are.
        stage_plan: which layers each has.
        chunks: the layers of this rank, a range for each of its virtual stages.
        transfer: the messages between stages.
        stamps: when the actions of the last training step were possible and when they ended, which is measured while
            they are computed; :attr:`timeline` reads it.
    """

    def __init__(self, model: nn.Module, layers: Layers, stage_plan: StagePlan, group: Group) -> None:
        self.group, self.stage_plan, self._layers = group, stage_plan, layers
        self.index, self.stages = group.rank(), group.size()
        self.chunks = [range(*pair) for pair in stage_plan.ranges[self.index :: self.stages]]
        self.transfer = Transfer.of(group) if self.stages > 1 else None
        self._model = partial(type(model).__call__, model)
        self._run: _Run | None = None
        self._numbers = {path: number for number, path in enumerate(layers.paths)}
        self._alone: Callable[..., Any] | None = None  # in place of the model, while a loss calls it
        self._chunk: int | None = None  # then
        self.stamps: Stamps | None = None
        self._calls = 0
        self._receives, self._sends = Order(Transfer.incoming), Order(Transfer.stream)  # of all calls
        holders = {tuple(stages_of(when, self.stages)) for when in layers.outside.values()}
        # All ranks split for all sets of holders in one order, since split is a collective of the whole group.
        shared = sorted(ranks for ranks in holders | {tuple(range(self.stages))} if len(ranks) > 1)
        groups = {ranks: group.split(0 if self.index in ranks else -1) for ranks in shared}
        self._shared = {ranks: own for ranks, own in groups.items() if own is not None}

    @property
    def is_first(self) -> bool:
        """Whether this rank has the embedding."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank has the head."""
        return self.index == self.stages - 1

    @property
    def timeline(self) -> Timeline | None:
        """This rank's actions of the last training step, measured in seconds; None: there was none. Waits for it."""
        return None if self.stamps is None else self.stamps.timeline(f"stage {self.index} of {self.stages}")

    def __call__(
        self, tokens: mx.array, hidden: Sequence[mx.array] | None = None, cache: Any = None, chunk: int = 0
    ) -> Any:
        """Computes this stage without communication; differentiable in ``hidden`` and the stage's parameters.

        Args:
            tokens: integers of shape (batch, length), on every stage.
            hidden: what the stage before has returned; ``None`` for the first.
            cache: of ``make_prompt_cache(model)``.
            chunk: which of this rank's virtual stages.

        Returns:
            The arrays that the next stage takes, a list; of the last stage the logits, (batch, length, vocabulary).

        Raises:
            InvalidArgument: ``hidden`` is missing, or given to the first stage; a ``cache`` with virtual stages.
        """
        run = self._run_of(chunk, tokens.shape, hidden)
        if cache is not None and len(self.chunks) > 1:
            raise InvalidArgument("virtual stages are for training and have no cache")
        logits = self._called(run, tokens, cache=cache)
        return logits if self.chunks[chunk].stop == len(self._layers.paths) else run.left

    def trainable_parameters(self) -> Any:
        """A tree of the trainable parameters that this stage counts: over all stages each of the full model once.

        In a loss of ``train.value_and_grad`` those of the virtual stage that is computed, for terms of
        ``train.stage_loss``; elsewhere all of this rank's.
        """
        flat: Any = tree_flatten(self._model.args[0].trainable_parameters())
        return tree_unflatten([(path, array) for path, array in flat if self.counts(path, self._chunk)])

    def counts(self, path: str, chunk: int | None) -> bool:
        """Whether virtual stage ``chunk`` of this rank, or with ``None`` the rank, counts the parameter at ``path``:
        one of all does."""
        if self.holders(path)[0] != self.index or chunk is None:
            return self.holders(path)[0] == self.index
        number = self._layer_of(path)
        return chunk == 0 if number is None else number in self.chunks[chunk]

    def within(
        self, function: Callable[[], Any], hidden: Sequence[mx.array] | None, chunk: int = 0
    ) -> tuple[Any, list[mx.array]]:
        """Calls a function in which ``model(tokens, ...)`` is this stage alone, once.

        Returns:
            The result of the function, which is of use on the last stage: on others the model's result has the shape
            of the logits and is not to be evaluated. And the arrays that the next stage takes.

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
        """The result of ``function``, not to be evaluated, and the shape of the tokens with which it calls the model.

        No layer is called. ``chunk``: the virtual stage whose parameters :meth:`trainable_parameters` then returns.
        """
        shapes: list[Any] = []

        def call(tokens: mx.array, *args: Any, **keywords: Any) -> Any:
            shapes.append(tokens.shape)
            return self._called(_Run([], tokens.shape), tokens, *args, **keywords)

        value = self._with_model(call, function, chunk)
        if len(shapes) != 1 or len(shapes[0]) != 2:
            raise InvalidArgument(
                "what trains a model in stages calls it once, with tokens of shape (batch, length), not with "
                f"{', '.join(map(str, shapes)) or 'none'}"
            )
        return value, shapes[0]

    def _with_model(self, call: Callable[..., Any], function: Callable[[], Any], chunk: int) -> Any:
        self._alone, self._chunk = call, chunk
        try:
            return function()
        finally:
            self._alone = self._chunk = None

    def _run_of(self, chunk: int, shape: Sequence[int], hidden: Sequence[mx.array] | None) -> "_Run":
        own = self.chunks[chunk]
        if (hidden is None) != (own.start == 0):
            raise InvalidArgument("a stage takes what the stage before has returned, and the first takes None")
        return _Run([own], shape, hidden)

    def _connected(self, tokens: mx.array, *args: Any, **keywords: Any) -> Any:
        """The logits of the full model, on all ranks, which call it with the same arguments: ``model(...)``."""
        if self._alone is not None:
            return self._alone(tokens, *args, **keywords)
        if self.transfer is None:
            return self._model(tokens, *args, **keywords)
        inputs = inputs_of(tokens, *args, *keywords.values())
        run = _ConnectedRun(self, self.transfer, tokens.shape, inputs)
        logits = self._called(run, tokens, *args, **keywords)
        if not self.is_last:  # these are made of zeros: only their shape is right
            (logits,) = mx.depends([mx.zeros(logits.shape, logits.dtype)], run.messages)
        self._calls += 1
        return self.transfer.broadcast(logits, self.stages - 1, self._calls)

    def _call_layer(self, kind: Any, number: int, layer: nn.Module, *args: Any, **keywords: Any) -> Any:
        """Computes or skips a layer that the model calls; receives before and sends after a chunk."""
        run = self._run
        arguments: list[Any] = [list(args), keywords]
        if run is None:
            return kind.__call__(layer, *args, **keywords)
        taken = self._layers.taken[number]
        if number in run.stops:
            run.leave(number, [at(arguments, passed.at) for passed in taken])
        if number in run.starts:
            run.received = {passed.origin: x for passed, x in zip(taken, run.enter(number), strict=True)}
        if not any(number in chunk for chunk in run.chunks):
            return self._skip(run, number, arguments)
        for passed in taken:  # where the model has zeros for what has come from another stage
            if passed.origin in run.received:
                arguments = with_value(arguments, passed.at, run.received[passed.origin])
        return kind.__call__(layer, *arguments[0], **arguments[1])

    def _skip(self, run: "_Run", number: int, arguments: list[Any]) -> Any:
        """Skips a layer of another stage: advances its cache, and returns zeros like its result."""
        batch, length = run.shape
        if (path := self._layers.caches[number]) is not None:
            advance(at(arguments, path), batch, length, run.messages)
        return tree_map(lambda x: x.zeros(batch, length) if isinstance(x, Like) else x, self._layers.results[number])

    def holders(self, path: str) -> list[int]:
        """Which stages hold the parameter at that path of the full model."""
        if (number := self._layer_of(path)) is not None:
            return [part % self.stages for part, pair in enumerate(self.stage_plan.ranges) if number in range(*pair)]
        for module, when in self._layers.outside.items():
            if path.startswith(f"{module}."):
                return stages_of(when, self.stages)
        return list(range(self.stages))

    def is_in_chunk(self, path: str, chunk: int) -> bool:
        """Whether a virtual stage of this rank may use the parameter at that path: not those of others' layers."""
        number = self._layer_of(path)
        return number is None or number in self.chunks[chunk]

    def is_in_last_chunk(self, path: str) -> bool:
        """Whether the last virtual stage of the model may use the parameter at ``path``."""
        number, last = self._layer_of(path), range(*self.stage_plan.ranges[-1])
        return self.stages - 1 in self.holders(path) and (number is None or number in last)

    def group_of(self, path: str) -> Group | None:
        """The stages that hold a parameter, if there are several."""
        return self._shared.get(tuple(self.holders(path)))

    @property
    def shared_groups(self) -> list[Group]:
        """The groups of :meth:`group_of`, in one order on all stages."""
        return list(self._shared.values())

    def _layer_of(self, path: str) -> int | None:
        """The number of the layer that has the parameter at that path; None: it is in no layer."""
        while path and path not in self._numbers:
            path = path.rpartition(".")[0]
        return self._numbers.get(path)

    def boundary(self, part: int) -> Boundary:
        """What virtual stage ``part`` of the model takes from the one before."""
        return self.taken(self.stage_plan.ranges[part][0])

    def taken(self, number: int) -> Boundary:
        """The arrays that layer ``number`` takes."""
        return self._layers.taken[number]

    def _called(self, run: "_Run", tokens: mx.array, *args: Any, **keywords: Any) -> Any:
        self._run = run
        try:
            return self._model(tokens, *args, **keywords)
        finally:
            self._run = None


class _Run:
    """A call of the model: which layers this rank computes, and what happens where they begin and end.

    ``messages``: those of this call so far.
    """

    def __init__(self, chunks: Sequence[range], shape: Sequence[int], hidden: Sequence[mx.array] | None = None) -> None:
        self.chunks, self.shape = chunks, shape
        self.starts = {chunk.start for chunk in chunks if chunk.start}
        self.stops = {chunk.stop for chunk in chunks}
        self.messages: list[mx.array] = []
        self.received: dict[int, mx.array] = {}  # of the chunk that is computed, by origin
        self.hidden, self.left = list(hidden or ()), list[mx.array]()

    def enter(self, number: int) -> list[mx.array]:
        """The arrays that layer ``number``, the first of a chunk, takes."""
        return self.hidden

    def leave(self, number: int, arrays: list[mx.array]) -> None:
        """Stores the arrays that layer ``number``, the first one after a chunk, takes from that chunk."""
        self.left = arrays


class _ConnectedRun(_Run):
    """A call of the model that receives and sends.

    Each message waits for the one before, a receive for those of earlier calls, too, and so does a send: MLX may
    evaluate several calls together, in an order of its own. A receive does not wait for the send of an earlier call, so
    that one call arrives while another leaves.

    ``inputs``: of the model, such as tokens that each rank has sampled for itself, which stages compare.
    """

    def __init__(self, stage: Stage, transfer: Transfer, shape: Sequence[int], inputs: Sequence[mx.array]) -> None:
        super().__init__(stage.chunks, shape)
        self.stage, self.transfer, self.inputs = stage, transfer, inputs
        if bridge.traces():  # what is traced must not come into another trace
            stage._receives, stage._sends = Order(transfer.incoming), Order(transfer.stream)

    def enter(self, number: int) -> list[mx.array]:
        stage, taken = self.stage, self.stage.taken(number)
        batch, length = self.shape
        before = (stage.index - 1) % stage.stages
        received = self.transfer.recv(
            taken, batch, length, before, stage._receives, *self.messages[-1:], inputs=self.inputs
        )
        self.messages += received
        return received

    def leave(self, number: int, arrays: list[mx.array]) -> None:
        stage = self.stage
        behind = (stage.index + 1) % stage.stages
        order, to = stage._sends, stage.taken(number)
        self.messages += self.transfer.send(arrays, behind, to, order, *self.messages[-1:], inputs=self.inputs)
