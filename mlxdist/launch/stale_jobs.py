"""Removes leftovers of jobs whose launcher and reaper were both killed (pkill -9 -f mlxdist), at the next start.

Only leftovers that provably belong to such a job: no process holds its lock, so none supervises it; the ranks are
processes that carry its random name in their environment, or lead a recorded group and started at the recorded time.
A rank's child that has left its group and has cleared its environment is not found; a directory on a file system
without locks is left alone. So is the job in which this launcher itself runs.
"""

import fcntl
import os
import shutil
import time
from pathlib import Path

from .jobs import LAUNCHER, Job, read_job
from .reaper import AFTER_TERM, Reaper
from .runtime_directory import runtime_directory, try_lock

__all__ = ["KEPT", "remove_stale_jobs"]

# Flight records of this many failed jobs are kept.
KEPT = 10
# A launcher needs milliseconds to prepare its directory; one that was killed meanwhile leaves it.
HALF_MADE = 3600.0


def remove_stale_jobs() -> list[str]:
    """Ends processes of jobs whose launcher was killed, and removes their directories. Returns messages about that.

    Raises:
        ResourceError: there is no place for job directories.
    """
    runtime = runtime_directory()
    done = []
    ended = []
    for name in os.listdir(runtime):
        directory = runtime / name
        if name.startswith("."):
            _remove_half_made(directory)
        elif name.endswith(LAUNCHER):
            _remove_launcher(directory)
        elif (directory / "job.json").exists():
            if not _is_around_us(name) and (text := _clean_up(name, directory)):
                done.append(text)
        elif not _remove_empty(directory):
            ended.append(directory)
    for directory in sorted(ended, key=_modified)[:-KEPT]:
        shutil.rmtree(directory, ignore_errors=True)
    return done


def _clean_up(job: str, directory: Path) -> str | None:
    lock = try_lock(directory, fcntl.LOCK_EX)
    if lock is None:
        return None
    try:
        record = read_job(directory)
        if record is None or not _is_plausible(record):
            return None
        reaper = Reaper(job, record.temporary, str(directory), AFTER_TERM)
        for pid in record.pids.values():
            reaper.take(f"+{pid}")
        ended = reaper.finish()
    finally:
        os.close(lock)
    ranks = f" {ended} processes of it were still running and were ended." if ended else ""
    return f"cleaned up after job {job}, whose launcher (pid {record.launcher}) was killed.{ranks}"


def _remove_launcher(directory: Path) -> None:
    """Removes a launcher's directory, which is about no other process. On other hosts, agents end the ranks."""
    lock = try_lock(directory, fcntl.LOCK_EX)
    if lock is not None:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)


def _is_plausible(job: Job) -> bool:
    """Whether a directory was made by a launcher. Nothing else is ever removed."""
    temporary = Path(job.temporary)
    return temporary.is_absolute() and temporary.name.startswith("mlxdist-")


def _is_around_us(job: str) -> bool:
    ours = os.environ.get("MLXDIST_JOB", "")
    return ours == job or ours.startswith(f"{job}.")


def _remove_empty(directory: Path) -> bool:
    """Removes a directory unless it has recordings. Returns whether it has none."""
    for empty in (directory / "flight", directory):
        try:
            empty.rmdir()
        except OSError:
            continue
    return not directory.exists()


def _remove_half_made(directory: Path) -> None:
    if time.time() - _modified(directory) > HALF_MADE:
        shutil.rmtree(directory, ignore_errors=True)


def _modified(directory: Path) -> float:
    try:
        return directory.stat().st_mtime
    except OSError:  # removed by another launcher
        return time.time()
