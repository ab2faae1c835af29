"""What is wrong with a machine or a device, and what to do: one verdict for each cause."""

import dataclasses
import ipaddress
import json
import platform
import sys
from pathlib import Path

import pytest
from mlxdist._native import ffi, lib

from mlxdist.cluster.facts import collect, interfaces, system
from mlxdist.cluster.facts.collect import HostFacts
from mlxdist.cluster.facts.interfaces import Interface
from mlxdist.cluster.facts.thunderbolt import Receptacle, read_receptacles
from mlxdist.runtime.devices.device import Device, Gid
from mlxdist.runtime.devices.diagnosis import Verdict, diagnose_device, diagnose_host

# Written by hand after descriptions of what these commands print; no Mac was asked.
SYNTHETIC_PORTS = """
Hardware Port: Ethernet
Device: en0
Ethernet Address: 00:00:00:00:00:01

Hardware Port: Thunderbolt 1
Device: en2
Ethernet Address: 00:00:00:00:00:02

Hardware Port: Thunderbolt 2
Device: en3
Ethernet Address: 00:00:00:00:00:03

VLAN Configurations
===================
"""

SYNTHETIC_BRIDGE = """bridge0: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
	options=63<RXCSUM,TXCSUM,TSO4,TSO6>
	Configuration:
		id 0:0:0:0:0:0 priority 0 hellotime 0 fwddelay 0
	member: en2 flags=3<LEARNING,DISCOVER>
		ifmaxaddr 0 port 10 priority 0 path cost 0
	member: en3 flags=3<LEARNING,DISCOVER>
		ifmaxaddr 0 port 11 priority 0 path cost 0
	media: <unknown type>
"""


def synthetic_thunderbolt(*ports: tuple[str, str, bool]) -> str:
    """Receptacle, speed, whether something is plugged in."""
    buses = [
        {
            "_name": f"thunderboltusb4_bus_{number}",
            "_items": [
                {"_name": "Mac", "receptacle_2_tag": {"receptacle_id_key": "9", "current_speed_key": "Up to 40 Gb/s"}}
            ],
            "domain_uuid_key": "00000000-0000-0000-0000-000000000000",
            "receptacle_1_tag": {
                "current_speed_key": speed,
                "link_status_key": "0x2" if connected else "0x100",
                "receptacle_id_key": receptacle,
                "receptacle_status_key": "receptacle_connected" if connected else "receptacle_no_devices_connected",
            },
        }
        for number, (receptacle, speed, connected) in enumerate(ports)
    ]
    return json.dumps({"SPThunderboltDataType": buses})


def mac(**changes) -> HostFacts:
    ports = Receptacle("1", 80, True, "en2"), Receptacle("2", 120, False, "en3")
    usual = {"architecture": "arm64", "macos": (26, 3), "rdma_ctl": "enabled", "receptacles": ports}
    return HostFacts(system="Darwin", **usual | changes)


def ipv4(text: str) -> Gid:
    return Gid(1, "unknown", ipaddress.IPv6Address(f"::ffff:{text}").packed, 24)


def thunderbolt(name: str = "rdma_en2", state: str = "ACTIVE", gids: tuple[Gid, ...] = (ipv4("10.0.0.1"),)) -> Device:
    gids = tuple(Gid(gid.index, gid.type, gid.address, gid.prefix, name.removeprefix("rdma_")) for gid in gids)
    return Device("librdma", name, "", state, gids, link_layer="Thunderbolt", transport="Thunderbolt")


LINK_LOCAL = (Gid(0, "unknown", ipaddress.IPv6Address("fe80::1").packed),)
READY = thunderbolt()
BRIDGE = (Interface("bridge0", members=("en2",)),)


def verdicts(found) -> list[Verdict]:
    return [finding.verdict for finding in found]


# The machine


