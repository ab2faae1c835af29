"""The times of a pipeline's actions on each rank: of a schedule that was simulated, or of a step that was measured."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
from rich.text import Text

from mlxdist.runtime.diagnostics.step import Computed, set_computing
from mlxdist.runtime.native import bridge

__all__ = ["Action", "Span", "Stamps", "Timeline"]

_STYLES = {"F": "blue", "B": "green", "I": "green", "W": "yellow"}
_MAX_WIDTH = 150  # of the picture, in characters


@dataclass(frozen=True)
class Action:
    """An action of a rank: what it computes, of which micro-batch, on which virtual stage.

    Attributes:
        kind: "F", "B", "I" or "W": :mod:`mlxdist.nn.pipeline_parallel.schedule`.
        micro_batch: of the step, from 0.
        chunk: which of the rank's virtual stages, from 0.
    """

    kind: str
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}" + (f".{self.chunk}" if self.chunk else "")


class Span(NamedTuple):
    """An action, and when it began and ended, in seconds or any other unit."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The spans of each rank. ``str(timeline)`` is a picture, with colors where rich prints it.

    Attributes:
        title: above the picture.
        spans: of each rank, in the order of time.
        start: when the step began.
    """

    title: str
    spans: tuple[tuple[Span, ...], ...]
    start: float = 0.0

    @property
    def seconds(self) -> float:
        """The time from the start to the end of the last action, in the unit of the spans."""
        return max((span.end for row in self.spans for span in row), default=self.start) - self.start

    def busy(self, rank: int) -> float:
        """The time in which ``rank`` computes."""
        return sum(span.end - span.start for span in self.spans[rank])

    def idle(self, rank: int) -> float:
        """The time in which ``rank`` does not compute."""
        return self.seconds - self.busy(rank)

    @property
    def bubble(self) -> float:
        """The share of the ranks' time in which they do not compute."""
        ranks = range(len(self.spans))
        return sum(map(self.idle, ranks)) / (len(self.spans) * self.seconds) if self.seconds else 0.0

    def __str__(self) -> str:
        return "\n".join(line.plain.rstrip() for line in self._lines())

    def __rich__(self) -> Text:
        return Text("\n").join(self._lines())

    def _lines(self) -> list[Text]:
        lines = [Text(f"{self.title}; bubble {self.bubble:.1%}")]
        shortest = min((span.end - span.start for row in self.spans for span in row), default=0.0)
        if not self.seconds:
            return lines
        widest = 1 + max(len(str(span.action)) for row in self.spans for span in row)
        # The shortest action has room for a name, unless the picture would be too wide.
        scale = min(widest / shortest, _MAX_WIDTH / self.seconds) if shortest else _MAX_WIDTH / self.seconds
        return lines + [self._line(rank, row, scale) for rank, row in enumerate(self.spans)]

    def _line(self, rank: int, row: Sequence[Span], scale: float) -> Text:
        line = Text(f"rank {rank:<{len(str(len(self.spans) - 1))}}  ")
        before = len(line)
        for span in row:
            start, end = (round((time - self.start) * scale) for time in (span.start, span.end))
            line.append("." * (start - (len(line) - before)), "dim")
            width, name = end - start, str(span.action)
            if len(name) > width:
                name = span.action.kind[:width]
            filling = "-" if width > len(name) + 1 and name == str(span.action) else " "
            line.append(name.ljust(width, filling), _STYLES[span.action.kind])
        return line


class Stamps:
    """Measures a step while it is computed, and waits for nothing: times are arrays that MLX computes behind others."""

    stream = mx.new_thread_local_stream(mx.cpu)

    def __init__(self) -> None:
        self._start = self._after([])
        self._actions: list[tuple[Action, mx.array | None, mx.array | None]] = []

    def begin(self, action: Action, received: Sequence[mx.array]) -> None:
        """An action begins once ``received`` is here, and the action before has ended. Called before it is started:
        MLX may not return from ``mx.async_eval`` until most of it is computed."""
        self._actions.append((action, self._after(received) if received else None, None))

    def end(self, computed: Sequence[mx.array]) -> None:
        """Ends the last action once ``computed`` is computed; without arrays it takes no time."""
        if computed:
            self._actions[-1] = (*self._actions[-1][:2], self._after(computed))

    def timeline(self, title: str) -> Timeline:
        """Waits for the step and returns its spans."""
        start = previous = _seconds(self._start)
        spans = []
        for action, received, computed in self._actions:
            begin = previous if received is None else max(previous, _seconds(received))
            previous = begin if computed is None else max(begin, _seconds(computed))
            spans.append(Span(action, begin, previous))
        return Timeline(title, (tuple(spans),), start)

    def report(self) -> None:
        """Shows the step in `mlxdist top` and `mlxdist dump`. Waits for it."""
        timeline = self.timeline("")
        spans = [
            Computed(str(action), round(start * 1e9), round(end * 1e9)) for action, start, end in timeline.spans[0]
        ]
        set_computing(max(0.0, timeline.bubble), spans)  # of a sum of floats

    def _after(self, arrays: Sequence[mx.array]) -> mx.array:
        time: mx.array = bridge.time_stamp(list(arrays), self.stream)
        mx.async_eval(time)
        return time


def _seconds(time: mx.array) -> float:
    nanoseconds: Any = time.item()
    return nanoseconds / 1e9
