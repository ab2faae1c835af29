"""A stage of a pipeline: some layers of a model, and the model around them as it is.

Rank s of the group is stage s, so rank 0 has the embedding. (mlx-lm's own pipelines are the other way round.)
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from mlxdist.base.opaque import Opaque, create
from mlxdist.runtime.group.group import Group

from .layers import Boundary, Layers
from .stage_calls import StageCalls
from .stage_parameters import StageParameters
from .stage_plan import StagePlan
from .timeline import Timeline
from .transfer import Transfer

__all__ = ["Stage", "calls_of", "make_stage", "parameters_of", "stage_of"]


class Stage(metaclass=Opaque):
    """This rank's part of a pipeline; made by :func:`pipeline_parallel`.

    Attributes:
        group: the ranks; rank s is stage s.
        index, stages: this stage, and how many there are.
        stage_plan: which layers each has.
        chunks: the layers of this rank, a range for each of its virtual stages.
    """

    _made_by = "pipeline_parallel"

    def __init__(self, stage_plan: StagePlan, group: Group, calls: StageCalls, parameters: StageParameters) -> None:
        self.group, self.stage_plan = group, stage_plan
        self.index, self.stages, self.chunks = calls.index, calls.stages, calls.chunks
        self._calls, self._parameters = calls, parameters

    @property
    def is_first(self) -> bool:
        """Whether this rank has the embedding."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank has the head."""
        return self.index == self.stages - 1

    @property
    def transfer(self) -> Transfer | None:
        """Sends and receives the arrays that pass between stages; None: there is one stage."""
        return self._calls.transfer

    @property
    def timeline(self) -> Timeline | None:
        """This rank's actions of the last training step, measured in seconds; None: there was none. Waits for it."""
        stamps = self._calls.stamps
        return None if stamps is None else stamps.timeline(f"stage {self.index} of {self.stages}")

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
        return self._calls.alone(tokens, hidden, cache, chunk)

    def trainable_parameters(self) -> Any:
        """A tree of the trainable parameters that this stage counts: over all stages each of the full model once.

        In a loss of ``train.value_and_grad`` those of the virtual stage that is computed, for terms of
        ``train.stage_loss``; elsewhere all of this rank's.
        """
        flat: Any = tree_flatten(self._calls.model.trainable_parameters())
        chunk = self._calls.chunk
        return tree_unflatten([(path, array) for path, array in flat if self._parameters.counts(path, chunk)])

    def taken(self, number: int) -> Boundary:
        """The arrays that layer ``number`` takes, for ``transfer``: places in the arguments, shapes and dtypes."""
        return self._calls.taken(number)

    def __repr__(self) -> str:
        layers = " and ".join(f"{chunk.start} to {chunk.stop - 1}" for chunk in self.chunks)
        return f"<mlxdist.nn.Stage {self.index} of {self.stages}: layers {layers}>"


def make_stage(model: nn.Module, layers: Layers, stage_plan: StagePlan, group: Group) -> Stage:
    """The stage of this rank. Collective: it makes the groups of its messages and of parameters that stages share."""
    calls = StageCalls(model, layers, stage_plan, group)
    return create(Stage, stage_plan, group, calls, StageParameters(layers, stage_plan, group))


def stage_of(model: Any) -> Stage | None:
    """``model.stage``; None: :func:`pipeline_parallel` has not made the model."""
    stage = getattr(model, "stage", None)
    return stage if isinstance(stage, Stage) else None


def calls_of(stage: Stage) -> StageCalls:
    """How the model of a stage is called: by the model itself, and in training."""
    return stage._calls


def parameters_of(stage: Stage) -> StageParameters:
    """Which stages hold which parameters of the model."""
    return stage._parameters
