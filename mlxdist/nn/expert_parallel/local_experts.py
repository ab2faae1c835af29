"""The experts of one rank: taken from mlx-lm's switch layers, computed, and put together again.

mlx-lm keeps all experts of a layer in stacks: a projection's arrays have the experts as their first axis (those of its
LoRA adapters: as many rows of it for each expert). An array is sharded along it by expert, and with a tensor-parallel
group also inside each expert: the first projections by outputs, the last one by inputs.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import mlx.core as mx
from mlx import nn

from mlxdist.base.errors import InvalidArgument
from mlxdist.runtime.group.group import Group
from mlxdist.runtime.native import bridge
from mlxdist.runtime.operations.collectives import all_sum
from mlxdist.runtime.operations.ordering import Order, chained, is_traced

from ..layout.cut import Cut, Range
from ..layout.partition import join, scaled, split_sizes, take
from ..tensor_parallel.linear_layers import mapped
from ..tensor_parallel.lora import SWITCH_LINEARS, as_given, draw_full
from .placement import Placement

_KINDS = (("gate_proj", "up_proj", "down_proj"), ("fc1", "fc2"))


@dataclass(frozen=True)
class Sharding:
    """How the experts of a layer are sharded, and which shard is this rank's."""

    placement: Placement
    group: Group
    tp_group: Group | None
    hidden_sizes: list[int]  # of each rank of tp_group

    @classmethod
    def of(cls, switch: nn.Module, placement: Placement, group: Group, tp_group: Group | None) -> "Sharding":
        last = switch[projections(switch)[-1]]
        ranks = tp_group.size() if tp_group else 1
        if ranks == 1:
            return cls(placement, group, None, [base(last).input_dims])
        if any("linear" in switch[name] for name in projections(switch)):
            raise InvalidArgument("from_switch: experts with LoRA adapters cannot be sharded inside; fuse the adapters")
        multiple = last.group_size if "scales" in last else 1
        sizes = split_sizes("hidden size of the experts", last.input_dims, ranks, multiple=multiple)
        return cls(placement, group, tp_group, sizes)


def projections(switch: nn.Module) -> tuple[str, ...]:
    """The names of a switch layer's projections, in the order of computing. Rejects another kind of layer."""
    for names in _KINDS:
        if isinstance(switch, nn.Module) and all(isinstance(switch.get(name), nn.Module) for name in names):
            return names
    raise InvalidArgument(
        "from_switch: expected mlx-lm's SwitchGLU (gate_proj, up_proj, down_proj) or SwitchMLP (fc1, fc2), not "
        f"{type(switch).__name__}"
    )


def shard_projection(projection: nn.Module, name: str, last: bool, sharding: Sharding) -> nn.Module:
    """A projection like this one with the shard of this rank alone, in memory of its own once it is evaluated."""
    experts = sharding.placement.num_experts

    def shard(key: str, array: mx.array) -> mx.array:
        if array.ndim == 0 or array.shape[0] % experts:
            raise InvalidArgument(
                f"from_switch: {name}.{key} has shape {array.shape}, which cannot be split into {experts} experts"
            )
        each = array.shape[0] // experts
        mine = take(array, 0, [each * count for count in sharding.placement.counts], sharding.group.rank())
        axis = _hidden_axis(key, array.ndim, last)
        if sharding.tp_group is not None and axis is not None:
            mine = take(mine, axis, scaled(sharding.hidden_sizes, array.shape[axis]), sharding.tp_group.rank())
        return _transposed_in_memory(mine) if key == "weight" and transpose else mine

    transpose = mx.default_device().type == mx.DeviceType.cpu and "scales" not in base(projection)
    mine = mapped(projection, shard)
    if type(projection).__name__ in SWITCH_LINEARS:
        shape = (experts, projection.output_dims, projection.input_dims)
        draw_full(mine, shape, partial(_adapter_shard, sharding, last))
    return mine


def _adapter_shard(sharding: Sharding, last: bool, name: str, full: mx.array) -> mx.array:
    """This rank's shard of the ``lora_a`` (experts, r, inputs) or ``lora_b`` (experts, outputs, r) of all experts."""
    mine = take(full, 0, sharding.placement.counts, sharding.group.rank())
    if sharding.tp_group is None or last != (name == "lora_a"):
        return mine
    return take(mine, 2 if last else 1, sharding.hidden_sizes, sharding.tp_group.rank())


