"""How a module of a model behaves otherwise, in place: it becomes an instance of a subclass. Nothing else does that.

Why a class and not a wrapper: a wrapper changes the paths of the parameters, and with them checkpoints, adapters and
plans; mlx-lm's models ask ``isinstance`` and read attributes of their layers. Why not the class itself: other models of
the same file would change, too. MLX has no hooks.

What wraps a module that is wrapped already wraps that: classes are undone in the opposite order.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
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
    become(module, type(module).__bases__[0])


def subclass(kind: type, **methods: Callable[..., Any]) -> type:
    """A class for instances of ``kind`` with other methods: each is called with ``kind`` first."""
    bound = {name: _with_first(method, kind) for name, method in methods.items()}
    return type(kind.__name__, (kind,), {"__module__": kind.__module__} | bound)


def _with_first(function: Callable[..., Any], kind: type) -> Callable[..., Any]:
    return lambda self, *args, **keywords: function(kind, self, *args, **keywords)


@cache
def with_result(kind: Any, change: Callable[[Any, Any], Any], name: str) -> Any:
    """The class ``kind``, as ``name``, whose call returns ``change(module, result)``."""

    def __call__(self: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        return change(self, kind.__call__(self, *arguments, **keywords))

    return type(name, (kind,), {"__call__": __call__, "__module__": __name__})


@contextmanager
def with_methods(modules: Iterable[nn.Module], **methods: Callable[..., Any]) -> Iterator[None]:
    """Within, modules have other methods, as :func:`intercept` gives them."""
    with with_classes(modules, lambda kind: subclass(kind, **methods)):
        yield


@contextmanager
def with_classes(modules: Iterable[nn.Module], class_of: Callable[[Any], type]) -> Iterator[None]:
    """Within, each module is an instance of what ``class_of`` makes of its class."""
    kinds = [(module, type(module)) for module in modules]
    try:
        for module, kind in kinds:
            become(module, class_of(kind))
        yield
    finally:
        for module, kind in kinds:
            become(module, kind)
