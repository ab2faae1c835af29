"""ZeRO (Zero Redundancy Optimizer): a rank holds a shard of each parameter, of its gradient and optimizer state."""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxdist.base.errors import InvalidArgument
from mlxdist.nn.interception import become, derived
from mlxdist.nn.layout.cut import Cut
from mlxdist.nn.layout.modules import join_path
from mlxdist.nn.models.cuts import cuts
from mlxdist.nn.rank_checks import agreed, described
from mlxdist.runtime.group.group import Group, GroupLike
from mlxdist.runtime.mesh import Mesh, group_without
from mlxdist.runtime.operations.arguments import group_of

from .flat_shards import FlatShards, Slot, slots_of
from .unit import METHODS, Unit, UnitChannel

__all__ = ["fully_shard"]

# mlx-lm's names for the parameters of low-rank adapters: LoRA and DoRA.
_ADAPTERS = ("lora_a", "lora_b", "m")


def fully_shard(
    module: nn.Module,
    *,
    group: GroupLike | None = None,
    compute_dtype: mx.Dtype | None = None,
    stage: int = 3,
    reshard_after_forward: bool = True,
    prefetch: int = 1,
    mesh: Mesh | None = None,
) -> nn.Module:
    """MLX's ``nn.fully_shard`` for parameters of any shape, in place: every rank holds a shard of each.

    The module keeps its type, its attributes and the paths of its parameters. Each parameter becomes this rank's shard,
    of one dimension and maybe size 0. A call gathers the full parameters of a *unit* with one message, and frees them
    when it is done; the backward pass gathers them again, and reduces their gradients to the shards of their mean. The
    messages of a unit travel while others compute. ``nn.value_and_grad`` and every optimizer of MLX that works
    elementwise then train as on one process with the batches of all ranks.

    A module without lists of modules, such as a block, is one unit. In a model, each module in its outermost lists
    (its layers) is one, and so is each other module that has parameters. A module that is a unit already stays one.

    ZeRO: Rajbhandari et al. 2020, arXiv:1910.02054; in PyTorch: Zhao et al. 2023, arXiv:2304.11277. In one step of a
    model with parameters of P bytes, n ranks send, each:

        stage 3    3 (n - 1) / n P    and hold parameters, gradients and optimizer state of P / n, and about two units
        stage 1, 2, or reshard_after_forward=False
                   2 (n - 1) / n P    and hold all parameters, too, from the forward to the backward pass

    With ``train.value_and_grad(micro_batches=k)``, stage 3 sends that k times. Stage 2 gathers once and keeps the
    parameters for all micro-batches, so it sends (k + 1) (n - 1) / n P. Stage 1 keeps the sum of the gradients, too,
    in float32 and in full, and reduces it with the last one: 2 (n - 1) / n P for any k.

    Frozen parameters, also quantized ones, are sharded and have no gradient; LoRA's adapters on them, and
    ``nn.BatchNorm``, stay full on all ranks, and their gradients are averaged. Freeze and add adapters before. Use
    gradient checkpointing (``nn.utils.checkpoint``, mlx-lm's ``grad_checkpoint``) on a module that is sharded already.

    Args:
        module: equal on all ranks, but for the values, of which each rank's shard counts. Memory for full parameters
            is needed for one unit at a time if they are lazy.
        group: the ranks to shard over; ``None`` is the group of ``mlxdist.init()``.
        compute_dtype: the parameters are gathered and computed with in this dtype; gradients travel in it, are added up
            in float32, and get the dtype of the shards. ``None``: their own.
        stage: 3, or 1 or 2, which gather the parameters once a step. Without micro-batches of
            :func:`value_and_grad` 1 is 2.
        reshard_after_forward: whether the backward pass gathers again; for stage 3.
        prefetch: how many units ahead the backward pass gathers. With 0, the forward pass, too, gathers only when
            it has come to a unit.
        mesh: instead of ``group``: sharded over ``mesh["fsdp"]``, and gradients averaged over ``mesh["dp"]``, too.

    Returns:
        ``module``, unchanged in a group of one.

    Raises:
        InvalidArgument: on all ranks, before any work: an argument is not what it should be on one of them; MLX's
            ``nn.fully_shard`` has sharded the module.
        Mismatch: on all ranks, before any work: options differ, or parameters, their dtypes, or which are frozen.
    """
    if mesh is not None and group is None:
        group, replicas = mesh["fsdp"], mesh["dp"]
    else:
        group, replicas = group_of(group), None
    everyone = group if mesh is None else mesh.group
    alike = group if mesh is None else group_without(mesh, "pp")  # each stage has parameters of its own
    options = (compute_dtype, stage, reshard_after_forward, prefetch)
    parameters: dict[str, object] = {}
    # What is compared is as it is behind the block.
    with agreed("fully_shard", everyone, options), agreed("fully_shard", alike, parameters):
        _check(module, mesh is not None and replicas is None, *options)
        parameters |= described(module, {path: cut.shape for path, cut in cuts(module).items()})
    if everyone.size() == 1 or group.size() * (replicas.size() if replicas else 1) == 1:
        return module
    channel = UnitChannel.of(group)
    other = UnitChannel.of(replicas) if replicas is not None and replicas.size() > 1 else None
    reshards = stage == 3 and reshard_after_forward
    paths = {id(inner): path for path, inner in module.named_modules()}
    for root, owners in _units(module):
        flats, replicated = _flats(owners, group)
        if root is not module and not flats and not replicated:
            continue
        found, path = _cuts(root, flats, group), paths.get(id(root), "")
        unit = Unit(path, flats, replicated, channel, other, compute_dtype, stage, reshards, prefetch)
        for flat in flats:
            flat.shard()
        reduced_over = (group,) if replicas is None else (group, replicas)
        vars(root).update(_unit=unit, _cuts=found, reduced_over=reduced_over)
        for owner in owners:
            if any(slots_of(owner)):  # others may be of several models, as the activation of all of mlx-lm's experts
                vars(owner)["_sharded"] = True
        become(root, _sharded(type(root)))
    return module


