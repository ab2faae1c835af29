"""Has the output of pmset on Macs, and installs a pmset for PATH that prints it."""

import stat
from pathlib import Path

__all__ = ["COOL", "HOT", "SYNTHETIC_PMSET", "calls_of", "install_pmset"]

# Written by hand after descriptions of what these commands print; no Mac was asked.
SYNTHETIC_PMSET = """System-wide power settings:
 SleepDisabled		0
Currently in use:
 standby              0
 Sleep On Power Button 1
 disksleep            10
 sleep                1 (sleep prevented by powerd, coreaudiod)
 displaysleep         10
"""
# `pmset -g therm` of an M1 Pro (exelban/stats#749), and of a Mac under load (yujitach/MenuMeters#158).
COOL = """Note: No thermal warning level has been recorded
Note: No performance warning level has been recorded
Note: No CPU power status has been recorded
"""
HOT = """2020-06-26 12:30:37 +0200 CPU Power notify
\tCPU_Scheduler_Limit \t= 40
\tCPU_Available_CPUs \t= 8
\tCPU_Speed_Limit \t= 28
"""


def install_pmset(directory: Path, settings: str, heat: str) -> None:
    """Writes a pmset that prints ``heat`` for `pmset -g therm`, else ``settings``, and lists its calls in a file."""
    for name, text in (("settings", settings), ("heat", heat)):
        (directory / name).write_text(text)
    command = directory / "pmset"
    command.write_text(
        f'#!/bin/sh\necho "$*" >> "{directory}/calls"\n'
        f'if [ "$2" = therm ]; then cat "{directory}/heat"; else cat "{directory}/settings"; fi\n'
    )
    command.chmod(command.stat().st_mode | stat.S_IXUSR)


def calls_of(directory: Path) -> list[str]:
    """The arguments of each call of that pmset."""
    path = directory / "calls"
    return path.read_text().splitlines() if path.exists() else []
