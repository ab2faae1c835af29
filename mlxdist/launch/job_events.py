"""The events that the launcher itself has: a start, its end, and a stall between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .event_hook import Event, EventHook
from .exit_status import Ending
from .restarts import name_of_start

__all__ = ["LauncherEvents"]


class LauncherEvents(EventHook):
    """Passes on the events of the job ``name``; see `EventHook`."""

    def __init__(self, target: str, name: str, say: Callable[[str], None]) -> None:
        super().__init__(target, say)
        self._name = name

    def around(self, run_once: Callable[[int], Ending]) -> Callable[[int], Ending]:
        """``run_once(number of the restart)`` with an event at its end: failed, interrupted or ended."""

        def run(restart: int) -> Ending:
            ending = run_once(restart)
            event = "failed" if ending.failed else "interrupted" if ending.status else "ended"
            self._send(event, restart, ending.text or "all ranks succeeded", rank=ending.rank, status=ending.status)
            return ending

        return run

    def started(self, restart: int, ranks: int) -> None:
        self._send("started", restart, f"{ranks} rank{'s have' if ranks > 1 else ' has'} started")

    def regrouped(self, restart: int, has_grown: bool, text: str) -> None:
        self._send("grown" if has_grown else "shrunk", restart, text)

    def stalled(self, restart: int, how: str) -> None:
        """Any thread may call it."""
        self._send("stalled", restart, how)

    def _send(self, event: str, restart: int, text: str, **fields: Any) -> None:
        sentence = f"{text[0].upper()}{text[1:]}."
        self.send(Event(event, name_of_start(self._name, restart), sentence, restart=restart, **fields))
