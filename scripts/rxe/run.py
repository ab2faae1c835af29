#!/usr/bin/env python3
"""Runs a command in a virtual machine with two soft-RoCE devices: run.py 'ibv_devinfo -v'. See docs/soft-roce.md.

Without a command: says whether the machine can be had here, and fetches what it needs.
"""

from __future__ import annotations

import argparse
import sys

from machine import Machine, MachineError, Unavailable, accelerator
from packages import boot_files


def main() -> int | str:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="?", help="of bash; what it writes outside /exchange is forgotten")
    parser.add_argument("--seconds", type=float, default=600, help="time limit of the command (%(default)s)")
    parser.add_argument("--loss", type=float, default=0, help="percent of packets that are lost (none)")
    parser.add_argument("--unpinned", action="store_true", help="packets may overtake each other")
    arguments = parser.parse_args()
    try:
        if arguments.command is None:
            kernel, _ = boot_files()
            print(f"{kernel.name}, run by {accelerator()}")
            return 0
        with Machine() as machine:
            machine.pin(not arguments.unpinned)
            machine.lose(arguments.loss)
            result = machine.run(arguments.command, arguments.seconds)
    except (MachineError, Unavailable) as error:
        return f"run.py: {error}"
    print(result.output, end="")
    return result.status


if __name__ == "__main__":
    sys.exit(main())
