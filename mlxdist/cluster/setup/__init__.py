"""`mlxdist config`: the cables between hosts, addresses for their ends, and the hostfile with both.

configure.py    the steps of the command in their order; facts come from cluster/facts, the graph from cluster/topology
addresses.py    an address for each end of a cable; ethernet.py the one by which all hosts reach a host
steps.py        commands that set hosts up, and their inverses; undo.py runs them and records these
verify.py       whether each end reaches the other
make_hostfile.py    the hostfile
report.py       what is shown
install.py      the same Python, mlxdist and MLX on all hosts
"""

__all__: list[str] = []
