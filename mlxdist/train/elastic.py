"""Elastic training: when ranks are lost the others go on with the state of the last step, and lost ranks join again.

The state is kept in memory, on every rank: in-memory checkpoints, as Gemini (SOSP 2023) and torchft have them. Here all
ranks hold all of it, as data-parallel training does. So what is saved is a list of references to the arrays of the last
step, and any rank that is left can give it to those that join.
"""

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np

from mlxdist.base.errors import Aborted, InvalidArgument, PeerLost, Timeout, TransportError
from mlxdist.nn.rank_checks import agreed
from mlxdist.runtime.group.default_group import default_group, init
from mlxdist.runtime.group.elastic import do_others_join
from mlxdist.runtime.group.group import Group, engine_of
from mlxdist.runtime.operations.collectives import all_gather, broadcast

from .checkpoint.ranks import gather
from .checkpoint.state import collect, put_back

__all__ = ["InMemoryCheckpoint", "elastic"]

_Result = TypeVar("_Result")
_ATTEMPTS = 3


class _OthersJoin(BaseException):
    """Ranks wait to join: the training goes on with them. No error, so programs do not catch it as one."""


class InMemoryCheckpoint:
    """The state of the last step, on every rank; :func:`elastic` makes it.

    It holds the arrays of one step beside those that the next one makes: about twice the parameters and the state of
    the optimizer.

    Attributes:
        step: how many steps the saved state is after; ``None`` where this rank has saved nothing.
    """

    def __init__(self, grow_every: int, trainable_only: bool) -> None:
        self._grow_every, self._trainable_only = grow_every, trainable_only
        self.step: int | None = None
        self._arrays: dict[str, mx.array] = {}
        self._values: dict[str, Any] = {}

    def save(self, step: int, state: Any) -> None:
        """Keeps ``state``, after ``step`` steps. Ranks that wait to join do so now, at every ``grow_every``-th step.

        All ranks call it. Where ranks have joined it does not return: the function of :func:`elastic` is called again.

        Args:
            step: how many steps are done, the same on all ranks.
            state: a tree, as :meth:`Checkpoints.save` takes it; whole on every rank. Nothing in it is copied.

        Raises:
            InvalidArgument: the tree has something else in it; a rank has only a part of an array.
        """
        whole = collect(state)
        found = collect(state, trainable_only=True) if self._trainable_only else whole
        if parts := [path for path, cut in found.cuts.items() if not cut.is_full]:
            raise InvalidArgument(
                f"InMemoryCheckpoint.save: this rank has only a part of '{parts[0]}', which would "
                "be lost with it; save with Checkpoints, and let the job start again (--max-restarts)"
            )
        _make_available(whole.arrays)
        self.step, self._arrays, self._values = step, _handles(found.arrays), found.values
        if step % self._grow_every == 0 and do_others_join(engine_of(init())):
            raise _OthersJoin

    def load(self, state: Any) -> int | None:
        """Puts the state of the latest step that any rank has into ``state``, in place. All ranks call it.

        Returns the number of steps that are done; ``None`` if nothing has been saved: ``state`` is as it was.

        Args:
            state: a tree as that of :meth:`save`, the same on all ranks.

        Raises:
            InvalidArgument: the tree has other arrays, or other values, than what was saved.
        """
        group = init()
        steps = all_gather(np.array([-1 if self.step is None else self.step])).tolist()
        latest = max(steps)
        if latest < 0:
            _make_available(collect(state).arrays)
            return None
        if min(steps) < latest:
            self._receive(group, steps.index(latest))
            self.step = latest
        with agreed("InMemoryCheckpoint.load", group, sorted(self._arrays), sorted(self._values)):
            self._check(state)
        put_back(state, {**_handles(self._arrays), **self._values})
        _make_available(collect(state).arrays)
        return latest

    def _receive(self, group: Group, root: int) -> None:
        """Gives all ranks what ``root`` has saved."""
        is_root = group.rank() == root
        listed = [[path, list(array.shape), str(array.dtype)] for path, array in self._arrays.items()]
        listed, values = gather([listed, self._values] if is_root else None, group)[root]
        arrays = {}
        for path, shape, dtype in listed:
            array = self._arrays[path] if is_root else mx.zeros(shape, getattr(mx, dtype.removeprefix("mlx.core.")))
            arrays[path] = broadcast(array, root)
            mx.eval(arrays[path])  # one at a time: each is there twice only meanwhile
        self._arrays, self._values = arrays, values

    def _check(self, state: Any) -> None:
        found = collect(state, trainable_only=self._trainable_only)
        for path, array in found.arrays.items():
            saved = self._arrays.get(path)
            if saved is None or (saved.shape, saved.dtype) != (array.shape, array.dtype):
                what = "nothing" if saved is None else f"{saved.dtype} of {saved.shape}"
                raise InvalidArgument(
                    f"InMemoryCheckpoint.load: '{path}' is {array.dtype} of {array.shape}, and saved was {what}"
                )
        if missing := sorted(found.values.keys() - self._values.keys()):
            raise InvalidArgument(f"InMemoryCheckpoint.load: '{missing[0]}' was not saved")


