"""The time of a decoded token and the memory of each rank, predicted for a placement from what is measured.

A token of one request passes the stages one after the other. In a stage each rank reads its shards of the weights, at
the speed of its memory; the slowest rank counts. Behind each part of a layer that ranks share, attention, an MLP or
experts, they add up their results: an exchange of one row, whose cost `LinkCosts` has. A stage hands its row to the
next, and the last one its logits to all: messages of which each is counted as an all_gather of all ranks, which takes
no less. As in a plan of stages, all weights of a layer count as read, also those of experts that a token does not use.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache

from mlxdist.base.environment import Environment
from mlxdist.nn.expert_parallel import Workload
from mlxdist.nn.expert_parallel.links import RankLinks
from mlxdist.nn.models.plan import Plan
from mlxdist.nn.pipeline_parallel import StagePlan
from mlxdist.nn.pipeline_parallel.layers import find_layers
from mlxdist.nn.pipeline_parallel.stage_parameters import ParameterHolders
from mlxdist.nn.rank_checks import agree
from mlxdist.runtime.group.group import Group, engine_of

from .memory import memory_limit, sizes_of
from .row_caches import flat

__all__ = ["DecodeCost", "Estimate", "MeasuredRanks"]


@dataclass(frozen=True)
class MeasuredRanks:
    """The measurements of the ranks of a group, the same on all of them.

    Attributes:
        memory_gbps: GB/s at which each reads its weights.
        room: bytes that each may use for weights and caches.
        links: the links between them.
    """

    memory_gbps: tuple[float, ...]
    room: tuple[float, ...]
    links: RankLinks

    @classmethod
    def of(cls, group: Group, neighbors: int | None = None) -> "MeasuredRanks | None":
        """The measurements of ``group``; None where its ranks, or exchanges between all of them, are not measured, and
        on one host. Collective. ``neighbors``: as of :func:`memory_limit`."""
        speeds = Environment.read().memory_gbps
        facts = [engine_of(group).world.rank, speeds is not None, int(memory_limit(group, neighbors))]
        table = agree("serve", group, None, {"MLXDIST_MEMORY_GBPS": speeds}, facts).tolist()
        if speeds is None or group.size() == 1:
            return None
        links = RankLinks.of(group=group)
        if len(set(links.hosts)) == 1 or links.costs(range(group.size())) is None:
            return None
        return cls(tuple(speeds[rank] for rank, _, _ in table), tuple(room for _, _, room in table), links)


@dataclass(frozen=True)
class Estimate:
    """The prediction for a placement.

    Attributes:
        most: the largest share of the weights on a rank.
        needed, room: bytes for weights and caches on the rank that has least to spare, and what it may use.
        seconds: of a token; None where exchanges between the ranks of a stage are not measured.
    """

    most: float
    needed: float
    room: float
    seconds: float | None


class DecodeCost:
    """Predicts the time of a decoded token and the memory of placements of one model.

    Args:
        model: of mlx-lm, full; its parameters may be lazy.
        measured: the ranks.
        requests: the number of requests that run at a time, each with states: sliding windows, linear attention.
        chunk: tokens that a sliding window may have beyond its size.

    Raises:
        InvalidArgument: the layers of the model cannot be found.
    """

    def __init__(self, model: nn.Module, measured: MeasuredRanks, requests: int = 1, chunk: int = 0) -> None:
        self._measured = measured
        self._layers = find_layers(model)
        caches = make_prompt_cache(model)
        self._logits = model(mx.array([[0]]), cache=caches)[0, -1].nbytes
        self._caches: list[tuple[int, float]] = []  # KV heads, and bytes
        for cache in flat(caches):
            per_token, fixed = sizes_of(cache, chunk)
            keys = getattr(cache, "keys", None)
            heads = 1 if keys is None else keys.shape[1]
            self._caches.append((heads, 2 * per_token + requests * fixed))  # with 2 tokens a server can begin

    def of(self, plan: Plan, stage_plan: StagePlan | None) -> Estimate:
        """The prediction for a placement."""
        stages = 1 if stage_plan is None else stage_plan.stages
        ranks, measured = plan.ranks, self._measured
        held, read = self._bytes(plan, stage_plan)
        counts = [len(self._layers_of(stage_plan, stage)) / len(self._layers.paths) for stage in range(stages)]
        cached = sum(size / min(plan.tp, heads) for heads, size in self._caches)
        needs = [held[rank] + cached * counts[rank // ranks] for rank in range(stages * ranks)]
        fullest = max(range(len(needs)), key=lambda rank: needs[rank] - measured.room[rank])
        parts, seconds = self._parts(plan), [self._handovers(stage_plan)]
        for stage in range(stages):
            row = range(stage * ranks, (stage + 1) * ranks)
            seconds.append(self._exchanges(sum(parts[number] for number in self._layers_of(stage_plan, stage)), row))
            seconds.append(max(read[rank] / (measured.memory_gbps[rank] * 1e9) for rank in row))
        known = [each for each in seconds if each is not None]
        total = sum(known) if len(known) == len(seconds) else None
        return Estimate(max(held) / plan.full_bytes, needs[fullest], measured.room[fullest], total)

    def _layers_of(self, stage_plan: StagePlan | None, stage: int) -> list[int]:
        return list(range(len(self._layers.paths))) if stage_plan is None else stage_plan.layers(stage)

    def _bytes(self, plan: Plan, stage_plan: StagePlan | None) -> tuple[list[int], list[int]]:
        """The bytes of parameters that each rank holds, and that it reads for a token: of an embedding that is one
        row."""
        holders = None if stage_plan is None else ParameterHolders(self._layers, stage_plan)
        stages = 1 if stage_plan is None else stage_plan.stages
        held, read = [0] * (stages * plan.ranks), [0] * (stages * plan.ranks)
        for path, shard in plan.shards.items():
            in_layer, is_embedding = self._layers.layer_of(path) is not None, self._layers.when(path) == {"before"}
            for stage in [0] if holders is None else holders.holders(path):
                is_read = in_layer or stage == stages - 1 and not is_embedding
                for column in range(plan.ranks):
                    size = shard.bytes(column)
                    held[stage * plan.ranks + column] += size
                    read[stage * plan.ranks + column] += size * is_read
        return held, read

    def _parts(self, plan: Plan) -> list[int]:
        """The number of parts of each layer that ranks share: its modules of which no rank has all parameters."""
        parts: list[set[str]] = [set() for _ in self._layers.paths]
        for shard in plan.sharded:
            # In a plan for experts alone, attention is on each rank.
            is_shared = all(shard.bytes(rank) < shard.full_bytes for rank in range(plan.ranks))
            if is_shared and (number := self._layers.layer_of(shard.path)) is not None:
                rest = shard.path[len(self._layers.paths[number]) + 1 :]
                parts[number].add(rest.partition(".")[0])
        return [len(names) for names in parts]

    def _exchanges(self, count: int, ranks: Sequence[int]) -> float | None:
        """Seconds in which the ranks of a stage add up the results of that many parts of layers; None: not measured."""
        if not count:
            return 0.0
        costs = self._measured.links.costs(ranks)
        # Bytes as elements of one byte: the elements of a row have no say in what it costs.
        row = Workload(1, max(1, sum(passed.bytes for passed in self._layers.taken[-1])), 1, sharded=False)
        return None if costs is None else count * row.seconds("replicated", 1, costs)

    def _handovers(self, stage_plan: StagePlan | None) -> float | None:
        """Seconds in which a token passes from stage to stage, and its logits to all; None: not measured."""
        if stage_plan is None:
            return 0.0
        costs = self._measured.links.costs(range(len(self._measured.room)))
        if costs is None:
            return None
        sizes = [*stage_plan.message_bytes[1:], self._logits]
        return sum(costs.costs["all_gather"].seconds(size) for size in sizes)
