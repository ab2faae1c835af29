"""`mlxdist config`: what macOS prints of receptacles, interfaces and services, whole and damaged."""

import contextlib
import json
from ipaddress import IPv4Interface
from random import Random

import pytest
from fake_macs import FIXTURES, fixture
from hypothesis import given, settings
from hypothesis import strategies as st
from surveys import THUNDERBOLT, mac

from mlxdist.base.errors import InvalidArgument
from mlxdist.cluster.facts import interfaces as readers
from mlxdist.cluster.facts.collect import read_facts
from mlxdist.cluster.facts.interfaces import Service
from mlxdist.cluster.facts.thunderbolt import read_receptacles
from mlxdist.cluster.topology.topology import build_topology


@pytest.mark.parametrize(
    ("file", "connected", "peers", "others"),
    [
        ("m5_max_to_m3_ultra.json", {"1": 80}, ["1"], []),
        ("m3_ultra_to_m5_max.json", {"2": 80, "4": 80}, ["2"], ["Envoy Ultra"]),
        ("m5_max_with_hub.json", {"2": 80, "3": 80}, ["2"], ["SB-XTM5"]),
        ("m5_max_with_disk.json", {"2": 80, "3": 40}, ["2"], ["TBU405Pro"]),
        ("tb4_two_peers.json", {"1": 40, "2": 40, "3": 40}, ["2", "3"], ["Audio interface"]),
        ("synthetic_displays.json", {"1": 80, "2": 40, "3": 40}, ["1"], ["Studio Display", "display"]),
        ("synthetic_behind_hub.json", {"1": 80}, ["1"], ["Fusiondock"]),
        ("no_domains.json", {}, [], []),
    ],
)
def test_receptacles(file, connected, peers, others):
    found = read_receptacles(fixture(file))
    assert {r.number: r.speed for r in found if r.connected} == connected
    assert [r.number for r in found if r.peers] == peers
    assert sorted(name for r in found for name in r.others) == sorted(others)


@pytest.mark.parametrize("text", ["", "null", "[]", '{"SPThunderbolt": []}', pytest.param("[" * 100_000, id="deep")])
def test_what_is_no_output_of_system_profiler(text):
    with pytest.raises(InvalidArgument, match="not understood"):
        read_receptacles(text)


def test_a_receptacle_without_its_number():
    """Bus 0 has receptacle 1; a number of another type is none."""
    buses = [{"_name": "thunderboltusb4_bus_2", "receptacle_1_tag": {}}, {"receptacle_1_tag": {"receptacle_id_key": 4}}]
    assert [r.number for r in read_receptacles(json.dumps({"SPThunderboltDataType": buses}))] == ["3"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


VALUES = [
    None,
    True,
    0,
    -1.5,
    "",
    "x",
    "1",
    "80 Gb/s",
    "receptacle_connected",
    [],
    {},
    [{}],
    {"_items": [{"_items": 1}]},
]


def damaged(file, seed):
    """A fixture in which some values are others."""
    random = Random(seed)

    def damage(value):
        if random.random() < 0.05:
            return random.choice(VALUES)
        if isinstance(value, dict):
            return {key: damage(inner) for key, inner in value.items()}
        return [damage(inner) for inner in value] if isinstance(value, list) else value

    return json.dumps(damage(json.loads(fixture(file))))


@settings(deadline=None, max_examples=100)
@given(st.builds(damaged, st.sampled_from(THUNDERBOLT), st.integers(0)) | JSON.map(json.dumps) | st.text(max_size=99))
def test_any_output_of_system_profiler_is_read_or_rejected(text):
    with contextlib.suppress(InvalidArgument):
        other = read_receptacles(fixture("m4_pro_mini.json"))
        build_topology([mac("a", receptacles=read_receptacles(text)), mac("b", receptacles=other)])


@settings(deadline=None, max_examples=100)
@given(st.text(max_size=200) | JSON.map(json.dumps), st.sampled_from([*sorted(p.name for p in FIXTURES.glob("*.txt"))]))
def test_any_output_of_network_commands_is_read(text, file):
    for words in (text, fixture(file)[: len(text) * 7] + text):
        readers.macos_interfaces(words)
        readers.linux_interfaces(words)
        readers.default_interface(words)
        readers.hardware_ports(words)
        readers.services(words, {"Wi-Fi": words})


@given(
    st.lists(st.sampled_from(["system", "sudo", "thunderbolt", "interfaces", "end", "service x"]) | st.text(max_size=9))
)
def test_any_response_of_a_host_is_read_or_rejected(parts):
    text = "".join(f"\n@mlxdist:{part}\nDarwin\n" for part in parts)
    try:
        machine = read_facts("a", text)
    except InvalidArgument:
        return
    assert machine.unreadable  # there is no JSON in it


def test_interfaces_of_macos():
    found = {interface.name: interface for interface in readers.macos_interfaces(fixture("ifconfig.txt"))}
    assert list(found) == ["lo0", "gif0", "anpi1", "en1", "en2", "bridge0", "utun4"]
    assert found["en1"].addresses == (IPv4Interface("192.168.3.227/24"),) and found["en1"].up and not found["gif0"].up
    assert found["bridge0"].members == ("en2", "en3", "en4")
    assert found["utun4"].addresses == (IPv4Interface("100.100.1.2/32"),)
    assert readers.default_interface(fixture("synthetic_route_default.txt")) == "en1"


def test_services_of_macos():
    details = {"Thunderbolt 1": "info_manual.txt", "Ethernet": "synthetic_info_dhcp.txt"}
    details |= {"Old Link": "synthetic_info_off.txt"}
    found = readers.services(fixture("synthetic_services.txt"), {name: fixture(file) for name, file in details.items()})
    assert found == (
        Service("Ethernet", "Ethernet", "en0", True, "dhcp"),
        Service("Wi-Fi", "Wi-Fi", "en1"),
        Service("Thunderbolt 1", "Thunderbolt 1", "en2", True, "manual", IPv4Interface("192.168.50.120/24")),
        Service("Thunderbolt Bridge", "Thunderbolt Bridge", "bridge0"),
        Service("Old Link", "Thunderbolt 4", "en5", False, "off"),
        Service("VPN", "com.example.vpn", ""),
    )
