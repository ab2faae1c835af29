"""The saves of `mlxdist train`: one that fails does not end the training, two do; and the time that they take."""

import sys
import time
from typing import Any

from mlxdist.base.errors import ResourceError
from mlxdist.runtime.group.group import Group

from .checkpoint import Checkpoints
from .config import CheckpointConfig

__all__ = ["Saves"]

_MUCH = 0.1  # of the time, for saves: more than this is worth a warning


class Saves:
    """Saves the state of a training.

    A disk that is full for an hour must not cost the steps since the last checkpoint, and one that stays full must not
    cost more than an interval: so the first save that fails is a warning, and a second one in a row an error.

    Args:
        checkpoints: where the state goes.
        state: the tree that is saved.
        settings: how often that is.
        group: the ranks that train.
    """

    def __init__(
        self, checkpoints: Checkpoints, state: dict[str, Any], settings: CheckpointConfig, group: Group
    ) -> None:
        self._checkpoints, self._state, self._settings, self._group = checkpoints, state, settings, group
        self._has_failed = False  # the save before, or the one that is being written, as far as is known
        self._is_writing = False
        self._ended = time.perf_counter()  # that of the last save, or the beginning
        self._has_warned = False

    def save(self, step: int, *, is_last: bool) -> float:
        """Saves. Collective. Returns the seconds for which it has kept this rank from training, which includes what was
        left of the save before; what is written afterwards goes on beside the steps.

        Args:
            step: how many steps are done.
            is_last: whether the training ends here: then no later save could make up for this one.

        Raises:
            ResourceError: on all ranks: this checkpoint cannot be written, and it is the last one or the second in a
                row; or the two before could not be.
        """
        start = time.perf_counter()
        self._save(step, is_last)
        now = time.perf_counter()
        seconds, interval = now - start, now - self._ended
        self._ended = now
        if not is_last:
            self._watch(seconds, interval)
        return seconds

    def _save(self, step: int, is_last: bool) -> None:
        if self._is_writing:
            self._is_writing = False
            try:
                self._checkpoints.wait()
                self._has_failed = False
            except ResourceError as error:
                self._failed(error)
        try:
            self._checkpoints.save(step, self._state)
            self._is_writing = True
        except ResourceError as error:
            if is_last:
                raise
            self._failed(error)

    def _failed(self, error: ResourceError) -> None:
        if self._has_failed:
            raise error
        self._has_failed = True
        self._say(f"the training goes on, and ends if the next save fails, too: {error}")

    def _watch(self, seconds: float, interval: float) -> None:
        """Warns, once, where a save of ``seconds`` is much of the ``interval`` since the one before."""
        every, minutes = self._settings.every, self._settings.every_minutes
        options = [*([f"every = {every}"] * (every > 0)), *([f"every_minutes = {minutes:g}"] * (minutes > 0))]
        if self._has_warned or not options or seconds <= _MUCH * interval:
            return
        self._has_warned = True
        self._say(
            f"saves take {seconds / interval:.0%} of the time, {seconds:.2g} s of the last {interval:.2g} s; raise "
            f"{' and '.join(options)} in [checkpoints]: one save in {seconds / _MUCH:.2g} s takes {_MUCH:.0%}"
        )

    def _say(self, text: str) -> None:
        if self._group.rank() == 0:
            print(f"mlxdist: {text}", file=sys.stderr, flush=True)
