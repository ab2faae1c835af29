"""Gradients of ranks with parts of a batch each: in which buckets they travel, in which order, and to which ranks."""

from collections.abc import Collection, Iterator
from contextlib import ExitStack
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxdist.base.errors import InvalidArgument
from mlxdist.nn.context_parallel.context_parallel import is_context_parallel
from mlxdist.nn.models.cuts import cuts
from mlxdist.nn.pipeline_parallel.stage import parameters_of, stage_of
from mlxdist.nn.rank_checks import agree, agreed, described
from mlxdist.runtime.group.channel import Channel
from mlxdist.runtime.group.group import Group, engine_of
from mlxdist.runtime.mesh import Mesh, group_without

from .gradient_buckets import BucketPlan, Gradient

__all__ = ["NAME", "Averaging", "GradientChannel", "Parameters", "paths_of_shards", "with_shards"]

NAME = "value_and_grad"
Parameters = list[tuple[str, mx.array]]


class Averaging:
    """The state that stays from step to step: in which buckets the gradients of a model travel, and to which ranks."""

    def __init__(
        self,
        model: nn.Module,
        everyone: Group,
        axes: dict[str, Group],
        mesh: Mesh | None,
        all_reduce_size: int,
        reduce_dtype: mx.Dtype | None,
    ) -> None:
        self.model, self.everyone = model, everyone
        self.ranks = everyone if mesh is None else mesh.group  # that call
        self.alike = everyone if mesh is None else group_without(mesh, "pp")  # that hold the same layers
        self.bucket_plan: BucketPlan | None = None
        self.axes, self._mesh = axes, mesh
        self._all_reduce_size, self._reduce_dtype = all_reduce_size, reduce_dtype
        self._structures: dict[tuple, int] = {}
        self._known: list[tuple] = []  # of the parameters that the plan is of
        # Tokens are counted in units of about a batch: a float16 gradient of a sum over all would overflow. It is
        # a power of two, so no digit of the result depends on it.
        self.unit_of_tokens = 1.0
        self.is_context_parallel = self.has_shards = False

    def is_for(self, parameters: Parameters) -> bool:
        """Whether the plan is of these parameters."""
        return self.bucket_plan is not None and self._known == _described(parameters)

    def gradients(self, parameters: Parameters) -> list[Gradient]:
        """Describes the gradients. Raises InvalidArgument: one is averaged already over ranks that are no mesh axis."""
        reduced = dict(reduced_over(self.model))
        found = []
        for path, array in parameters:
            groups = [group for group in reduced.get(path, ()) if group.size() > 1]
            if any(group not in self.axes.values() for group in groups):
                raise InvalidArgument(
                    f"{NAME}: '{path}' is averaged over another group by fully_shard; give both the same mesh or group"
                )
            over = tuple(name for name, group in self.axes.items() if group not in groups)
            found.append(Gradient(path, tuple(array.shape), array.dtype, over))
        return found

    def agree_on_parameters(self, parameters: Parameters, elements: int) -> list[Gradient]:
        """Returns :meth:`gradients` if all ranks have the same. ``elements``: of this rank's batch. Collective."""
        equal: dict[str, object] = {}
        stage = stage_of(self.model)
        held_by = None if stage is None else parameters_of(stage)
        shared: dict[Group, dict[str, object]] = {group: {} for group in (held_by.shared_groups if held_by else ())}
        with ExitStack() as stack:
            for group, of_group in [(self.ranks, {}), (self.alike, equal), *shared.items()]:
                stack.enter_context(agreed(NAME, group, of_group))
            found = self.gradients(parameters)
            equal |= described(self.model, {path: cut.shape for path, cut in cuts(self.model).items()})
            for gradient in found:
                equal[f"parameter {gradient.path}"] = (
                    f"{equal[f'parameter {gradient.path}']}, averaged over {gradient.over}"
                )
            held: Any = tree_flatten(self.model.parameters())
            for path, _ in held:
                if held_by is not None and (holders := held_by.group_of(path)) is not None:
                    shared[holders][f"parameter {path}"] = equal[f"parameter {path}"]
        most = agree(NAME, self.everyone, None, {}, [elements]).max()
        self.unit_of_tokens = float(2 ** int(most).bit_length())
        self.is_context_parallel = is_context_parallel(self.model)
        self.has_shards = bool(paths_of_shards(self.model))
        return found

    def agree_on_order(self, parameters: Parameters, gradients: list[Gradient], order: list[int]) -> None:
        """Makes the plan, in rank 0's order. Collective."""
        order = agree(NAME, self.everyone, None, {}, order)[0].tolist()
        self.bucket_plan = BucketPlan(gradients, order, self._all_reduce_size, self._reduce_dtype)
        self._structures.clear()
        self._known = _described(parameters)

    def structure(self, over: tuple[str, ...], is_weighted: bool) -> int:
        """Returns :meth:`BucketPlan.structure` of the messages."""
        if (over, is_weighted) not in self._structures:
            assert self.bucket_plan is not None
            self._structures[over, is_weighted] = self.bucket_plan.structure(is_weighted, over=over)
        return self._structures[over, is_weighted]

    def channel(self, over: tuple[str, ...]) -> "GradientChannel":
        """The channel of the ranks along these axes."""
        return GradientChannel.of(self._mesh[over] if self._mesh is not None else self.everyone)


class GradientChannel(Channel):
    """A channel for the gradients that ranks average."""

    def add_up(self, array: mx.array, structure: int) -> mx.array:
        """The sum of all ranks' ``array``; Mismatch, when it is evaluated, if they have another ``structure``."""
        group = engine_of(self.group).connection.mlx_group(-1.0, structure)
        return mx.distributed.all_sum(array, group=group, stream=self.stream)


def with_shards(model: nn.Module) -> dict[str, nn.Module]:
    """The modules with ``reduced_over``, by path."""
    return {path: module for path, module in model.named_modules() if "reduced_over" in vars(module)}


def reduced_over(model: nn.Module) -> Iterator[tuple[str, Collection[Group]]]:
    """The groups over which the gradient that ``mx.grad`` gives for a parameter is the mean already, by its path.

    They are ``reduced_over`` of the innermost module around the parameter that has it; :func:`fully_shard` sets it.
    """
    owners = {path: vars(module)["reduced_over"] for path, module in with_shards(model).items()}
    parameters: Any = tree_flatten(model.trainable_parameters())
    for path, _ in parameters:
        names = path.split(".")
        prefixes = (".".join(names[:length]) for length in range(len(names) - 1, -1, -1))
        if (owner := next((prefix for prefix in prefixes if prefix in owners), None)) is not None:
            yield path, owners[owner]


def paths_of_shards(model: nn.Module) -> set[str]:
    """The paths of the trainable parameters that are sharded, as :func:`fully_shard` makes them."""
    return {path for path, _ in reduced_over(model)}


def _described(parameters: Parameters) -> list[tuple]:
    return [(path, array.shape, array.dtype) for path, array in parameters]
