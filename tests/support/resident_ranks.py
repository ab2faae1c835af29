"""Ranks that stay: they run scripts of tests/rank_scripts one after the other, so that a test need not start its own.

`python resident_ranks.py SOCKET DIRECTORY` is one of them. A script that ends the process, or breaks the group for
later ones, ends the set; the next test starts another.
"""

import contextlib
import gc
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

TESTS = Path(__file__).parents[1]
START = 60  # seconds


class RanksFailed(Exception):
    """A script has failed on a rank; the text has what all ranks printed."""


class ResidentRanks:
    """A set of ranks, under `mlxdist launch`."""

    def __init__(self, ranks: int, variables: dict[str, str]) -> None:
        self.is_usable = False
        self._directory = Path(tempfile.mkdtemp(prefix="ranks"))
        address = self._directory / "socket"
        with socket.socket(socket.AF_UNIX) as listener, (self._directory / "launcher").open("wb") as output:
            listener.bind(str(address))
            listener.listen(ranks)
            listener.settimeout(START)
            command = [sys.executable, "-m", "mlxdist", "launch", "-n", str(ranks), "--"]
            command += [sys.executable, __file__, str(address), str(self._directory)]
            # In a directory of its own, or other tests would see a job that they have not started.
            variables = variables | {"XDG_RUNTIME_DIR": str(self._directory)}
            self._launcher = subprocess.Popen(
                command, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
            try:
                accepted = [listener.accept()[0] for _ in range(ranks)]
            except TimeoutError:
                raise RanksFailed(f"{ranks} ranks have not started in {START} s:\n{self.close()[1]}") from None
        self._ranks = dict(sorted((int(_line(connection) or -1), connection) for connection in accepted))
        self.is_usable = True

    def run(self, script: Path, arguments: Sequence[str], timeout: float) -> list[str]:
        """What each rank prints. Raises RanksFailed, and ends: an exception, an exit status, or ``timeout`` seconds."""
        job = json.dumps({"script": str(script), "arguments": arguments}).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # of a rank that has died: it does not reply
            for connection in self._ranks.values():
                connection.sendall(job)
        why = self._wait(time.monotonic() + timeout)
        outputs = [(self._directory / str(rank)).read_text(errors="replace") for rank in self._ranks]
        if why:
            self.is_usable = False
            printed = "\n".join(f"rank {rank}:\n{output}" for rank, output in enumerate(outputs))
            _, launcher = self.close()
            raise RanksFailed(f"{why}\n{printed}\n{launcher}")
        return outputs

    def _wait(self, deadline: float) -> str:
        """Why it is a failure; "" if all ranks have ended well."""
        failed, waiting = "", set(self._ranks)
        with selectors.DefaultSelector() as selector:
            for rank, connection in self._ranks.items():
                selector.register(connection, selectors.EVENT_READ, rank)
            while waiting and (left := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    selector.unregister(key.fileobj)
                    waiting.remove(key.data)
                    reply = _line(key.fileobj)
                    if reply not in ("right", "right, and ends"):
                        failed = failed or f"rank {key.data} has failed: {reply or 'its process has ended'}"
                        deadline = min(deadline, time.monotonic() + 10)  # others may wait for it
                    self.is_usable = self.is_usable and reply == "right"
        return failed or (f"ranks {sorted(waiting)} have not ended" if waiting else "")

    def close(self) -> tuple[int, str]:
        """Ends the ranks. Returns the launcher's exit status and what it has printed."""
        for connection in getattr(self, "_ranks", {}).values():
            connection.close()
        try:
            if not self.is_usable:
                self._launcher.send_signal(signal.SIGTERM)
            self._launcher.wait(30)
        except subprocess.TimeoutExpired:
            self._launcher.kill()
            self._launcher.wait()
        self.is_usable = False
        text = (self._directory / "launcher").read_text(errors="replace")
        shutil.rmtree(self._directory, ignore_errors=True)
        return self._launcher.returncode, text


def _line(connection: socket.socket) -> str:
    """What comes up to the end of a line; "" if the other side has gone."""
    found = b""
    while not found.endswith(b"\n"):
        if not (more := connection.recv(1)):
            return ""
        found += more
    return found.decode().rstrip("\n")


def serve(address: str, directory: Path) -> None:
    """One rank, until the other side goes."""
    import mlxdist

    group = mlxdist.init()
    for rank in range(group.size()):  # so that a set that fails before its first script has a file for each
        (directory / str(rank)).touch()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        connection.sendall(f"{group.rank()}\n".encode())
        while job := _line(connection):
            given = json.loads(job)
            with _printing_to(directory / str(group.rank())):
                reply = _run(given["script"], given["arguments"])
            connection.sendall(f"{reply}\n".encode())


def _run(script: str, arguments: list[str]) -> str:
    import mlx.core as mx

    import mlxdist

    try:
        with _as_found():
            sys.argv[:] = [script, *arguments]
            sys.path.insert(0, str(Path(script).parent))
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code:
            return f"exit status {end.code}"
    except BaseException as error:
        traceback.print_exc()
        return type(error).__name__
    try:
        mx.synchronize()
        mx.clear_cache()
        mx.reset_peak_memory()
        mlxdist.barrier()
    except mlxdist.Error:
        return "right, and ends"  # it has broken the group on purpose
    return "right"


@contextlib.contextmanager
def _as_found() -> Iterator[None]:
    """Puts back what a process starts with, and a script may change."""
    import mlx.core as mx

    variables, directory = dict(os.environ), Path.cwd()
    arguments, paths, device = list(sys.argv), list(sys.path), mx.default_device()
    memory = mx.get_memory_limit()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)}
    try:
        with warnings.catch_warnings():
            yield
    finally:
        os.environ.clear()
        os.environ.update(variables)
        os.chdir(directory)
        sys.argv[:], sys.path[:] = arguments, paths
        mx.set_default_device(device)
        mx.set_memory_limit(memory)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            if name != "__main__" and file and Path(file).is_relative_to(TESTS):
                del sys.modules[name]
        gc.collect()


@contextlib.contextmanager
def _printing_to(path: Path) -> Iterator[None]:
    """What is printed within, by C too, is in the file."""
    kept = os.dup(1), os.dup(2)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, before in enumerate(kept, 1):
            os.dup2(before, number)
            os.close(before)


if __name__ == "__main__":
    serve(sys.argv[1], Path(sys.argv[2]))
