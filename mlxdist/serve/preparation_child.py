"""A process that tokenizes beside rank 0: a line of JSON in, a line of JSON out, until the input ends.

It ends at once when rank 0 does, whatever it computes then. Each line has a limit of CPU time: SIGPROF ends the process
at the limit, also within a regular expression or a tokenizer.
"""

import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import TypeAdapter

from mlxdist.base.json_reader import parse_json

from .protocol import CALL, Failed, Result, ToolCall
from .refusal import Refusal

__all__ = ["main"]

_CALLS: TypeAdapter[Any] = TypeAdapter(list[ToolCall] | None)


def main(directory: str, template_arguments: str) -> None:
    """Answers the lines of the standard input. The first line that it writes says whether there is a tokenizer."""
    for number in (signal.SIGINT, signal.SIGTERM):  # for the group: rank 0 still serves then, and ends this process
        signal.signal(number, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(sys.stdin.buffer, lines), daemon=True).start()
    try:
        work = _worker(Path(directory), parse_json(template_arguments))
    except Exception as error:  # of any of the libraries that load a tokenizer
        _write(answers, Failed(message=f"the tokenizer of the model cannot be loaded: {error}"[:500], status=500))
        return
    _write(answers, Result(value=None))
    while True:
        _write(answers, _answer(work, lines.get()))


def _worker(directory: Path, template_arguments: dict[str, Any]) -> Callable[[dict[str, Any]], Any]:
    import mlx.core as mx  # after main() has taken the standard output from these libraries

    mx.set_default_device(mx.cpu)  # before mlx-lm makes its stream: only ranks use the GPU
    from .preparation import Limits, Preparation

    preparation = Preparation(directory, template_arguments)

    def work(line: dict[str, Any]) -> Any:
        if line["op"] == "parse_calls":
            return _CALLS.dump_python(preparation.parse_calls(**line["parameters"]))
        call, limits = CALL.validate_python(line["call"]), Limits(**line["limits"])
        made = getattr(preparation, line["op"])(call, limits)
        return made if isinstance(made, dict) else made.model_dump()

    return work


def _answer(work: Callable[[dict[str, Any]], Any], text: bytes) -> Result | Failed:
    try:
        line = parse_json(text, repeated=True)
        signal.setitimer(signal.ITIMER_PROF, line["cpu_seconds"])
        return Result(value=work(line))
    except Refusal as refusal:
        return Failed.of(refusal)
    except Exception as error:
        return Failed(message=f"the request cannot be prepared: {type(error).__name__}: {error}"[:500], status=500)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _read(lines: Iterable[bytes], found: "queue.SimpleQueue[bytes]") -> None:
    for line in lines:
        found.put(line)
    os._exit(0)


def _write(answers: BinaryIO, answer: Result | Failed) -> None:
    answers.write(answer.model_dump_json().encode() + b"\n")
    answers.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
