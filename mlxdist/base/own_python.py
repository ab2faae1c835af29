"""The commands of processes that run code of mlxdist: helpers, agents on other hosts, ranks of benchmarks and doctor.

Python puts the current directory in front of everything that it imports for -m and -c. Where others may write there, a
`typing.py` of theirs would run as this user: -P leaves the directory out. What the user has set stays in force, such as
PYTHONPATH (where mlxdist itself may be installed) and the user's site-packages; -I would drop both. An entry of
PYTHONPATH that is empty, or no absolute path, is the current directory by the user's own word.

Programs of the user, which `mlxdist launch` runs, have the import path that Python gives them.
"""

import sys

__all__ = ["own_code", "own_module"]


def own_module(module: str, *arguments: str, python: str = "") -> list[str]:
    """Runs a module of mlxdist. ``python``: that of another host, or empty for the one that runs this."""
    return [python or sys.executable, "-P", "-m", module, *arguments]


def own_code(code: str, *arguments: str) -> list[str]:
    """Runs a few lines of ours."""
    return [sys.executable, "-P", "-c", code, *arguments]
