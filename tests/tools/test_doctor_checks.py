"""The checks of `mlxdist doctor`: what each finds in facts that are made up, where all is well and where it is not."""

import dataclasses

import pytest
from doctor_facts import GIB, NAMES, VERSIONS, cluster, facts

from mlxdist.cluster.hostfile.hosts import Host
from mlxdist.launch.reaper import LOST_DOMAINS
from mlxdist.runtime.devices.links import Ports
from mlxdist.runtime.devices.paths import Path
from mlxdist.tools.doctor.checks import run_checks
from mlxdist.tools.doctor.checks.files import check_model, check_script
from mlxdist.tools.doctor.checks.job import check_bandwidth, check_correctness, check_latency, check_provider
from mlxdist.tools.doctor.checks.network import check_interfaces, check_local_network, check_ports
from mlxdist.tools.doctor.checks.rdma import check_gids, check_rdma
from mlxdist.tools.doctor.checks.reachable import check_python, check_reachable, check_versions
from mlxdist.tools.doctor.checks.system import (
    check_allocation,
    check_clocks,
    check_cores,
    check_disk,
    check_gpus,
    check_leaks,
    check_memory,
    check_power,
    check_sleep,
)
from mlxdist.tools.doctor.checks.variables import check_fast_synch, check_gpu_sync, check_variables
from mlxdist.tools.doctor.cluster import CheckOptions, Cluster, ConnectAttempt, Job, ProbeError
from mlxdist.tools.doctor.findings import Finding, Verdict
from mlxdist.version import __version__

PROBLEMS = (Verdict.WARN, Verdict.FAIL)


def of(found: list[Finding], *verdicts: Verdict) -> list[Finding]:
    return [finding for finding in found if finding.verdict in (verdicts or PROBLEMS)]


def only(found: list[Finding], *verdicts: Verdict) -> Finding:
    (finding,) = of(found, *verdicts)
    return finding


def test_all_is_well():
    found = {result.check: result.verdict for result in run_checks(cluster(), after_job=False)}
    assert set(found.values()) <= {Verdict.OK, Verdict.SKIP} and found["versions"] is Verdict.OK, found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("c does not respond: Permission denied (publickey).", "ssh-copy-id c"),
        ("c does not respond: Host key verification failed.", "ssh c true"),
        ("c does not respond: ssh: Could not resolve hostname c: no", "HostName"),
        ("c does not respond: ssh: connect to host c port 22: Connection refused", "systemctl enable --now ssh"),
        ("c does not respond: ssh: connect to host c port 22: No route to host", "ping c"),
        ("c does not respond within 30 s", "ssh -o BatchMode=yes c uptime"),
    ],
)
def test_reachable(text, words):
    found = cluster()
    found.errors = {"who": {"c": ProbeError(text, False)}}
    assert only(check_reachable(found)).hosts == ("c",) and words in only(check_reachable(found)).remedy
    assert len(of(check_reachable(found), Verdict.OK)) == 2


def test_one_machine_by_two_names():
    found = cluster()
    for name in ("a", "c"):
        found.responses["facts"][name]["identity"] = "the same"
    finding = only(check_reachable(found))
    assert finding.hosts == ("c",) and "a slots=2" in finding.remedy


def test_python():
    assert not of(check_python(cluster()))
    broken = cluster(facts(**{"import": {"error": "ImportError: no native library"}}))
    assert only(check_python(broken)).verdict is Verdict.FAIL
    assert only(check_python(cluster(facts(**{"import": {"error": "", "seconds": 90.0}})))).verdict is Verdict.WARN
    error = ProbeError("c does not respond: /p: No module named mlxdist", False)
    without = Cluster((Host("c"),), errors={"who": {"c": error}})
    assert only(check_python(without)).verdict is Verdict.FAIL and not of(check_reachable(without))


