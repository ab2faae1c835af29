"""`mlxdist launch --record`: what a job ran with on each host, as a file that another run can be compared with.

host.py         what a host says about itself; it runs there
write.py        the records of all hosts of a job, written before it starts
difference.py   what differs between records: `mlxdist record diff`
"""

__all__: list[str] = []
