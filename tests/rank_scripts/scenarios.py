"""The group of a rank script, and the functions of the script that a test names. Importing this joins the group.

Ranks that stay import it again for each script.
"""

import sys
from typing import Any

import mlxdist

__all__ = ["group", "rank", "run_scenario", "run_scenarios", "size"]

group = mlxdist.init()
rank, size = group.rank(), group.size()


def run_scenario(script: dict[str, Any]) -> None:
    """Calls the function that the first argument names with the others. ``script``: its ``globals()``.

    Prints "passed", for the fixture `run_scenarios`. Does nothing where another script imports this one.
    """
    if script["__name__"] == "__main__":
        name, *arguments = sys.argv[1:]
        script[name](*arguments)
        print("passed", flush=True)


def run_scenarios(script: dict[str, Any]) -> None:
    """Calls each function that an argument names, as :func:`run_scenario` does."""
    if script["__name__"] == "__main__":
        assert len(sys.argv) > 1, "no scenario is named"
        for name in sys.argv[1:]:
            script[name]()
        print("passed", flush=True)