@pytest.mark.parametrize(
    ("what", "value", "verdict"),
    [
        ("mlxdist", "0.0.9", Verdict.FAIL),
        ("MLX", "0.32.3", Verdict.FAIL),
        ("mlx_lm", "0.31.0", Verdict.WARN),
        ("Python", "3.11.9", Verdict.WARN),
        ("system", "macOS 26.4", Verdict.WARN),
    ],
)
def test_versions(what, value, verdict):
    assert not of(check_versions(cluster()))
    finding = only(check_versions(cluster(facts(versions=VERSIONS | {what: value}))))
    assert finding.verdict is verdict and finding.hosts == ("c",)
    assert finding.differences[0].values == ((VERSIONS[what], ("a", "b")), (value, ("c",)))


def test_the_version_of_mlxdist_is_that_of_the_launcher():
    found = cluster()
    found.responses["who"] = {name: {"mlxdist": "0.0.1", "python": "3.12.1"} for name in NAMES}
    found.responses["facts"] = {}
    finding = only(check_versions(found))
    assert finding.hosts == tuple(NAMES) and f"mlxdist is 0.0.1, here {__version__}" in finding.what


def test_a_version_that_is_missing_on_one_host():
    without = {name: version for name, version in VERSIONS.items() if name != "mlx_lm"}
    finding = only(check_versions(cluster(facts(versions=without))))
    assert finding.hosts == ("c",) and "not installed" in finding.what
    assert "pip install mlx-lm==0.32.2" in finding.remedy


def test_variables():
    assert not of(check_variables(cluster()))
    differing = cluster(facts(variables={"OMP_NUM_THREADS": "1"}))
    assert only(check_variables(differing)).what == "OMP_NUM_THREADS differs"
    assert "/etc/zshenv" in only(check_variables(differing)).remedy
    differing.options = CheckOptions(variables={"OMP_NUM_THREADS": "4"})  # set by the launcher for all
    assert not of(check_variables(differing))
    wrong = cluster(facts(variables_error="MLXDIST_X is set, but there is no such variable"))
    assert only(check_variables(wrong)).verdict is Verdict.FAIL


def test_fast_synch():
    assert not of(check_fast_synch(cluster()))
    finding = only(check_fast_synch(cluster(facts(variables={"MLX_METAL_FAST_SYNCH": "1"}))))
    assert finding.verdict is Verdict.FAIL and finding.hosts == ("c",)
    assert "--env MLX_METAL_FAST_SYNCH=0" in finding.remedy


@pytest.mark.parametrize(
    ("system", "slots", "value", "verdict"),
    [
        ("Darwin", 2, "1", Verdict.FAIL),
        ("Darwin", 2, "0", Verdict.OK),
        ("Darwin", 1, "1", Verdict.OK),
        ("Linux", 2, "1", Verdict.OK),  # MLX looks at it where it has Metal
    ],
)
def test_fast_synch_with_several_ranks_on_a_mac(system, slots, value, verdict):
    hosts = [Host(name, slots=slots if name == "c" else 1) for name in NAMES]
    options = CheckOptions(variables={"MLX_METAL_FAST_SYNCH": value})
    (finding,) = check_fast_synch(cluster(facts(system=system), hosts=hosts, options=options))
    assert finding.verdict is verdict
    if verdict is Verdict.FAIL:
        assert finding.hosts == ("c",) and "one rank on each Mac" in finding.remedy


PROGRAM = {"directory_error": "", "command_error": "", "script_error": "", "sha256": "ab" * 32, "bytes": 10}


@pytest.mark.parametrize(
    "changes",
    [
        {"directory_error": "No such file or directory"},
        {"command_error": "The command 'python' does not exist in PATH"},
        {"script_error": "No such file or directory"},
        {"sha256": "cd" * 32},
    ],
)
def test_script(changes):
    options = CheckOptions(command=("python", "train.py"), script="train.py", directory="/work")
    assert next(check_script(cluster())).verdict is Verdict.SKIP
    found = cluster(options=options)
    found.responses["program"] = {name: dict(PROGRAM) for name in NAMES}
    assert not of(check_script(found))
    found.responses["program"]["c"] |= changes
    finding = only(check_script(found))
    assert finding.verdict is Verdict.FAIL and finding.hosts == ("c",) and finding.remedy


def model(**files: int) -> dict:
    return {"error": "", "path": "/m", "files": files, "digests": {name: f"{size:064}" for name, size in files.items()}}


