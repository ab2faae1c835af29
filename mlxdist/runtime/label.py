"""Labels of operations: which module of the model calls them, so that ranks that disagree on that get a Mismatch.

Two operations of the same dtype and shape would otherwise be taken for each other where ranks call them in another
order, as the graphs of backward passes may. A label is the path of the module, the number of the call in it, and
whether it is of the backward pass. Operations outside of a scope have none, and match all: see native/engine/label.h.
"""

import functools
import threading

from .native import lib

__all__ = ["current_path", "label_of", "label_scope", "next_label", "next_text"]


class _Scopes(threading.local):
    path: str | None = None
    calls = 0


_scopes = _Scopes()


class label_scope:  # not of contextlib, which takes three times as many calls: every message of a layer has one
    """Within the ``with`` block, labels the operations that this thread builds as those of ``path``, numbered from 1.
    ``None``: of no module."""

    def __init__(self, path: str | None) -> None:
        self._path = path

    def __enter__(self) -> None:
        self._outer = _scopes.path, _scopes.calls
        _scopes.path, _scopes.calls = self._path, 0

    def __exit__(self, *_: object) -> None:
        _scopes.path, _scopes.calls = self._outer


def current_path() -> str | None:
    """The path that operations have now; ``None`` outside of a scope."""
    return _scopes.path


def next_text() -> str | None:
    """The next operation of this scope in words: "model.layers.3.self_attn #2"; ``None`` outside of one."""
    if _scopes.path is None:
        return None
    _scopes.calls += 1
    return f"{_scopes.path} #{_scopes.calls}"


def next_label() -> int:
    """The label of the operation that is built next; 0 outside of a scope."""
    if _scopes.path is None:  # the common case, once for every operation
        return 0
    return label_of(next_text())


@functools.lru_cache(maxsize=16384)
def label_of(text: str) -> int:
    """The label of a text."""
    label: int = lib.mlxdist_label(text.encode())
    return label
