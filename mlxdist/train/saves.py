"""The checkpoints of `mlxdist train` while it runs: one that cannot be saved does not end the training, two do."""

from typing import Any

from mlxdist.base import logger
from mlxdist.base.errors import ResourceError
from mlxdist.runtime.group.group import Group

from .checkpoint import Checkpoints

__all__ = ["Saves"]


class Saves:
    """Saves the state of a training.

    A disk that is full for an hour must not cost the steps since the last checkpoint, and one that stays full must not
    cost more than an interval: so the first save that fails is a warning, and a second one in a row an error.

    Args:
        checkpoints: where the state goes.
        state: the tree that is saved.
        group: the ranks that train.
    """

    def __init__(self, checkpoints: Checkpoints, state: dict[str, Any], group: Group) -> None:
        self._checkpoints, self._state, self._group = checkpoints, state, group
        self._has_failed = False  # the save before, or the one that is being written, as far as is known
        self._is_writing = False

    def save(self, step: int, *, is_last: bool) -> None:
        """Saves. Collective.

        Args:
            step: how many steps are done.
            is_last: whether the training ends here: then no later save could make up for this one.

        Raises:
            ResourceError: on all ranks: this checkpoint cannot be written, and it is the last one or the second in a
                row; or the two before could not be.
        """
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
        if self._group.rank() == 0:
            logger.warn("failure", f"the training goes on, and ends if the next save fails, too: {error}")
