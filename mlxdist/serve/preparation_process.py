"""Rank 0's end of one process that makes requests into tokens: lines of JSON to it, lines of JSON back."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence

from mlxdist.base.environment import VARIABLES

from .protocol import EVENT, MAX_LINE, Failed, Result
from .refusal import Refusal

__all__ = ["PreparationProcess", "ProcessDied", "TooLong"]

# One process, one core; and no words of theirs about texts of clients and models.
_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error", "PYTHONWARNINGS": "ignore"}

# It is no rank, and needs no secret. The launcher finds what a job has left behind by MLXDIST_JOB.
_DROPPED = {each.name for each in VARIABLES if each.of_job or each.is_secret} - {"MLXDIST_JOB"}


class ProcessDied(Exception):
    """A process has ended by itself."""


class TooLong(Refusal):
    """A call takes longer than a process may work on it."""


class PreparationProcess:
    """A process of :mod:`preparation_child`. One call at a time."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, command: Sequence[str]) -> None:
        """Starts the process. Returns once it has its tokenizer.

        Raises:
            Refusal: it has no tokenizer.
            OSError, ProcessDied: it has not started, or has ended.
        """
        self._process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=MAX_LINE,
            env={name: value for name, value in os.environ.items() if name not in _DROPPED} | _ENVIRONMENT,
        )
        answer = await self._answer(self._process)
        if isinstance(answer, Failed):
            raise answer.refusal

    async def ask(self, line: bytes, timeout: float) -> Result | Failed:
        """The answer to a line, within ``timeout`` seconds. Raises TooLong, ProcessDied: the process cannot go on."""
        process = self._process
        assert process is not None and process.stdin is not None
        try:
            async with asyncio.timeout(timeout):
                process.stdin.write(line + b"\n")
                with contextlib.suppress(ConnectionError):  # what it answers, or its exit status, says more
                    await process.stdin.drain()
                return await self._answer(process)
        except TimeoutError:
            raise TooLong("this machine is too busy to make the request into tokens", 503, retry_after=5) from None

    async def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    async def _answer(self, process: asyncio.subprocess.Process) -> Result | Failed:
        assert process.stdout is not None
        try:
            line = await process.stdout.readline()
        except ValueError:
            raise TooLong(f"the tokens of the request have more than {MAX_LINE} bytes; send a shorter one") from None
        if line.endswith(b"\n"):
            answer: Result | Failed = EVENT.validate_json(line)
            return answer
        status = await process.wait()
        if status == -signal.SIGPROF:
            raise TooLong("the request takes too much time to be made into tokens; send a shorter one")
        raise ProcessDied(f"it has ended with status {status}")
