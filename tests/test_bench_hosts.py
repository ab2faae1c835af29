"""Benchmarks on hosts that only ssh reaches: what ranks are given and hand back needs no shared file system."""

import json
import subprocess
import sys

import pytest
from ssh_hosts import ssh_hosts

pytestmark = pytest.mark.long
SECONDS = 240


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    with ssh_hosts(tmp_path_factory.mktemp("nodes")) as found:
        entries = [{"ssh": name, "ips": [host.address]} for name, host in zip(found.names, found.hosts)]
        (found.folder / "hosts.json").write_text(json.dumps(entries))
        yield found


def bench(nodes, *arguments: object) -> dict:
    words = [sys.executable, "-m", "mlxdist", "bench", *arguments, "--ssh", nodes.ssh, "--json"]
    finished = subprocess.run(nodes.command(*words), capture_output=True, text=True, timeout=SECONDS)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return json.loads(finished.stdout)


def test_collectives(nodes):
    results = bench(nodes, "collectives", "--hosts", ",".join(nodes.names), "--sizes", "4KiB", "--rounds", "3")
    assert results["ranks"] == 2 and all(case["wrong"] == 0 for case in results["cases"])


def test_the_suite(nodes):
    """Both ways between the two: mlxdist by TCP, and MLX's ring and Open MPI at addresses that nobody had to name."""
    hostfile = nodes.folder / "hosts.json"
    found = bench(nodes, "suite", "--quick", "--hostfile", hostfile, "--only", "sendrecv,all_reduce,ep_transport")
    assert [host["ips"] for host in found["setup"]["hosts"]] == [[host.address] for host in nodes.hosts]
    assert found["backends"]["mlxdist"] == found["backends"]["ring"] == {"absent": None}
    measured = {(case["backend"], case["operation"]) for case in found["cases"]}
    assert {("mlxdist", "sendrecv"), ("ring", "sendrecv"), ("mlxdist", "ep_transport")} <= measured
    assert all(case["verified"] and case["microseconds"]["median"] > 0 for case in found["cases"])
