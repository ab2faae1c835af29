"""Whether drafts pay: rank 0 times steps with drafts and without, and all ranks do what is faster.

A draft that the model does not accept costs time, and on a device that is bound by arithmetic so does one that it does:
it depends on the text, on the model and on how many requests share a step. So both ways are measured as long as a
server runs, for each size of batch by itself.
"""

import time
from collections.abc import Callable

__all__ = ["DraftPolicy"]

_WINDOW = 24  # steps of a measurement
_AGAIN = 20  # windows after which the slower way is measured again: it may pay for other texts
_MARGIN = 1.05  # what is in use stays where the other way is not faster by this


class DraftPolicy:
    """Decides how many tokens each request drafts in the next step.

    Args:
        most: drafts of a request in a step, where they pay; 0 for a server without drafts.
        clock: seconds.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._most, self._clock = most, clock
        self._batches: dict[int, _Batch] = {}
        self._batch: _Batch | None = None
        self._start = 0.0
        self.drafts = most

    def begin(self, requests: int) -> int:
        """The drafts of each request in a step that begins now, with that number of requests."""
        if self._most:
            # Batches of 2^k to 2^(k + 1) - 1 requests are alike.
            self._batch = self._batches.setdefault(requests.bit_length(), _Batch())
            self.drafts = self._most if self._batch.drafts else 0
            self._start = self._clock()
        return self.drafts

    def end(self, tokens: int, only_decodes: bool) -> None:
        """Counts the ``tokens`` of the step. ``only_decodes``: no prompt was computed, and no request came or went."""
        if self._batch is not None and only_decodes and tokens:
            self._batch.count(self._clock() - self._start, tokens)


class _Batch:
    """The measurements of batches of about one size.

    Attributes:
        drafts: whether the next step has drafts.
    """

    def __init__(self) -> None:
        self.drafts = self._faster = True
        self._per_token: dict[bool, float] = {}  # seconds of a token, with drafts and without
        self._windows = 0  # of the faster way, one after the other
        self._seconds, self._tokens, self._steps = 0.0, 0, 0

    def count(self, seconds: float, tokens: int) -> None:
        """Takes the measurement of a step, and chooses the way of the next one."""
        self._seconds, self._tokens, self._steps = self._seconds + seconds, self._tokens + tokens, self._steps + 1
        if self._steps == _WINDOW:
            self._per_token[self.drafts] = self._seconds / self._tokens
            self._seconds, self._tokens, self._steps = 0.0, 0, 0
            self._choose()

    def _choose(self) -> None:
        if self.drafts == self._faster:
            self._windows += 1
            if self._windows >= (_AGAIN if len(self._per_token) == 2 else 1):
                self.drafts = not self._faster
            return
        if self._per_token[self.drafts] * _MARGIN < self._per_token[self._faster]:
            self._faster = self.drafts
        self.drafts, self._windows = self._faster, 0
