"""The gated MLP (Shazeer 2020, arXiv:2002.05202) whose hidden features are sharded over the ranks."""

from collections.abc import Callable, Sequence
from functools import partial

import mlx.core as mx
from mlx import nn

from mlxdist.base.errors import InvalidArgument
from mlxdist.runtime.group.group import Group, GroupLike
from mlxdist.runtime.operations.arguments import group_of

from ..layout.partition import require_counts, split_sizes
from ..rank_checks import agreed, described
from .column_parallel import ColumnParallelLinear
from .linear_layers import check_has, check_parts, dims, mapped, quantization, quantization_unit
from .parallel_linear import Sharded
from .row_parallel import RowParallelLinear

__all__ = ["ParallelMLP"]

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


class ParallelMLP(Sharded):
    """``down_proj(activation(gate_proj(x)) * up_proj(x))``; each rank computes its shard of the hidden features.

    Gate and up are one matrix, so that a call is two products and one all_sum. Input and output: shape (..., dims), the
    same on all ranks; with ``sequence_parallel`` this rank's equal shard of the axis -2. Dtype as in ``nn.Linear``.
    Gradients are this rank's shard of the dense layer's. Backward: one all_sum of the gradient of the input.

    Submodules: ``gate_up_proj``, column-parallel with two segments: each rank holds its shard of gate, then
    its shard of up; ``down_proj``, row-parallel. ``sizes``: the hidden features of each rank.

    Args:
        dims: features of the input and the output.
        hidden_dims: features between them, of all ranks.
        bias: whether the projections have one.
        activation: of the gate: a function of an array, elementwise.
        sequence_parallel: the input and the output are sharded along the sequence.
        rank_shares: one positive number a rank, to shard the hidden features in proportion to.
        group: the ranks, which make the layer together; ``None`` is the group of ``mlxdist.init()``.

    The initial values are this rank's shard of those of dense layers: use the same seed on all ranks.

    Raises:
        InvalidArgument: on all ranks, if the hidden features cannot be sharded so.
        Mismatch: on all ranks, if arguments differ.
    """

    def __init__(
        self,
        dims: int,
        hidden_dims: int,
        *,
        bias: bool = False,
        activation: Callable[[mx.array], mx.array] = nn.silu,
        sequence_parallel: bool = False,
        rank_shares: Sequence[float] | None = None,
        group: GroupLike | None = None,
    ) -> None:
        group = group_of(group)
        with agreed("ParallelMLP", group, dims, hidden_dims, bias, sequence_parallel, rank_shares):
            require_counts("ParallelMLP", dims=dims, hidden_dims=hidden_dims)
            whole = nn.Module()
            whole.gate_proj = nn.Linear(dims, hidden_dims, bias)
            whole.up_proj = nn.Linear(dims, hidden_dims, bias)
            whole.down_proj = nn.Linear(hidden_dims, dims, bias)
            self._cut("ParallelMLP", whole, activation, sequence_parallel, rank_shares, group)

    @classmethod
    def from_mlp(
        cls,
        mlp: nn.Module,
        *,
        activation: Callable[[mx.array], mx.array] = nn.silu,
        sequence_parallel: bool = False,
        rank_shares: Sequence[float] | None = None,
        group: GroupLike | None = None,
    ) -> "ParallelMLP":
        """This rank's shard of an ``MLP`` of mlx-lm that all ranks hold: gate_proj, up_proj and down_proj.

        Plain or quantized; gate and up alike, because they become one matrix. The module must compute what the class
        does with ``activation``. Arguments as for the class. Parameters that are frozen stay so.

        Raises:
            InvalidArgument: on all ranks, as for the class, if ``mlp`` is something else on one of them, or if a rank's
                hidden features are no whole quantization groups of down_proj.
        """
        group, name = group_of(group), f"{cls.__name__}.from_mlp"
        layer = cls.__new__(cls)
        with agreed(name, group, sequence_parallel, rank_shares, described(mlp)):
            layer._cut(name, mlp, activation, sequence_parallel, rank_shares, group)
        return layer

    def to_mlp(self, mlp: nn.Module) -> nn.Module:
        """Puts the full gate_proj, up_proj and down_proj into a module of mlx-lm, and returns it.

        A collective that is carried out at once: all ranks call it. ``mlp`` may have any values.

        Raises:
            InvalidArgument: on all ranks, if the module on one of them has no such projections.
        """
        with agreed("ParallelMLP.to_mlp", self._group):
            check_has("ParallelMLP.to_mlp", mlp, _PROJECTIONS, "MLP")
        gate_up = self.gate_up_proj.to_linear()
        for index, name in enumerate(("gate_proj", "up_proj")):
            setattr(mlp, name, mapped(gate_up, partial(_half, index)))
        mlp.down_proj = self.down_proj.to_linear()
        return mlp

    def __call__(self, x: mx.array) -> mx.array:
        gate, up = mx.split(self.gate_up_proj(x), 2, axis=-1)
        return self.down_proj(self.activation(gate) * up)

    def _cut(
        self,
        name: str,
        whole: nn.Module,
        activation: Callable[[mx.array], mx.array],
        sequence_parallel: bool,
        rank_shares: Sequence[float] | None,
        group: Group,
    ) -> None:
        _check(name, whole)
        if not callable(activation):
            raise InvalidArgument(f"{name}: activation must be a function, not {activation!r}")
        # Quantization groups run along the inputs of a layer: those of down_proj are the hidden features.
        multiple = quantization_unit(whole.down_proj)
        groups = f" in quantization groups of {multiple}" if multiple > 1 else ""
        hidden = dims(whole.gate_proj)[0]
        sizes = split_sizes(f"{name}: hidden_dims{groups}", hidden, group.size(), rank_shares, multiple)
        super().__init__()
        self.activation, self._sizes, self._group = activation, tuple(sizes), group
        common = {"sequence_parallel": sequence_parallel, "rank_shares": sizes, "multiple": multiple, "group": group}
        up = whole.up_proj
        merged = mapped(whole.gate_proj, lambda key, gate: mx.concatenate([gate, up[key]]))
        self.gate_up_proj = ColumnParallelLinear.from_linear(merged, segments=2, **common)
        self.down_proj = RowParallelLinear.from_linear(whole.down_proj, **common)


def _half(index: int, name: str, parameter: mx.array) -> mx.array:
    """The part of gate (0) or of up (1) in a merged parameter."""
    return mx.contiguous(mx.split(parameter, 2)[index])


def _check(name: str, mlp: nn.Module) -> None:
    """Rejects what is not a gated MLP whose gate and up can be merged."""
    check_has(name, mlp, _PROJECTIONS, "MLP")
    check_parts(name, mlp, _PROJECTIONS)
    gate, up = mlp.gate_proj, mlp.up_proj
    if dims(gate) != dims(up) or dims(gate)[0] != dims(mlp.down_proj)[1]:
        raise InvalidArgument(
            f"{name}: gate_proj has {dims(gate)} outputs and inputs, up_proj {dims(up)}, down_proj "
            f"{dims(mlp.down_proj)}: they are not those of one MLP"
        )
    if described(gate) != described(up) or quantization(gate) != quantization(up):
        raise InvalidArgument(
            f"{name}: gate_proj and up_proj cannot become one matrix: one is {described(gate)} {quantization(gate)}, "
            f"the other {described(up)} {quantization(up)}"
        )
