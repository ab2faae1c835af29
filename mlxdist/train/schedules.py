"""Schedules: the size of batches over a training, and what it means for the learning rate."""

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from typing import Any

import mlx.core as mx
from mlx.optimizers import join_schedules, linear_schedule

from mlxdist.base.errors import InvalidArgument
from mlxdist.nn.layout.partition import require_counts

__all__ = ["BatchRampUp", "linear_scaling", "sqrt_scaling", "warm_up"]


@dataclass(frozen=True)
class BatchRampUp:
    """A batch size that grows in equal increments, called with the number of rows behind: Megatron-LM's
    ``--rampup-batch-size``, as GPT-3 was trained (arXiv:2005.14165, appendix B).

    Small batches learn more from each row at first; large ones use the machines better.

    Attributes:
        start: the first batch size, in rows of all ranks.
        end: the last one.
        increment: by how much one is larger than the one before; divides ``end - start``.
        samples: rows over which the batch grows. Each size but the last takes an equal part of them.

    Raises:
        InvalidArgument: one is no positive integer, ``end`` is not above ``start``, or ``increment`` does not divide.
    """

    start: int
    end: int
    increment: int
    samples: int

    def __post_init__(self) -> None:
        require_counts("BatchRampUp", start=self.start, end=self.end, increment=self.increment, samples=self.samples)
        if self.end <= self.start or (self.end - self.start) % self.increment:
            raise InvalidArgument(
                f"BatchRampUp: from {self.start} to {self.end} there is no whole number of increments of "
                f"{self.increment}; give an increment that divides {self.end - self.start}"
                if self.end > self.start
                else f"BatchRampUp: end is {self.end}, and must be above start, {self.start}"
            )

    @property
    def sizes(self) -> range:
        """All batch sizes, in their order."""
        return range(self.start, self.end + 1, self.increment)

    def __call__(self, position: int) -> int:
        """The size of the batch that begins after ``position`` rows."""
        return self.sizes[min(position * (len(self.sizes) - 1) // self.samples, len(self.sizes) - 1)]


def linear_scaling(learning_rate: float, batch_size: int, base_batch_size: int) -> float:
    """The learning rate for a batch ``batch_size / base_batch_size`` times as large, for SGD: as many times as large.

    Goyal et al., Accurate, Large Minibatch SGD, arXiv:1706.02677, section 2.1; with :func:`warm_up`.

    Args:
        learning_rate: that is right for ``base_batch_size`` rows.
        batch_size: of all ranks, times the steps of accumulation.
        base_batch_size: for which ``learning_rate`` was found.

    Raises:
        InvalidArgument: a batch size is no positive integer.
    """
    require_counts("linear_scaling", batch_size=batch_size, base_batch_size=base_batch_size)
    return learning_rate * batch_size / base_batch_size


def sqrt_scaling(learning_rate: float, batch_size: int, base_batch_size: int) -> float:
    """The learning rate for a larger batch by the root of how many times it is as large, which keeps the variance of
    a step. Usual for Adam, whose steps do not grow with the gradient (Malladi et al., arXiv:2205.10287).

    Krizhevsky, One weird trick for parallelizing convolutional neural networks, arXiv:1404.5997.

    Args:
        learning_rate: that is right for ``base_batch_size`` rows.
        batch_size: of all ranks, times the steps of accumulation.
        base_batch_size: for which ``learning_rate`` was found.

    Raises:
        InvalidArgument: a batch size is no positive integer.
    """
    require_counts("sqrt_scaling", batch_size=batch_size, base_batch_size=base_batch_size)
    return learning_rate * sqrt(batch_size / base_batch_size)


def warm_up(
    schedule: float | Callable[[mx.array], mx.array], steps: int, init: float = 0.0
) -> Callable[[mx.array], mx.array]:
    """A learning rate that grows linearly from ``init`` over the first steps, and follows a schedule after them.

    Goyal et al., arXiv:1706.02677, section 2.2, where ``init`` is the learning rate of one worker. The result goes to
    any optimizer of MLX; it is called with the number of steps done, an integer ``mx.array`` of shape ().

    Args:
        schedule: a learning rate, or a schedule of MLX such as ``cosine_decay``, whose step 0 comes after the warm-up.
        steps: of the warm-up.
        init: the learning rate of the first step.

    Raises:
        InvalidArgument: ``steps`` is no positive integer.
    """
    require_counts("warm_up", steps=steps)
    if not callable(schedule):
        return linear_schedule(init, schedule, steps)
    peak: Any = mx.array(schedule(mx.array(0))).item()
    return join_schedules([linear_schedule(init, peak, steps), schedule], [steps])
