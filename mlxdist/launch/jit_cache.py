"""The JIT cache: the kernels that MLX compiles at run time, for all jobs of a user.

MLX's CPU backend compiles fused operations with the system's C++ compiler into <temporary directory>/mlx. Every rank
has a temporary directory of its own, in which `mlx` is a link to one directory of the user. A kernel is compiled once:
MLX gives a library its name when it is complete, so that ranks may share them.

MLX's CUDA backend writes kernels under their names, and a rank could read half of one. So each rank of a host with
NVIDIA GPUs has a copy of the user's kernels. A job that succeeds adds its own, unless others run at the same time.
"""

import contextlib
import fcntl
import os
import shutil
from pathlib import Path

from mlxdist.base.cache_directory import cache_directory
from mlxdist.base.private_files import make_private_directory, open_private

__all__ = ["JitCache"]

# A cache with more files is emptied: programs change, and nothing else ever removes the old.
MAX_FILES = 10_000
_PTX = "MLX_PTX_CACHE_DIR"  # MLX's variable


class JitCache:
    """The user's cache, in use until ``close``; or a directory inside the job's, where there cannot be one.

    Args:
        job_directory: the job's, which is removed at its end.
        has_gpus: whether the host has NVIDIA GPUs.
    """

    def __init__(self, job_directory: Path, has_gpus: bool) -> None:
        self._lock: int | None = None
        self.directory = self._of_user() or job_directory / "jit"
        self._of_ranks = job_directory / "ptx" if has_gpus else None

    def link(self, temporary_directory: Path, local_rank: int) -> dict[str, str]:
        """Makes `mlx` in a rank's temporary directory point to the kernels. Returns the rank's variables."""
        self.directory.mkdir(exist_ok=True)
        (temporary_directory / "mlx").symlink_to(self.directory, target_is_directory=True)
        if self._of_ranks is None:
            return {}
        own = self._of_ranks / str(local_rank)
        own.parent.mkdir(exist_ok=True)
        if (self.directory / "ptx").is_dir():
            shutil.copytree(self.directory / "ptx", own)
        return {_PTX: str(own)}

    def keep(self) -> None:
        """Keeps what the ranks have compiled for GPUs, once they have ended, none by a signal: all is complete then."""
        if self._lock is None or self._of_ranks is None or not self._is_alone():
            return
        try:
            for own in self._of_ranks.glob("*"):
                shutil.copytree(own, self.directory / "ptx", dirs_exist_ok=True)
        except OSError:  # the disk is full: half of a kernel would stay, and the job has succeeded all the same
            shutil.rmtree(self.directory / "ptx", ignore_errors=True)

    def pass_on(self) -> tuple[int, ...]:
        """The descriptor that holds the lock: the cache is in use while a process that inherits it runs."""
        return () if self._lock is None else (self._lock,)

    def close(self) -> None:
        """Releases the cache."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _of_user(self) -> Path | None:
        # Without a home directory, on a disk that is read-only or full, or a file system without locks: none.
        with contextlib.suppress(OSError, RuntimeError):
            found = cache_directory() / "jit"
            found.parent.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            # Ranks load the libraries that they find there: nothing of it may be another user's.
            if not all(make_private_directory(directory) for directory in (found.parent, found)):
                return None
            self._lock = open_private(found / "lock", os.O_RDWR | os.O_CREAT)
            try:
                if self._is_alone() and sum(len(files) for _, _, files in os.walk(found)) > MAX_FILES:
                    for kernels in found.glob("*/"):
                        shutil.rmtree(kernels, ignore_errors=True)
                fcntl.flock(self._lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                self.close()
                return None
            return found
        return None

    def _is_alone(self) -> bool:
        """Whether no other job uses the cache; none begins to before the lock is shared or closed."""
        assert self._lock is not None
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False
