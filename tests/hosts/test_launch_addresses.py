"""Where the ranks of a job on several hosts find rank 0: at addresses that mean the same everywhere, also of IPv6."""

import socket
import subprocess
import sys

import pytest
from launching import LAUNCH, RANK, nothing_left  # noqa: F401  (nothing_left is a fixture of every test)
from ssh_hosts import ssh_hosts

from mlxdist.base.errors import ResourceError
from mlxdist.launch.hosts import address_for_launcher, address_for_others

NAMES = ["nowhere.invalid"] * 2
REACHED = ["10.0.0.1", "5000", "10.0.0.2", "22"]  # SSH_CONNECTION
REACHED_BY_6 = ["fd00::1", "5000", "fd00::2", "22"]
LINK_LOCAL = ["fe80::1%en0", "5000", "FE80::2%en0", "22"]


@pytest.mark.parametrize(
    "connections, address",
    [
        ([REACHED, []], "10.0.0.2"),
        ([REACHED_BY_6, REACHED], "fd00::2"),
        ([[], REACHED], "10.0.0.1"),
        ([[], LINK_LOCAL, REACHED], "10.0.0.1"),
        ([[], []], "127.0.0.1"),
    ],
)
def test_the_address_that_ssh_has_used(connections, address):
    assert address_for_others(NAMES, connections) == address


@pytest.mark.parametrize("connections", [[LINK_LOCAL, REACHED], [[], LINK_LOCAL]])
def test_a_link_local_address_is_not_given_to_others(connections):
    """It goes with an interface, whose name is that host's own. An IPv4 address of its name does."""
    with pytest.raises(ResourceError, match='has reached nowhere.invalid by a link-local .*: give "ips" of that host'):
        address_for_others(NAMES, connections)
    assert address_for_others(["nowhere.invalid", "10.0.0.9"], connections) == "10.0.0.9"
    with pytest.raises(ResourceError):
        address_for_others(["localhost", "a" * 64], connections)


@pytest.mark.parametrize(
    "ips, connection, address",
    [
        ((), REACHED, "10.0.0.2"),
        (("192.168.5.1",), REACHED, "10.0.0.2"),  # Thunderbolt between the hosts, which the launcher is not in
        (("192.168.5.1", "10.0.0.9"), LINK_LOCAL, "192.168.5.1"),
        (("192.168.5.1",), [], "192.168.5.1"),  # an --ssh that is no ssh
        ((), [], "127.0.0.1"),
    ],
)
def test_the_address_at_which_the_launcher_reaches_rank_0(ips, connection, address):
    assert address_for_launcher(ips, NAMES, connection) == address


def test_the_launcher_needs_an_address_that_leads_somewhere():
    with pytest.raises(ResourceError, match='give "ips" of that host in the hostfile'):
        address_for_launcher((), NAMES, LINK_LOCAL)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    with ssh_hosts(tmp_path_factory.mktemp("ssh")) as both:
        for number, host in enumerate(both.hosts, 1):
            add = ["ip", "-n", host.namespace, "addr", "add", f"fd00:77::{number}/64", "dev", host.interface, "nodad"]
            added = subprocess.run(add, capture_output=True, text=True)
            if added.returncode:
                pytest.skip(f"no IPv6 here: {added.stderr.strip()}")
        yield both


@pytest.mark.long
@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
@pytest.mark.parametrize("hosts", ["node1,localhost", "localhost,node1"])
def test_ssh_by_ipv6(nodes, hosts):
    """The first host is reached by it, or stands beside the launcher and has reached the other by it."""
    program = "import mlxdist, numpy\nprint(mlxdist.all_sum(numpy.ones(1)), os.environ['MLXDIST_RENDEZVOUS'])"
    options = ["--hosts", hosts, "--ssh", f"{nodes.ssh} -o HostName=fd00:77::2", "--env", "MLXDIST_SOFT_TRANSPORT=tcp"]
    command = nodes.command(*LAUNCH, *options, "--", sys.executable, "-c", RANK + program)
    job = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    address = "fd00:77::2" if hosts.startswith("node1") else "fd00:77::1"
    assert job.returncode == 0 and job.stdout.count(f"[2.] [{address}]:") == 2, job.stdout + job.stderr
