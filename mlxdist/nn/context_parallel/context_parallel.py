"""Models of mlx-lm called with shards of a sequence: their attention spans all ranks, the rest sees single tokens.

A model file of mlx-lm calls ``scaled_dot_product_attention``, ``create_attention_mask`` and rotary embeddings by names.
The modules that do get subclasses whose methods are the same code with other functions under these names. So other
models of the same file stay as they are, and what ``mx.checkpoint`` calls again in the backward pass is ours, too.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import CellType, FunctionType
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn

from mlxdist.base.errors import InvalidArgument
from mlxdist.nn.rank_checks import agreed, described
from mlxdist.nn.split_block.rotary import FIXED
from mlxdist.runtime.group.group import Group, GroupLike
from mlxdist.runtime.operations.arguments import group_of

from ..interception import become
from .ring_attention import ring_attention
from .sequence import chunk_starts
from .ulysses import ulysses_attention

__all__ = ["context_parallel", "is_context_parallel"]

M = TypeVar("M", bound=nn.Module)
_METHODS: dict[str, Callable[..., mx.array]] = {"ring": ring_attention, "ulysses": ulysses_attention}
_ATTENTION, _MASK = "scaled_dot_product_attention", "create_attention_mask"


def context_parallel(model: M, *, group: GroupLike | None = None, method: str = "ring") -> M:
    """Makes a model of mlx-lm one that is called with shards of sequences, in place.

    Every rank calls it with its own shard of the tokens, as :func:`shard_sequence` makes it, and gets its shard of the
    logits: in training without a cache, to prefill with an empty one (see :func:`prefill`). With a cache that holds
    tokens it is called as before, with the same tokens on all ranks.

    The gradient of a parameter is that of this rank's tokens, of the losses of all ranks: average over the group, as in
    data parallelism, where all ranks have equally many targets; for masks see ``docs/context-parallel.md``. Shard the
    targets and weights of a loss like the tokens, once they are shifted: ``shard_sequence(batch[:, :-1])`` for the
    model, ``shard_sequence(batch[:, 1:])`` for the loss. Call it before or after :func:`shard_model`, and before
    ``fully_shard``. In a group of one nothing changes.

    Args:
        model: whose layers all have attention with rotary embeddings.
        group: the ranks that share sequences, such as ``mesh["cp"]``; ``None`` is the group of ``mlxdist.init()``.
        method: "ring" (:func:`ring_attention`) or "ulysses" (:func:`ulysses_attention`).

    Returns:
        ``model``.

    Raises:
        InvalidArgument: there is no such method; or something in the model but attention looks at other tokens, or
            attention finds positions in a way that is not known. The same on all ranks; the model is unchanged.
        Mismatch: the ranks have different methods, or models with other parameters, dtypes or frozen ones.
    """
    group = group_of(group)
    with agreed("context_parallel", group, method, described(model)):
        if method not in _METHODS:
            raise InvalidArgument(f"context_parallel: method must be 'ring' or 'ulysses', not {method!r}")
        changes = list(_changes(model, _METHODS[method], group)) if group.size() > 1 else []
    for module, kind in changes:
        become(module, kind)
    return model


def is_context_parallel(model: nn.Module) -> bool:
    """Whether the losses of other ranks have gradients of this rank's tokens, too: :func:`context_parallel` made it."""
    return any(isinstance(module, _Sharded) for module in model.modules())


class _Causal(str):
    """The mask "causal", of a layer with or without a window."""

    window_size: int | None

    def __new__(cls, window_size: int | None) -> "_Causal":
        self = super().__new__(cls, "causal")
        self.window_size = window_size
        return self


def _changes(model: nn.Module, method: Callable[..., mx.array], group: Group) -> Iterator[tuple[nn.Module, type]]:
    """The modules that change, with their new classes."""
    from mlx_lm.models import base

    found = dict(model.named_modules())
    for path, module in found.items():
        if isinstance(module, _Sharded):
            raise InvalidArgument(f"context_parallel: the model is context-parallel already, at {path}")
    replaced = {
        getattr(base, _ATTENTION): partial(_attend, getattr(base, _ATTENTION), method, group),
        getattr(base, _MASK): partial(_mask, getattr(base, _MASK)),
    }
    attention = {path: module for path, module in found.items() if _calls(type(module), getattr(base, _ATTENTION))}
    _check(found, attention)
    kinds: dict[type, type] = {}
    for module in found.values():
        kind = type(module)
        if _kind(module) in FIXED:
            kinds[kind] = kinds.get(kind) or _sharded_rope(kind, group)
        else:
            kinds[kind] = kinds.get(kind) or _with_functions(kind, replaced)
        if kinds[kind] is not kind:
            yield module, kinds[kind]


def _check(found: Mapping[str, nn.Module], attention: Mapping[str, nn.Module]) -> None:
    """Raises an InvalidArgument for models whose layers would not compute what they do of a full sequence."""
    name = type(found[""]).__module__.rpartition(".")[2]
    for path, module in found.items():
        if isinstance(module, nn.Conv1d):
            raise InvalidArgument(f"context_parallel: {path} of {name} is a convolution over tokens of several ranks")
    layers = list(getattr(found[""], "layers", ()))
    for number, layer in enumerate(layers):
        if not any(_is_in(module, layer) for module in attention.values()):
            raise InvalidArgument(
                f"context_parallel: layer {number} of {name}, a {type(layer).__name__}, has no attention that calls "
                f"mlx-lm's {_ATTENTION}"
            )
    if not attention:
        raise InvalidArgument(f"context_parallel: no module of {name} calls mlx-lm's {_ATTENTION}")
    for path, module in attention.items():
        for source in {kind.__module__.rpartition(".")[2] for kind in type(module).__mro__} & _REFUSED.keys():
            raise InvalidArgument(f"context_parallel: {path} of {source} {_REFUSED[source]}")
        if not any(_kind(child) in FIXED for child in module.modules()):
            raise InvalidArgument(
                f"context_parallel: {path} of {name} has no rotary embedding that turns each token by its own position "
                "alone, so its positions are unknown"
            )


