"""A peer that TCP cannot reach, though the rendezvous can: a warning says why, and so does the error."""

import re
import subprocess
import sys

import pytest
from hosts import start_ranks, two_hosts

PROGRAM = """
import mlxdist, numpy as np
mlxdist.init()
try:
    mlxdist.all_sum(np.ones(3))
except mlxdist.Timeout as error:
    print("Timeout:", error, flush=True)
"""


@pytest.fixture
def hosts():
    """The rendezvous goes by IPv6; the software provider's addresses are IPv4, and host 0 has no route to host 1's."""
    with two_hosts(late=False) as pair:
        commands = [
            pair[host].command("ip", "address", "add", f"fd00::{host + 1}/64", "dev", pair[host].interface, "nodad")
            for host in (0, 1)
        ]
        commands.append(pair[0].command("ip", "route", "add", "unreachable", pair[1].address))
        for command in commands:
            added = subprocess.run(command, capture_output=True, text=True, timeout=30)
            if "address" in command and added.returncode:
                pytest.skip(f"this machine has no IPv6: {added.stderr}")
            assert added.returncode == 0, added.stderr
        yield pair


def test_no_route(hosts):
    job = {"MLXDIST_RENDEZVOUS": "[fd00::1]:29517", "MLXDIST_SOFT_TRANSPORT": "tcp", "MLXDIST_FLIGHT_DIR": "none"}
    of_ranks = [{"MLXDIST_TIMEOUT": seconds} for seconds in ("2", "30")]
    with start_ranks(hosts, sys.executable, "-c", PROGRAM, variables=job, of_ranks=of_ranks) as started:
        outputs = [rank.communicate(timeout=60)[0] for rank in started]
    cause = "connecting to rank 1 by TCP fails: No route to host: no route leads to the peer's address"
    assert re.search(rf"warn connection: rank 0 on \S+: {cause}", outputs[0]), outputs
    assert outputs[0].index("warn connection") < outputs[0].index("Timeout: "), outputs
    assert all(re.search(rf"Timeout: rank 0 waited .* in all_sum .*; {cause}", output) for output in outputs), outputs
