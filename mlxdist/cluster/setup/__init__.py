"""`mlxdist config`: which cables join the hosts, addresses for their ends, and the hostfile that says so.

survey.py       what each host says about itself, asked over one ssh connection
thunderbolt.py  Thunderbolt receptacles and what is plugged in there; ports.py network interfaces and services
topology.py     hosts and cables as a graph: mesh, ring, line, what is missing; drawing.py shows it
addresses.py    an address for each end of a cable; ethernet.py the one by which all hosts reach a host
steps.py        commands that set hosts up, and what takes them back; undo.py runs them and remembers that
verify.py       whether each end reaches the other
result.py       the hostfile
install.py      the same Python, mlxdist and MLX on all hosts
command.py      the command line; report.py what it shows
"""

__all__: list[str] = []
