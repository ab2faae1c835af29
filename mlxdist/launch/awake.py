"""A Mac does not sleep while a job runs on it: caffeinate(8) holds a power assertion for as long as a process lives."""

import subprocess
from collections.abc import Mapping

__all__ = ["Awake", "describe"]


class Awake:
    """Keeps a Mac awake until process ``pid`` ends, however it ends. ``error``: why caffeinate could not be started.

    -i: no sleep while the user is idle; -s: none at all on mains power; -w: until that process has ended.
    """

    def __init__(self, pid: int) -> None:
        self.error = ""
        self._process: subprocess.Popen | None = None
        try:
            self._process = subprocess.Popen(
                ["caffeinate", "-is", "-w", str(pid)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is the launcher's: the job may take its time to end
            )
        except OSError as error:
            self.error = error.strerror or str(error)

    def close(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()


def describe(errors: Mapping[str, str], verbose: bool) -> list[str]:
    """Messages about Macs that may fall asleep. ``errors``: by name, why caffeinate did not start there, or ""."""
    kept = [name for name, error in errors.items() if not error]
    lines = [f"{name} may fall asleep during the job: caffeinate: {error}" for name, error in errors.items() if error]
    if kept and verbose:
        lines.append(f"no sleep while the job runs, by caffeinate -is: {', '.join(kept)}")
    return lines
