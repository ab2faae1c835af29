"""The JIT cache: directories for the kernels that MLX compiles at run time, one per rank.

MLX's CPU backend compiles fused operations with the system's C++ compiler into <temporary directory>/mlx, and all
processes share what they find there. While that is cold they race: a rank may load a library that another one has
only half written. So every rank gets a temporary directory of its own, in which `mlx` is a link to a directory that
only this rank of this job uses, and that later jobs inherit: their kernels are compiled already.
"""

import contextlib
import fcntl
import os
import shutil
from pathlib import Path

from mlxdist.base.cache_directory import cache_directory
from mlxdist.base.private_files import make_private_directory, open_private

__all__ = ["JitCache"]

# Jobs that run at the same time use different slots; one more than these starts cold. Tests run 15 at the same time.
SLOTS = 16
# A slot whose ranks have more kernels than this is emptied: programs change, and nothing else ever removes the old.
MAX_FILES = 10_000


class JitCache:
    """A slot of the user's cache, locked until ``close``; or a directory inside the job's, if all slots are taken."""

    def __init__(self, job_directory: Path) -> None:
        self._lock: int | None = None
        self.directory = self._take_slot() or job_directory / "jit"
        self._unfinished = self.directory / "unfinished"
        if self._lock is not None:
            self._remove_unfinished()
            self._unfinished.touch()

    def link(self, temporary_directory: Path, local_rank: int) -> None:
        """Makes `mlx` in a rank's temporary directory point to that rank's kernels."""
        kernels = self.directory / str(local_rank)
        kernels.parent.mkdir(parents=True, exist_ok=True)
        if make_private_directory(kernels):  # else the rank has none from before
            (temporary_directory / "mlx").symlink_to(kernels, target_is_directory=True)

    def pass_on(self) -> tuple[int, ...]:
        """The descriptor that holds the lock: the slot stays taken while a process that inherits it runs."""
        return () if self._lock is None else (self._lock,)

    def close(self, succeeded: bool) -> None:
        """Releases the slot. ``succeeded``: no rank was killed, so every kernel is complete."""
        if self._lock is not None:
            if succeeded:
                self._unfinished.unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None

    def _take_slot(self) -> Path | None:
        # Without a home directory, on a disk that is read-only or full, or a file system without locks: none.
        with contextlib.suppress(OSError, RuntimeError):
            parent = cache_directory() / "jit"
            parent.parent.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            # Ranks load the libraries that they find there: nothing of it may be another user's.
            if not all(make_private_directory(directory) for directory in (parent.parent, parent)):
                return None
            for number in range(SLOTS):
                slot = parent / str(number)
                if not make_private_directory(slot):
                    continue
                lock = open_private(slot / "lock", os.O_RDWR | os.O_CREAT)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    os.close(lock)
                    continue
                self._lock = lock
                return slot
        return None

    def _remove_unfinished(self) -> None:
        """Removes libraries that a killed rank may have written in part: MLX would load them in every later job."""
        # Not Path objects, which take longer to make: there may be thousands of files, at each start of a job.
        files = [os.path.join(parent, name) for parent, _, names in os.walk(self.directory) for name in names]
        if len(files) > MAX_FILES:
            for rank in self.directory.glob("[0-9]*"):
                shutil.rmtree(rank, ignore_errors=True)
        elif self._unfinished.exists():
            since = self._unfinished.stat().st_mtime
            for path in files:
                if os.path.splitext(path)[1] and os.stat(path).st_mtime >= since:  # neither the lock nor the mark
                    os.unlink(path)
