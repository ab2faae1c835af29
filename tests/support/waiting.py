"""Time in tests: what they wait for, what is late on purpose, and how long a call takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def wait_for(condition: Callable[[], Any], seconds: float = 30.0) -> bool:
    """Whether ``condition()`` has become true. ``seconds`` only ends the wait of a test that fails."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def late(seconds: float) -> None:
    """Delays this thread, where that is what a test is about: what the others do while they wait for it."""
    time.sleep(seconds)


def seconds_of(call: Callable[..., Any], *arguments: Any, **keywords: Any) -> tuple[float, Any]:
    """How long a call takes, where that is what a test is about, and its result."""
    begin = time.monotonic()
    result = call(*arguments, **keywords)
    return time.monotonic() - begin, result