def test_model():
    assert next(check_model(cluster())).verdict is Verdict.SKIP
    found = cluster(options=CheckOptions(model="/m"))
    found.responses["model"] = {name: model(config=10, weights=2 * GIB) for name in NAMES}
    assert not of(check_model(found)) and "2 files, 2.0 GiB" in only(check_model(found), Verdict.OK).what
    for other in (model(config=10), model(config=10, weights=GIB), model(config=10, weights=2 * GIB)):
        if len(other["files"]) == 2 and other["files"]["weights"] == 2 * GIB:
            other["digests"]["weights"] = "f" * 64  # the same size
        found.responses["model"]["c"] = other
        finding = only(check_model(found))
        assert finding.hosts == ("c",) and "1 file of /m differs: weights" in finding.what
        assert finding.remedy == "mlxdist pull /m --hosts a,c"
    found.responses["model"]["c"] = {"error": "it is no directory", "files": {}, "path": "", "digests": {}}
    assert only(check_model(found)).hosts == ("c",)
    # What the command calls --model may be something else, unless one of the hosts has it.
    found.options = CheckOptions(model="resnet18", guessed=True)
    assert only(check_model(found)).hosts == ("c",)
    found.responses["model"] = dict.fromkeys(NAMES, found.responses["model"]["c"])
    assert not of(check_model(found)) and only(check_model(found), Verdict.SKIP).hosts == tuple(NAMES)


def test_a_model_that_does_not_fit():
    found = cluster(options=CheckOptions(model="/m"))
    found.responses["model"] = {name: model(weights=500 * GIB) for name in NAMES}
    assert "192.0 GiB" in only(check_model(found)).what


def test_clocks():
    assert not of(check_clocks(cluster(clock=(0.4, 0.001))))
    assert "3.0 s behind" in only(check_clocks(cluster(clock=(-3.0, 0.01)))).what
    assert not of(check_clocks(cluster(clock=(3.0, 2.5))))  # a connection too slow to tell


def memory(*gib: int | None) -> dict:
    total, available, wired, *_ = (*(size and size * GIB for size in gib), None)
    return {"total": total, "available": available, "wired_limit": wired}


def test_memory():
    assert not of(check_memory(cluster()))
    assert only(check_memory(cluster(facts(memory=memory(64, 1))))).verdict is Verdict.WARN
    smaller = check_memory(cluster(facts(memory=memory(32, 30))))
    assert only(smaller, Verdict.NOTE).hosts == ("c",) and not of(smaller)
    assert only(check_memory(cluster(facts(memory=memory(None, None)))), Verdict.NOTE)


def test_allocation():
    assert not of(check_allocation(cluster(allocate={"bytes": GIB, "error": "", "late": False, "seconds": 1})))
    killed = cluster(allocate={"bytes": GIB, "error": "exit status -9", "late": False, "seconds": 1})
    assert only(check_allocation(killed)).verdict is Verdict.FAIL
    late = cluster(allocate={"bytes": GIB, "error": "it had not ended after 20 s", "late": True, "seconds": 20.1})
    found = only(check_allocation(late))
    assert found.verdict is Verdict.WARN and "within 20 s: the host is busy" in found.what
    greedy = cluster(facts(memory=memory(64, 50, 63)))
    assert "iogpu.wired_limit_mb" in only(check_allocation(greedy)).remedy


@pytest.mark.parametrize(("free", "verdict"), [(GIB, Verdict.WARN), (1 << 20, Verdict.FAIL)])
def test_disk(free, verdict):
    assert not of(check_disk(cluster()))
    disk = {"use": "temporary files", "path": "/tmp", "total": 100 * GIB, "free": free}
    assert only(check_disk(cluster(facts(disks=[disk])))).verdict is verdict


def test_cores():
    assert not of(check_cores(cluster()))
    assert only(check_cores(cluster(facts(load=30.0)))).verdict is Verdict.WARN
    crowded = cluster(hosts=[Host("a"), Host("b"), Host("c", slots=9)])
    assert "9 ranks, 8 cores" in only(check_cores(crowded), Verdict.NOTE).what


