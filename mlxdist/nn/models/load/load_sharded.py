"""Loads a model of mlx-lm so that every rank reads and holds only its own shard of the weights."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten
from rich.console import Console

from mlxdist.base import logger
from mlxdist.base.byte_progress import byte_progress
from mlxdist.base.errors import InvalidArgument
from mlxdist.base.host_shards import ShardCheckpoint, open_checkpoint
from mlxdist.base.model_directory import model_directory
from mlxdist.base.safetensors_reader import Checkpoint
from mlxdist.base.tables import size
from mlxdist.nn.layout.measured_shares import RankShares
from mlxdist.nn.layout.modules import parameters
from mlxdist.nn.models.plan import shard_model
from mlxdist.nn.pipeline_parallel import StagePlan, pipeline_parallel, plan_stages
from mlxdist.nn.pipeline_parallel.stage import parameters_of, stage_of
from mlxdist.nn.rank_checks import agree, agreed
from mlxdist.runtime.group.group import Group, GroupLike
from mlxdist.runtime.native import bridge
from mlxdist.runtime.operations.arguments import group_of

from ..plan import Plan, Shard, plan_shards
from ..verify import require_agreement
from .adapters import full_model, put_adapters, put_several, read_adapters, require_adapters_of
from .parts_of_ranks import require_parts
from .streaming import TOKENIZER_FILES, checkpoint_of_rank_0, stream_shard
from .weight_checks import checksum, require_same_files, require_same_tensors
from .weight_sources import UNSIGNED, ComputedTensor, Source, bytes_of, open_model

__all__ = ["LoadReport", "load_sharded"]

LINE_SECONDS = 10.0


@dataclass
class LoadReport:
    """The cost of loading on this rank, in bytes of tensors."""

    plan: Plan
    bytes_total: int  # of the full model
    bytes_held: int  # by this rank
    bytes_read: int  # from files by this rank; where a tensor is sharded, some more are compared with the other ranks
    computed: list[str] = field(default_factory=list)  # parameters for which more was read than is counted
    seconds: float = 0.0


def load_sharded(
    path: str | Path | None,
    *,
    group: GroupLike | None = None,
    plan: Plan | None = None,
    tp: int | None = None,
    ep: int = 1,
    pp: int = 1,
    stage_plan: StagePlan | None = None,
    rank_shares: RankShares | None = None,
    adapter_path: str | Path | Sequence[str | Path] | None = None,
    stream: bool = False,
    verify: bool = False,
    tokenizer_config: Mapping[str, Any] | None = None,
    on_report: Callable[[LoadReport], Any] = lambda report: None,
    get_model_classes: Callable[[dict[str, Any]], tuple[Any, Any]] | None = None,
) -> tuple[nn.Module, Any]:
    """A model of mlx-lm, sharded over the ranks of a group, and its tokenizer, or ``None`` if the directory has none.

    Every rank calls it, and reads the headers of all files and its own slices, so that reading and memory are about
    ``1 / ranks`` of the model, besides what the plan leaves unsharded. Parameters that ``Model.sanitize`` computes
    (mostly stacks of experts, in checkpoints that mlx-lm has not converted) are the exception: for them every rank
    reads the tensors in full, one parameter at a time, and a warning says which.

    Args:
        path: a directory with config.json and model*.safetensors, or the name of a model that `mlxdist pull` has
            fetched. It may be another one on every host. A host may have just the shards of its ranks, as `mlxdist pull
            --only-shards` brings them.
        group: the ranks; ``None`` is the group of ``mlxdist.init()``.
        plan: what :func:`plan_shards` made for this model; ``None`` makes one, for ``tp`` and ``ep``.
        tp, ep: how many ranks share every layer, and the experts; ``tp=None`` is all that ``ep`` and ``pp`` leave.
        pp: how many stages the layers are spread over: rank = stage * tp * ep + rank in the stage. The model is then
            what :func:`pipeline_parallel` returns.
        stage_plan: of :func:`plan_stages` for this model; ``None`` makes one with stages of equal parameters.
        rank_shares: how the ``tp`` ranks share the work, as for :func:`plan_shards`: numbers, "memory" or "compute".
        adapter_path: a directory of mlx-lm's lora training, with adapter_config.json and adapters.safetensors; they are
            sharded with the layers they are on. It may be another one on every host. Or a list of such directories, of
            LoRA on linear layers: each row of a batch has one or none of them (:func:`mlxdist.nn.adapters_of_rows`).
        stream: only rank 0 has the directories, and sends the others what they hold, with a CRC-32 of every shard.
        verify: compare the logits with those of the full model, which rank 0 then has to have room for
            (:func:`mlxdist.nn.verify`). With a list of adapters, without these.
        tokenizer_config: for the tokenizer of transformers, such as {"trust_remote_code": True}.
        on_report: called with a LoadReport, what loading has cost this rank, when all is loaded.
        get_model_classes: as mlx-lm's argument of this name: the class of the model, and that of its arguments, for the
            content of config.json, where they are to be others than mlx-lm's.

    Raises:
        InvalidArgument: on every rank, before any operation of the model: files are missing or damaged, weights are
            missing, too many, of another shape than config.json says, or integers for floats; the plan or the
            adapters are for another model, or the plan for another number of ranks; the ranks hold different weights; a
            host has just the shards of another plan.
            The ranks compare config.json, headers and sizes of files, all bytes of adapters and, within a stage, of
            parameters that every rank holds in full, and 512 bytes of each that is sharded.
        TransportError: on every rank, where a shard has arrived damaged from rank 0.
        Mismatch: on every rank, where ``verify`` finds other logits.
    """
    start = time.perf_counter()
    group = group_of(group)
    plans: list[str | None] = []  # compared as it is behind the block
    with agreed("load_sharded", group, tp, ep, pp, plans, rank_shares, stream, verify):
        for name, one, kind in (("plan", plan, Plan), ("stage_plan", stage_plan, StagePlan)):
            if not isinstance(one, kind | None):
                raise InvalidArgument(f"load_sharded: {name} must be a {kind.__name__}, not {type(one).__name__}")
            plans.append(None if one is None else one.to_json())
        if plan is not None and rank_shares is not None:
            raise InvalidArgument("load_sharded: the plan has its rank_shares; leave out rank_shares")
        if stage_plan is not None and pp not in (1, stage_plan.stages):
            raise InvalidArgument(f"load_sharded: the plan has {stage_plan.stages} stages; leave out pp")
        pp = pp if stage_plan is None else stage_plan.stages
        tp = _checked_grid(group, plan, tp, ep, pp)
        directory = model_directory(path) if group.rank() == 0 or not stream else Path()
    paths, several = _adapter_paths(adapter_path)
    given = [len(paths), several]
    count, several = agree("load_sharded", group, None, {"adapter_path": stream or given}, given)[0].tolist()
    adapters = [read_adapters(path, group, stream) for path in [*paths, *[None] * count][:count]]
    with (checkpoint_of_rank_0 if stream else _local_checkpoint)(directory, group) as checkpoint:
        with agreed("load_sharded", group):
            if verify and group.rank() == 0 and isinstance(checkpoint, ShardCheckpoint):
                raise checkpoint.refusal("verify=True reads the full model")
            model, sources, config = open_model(checkpoint, get_model_classes)
            plan = plan or plan_shards(model, tp, ep, rank_shares=rank_shares)
            plan.check(model)
            stage_plan = stage_plan or (plan_stages(model, pp) if pp > 1 else None)
            for each in adapters:
                require_adapters_of(model, plan, *each, several)
        row = group  # the ranks of this stage
        if stage_plan is not None:
            row = _split(group, group.rank() // plan.ranks)
        # Before weights are read: until here arrays have shapes alone, so no rank ever holds the full model.
        model = shard_model(model, plan, group=row)
        if stage_plan is not None:
            pipeline_parallel(model, group=_split(group, group.rank() % plan.ranks), stage_plan=stage_plan)
        with agreed("load_sharded", group, plan.to_json()):
            _require_planned(model, plan, row.rank())
            require_parts(checkpoint, sources, plan, model, row.rank())
        computed = [name for name, source in sources.items() if isinstance(source, ComputedTensor)]
        _warn_of_computed(computed, sources, group)
        if stream:
            _stream_shards(model, plan, sources, group)
        elif stage_plan is None:
            _load_shards(model, plan, sources, group)
        else:
            with agreed("load_sharded", group):  # what a stage cannot read is an error of all
                _load_shards(model, plan, sources, row, quiet=group.rank() > 0)
        if several:
            put_several(model, plan, adapters, row.rank(), group)
        elif adapters:
            put_adapters(model, plan, *adapters[0], row.rank(), group)
        adapters.clear()  # their memory
        reference: nn.Module | Path = checkpoint.directory
        with agreed("load_sharded", group):
            tokenizer = _tokenizer(checkpoint.directory, config, tokenizer_config)
            if verify and group.rank() == 0 and paths and not several:
                reference = full_model(directory, paths[0])
        if verify:
            require_agreement(model, reference, group=group)
        group.meet()  # ranks read at different speeds, and GPU work of the first graph must not wait for the slowest
    held = sum(array.nbytes for array in parameters(model).values())
    total = sum(source.nbytes for source in sources.values())
    on_report(LoadReport(plan, total, held, checkpoint.bytes_read, computed, time.perf_counter() - start))
    return model, tokenizer


def _adapter_paths(given: Any) -> tuple[list[Any], bool]:
    """The directories of adapters, and whether each row of a batch has one of several."""
    if isinstance(given, list | tuple):
        return list(given), True
    return [] if given is None else [given], False


def _checked_grid(group: Group, plan: Plan | None, tp: int | None, ep: int, pp: int) -> int:
    """The number of tensor-parallel ranks."""
    if type(pp) is not int or pp < 1 or group.size() % pp:
        raise InvalidArgument(f"load_sharded: the {group.size()} ranks of the group are no pp={pp!r} equal stages")
    size = group.size() // pp
    if plan is not None:
        if (tp is not None and tp != plan.tp) or ep not in (1, plan.ep):
            raise InvalidArgument(f"load_sharded: the plan has tp={plan.tp} and ep={plan.ep}; leave out tp and ep")
        if plan.ranks != size:
            stage = "the group" if pp == 1 else "a stage"
            raise InvalidArgument(f"load_sharded: the plan is for {plan.ranks} ranks, and {stage} has {size}")
        return plan.tp
    if type(ep) is not int or ep < 1 or (tp is not None and (type(tp) is not int or tp < 1)):
        raise InvalidArgument(f"load_sharded: tp and ep must be positive numbers of ranks, not {tp!r} and {ep!r}")
    tp = max(size // ep, 1) if tp is None else tp
    if tp * ep != size:
        stage = "group" if pp == 1 else "stage"
        raise InvalidArgument(f"load_sharded: tp={tp} times ep={ep} is not the {size} ranks of the {stage}")
    return tp


def _split(group: Group, color: int) -> Group:
    own = group.split(color)
    assert own is not None  # the color is not negative
    return own


@contextmanager
def _local_checkpoint(directory: Path, group: Group) -> Iterator[Checkpoint]:
    with agreed("load_sharded", group):
        checkpoint = open_checkpoint(directory)
    require_same_files(checkpoint, group)
    yield checkpoint


def _require_planned(model: nn.Module, plan: Plan, rank: int) -> None:
    """Raises InvalidArgument if the model that is sharded does not have the parameters of the plan."""
    found = {name: array.shape for name, array in parameters(model).items()}
    planned = {name: tuple(shard.shape_on(rank)) for name, shard in plan.shards.items()}
    for name in found if stage_of(model) else [*planned, *found]:
        if found.get(name) != planned.get(name):
            raise InvalidArgument(
                f"load_sharded: {name} has shape {found.get(name)} in the model that is sharded, and "
                f"{planned.get(name)} in its plan ({plan.how})"
            )


def _warn_of_computed(computed: list[str], sources: Mapping[str, Source], group: Group) -> None:
    if computed and group.rank() == 0:
        total = sum(sources[name].nbytes for name in computed)
        logger.warn(
            "load",
            f"{len(computed)} parameters ({total / 1e9:.2f} GB), {computed[0]} the first, are computed from the files "
            "by mlx-lm, so every rank reads their tensors in full; mlx_lm.convert writes a model that is read "
            "in shards",
        )


def _load_shards(
    model: nn.Module, plan: Plan, sources: Mapping[str, Source], group: Group, quiet: bool = False
) -> None:
    """Puts this rank's shards into the model, one parameter after the other, from its files; they are compared with
    those of the other ranks of ``group``, which hold the same layers. ``quiet``: rank 0 shows no bar."""
    checksums, rank, held = {}, group.rank(), parameters(model).keys()
    with _progress("loading", sum(plan.shards[name].bytes(rank) for name in held), rank == 0 and not quiet) as advance:
        for name, shard in plan.shards.items():
            if name not in held:
                continue
            array, memory = _room_for(shard, rank)
            # One after the other, so that all stop at the first that a rank cannot read.
            with agreed("load_sharded", group):
                sources[name].read(shard.axis, shard.slices(rank), 0, memory.data)
                if group.size() > 1:
                    checksums[name] = checksum(sources[name], None if shard.ranges else memory.data)
            advance(len(memory))
            _put(model, shard, array)
            sources[name].release()
    require_same_tensors(checksums, sources, group)


def _stream_shards(model: nn.Module, plan: Plan, sources: Mapping[str, Source], group: Group) -> None:
    """Puts this rank's shards into the model, one parameter after the other, from rank 0."""
    stage = stage_of(model)
    rank = group.rank() % plan.ranks
    rows = {name: parameters_of(stage).holders(name) if stage else [0] for name in plan.shards}
    of_a_row = {name: sum(map(shard.bytes, range(plan.ranks))) for name, shard in plan.shards.items()}
    total = sum(len(rows[name]) * count for name, count in of_a_row.items())
    with _progress("streaming", total, group.rank() == 0) as advance:
        for name, shard in plan.shards.items():
            holding = [row * plan.ranks + column for row in rows[name] for column in range(plan.ranks)]
            array, memory = _room_for(shard, rank) if group.rank() in holding else (None, None)
            stream_shard(sources[name], shard, memory, group, holding, advance)
            if array is not None:
                _put(model, shard, array)
            sources[name].release()


