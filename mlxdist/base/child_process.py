"""The commands of processes that run code of mlxdist: helpers, agents on other hosts, ranks of benchmarks and doctor.

Python puts the current directory in front of its import path for -m and -c. Where other users may write there, their
`typing.py` would run as this user: -P leaves the directory out. The user's own settings stay in force, such as
PYTHONPATH (where mlxdist itself may be installed) and the user's site-packages; -I would drop both. An entry of
PYTHONPATH that is empty, or no absolute path, is the current directory by the user's choice.

Programs of the user, which `mlxdist launch` runs, have the import path that Python gives them.
"""

import sys

__all__ = ["code_command", "module_command"]


def module_command(module: str, *arguments: str, python: str = "") -> list[str]:
    """The command that runs a module of mlxdist. ``python``: the interpreter; empty for this process's own."""
    return [python or sys.executable, "-P", "-m", module, *arguments]


def code_command(code: str, *arguments: str, python: str = "") -> list[str]:
    """The command that runs a few lines of mlxdist's own code. ``python``: see `module_command`."""
    return [python or sys.executable, "-P", "-c", code, *arguments]