def test_gpus():
    assert only(check_gpus(cluster(names=("c",))), Verdict.SKIP)
    both = facts(gpus=["0: NVIDIA H100", "1: NVIDIA H100"])
    assert only(check_gpus(cluster(both, names=("c",))), Verdict.OK).what == "0: NVIDIA H100, 1: NVIDIA H100"
    crowded = check_gpus(cluster(both, names=("c",), hosts=[Host("c", slots=3)]))
    assert "3 ranks share 0: NVIDIA H100, 1: NVIDIA H100" in only(crowded, Verdict.NOTE).what


@pytest.mark.parametrize(
    ("power", "verdict"),
    [
        ({}, Verdict.SKIP),
        ({"pmset": {}}, Verdict.SKIP),
        ({"pmset": {"sleep": 0}}, Verdict.OK),
        ({"pmset": {"sleep": 10, "SleepDisabled": 1}}, Verdict.OK),
        ({"pmset": {"sleep": 10, "SleepDisabled": 0}}, Verdict.NOTE),
        ({"systemd": {"masked": False, "idle": "ignore"}}, Verdict.OK),
        ({"systemd": {"masked": False, "idle": "suspend"}}, Verdict.WARN),
        ({"systemd": {"masked": True, "idle": "suspend"}}, Verdict.OK),
    ],
)
def test_sleep(power, verdict):
    assert [finding.verdict for finding in check_sleep(cluster(facts(power=power)))][-1] is verdict


@pytest.mark.parametrize(
    ("power", "verdict", "words"),
    [
        ({}, Verdict.SKIP, "pmset"),
        ({"systemd": {"masked": True, "idle": ""}}, Verdict.SKIP, "pmset"),
        ({"pmset": {"displaysleep": 10, "lowpowermode": 0}, "speed": 100}, Verdict.OK, "full power"),
        ({"pmset": {"displaysleep": 10, "powermode": 2}, "speed": 100}, Verdict.OK, "full power"),
        ({"pmset": {"displaysleep": 10, "powermode": 2}, "speed": None}, Verdict.OK, "pmset says nothing of heat"),
        ({"pmset": {"displaysleep": 10, "lowpowermode": 1}, "speed": 100}, Verdict.WARN, "Low Power Mode"),
        ({"pmset": {"displaysleep": 10, "powermode": 1}, "speed": 100}, Verdict.WARN, "Low Power Mode"),
        ({"pmset": {"displaysleep": 10}, "speed": 28}, Verdict.WARN, "heat leaves 28 %"),
        ({"pmset": {"displaysleep": 0}, "speed": 100}, Verdict.NOTE, "its display never sleeps"),
    ],
)
def test_power(power, verdict, words):
    finding = only(check_power(cluster(facts(power=power), names=("c",))), verdict)
    assert words in finding.what


@pytest.mark.parametrize(
    ("jobs", "words"),
    [
        ({"running": [{"job": "f00", "ranks": 2, "command": ["python", "--key", "s3cret"]}]}, "mlxdist stop f00"),
        ({"stale": ["f00"]}, "mlxdist launch -n 1 -- true"),
        ({"orphans": [71, 72]}, "kill 71 72"),
        ({"shared_memory": ["/dev/shm/mlxdist-1"]}, "rm /dev/shm/mlxdist-1"),
        ({"domains": 3}, "shutdown -r now"),
    ],
)
def test_leaks(jobs, words):
    assert not of(check_leaks(cluster()))
    finding = only(check_leaks(cluster(facts(jobs=facts()["jobs"] | jobs))))
    assert finding.verdict is Verdict.WARN and words in finding.remedy
    assert "--" not in finding.what and "s3cret" not in finding.what
    full = cluster(facts(jobs=facts()["jobs"] | {"domains": 11}))
    assert only(check_leaks(full)).verdict is Verdict.FAIL and LOST_DOMAINS in only(check_leaks(full)).what


def device(name="mlx5_0", active=True, networks=("10.0.0.1/24",)) -> dict:
    usual = {"name": name, "active": active, "speed": 100, "interfaces": [], "queue_pairs": 10}
    return usual | {"networks": list(networks)}


def cause(verdict, subject="", what="something", remedy="") -> dict:
    return {"verdict": verdict, "subject": subject, "what": what, "remedy": remedy}


