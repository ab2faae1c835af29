"""Rank 0: the processes that tokenize requests beside it, so that no long prompt or slow template delays a step."""

import asyncio
import contextlib
import json
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter

from mlxdist.base.child_process import module_command

from .preparation_process import PreparationProcess, ProcessDied
from .prepared import CallFormat, Prepared
from .protocol import Detokenize, Failed, Generate, Result, Tokenize, ToolCall
from .refusal import Refusal

__all__ = ["PreparationPool"]

_LONG = 1 << 18  # bytes of a call that has a process of its own
_PATIENCE = 0.2  # seconds that a call waits for a process before one more is started
_PARSE_SECONDS = 2.0  # of CPU time to parse a call of a tool
_CALLS: TypeAdapter[list[ToolCall] | None] = TypeAdapter(list[ToolCall] | None)


class PreparationPool:
    """Processes that make requests into tokens: one from the start, more when calls wait. For one event loop.

    Long prompts have a process of their own, and wait for each other alone. A process that fails, or computes too
    long, is replaced. What it worked on is tried once more, unless it took too long.

    Args:
        directory: of the model.
        template_arguments: the operator's variables of the chat template.
        processes: the maximum number of processes, beside that of long prompts.
        cpu_seconds: of CPU time that a call may take in its process.
        timeout: seconds that a call may take in its process on a busy machine.

    Attributes:
        context: tokens of a prompt and its answer; to be set before the first call, as what follows.
        vocabulary: the number of tokens that the model has.
        has_grammars: whether llguidance can read the tokenizer, see :func:`grammar.grammar_tokenizer`.
    """

    def __init__(
        self,
        directory: Path,
        template_arguments: Mapping[str, Any],
        *,
        processes: int = 2,
        cpu_seconds: float = 10.0,
        timeout: float = 60.0,
    ) -> None:
        arguments = json.dumps(dict(template_arguments))
        command = module_command("mlxdist.serve.preparation_child", str(directory), arguments)
        self._processes, self._long = _Processes(command, processes, timeout), _Processes(command, 1, timeout)
        self._cpu_seconds = cpu_seconds
        self.context = self.vocabulary = 0
        self.has_grammars = True

    async def start(self) -> None:
        """Begins to start the first process, and returns."""
        self._processes.begin()

    async def started(self) -> None:
        """Returns once the first process can take calls, or has not started: each call then tries again."""
        await self._processes.has_started.wait()

    async def close(self) -> None:
        """Ends all processes, and the calls that wait for one."""
        await asyncio.gather(self._processes.close(), self._long.close())

    async def prepare(self, call: Generate) -> Prepared:
        """A request as tokens. Raises Refusal: it cannot be served, or not now."""
        return Prepared.model_validate(await self._call("prepare", call))

    async def tokenize(self, call: Tokenize) -> dict[str, Any]:
        """{"model", "tokens", "max_model_len"} of a prompt. Raises Refusal: it has no tokens, or not now."""
        return await self._call("tokenize", call)

    async def detokenize(self, call: Detokenize) -> dict[str, Any]:
        """{"prompt"}, the text of tokens. Raises Refusal: the model does not have them, or not now."""
        return await self._call("detokenize", call)

    async def parse_calls(
        self, text: str, tools: list[dict[str, Any]], how: CallFormat, name: str
    ) -> list[ToolCall] | None:
        """The calls of tools in ``text``, see :func:`tool_calls.parse_calls`. None also where it cannot be parsed."""
        parameters = {"text": text, "tools": tools, "how": how, "name": name}
        line = {"op": "parse_calls", "parameters": parameters, "cpu_seconds": min(_PARSE_SECONDS, self._cpu_seconds)}
        try:
            return _CALLS.validate_python(await self._processes.ask(json.dumps(line).encode()))
        except Refusal:
            return None  # the answer goes on, with this as its text

    async def _call(self, op: str, call: BaseModel) -> Any:
        limits = {"context": self.context, "vocabulary": self.vocabulary, "has_grammars": self.has_grammars}
        head = json.dumps({"op": op, "limits": limits, "cpu_seconds": self._cpu_seconds})
        line = f'{head[:-1]}, "call": {call.model_dump_json()}}}'.encode()
        return await (self._long if len(line) > _LONG else self._processes).ask(line)


