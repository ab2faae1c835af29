"""Benchmarks on hosts that only ssh reaches: what ranks are given and hand back needs no shared file system."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from ssh_hosts import ssh_hosts

pytestmark = pytest.mark.long
SECONDS = 240
SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    with ssh_hosts(tmp_path_factory.mktemp("nodes")) as found:
        entries = [{"ssh": name, "ips": [host.address]} for name, host in zip(found.names, found.hosts)]
        (found.directory / "hosts.json").write_text(json.dumps(entries))
        yield found


def bench(nodes, *arguments: object) -> dict:
    words = [sys.executable, "-m", "mlxdist", "bench", *arguments, "--ssh", nodes.ssh, "--json"]
    finished = subprocess.run(nodes.command(*words), capture_output=True, text=True, timeout=SECONDS)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return json.loads(finished.stdout)


def test_collectives(nodes):
    results = bench(nodes, "collectives", "--hosts", ",".join(nodes.names), "--sizes", "4KiB", "--repeats", "3")
    assert results["setup"]["ranks"] == 2 and all(case["wrong"] == 0 for case in results["cases"])


def test_the_suite(nodes):
    """Both directions: mlxdist by TCP, MLX's ring and Open MPI at addresses that the user need not give."""
    hostfile = nodes.directory / "hosts.json"
    found = bench(nodes, "suite", "--quick", "--hostfile", hostfile, "--only", "sendrecv,all_reduce,ep_transport")
    assert [host["ips"] for host in found["setup"]["hosts"]] == [[host.address] for host in nodes.hosts]
    assert not {"mlxdist", "ring"} & {entry["variant"] for entry in found["absent"] if "case" not in entry}
    measured = {(result["variant"], result["case"]["operation"]) for result in found["cases"]}
    assert {("mlxdist", "sendrecv"), ("ring", "sendrecv"), ("mlxdist", "ep_transport")} <= measured
    assert all(result["wrong"] == 0 and result["microseconds"]["median"] > 0 for result in found["cases"])


def test_the_scripts_for_two_nodes(nodes, tmp_path):
    """A run, and one that is compared with it."""
    on = ["--node0", nodes.names[0], "--node1", nodes.names[1], "--ssh", nodes.ssh, "--results", tmp_path, "--quick"]
    on += ["--node0-ip", nodes.hosts[0].address, "--node1-ip", nodes.hosts[1].address]

    def run(script: str, *arguments: object) -> subprocess.CompletedProcess:
        words = nodes.command("bash", SCRIPTS / script, *on, *arguments)
        finished = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS)
        assert finished.returncode == 0, finished.stdout + finished.stderr
        return finished

    run("bench_2node.sh", "--only", "ep_transport", "--backends", "mlxdist")
    (first,) = tmp_path.glob("bench-2node-*")
    assert {path.name for path in first.iterdir()} == {"suite.json", "table.txt", "report.html"}
    run("compare_2node.sh", "--ep-only", "--mlxdist-only", "--baseline", first / "suite.json")
    (second,) = tmp_path.glob("compare-2node-*")
    assert "ep_transport" in (first / "table.txt").read_text() and "B/A" in (second / "compare.txt").read_text()
    cases = json.loads((second / "suite.json").read_text())["cases"]
    assert {(result["case"]["operation"], result["variant"]) for result in cases} == {
        ("ep_transport", "mlxdist"),
        ("ep_pipeline", "mlxdist"),
    }