def _make_available(arrays: dict[str, mx.array]) -> None:
    """Keeps the arrays of a state, frozen parameters too, from failing with the operation that fails next: MLX counts
    them as available only when they are evaluated again (native/bindings/mlx/failed_arrays.h)."""
    for _ in range(2):
        mx.eval(list(arrays.values()))


def _handles(arrays: dict[str, mx.array]) -> dict[str, mx.array]:
    """The same arrays as other objects: ``x += 1`` of the program changes the object, and not the array."""
    return {path: copy.copy(array) for path, array in arrays.items()}


def elastic(
    function: Callable[[InMemoryCheckpoint], _Result], *, grow_every: int = 10, trainable_only: bool = False
) -> _Result:
    """Trains with the ranks that there are: calls ``function``, again each time that ranks are lost or have joined.

        def training(checkpoint):
            batches = train.Batches(dataset, batch_size=32)  # of the ranks that there are now
            state = {"model": model, "optimizer": optimizer, "batches": batches}
            checkpoint.load(state)
            while batches.step < steps:
                ...
                checkpoint.save(batches.step, state)

        train.elastic(training)

    Start the job with ``mlxdist launch --elastic MIN``. After a loss the others shrink the group
    (:meth:`mlxdist.Group.shrink`) and go on from the latest step that any of them has saved: what is lost is at most
    the step that was going on. With ``--max-restarts K`` lost ranks are started again, and join. What belongs to a
    group, such as :class:`Batches`, meshes and functions of :func:`value_and_grad`, has to be made in ``function``.
    A batch has the same rows on any number of ranks, so the training stays that of one process, but for the order in
    which gradients are added up.

    Args:
        function: takes an :class:`InMemoryCheckpoint`; the same on all ranks. It trains to the end.
        grow_every: ranks that wait may join at each such step; a look costs a broadcast of one byte. ``function`` is
            left before they do, so a ``with`` statement in it may still use the group.
        trainable_only: models are saved without their frozen parameters, such as a base under adapters, which each
            rank that joins has from its own files.

    Returns:
        What ``function`` returns.

    Raises:
        InvalidArgument: ``grow_every`` is not a number from 1; the job was not started as an elastic one.
        PeerLost, Aborted, Timeout, TransportError: too few ranks are left; or the group has failed three times at the
            same step without losing a rank.
    """
    if not isinstance(grow_every, int) or grow_every < 1:
        raise InvalidArgument(f"elastic: grow_every is {grow_every!r}; it must be a number from 1")
    checkpoint = InMemoryCheckpoint(grow_every, trainable_only)
    failures: list[tuple[int, int | None]] = []  # sizes of the group and steps
    while True:
        group = init()
        try:
            try:
                return function(checkpoint)
            except _OthersJoin:
                group.grow()
        except (PeerLost, Aborted, Timeout, TransportError) as error:
            try:
                group = default_group().shrink()
            except InvalidArgument:  # it has ended: nothing goes on
                raise error from None
            failures.append((group.size(), checkpoint.step))
            if failures[-_ATTEMPTS:] == [failures[-1]] * _ATTEMPTS:  # no rank is lost, and no step gained
                raise
