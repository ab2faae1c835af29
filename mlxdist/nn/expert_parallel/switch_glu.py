"""mlx-lm's mixture of experts with each expert on one rank."""

import copy
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Literal

import mlx.core as mx
import numpy as np
from mlx import nn

from mlxdist.base.errors import InvalidArgument
from mlxdist.base.opaque import Opaque, create
from mlxdist.runtime.group.group import GroupLike
from mlxdist.runtime.label import label_scope
from mlxdist.runtime.native import bridge
from mlxdist.runtime.operations.arguments import group_of
from mlxdist.runtime.operations.ordering import Order, is_traced

from ..layout.modules import parameters
from ..rank_checks import agree, on_host
from .capacity import limit
from .comparisons import Comparisons
from .dispatch import DispatchHandle, dispatched, dispatched_alike, exchange_routing, outgoing
from .fp8 import ExchangeDtype, dtype_name
from .gathered import gathered
from .local_experts import Sharding, base, join_projection, projections, shard_projection, skips_others, summed, tied
from .placement import Placement, wrong_index
from .policy import MODES, LinkCosts, Policy
from .replicated import Compiled, Experts, optional, replicated

__all__ = ["ExpertParallelSwitchGLU", "set_path"]

_NAME = "ExpertParallelSwitchGLU"
_EXCHANGE_DTYPES = (mx.float32, mx.float16, mx.bfloat16)
_FEW = 64  # pairs of a token and an expert: of more, a comparison of the ranks takes no time that could be noticed
# Elements of weights that are multiplied by in about the time that the host takes for waiting for the indices.
_WORTH_WAITING = {mx.DeviceType.cpu: 400_000, mx.DeviceType.gpu: 20_000_000}


@dataclass(frozen=True)
class _Options:
    """The options of :meth:`ExpertParallelSwitchGLU.from_switch`, and of its attributes, checked."""

    mode: str
    tokens: str
    capacity_factor: float | None
    exchange_dtype: ExchangeDtype
    host_sync: bool

    def __post_init__(self) -> None:
        if self.mode not in ("auto", *MODES):
            raise InvalidArgument(f"{_NAME}: mode is {self.mode!r}, not one of auto, {', '.join(MODES)}")
        if self.tokens not in ("replicated", "sharded"):
            raise InvalidArgument(f"{_NAME}: tokens is {self.tokens!r}, not 'replicated' or 'sharded'")
        factor, dtype = self.capacity_factor, self.exchange_dtype
        if factor is not None and not (isinstance(factor, Real) and 0 < factor < float("inf")):
            raise InvalidArgument(f"{_NAME}: capacity_factor must be a positive number, not {factor!r}")
        if dtype not in (_EXCHANGE_DTYPES if isinstance(dtype, mx.Dtype) else (None, "fp8")):
            raise InvalidArgument(
                f"{_NAME}: exchange_dtype is {dtype!r}, not None, mx.float32, mx.float16, mx.bfloat16 or 'fp8'"
            )
        if type(self.host_sync) is not bool:
            raise InvalidArgument(f"{_NAME}: host_sync is {self.host_sync!r}, not True or False")

    def __str__(self) -> str:
        names = ("tokens", "capacity_factor", "exchange_dtype", "host_sync", "mode")
        return ", ".join(f"{name}={dtype_name(getattr(self, name))}" for name in names)