@pytest.mark.parametrize(
    "facts, verdict, remedy",
    [
        (mac(architecture="x86_64"), Verdict.NOT_APPLE_SILICON, "Python for arm64"),
        (mac(architecture="x86_64", macos=(15, 0), rdma_ctl=None), Verdict.NOT_APPLE_SILICON, "Thunderbolt 5"),
        (mac(macos=(26, 1)), Verdict.MACOS_TOO_OLD, "update to macOS 26.2"),
        (mac(macos=(15, 7, 1)), Verdict.MACOS_TOO_OLD, "update to macOS 26.2"),
        (mac(rdma_ctl="disabled"), Verdict.RDMA_CTL_OFF, "rdma_ctl enable"),
        (mac(receptacles=(Receptacle("1", 40, False, "en2"),)), Verdict.THUNDERBOLT_4, "use a Mac with Thunderbolt 5"),
        (HostFacts(kernel_rdma=False), Verdict.NO_KERNEL_RDMA, "modprobe rdma_rxe"),
        (HostFacts(kernel_rdma=True), Verdict.NO_DEVICE, "rdma link"),
        (mac(), Verdict.NO_DEVICE, "restart the Mac"),
        (
            HostFacts(kernel_rdma=True, denied=("/dev/infiniband/uverbs0",)),
            Verdict.NOT_PERMITTED,
            "--device=/dev/infiniband",
        ),
    ],
)
def test_what_a_machine_lacks(facts, verdict, remedy):
    (found,) = diagnose_host(facts, [])
    assert found.verdict is verdict and remedy in found.remedy and found.subject == ""


@pytest.mark.parametrize("macos", [(26, 2), (26, 2, 0), (26, 10), (27,), None])
def test_a_macos_that_is_new_enough(macos):
    assert diagnose_host(mac(macos=macos), [READY]) == []


def test_all_causes_are_reported():
    old = mac(macos=(15, 1), rdma_ctl="disabled", receptacles=(Receptacle("1", 40, False),))
    assert verdicts(diagnose_host(old, [], "librdma.dylib is not there")) == [
        Verdict.MACOS_TOO_OLD,
        Verdict.THUNDERBOLT_4,
        Verdict.RDMA_CTL_OFF,
    ]


def test_a_mac_that_is_switched_on_but_has_no_thunderbolt_5():
    """macOS lists devices for its ports all the same, and rdma_ctl says enabled."""
    ports = Receptacle("1", 40, True, "en2"), Receptacle("2", 40, False, "en3")
    assert verdicts(diagnose_host(mac(receptacles=ports), [READY])) == [Verdict.THUNDERBOLT_4]


def test_devices_of_other_makers_have_none_of_apples_rules():
    """On a Mac that is not set up for RDMA over Thunderbolt, too."""
    gids = (Gid(0, "RoCE v2", ipaddress.IPv6Address("fe80::a8bb:ccff:fe00:1").packed),)
    card = Device("librdma", "rdma_mcrdma0", "", "ACTIVE", gids, link_layer="Ethernet", transport="InfiniBand")
    old = mac(macos=(15, 1), rdma_ctl="disabled")
    assert diagnose_host(old, [card]) == []
    assert verdicts(diagnose_host(old, [card, READY])) == [Verdict.MACOS_TOO_OLD, Verdict.RDMA_CTL_OFF]
    assert [str(found) for found in diagnose_device(card, old)] == [
        "rdma_mcrdma0 has no IPv4 address, so nothing says which device it is joined to; set MLXDIST_DEVICE_MAP"
    ]
    (down,) = diagnose_device(dataclasses.replace(card, state="DOWN"), old)
    assert down.remedy == "plug in the cable"


def test_a_library_that_fails():
    (found,) = diagnose_host(HostFacts(kernel_rdma=True), [], "libibverbs.so.1 is not installed")
    assert (found.verdict, found.what) == (Verdict.NO_LIBRARY, "libibverbs.so.1 is not installed")
    both = diagnose_host(HostFacts(kernel_rdma=False), [], "libibverbs.so.1 is not installed")
    assert verdicts(both) == [Verdict.NO_KERNEL_RDMA, Verdict.NO_LIBRARY]
    assert verdicts(diagnose_host(mac(), [], "librdma.dylib is not there")) == [Verdict.NO_LIBRARY]


def test_the_same_cause_is_not_reported_twice():
    error = "ibv_get_device_list of provider ibverbs failed: Function not implemented (errno 38)"
    assert verdicts(diagnose_host(HostFacts(kernel_rdma=False), [], error)) == [Verdict.NO_KERNEL_RDMA]


@pytest.mark.parametrize("memlock, low", [(64 << 10, True), (64 << 20, False), (None, False), (0, True)])
def test_memory_that_may_be_locked(memlock, low):
    found = diagnose_host(HostFacts(kernel_rdma=True, memlock=memlock), [READY])
    assert verdicts(found) == [Verdict.MEMLOCK] * low
    assert diagnose_host(HostFacts(kernel_rdma=True, memlock=memlock), [])[0].verdict is Verdict.NO_DEVICE


