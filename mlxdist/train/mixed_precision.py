"""Training in 16 bits: the bits that are kept besides, so that small updates count, and the scale of the loss.

Micikevicius et al. 2017, "Mixed Precision Training", arXiv:1710.03740.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_map, tree_map_with_path, tree_unflatten

from mlxdist.base.errors import InvalidArgument
from mlxdist.nn.rank_checks import agreed
from mlxdist.runtime.group.group import GroupLike
from mlxdist.runtime.operations.arguments import group_of
from mlxdist.runtime.operations.collectives import all_min

from .loss_scaling import LossScale, check_loss_scale, first_state, next_state
from .rounding import round_stochastically

__all__ = ["MixedPrecision"]

_DTYPES = (mx.bfloat16, mx.float16)


class MixedPrecision(optim.Optimizer):
    """An optimizer of MLX for a model whose parameters have 16 bits, with the interface of an optimizer of MLX.

    The update of a step is often less than half a unit in the last place of a weight of 16 bits, and rounding loses it.
    ``masters`` says what keeps it. ``optimizer`` computes in float32 in any case; parameters of float32 it updates
    alone.

    | ``masters`` | bytes per parameter | |
    |---|---|---|
    | ``True`` | 2 + 4 | a copy in float32, rounded to the parameter after each step |
    | ``"kahan"`` | 2 + 2 | what the parameter has lost by rounding, in its dtype, goes into the next step |
    | ``"stochastic"`` | 2 | rounded up or down at random, so that the mean is right |

    In float16 gradients underflow: with ``loss_scale`` the loss is multiplied by :meth:`scale` before the backward
    pass, and the gradients are divided in :meth:`unscale`, or else in :meth:`update`. Where a gradient of one rank is
    not finite, all ranks skip the step: parameters and state stay as they are.

    All is lazy and works inside ``mx.compile``; :attr:`state` is what a checkpoint needs.

    Args:
        optimizer: any of MLX's, not used yet.
        dtype: what :meth:`init` makes of a model's parameters: ``mx.bfloat16`` or ``mx.float16``.
        masters: how small updates count; see above. Kahan 1965, doi:10.1145/363707.363723; stochastic rounding: Gupta
            et al. 2015, arXiv:1502.02551.
        loss_scale: ``None`` for no scale; a positive number; "dynamic": from 65536, halved in each step that overflows
            and doubled after 2000 that do not.
        state_dtype: of the arrays of the optimizer's state; ``None`` for float32. In 16 bits they are rounded
            stochastically: a mean over 1000 steps changes by less than rounding to nearest sees.
        group: the ranks that skip a step together: all of the mesh. ``None`` for those of ``mlxdist.init()``.
        seed: of stochastic rounding: the same on all ranks, so that replicas stay equal.

    Attributes:
        optimizer: that was given.
        state: a tree of arrays; it may be set.

    Raises:
        InvalidArgument: an argument is none of these.
        Mismatch: on all ranks that have a loss scale: their arguments differ.
    """

    def __init__(
        self,
        optimizer: optim.Optimizer,
        dtype: mx.Dtype = mx.bfloat16,
        masters: Literal[True, "kahan", "stochastic"] = True,
        loss_scale: LossScale = None,
        state_dtype: mx.Dtype | None = None,
        *,
        group: GroupLike | None = None,
        seed: int = 0,
    ) -> None:
        self._group = None if loss_scale is None else group_of(group)
        options = {"dtype": dtype, "masters": masters, "loss_scale": loss_scale, "state_dtype": state_dtype}
        with agreed("MixedPrecision", self._group, options) if self._group is not None else nullcontext():
            _check(optimizer, dtype, masters, loss_scale, state_dtype)
        super().__init__()
        self.optimizer, self.dtype, self.masters, self.state_dtype = optimizer, dtype, masters, state_dtype
        self._seed, self._is_unscaled = seed, False
        self._is_dynamic = loss_scale == "dynamic"
        self._state = {"step": mx.array(0, mx.uint64), "optimizer": optimizer.state, "masters": {}}
        if loss_scale is not None:
            self._state |= first_state(loss_scale)

    def init(self, parameters: Any) -> None:
        """Makes the state for parameters: a tree of arrays, or a model, whose parameters then get ``dtype``.

        Masters keep the values that the parameters have now. Packed weights of quantized layers stay as they are; their
        scales get ``dtype``. Without this the first :meth:`update` does it.
        """
        is_model = isinstance(parameters, nn.Module)
        trained: Any = parameters.trainable_parameters() if is_model else parameters
        flat: Any = tree_flatten(trained)
        wide = tree_map(_wide, trained)
        self.optimizer.init(wide)
        if (dtype := self.state_dtype) is not None:
            _put(self.optimizer.state, lambda _, array: array.astype(dtype) if _is_moment(array) else array)
        masters = dict(tree_flatten(self._state["masters"]))
        for path, array in flat:
            kept = self._kept(_wide(array), self.dtype if is_model else array.dtype)
            if kept is not None:
                masters.setdefault(path, kept)
        self._put_masters(masters)
        self._initialized = True
        if is_model:
            _cast(parameters, self.dtype)

    def scale(self, loss: mx.array) -> mx.array:
        """The loss times the scale, in float32: what the gradient is taken of."""
        return loss if not self.is_scaled else loss.astype(mx.float32) * self.loss_scale

    def unscale(self, gradients: Any) -> Any:
        """The gradients of the loss that :meth:`scale` was given, in float32: for what is done with them before
        :meth:`update`, such as clipping. :meth:`update` then takes them as they are."""
        self._is_unscaled = True
        return self._divided(gradients)

    def apply_gradients(self, gradients: dict, parameters: dict) -> dict:
        """The new parameters, in the dtypes that they have."""
        old: dict[str, mx.array] = dict(tree_flatten(tree_map(lambda _, array: array, gradients, parameters)))
        if not self._initialized:
            self.init(parameters if isinstance(parameters, nn.Module) else tree_unflatten(list(old.items())))
            old = dict(tree_flatten(tree_map(lambda _, array: array, gradients, parameters)))
        wide = tree_map(_wide, gradients) if self._is_unscaled else self._divided(gradients)
        self._is_unscaled = False
        inner, masters = self.optimizer, dict(tree_flatten(self._state["masters"]))
        before = dict(tree_flatten(inner.state)), dict(masters)
        values = {path: self._value(array, masters.get(path)) for path, array in old.items()}
        step = self._state["step"] + 1
        keys = iter(self._keys(step, len(old) + len(before[0])))
        if self.state_dtype is not None:
            _put(inner.state, lambda _, array: _wide(array) if _is_moment(array) else array)
        changed = dict(tree_flatten(inner.apply_gradients(wide, _like(wide, values))))
        if self.state_dtype is not None:
            _put(inner.state, lambda _, array: self._narrow(array, next(keys)))
        new = {}
        for path, array in old.items():
            if (kept := self._kept(changed[path], array.dtype)) is not None:
                masters[path] = kept
            new[path] = self._rounded(changed[path], array.dtype, next(keys))
        if self._group is not None:
            new, masters = self._unless_overflow(wide, (old, new), (before[1], masters), before[0])
        self._put_masters(masters)
        self._state["step"] = step
        return _like(gradients, new)

    @property
    def kind(self) -> str:
        """A text that must be equal where a state is loaded: the optimizer, and the arrays and dtypes that it keeps."""
        options = f"masters={self.masters}, state_dtype={self.state_dtype}, scaled={self.is_scaled}"
        return f"MixedPrecision({type(self.optimizer).__name__}, {options})"

    @property
    def is_scaled(self) -> bool:
        """Whether there is a scale; then steps whose gradients are not finite are skipped."""
        return self._group is not None

    @property
    def loss_scale(self) -> mx.array:
        """The factor by which :meth:`scale` multiplies now, float32; 1 without a scale."""
        return self._state.get("loss_scale", mx.array(1.0))

    @property
    def state(self) -> dict:
        """A tree of arrays: the optimizer's, the masters, the scale of the loss, and how many steps were skipped."""
        return self._state

    @state.setter
    def state(self, state: dict) -> None:
        self._state = state
        self.optimizer.state = state["optimizer"]
        self._initialized = False

    @property
    def learning_rate(self) -> mx.array:
        """The learning rate of the optimizer."""
        return self.optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: float | mx.array) -> None:
        self.optimizer.learning_rate = learning_rate

    def _divided(self, gradients: Any) -> Any:
        return tree_map(lambda gradient: _wide(gradient) / self.loss_scale, gradients)

    def _value(self, parameter: mx.array, kept: mx.array | None) -> mx.array:
        """The value that the optimizer updates, in float32."""
        if kept is None:
            return _wide(parameter)
        return kept if self.masters is True else _wide(parameter) + _wide(kept)

    def _kept(self, value: mx.array, dtype: mx.Dtype) -> mx.array | None:
        """The array that is kept of a float32 value besides the parameter; None if there is none."""
        if dtype not in _DTYPES or self.masters == "stochastic":
            return None
        return value if self.masters is True else (value - _wide(value.astype(dtype))).astype(dtype)

    def _rounded(self, value: mx.array, dtype: mx.Dtype, key: mx.array) -> mx.array:
        is_stochastic = self.masters == "stochastic" and dtype in _DTYPES
        return round_stochastically(value, dtype, key) if is_stochastic else value.astype(dtype)

    def _narrow(self, array: mx.array, key: mx.array) -> mx.array:
        """An array of the optimizer's state as it is kept."""
        if self.state_dtype is None or not _is_moment(array):
            return array
        if self.state_dtype not in _DTYPES:
            return array.astype(self.state_dtype)
        return round_stochastically(array, self.state_dtype, key)

    def _keys(self, step: mx.array, count: int) -> Any:
        """Random keys for the arrays of a step. They follow from the step, so that a resumed run has the same."""
        key = mx.stack([mx.array(self._seed, mx.uint32), step.astype(mx.uint32)])
        return mx.random.split(key, count)

    def _put_masters(self, masters: dict[str, mx.array]) -> None:
        kept: Any = tree_unflatten(list(masters.items())) if masters else {}
        self._state["masters"] = kept

    def _unless_overflow(
        self, gradients: Any, parameters: tuple[dict, dict], masters: tuple[dict, dict], before: dict[str, mx.array]
    ) -> tuple[dict[str, mx.array], dict[str, mx.array]]:
        """The old parameters and masters in place of the new ones, and the state of before, if a gradient of any rank
        is not finite."""
        flat: Any = tree_flatten(gradients)
        # Chosen by mx.where and not by a branch, which would evaluate here and could not be inside mx.compile.
        finite = mx.stack([mx.array(True), *(mx.isfinite(gradient).all() for _, gradient in flat)]).all()
        finite = all_min(finite.astype(mx.int32), group=self._group) > 0
        _put(self.optimizer.state, lambda path, array: mx.where(finite, array, before.get(path, array)))
        self._state |= next_state(self._state, finite, self._is_dynamic)
        pick = lambda old, new: {path: mx.where(finite, array, old.get(path, array)) for path, array in new.items()}
        return pick(*parameters), pick(*masters)


