"""`mlxdist doctor` on real hosts: what has been made different on one of them is found, and the others are used."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ssh_hosts import SshHosts, ssh_hosts
from waiting import wait_for

pytestmark = pytest.mark.long

HOSTS = 3


@pytest.fixture(scope="module")
def three(tmp_path_factory) -> SshHosts:
    with ssh_hosts(tmp_path_factory.mktemp("hosts"), count=HOSTS) as found:
        yield found


def doctor(three: SshHosts, *arguments: object, status: int, command: tuple = (), **variables: str) -> dict:
    words = [sys.executable, "-m", "mlxdist", "doctor", "--ssh", three.ssh, "--json", *map(str, arguments)]
    words += ["--", *map(str, command)] if command else []
    done = subprocess.run(
        three.command(*words),
        capture_output=True,
        text=True,
        timeout=180,
        env=os.environ | variables,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == status, f"{done.stdout}\n{done.stderr}"
    return json.loads(done.stdout)


def findings(report: dict, check: str, verdict: str = "") -> list[dict]:
    (found,) = [c["findings"] for c in report["checks"] if c["check"] == check]
    return [finding for finding in found if not verdict or finding["verdict"] == verdict]


def inside(three: SshHosts, number: int) -> int:
    """The process of a host's ssh server."""
    pid = three.servers[number].pid
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


@contextlib.contextmanager
def exporting(three: SshHosts, number: int, **variables: str) -> Iterator[None]:
    """A host whose ssh server sets variables, as the start files of a shell would."""
    configuration = three.directory / f"{three.names[number]}.server"
    before = configuration.read_text()
    words = " ".join(f"{name}={value}" for name, value in variables.items())
    name = next(iter(variables))

    def until_it_says(value: str) -> None:
        os.kill(inside(three, number), signal.SIGHUP)
        ask = three.command(*three.ssh.split(), three.names[number], f'echo "<${name}>"')
        said = lambda: subprocess.run(ask, capture_output=True, text=True, timeout=30).stdout.strip()
        assert wait_for(lambda: said() == f"<{value}>", 20)

    configuration.write_text(f"{before.rstrip()} {words}\n")
    until_it_says(variables[name])
    try:
        yield
    finally:
        configuration.write_text(before)
        until_it_says("")


def hostfile(three: SshHosts, directory: Path, **envs: str) -> Path:
    entries = [{"ssh": name, "ips": [host.address]} for name, host in zip(three.names, three.hosts)]
    path = directory / "hosts.json"
    path.write_text(json.dumps({"envs": [f"{k}={v}" for k, v in envs.items()], "hosts": entries}))
    return path


def test_hosts_that_are_well(three):
    report = doctor(three, "--hosts", ",".join(three.names), status=0)
    assert report["failed"] == [] and report["verdict"] != "fail"
    for check in ("reachable", "python", "versions", "variables", "fast-synch", "clocks", "ports", "correctness"):
        assert [finding["verdict"] for finding in findings(report, check)] in (["ok"], ["ok"] * HOSTS), check
    assert "3 pairs connected" in findings(report, "ports")[0]["what"]
    assert three.hosts[0].interface in findings(report, "interfaces")[0]["what"]
    pairs = {(name, other) for name in three.names for other in three.names if name != other}
    for values in (report["job"]["latency_us"], report["job"]["bandwidth"]):
        assert {(cell["from"], cell["to"]) for cell in values} == pairs and all(cell["value"] > 0 for cell in values)


def test_a_variable_that_one_host_alone_exports(three, tmp_path):
    """As from /etc/zshenv; here the ssh server sets it."""
    with exporting(three, 1, MLX_METAL_FAST_SYNCH="1", OMP_NUM_THREADS="7"):
        report = doctor(three, "--hosts", ",".join(three.names), "--quick", status=1)
        # What the hostfile sets for all ranks is what they have, whatever the hosts say.
        settings = {"MLX_METAL_FAST_SYNCH": "0", "OMP_NUM_THREADS": "1"}
        mended = doctor(three, "--hostfile", hostfile(three, tmp_path, **settings), "--quick", status=0)
    (found,) = findings(report, "fast-synch", "fail")
    assert found["hosts"] == ["node1"] and report["failed"] == ["node1"]
    rows = {row["value"]: row["hosts"] for row in found["differences"][0]["values"]}
    assert rows == {"(not set)": ["node0", "node2"], "1": ["node1"]}
    (found,) = findings(report, "variables", "warn")
    assert found["hosts"] == ["node1"] and found["what"] == "OMP_NUM_THREADS differs"
    assert not findings(mended, "fast-synch", "fail") and not findings(mended, "variables", "warn")


