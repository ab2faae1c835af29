"""One rank of test_breakpoint.py: stops in the debugger, which reads what the test types."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from waiting import late as late  # for commands of the debugger

import mlxdist

group = mlxdist.init()
rank = group.rank()


def step(x: int) -> int:
    mlxdist.breakpoint(1)
    group.timeout = None
    y = x + 1
    mlxdist.breakpoint(0)
    return y


def differing() -> None:
    try:
        mlxdist.breakpoint(rank)
    except mlxdist.Mismatch as error:
        assert str(error) == "breakpoint: ranks 0 to 1 name ranks 0, 1", error
    try:
        mlxdist.breakpoint(2)
    except mlxdist.InvalidArgument as error:
        assert str(error) == "breakpoint: rank is 2, but the ranks are 0 to 1", error


if "differing" in sys.argv:
    differing()
if "short" in sys.argv:
    group.barrier()
    group.timeout = 2
print("result", step(10 * rank), flush=True)
group.barrier()
