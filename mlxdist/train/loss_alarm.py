"""An alarm for the loss of a training run: spikes, their recovery or its absence, and a rise without a spike."""

import math
from collections import deque

import numpy as np

from mlxdist.base.errors import InvalidArgument

__all__ = ["LossAlarm"]

# The median of absolute deviations of a normal distribution is this part of its standard deviation.
_MAD = 0.6745
# Where the loss hardly varies, such a part of it counts as one standard deviation.
_LEAST_DEVIATION = 0.01
_LEAST_LOSSES = 10


class LossAlarm:
    """Compares each loss with the median of the last ones.

    A loss is a spike when it is more than ``deviations`` standard deviations above that median, both estimated robustly
    (median and median absolute deviation; Leys et al. 2013, doi:10.1016/j.jesp.2013.03.013), or not finite. Losses of
    a spike do not move the median. Before there are 10 losses, only a loss that is not finite is a spike.

    Args:
        window: how many losses the median is of.
        deviations: standard deviations, at least 1 % of the median each.
        patience: steps of a spike, after which the run counts as diverged; the losses since then are the new normal.

    Raises:
        InvalidArgument: an argument is out of range.
    """

    def __init__(self, window: int = 100, deviations: float = 6.0, patience: int = 50) -> None:
        if type(window) is not int or window < _LEAST_LOSSES:
            raise InvalidArgument(f"LossAlarm: window is {window!r}, not a number of losses from {_LEAST_LOSSES}")
        if not (isinstance(deviations, int | float) and 0 < deviations < math.inf):
            raise InvalidArgument(f"LossAlarm: deviations is {deviations!r}, not a number above 0")
        if type(patience) is not int or patience < 1:
            raise InvalidArgument(f"LossAlarm: patience is {patience!r}, not a number of steps from 1")
        self._window, self._deviations, self._patience = window, float(deviations), patience
        self._losses: deque[float] = deque(maxlen=window)
        self._first: int | None = None  # step of a spike
        self._length = 0  # of it so far, in losses
        self._best = math.inf  # the lowest median of a full window so far, or that of the last alarm

    def __repr__(self) -> str:
        return f"LossAlarm({self._window}, {self._deviations}, {self._patience})"

    def observe(self, step: int, loss: float) -> str:
        """Returns the alarm for this step's loss; empty for none. Call it once for each step."""
        if len(self._losses) < _LEAST_LOSSES:
            return self._begin(step, loss)
        losses = np.array(self._losses)
        median = float(np.median(losses))
        deviation = max(float(np.median(np.abs(losses - median))) / _MAD, _LEAST_DEVIATION * abs(median))
        if math.isfinite(loss) and loss <= median + self._deviations * deviation:
            self._losses.append(loss)
            return self._recovery(step, loss) or self._rise(median, deviation)
        return self._spike(step, loss, f"the median of the {len(losses)} before is {median:.4g}")

    def _begin(self, step: int, loss: float) -> str:
        if not math.isfinite(loss):
            return self._spike(step, loss, f"there are {len(self._losses)} losses before")
        self._losses.append(loss)
        return self._recovery(step, loss)

    def _recovery(self, step: int, loss: float) -> str:
        first, self._first, self._length = self._first, None, 0
        return "" if first is None else f"the loss is {loss:.4g} again, {step - first} steps after its spike began"

    def _spike(self, step: int, loss: float, before: str) -> str:
        self._length += 1
        if self._first is None:
            self._first = step
            return f"the loss is {loss:.4g}; {before}"
        if self._length != self._patience:
            return ""
        first = self._first
        if math.isfinite(loss):
            self._losses.clear()
            self._first, self._length, self._best = None, 0, math.inf
        return f"the loss has not recovered since step {first}: it is {loss:.4g}; {before}"

    def _rise(self, median: float, deviation: float) -> str:
        """The alarm for a rise from one window to another without a spike; empty for none."""
        best = self._best
        if len(self._losses) < self._window or median <= best + self._deviations * deviation:
            self._best = min(best, median) if len(self._losses) == self._window else best
            return ""
        self._best = median
        return f"the loss rises: the median of the last {self._window} is {median:.4g}, and was {best:.4g}"