def _check(module: Any, both: bool, dtype: Any, stage: Any, reshards: Any, prefetch: Any) -> None:
    if both:
        raise InvalidArgument("fully_shard: give either group or mesh; a mesh says what its axes fsdp and dp are")
    if not isinstance(module, nn.Module):
        raise InvalidArgument(f"fully_shard: module must be an nn.Module, not a {type(module).__name__}")
    if dtype is not None and not (isinstance(dtype, mx.Dtype) and mx.issubdtype(dtype, mx.floating)):
        raise InvalidArgument(
            f"fully_shard: compute_dtype must be a floating point dtype such as mx.bfloat16, not {dtype}"
        )
    if stage not in (1, 2, 3):
        raise InvalidArgument(f"fully_shard: stage must be 1, 2 or 3, not {stage!r}")
    if not isinstance(reshards, bool):
        raise InvalidArgument(f"fully_shard: reshard_after_forward must be True or False, not {reshards!r}")
    if not isinstance(prefetch, int) or isinstance(prefetch, bool) or prefetch < 0:
        raise InvalidArgument(f"fully_shard: prefetch is a number of units from 0, not {prefetch!r}")
    for inner in _outside_units(module, set()):
        if "_sharded" in vars(inner):
            raise InvalidArgument(
                f"fully_shard: a {type(inner).__name__} is in another sharded module, too; shard a module that has both"
            )


def _is_unit(module: nn.Module) -> bool:
    return "_unit" in vars(module)


def _units(module: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Module]]]:
    """Each unit: the module whose call gathers, and those whose own parameters it gathers."""
    blocks = [] if _is_unit(module) else _in_lists(module)
    if not blocks:
        yield module, _outside_units(module, set())
        return
    # What several of them contain can be in the unit of none.
    times = Counter(id(inner) for block in blocks for inner in _outside_units(block, set()))
    for shared in [inner for block in blocks for inner in _outside_units(block, set()) if times[id(inner)] > 1]:
        if not _is_unit(shared):
            yield shared, [shared]
    seen = {id(block) for block in blocks}
    for block in blocks:
        yield block, _outside_units(block, set())
    for rest in _outside_units(module, seen):
        yield rest, [rest]


def _in_lists(module: nn.Module) -> list[nn.Module]:
    """The modules in the outermost lists (or dicts) of modules, each once."""
    found: dict[int, nn.Module] = {}
    for child in module.children().values():
        if isinstance(child, nn.Module):
            found |= {id(inner): inner for inner in _in_lists(child)}
        else:
            found |= {id(inner): inner for inner in _modules_in(child)}
    return list(found.values())


def _modules_in(tree: Any) -> Iterator[nn.Module]:
    if isinstance(tree, nn.Module):
        yield tree
    elif isinstance(tree, dict | list):
        for inner in tree.values() if isinstance(tree, dict) else tree:
            yield from _modules_in(inner)


def _outside_units(module: nn.Module, seen: set[int]) -> list[nn.Module]:
    """``module`` and those in it, each once, without units and what is in them. ``seen``: those to leave out."""
    if id(module) in seen or _is_unit(module):
        return []
    seen.add(id(module))
    inner = (one for child in module.children().values() for one in _modules_in(child))
    return [module, *(one for child in inner for one in _outside_units(child, seen))]


def _flats(owners: list[nn.Module], group: Group) -> tuple[list[FlatShards], list[Slot]]:
    """The modules' own parameters: shards, by dtype and by whether they are trained, and those that stay full."""
    sharded: dict[tuple[bool, str], list[Slot]] = {}
    replicated = []
    for owner in owners:
        for slot in slots_of(owner):
            if isinstance(owner, nn.BatchNorm) or "lora_a" in owner and slot.name in _ADAPTERS:
                replicated.append(slot)
            else:
                sharded.setdefault((slot.is_trained, str(slot.array.dtype)), []).append(slot)
    return [
        FlatShards(slots, group.rank(), group.size()) for _, slots in sorted(sharded.items(), key=lambda item: item[0])
    ], replicated


def _cuts(root: nn.Module, flats: list[FlatShards], group: Group) -> dict[str, Cut]:
    """How the parameters of a unit will be cut, by their paths in ``root``; layers over tp are cut already."""
    ranges = {(id(s.container), s.key): held for flat in flats for s, held in zip(flat.slots, flat.ranges)}
    before = cuts(root)
    return {
        join_path(path, slot.path): before[join_path(path, slot.path)].flattened(begin, end, end - begin, group)
        for path, inner in root.named_modules()
        for slot in slots_of(inner)
        if (held := ranges.get((id(slot.container), slot.key)))
        for begin, end in [held]
    }


@cache
def _sharded(kind: Any) -> type[nn.Module]:
    """Returns a subclass of ``kind`` whose calls are those of a unit."""
    methods: dict[str, Any] = {name: _method(getattr(kind, name)) for name in METHODS if hasattr(kind, name)}
    return derived(kind, methods | {"cuts": lambda self: self._cuts})


def _method(method: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._unit.call(self, method, args, kwargs)

    return call
