"""The state of a job's ranks, from the flight records that rank 0 forwards to observers.

    stragglers.py   which ranks the others wait for
    stack_groups.py the Python stacks of all ranks, equal ones once
    progress.py     for how long no rank has gone on
    clocks.py       one clock for the records of several hosts
    memory.py       what the ranks take of each host's memory
    view.py         the state of all ranks at one moment

It needs neither MLX nor the compiled half.
"""

__all__: list[str] = []