def cabled(**last) -> Cluster:
    hosts = [Host("a", rdma=((), ("mlx5_0",))), Host("b", rdma=(("mlx5_0",), ()))]
    found = cluster(names=("a", "b"), hosts=hosts)
    good = {"devices": [device()], "findings": [cause("ok", "mlx5_0")]}
    found.responses["rdma"] = {"a": good, "b": good | {"devices": [device(networks=["10.0.0.2/24"])]} | last}
    return found


def test_rdma():
    without = {"devices": [], "findings": [cause("no kernel RDMA", what="no RDMA", remedy="modprobe rdma_rxe")]}
    found = cluster(rdma=without)
    assert not of(check_rdma(found)) and only(check_rdma(found), Verdict.NOTE).remedy == "modprobe rdma_rxe"
    found.options = CheckOptions(variables={"MLXDIST_PROVIDER": "ibverbs"})  # now it is wanted
    assert only(check_rdma(found)).verdict is Verdict.FAIL
    assert not of(check_rdma(cabled()))
    assert "names mlx5_0, and it is not there" in of(check_rdma(cabled(**without)))[0].what
    down = [cause("port down", "mlx5_0", "mlx5_0 is DOWN", "plug in the cable")]
    assert only(check_rdma(cabled(devices=[device(active=False)], findings=down))).remedy == "plug in the cable"
    # Another port of the host is not checked.
    other = [cause("ok", "mlx5_0"), cause("port down", "mlx5_1", "mlx5_1 is DOWN", "plug in the cable")]
    assert not of(check_rdma(cabled(findings=other)))


def test_ranks_that_need_more_queue_pairs_than_the_device_of_their_cable_has():
    found = cabled()
    found.hosts = tuple(dataclasses.replace(host, slots=3) for host in found.hosts)
    for finding, host in zip(of(check_rdma(found)), ("a", "b"), strict=True):
        assert finding.verdict is Verdict.FAIL and finding.hosts == (host,)
        assert "has 10 queue pairs, and 9 pairs of ranks over it would need 18" in finding.what
        assert "at most 2 ranks on each host" in finding.remedy
    found.hosts = tuple(dataclasses.replace(host, slots=2) for host in found.hosts)
    assert not of(check_rdma(found))
    found.responses["rdma"]["a"]["devices"][0]["queue_pairs"] = None  # not known
    found.hosts = tuple(dataclasses.replace(host, slots=3) for host in found.hosts)
    assert [finding.hosts for finding in of(check_rdma(found))] == [("b",)]


def test_gids():
    assert not of(check_gids(cabled()))
    bare = [cause("no IPv4 GID", "mlx5_0", "mlx5_0 has no IPv4 address", "ip address add")]
    assert only(check_gids(cabled(devices=[device(networks=())], findings=bare))).verdict is Verdict.FAIL
    finding = only(check_gids(cabled(devices=[device(networks=["10.0.9.2/24"])])))
    assert finding.hosts == ("a", "b") and "different networks" in finding.what


def test_gpu_sync():
    measured = {"skipped": "", "error": "", "microseconds": {"0": 180.0, "1": 4.0}}
    assert "180 us a synchronization, 4 us with" in only(check_gpu_sync(cluster(gpu_sync=measured)), Verdict.NOTE).what
    fast = facts(variables={"MLX_METAL_FAST_SYNCH": "1"})
    assert only(check_gpu_sync(cluster(fast, gpu_sync=measured)), Verdict.OK)
    assert only(check_gpu_sync(cluster(gpu_sync=measured | {"skipped": "no GPU"})), Verdict.SKIP).what == "no GPU"
    stuck = check_gpu_sync(cluster(gpu_sync=measured | {"error": "the GPU had not answered"}))
    assert only(stuck).verdict is Verdict.WARN


def attempt(source="a", target="b", **changes) -> ConnectAttempt:
    return ConnectAttempt(
        source, target, **{"address": "10.0.0.2", "interface": "en5", "kind": "thunderbolt"} | changes
    )


