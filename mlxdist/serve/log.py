"""Prints to the standard error of a server: sentences for its operator, and a line for each request."""

import json
import sys
import time
from dataclasses import dataclass, field
from typing import Literal, Protocol

from .refusal import Refusal

__all__ = ["RequestRecord", "say"]


def say(text: str) -> None:
    print(f"mlxdist: {text}", file=sys.stderr, flush=True)


class _Answer(Protocol):
    """The counts of an answer so far, of all its choices together."""

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def cached_tokens(self) -> int: ...

    @property
    def completion_tokens(self) -> int: ...

    @property
    def finish_reasons(self) -> list[str]: ...


@dataclass
class RequestRecord:
    """A request of HTTP, for the access log.

    Attributes:
        status: of HTTP; 0 before the answer begins.
        first_byte: seconds from its arrival to the first byte of the answer's body; None before.
        outcome: how it ended: the finish reasons of its choices, "cancelled", "timeout", "refused" or "error"; empty
            for a request that has no such.
        normalized: the client of whose system prompt parts were left out; empty if none were.
        answer: what has been answered so far; None if nothing is generated.
    """

    id: str
    method: str
    path: str
    status: int = 0
    first_byte: float | None = None
    outcome: str = ""
    normalized: str = ""
    answer: _Answer | None = None
    arrived: float = field(default_factory=time.monotonic)

    def has_byte(self) -> None:
        if self.first_byte is None:
            self.first_byte = time.monotonic() - self.arrived

    def fail(self, refusal: Refusal) -> None:
        kind = "refused" if refusal.status < 500 else "error"
        self.outcome = "timeout" if refusal.status in (408, 504) else kind

    def print(self, log_format: Literal["text", "json"]) -> None:
        """Prints the line. The path is the client's: its control characters are escaped."""
        answer, seconds = self.answer, time.monotonic() - self.arrived
        prompt, completion = (answer.prompt_tokens, answer.completion_tokens) if answer else (0, 0)
        cached = answer.cached_tokens if answer else 0
        outcome = self.outcome or ", ".join(sorted(set(answer.finish_reasons)) if answer else ())
        if log_format == "json":
            line = {
                "time": round(time.time(), 3),
                "id": self.id,
                "method": self.method,
                "path": self.path,
                "status": self.status,
                "prompt_tokens": prompt,
                "cached_tokens": cached,
                "completion_tokens": completion,
                "normalized_head": self.normalized,
                "first_byte_seconds": None if self.first_byte is None else round(self.first_byte, 6),
                "seconds": round(seconds, 6),
                "outcome": outcome,
            }
            print(json.dumps(line), file=sys.stderr, flush=True)
            return
        tokens = f", {prompt} ({cached} cached) + {completion} tokens" if answer else ""
        tokens += f", head of {self.normalized} normalized" if self.normalized else ""
        first = "" if self.first_byte is None else f", first byte after {self.first_byte:.3f} s"
        path = json.dumps(self.path)[1:-1]
        say(f"{self.id} {self.method} {path} {self.status}{tokens}{first}, {seconds:.3f} s: {outcome or 'done'}")
