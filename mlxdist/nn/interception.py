"""Changes the behavior of a module in place: it becomes an instance of a subclass. No other file does that.

Why a class and not a wrapper: a wrapper changes the paths of the parameters, and with them checkpoints, adapters and
plans; mlx-lm's models call ``isinstance``, and read attributes of their layers. Why not the class itself: other models
of the same file would change, too. MLX has no hooks.

A module may be wrapped several times: each class derives from the one before, and they are restored in reverse order.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any

import mlx.nn as nn

__all__ = ["become", "derived", "intercept", "restore", "subclass", "with_classes", "with_methods", "with_result"]


def become(module: nn.Module, kind: type) -> None:
    """Makes ``module`` an instance of ``kind``; it keeps its parameters and attributes."""
    module.__class__ = kind


def intercept(module: nn.Module, **methods: Callable[..., Any]) -> None:
    """Gives ``module`` other methods, which get the class that it had first: ``method(kind, module, *arguments)``."""
    become(module, subclass(type(module), **methods))


def restore(module: nn.Module) -> None:
    """Gives ``module`` the class that it had before :func:`become` or :func:`intercept` made it one of a subclass."""
    become(module, type(module).__bases__[-1])  # what marks a class comes before the class that is changed


def subclass(kind: type, **methods: Callable[..., Any]) -> type:
    """A class for instances of ``kind`` with other methods: each is called with ``kind`` first."""
    return derived(kind, {name: _with_first(method, kind) for name, method in methods.items()})


def derived(kind: Any, methods: Mapping[str, Callable[..., Any]], name: str | None = None) -> Any:
    """A subclass of ``kind`` with other methods, which get the signatures of those that they replace: mlx-lm reads
    them. It has the name of ``kind`` and that of its module, by which other code finds classes, or ``name``."""
    replaced = {key: getattr(kind, key, None) for key in methods}
    own = {key: wraps(before)(methods[key]) if before else methods[key] for key, before in replaced.items()}
    if name is not None:
        return type(name, (kind,), {"__module__": __name__} | own)
    copied = {key: getattr(kind, key) for key in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (kind,), copied | own)


def _with_first(function: Callable[..., Any], kind: type) -> Callable[..., Any]:
    return lambda self, *args, **keywords: function(kind, self, *args, **keywords)


@cache
def with_result(kind: Any, change: Callable[[Any, Any], Any], name: str) -> Any:
    """The class ``kind``, as ``name``, whose call returns ``change(module, result)``."""

    def __call__(self: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        return change(self, kind.__call__(self, *arguments, **keywords))

    return derived(kind, {"__call__": __call__}, name)


@contextmanager
def with_methods(modules: Iterable[nn.Module], **methods: Callable[..., Any]) -> Iterator[None]:
    """Gives modules other methods within the ``with`` block, as :func:`intercept` does."""
    with with_classes(modules, lambda kind: subclass(kind, **methods)):
        yield


@contextmanager
def with_classes(modules: Iterable[nn.Module], class_of: Callable[[Any], type]) -> Iterator[None]:
    """Makes each module an instance of ``class_of(its class)`` within the ``with`` block."""
    kinds = [(module, type(module)) for module in modules]
    try:
        for module, kind in kinds:  # without a call of become: fully_shard has the leaves of each layer here
            module.__class__ = class_of(kind)
        yield
    finally:
        for module, kind in kinds:
            module.__class__ = kind
