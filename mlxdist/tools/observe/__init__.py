"""Shows the state of the ranks of a job: `mlxdist top`, `mlxdist dump` and `mlxdist watch`.

    collect.py      flight records from rank 0's rendezvous, or from each rank by signal and file
    stack_text.py   the stacks of all ranks as text
    top.py          the state of all ranks, repeatedly; top_table.py: as a table
    job_watch.py    what happens to a job and its restarts; view_events.py: the events that a view has
    stall_watch.py  ends a job that stands still
    trace.py        the records as a trace for Perfetto

It needs neither MLX nor the compiled half.
"""

__all__: list[str] = []
