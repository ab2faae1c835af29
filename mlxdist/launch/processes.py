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
                # After the command's name, which may contain anything: the state is the first field, and the start in
                # clock ticks since the boot the twentieth.
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
    # `lstart` is text of the locale: two processes compare it, so both take that of C.
    command = ["ps", "-o", "pid=,state=,lstart=", "-p", wanted]
    lines = subprocess.run(command, stdout=subprocess.PIPE, env={"LC_ALL": "C", "PATH": "/bin:/usr/bin"}, text=True)
    rows = (line.split(None, 2) for line in lines.stdout.splitlines())
    return {int(pid): started.strip() for pid, state, started in rows if not state.startswith("Z")}
