"""NanGuard: where in a model numbers stop being finite."""

import math
from collections import deque
from types import TracebackType
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map

from mlxdist.nn.interception import become, derived, restore

from .base.errors import InvalidArgument, NonFinite
from .nn.rank_checks import agreed
from .runtime.group.group import Group, GroupLike, engine_of
from .runtime.operations.arguments import group_of
from .runtime.operations.collectives import all_min, broadcast

__all__ = ["NanGuard"]

_SHOWN = 20  # modules
_RECENT = 8  # arrays by which an input is known to be a module's output
_TEXT_BYTES = 8192
_NONE_CALLED, _ALL_FINITE = -1, 2**40  # in place of the number of an activation


class _Activation(NamedTuple):
    path: str
    is_input: bool
    shape: tuple[int, ...]
    dtype: mx.Dtype
    extremes: mx.array  # minimum and maximum; a NaN is in the maximum on every backend


class NanGuard:
    """Finds the first activation of a model that is infinite or not a number, on all ranks of a group.

        with mlxdist.debug.NanGuard(model, every=10) as guard:
            for batch in batches:
                loss, gradients = loss_and_gradients(model, batch)
                optimizer.update(model, gradients)
                mx.eval(loss, model.parameters(), optimizer.state)
                guard.check()

    In every ``every``-th step, the first one included, each call of a module adds the minimum and the maximum of its
    output to the graph, and of its input where that is no module's output, such as a sum of residuals. They are
    evaluated together with the activation, and read by :meth:`check`: no module waits. In the other steps a call costs
    one comparison. It works inside ``nn.value_and_grad`` and ``mx.checkpoint``, and leaves values and gradients bitwise
    as they are. Calls inside ``mx.compile`` are not observed.

    The activations of a step with non-finite parameters are no hint of where those come from. So with ``every`` above 1
    go back to the checkpoint before, and repeat the steps from there with ``every=1``.

    Args:
        model: any ``nn.Module``, complete with its adapters and sharded: modules that are put in later are not seen.
        every: steps from one that is observed to the next, from 1; the same on all ranks.
        group: whose ranks check together; ``None`` is the group of ``mlxdist.init()``.

    Raises:
        InvalidArgument: ``model`` is no module, or another guard observes it; ``every`` is no integer from 1. The
            same on all ranks.
        Mismatch: the ranks have another ``every``.
    """

    def __init__(self, model: nn.Module, every: int = 1, *, group: GroupLike | None = None) -> None:
        self._group, self._every = group_of(group), every
        with agreed("NanGuard", self._group, every):
            if type(every) is not int or every < 1:
                raise InvalidArgument(f"NanGuard: every is {every!r:.50}, not a number of steps from 1")
            if not isinstance(model, nn.Module):
                raise InvalidArgument(f"NanGuard: model is of class {type(model).__name__}, not an nn.Module")
            if any(hasattr(type(module), "_nan_guard") for module in model.modules()):
                raise InvalidArgument("NanGuard: another one observes this model; close that one first")
        self._names: dict[int, str] = {}
        self._modules: list[nn.Module] = []  # kept, so that their ids stay theirs
        self._step, self._collects = 0, True
        self._activations: list[_Activation] = []
        self._recent: deque[mx.array] = deque(maxlen=_RECENT)
        kinds: dict[type, type] = {}
        for path, module in model.named_modules():
            if callable(module) and id(module) not in self._names:
                self._names[id(module)] = path or type(model).__name__
                self._modules.append(module)
                kind = type(module)
                become(module, kinds.setdefault(kind, self._observed(kind)))

    def check(self) -> None:
        """Ends a step. After one that was observed the ranks compare what they have found: one ``all_min`` of 8 bytes.

        Raises:
            NonFinite: an activation is not finite; on all ranks, with the text of the rank that had the earliest one in
                the order of calls. It names the module, and has minimum and maximum of the last 20 activations.
            InvalidArgument: a rank has not called any module since the last check, but inside ``mx.compile``.
        """
        observed, self._step = self._collects, self._step + 1
        self._collects = bool(self._modules) and self._step % self._every == 0
        if not observed:
            return
        activations, self._activations = _evaluated(self._activations), []
        self._recent.clear()
        extremes: Any = [activation.extremes.tolist() for activation in activations]
        wrong = (i for i, values in enumerate(extremes) if not all(map(math.isfinite, values)))
        number = next(wrong, _ALL_FINITE) if activations else _NONE_CALLED
        group = self._group
        # Call number and rank in one integer: the all_min finds the earliest call, and of equal ones the lowest rank.
        first: Any = all_min(mx.array([number * group.size() + group.rank()], mx.int64), group=group).item()
        number, rank = divmod(first, group.size())
        if number == _ALL_FINITE:
            return
        text = ""
        if rank == group.rank():
            text = self._report(activations[: number + 1], extremes) if activations else self._none_called()
            world = engine_of(group).world
            text += f" [rank {world.rank} on {world.host}]"
        raise (InvalidArgument if number == _NONE_CALLED else NonFinite)(_text_of(rank, text, group))

    def close(self) -> None:
        """Restores the classes of the modules. A second call does nothing."""
        for module in self._modules:
            if "_nan_guard" in vars(type(module)):
                restore(module)
        self._modules, self._activations, self._collects = [], [], False
        self._names.clear()
        self._recent.clear()

    def __enter__(self) -> "NanGuard":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _observed(self, kind: Any) -> type:
        """A subclass of ``kind`` whose calls are observed. It keeps the name, by which other code finds modules."""

        def __call__(module: nn.Module, *arguments: Any, **keywords: Any) -> Any:
            path = self._names.get(id(module)) if self._collects else None
            if path is None:
                return kind.__call__(module, *arguments, **keywords)
            before = self._extremes(path, True, arguments[0]) if arguments else []
            observe = lambda value: self._after(value, [*before, *self._extremes(path, False, value)])
            result = kind.__call__(module, *arguments, **keywords)
            return tree_map(observe, result) if type(result) in (list, tuple, dict) else observe(result)

        observed: Any = derived(kind, {"__call__": __call__})
        observed._nan_guard = self
        return observed

    def _extremes(self, path: str, is_input: bool, x: Any) -> list[mx.array]:
        """Adds the array of floats ``x`` to the activations of this step and returns its extremes, of shape (2,).

        The list is empty for anything else, and for an array that was observed just before, as the output of a module.
        """
        if not isinstance(x, mx.array) or not mx.issubdtype(x.dtype, mx.floating) or x.size == 0:
            return []
        if any(x is other for other in self._recent):
            return []
        self._recent.append(x)
        constant = mx.stop_gradient(x)
        extremes = mx.stack([constant.min(), constant.max()])
        self._activations.append(_Activation(path, is_input, x.shape, x.dtype, extremes))
        return [extremes]

    def _after(self, x: Any, extremes: list[mx.array]) -> Any:
        """Returns a copy of ``x`` that depends on ``extremes``: both are evaluated together. An input gets no such
        copy: it would have a gradient of its own, and change the order in which MLX sums the gradients of all uses."""
        if not extremes or not isinstance(x, mx.array):
            return x
        x = mx.depends(x, extremes)
        self._recent.append(x)
        return x

    def _report(self, activations: list[_Activation], extremes: list[list[float]]) -> str:
        """An error text: a table of the last 20 modules' activations. Only the last activation is not finite."""
        first = max(0, len(activations) - 1)
        modules: set[str] = set()
        while first > 0 and len(modules | {activations[first - 1].path}) <= _SHOWN:
            first -= 1
            modules.add(activations[first].path)
        rows = [["min", "max", "dtype", "shape", ""]]
        for activation, values in list(zip(activations, extremes))[first:]:
            dtype = str(activation.dtype).removeprefix("mlx.core.")
            rows.append([*(f"{value:.4g}" for value in values), dtype, str(activation.shape), _name(activation)])
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = ["  ".join([*map(str.rjust, row[:-1], widths), row[-1]]).rstrip() for row in rows]
        since = f"; steps are observed every {self._every}" if self._every > 1 else ""
        what = f"the {_name(activations[-1])} is not finite"
        return "\n    ".join([f"NanGuard: step {self._step - 1}: {what}{since}", *lines])

    def _none_called(self) -> str:
        return (
            f"NanGuard: step {self._step - 1}: no module of the model was called since the last check, except inside "
            "mx.compile, where nothing can be observed: call the model there without mx.compile, or check after a step"
        )


def _name(activation: _Activation) -> str:
    return f"{'input' if activation.is_input else 'output'} of {activation.path}"


def _evaluated(activations: list[_Activation]) -> list[_Activation]:
    """Evaluates activations; returns those with a value. Arrays that ``mx.compile`` or ``mx.vmap`` traced have none."""

    def has_value(*arrays: mx.array) -> bool:
        try:
            mx.eval(arrays)
        except RuntimeError as error:
            if "without a primitive" not in str(error):
                raise
            return False
        return True

    if has_value(*(activation.extremes for activation in activations)):
        return activations
    return [activation for activation in activations if has_value(activation.extremes)]


def _text_of(rank: int, text: str, group: Group) -> str:
    """Broadcasts the text of rank ``rank`` of ``group``, and returns it on all ranks."""
    encoded = mx.array(np.frombuffer(text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0"), np.uint8))
    return np.array(broadcast(encoded, rank, group=group)).tobytes().rstrip(b"\0").decode(errors="replace")
