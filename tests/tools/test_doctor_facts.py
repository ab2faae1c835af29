"""What `mlxdist doctor` reads from a host: files, interfaces, connections, and what commands of macOS print."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from pmset import COOL, HOT, SYNTHETIC_PMSET
from waiting import seconds_of

from mlxdist.cluster.facts import interfaces, power, system
from mlxdist.cluster.facts.collect import HostFacts
from mlxdist.launch.jobs import JobDirectory
from mlxdist.tools.doctor import facts, files, network
from mlxdist.tools.doctor.probe_rank import rounds

# Written by hand after descriptions of what these commands print; no Mac was asked.
SYNTHETIC_VM_STAT = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                               100000.
Pages active:                             900000.
Pages inactive:                            50000.
Pages speculative:                          1000.
Pages throttled:                               0.
Pages purgeable:                             500.
"Translation faults":                  123456789.
"""
SYNTHETIC_ROUTE = """   route to: 10.0.0.2
destination: 10.0.0.0
       mask: 255.255.255.0
  interface: en5
      flags: <UP,DONE,CLONING,STATIC>
"""
SYNTHETIC_PORTS = {"Ethernet": "en0", "Wi-Fi": "en1", "Thunderbolt 2": "en5", "Thunderbolt Bridge": "bridge0"}


def test_what_macos_prints():
    assert power.power_settings(SYNTHETIC_PMSET)["sleep"] == 1
    assert power.power_settings(SYNTHETIC_PMSET)["SleepDisabled"] == 0
    assert power.speed_limit(HOT) == 28 and power.speed_limit(COOL) is None
    assert system.vm_statistics(SYNTHETIC_VM_STAT) == 151_500 * 16384
    assert facts.kernel_objects("AppleThunderboltRDMAProtectionDomain = 3\n") == 3
    assert interfaces.default_interface(SYNTHETIC_ROUTE) == "en5"
    for text in ("", "garbage", "\0" * 100):
        assert power.power_settings(text) == {} and power.speed_limit(text) is None
        assert system.vm_statistics(text) is None
        assert (
            facts.kernel_objects(text) is None
            and interfaces.default_interface(text) == ""
            and network.mac_speed(text) is None
        )


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("en0", "ethernet"),
        ("en1", "wifi"),
        ("en5", "thunderbolt"),
        ("bridge0", "bridge"),
        ("utun4", "tunnel"),
        ("lo0", "loopback"),
        ("en9", ""),
    ],
)
def test_interfaces_of_a_mac(name, kind):
    assert network.mac_kind(name, SYNTHETIC_PORTS) == kind


@pytest.mark.parametrize(
    ("media", "speed"),
    [
        ("autoselect (10Gbase-T <full-duplex>)", 10_000),
        ("autoselect (1000baseT <full-duplex>)", 1000),
        ("autoselect", None),
    ],
)
def test_speed_of_a_mac(media, speed):
    assert network.mac_speed(f"en0: flags=8863<UP> mtu 1500\n\tmedia: {media}\n\tstatus: active\n") == speed


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        ({"type": "1", "wireless/x": ""}, "wifi"),
        ({"type": "1", "device/x": ""}, "ethernet"),
        ({"type": "1", "bridge/x": "", "device/x": ""}, "bridge"),
        ({"type": "772"}, "loopback"),
        ({"type": "32", "device/x": ""}, "infiniband"),
        ({"type": "65534"}, "tunnel"),
        ({"type": "1"}, "virtual"),
    ],
)
def test_interfaces_of_linux(tmp_path, files, kind):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert network.interface_kind(tmp_path) == kind
    assert network.interface_kind(tmp_path / "no such") == ""


def test_a_host_connects_to_one_that_listens():
    listening = network.listen()
    target = {"address": "127.0.0.1"} | listening
    try:
        good, wrong = network.connect([target, target | {"token": "0" * 16}], seconds=5)
        assert good["error"] == "" and wrong["error"] == "WRONG"
        if _has_ipv6():
            assert network.connect([target | {"address": "::1"}])[0]["error"] == ""
    finally:
        network.stop_listening()
    (refused,) = network.connect([target])
    assert refused["error"] == "ECONNREFUSED" and "Connection refused" in refused["text"]


def _has_ipv6() -> bool:
    if not socket.has_dualstack_ipv6():
        return False
    with socket.socket(socket.AF_INET6) as sock:
        try:
            sock.bind(("::1", 0))
        except OSError:
            return False
    return True


