"""`mlxdist doctor --level`: traffic with checked data, and what has grown on a host meanwhile."""

import json
import subprocess
import sys

import pytest
from doctor_facts import cluster
from launching import nothing_left  # noqa: F401  (a fixture of every test)

from mlxdist.cluster.hostfile.options import HostSelection
from mlxdist.cluster.ssh.ssh import CommandResult
from mlxdist.tools.doctor import link_health
from mlxdist.tools.doctor.checks import run_checks
from mlxdist.tools.doctor.checks.soak import check_counters, check_heat, check_kernel_log, check_soak
from mlxdist.tools.doctor.cluster import CheckOptions, Job, Soak
from mlxdist.tools.doctor.findings import Verdict
from mlxdist.tools.doctor.soak import soak

DOCTOR = [sys.executable, "-m", "mlxdist", "doctor"]


def soaked(level=2, job=Job(hosts=("localhost",), ranks=2, tested=12), seconds=0.1, names=("localhost",)):
    """This machine after a soak, and what the terminal was shown."""
    shown = []
    found = cluster(names=("localhost",), options=CheckOptions(level=level, seconds=seconds))
    found.job = job
    soak(HostSelection(), list(names), found, lambda host, step: shown.append((host, step)))
    return found, shown


# The traffic.


def test_data_is_moved_and_compared():
    found, shown = soaked(level=3)
    assert found.soak.error == "" and found.soak.wrong == () and found.soak.hosts == ("localhost",)
    rounds, rest = divmod(found.soak.operations, 2 * 3 * 3)  # ranks, sizes, operations
    assert rounds > 0 and rest == 0
    assert found.soak.bytes == rounds * 2 * 3 * 4 * ((1 << 10) + (1 << 18) + (1 << 22)) and found.soak.seconds >= 0.1
    assert {result.check for result in run_checks(found, after_job=True)} >= {"soak", "counters", "kernel-log", "heat"}
    (finding,) = check_soak(found)
    assert finding.verdict is Verdict.OK and "of 2 ranks in" in finding.what
    assert ("localhost", "counters and kernel log") in shown and shown[-1] == ("localhost", "")
    bars = [step for _, step in shown if step.startswith("soak ")]
    assert bars and all(step.endswith(" of 0 s") and len(step) == len(bars[0]) for step in bars)


@pytest.mark.long
def test_a_damaged_bit_is_found(monkeypatch):
    monkeypatch.setenv("MLXDIST_INJECT_FAULTS", "corrupt_after=100")
    found, _ = soaked()
    (finding,) = check_soak(found)
    assert finding.verdict is Verdict.FAIL and "1 wrong element on rank" in finding.what, finding


def test_ranks_that_fail(monkeypatch):
    monkeypatch.setenv("MLXDIST_PROVIDER", "no-such-provider")
    found, _ = soaked()
    (finding,) = check_soak(found)
    assert finding.verdict is Verdict.FAIL and "no-such-provider" in finding.what
    assert set(found.responses["health_after"]) == {"localhost"}


@pytest.mark.parametrize("job, names", [(Job(error="it failed"), ["localhost"]), (Job(skipped="no host"), [])])
def test_no_traffic_where_the_short_job_has_failed(job, names):
    found, shown = soaked(job=job, names=names)
    (finding,) = check_soak(found)
    assert finding.verdict is Verdict.SKIP and shown == [] and "health_after" not in found.responses