def _transposed_in_memory(weight: mx.array) -> mx.array:
    """The same array, whose last two axes lie in memory the other way round.

    Layers multiply by the transposed weight. With the BLAS of MLX's CPU backend on Linux, gather_mm takes 0.6 of the
    time where that lies row by row.
    """
    return mx.contiguous(weight.swapaxes(-1, -2)).swapaxes(-1, -2)


def join_projection(projection: nn.Module, last: bool, sharding: Sharding) -> nn.Module:
    """The full projection from all ranks' shards. Collective, and awaited: lazy ones would have no order."""

    def full(key: str, array: mx.array) -> mx.array:
        axis = _hidden_axis(key, array.ndim, last)
        if sharding.tp_group is not None and axis is not None:
            total = array.shape[axis] * sum(sharding.hidden_sizes) // sharding.hidden_sizes[sharding.tp_group.rank()]
            array = join(array, axis, scaled(sharding.hidden_sizes, total), sharding.tp_group)
        each = array.shape[0] // sharding.placement.counts[sharding.group.rank()]
        array = join(array, 0, [each * count for count in sharding.placement.counts], sharding.group)
        mx.eval(array)
        return array

    joined = mapped(projection, full)
    as_given(base(joined))
    return joined


def expert_cut(key: str, local: tuple[int, ...], last: bool, sharding: Sharding) -> Cut:
    """The cut of a projection's array that is named ``key``. This rank holds a part of it, of shape ``local``."""
    rank, counts = sharding.group.rank(), sharding.placement.counts
    each = local[0] // counts[rank]
    if key in ("lora_a", "lora_b"):
        axis = (2 if last else 1) if last == (key == "lora_a") else None
    else:
        axis = _hidden_axis(key, len(local), last)
    shape, hidden = [each * sum(counts), *local[1:]], sharding.hidden_sizes
    if sharding.tp_group is None or axis is None:
        return Cut.full(shape).along(0, _ranges([each * count for count in counts]), sharding.group)
    shape[axis] = local[axis] * sum(hidden) // hidden[sharding.tp_group.rank()]
    cut = Cut.full(shape).along(axis, _ranges(scaled(hidden, shape[axis])), sharding.tp_group)
    return cut.along(0, _ranges([each * count for count in counts]), sharding.group)


def _ranges(sizes: Sequence[int]) -> list[list[Range]]:
    """A list with the range of each rank, from the ranks' sizes."""
    stops = accumulate(sizes)
    return [[(stop - size, stop)] for size, stop in zip(sizes, stops, strict=True)]


def compute(layer: nn.Module, rows: mx.array, experts: mx.array, ascending: bool, tp_group: Group | None) -> mx.array:
    """Expert ``experts[i]`` of ``layer`` on ``rows[i]``: (pairs, d), in the dtype that mlx-lm's layer would give.

    Also experts (tokens, k) on rows (tokens, 1, d): (tokens, k, d). With a tensor-parallel group: this rank's summand.
    """
    names = projections(layer)
    dtype = _result_dtype(layer, names, rows.dtype)
    if rows.shape[0] == 0:
        # MLX's gather_mm has no gradient here.
        return mx.zeros((*experts.shape, base(layer[names[-1]]).output_dims), dtype)
    if mx.default_device().type == mx.DeviceType.cpu and not all("scales" in base(layer[name]) for name in names):
        rows = rows.astype(mx.float32)  # the only dtype of gather_mm there
    # With sorted indices MLX's gather_mm has misread rows that are not contiguous, or have an axis that was inserted:
    # on Metal before 0.32.1 (ml-explore/mlx#3960), on CUDA in 0.32.4. So neither here nor, by squeeze, for gradients.
    hidden = mx.contiguous(rows).reshape(*rows.shape[:-1], 1, rows.shape[-1])
    *first, last = (layer[name] for name in names)
    # Up before gate, in mlx-lm's order, for results that are bitwise those of its layer.
    inner = [one(hidden, experts, sorted_indices=ascending) for one in reversed(first)]
    hidden = layer.activation(*inner)
    if tp_group is not None and "bias" in last and tp_group.rank() != 0:  # the first rank alone adds it
        last = copy.copy(last)
        last["bias"] = last["bias"] * 0
    result = last(hidden, experts, sorted_indices=ascending)
    return result.reshape(*result.shape[:-2], result.shape[-1]).astype(dtype)


