"""`mlxdist doctor`: what would go wrong with a job on these hosts, found before it is started.

command.py      the command line
examine.py      asks all hosts at once, each at its own pace, then lets them try each other, then runs a job
facts.py        what a host says of itself; files.py, network.py, gpu.py, rdma.py: the parts of that which take
                longer. They run on the host, called through mlxdist.cluster.ssh
job.py          the job that tries out values and links; its ranks run probe_rank.py
cluster.py      all that is known of all hosts: what the checks look at
checks/         the checks, and the list of them: from what is known to findings, with nothing read or asked there
findings.py     what a check finds
exclude.py      which hosts have failed, and a hostfile without them
report.py       tables and JSON
"""

from .quick import before_launch

__all__ = ["before_launch"]