@pytest.mark.long
def test_the_command():
    done = subprocess.run([*DOCTOR, "--level", "2", "--seconds", "1", "--json"], capture_output=True, text=True)
    found = json.loads(done.stdout)
    verdicts = {check["check"]: check["verdict"] for check in found["checks"]}
    assert done.returncode == 0 and verdicts["soak"] == "ok", done.stderr
    assert found["soak"]["seconds"] >= 1 and found["soak"]["bytes"] > 0
    before, after = found["soak"]["before"]["localhost"], found["soak"]["after"]["localhost"]
    assert set(before) == set(after) >= {"counters", "log", "temperature"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--level", "5"], "5 is not in the range 1<=x<=4"),
        (["--level", "2", "--quick"], "leave out --quick"),
        (["--seconds", "5"], "give --level 2, 3 or 4"),
        (["--level", "2", "--seconds", "0"], "0.0 is not in the range"),
    ],
)
def test_rejected(arguments, words):
    done = subprocess.run([*DOCTOR, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and words in done.stderr


# The state of a host.


def write(root, **files):
    for path, text in files.items():
        at = root / path
        at.parent.mkdir(parents=True, exist_ok=True)
        at.write_text(text)


def test_counters_are_those_of_errors(tmp_path):
    port = "class/infiniband/mlx5_0/ports/1"
    write(tmp_path, **{
        f"{port}/counters/symbol_error": "3\n", f"{port}/counters/port_rcv_data": "99\n",
        f"{port}/counters/link_downed": "N/A\n", f"{port}/hw_counters/out_of_sequence": "7\n",
        f"{port}/hw_counters/np_cnp_sent": "8\n", "class/net/eth0/device/vendor": "",
        "class/net/eth0/statistics/rx_errors": "1\n", "class/net/eth0/statistics/rx_bytes": "5\n",
        "class/net/veth1/statistics/rx_errors": "6\n",
        "devices/system/cpu/cpu0/thermal_throttle/core_throttle_count": "2\n",
        "devices/system/cpu/cpu0/thermal_throttle/core_throttle_total_time_ms": "900\n",
        "class/thermal/thermal_zone0/temp": "41500\n", "class/thermal/thermal_zone1/temp": "39000\n",
    })  # fmt: skip
    assert link_health.error_counters(tmp_path) == {
        "mlx5_0/1 symbol_error": 3,
        "mlx5_0/1 out_of_sequence": 7,
        "eth0 rx_errors": 1,
        "cpu0 core_throttle_count": 2,
    }
    assert link_health.temperature(tmp_path) == 41.5
    assert link_health.error_counters(tmp_path / "none") == {} and link_health.temperature(tmp_path / "none") is None


def test_errors_of_the_interfaces_of_a_mac():
    text = """Name       Mtu   Network       Address            Ipkts Ierrs    Opkts Oerrs  Coll
lo0        16384 <Link#1>                          1234     0     1234     0     0
en2        1500  <Link#9>    36:aa:bb:cc:dd:ee     5000     4     6000     5     0
en2        1500  10.0.0/24   10.0.0.1              5000     -     6000     -     -
utun0      1380  <Link#14>                           10     1       20     2     0
"""
    assert link_health.interface_errors(text) == {"en2 Ierrs": 4, "en2 Oerrs": 5}


def test_lines_of_the_kernel(monkeypatch):
    log = "[1.0] usb 1-1: new device\n[2.0] mlx5_core 0000:01:00.0: Port 1 link down\n"
    log += "[3.0] CPU0: Core temperature above threshold\n"
    monkeypatch.setattr(link_health, "run", lambda *_, **__: CommandResult("localhost", 0, log, ""))
    monkeypatch.setattr(sys, "platform", "linux")
    found = link_health.read()
    assert [line[:5] for line in found["log"]] == ["[2.0]", "[3.0]"] and found["log_refusal"] == ""
    refused = CommandResult("localhost", 1, "", "dmesg: read kernel buffer failed: Operation not permitted\n")
    monkeypatch.setattr(link_health, "run", lambda *_, **__: refused)
    found = link_health.read()
    assert found["log"] == [] and found["log_refusal"].endswith("Operation not permitted")


# What has grown.

QUIET = {"rdma": [], "counters": {}, "log": [], "log_refusal": "", "speed": None, "temperature": None}


def grown(check, before, after):
    found = cluster(names=("a",), health_before=QUIET | before, health_after=QUIET | after)
    (finding,) = check(found)
    return finding


@pytest.mark.parametrize(
    ("check", "before", "after", "verdict", "words"),
    [
        (check_counters, {}, {}, "ok", "no RDMA port with counters"),
        (check_counters, {"counters": {"m/1 symbol_error": 3}, "rdma": ["m"]},
         {"counters": {"m/1 symbol_error": 3}, "rdma": ["m"]}, "ok", "no error on m"),
        (check_counters, {"counters": {"m/1 symbol_error": 3}}, {"counters": {"m/1 symbol_error": 5}}, "warn",
         "errors have been counted: m/1 symbol_error by 2"),
        (check_counters, {"counters": {"m/1 symbol_error": 3}}, {}, "warn", "m/1: not there any more"),
        (check_kernel_log, {"log": ["x", "y"]}, {"log": ["y", "y"]}, "warn", "the kernel has written: y"),
        (check_kernel_log, {"log": ["x"]}, {"log": ["x"]}, "ok", "nothing about links"),
        (check_kernel_log, {}, {"log_refusal": "dmesg: not permitted"}, "skip", "cannot be read: dmesg: not permitted"),
        (check_heat, {}, {}, "note", "neither temperatures"),
        (check_heat, {"temperature": 40.0}, {"temperature": 71.0}, "ok", "40 °C before, 71 °C after"),
        (check_heat, {"speed": 100}, {"speed": 80}, "warn", "heat leaves 80 % of its speed, and left 100 % before"),
        (check_heat, {"counters": {"cpu0 core_throttle_count": 1}}, {"counters": {"cpu0 core_throttle_count": 4}},
         "warn", "their counters grew by 3"),
    ],
)  # fmt: skip
def test_findings(check, before, after, verdict, words):
    finding = grown(check, before, after)
    assert (str(finding.verdict), finding.hosts) == (verdict, ("a",)) and words in finding.what


def test_throttling_is_no_error_of_a_link():
    counters = {"cpu0 core_throttle_count": 1}
    assert grown(check_counters, {"counters": counters}, {"counters": {"cpu0 core_throttle_count": 4}}).verdict == "ok"


def test_a_soak_that_failed():
    found = cluster(names=("a",))
    found.soak = Soak(("a",), 2, error="rank 1 died")
    (finding,) = check_soak(found)
    assert finding.verdict is Verdict.FAIL and finding.what == "the ranks failed under load: rank 1 died"