class ExpertParallelSwitchGLU(nn.Module, metaclass=Opaque):
    """mlx-lm's SwitchGLU or SwitchMLP whose experts lie on the ranks of a group. Made by :meth:`from_switch`.

    ``layer(x, indices)`` is what mlx-lm's blocks call: x (..., d), indices (..., k) -> (..., k, d). ``layer(x, indices,
    scores)`` returns the sum weighted by scores (..., k), of shape (..., d), and moves k times less. Parameters have
    the names they had (``gate_proj.weight`` ...), and hold this rank's experts alone.

    Attributes:
        last_mode: the one that the last call took.
        dropped: pairs of a token and an expert that the last call dropped on all ranks together; ``None`` if the host
            does not know (``mx.compile``, ``host_sync=False``). ``dropped_total``: the sum over all calls.
        policy: chooses the mode for "auto".
    """

    _made_by = f"{_NAME}.from_switch"

    def __init__(self, switch: nn.Module, sharding: Sharding, options: _Options, policy: Policy) -> None:
        super().__init__()
        names = projections(switch)
        self._sharding = sharding
        like = copy.copy(switch)  # without its projections, to be filled again
        for name in names:
            del like[name]
        object.__setattr__(self, "_like", like)  # not part of the module's tree: no parameters
        self._options = options
        self._configuration = _describe(switch, sharding, policy)
        self._comparisons = Comparisons()
        self._compiled = Compiled()
        for name in names:
            self[name] = shard_projection(switch[name], name, name == names[-1], sharding)
        each = (base(switch[name]) for name in names)
        self._pair_elements = sum(one.input_dims * one.output_dims for one in each)
        self.activation = switch.activation
        self._path: str | None = None
        self.policy = policy
        self.last_mode: str | None = None
        self.dropped: int | None = 0
        self.dropped_total = 0
        self._agreed = False

    @classmethod
    def from_switch(
        cls,
        switch: nn.Module,
        *,
        group: GroupLike | None = None,
        mode: Literal["auto", "replicated", "gather", "dispatch"] = "auto",
        tokens: Literal["replicated", "sharded"] = "replicated",
        capacity_factor: float | None = None,
        exchange_dtype: ExchangeDtype = None,
        rank_shares: Sequence[float] | None = None,
        tp_group: GroupLike | None = None,
        host_sync: bool = True,
        policy: Policy | None = None,
    ) -> "ExpertParallelSwitchGLU":
        """The layer with this rank's experts, from one that has all. No collective: the first call compares the ranks.

        Args:
            switch: mlx-lm's SwitchGLU or SwitchMLP, quantized or not, with any activation; not changed. Its arrays may
                still be lazy. The arrays of LoRA adapters are sharded with it.
            group: the ranks that share the experts; at most as many as there are experts.
            mode: how tokens travel; every way gives the same result.
                "replicated": every rank computes its experts for all tokens; all_sum.
                "gather": sum_scatter instead of all_sum; before it all_gather where tokens are sharded.
                "dispatch": all_to_all_v of exactly the routed tokens. Not inside ``mx.compile``.
                "auto": what ``policy`` takes for the cheapest, call by call.
            tokens: "replicated": all ranks pass the same tokens, as in mlx-lm; they all get all results. "sharded":
                each its own ones, also none.
            capacity_factor: drop what exceeds this many times the mean load of an expert, rounded up: of the call's
                tokens where they are replicated, of each rank's where they are sharded. First choices go before second
                ones, earlier tokens before later ones. Dropped pairs add nothing to the result. ``None``: nothing.
            exchange_dtype: what tokens and results travel as (their gradients too): ``None`` for their own dtype,
                ``mx.float32``, ``mx.float16``, ``mx.bfloat16``, or "fp8", which holds for copies of rows; sums and
                gradients then travel in their own dtype.
            rank_shares: one positive number per rank: experts in proportion to it.
            tp_group: ranks that share the inside of each expert: a grid with ``group`` (``Group.split``).
            host_sync: whether a call may wait for its indices. If not, it works as inside ``mx.compile``: modes
                "replicated" and "gather" only, each rank computes as many pairs as there are, indices out of range
                make NaN instead of an error, and ranks with sharded tokens must have equally many.
            policy: for "auto"; ``None`` for one with the numbers of the tuning file, or of the provider.

        Raises:
            InvalidArgument: ``switch`` is something else; fewer experts than ranks; another argument does not fit.
        """
        group = group_of(group)
        names = projections(switch)
        options = _Options(mode, tokens, capacity_factor, exchange_dtype, host_sync)
        placement = Placement(base(switch[names[0]]).num_experts, group.size(), rank_shares)
        sharding = Sharding.of(switch, placement, group, None if tp_group is None else group_of(tp_group))
        return create(cls, switch, sharding, options, policy or Policy(LinkCosts.of(group=group)))

    def _extra_repr(self) -> str:
        group = self._sharding.group
        return f"rank {group.rank()} of {group.size()}, experts={self.placement.counts}, mode={self.mode!r}"

    def to_switch(self) -> nn.Module:
        """The layer of mlx-lm with all experts, on every rank. Collective, and awaited."""
        names = projections(self)
        switch = copy.copy(self._like)
        for name in names:
            switch[name] = join_projection(self[name], name == names[-1], self._sharding)
        return switch

    @property
    def mode(self) -> str:
        """How tokens travel: "replicated", "gather", "dispatch" or "auto". May be set, on all ranks alike.

        The next call compares it. Raises InvalidArgument where it is none of these.
        """
        return self._options.mode

    @mode.setter
    def mode(self, mode: str) -> None:
        self._change(mode=mode)

    @property
    def host_sync(self) -> bool:
        """Whether a call may wait for its indices on the host. May be set, as ``mode``."""
        return self._options.host_sync

    @host_sync.setter
    def host_sync(self, host_sync: bool) -> None:
        self._change(host_sync=host_sync)

    def _change(self, **options: Any) -> None:
        self._options = replace(self._options, **options)
        self._agreed = False

    @property
    def tokens(self) -> str:
        """Whose tokens a call has: "replicated" or "sharded"."""
        return self._options.tokens

    @property
    def capacity_factor(self) -> float | None:
        """How many times the mean load an expert takes; ``None`` for any."""
        return self._options.capacity_factor

    @property
    def exchange_dtype(self) -> ExchangeDtype:
        """The dtype that tokens and results travel as; ``None`` for their own."""
        return self._options.exchange_dtype

    @property
    def placement(self) -> Placement:
        """Which rank holds which expert."""
        return self._sharding.placement

    def __call__(self, x: mx.array, indices: mx.array, scores: mx.array | None = None) -> mx.array:
        """The experts ``indices`` of the tokens ``x``. Collective.

        Args:
            x: (..., d) of a float dtype.
            indices: (..., k) integers, the experts of each token; no gradient.
            scores: (..., k) weights of the router, or ``None``.

        Returns:
            (..., k, d), or with ``scores`` (..., d), their sum, added up in float32; in the dtype of mlx-lm's layer.

        Raises:
            InvalidArgument: an index is no expert, or shapes do not fit; the same on every rank, before a payload is
                sent. Inside ``mx.compile`` only what shapes show. With mode "auto", of few replicated tokens up to 31
                calls later; until then a wrong index gives NaN.
            Mismatch: the ranks disagree, found in the same comparison; or, in calls that leave the comparison to a
                later one, shapes that do not fit on one rank, or differ from the others'.
        """
        with label_scope(self._path if bridge.traces() else None):  # decoding: it would cost time for each token
            return self._call(x, indices, scores)

    def _call(self, x: Any, indices: Any, scores: Any) -> mx.array:
        later = self.host_sync and self._is_compared_later(x, indices, scores)
        waits = self.host_sync and isinstance(indices, mx.array) and not (later and self._is_sooner_masked(indices))
        selected = on_host(indices) if waits else None
        problem = self._problem(x, indices, scores, selected)
        routing: np.ndarray | mx.array | DispatchHandle
        if later and not problem:
            routing, most = self._compared_later(indices, selected), 0
        elif selected is None and not later and isinstance(indices, mx.array):
            if problem:
                raise InvalidArgument(problem)
            routing, most = self._without_host(x, indices, scores)
        else:
            routing, most = self._with_host(x, indices, scores, selected, problem)
        k = indices.shape[-1]
        scores_of = None if scores is None else scores.reshape(-1, k)
        y = self._run(x.reshape(-1, x.shape[-1]), routing, scores_of, most, self._compiled if later else None)
        return y.reshape(*indices.shape[: -1 if scores is not None else None], y.shape[-1])

    def _is_compared_later(self, x: Any, indices: Any, scores: Any) -> bool:
        """Whether this call leaves the comparison of the ranks to a later one, as it does on all of them."""
        if self.mode != "auto" or self.tokens != "replicated" or self.capacity_factor is not None:
            return False
        looks = _looks(x, indices, scores)
        if looks is None or not self._comparisons.can_wait(looks) or self._sharding.tp_group is not None:
            return False
        if is_traced(x, indices, *optional((scores,))):
            return False
        return self._choose(indices.size // indices.shape[-1], indices.shape[-1], x) == "replicated"

    def _is_sooner_masked(self, indices: mx.array) -> bool:
        """Whether masking the pairs of other ranks' experts takes less time than a wait of the host for the indices."""
        if skips_others(self):
            return True
        others = self.placement.ranks - 1
        wasted = indices.size * others * self._pair_elements // (others + 1)
        return wasted < _WORTH_WAITING[mx.default_device().type]

    def _compared_later(self, indices: mx.array, selected: np.ndarray | None) -> np.ndarray | mx.array:
        """The experts of each token; on the host if that has them."""
        self._comparisons.put_off(indices)
        if self.last_mode != "replicated":
            self.last_mode = "replicated"
        if selected is not None:
            return selected.reshape(-1, selected.shape[-1]).astype(np.int64)
        return self._with_one_wrong_index(indices.reshape(-1, indices.shape[-1]))

    def _with_one_wrong_index(self, flat: mx.array) -> mx.array:
        """The indices as uint32, with the number of the experts for all that are none; -1 would look like "none"."""
        if flat.itemsize > 4:
            flat = mx.where((flat < 0) | (flat >= self.placement.num_experts), self.placement.num_experts, flat)
        return mx.minimum(flat.astype(mx.uint32), self.placement.num_experts)

    def _with_host(
        self, x: Any, indices: Any, scores: Any, selected: np.ndarray | None, problem: str | None
    ) -> tuple[np.ndarray | DispatchHandle, int]:
        """Compares the ranks, drops what exceeds the capacity, chooses the mode.

        Returns the experts of each token, -1 for none, or the handle of mode "dispatch" for sharded tokens; and the
        largest number of tokens of a rank.
        """
        sharded = self.tokens == "sharded"
        kept: np.ndarray = np.zeros((0, 1), np.int64)
        earlier = self._comparisons.take_open()
        problem = problem or wrong_index(f"{_NAME}: indices of an earlier call", self.placement, earlier)
        if not problem and selected is not None:
            kept = selected.reshape(-1, selected.shape[-1])
            if self.capacity_factor is not None:
                kept = np.array(limit(mx.array(kept), self.placement.num_experts, self.capacity_factor))
            kept = kept.astype(np.int64)
        may_dispatch = sharded and self.mode in ("auto", "dispatch")
        sent = outgoing(kept, self.placement) if may_dispatch else None
        own = [len(kept), int((kept < 0).sum()), *(sent.facts() if sent else [0] * (2 * self.placement.ranks))]
        facts = agree(_NAME, self._sharding.group, problem, self._equal(x, kept, scores, earlier), own)
        if not sharded and kept.size <= _FEW:
            self._comparisons.note(_looks(x, indices, scores))
        every = slice(None) if sharded else slice(1)
        dropped = int(facts[every, 1].sum())
        # An attribute of a module takes long to set.
        if not self._agreed or dropped != self.dropped:
            self._agreed, self.dropped = True, dropped
        if dropped:
            self.dropped_total += dropped
        mode = self._choose(int(facts[every, 0].sum()), kept.shape[1], x)
        if mode != self.last_mode:
            self.last_mode = mode
        if sent is not None and self.last_mode == "dispatch":
            return exchange_routing(sent, facts[:, 2:], self._sharding.group), 0
        return kept, int(facts[:, 0].max())

    def _without_host(self, x: mx.array, indices: mx.array, scores: mx.array | None) -> tuple[mx.array, int]:
        """The result of :meth:`_with_host` without the values of the indices. The first call compares all but these."""
        if self.mode == "dispatch":
            raise InvalidArgument(
                f"{_NAME}: mode 'dispatch' needs the indices on the host: the sizes of its messages depend on them. "
                "Inside mx.compile, and with host_sync=False, use mode 'auto', 'replicated' or 'gather'"
            )
        flat = indices.reshape(-1, indices.shape[-1])
        if not self._agreed:
            agree(_NAME, self._sharding.group, None, self._equal(x, np.zeros((0, flat.shape[1])), scores))
            self._agreed = True
        flat = self._with_one_wrong_index(flat)
        self.dropped = 0
        if self.capacity_factor is not None:
            flat = limit(flat.astype(mx.int64), self.placement.num_experts, self.capacity_factor)
            self.dropped = None
        elif self.tokens == "sharded":
            flat = flat.astype(mx.int64)  # rows that are added for the exchange have no expert, -1
        self.last_mode = self.mode
        if self.mode == "auto":
            self.last_mode = "replicated" if self.tokens == "replicated" else "gather"
        return flat, flat.shape[0]

    def _run(
        self,
        x: mx.array,
        routing: np.ndarray | mx.array | DispatchHandle,
        scores: mx.array | None,
        most: int,
        compiled: Compiled | None,
    ) -> mx.array:
        """The layer on flat tokens (tokens, d) in the mode that was chosen."""
        sharding, order = self._sharding, Order()
        layer: nn.Module = self
        scatter = self.last_mode == "gather"
        if sharding.tp_group is not None or self.last_mode == "dispatch" or self.tokens == "sharded":
            # Otherwise the gradients of the parameters need no collective, and those of x and scores have their own.
            layer, (x, *weights) = tied(self, optional((x, scores)), order, sharding.tp_group)
            scores = weights[0] if weights else None
        experts = Experts(
            sharding.placement, sharding.group, layer, sharding.tp_group, self.exchange_dtype, order, compiled
        )
        if isinstance(routing, DispatchHandle):
            y = dispatched(x, routing, scores, experts)
        elif self.last_mode == "dispatch" and isinstance(routing, np.ndarray):
            y = dispatched_alike(x, routing, scores, experts)
        elif self.tokens == "sharded":
            y = gathered(x, routing, scores, experts, most, scatter)
        else:
            y = replicated(x, routing, scores, experts, scatter)
        return y if sharding.tp_group is None else summed(y, order, sharding.tp_group)

    def _choose(self, tokens: int, k: int, x: mx.array) -> str:
        if self.mode != "auto":
            return self.mode
        dtype = self.exchange_dtype
        itemsize = dtype.size if isinstance(dtype, mx.Dtype) else x.itemsize if dtype is None else 1
        return self.policy.choose(tokens, k, x.shape[-1], itemsize, sharded=self.tokens == "sharded")

    def _equal(
        self, x: Any, kept: np.ndarray, scores: mx.array | None, earlier: np.ndarray | None = None
    ) -> dict[str, object]:
        """The values that must be equal on all ranks, as far as this one has them: with a problem it reports that."""
        alike = self.tokens == "replicated"
        return {
            "layer": f"{self._configuration}, {self._options}",
            "hidden size and dtype of x": f"{x.shape[-1:]} {dtype_name(x.dtype)}" if isinstance(x, mx.array) else "",
            "experts per token": kept.shape[1],
            "scores (given or not)": scores is not None,
            "number of tokens, which are replicated": len(kept) if alike else "",
            "experts of the tokens, which are replicated (a hash)": zlib.crc32(kept.tobytes()) if alike else "",
            "experts of the tokens of earlier calls (a hash)": "" if earlier is None else zlib.crc32(earlier.tobytes()),
        }

    def _problem(self, x: Any, indices: Any, scores: Any, selected: np.ndarray | None) -> str | None:
        if not isinstance(x, mx.array) or not isinstance(indices, mx.array):
            return f"{_NAME}: x and indices must be mx.array, not {type(x).__name__} and {type(indices).__name__}"
        width = base(self[projections(self)[0]]).input_dims
        if x.ndim == 0 or x.shape[-1] != width or not mx.issubdtype(x.dtype, mx.floating):
            return f"{_NAME}: x must be floats of shape (..., {width}), not {dtype_name(x.dtype)} of shape {x.shape}"
        if indices.ndim != x.ndim or indices.shape[:-1] != x.shape[:-1] or not mx.issubdtype(indices.dtype, mx.integer):
            return (
                f"{_NAME}: indices must be integers of shape {(*x.shape[:-1], 'k')} for x of shape {x.shape}, not "
                f"{dtype_name(indices.dtype)} of shape {indices.shape}"
            )
        if indices.shape[-1] == 0:
            return f"{_NAME}: indices have shape {indices.shape}: no experts per token"
        if scores is not None and (not isinstance(scores, mx.array) or scores.shape != indices.shape):
            return f"{_NAME}: scores must have the shape of indices, {indices.shape}, not {np.shape(scores)}"
        return None if selected is None else wrong_index(f"{_NAME}: indices", self.placement, selected)


def set_path(layer: ExpertParallelSwitchGLU, path: str) -> None:
    """Says where in the model ``layer`` is, for errors of ranks that disagree."""
    layer._path = path


def _describe(switch: nn.Module, sharding: Sharding, policy: Policy) -> str:
    """The text that must be the same on all ranks, besides the options; short enough for a message."""
    arrays = [f"{name} {array.shape} {dtype_name(array.dtype)}" for name, array in parameters(switch).items()]
    shapes = zlib.crc32(f"{arrays} {policy.link}".encode())
    inside = sharding.tp_group.size() if sharding.tp_group else 1
    return f"{sharding.placement}, {inside} ranks each, arrays and policy {shapes:08x}"


def _looks(x: Any, indices: Any, scores: Any) -> tuple | None:
    """All of a call but its values."""
    if not isinstance(x, mx.array) or not isinstance(indices, mx.array) or not indices.shape:
        return None
    return x.shape, x.dtype, indices.shape, indices.dtype, getattr(scores, "shape", None)
