"""Power and heat of this rank's Mac, for `mlxdist top`."""

import shutil
import time

from mlxdist.cluster.facts.power import Power, power_settings, speed_limit
from mlxdist.runtime.internal_thread import InternalThread

__all__ = ["PowerWatch", "read_power"]

_PERIOD_SECONDS = 10.0
_COMMAND_SECONDS = 4.0  # two of them within a period


class PowerWatch:
    """Reads in the background, while it is requested: pmset takes some ten milliseconds, and a status must not wait."""

    def __init__(self) -> None:
        self._last: Power | None = None
        self._due = self._expires = 0.0  # by the monotonic clock

    def last(self) -> Power | None:
        """The last reading; starts another one where that is some seconds old. None where there is none of the last
        periods: one that a request of long ago has started says nothing of now."""
        now = time.monotonic()
        if now >= self._due:
            self._due = now + _PERIOD_SECONDS
            if pmset := shutil.which("pmset"):  # which only macOS has
                InternalThread(target=self._read, args=[pmset], name="mlxdist power", daemon=True).start()
        return self._last if now < self._expires else None

    def _read(self, pmset: str) -> None:
        self._last, self._expires = read_power(pmset), time.monotonic() + 3 * _PERIOD_SECONDS


def read_power(pmset: str) -> Power | None:
    """The power by this command; None where it fails, or prints no settings."""
    import subprocess  # seldom needed, and `import mlxdist` is fast

    texts = []
    for arguments in (["-g"], ["-g", "therm"]):
        try:
            # close_fds=False: a copy of a process with devices and a GPU is not made (posix_spawn).
            done = subprocess.run(
                [pmset, *arguments], stdin=subprocess.DEVNULL, capture_output=True, close_fds=False,
                timeout=_COMMAND_SECONDS,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired):
            return None
        texts.append(done.stdout.decode(errors="replace"))
    settings = power_settings(texts[0])
    return Power.of(settings, speed_limit(texts[1])) if settings else None
