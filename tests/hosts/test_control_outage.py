"""The control network, or that of ssh, goes away while the data path, another network or shared memory, carries on; or
both go."""

import contextlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hosts import PORT, control_network, start_ranks, two_hosts
from launching import LAUNCH
from ssh_hosts import ssh_hosts
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


@pytest.fixture
def over_ssh(tmp_path):
    """Two hosts with a network for data and one for ssh, and a launcher there: both ranks have called a collective."""
    with ssh_hosts(tmp_path, control=True) as nodes:
        words = ["--hosts", ",".join(nodes.names), "--ssh", nodes.ssh, "--env", "MLXDIST_SOFT_TRANSPORT=tcp"]
        command = nodes.command(*LAUNCH, *words, "--", sys.executable, "-c", RANK, "busy", tmp_path / "stop")
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as launcher:
            assert {launcher.stdout.readline() for _ in range(2)} == {"[0 node0] ready\n", "[1 node1] ready\n"}
            yield nodes, launcher


def test_a_job_survives_an_outage_of_the_network_of_ssh(over_ssh, tmp_path):
    """The agents keep the ranks, whose rendezvous is on that network, too; what they print meanwhile comes later."""
    nodes, launcher = over_ssh
    nodes.ends[1].pull_cable()
    late(45)
    nodes.ends[1].plug_cable()
    said = []
    for line in launcher.stderr:
        said.append(line)
        if re.search(r"node1 answers again, after \d\d s", line):
            (tmp_path / "stop").touch()
    assert launcher.wait(60) == 0, said
    assert sorted(launcher.stdout.read().splitlines()) == ["[0 node0] exact", "[1 node1] exact"], said
    assert any("node1 has not answered for 15 s; its ranks are kept for 300 s" in line for line in said), said


def test_a_lost_host_ends_a_job_over_ssh(over_ssh):
    """Its peers notice, long before ssh does."""
    nodes, launcher = over_ssh
    for end in (nodes.hosts[1], nodes.ends[1]):
        end.pull_cable()
    output, errors = launcher.communicate(timeout=150)
    assert launcher.returncode == 1, errors
    assert "[0 node0] mlxdist.PeerLost: rank 1 (node1, pid" in errors, errors
    assert "node1 is silent still: its ranks are ended after 345 s of silence" in errors, errors
