"""The hierarchical algorithm between hosts: what it sends from one to another, counted by their interfaces."""

import sys

import pytest
from hosts import several_hosts, start_ranks

pytestmark = pytest.mark.long

PROGRAM = """
import sys
import numpy as np
import mlxdist
operation, count = sys.argv[1], int(sys.argv[2])
group = mlxdist.init()
x = np.ones(count, np.float32)
for _ in range(int(sys.argv[3])):
    getattr(mlxdist, operation)(x)
print(group.algorithm(operation, x.nbytes), group.stats()["retransmissions"])
"""
BYTES = 3 << 19
COUNT = 50
SLACK = 1.15  # headers of TCP and IP, acknowledgements, the start of the job


def received(hosts, ranks, algorithm, operation):
    """Bytes per operation that arrive at a host, at most, with ``ranks`` on each; and how many of them may be messages
    that left again, as those do whose receiver waits for a core."""
    before = [host.received_bytes() for host in hosts]
    each = [host for host in hosts for _ in range(ranks)]
    command = [sys.executable, "-c", PROGRAM, operation, BYTES // 4, COUNT]
    with start_ranks(each, *command, variables={"MLXDIST_ALGO": algorithm}) as started:
        outputs = [rank.communicate(timeout=240)[0] for rank in started]
    assert all(rank.returncode == 0 for rank in started) and algorithm in outputs[0], outputs
    again = sum(int(output.split()[-1]) for output in outputs) * BYTES
    return max(host.received_bytes() - start for host, start in zip(hosts, before)) / COUNT, again / COUNT


@pytest.mark.parametrize("count, ranks", [(2, 2), (2, 4), (3, 2), (4, 2)])
def test_bytes_between_hosts(count, ranks):
    """Each host has one copy of what others have, where the mesh and direct have one for each of its ranks."""
    per_host = {  # H hosts; all_gather has an input of BYTES on each rank
        "all_sum": 2 * (count - 1) / count * BYTES,
        "all_gather": (count - 1) * ranks * BYTES,
        "reduce_scatter": (count - 1) / count * BYTES,
    }
    others = {"all_sum": "mesh", "all_gather": "direct", "reduce_scatter": "direct"}
    with several_hosts(count, late=False) as hosts:
        for operation, expected in per_host.items():
            hierarchical, again = received(hosts, ranks, "hierarchical", operation)
            assert expected <= hierarchical <= SLACK * expected + again, (operation, hierarchical / expected, again)
            other, _ = received(hosts, ranks, others[operation], operation)
            assert other >= 0.95 * ranks * expected, (operation, other / expected)