def test_a_script_and_a_model_that_differ_on_one_host(three, tmp_path):
    script, other = tmp_path / "train.py", tmp_path / "other.py"
    script.write_text("print(1)\n")
    other.write_text("print(2)\n")
    model, short = tmp_path / "model", tmp_path / "short"
    for directory in (model, short):
        directory.mkdir()
        (directory / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"x" * 100)
    for there, on in ((other, script), (short, model)):
        enter = ["nsenter", "-t", str(inside(three, 2)), "-m", "-p"]
        subprocess.run([*enter, "mount", "--bind", str(there), str(on)], check=True)
    try:
        command = (sys.executable, script, "--model", model)
        report = doctor(three, "--hosts", ",".join(three.names), "--quick", command=command, status=1)
    finally:
        for on in (script, model):
            subprocess.run([*enter, "umount", str(on)], check=True)
    (found,) = findings(report, "script", "fail")
    assert found["hosts"] == ["node2"] and f"scp {script} node2:{script}" == found["remedy"]
    (found,) = findings(report, "model", "fail")
    assert found["hosts"] == ["node2"] and "1 file" in found["what"] and "model.safetensors" in found["what"]
    assert report["failed"] == ["node2"] and report["job"]["hosts"] == ["node0", "node1"]
    assert findings(report, "correctness", "ok")


def test_two_hosts_that_do_not_reach_each_other(three, tmp_path):
    """One of them is left out of the hostfile that is written, and a job runs on the others."""
    file, output = hostfile(three, tmp_path), tmp_path / "good.json"
    wall = ["ip", "-n", three.hosts[2].namespace, "route"]
    address = f"{three.hosts[1].address}/32"
    subprocess.run([*wall, "add", "unreachable", address], check=True)
    try:
        report = doctor(three, "--hostfile", file, "--exclude-failed", "--output", output, status=0)
    finally:
        subprocess.run([*wall, "delete", "unreachable", address], check=True)
    found = {tuple(finding["hosts"]): finding["what"] for finding in findings(report, "ports", "fail")}
    assert found.keys() == {("node1", "node2"), ("node2", "node1")}
    assert "No route to host" in found["node2", "node1"] and "no response" in found["node1", "node2"]
    assert report["failed"] == ["node2"] and report["job"]["hosts"] == ["node0", "node1"]
    assert [entry["ssh"] for entry in json.loads(output.read_text())["hosts"]] == ["node0", "node1"]


def test_a_host_on_which_jobs_fail(three, tmp_path):
    output = tmp_path / "good.json"
    words = ["--hosts", ",".join(three.names), "--quick", "--exclude-failed", "--output", output]
    queues = {"MLXDIST_BULK_SLOTS": "16", "MLXDIST_BULK_SLOT_BYTES": str(1 << 20)}
    with exporting(three, 1, MLXDIST_SOFT_PROFILE="apple-tb5", **queues):
        report = doctor(three, *words, status=0)
    (found,) = findings(report, "correctness", "fail")
    assert found["hosts"] == ["node1"] and "on this host alone" in found["what"], found
    assert "--include node1 -n 2" in found["remedy"]
    assert [entry["ssh"] for entry in json.loads(output.read_text())["hosts"]] == ["node0", "node2"]


def test_two_hosts_on_which_a_job_fails(three):
    with exporting(three, 2, MLXDIST_BULK_SLOTS="7"):
        report = doctor(three, "--hosts", ",".join(three.names), "--quick", status=1)
    (found,) = findings(report, "correctness", "fail")
    assert found["hosts"] == ["node0", "node2"] and found["is_way"] and "MLXDIST_BULK_SLOTS" in found["what"], found
    assert report["failed"] == ["node2"]


def test_an_unused_address_and_a_host_that_does_not_exist(three, tmp_path):
    entries = [{"ssh": "node0"}, {"ssh": "node1", "ips": ["10.213.77.250"]}, {"ssh": "root@10.213.77.251"}]
    (tmp_path / "hosts.json").write_text(json.dumps(entries))
    report = doctor(three, "--hostfile", tmp_path / "hosts.json", "--quick", status=1)
    (found,) = findings(report, "ports", "fail")
    assert found["hosts"] == ["node0", "node1"] and "10.213.77.250" in found["what"]
    (found,) = findings(report, "reachable", "fail")
    assert found["hosts"] == ["root@10.213.77.251"] and found["remedy"]
    assert report["failed"] == ["node1", "root@10.213.77.251"]


def test_rdma_that_ends_up_without(three, tmp_path):
    rows = [[None, "rdma_en2"], ["rdma_en3", None]]
    entries = [{"ssh": name, "rdma": row} for name, row in zip(three.names, rows)]
    (tmp_path / "hosts.json").write_text(json.dumps(entries))
    report = doctor(three, "--hostfile", tmp_path / "hosts.json", "--quick", status=1)
    assert "rdma_en2" in findings(report, "rdma", "fail")[0]["what"]
    assert report["failed"] == ["node0", "node1"]
