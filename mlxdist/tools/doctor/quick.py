"""`mlxdist launch --preflight`: the checks that take seconds, before the job."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlxdist.cluster.hostfile.options import HostSelection

__all__ = ["before_launch"]


def before_launch(
    chosen: HostSelection, command: Sequence[str], *, folder: str = "", variables: Mapping[str, str] | None = None
) -> int:
    """Checks the hosts for this command. Prints what is not well, and one line; 0 if the job may be started.

    Args:
        folder: where the ranks will run; this one if empty.
        variables: what is set for all ranks besides the hostfile's and this shell's: --env.
    """
    from mlxdist.cli.doctor import diagnose, question_of

    from .findings import Verdict
    from .report import print_problems

    question = question_of(chosen, command, folder=folder or os.getcwd(), variables=variables or {}, quick=True)
    cluster, results = diagnose(chosen, question)
    print_problems(cluster, results, sys.stderr)
    return int(any(result.verdict is Verdict.FAIL for result in results))
