"""Which parts of which tensors ranks read when they load a model: for hosts that are to have no more than these."""

from collections.abc import Iterable, Mapping, Sequence

import mlx.nn as nn

from mlxdist.base.errors import InvalidArgument
from mlxdist.base.host_shards import ALL, Part, ShardCheckpoint, ShardTensor
from mlxdist.base.safetensors_reader import Checkpoint, StoredTensor
from mlxdist.nn.layout.modules import parameters
from mlxdist.nn.pipeline_parallel import StagePlan
from mlxdist.nn.pipeline_parallel.layers import find_layers
from mlxdist.nn.pipeline_parallel.stage_parameters import ParameterHolders

from ..plan import Plan, Shard
from .weight_sources import ComputedTensor, Source

__all__ = ["parts_of_ranks", "require_parts"]


def parts_of_ranks(
    model: nn.Module,
    sources: Mapping[str, Source],
    plan: Plan,
    stage_plan: StagePlan | None,
    hosts: Sequence[Iterable[int]],
) -> list[dict[str, Part]]:
    """The parts that the ranks of each host read, by the names of tensors.

    Args:
        model, sources: of :func:`open_model`.
        plan, stage_plan: as for :func:`load_sharded`.
        hosts: the ranks on each host.

    Raises:
        InvalidArgument: mlx-lm computes a parameter from whole tensors.
    """
    holders = None if stage_plan is None else ParameterHolders(find_layers(model), stage_plan)
    found: list[dict[str, Part]] = [{} for _ in hosts]
    for name, shard in plan.shards.items():
        source = sources[name]
        if isinstance(source, ComputedTensor):
            raise InvalidArgument(
                f"mlx-lm computes {name} from whole tensors, so ranks read more than their shards; pull the whole "
                "model, or one that mlx_lm.convert has written"
            )
        stages = [0] if holders is None else holders.holders(name)
        for parts, ranks in zip(found, hosts):
            columns = [rank % plan.ranks for rank in ranks if rank // plan.ranks in stages]
            if columns:
                parts[source.name] = _joined(source, shard, columns, parts.get(source.name))
    return found


def require_parts(
    checkpoint: Checkpoint, sources: Mapping[str, Source], plan: Plan, model: nn.Module, rank: int
) -> None:
    """Raises InvalidArgument if this host does not have all that this rank is about to read.

    Args:
        checkpoint, sources: the weights.
        plan: which rank holds what.
        model: that of this rank, which is sharded.
        rank: this one, in the plan.
    """
    if not isinstance(checkpoint, ShardCheckpoint):
        return
    for name in parameters(model):
        source, shard = sources[name], plan.shards[name]
        if not isinstance(source, ShardTensor) or not source.has(shard.axis, shard.slices(rank)):
            raise checkpoint.refusal(f"load_sharded reads others here, such as of {name}")


def _joined(source: StoredTensor, shard: Shard, columns: Iterable[int], before: Part | None) -> Part:
    """The part of a tensor that ranks of a stage read, together with the part of others."""
    if before == ALL or not shard.ranges:
        return ALL
    if before is not None and before[0] != shard.axis:
        return ALL
    pieces = [piece for column in columns for piece in shard.ranges[column]] + list(before[1] if before else ())
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(piece for piece in pieces if piece[0] < piece[1]):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        else:
            joined.append((start, stop))
    is_all = not joined or joined == [(0, source.shape[shard.axis])]
    return ALL if is_all else (shard.axis, tuple(joined))