class _Processes:
    """Processes for calls of one kind. ``most``: their maximum number.

    Attributes:
        has_started: the first one has its tokenizer, or has failed.
    """

    def __init__(self, command: Sequence[str], most: int, timeout: float) -> None:
        self._command, self._most, self._timeout = command, most, timeout
        # The last one that was busy is the next one. A Refusal: there is none.
        self._idle: asyncio.LifoQueue[PreparationProcess | Refusal] = asyncio.LifoQueue()
        self._count = 0  # of processes, and of those that start
        self._starting = 0  # of these
        self._waiting = 0  # calls that wait for one
        self._is_closed = False
        self.has_started = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()

    def begin(self) -> None:
        """Starts a process, unless there are enough."""
        if self._count < self._most and not self._is_closed:
            self._count += 1
            self._starting += 1
            self._task(self._start())

    async def ask(self, line: bytes) -> Any:
        """The value that a process answers to a line. The process ends its work also if this is cancelled.

        Raises:
            Refusal: that of the process; there is no process; the process takes too long.
        """
        for _ in range(2):
            process = await self._take()
            with contextlib.suppress(ProcessDied):
                answer = await asyncio.shield(self._task(self._work(process, line)))
                if isinstance(answer, Failed):
                    raise answer.refusal
                return answer.value
        raise Refusal("the process that makes the request into tokens has died twice", 503, retry_after=1)

    async def close(self) -> None:
        """Ends all processes, and refuses the calls that wait."""
        self._is_closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while not self._idle.empty():
            process = self._idle.get_nowait()
            if isinstance(process, PreparationProcess):
                self._count -= 1
                await process.close()
        self._refuse_waiting(Refusal("the server ends", 503))

    async def _take(self) -> PreparationProcess:
        """An idle process."""
        if self._is_closed:
            raise Refusal("the server ends", 503)
        if not self._count:
            self.begin()
        self._waiting += 1
        grow = self._grow_later()
        try:
            found = await self._idle.get()
        finally:
            self._waiting -= 1
            grow.cancel()
        if isinstance(found, Refusal):
            raise found
        return found

    async def _work(self, process: PreparationProcess, line: bytes) -> Result | Failed:
        try:
            answer = await process.ask(line, self._timeout)
        except BaseException:
            self._count -= 1
            await process.close()
            if self._waiting or not self._count:
                self.begin()
            raise
        self._idle.put_nowait(process)
        return answer

    def _grow_later(self) -> asyncio.TimerHandle:
        """Starts one more process, if calls still wait then. Most calls take milliseconds."""
        grow = lambda: self.begin() if self._waiting and not self._starting else None
        return asyncio.get_running_loop().call_later(_PATIENCE, grow)

    async def _start(self) -> None:
        process = PreparationProcess()
        try:
            await process.start(self._command)
        except BaseException as error:
            self._count -= 1
            await process.close()
            if not isinstance(error, OSError | Refusal | ProcessDied):
                raise
            no_process = f"no process can make the request into tokens: {error}"
            self._refuse_waiting(error if isinstance(error, Refusal) else Refusal(no_process, 503, retry_after=1))
        else:
            self._idle.put_nowait(process)
            self._grow_later()
        finally:
            self._starting -= 1
            self.has_started.set()

    def _refuse_waiting(self, reason: Refusal) -> None:
        """Refuses the calls that wait, if there is no process that could take one later."""
        if not self._count:
            for _ in range(self._waiting):
                self._idle.put_nowait(reason)

    def _task(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # which the call has raised, unless it was cancelled