# Devices


@pytest.mark.parametrize(
    "device, facts, verdict, text",
    [
        (READY, mac(), Verdict.OK, "rdma_en2 is ready"),
        (
            thunderbolt(state="DOWN"),
            mac(),
            Verdict.PORT_DOWN,
            "rdma_en2 is DOWN; plug in the cable; RDMA must be enabled",
        ),
        (thunderbolt(gids=LINK_LOCAL), mac(), Verdict.NO_IPV4, "sudo ifconfig en2 inet"),
        (thunderbolt(gids=()), mac(), Verdict.NO_IPV4, "sudo ifconfig en2 inet"),
        (thunderbolt(gids=LINK_LOCAL), mac(interfaces=BRIDGE), Verdict.BRIDGED, "ifconfig bridge0 deletem en2"),
        (READY, mac(interfaces=BRIDGE), Verdict.OK, "ready"),
        (
            READY,
            mac(receptacles=(Receptacle("1", 40, True, "en2"), Receptacle("2", 120, False, "en3"))),
            Verdict.SLOW_CABLE,
            "the cable in Thunderbolt 1 (rdma_en2) runs at 40 Gb/s",
        ),
        (Device("ibverbs", "x", "", "INIT", link_layer="InfiniBand"), HostFacts(), Verdict.PORT_DOWN, "opensm"),
        (
            Device("ibverbs", "x", "", "DOWN", link_layer="InfiniBand"),
            HostFacts(),
            Verdict.PORT_DOWN,
            "plug in the cable",
        ),
        (Device("ibverbs", "x", "", "ACTIVE", LINK_LOCAL, link_layer="InfiniBand"), HostFacts(), Verdict.OK, "ready"),
        (
            Device("ibverbs", "x", "", "ACTIVE", link_layer="Ethernet"),
            HostFacts(),
            Verdict.NO_IPV4,
            "sudo ip address add",
        ),
        (
            Device("ibverbs", "x", "ibv_open_device: No (errno 13)"),
            HostFacts(),
            Verdict.NOT_PERMITTED,
            "may not open x",
        ),
        (
            Device("ibverbs", "x", "ibv_query_port: I/O (errno 5)"),
            HostFacts(),
            Verdict.NOT_OPENED,
            "ibv_query_port: I/O",
        ),
    ],
)
def test_what_is_wrong_with_a_device(device, facts, verdict, text):
    (found,) = diagnose_device(device, facts)
    assert found.verdict is verdict and text in str(found) and found.subject == device.name


@pytest.mark.parametrize("bridges", [(), BRIDGE])
def test_the_remedy_of_a_port_is_the_engines(bridges):
    """Before a job and after RTR has failed with errno 22 the same sentence is said: it names bridge and command."""
    (found,) = diagnose_device(thunderbolt(gids=LINK_LOCAL), mac(interfaces=bridges))
    remedy = ffi.string(lib.mlxdist_port_remedy()).decode()
    assert found.remedy.startswith(remedy)
    assert "bridge0" in remedy and "`mlxdist config --hosts HOST,... --auto-setup --without-bridge`" in remedy


def test_a_slow_cable_elsewhere_is_not_this_devices():
    ports = Receptacle("1", 80, True, "en2"), Receptacle("2", 40, True, "en3")
    assert verdicts(diagnose_device(thunderbolt("rdma_en2"), mac(receptacles=ports))) == [Verdict.OK]
    assert verdicts(diagnose_device(thunderbolt("rdma_en3"), mac(receptacles=ports))) == [Verdict.SLOW_CABLE]


# What the commands of macOS print


def test_receptacles_and_their_interfaces():
    text = synthetic_thunderbolt(("1", "Up to 80 Gb/s", True), ("2", "Up to 120 Gb/s", False))
    found = read_receptacles(text, interfaces.hardware_ports(SYNTHETIC_PORTS))
    assert [(port.number, port.speed, port.connected, port.interface) for port in found] == [
        ("1", 80, True, "en2"),
        ("2", 120, False, "en3"),
    ]


def test_receptacles_of_another_shape():
    text = (
        '{"SPThunderboltDataType": [null, 7, {"receptacle_1_tag": 3}, {"receptacle_1_tag": {"receptacle_id_key": 1}}]}'
    )
    assert read_receptacles(text) == ()