def both(*attempts: ConnectAttempt, system="Linux") -> Cluster:
    found = cluster(facts(system=system), names=("b", "a"))
    found.attempts = [attempt("b", "a"), *attempts]
    return found


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("ECONNREFUSED", "it is reached, but"),
        ("ETIMEDOUT", "a firewall drops it"),
        ("EHOSTUNREACH", "it is not in that network"),
        ("ENETUNREACH", "nothing leads to its network"),
        ("WRONG", "another machine has this address"),
        ("EPIPE", "errno 32"),
    ],
)
def test_ports(error, words):
    assert next(check_ports(cluster(names=("a",)))).verdict is Verdict.SKIP
    assert "1 pair connected" in only(check_ports(both(attempt())), Verdict.OK).what
    finding = only(check_ports(both(attempt(error=error, text="errno 32, Broken pipe"))))
    assert finding.verdict is Verdict.FAIL and finding.hosts == ("a", "b") and words in finding.what
    # An address that a job does not use
    assert only(check_ports(both(attempt(), attempt(error=error, text="?", first=False)))).verdict is Verdict.WARN


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"interface": "en0", "kind": "wifi"}, "en0 (Wi-Fi)"),
        ({"interface": "utun3", "kind": "tunnel"}, "utun3 (tunnel)"),
        ({"interface": "eth1", "kind": "ethernet", "speed": 100}, "eth1 (ethernet, 100 Mbit/s), others by 10 Gbit/s"),
    ],
)
def test_interfaces(changes, words):
    assert not of(check_interfaces(both(attempt())))
    fast = attempt("b", "a", interface="eth0", kind="ethernet", speed=10_000)
    finding = only(check_interfaces(both(fast, attempt(**changes))))
    assert finding.verdict is Verdict.WARN and finding.hosts == ("a", "b") and words in finding.what
    assert only(check_interfaces(both(attempt(interface="bridge0", kind="bridge"))), Verdict.NOTE)


def test_local_network():
    assert next(check_local_network(both(attempt()))).verdict is Verdict.SKIP
    assert not of(check_local_network(both(attempt(), system="Darwin")))
    gated = both(attempt(error="EHOSTUNREACH", text="errno 65, No route to host", nc=True), system="Darwin")
    assert "Local Network" in only(check_local_network(gated)).remedy and only(check_local_network(gated)).hosts == (
        "a",
    )
    assert "Local Network" in only(check_ports(gated)).remedy
    unplugged = both(attempt(error="EHOSTUNREACH", text="errno 65, No route to host", nc=False), system="Darwin")
    assert not of(check_local_network(unplugged))


def after(**changes) -> Cluster:
    found = cluster()
    usual = {"hosts": NAMES, "ranks": 3, "tested": 12, "provider": "soft", "command": "mlxdist launch"}
    found.job = Job(**usual | changes)
    return found


def test_correctness():
    assert next(check_correctness(cluster())).verdict is Verdict.SKIP
    assert not of(check_correctness(after())) and "12 sums over 3 ranks" in next(check_correctness(after())).what
    assert "5 elements" in only(check_correctness(after(wrong=("all_sum: 5 elements are wrong",)))).what
    failed = only(check_correctness(after(error="rank 1 failed first")))
    assert "rank 1 failed first" in failed.what and failed.remedy.endswith("mlxdist launch")
    assert not failed.hosts
    smaller = [Job((name,), 2, error="no room") for name in NAMES[1:]]
    found = list(check_correctness(after(error="rank 1 failed first", culprits=smaller)))
    assert [f.hosts for f in found] == [(name,) for name in NAMES[1:]] and not found[0].is_way
    assert found[0].what == "a job of 2 ranks on this host alone failed: no room"
    pair = only(check_correctness(after(error="it failed", culprits=(Job(tuple(NAMES[:2]), 2, error="it failed"),))))
    assert pair.is_way and pair.hosts == tuple(NAMES[:2])


def test_provider():
    assert not of(check_provider(after()))
    wanting = after(provider="soft", reason="rank 1 has no RDMA device")
    wanting.options = CheckOptions(backend="jaccl")
    assert "rank 1 has no RDMA device" in only(check_provider(wanting)).what
    wanting.job = Job(NAMES, 3, provider="librdma")
    assert not of(check_provider(wanting))