def skips_others(layer: nn.Module) -> bool:
    """Whether :func:`compute_own` can compute this layer: plain float32 weights on the CPU."""
    if mx.default_device().type != mx.DeviceType.cpu:
        return False
    each = [layer[name] for name in projections(layer)]
    return all("weight" in one and len(one) == 1 and one["weight"].dtype == mx.float32 for one in each)


def compute_own(layer: nn.Module, x: mx.array, experts: mx.array) -> mx.array:
    """Experts (tokens, k) of ``layer`` on x (tokens, d): (tokens, k, d), zeros for other ranks' experts. No gradient.

    The experts of other ranks are not computed, although the host does not know which they are.
    """
    *first, last = (layer[name].weight for name in projections(layer))
    rows = x[:, None].astype(mx.float32)
    hidden = layer.activation(*(bridge.expert_matmul(rows, weight, experts) for weight in reversed(first)))
    return bridge.expert_matmul(hidden, last, experts).astype(_result_dtype(layer, projections(layer), x.dtype))


def tied(
    layer: nn.Module, inputs: list[mx.array], order: Order, tp_group: Group | None
) -> tuple[nn.Module, list[mx.array]]:
    """The layer and its inputs, whose gradients wait for all collectives of the backward pass: the first run.

    Gradients of what ``tp_group`` holds alike, the inputs and the last projection's bias, are added up over it. Only
    arrays that a gradient may be asked of are tied. Where there are none, the layer itself comes back.
    """
    trained = _traced(layer)
    if not trained and not is_traced(*inputs):
        return layer, inputs
    shared, add_up = list(inputs), None
    if tp_group is not None:
        add_up = chained(lambda cotangent: all_sum(cotangent, group=tp_group))
        last = layer[projections(layer)[-1]]
        shared += [last["bias"]] if "bias" in last else []
        trained = [array for array in trained if all(array is not other for other in shared)]
    results = order.run(None, add_up, *((shared, trained) if add_up else ([], [*shared, *trained])))
    replaced = {id(array): result for array, result in zip([*shared, *trained], results)}
    return mapped(layer, lambda key, array: replaced.get(id(array), array)), results[: len(inputs)]


def _traced(module: nn.Module) -> list[mx.array]:
    """The floats of ``module``, and of the modules in it, that a gradient may be asked of."""
    found = []
    for value in module.values():
        if isinstance(value, nn.Module):
            found += _traced(value)
        elif isinstance(value, mx.array) and mx.issubdtype(value.dtype, mx.floating) and is_traced(value):
            found.append(value)
    return found


def summed(y: mx.array, order: Order, tp_group: Group) -> mx.array:
    """The sum of all ranks' summands, whose gradient is the cotangent, as all ranks have the same: the last run."""
    return order.run(lambda arrays: [all_sum(arrays[0], group=tp_group)], None, [y])[0]


def _result_dtype(layer: nn.Module, names: tuple[str, ...], dtype: mx.Dtype) -> mx.Dtype:
    """The dtype that mlx-lm's layer gives for inputs of ``dtype``: as wide as its widest array of floats."""
    for name in names:
        for _, array in base(layer[name]).items():
            if not isinstance(array, mx.array) or array.dtype == dtype:
                continue
            if mx.issubdtype(array.dtype, mx.floating) and array.ndim > 1:
                dtype = mx.result_type(mx.zeros((), dtype), mx.zeros((), array.dtype))
    return dtype


def base(projection: nn.Module) -> nn.Module:
    """The projection itself below LoRA adapters."""
    return projection["linear"] if "linear" in projection else projection


def _hidden_axis(key: str, axes: int, last: bool) -> int | None:
    """The axis along which an array depends on the experts' hidden size; ``None`` if it does not."""
    if axes == 1 or (last and key == "bias"):
        return None
    return 2 if last else 1
