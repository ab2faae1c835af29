"""Finds the stages that hold a parameter of a model, and the one of them that counts it."""

from mlxdist.runtime.group.group import Group

from .layers import Layers
from .stage_plan import StagePlan, stages_of

__all__ = ["ParameterHolders", "StageParameters"]


class ParameterHolders:
    """The stages of a plan that hold each parameter of a model."""

    def __init__(self, layers: Layers, stage_plan: StagePlan) -> None:
        self._layers, self._ranges, self._stages = layers, stage_plan.ranges, stage_plan.stages

    def holders(self, path: str) -> list[int]:
        """The stages that hold the parameter at ``path``."""
        if (number := self._layers.layer_of(path)) is not None:
            return [part % self._stages for part, pair in enumerate(self._ranges) if number in range(*pair)]
        return stages_of(self._layers.when(path), self._stages)


class StageParameters(ParameterHolders):
    """The parameters of a model in stages, by their paths in the full model. Collective: it makes groups.

    Attributes:
        shared_groups: groups of stages that hold the same parameters: those with this stage, in one order everywhere.
    """

    def __init__(self, layers: Layers, stage_plan: StagePlan, group: Group) -> None:
        super().__init__(layers, stage_plan)
        self._index = group.rank()
        self._chunks = stage_plan.chunks_of(self._index)
        holders = {tuple(stages_of(when, self._stages)) for when in layers.outside.values()}
        shared = sorted(ranks for ranks in holders | {tuple(range(self._stages))} if len(ranks) > 1)
        groups = {ranks: group.split(0 if self._index in ranks else -1) for ranks in shared}
        self._shared = {ranks: own for ranks, own in groups.items() if own is not None}
        self.shared_groups = list(self._shared.values())

    def group_of(self, path: str) -> Group | None:
        """The stages that hold the parameter at ``path``, if there are several."""
        return self._shared.get(tuple(self.holders(path)))

    def counts(self, path: str, chunk: int | None) -> bool:
        """Whether virtual stage ``chunk`` of this rank, or with ``None`` this rank, counts the parameter at ``path``:
        exactly one of all stages counts it."""
        if self.holders(path)[0] != self._index or chunk is None:
            return self.holders(path)[0] == self._index
        number = self._layers.layer_of(path)
        return chunk == 0 if number is None else number in self._chunks[chunk]

    def is_in_chunk(self, path: str, chunk: int) -> bool:
        """Whether a virtual stage of this rank may use the parameter at ``path``: one of its layers, or of no layer."""
        number = self._layers.layer_of(path)
        return number is None or number in self._chunks[chunk]

    def is_in_last_chunk(self, path: str) -> bool:
        """Whether the last virtual stage of the model may use the parameter at ``path``."""
        number, last = self._layers.layer_of(path), range(*self._ranges[-1])
        return self._stages - 1 in self.holders(path) and (number is None or number in last)
