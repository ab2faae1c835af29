"""The clients of `mlxdist bench serve`: when requests arrive, how long they are, and how answers are timed."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mlxdist.base.json_reader import parse_json

__all__ = ["HOST", "Answer", "arrivals", "ask", "ask_all", "lengths"]

HOST = "127.0.0.1"
SILENCE = 60.0  # seconds without a byte after which a request has failed
# Of the logarithms of lengths in ShareGPT; the means are options.
PROMPT_SIGMA, ANSWER_SIGMA = 1.2, 1.0
_HEAD_START = 0.1  # seconds for the threads to start


@dataclass
class Answer:
    """An answer as a client received it.

    Attributes:
        text: the text of all events together.
        tokens: the number of tokens, as the server counts them.
        first: seconds from when the request should have been sent to the first event with text, or else to the end.
        gaps: seconds between one event with text and the next.
        end: the time of the last event with text, in seconds of time.perf_counter.
    """

    text: str = ""
    tokens: int = 0
    first: float = math.nan
    gaps: list[float] = field(default_factory=list)
    end: float = math.nan


def arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Seconds at which requests arrive: a Poisson process of ``rate`` per second, the first one at 0."""
    generator = random.Random(f"arrivals {seed}")
    times = [0.0]
    while len(times) < count:
        times.append(times[-1] + generator.expovariate(rate))
    return times


def lengths(mean: int, sigma: float, count: int, most: int, seed: str) -> list[int]:
    """Tokens of prompts or answers: log-normal with this mean, clipped to 1 to ``most``."""
    generator = random.Random(seed)
    location = math.log(mean) - sigma**2 / 2
    return [min(max(round(generator.lognormvariate(location, sigma)), 1), most) for _ in range(count)]


def ask_all(port: int, bodies: Sequence[dict[str, Any]], times: Sequence[float]) -> tuple[list[Answer], float]:
    """Sends each request at its time, whether or not others have been answered.

    Returns the answers, and the seconds from the first time to the last token.

    Raises:
        OSError, http.client.HTTPException: a request has failed.
    """
    start = time.perf_counter() + _HEAD_START
    with ThreadPoolExecutor(len(bodies)) as threads:
        answers = list(threads.map(partial(ask, port), bodies, (start + each for each in times)))
    return answers, max(answer.end for answer in answers) - start - times[0]


def ask(port: int, body: dict[str, Any], when: float) -> Answer:
    """Sends a request at ``when``, and returns its answer. Errors as of `ask_all`; ConnectionError: not ready yet."""
    time.sleep(max(0.0, when - time.perf_counter()))
    answer, last, done = Answer(), when, 0.0
    with contextlib.closing(http.client.HTTPConnection(HOST, port, timeout=SILENCE)) as connection:
        words = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}})
        connection.request("POST", "/v1/completions", words, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            kind = ConnectionError if response.status == 503 else http.client.HTTPException
            raise kind(f"HTTP status {response.status}: {response.read(500).decode(errors='replace')}")
        for line in response:
            now = time.perf_counter()
            event = line.removeprefix(b"data: ").strip()
            if event == b"[DONE]":
                done = now
            if not line.startswith(b"data: ") or done:
                continue
            try:
                found = parse_json(event)
            except ValueError as error:
                raise http.client.HTTPException(f"an event that is not JSON: {error}") from None
            if "error" in found:
                raise http.client.HTTPException(f"an error event: {found['error']}")
            answer.tokens = (found.get("usage") or {}).get("completion_tokens", answer.tokens)
            if text := "".join(choice["text"] for choice in found["choices"]):
                if answer.text:
                    answer.gaps.append(now - last)
                else:
                    answer.first = now - when
                answer.text += text
                answer.end = last = now
    if not done or not answer.tokens:
        raise http.client.HTTPException("the answer broke off")
    if not answer.text:  # its first token is the one that ends it
        answer.first, answer.end = done - when, done
    return answer
