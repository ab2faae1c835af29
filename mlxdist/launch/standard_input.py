"""The launcher's standard input, handed on to rank 0 where that is at the other end of a connection."""

import os
import threading
from typing import Protocol

__all__ = ["StandardInput"]

_READ_BYTES = 1 << 16


def _is_another_s_terminal() -> bool:
    """Whether reading would stop this process: it runs in the background of a shell."""
    return os.isatty(0) and os.tcgetpgrp(0) != os.getpgrp()


class _Reader(Protocol):
    def input(self, data: bytes) -> None: ...


class StandardInput:
    """Reads in a thread of its own, for as long as the launcher runs: a job that is started again goes on reading."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._job: _Reader | None = None
        self._thread = threading.Thread(target=self._run, name="mlxdist input", daemon=True)

    def feed(self, job: _Reader | None) -> None:
        """From now on what is read is for ``job``."""
        with self._changed:
            self._job = job
            self._changed.notify_all()
        if self._thread.ident is None and job is not None:
            self._thread.start()

    def _run(self) -> None:
        while True:
            data = b"" if _is_another_s_terminal() else os.read(0, _READ_BYTES)
            with self._changed:
                self._changed.wait_for(lambda: self._job is not None)
                job = self._job
            job.input(data)
            if not data:
                return