def _room_for(shard: Shard, rank: int) -> tuple[mx.array, np.ndarray]:
    """An array for a rank's shard, as unsigned integers, and its memory, which has no values yet."""
    array = bridge.uninitialized(shard.shape_on(rank), UNSIGNED[getattr(mx, shard.dtype).size])
    return array, bytes_of(array)


def _put(model: nn.Module, shard: Shard, array: mx.array) -> None:
    array = array.view(getattr(mx, shard.dtype), stream=mx.cpu)
    mx.eval(array)
    model.update(tree_unflatten([(shard.path, array)]))


@contextmanager
def _progress(what: str, total: int, shown: bool) -> Iterator[Callable[[int], Any]]:
    """A bar of bytes on a terminal; elsewhere, as behind the launcher, a line now and then."""
    done, printed = 0, time.monotonic()

    def advance(count: int) -> None:
        nonlocal done, printed
        done += count
        bar.advance(task, count)
        if shown and bar.disable and time.monotonic() >= printed + LINE_SECONDS:
            print(f"mlxdist: {what}: {size(done)} of {size(total)}", file=sys.stderr, flush=True)
            printed = time.monotonic()

    with byte_progress(Console(stderr=True), shown=shown) as bar:
        task = bar.add_task(what, total=total)
        yield advance


def _tokenizer(directory: Path, config: Mapping[str, Any], more: Mapping[str, Any] | None) -> Any:
    if not any(True for pattern in TOKENIZER_FILES for _ in directory.glob(pattern)):
        return None
    from mlx_lm.utils import load_tokenizer

    try:
        return load_tokenizer(directory, more and dict(more), eos_token_ids=config.get("eos_token_id"))
    except Exception as error:  # whatever transformers raises
        raise InvalidArgument(f"cannot load the tokenizer in {directory}: {type(error).__name__}: {error}") from error