def test_links():
    pairs = {(a, b): 10e9 for a in NAMES for b in NAMES if a != b}
    assert next(check_latency(after())).verdict is next(check_bandwidth(after())).verdict is Verdict.SKIP
    assert not of(check_bandwidth(after(bandwidth=pairs))) and not of(check_latency(after(latency=pairs)))
    slow = only(check_bandwidth(after(bandwidth=pairs | {("a", "c"): 2e9})))
    assert slow.hosts == ("a", "c") and slow.what == "2.00 GB/s, 20% of the 10.00 GB/s of the median pair"
    late = only(check_latency(after(latency=dict.fromkeys(pairs, 10.0) | {("b", "c"): 90.0})))
    assert late.hosts == ("b", "c") and "90.0 us, 900%" in late.what


@pytest.mark.parametrize(
    ("path", "are_thunderbolt", "rate", "good", "link"),
    [
        (Path.RDMA, True, 80, 6.5e9, "Thunderbolt 5 at 80 Gbit/s"),
        (Path.RDMA, True, 160, 11.9e9, "Thunderbolt 5 at 160 Gbit/s"),
        (Path.RDMA, True, 40, 1.9e9, "Thunderbolt 4 at 40 Gbit/s"),
        (Path.RDMA, False, 100, 11e9, "RDMA at 100 Gbit/s"),
        (Path.TCP, False, 1, 0.118e9, "TCP at 1 Gbit/s"),
        (Path.TCP, False, 100, 1.2e9, "TCP at 100 Gbit/s"),
    ],
)
def test_bandwidth_of_two_hosts_is_compared_with_their_ports(path, are_thunderbolt, rate, good, link):
    """Two hosts have no other pair to be slower than: a cable at half of its rate was "ok"."""
    pair = ("a", "b")
    ports = Ports(float(rate), are_thunderbolt) if path is Path.RDMA else Ports()
    ways = (pair, pair[::-1])
    found = after(hosts=pair, paths=dict.fromkeys(ways, path), ports=dict.fromkeys(ways, ports))
    ends = [dict(zip(("source", "target"), ends)) for ends in (pair, pair[::-1])]
    found.attempts = [ConnectAttempt(**end, address="10.0.0.1", kind="ethernet", speed=1000 * rate) for end in ends]
    found.job = dataclasses.replace(found.job, bandwidth={pair: good, pair[::-1]: good})
    assert next(check_bandwidth(found)).what.endswith(f", as {link}")
    found.job = dataclasses.replace(found.job, bandwidth={pair: good / 2.1, pair[::-1]: good / 2.1})
    assert [finding.hosts for finding in of(check_bandwidth(found))] == [pair, pair[::-1]]
    assert f"that {link} reaches one way" in of(check_bandwidth(found))[0].what
    found.options = CheckOptions(advertised=rate / 16)
    assert not of(check_bandwidth(found))


def test_bandwidth_without_a_rate_is_compared_with_the_others():
    ways = (("a", "b"), ("b", "a"))
    links = {"paths": dict.fromkeys(ways, Path.TCP), "ports": dict.fromkeys(ways, Ports())}
    found = after(hosts=("a", "b"), **links, bandwidth=dict.fromkeys(ways, 1e7))
    found.attempts = [ConnectAttempt(*way, address="10.0.0.1", kind="wifi", speed=1000) for way in ways]
    assert not of(check_bandwidth(found))


def test_nothing_is_well_where_no_host_responds():
    error = ProbeError("a does not respond within 30 s", False)
    found = run_checks(Cluster((Host("a"),), errors={"who": {"a": error}}), after_job=False)
    verdicts = {result.check: result.verdict for result in found}
    assert verdicts.pop("reachable") is Verdict.FAIL and set(verdicts.values()) == {Verdict.SKIP}, verdicts


def test_what_a_host_cannot_report_is_a_finding():
    found = cluster()
    found.errors = {"rdma": {"b": ProbeError("MemoryError", True)}}
    (result,) = [result for result in run_checks(found, after_job=False) if result.check == "rdma"]
    assert only(list(result.findings)).hosts == ("b",)
