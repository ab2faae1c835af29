"""Identifies processes by number and start time: systems reuse numbers, but not with the same start time."""

import sys
from collections.abc import Iterable

__all__ = ["start_times"]


def start_times(pids: Iterable[int]) -> dict[int, str]:
    """The start time of each process, as text to compare. Processes that have ended, and zombies, are left out."""
    return _from_proc(pids) if sys.platform == "linux" else _from_ps(pids)


def _from_proc(pids: Iterable[int]) -> dict[int, str]:
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    started = {}
    for pid in pids:
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                # The command's name may contain anything, so fields count from its end: the first is the state, the
                # twentieth the start in clock ticks since the boot.
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        if fields[0] not in (b"Z", b"X"):
            started[pid] = f"{boot} {int(fields[19])}"
    return started


def _from_ps(pids: Iterable[int]) -> dict[int, str]:
    import subprocess

    wanted = ",".join(map(str, pids))
    if not wanted:
        return {}
    # `lstart` depends on the locale, and two processes compare it: both use the locale C.
    command = ["ps", "-o", "pid=,state=,lstart=", "-p", wanted]
    lines = subprocess.run(command, stdout=subprocess.PIPE, env={"LC_ALL": "C", "PATH": "/bin:/usr/bin"}, text=True)
    rows = (line.split(None, 2) for line in lines.stdout.splitlines())
    return {int(pid): started.strip() for pid, state, started in rows if not state.startswith("Z")}
