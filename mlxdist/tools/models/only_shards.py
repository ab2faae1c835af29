"""The shards that each host reads, for hosts that are to have no more of a model than these.

The rank with the model plans them as `mlxdist serve` does, for the ranks of a later job, and tells the others.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlxdist.base.errors import InvalidArgument, TransportError
from mlxdist.base.host_shards import MAX_RECORD_BYTES, FileShards, HostShards, PackedShards
from mlxdist.base.json_reader import parse_json
from mlxdist.base.safetensors_reader import Checkpoint
from mlxdist.base.validation import list_of, object_of
from mlxdist.nn.rank_checks import agreed
from mlxdist.runtime.group.group import Group
from mlxdist.runtime.operations.blobs import gather_blobs
from mlxdist.runtime.operations.collectives import all_gather

from .places import Manifest, Place
from .transfer import held_bytes

__all__ = ["ShardsOfModel", "plan_shards_of_hosts", "shards_of_hosts"]


@dataclass(frozen=True)
class ShardsOfModel:
    """The shards of a model that hosts get. ``source``: the rank that has all of it; ``of``: the shards of each rank
    that gets no more; ``names``: the files with weights; ``checkpoint``: on the source, all weights."""

    source: int
    of: Mapping[int, HostShards]
    names: frozenset[str]
    checkpoint: Checkpoint | None

    def packed(self, shards: FileShards) -> PackedShards:
        """The bytes of some shards, on the source."""
        assert self.checkpoint is not None
        file = next(file for file in self.checkpoint.files if file.path.name == shards.name)
        return PackedShards(file, shards.parts)


def shards_of_hosts(directory: Path, hosts: Sequence[int], layout: Mapping[str, Any]) -> list[HostShards]:
    """The shards that each host reads of a model in ``directory``, on which nothing is missing.

    Args:
        directory: of the model.
        hosts: how many ranks there are on each host.
        layout: the fields of `mlxdist.serve.placement.Layout`.

    Raises:
        InvalidArgument: the model cannot be sharded so, or ranks read more than shards of its files.
    """
    from mlxdist.nn.models.load.parts_of_ranks import parts_of_ranks
    from mlxdist.nn.models.load.weight_sources import open_model
    from mlxdist.serve.placement import Layout, choose

    checkpoint = Checkpoint(directory)
    model, sources, _ = open_model(checkpoint)
    placement = choose(model, sum(hosts), Layout(**layout))
    ends = np.cumsum([0, *hosts]).tolist()
    ranks = [range(start, stop) for start, stop in zip(ends, ends[1:])]
    parts = parts_of_ranks(model, sources, placement.plan, placement.stage_plan, ranks)
    found = []
    for own, mine in zip(ranks, parts):
        files = []
        for file in checkpoint.files:
            of_file = {name: mine[name] for name in file.tensors if name in mine}
            files.append(FileShards(file.path.name, file.size, PackedShards(file, of_file).size, of_file))
        found.append(HostShards(tuple(own), sum(hosts), placement.name, tuple(files)))
    return found


def plan_shards_of_hosts(
    group: Group,
    place: Place,
    manifest: Manifest,
    sources: Sequence[int],
    plan_hosts: Callable[[Path], Sequence[HostShards]],
) -> ShardsOfModel:
    """Plans the shards of each rank: none where it has all files with weights. Every rank calls it; the one that all
    files come from plans.

    Raises:
        InvalidArgument: on every rank: no rank has all files, or ``plan_hosts`` raises it.
        TransportError: another rank has sent a plan that is none.
    """
    rank, source = group.rank(), sources[0]
    checkpoint: Checkpoint | None = None
    blob = b""
    with agreed("pull", group):
        if set(sources) != {source}:
            raise InvalidArgument("--only-shards needs a host with all files of the model, and none has them")
        if rank == source:
            checkpoint = Checkpoint(place.source(manifest))
            shards = plan_hosts(checkpoint.directory)
            if len(shards) != group.size():
                raise InvalidArgument(f"the plan is for {len(shards)} hosts, and there are {group.size()}")
            blob = json.dumps([asdict(each) for each in shards]).encode()
    blob = gather_blobs(blob, group, MAX_RECORD_BYTES)[source]
    try:
        of_hosts = list_of(object_of(HostShards), group.size())("shards", parse_json(blob))
        names = {file.name for shards in of_hosts for file in shards.files}
        sizes = {file.name: file.size for file in manifest.files}
        if len(of_hosts) != group.size() or not names <= sizes.keys():
            raise ValueError("they are for other hosts, or other files")
    except ValueError as error:
        raise TransportError(f"pull: a rank has sent shards that are none: {error}") from None
    lacks = np.zeros(1, np.int64)
    with agreed("pull", group):
        paths = {file.name: place.writable(manifest, file) for file in manifest.files if file.name in names}
        lacks[0] = rank != source and any(held_bytes(path, sizes[name]) != sizes[name] for name, path in paths.items())
    takers = [other for other, lacking in enumerate(all_gather(lacks, group=group)) if lacking]
    return ShardsOfModel(source, {other: of_hosts[other] for other in takers}, frozenset(names), checkpoint)