def test_a_port_without_a_known_speed():
    (port,) = read_receptacles(synthetic_thunderbolt(("1", "", True)))
    assert port.speed is None and diagnose_host(mac(receptacles=(port,)), [READY]) == []


def test_hardware_ports():
    assert interfaces.hardware_ports(SYNTHETIC_PORTS) == {
        "Ethernet": "en0",
        "Thunderbolt 1": "en2",
        "Thunderbolt 2": "en3",
    }


def test_bridge_members():
    (bridge,) = interfaces.macos_interfaces(SYNTHETIC_BRIDGE)
    assert bridge.members == ("en2", "en3")


@pytest.mark.parametrize(
    "text, state", [("enabled\n", "enabled"), ("RDMA is Disabled.", "disabled"), ("", None), ("usage: rdma_ctl", None)]
)
def test_rdma_ctl(text, state):
    assert system.rdma_ctl_state(text) == state


@pytest.mark.parametrize(
    "release, version",
    [
        ("25.2.0", (26, 2)),
        ("25.5.0", (26, 5)),  # 26.5.2
        ("24.6.0", (15, 6)),
        ("27.0.0", (27, 0)),  # no macOS had Darwin 26
        ("28.1.0", (28, 1)),
        ("", None),
        ("25", None),
        ("26.x", None),
    ],
)
def test_macos_version(release, version):
    assert system.macos_version(release) == version


SYNTHETIC_MAC = """
@mlxdist:system
Darwin

@mlxdist:release
25.3.0

@mlxdist:version
ProductName:		macOS
ProductVersion:		16.3
BuildVersion:		25D125

@mlxdist:sysctl
hw.memsize: 549755813888
hw.model: Mac15,14
hw.ncpu: 32
machdep.cpu.brand_string: Apple M3 Ultra
vm.loadavg: { 1.50 1.20 1.10 }
iogpu.wired_limit_mb: 491520

@mlxdist:memory
Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                               100000.
Pages inactive:                            50000.

@mlxdist:end
"""


def test_facts_of_a_mac():
    """The version of macOS is that of the kernel: a Python that was linked with an older SDK reads another one."""
    facts = collect.read_facts("studio", SYNTHETIC_MAC)
    assert (facts.macos, facts.release, facts.version) == ((26, 3), "26.3", "macOS 26.3 (25D125)")
    assert (facts.model, facts.chip, facts.cores, facts.load) == ("Mac15,14", "Apple M3 Ultra", 32, 1.5)
    assert facts.memory == system.Memory(512 << 30, 150_000 * 16384, 480 << 30)


def test_a_command_that_hangs_or_is_missing(tmp_path):
    assert collect.output_of("sleep", "60", seconds=0.2) == ""
    assert collect.output_of(str(tmp_path / "rdma_ctl"), "status") == ""


# Linux


@pytest.mark.parametrize(
    "limit, capabilities, lockable",
    [
        ("64", "CapEff:\t0000000000004000", None),
        ("64", "CapEff:\t0000000000000000", 64 << 10),
        ("64", "CapEff:\t000001ffffffffff", None),
        ("64", "", 64 << 10),
        ("unlimited", "", None),
    ],
)
def test_memory_that_a_process_may_lock(limit, capabilities, lockable):
    assert system.lockable_memory(limit, capabilities) == lockable


def test_the_limit_of_a_container_counts():
    meminfo = "MemTotal:       100 kB\nMemFree:        10 kB\nMemAvailable:   50 kB\n"
    assert system.linux_memory(meminfo, "max") == system.Memory(100 << 10, 50 << 10)
    assert system.linux_memory(meminfo, str(40 << 10)) == system.Memory(40 << 10, 40 << 10)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /sys and /proc")
def test_this_machine():
    found = collect.collect_here()
    assert found.system == "Linux" and found.kernel_rdma is Path("/sys/class/infiniband").is_dir()
    assert found.macos is None and found.memory.total >= found.memory.available > 0 and found.cores >= 1
    assert platform.release() in (found.release, found.version.rpartition(", ")[2])


@pytest.mark.skipif(sys.platform != "linux", reason="nproc is of Linux")
@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "OMP_THREAD_LIMIT"])
def test_cores_are_those_of_the_machine(monkeypatch, name):
    """Not those that a program is to use. nproc prints these."""
    cores = collect.collect_here().cores
    monkeypatch.setenv(name, str(cores + 5 if name == "OMP_NUM_THREADS" else 1))
    assert collect.collect_here.__wrapped__().cores == cores