# By the name of the file of its attention: what else it does, which no class or name shows.
_REFUSED = {
    "baichuan_m1": "adds the key and value before to each",
    "ministral3": "scales queries by positions that it counts itself",
    "mistral4": "scales queries by positions that it counts itself",
}


def _is_in(module: nn.Module, layer: nn.Module) -> bool:
    return any(module is child for child in layer.modules())


def _kind(module: nn.Module) -> tuple[str, str]:
    return type(module).__module__, type(module).__name__


class _Sharded:
    """Marks a module whose input is a shard of a sequence."""


def _sharded_rope(kind: Any, group: Group) -> type:
    def __call__(self: Any, x: mx.array, offset: Any = 0, **keywords: Any) -> mx.array:
        number = offset.item() if isinstance(offset, mx.array) and offset.ndim == 0 else offset  # an array in gemma4
        if not isinstance(number, int):
            raise InvalidArgument("context_parallel: a batch cache has no shards of sequences; take mlx-lm's KVCache")
        if number:  # decoding
            return kind.__call__(self, x, offset, **keywords)
        # A shard has two chunks that are not next to each other, so positions start twice.
        starts = chunk_starts(group.rank(), group.size(), x.shape[-2])
        chunks = zip(mx.split(x, [x.shape[-2] // 2], -2), starts)
        return mx.concatenate([kind.__call__(self, chunk, start, **keywords) for chunk, start in chunks], -2)

    return type(kind.__name__, (_Sharded, kind), {"__call__": __call__, "__module__": kind.__module__})


def _attend(
    full: Callable[..., mx.array],
    method: Callable[..., mx.array],
    group: Group,
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any = None,
    scale: float = 1.0,
    mask: Any = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """``scaled_dot_product_attention`` of mlx-lm."""
    if isinstance(keys, mx.array) and keys.shape[2] != queries.shape[2] or _holds_tokens(cache, queries.shape[2]):
        return full(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
    window_size = getattr(mask, "window_size", None)
    return method(queries, keys, values, scale=scale, mask=mask, sinks=sinks, window_size=window_size, group=group)


def _mask(full: Callable[..., Any], h: mx.array, cache: Any = None, *args: Any, **keywords: Any) -> Any:
    """``create_attention_mask`` of mlx-lm."""
    return full(h, cache, *args, **keywords) if _holds_tokens(cache) else _causal(*args, **keywords)


def _causal(window_size: int | None = None, return_array: bool = False) -> _Causal:
    if return_array:
        raise InvalidArgument("context_parallel: the model computes with the mask as an array, which no rank has")
    return _Causal(window_size)


def _holds_tokens(cache: Any, of_this_call: int = 0) -> bool:
    """Whether a cache has tokens of an earlier call: then every rank has all of them."""
    if cache is None:
        return False
    if isinstance(cache.offset, int) and cache.offset > of_this_call:
        return True
    if type(cache).__name__ != "KVCache":
        raise InvalidArgument(
            f"context_parallel: a {type(cache).__name__} cannot be filled with a shard of a sequence; take mlx-lm's "
            "KVCache for all layers, as mlxdist.nn.prefill does"
        )
    return False


def _calls(kind: Any, function: Callable[..., Any]) -> bool:
    """Whether a method of a class calls a function of that name in its module."""
    return _with_functions(kind, {function: function}) is not kind


def _with_functions(kind: Any, functions: Mapping[Callable[..., Any], Callable[..., Any]]) -> Any:
    """A subclass whose methods call others in place of ``functions``; ``kind`` where they call none of them.

    Also where they call functions of a class that they hold in a closure, as the classes of :func:`shard_model` do.
    """
    methods = {name: getattr(kind, name) for name in dir(kind)}
    changed = {name: _calling(method, kind, functions) for name, method in methods.items()}
    others = {name: method for name, method in changed.items() if method is not methods[name]}
    if not others:
        return kind
    return type(kind.__name__, (_Sharded, kind), {"__module__": kind.__module__} | others)


def _calling(method: Any, kind: type, functions: Mapping[Callable[..., Any], Callable[..., Any]]) -> Any:
    """A method of ``kind`` with other functions; itself where it calls none of them."""
    if not isinstance(method, FunctionType):
        return method
    names = [name for name in method.__code__.co_names if isinstance(method.__globals__.get(name), FunctionType)]
    called = {name: method.__globals__[name] for name in names}
    others = {name: functions[function] for name, function in called.items() if function in functions}
    cells = method.__closure__ or ()
    held = [_content(cell) for cell in cells]
    inner = [_with_functions(x, functions) if _is_base(x, kind) else x for x in held]
    if not others and all(a is b for a, b in zip(held, inner)):
        return method
    closure = tuple(cell if a is b else CellType(b) for cell, a, b in zip(cells, held, inner))
    copy = FunctionType(method.__code__, method.__globals__ | others, method.__name__, method.__defaults__, closure)
    copy.__kwdefaults__ = method.__kwdefaults__
    return copy


def _is_base(x: Any, kind: type) -> bool:
    return isinstance(x, type) and x is not kind and issubclass(kind, x)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None
