"""The name of a job on a command line: the full name, or a beginning that only one running job has."""

from collections.abc import Mapping, Sequence
from typing import Any

import click

from mlxdist.base.errors import InvalidArgument

__all__ = ["JOB_NAME", "full_name"]


class _JobName(click.ParamType):
    name = "job"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> str:
        if not value:  # every name begins with nothing: the variable of a script that was never set
            self.fail("the name is empty; `mlxdist ps` lists the jobs", parameter, context)
        return value


JOB_NAME = _JobName()


def full_name(name: str | None, running: Mapping[str, Sequence[str]], where: str) -> str:
    """The name of the running job that ``name`` is or begins, if it is the only one. None: the only job at all.

    ``running``: the names of the running jobs, with the command of each.

    Raises:
        InvalidArgument: there is no such job, or more than one.
    """
    if name is not None and name in running:
        return name
    found = [known for known in sorted(running) if name is None or (name and known.startswith(name))]
    if len(found) == 1:
        return found[0]
    which = "; ".join(f"{known} ({' '.join(running[known])[:60]})" for known in found or sorted(running)) or "none"
    called = "" if name is None else f" {name!r}"
    problem = f"job{called} could be any of" if found else f"there is no job{called} {where}; running are"
    raise InvalidArgument(f"{problem}: {which}")