def test_a_server_that_accepts_and_sends_nothing():
    with socket.create_server(("127.0.0.1", 0)) as server:
        target = {"address": "127.0.0.1", "port": server.getsockname()[1], "token": "0" * 16}
        seconds, (found,) = seconds_of(network.connect, [target], seconds=0.2)
        assert found["error"] == "ETIMEDOUT" and seconds < 10


def test_memory_can_be_taken():
    taken = facts.allocate(1 << 20)
    assert (taken["error"], taken["late"]) == ("", False)


def test_memory_that_takes_too_long_is_not_taken_for_missing():
    assert facts.allocate(1 << 20, seconds=0.001)["late"]


def test_memory_that_cannot_be_taken(monkeypatch):
    monkeypatch.setattr(facts, "collect_here", lambda: HostFacts(memory=system.Memory(available=1 << 62)))
    taken = facts.allocate(1 << 60)
    assert "Error" in taken["error"] and not taken["late"]


def test_a_large_file_is_read_in_parts(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    size = files._FULL_BYTES + 1000
    for path in (one, other):
        with path.open("wb") as file:
            file.truncate(size)
    with other.open("r+b") as file:
        file.seek(size - 1)
        file.write(b"x")
    for how in ("sampled", "full"):
        assert files.digest(str(one), how) != files.digest(str(other), how)
    with pytest.raises(TimeoutError, match="was not read within 0 s"):
        files.digest(str(one), "full", seconds=0)


def test_models(tmp_path, monkeypatch):
    (tmp_path / "m" / ".cache").mkdir(parents=True)
    (tmp_path / "m" / ".cache" / "lock").write_text("")
    (tmp_path / "m" / "config.json").write_text("{}")
    assert files.list_model("m", str(tmp_path))["files"] == {"config.json": 2}
    assert files.list_model("m/config.json", str(tmp_path))["path"] == str(tmp_path / "m")
    assert "neither there" in files.list_model("org/model", str(tmp_path))["error"]
    kept = tmp_path / "hub" / "models--org--model"
    (kept / "snapshots" / "abc").mkdir(parents=True)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("abc")
    (kept / "snapshots" / "abc" / "config.json").write_text("{}")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert files.list_model("org/model", str(tmp_path))["path"] == str(kept / "snapshots" / "abc")


def test_disks_where_nothing_can_be_written(tmp_path, monkeypatch):
    def fails():
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(facts.tempfile, "gettempdir", fails)
    assert [disk["use"] for disk in facts._disks(str(tmp_path))][0] == "temporary files"


def test_private_variables(monkeypatch):
    for name in ("HF_TOKEN", "MLXDIST_SECRET", "MLX_RANK", "HOME"):
        monkeypatch.setenv(name, "private")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    found = facts._variables()
    assert found["OMP_NUM_THREADS"] == "3" and "private" not in found.values()


def test_jobs_that_run_and_jobs_that_have_left_something(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert facts._jobs()["running"] == facts._jobs()["stale"] == []
    running = JobDirectory.of_ranks("f00", tmp_path / "mlxdist-f00", ["python", "train.py"])
    killed = JobDirectory.of_ranks("f11", tmp_path / "mlxdist-f11", ["python", "train.py"])
    killed.close()  # its launcher and its reaper are gone
    found = facts._jobs()
    running.close()
    assert found["running"] == [{"job": "f00", "ranks": 0, "command": ["python", "train.py"]}]
    assert found["stale"] == ["f11"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_processes_of_jobs_that_are_over():
    start = 'sleep 60 >/dev/null & echo $!; exec sleep "$1"'  # the shell stays, or it ends and leaves one behind
    environment = os.environ | {"MLXDIST_JOB": "f00.1"}
    for stays, orphaned in (("60", False), ("0", True)):
        with subprocess.Popen(["sh", "-c", start, "sh", stays], env=environment, stdout=subprocess.PIPE) as shell:
            pid = int(shell.stdout.readline())
            try:
                if orphaned:
                    shell.wait(10)
                    if "PPid:\t1\n" not in Path(f"/proc/{pid}/status").read_text():
                        pytest.skip("something else than process 1 adopts orphans here")
                assert (pid in facts._orphans(set())) is orphaned and pid not in facts._orphans({"f00"})
            finally:
                os.kill(pid, signal.SIGKILL)
                shell.kill()


@pytest.mark.parametrize("count", [2, 3, 8, 9, 12])
def test_every_pair_is_measured(count):
    found = [pair for pairs in rounds(count) for pair in pairs]
    assert sorted(found) == [(a, b) for a in range(count) for b in range(a + 1, count)]
    for pairs in rounds(count):
        hosts = [host for pair in pairs for host in pair]
        assert len(hosts) == len(set(hosts))