def _check(optimizer: Any, dtype: Any, masters: Any, loss_scale: Any, state_dtype: Any) -> None:
    if not isinstance(optimizer, optim.Optimizer) or isinstance(optimizer, MixedPrecision):
        raise InvalidArgument(
            "MixedPrecision: optimizer must be one of mlx.optimizers, such as AdamW(1e-3), not "
            f"{type(optimizer).__name__}"
        )
    if not _is_one_of(dtype, _DTYPES):
        raise InvalidArgument(f"MixedPrecision: dtype must be mx.bfloat16 or mx.float16, not {dtype}")
    if masters is not True and masters not in ("kahan", "stochastic"):
        raise InvalidArgument(f"MixedPrecision: masters must be True, 'kahan' or 'stochastic', not {masters!r}")
    check_loss_scale("MixedPrecision", loss_scale)
    if state_dtype is not None and not _is_one_of(state_dtype, (mx.float32, *_DTYPES)):
        raise InvalidArgument(
            f"MixedPrecision: state_dtype must be mx.float32, mx.bfloat16 or mx.float16, not {state_dtype}"
        )


def _is_one_of(dtype: Any, dtypes: tuple[mx.Dtype, ...]) -> bool:
    return isinstance(dtype, mx.Dtype) and dtype in dtypes  # mx.Dtype compares with no other type


def _wide(array: mx.array) -> mx.array:
    return array.astype(mx.float32)


def _is_moment(array: mx.array) -> bool:
    """Whether an array of an optimizer's state belongs to a parameter, and is no number such as the learning rate."""
    return array.ndim > 0 and mx.issubdtype(array.dtype, mx.floating)


def _put(tree: Any, value_of: Callable[[str, mx.array], mx.array], above: str = "") -> None:
    """Puts other leaves, by path and leaf, into a tree: mx.compile and MLX keep the tree itself, and one that is made
    of leaves lacks the empty subtrees of layers with nothing to train."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        if isinstance(value, dict | list):
            _put(value, value_of, f"{above}{key}.")
        else:
            tree[key] = value_of(f"{above}{key}", value)


def _like(tree: Any, leaves: dict[str, mx.array]) -> Any:
    """A tree of the same structure, also where it is empty, with other leaves by path."""
    return tree_map_with_path(lambda path, _: leaves[path], tree)


def _cast(model: nn.Module, dtype: mx.Dtype) -> None:
    """Casts all floating parameters, also scales of quantized layers: a product of two dtypes of 16 bits is float32."""
    model.apply(lambda array: array.astype(dtype) if mx.issubdtype(array.dtype, mx.floating) else array)
