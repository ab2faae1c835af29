"""Changes the behavior of a module in place: it becomes an instance of a subclass. No other file does that.

Why a class and not a wrapper: a wrapper changes the paths of the parameters, and with them checkpoints, adapters and
plans; mlx-lm's models call ``isinstance``, and read attributes of their layers. Why not the class itself: other models
of the same file would change, too. MLX has no hooks.

A module may be wrapped several times: each class derives from the one before, and they are restored in reverse order.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any

import mlx.nn as nn

__all__ = ["become", "intercept", "restore", "subclass", "with_classes", "with_methods", "with_result"]


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
    bound = {name: _with_first(method, kind, name) for name, method in methods.items()}
    return type(kind.__name__, (kind,), {"__module__": kind.__module__} | bound)


def _with_first(function: Callable[..., Any], kind: type, name: str) -> Callable[..., Any]:
    def call(self: nn.Module, *args: Any, **keywords: Any) -> Any:
        return function(kind, self, *args, **keywords)

    replaced = getattr(kind, name, None)
    return call if replaced is None else wraps(replaced)(call)  # mlx-lm reads the signature


@cache
def with_result(kind: Any, change: Callable[[Any, Any], Any], name: str) -> Any:
    """The class ``kind``, as ``name``, whose call returns ``change(module, result)``."""

    @wraps(kind.__call__)  # mlx-lm reads the signature
    def __call__(self: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        return change(self, kind.__call__(self, *arguments, **keywords))

    return type(name, (kind,), {"__call__": __call__, "__module__": __name__})


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
        for module, kind in kinds:
            become(module, class_of(kind))
        yield
    finally:
        for module, kind in kinds:
            become(module, kind)
