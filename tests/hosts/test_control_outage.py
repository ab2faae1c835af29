"""The control network goes away while the data path, another network or shared memory, carries on; or both go."""

import contextlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hosts import PORT, control_network, start_ranks, two_hosts
from waiting import late

pytestmark = pytest.mark.long

PROXY = Path(__file__).parents[1] / "support" / "proxy.py"

# The program of both ranks, until a file exists: "busy" calls collectives, "idle" calls none before the end.
RANK = """
import os, sys, time
import numpy as np
import mlxdist
what, stop = sys.argv[1:]
group = mlxdist.init()
x = np.arange(10_000, dtype=np.int64)
count = 0
def sums():
    global count
    count += 1
    assert (mlxdist.all_sum(x + count) == 2 * (x + count)).all(), count
sums()
print("ready", flush=True)
while what == "idle" and not os.path.exists(stop):
    time.sleep(0.1)
while what == "busy" and mlxdist.broadcast(np.array([not os.path.exists(stop)]))[0]:
    sums()
sums()
mlxdist.finalize()
print("exact", flush=True)
"""


@pytest.fixture
def networks():
    """Two hosts on two networks: each host's ends of the data network and of the control network."""
    with two_hosts(late=False) as data, control_network(data) as control:
        yield data, control


@contextlib.contextmanager
def started(control, what, stop, transport):
    """Both ranks, which have called a collective. By shared memory they are on one host, and the other has a proxy."""
    variables = {"MLXDIST_SOFT_TRANSPORT": transport, "MLXDIST_FLIGHT_DIR": "none"}
    with contextlib.ExitStack() as undo:
        of_ranks, hosts = [{}, {}], control
        if transport == "shm":
            hosts = (control[0], control[0])
            words = [sys.executable, PROXY, control[1].address, PORT, control[0].address, PORT]
            proxy = undo.enter_context(subprocess.Popen(control[1].command(*words), stdout=subprocess.PIPE, text=True))
            undo.callback(proxy.kill)
            assert proxy.stdout.readline() == "ready\n"
            of_ranks[1] = {"MLXDIST_RENDEZVOUS": f"{control[1].address}:{PORT}"}
        command = [sys.executable, "-c", RANK, what, stop]
        ranks = undo.enter_context(start_ranks(hosts, *command, variables=variables, of_ranks=of_ranks))
        for rank in ranks:
            assert "ready\n" in iter(rank.stdout.readline, "")
        yield ranks


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("what", ["busy", "idle"])
@pytest.mark.parametrize("seconds", [10, 45])
def test_a_job_survives_an_outage_of_the_control_network(networks, tmp_path, seconds, what, transport):
    _, control = networks
    with started(control, what, tmp_path / "stop", transport) as ranks:
        control[1].pull_cable()
        late(seconds)
        control[1].plug_cable()
        (tmp_path / "stop").touch()
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    for number, (rank, output) in enumerate(zip(ranks, outputs)):
        assert rank.returncode == 0 and output.endswith("exact\n"), output
        cut = len(re.findall(rf"warn rendezvous: the control connection to rank {1 - number} .* is cut after", output))
        back = len(re.findall(rf"warn rendezvous: rank {1 - number} .* is connected again, after \d+ s", output))
        assert cut == back == (seconds > 30), output


@pytest.mark.parametrize("what", ["busy", "idle"])
def test_a_host_that_is_silent_on_both_networks_is_lost(networks, tmp_path, what):
    """The deadline for the control connection alone finds it, as where there is no data path: no second one follows."""
    data, control = networks
    with started(control, what, tmp_path / "stop", "tcp") as ranks:
        for end in (data[1], control[1]):
            end.pull_cable()
        late(40)
        (tmp_path / "stop").touch()
        outputs = [rank.communicate(timeout=60)[0] for rank in ranks]
    for number, (rank, output) in enumerate(zip(ranks, outputs)):
        lost = re.search(
            rf"PeerLost: rank {1 - number} .* has been silent for (\d+) s on its control connection and (\d+) s on the "
            "data path",
            output,
        )
        assert rank.returncode != 0 and lost, output
        assert 30 <= int(lost[2]) <= int(lost[1]) < 50, output
        assert "has died" not in output
