"""`mlxdist config`: cables, topologies, addresses, what is run and taken back, and the hostfile."""

import contextlib
import ipaddress
import itertools
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from ipaddress import IPv4Interface, IPv4Network
from pathlib import Path
from random import Random

import pytest
from click.testing import CliRunner
from fake_macs import FIXTURES, Macs, fixture
from hypothesis import given, settings
from hypothesis import strategies as st
from ssh_hosts import ssh_hosts

from mlxdist.cli import commands
from mlxdist.config import ports as readers
from mlxdist.config.addresses import RANGE, assign_addresses
from mlxdist.config.drawing import as_dot, as_svg, as_text
from mlxdist.config.ethernet import choose_addresses
from mlxdist.config.ports import Interface, Service
from mlxdist.config.result import make_hostfile
from mlxdist.config.steps import Step, plan_steps
from mlxdist.config.survey import Survey, read_survey
from mlxdist.config.thunderbolt import Peer, Receptacle, read_receptacles
from mlxdist.config.topology import Shape, build_topology
from mlxdist.config.undo import UndoFile
from mlxdist.config.verify import Check, problem
from mlxdist.errors import InvalidArgument
from mlxdist.hostfile import parse
from mlxdist.hostfile.hosts import Host
from mlxdist.hostfile.writing import write

THUNDERBOLT = sorted(path.name for path in FIXTURES.glob("*.json"))


def mac(name, *cables, size=4, speed=80, **fields):
    """``cables``: (own port, other host, its port). Thunderbolt N is en(N + 1)."""
    plugged = {own: f"{other}-{port}" for own, other, port in cables}
    receptacles = tuple(
        Receptacle(
            str(port),
            speed if port in plugged else 120,
            port in plugged,
            f"{name}-{port}",
            (Peer(plugged[port], "Mac Studio"),) if port in plugged else (),
        )
        for port in range(1, size + 1)
    )
    interfaces = {f"Thunderbolt {port}": f"en{port + 1}" for port in range(1, size + 1)}
    start = {
        "sudo": True,
        "rdma_ctl": "enabled",
        "receptacles": receptacles,
        "ports": {"Ethernet": "en0", **interfaces},
        "rdma": {interface: f"rdma_{interface}" for interface in interfaces.values()},
        "interfaces": (Interface("en0", True, (IPv4Interface(f"192.168.1.{sum(name.encode())}/16"),)),)
        + tuple(Interface(interface) for interface in interfaces.values()),
        "default": "en0",
    }
    return Survey(name, "Darwin", **(start | fields))


def macs(count, pairs, **fields):
    """Hosts a, b, c ...; each new cable goes into the next free port."""
    ends = {host: [] for host in range(count)}
    for a, b in pairs:
        port_a, port_b = len(ends[a]) + 1, len(ends[b]) + 1
        ends[a].append((port_a, "abcdefgh"[b], port_b))
        ends[b].append((port_b, "abcdefgh"[a], port_a))
    return [mac("abcdefgh"[host], *ends[host], **fields) for host in range(count)]


def mesh(count):
    return list(itertools.combinations(range(count), 2))


def surveys_of(*files):
    interfaces = {f"Thunderbolt {port}": f"en{port + 1}" for port in range(1, 7)}
    return [
        mac("abcd"[i], receptacles=read_receptacles(fixture(file)), ports=interfaces) for i, file in enumerate(files)
    ]


# What macOS prints


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
def test_any_output_of_system_profiler_is_read_or_refused(text):
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
def test_any_answer_of_a_host_is_read_or_refused(parts):
    text = "".join(f"\n@mlxdist:{part}\nDarwin\n" for part in parts)
    with pytest.raises(InvalidArgument):  # for want of JSON, at the latest
        read_survey("a", text)


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


# Cables


@pytest.mark.parametrize(
    ("files", "cables", "note"),
    [
        (("m5_max_to_m3_ultra.json", "m3_ultra_to_m5_max.json"), [("1", "2", True)], ""),
        (("m5_max_with_hub.json", "m5_max_with_disk.json"), [("2", "2", True)], ""),
        (("m4_pro_mini.json", "synthetic_m4_max_studio.json"), [("3", "1", True)], ""),
        (("synthetic_double_a.json", "synthetic_double_b.json"), [("1", "2", True), ("3", "1", True)], ""),
        (("synthetic_displays.json", "synthetic_displays_peer.json"), [("1", "1", True)], ""),
        (("synthetic_behind_hub.json", "synthetic_before_hub.json"), [("1", "2", True)], "goes through Fusiondock"),
        (
            ("tb4_two_peers.json", "synthetic_tb4_peer.json"),
            [("3", "1", False)],
            "40 Gb/s: Thunderbolt 4, which has no",
        ),
        (
            ("tb4_two_peers.json", "synthetic_tb4_peer.json"),
            [("3", "1", False)],
            "Thunderbolt 2 leads to iMac, which is",
        ),
        (("m4_pro_mini.json", "no_domains.json"), [], "a Thunderbolt 3 leads to Mac Studio, which is none of these"),
    ],
)
def test_cables(files, cables, note):
    for order in (1, -1):
        found = build_topology(surveys_of(*files[::order]))
        ends = [(c.a.receptacle, c.b.receptacle)[::order] + (c.rdma,) for c in found.cables]
        assert sorted(ends) == sorted(cables)
        assert any(
            (note if order == 1 else note.replace("a Thunderbolt", "b Thunderbolt")) in n for n in found.notes + ("",)
        )
        assert note or not found.notes


def test_a_mac_by_two_names():
    with pytest.raises(InvalidArgument, match="a and b are the same Mac"):
        build_topology(surveys_of("m4_pro_mini.json", "m4_pro_mini.json"))


def test_a_cable_from_a_host_to_itself():
    found = build_topology([mac("a", (1, "a", 2), (2, "a", 1)), mac("b")])
    assert not found.cables and found.notes == (
        "a Thunderbolt 1 and Thunderbolt 2 are joined to each other: pull that cable",
    )


@pytest.mark.parametrize(
    ("count", "pairs", "shape", "ring", "missing"),
    [
        (1, [], Shape.SINGLE, (), []),
        (2, [(0, 1)], Shape.MESH, (), []),
        (2, [(0, 1), (0, 1)], Shape.MESH, (), []),
        (2, [], Shape.APART, (), [(0, 1)]),
        (3, mesh(3), Shape.MESH, (0, 1, 2), []),
        (3, [(0, 1), (1, 2)], Shape.LINE, (), [(0, 2)]),
        (4, mesh(4), Shape.MESH, (0, 1, 2, 3), []),
        (4, [(0, 1), (1, 2), (2, 3), (0, 3)], Shape.RING, (0, 1, 2, 3), [(0, 2), (1, 3)]),
        (4, [(0, 2), (1, 2), (1, 3), (0, 3)], Shape.RING, (0, 2, 1, 3), [(0, 1), (2, 3)]),
        (4, [(0, 1), (0, 2), (0, 3)], Shape.INCOMPLETE, (), [(1, 2), (1, 3), (2, 3)]),
        (4, [(0, 1), (2, 3)], Shape.APART, (), [(0, 2), (0, 3), (1, 2), (1, 3)]),
        (8, [(i, (i + 3) % 8) for i in range(8)], Shape.RING, (0, 3, 6, 1, 4, 7, 2, 5), None),
    ],
)
def test_shapes(count, pairs, shape, ring, missing):
    found = build_topology(macs(count, pairs, size=8))
    assert (found.shape, found.ring) == (shape, ring)
    assert missing is None or list(found.missing) == missing


def test_what_is_missing_is_said_with_a_free_port():
    files = [f"synthetic_missing_{host}.json" for host in "abcd"]
    found = build_topology(surveys_of(*files))
    assert found.shape is Shape.RING and found.ring == (0, 1, 3, 2)
    assert found.advice() == ["for a mesh 1 cable is missing:", "  from a Thunderbolt 3 to d Thunderbolt 3"]
    line = build_topology(macs(3, [(0, 1), (1, 2)]))
    assert line.advice()[0] == "one more cable makes it a ring: from a Thunderbolt 2 to c Thunderbolt 2"
    full = build_topology(macs(3, [(0, 1), (0, 1)], size=2))
    assert full.advice()[1:] == ["  from a to c Thunderbolt 1", "  from b to c Thunderbolt 2"]


def test_more_cables_than_are_used():
    assert "3 cables between a and b: mlxdist uses 2" in build_topology(macs(2, [(0, 1)] * 3)).notes[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a:en2=c:en2", "'c' is none of the hosts"),
        ("a:en99=b:en2", "a has no interface 'en99', but en0, en2"),
        ("a:en2=a:en3", "of two hosts"),
        ("a:en2", "write a cable as HOST:INTERFACE=HOST:INTERFACE"),
    ],
)
def test_cables_that_cannot_be_named(text, words):
    with pytest.raises(InvalidArgument, match=words):
        build_topology(macs(2, []), [text])


# Pictures


def test_the_picture():
    surveys = macs(3, [(0, 1), (1, 2)], size=2)
    assert as_text(build_topology(surveys)).plain.splitlines() == [
        "┌──────────────────────────────┐",
        "│ a                            │",
        "│   Thunderbolt 1 en2, 80 Gb/s ├──┐",
        "│   no cable                   ├╌╌┼╌╌┐",
        "└──────────────────────────────┘  │  ╎",
        "┌──────────────────────────────┐  │  ╎",
        "│ b                            │  │  ╎",
        "│   Thunderbolt 1 en2, 80 Gb/s ├──┘  ╎",
        "│   Thunderbolt 2 en3, 80 Gb/s ├──┐  ╎",
        "└──────────────────────────────┘  │  ╎",
        "┌──────────────────────────────┐  │  ╎",
        "│ c                            │  │  ╎",
        "│   Thunderbolt 1 en2, 80 Gb/s ├──┘  ╎",
        "│   no cable                   ├╌╌╌╌╌┘",
        "└──────────────────────────────┘",
    ]


def test_no_cable_is_drawn_where_a_ring_needs_none():
    ring = build_topology(macs(4, [(0, 1), (1, 2), (2, 3), (0, 3)]))
    assert "no cable" not in as_text(ring).plain and "missing" not in as_dot(ring) + as_svg(ring)
    assert as_text(ring).plain.count("Gb/s") == 8


def test_colours():
    slow = as_text(build_topology(macs(2, [(0, 1)], speed=40)))
    assert {span.style for span in slow.spans} >= {"yellow", "bold"} and "green" not in {s.style for s in slow.spans}
    assert "green" in {span.style for span in as_text(build_topology(macs(2, [(0, 1)]))).spans}


def test_dot():
    topology = replace(build_topology(macs(3, [(0, 1)])), names=('"quoted"', "b", "c"))
    assert as_dot(topology).splitlines() == [
        "graph G {",
        "  node [shape=rectangle];",
        '  h0 [label="\\"quoted\\""];',
        '  h1 [label="b"];',
        '  h2 [label="c"];',
        '  h0 -- h1 [label="en2/en2 80 Gb/s"];',
        '  h0 -- h2 [style=dashed, color=red, label="missing"];',
        '  h1 -- h2 [style=dashed, color=red, label="missing"];',
        "}",
    ]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_svg(count):
    topology = build_topology(macs(count, [*mesh(count), *mesh(count)[:1]], size=8))
    root = ElementTree.fromstring(as_svg(replace(topology, names=("<a&b>", *topology.names[1:]))))
    kinds = [element.tag.rpartition("}")[2] for element in root]
    assert kinds.count("rect") == count and kinds.count("path") == len(topology.cables)
    assert "<a&b>" in [element.text for element in root]
    assert len({element.get("d") for element in root if element.get("d")}) == len(topology.cables)


# Addresses


def with_links(surveys, links):
    """The hosts after their interfaces have the addresses of the links."""
    found = []
    for host, survey in enumerate(surveys):
        given = {link.cable.end(host).interface: link.address(host) for link in links if host in link.cable.pair}
        interfaces = [replace(i, addresses=(given[i.name],)) if i.name in given else i for i in survey.interfaces]
        found.append(replace(survey, interfaces=tuple(interfaces)))
    return found


def test_each_cable_has_a_subnet_of_its_own():
    surveys = macs(4, mesh(4) + [(0, 1)])
    links = assign_addresses(surveys, build_topology(surveys))
    networks = [link.a.network for link in links]
    assert len(set(networks)) == 7 and all(n.prefixlen == 30 and n.subnet_of(RANGE) for n in networks)
    assert all(link.a.network == link.b.network and link.a != link.b for link in links)
    assert str(links[0].a) == "10.111.0.1/30" and str(links[0].b) == "10.111.0.2/30"


def test_what_is_there_is_kept():
    surveys = macs(3, mesh(3))
    topology = build_topology(surveys)
    links = assign_addresses(surveys, topology)
    again = assign_addresses(with_links(surveys, links), topology)
    assert [(link.a, link.b) for link in again] == [(link.a, link.b) for link in links]
    assert all(link.kept for link in again)
    # One end of the second cable has lost its address, and a third host came in between: nothing else moves.
    half = with_links(surveys, links)
    lost = [replace(i, addresses=()) if i.name == "en2" else i for i in half[2].interfaces]
    half[2] = replace(half[2], interfaces=tuple(lost))
    repaired = assign_addresses(half, topology)
    assert [(link.a, link.b) for link in repaired] == [(link.a, link.b) for link in links]
    assert [link.kept for link in repaired] == [True, False, True]


def test_addresses_of_the_user_are_kept_and_others_are_not():
    surveys = macs(2, [(0, 1)])

    def given(*addresses):
        return [
            replace(s, interfaces=(*s.interfaces[:1], Interface("en2", True, (IPv4Interface(address),))))
            for s, address in zip(surveys, addresses)
        ]

    topology = build_topology(surveys)
    (mine,) = assign_addresses(given("10.0.9.1/24", "10.0.9.7/24"), topology)
    assert mine.kept and str(mine.b) == "10.0.9.7/24"
    for useless in (
        ("169.254.3.4/16", "169.254.9.9/16"),  # macOS makes others at the next start
        ("10.0.9.1/24", "10.0.8.1/24"),
        ("10.0.9.1/24", "10.0.9.1/24"),
        ("192.168.1.200/16", "192.168.1.201/16"),  # the network that both are in otherwise
    ):
        (fresh,) = assign_addresses(given(*useless), topology)
        assert not fresh.kept and fresh.a.network.subnet_of(RANGE)


def test_subnets_that_are_taken_or_too_few():
    surveys = macs(2, [(0, 1), (0, 1)])
    surveys[1] = replace(
        surveys[1], interfaces=(*surveys[1].interfaces, Interface("en9", True, (IPv4Interface("10.111.0.200/24"),)))
    )
    topology = build_topology(surveys)
    assert str(assign_addresses(surveys, topology)[0].a) == "10.111.1.1/30"
    with pytest.raises(InvalidArgument, match="too few subnets"):
        assign_addresses(surveys, topology, IPv4Network("10.9.0.0/30"))
    with pytest.raises(InvalidArgument, match="too few subnets"):
        assign_addresses(surveys, topology, IPv4Network("10.9.0.0/31"))


# Steps


A, B = IPv4Interface("10.111.0.1/30"), IPv4Interface("10.111.0.2/30")


def steps_of(survey, **options):
    """On the first of two Macs with one cable."""
    other = macs(2, [(0, 1)])[1]
    pair = [
        replace(survey, name="a"),
        replace(other, services=(Service("T", "Thunderbolt 1", "en2", True, "manual", B),)),
    ]
    found = plan_steps(pair, assign_addresses(pair, build_topology(pair)), **options)
    assert all(step.host == "a" for step in found)
    return [str(step).removeprefix("sudo networksetup ") for step in found], [step.undone for step in found[::-1]]


@pytest.mark.parametrize(
    ("service", "commands", "undone"),
    [
        (
            None,
            [
                "-createnetworkservice 'mlxdist Thunderbolt 1' 'Thunderbolt 1'",
                "-setmanual 'mlxdist Thunderbolt 1' 10.111.0.1 255.255.255.252",
            ],
            ["-removenetworkservice 'mlxdist Thunderbolt 1'"],
        ),
        (Service("Own", "Thunderbolt 1", "en2", True, "manual", A), [], []),
        (
            Service("Own", "Thunderbolt 1", "en2", True, "dhcp"),
            ["-setmanual Own 10.111.0.1 255.255.255.252"],
            ["-setdhcp Own"],
        ),
        (
            Service("Own", "Thunderbolt 1", "en2", True, "off"),
            ["-setmanual Own 10.111.0.1 255.255.255.252"],
            ["-setv4off Own"],
        ),
        (
            Service("Own", "Thunderbolt 1", "en2", True, "manual", IPv4Interface("10.1.1.1/24"), "10.1.1.9"),
            ["-setmanual Own 10.111.0.1 255.255.255.252"],
            ["-setmanual Own 10.1.1.1 255.255.255.0 10.1.1.9"],
        ),
        (
            Service("Own", "Thunderbolt 1", "en2", False, "manual", IPv4Interface("10.1.1.1/24")),
            ["-setnetworkserviceenabled Own on", "-setmanual Own 10.111.0.1 255.255.255.252"],
            ["-setmanual Own 10.1.1.1 255.255.255.0", "-setnetworkserviceenabled Own off"],
        ),
    ],
)
def test_steps_on_a_mac(service, commands, undone):
    shown, back = steps_of(replace(macs(2, [(0, 1)])[0], services=(service,) if service else ()))
    assert shown == commands
    assert [str(step).removeprefix("sudo networksetup ") for step in back if step] == undone


def test_the_bridge_is_touched_only_when_asked():
    survey = macs(2, [(0, 1)])[0]
    bridged = replace(survey, interfaces=(*survey.interfaces, Interface("bridge0", members=("en2", "en3"))))
    assert not any("bridge" in line for line in steps_of(bridged)[0])
    shown, back = steps_of(bridged, without_bridge=True)
    assert shown[0] == "sudo ifconfig bridge0 deletem en2" and str(back[-1]) == "sudo ifconfig bridge0 addm en2"


@pytest.mark.parametrize(
    ("interface", "manager", "commands", "undone"),
    [
        (
            Interface("eth1", False),
            False,
            ["ip address add 10.111.0.1/30 dev eth1", "ip link set eth1 up"],
            ["ip link set eth1 down", "ip address delete 10.111.0.1/30 dev eth1"],
        ),
        (Interface("eth1", True, (A,)), True, [], []),
        (Interface("eth1", False, (A,)), True, ["ip link set eth1 up"], ["ip link set eth1 down"]),
        (
            Interface("eth1"),
            True,
            [
                "nmcli connection add type ethernet ifname eth1 con-name mlxdist-eth1 ipv4.method manual "
                "ipv4.addresses 10.111.0.1/30 ipv6.method link-local",
                "nmcli connection up mlxdist-eth1",
            ],
            ["nmcli connection delete mlxdist-eth1"],
        ),
    ],
)
def test_steps_on_linux(interface, manager, commands, undone):
    pair = [
        Survey("a", "Linux", interfaces=(interface,), network_manager=manager),
        Survey("b", "Linux", interfaces=(Interface("eth1", True, (B,)),)),
    ]
    found = plan_steps(pair, assign_addresses(pair, build_topology(pair, ["a:eth1=b:eth1"])))
    assert [str(step).removeprefix("sudo ") for step in found] == commands
    assert [str(step.undone).removeprefix("sudo ") for step in found[::-1] if step.undone] == undone


@pytest.mark.parametrize("values", [("rm", "-rf"), ("create service", "a"), ("set dhcp", "-x"), ("set dhcp", "a\0")])
def test_steps_that_cannot_be(values):
    with pytest.raises(InvalidArgument, match="the step|no step"):
        Step("a", values[0], values[1:])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"mlxdist undo": 2, "steps": []}',
        '{"mlxdist undo": 1, "steps": [["a", "rm", "x"]]}',
        "[" * 100_000,
    ]
    + ['{"mlxdist undo": 1, "steps": [["a"]]}', '{"mlxdist undo": 1, "steps": [["a", ["set dhcp"], "x"]]}'],
)
def test_undo_files_that_are_none(tmp_path, text):
    (tmp_path / "x.undo.json").write_text(text)
    with pytest.raises(InvalidArgument, match="x.undo.json"):
        UndoFile.beside(str(tmp_path / "x.json"))


# Through the network


def host(name, *interfaces, default="", wireless=()):
    listed = tuple(Interface(n, True, tuple(map(IPv4Interface, addresses))) for n, *addresses in interfaces)
    return Survey(name, "Linux", interfaces=listed, default=default, wireless=frozenset(wireless))


@pytest.mark.parametrize(
    ("surveys", "addresses"),
    [
        # Wi-Fi is the default route of both, and they have a cable.
        (
            [
                host("a", ("en1", "192.168.1.5/24"), ("en0", "10.0.0.5/24"), default="en1", wireless=["en1"]),
                host("b", ("en1", "192.168.1.6/24"), ("en0", "10.0.0.6/24"), default="en1", wireless=["en1"]),
            ],
            ["10.0.0.5", "10.0.0.6"],
        ),
        # One has Wi-Fi alone: the network that both are in.
        (
            [
                host("a", ("en1", "192.168.1.5/24"), ("en0", "10.0.0.5/24"), default="en0", wireless=["en1"]),
                host("b", ("en1", "192.168.1.6/24"), default="en1", wireless=["en1"]),
            ],
            ["192.168.1.5", "192.168.1.6"],
        ),
        # One network, by cable and by Wi-Fi.
        (
            [
                host("a", ("en1", "10.0.0.9/24"), ("en0", "10.0.0.5/24"), default="en1", wireless=["en1"]),
                host("b", ("en0", "10.0.0.6/24"), default="en0"),
            ],
            ["10.0.0.5", "10.0.0.6"],
        ),
        # Two networks with all: that of the default route.
        (
            [
                host("a", ("eth0", "10.0.0.5/24"), ("eth1", "10.9.0.5/24"), default="eth1"),
                host("b", ("eth0", "10.0.0.6/24"), ("eth1", "10.9.0.6/24"), default="eth1"),
            ],
            ["10.9.0.5", "10.9.0.6"],
        ),
        # None with all: the default route of each. Tunnels, containers and self-assigned addresses never.
        (
            [
                host(
                    "a", ("docker0", "172.17.0.1/16"), ("eth0", "10.0.0.5/24"), ("eth1", "10.7.0.5/24"), default="eth1"
                ),
                host(
                    "b", ("docker0", "172.17.0.1/16"), ("utun3", "10.7.0.6/24"), ("eth0", "10.1.0.6/24"), default="eth0"
                ),
                host("c", ("lo", "127.0.0.1/8"), ("eth0", "169.254.1.1/16")),
            ],
            ["10.7.0.5", "10.1.0.6", None],
        ),
    ],
)
def test_addresses_of_the_network(surveys, addresses):
    assert [choice and str(choice.address.ip) for choice in choose_addresses(surveys)] == addresses


# The hostfile


def hostfile_of(surveys, **options):
    topology = build_topology(surveys)
    links = assign_addresses(surveys, topology)
    found = make_hostfile(surveys, topology, links, choose_addresses(surveys), **options)
    read = parse(write(found, "json"), "x")
    assert not read.warnings
    return read


def test_hostfile_of_a_mesh_with_two_cables():
    found = hostfile_of(macs(3, mesh(3) + [(0, 1)]), envs=("A=1",), hosts=[Host("b", slots=2)])
    assert [h.name for h in found.hosts] == ["a", "b", "c"] and found.backend == "mlxdist" and found.envs == ("A=1",)
    assert [h.rdma for h in found.hosts] == [
        ((), ("rdma_en2", "rdma_en4"), ("rdma_en3",)),
        (("rdma_en2", "rdma_en4"), (), ("rdma_en3",)),
        (("rdma_en2",), ("rdma_en3",), ()),
    ]
    assert [h.slots for h in found.hosts] == [1, 2, 1] and found.hosts[0].ips == ("192.168.1.97",)
    assert hostfile_of(macs(3, mesh(3) + [(0, 1)]), backend="jaccl").hosts[0].rdma[1] == ("rdma_en2",)


def test_hostfile_of_a_ring():
    """Neighbours stand beside each other, and operations are told to go around."""
    found = hostfile_of(macs(4, [(0, 2), (1, 2), (1, 3), (0, 3)]))
    assert [h.name for h in found.hosts] == ["a", "c", "b", "d"]
    assert found.envs == ("MLXDIST_WIRES=0-1,1-2,2-3,3-0",)
    assert [bool(row) for row in found.hosts[0].rdma] == [False, True, False, True]
    jaccl = hostfile_of(macs(4, mesh(4)), backend="jaccl-ring")
    assert [bool(row) for row in jaccl.hosts[0].rdma] == [False, True, False, True] and not jaccl.envs
    ring = hostfile_of(macs(4, [(0, 1), (1, 2), (2, 3), (0, 3)]), backend="ring")
    assert ring.hosts[1].ips == ("10.111.0.2",) and not ring.hosts[0].rdma


def test_mlx_reads_the_hostfile(tmp_path):
    from mlx._distributed_utils.common import Hostfile

    surveys = macs(3, mesh(3) + [(0, 1)])
    topology = build_topology(surveys)
    links = assign_addresses(surveys, topology)
    found = make_hostfile(surveys, topology, links, choose_addresses(surveys), backend="jaccl", envs=("A=1",))
    (tmp_path / "hosts.json").write_text(write(found, "json"))
    read = Hostfile.from_file(tmp_path / "hosts.json")
    assert [(host.ssh_hostname, host.ips, host.rdma[0]) for host in read.hosts][1:] == [
        ("b", ["192.168.1.98"], "rdma_en2"),
        ("c", ["192.168.1.99"], "rdma_en2"),
    ]
    assert read.backend == "jaccl" and read.envs == ["A=1"]


def test_hostfile_without_rdma():
    surveys = macs(2, [(0, 1)], speed=40)
    assert [(h.rdma, h.ips) for h in hostfile_of(surveys).hosts] == [
        ((), ("10.111.0.1", "192.168.1.97")),
        ((), ("10.111.0.2", "192.168.1.98")),
    ]
    off = [replace(survey, rdma={}, rdma_ctl="disabled") for survey in macs(2, [(0, 1)])]
    assert not hostfile_of(off).hosts[0].rdma
    line = hostfile_of(macs(3, [(0, 1), (1, 2)]))
    assert not line.envs and line.hosts[0].rdma == ((), ("rdma_en2",), ())


@pytest.mark.parametrize(
    ("pairs", "speed", "backend", "words"),
    [
        ([(0, 1), (1, 2)], 80, "jaccl", "needs RDMA between a and c"),
        ([(0, 1), (1, 2)], 80, "jaccl-ring", "needs a ring"),
        (mesh(3), 40, "jaccl-ring", "needs RDMA between a and b"),
        ([(0, 1), (1, 2)], 80, "ring", "needs a ring"),
    ],
)
def test_backends_that_the_cables_do_not_do(pairs, speed, backend, words):
    with pytest.raises(InvalidArgument, match=words):
        hostfile_of(macs(3, pairs, speed=speed), backend=backend)


# The command, with Macs that ssh reaches


@pytest.fixture
def two_macs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "macs").mkdir()
    found = Macs(tmp_path / "macs")
    services = [["Wi-Fi", "Wi-Fi", "en0", True, "dhcp", ""], ["Own", "Thunderbolt 2", "en6", True, "dhcp", ""]]
    found.add("book", "m5_max_with_hub.json", "ports_m5_max.txt", bridge=["en1", "en6", "en2"])
    found.add("air", "m5_max_with_disk.json", "ports_m5_max.txt", services=services)
    return found


def config(reached, *words):
    return CliRunner().invoke(commands, ["config", *(["--ssh", reached.ssh] if reached else []), *words])


BOTH = ("--hosts", "book,air")


def test_set_up_once_and_taken_back(two_macs, tmp_path):
    before = [two_macs.read("book"), two_macs.read("air")]
    done = config(two_macs, *BOTH, "--auto-setup", "--verify", "--without-bridge")
    assert done.exit_code == 0, done.output
    assert "book: sudo networksetup -createnetworkservice 'mlxdist Thunderbolt 2' 'Thunderbolt 2'\n" in done.stdout
    assert "air: sudo networksetup -setmanual Own 10.111.0.2 255.255.255.252\n" in done.stdout
    assert "2 of 2 ways work" in done.stdout and "puts en6 back into bridge0" in done.stderr
    assert two_macs.read("book")["bridge"] == ["en1", "en2"]
    assert parse((tmp_path / "rmlx-hosts.json").read_text(), "x").hosts[0].rdma == ((), ("rdma_en6",))

    after = [two_macs.read("book"), two_macs.read("air")]
    again = config(two_macs, *BOTH, "--auto-setup", "--without-bridge")
    assert again.exit_code == 0 and "sudo" not in again.stdout and "(there already)" in again.stdout
    assert [two_macs.read("book"), two_macs.read("air")] == after

    shown = config(two_macs, "--undo", "--dry-run")
    assert shown.stdout.splitlines()[0] == "air: sudo networksetup -setdhcp Own"
    assert [two_macs.read("book"), two_macs.read("air")] == after
    back = config(two_macs, "--undo")
    assert back.exit_code == 0 and back.stdout == shown.stdout
    for now, then in zip([two_macs.read("book"), two_macs.read("air")], before):
        assert now | {"bridge": sorted(now["bridge"])} == then | {"bridge": sorted(then["bridge"])}
    assert not (tmp_path / "rmlx-hosts.undo.json").exists()
    assert "nothing was set up" in config(two_macs, "--undo").stderr


def test_dry_run(two_macs, tmp_path):
    before = two_macs.read("book")
    shown = config(two_macs, *BOTH, "--dry-run", "--dot", "x.dot", "--svg", "x.svg")
    assert shown.exit_code == 0 and "To be run:\n  book: sudo networksetup -create" in shown.stdout
    assert "1 cable, mesh" in shown.stdout and "en6 left in bridge0" in shown.stderr
    assert two_macs.read("book") == before and {path.name for path in tmp_path.iterdir()} == {"macs"}


def test_json_and_pictures(two_macs, tmp_path):
    done = config(two_macs, *BOTH, "--json", "--dot", "x.dot", "--svg", "x.svg", "--output-hostfile", "h.json")
    found = json.loads(done.stdout)
    assert found["shape"] == "mesh" and found["cables"][0]["ends"][0]["interface"] == "en6"
    assert found["steps"][0]["command"][0] == "networksetup" and found["hosts"][0]["wireless"]
    assert found["hostfile"] == json.loads((tmp_path / "h.json").read_text())
    assert (tmp_path / "x.dot").read_text().startswith("graph G") and "<svg" in (tmp_path / "x.svg").read_text()
    alone = config(two_macs, *BOTH, "--dot")  # as mlx.distributed_config has it
    assert alone.stdout.startswith("graph G {") and not (tmp_path / "rmlx-hosts.json").exists()


def test_hosts_that_do_not_answer(two_macs, tmp_path):
    done = config(two_macs, "--hosts", "book,nowhere,air")
    assert (
        done.exit_code == 1
        and "nowhere does not answer: ssh: Could not resolve hostname nowhere; try: ssh" in done.stderr
    )
    assert not (tmp_path / "rmlx-hosts.json").exists()
    done = config(two_macs, "--hosts", "book,nowhere,air", "--ignore-unreachable", "--output", "-")
    assert done.exit_code == 0 and [h.name for h in parse(done.stdout, "x").hosts] == ["book", "air"]


def test_sudo_that_asks_for_a_password(two_macs, tmp_path):
    two_macs.write("air", two_macs.read("air") | {"sudo": False})
    done = config(two_macs, *BOTH, "--auto-setup")
    assert done.exit_code == 1
    command = f"{two_macs.ssh} -t air 'sudo networksetup -setmanual Own 10.111.0.2 255.255.255.252'"
    assert f"air asks for a password before sudo; type: {command}" in done.stderr
    assert two_macs.read("book")["addresses"]["en6"] == "10.111.0.1/255.255.255.252"  # the other host is set up
    assert (tmp_path / "rmlx-hosts.json").exists()


def test_a_step_that_fails(two_macs, tmp_path):
    two_macs.write(
        "air", two_macs.read("air") | {"ports": two_macs.read("air")["ports"].replace("Port: Thunderbolt 2", "Port: X")}
    )
    two_macs.write("book", two_macs.read("book") | {"ports": "Hardware Port: Thunderbolt 2\nDevice: en6\n"})
    assert "air has no network interface for Thunderbolt 2" in config(two_macs, *BOTH, "--dry-run").stderr
    undo = tmp_path / "rmlx-hosts.undo.json"
    undo.write_text(
        '{"mlxdist undo": 1, "steps": [["book", "join bridge", "bridge0", "en9"], ["air", "set dhcp", "Gone"]]}'
    )
    done = config(two_macs, "--undo")
    assert done.exit_code == 1 and "`sudo networksetup -setdhcp Gone` failed: Gone is not a recognized" in done.stderr
    assert [step.values for step in UndoFile(undo).steps] == [("Gone",)]  # to be tried again


def test_verify_says_what_does_not_work(two_macs):
    done = config(two_macs, *BOTH, "--verify")
    assert done.exit_code == 1 and "0 of 2 ways work" in done.stdout
    assert "air does not reach 10.111.0.1 of book by en6: look at the cable" in done.stderr
    assert (
        "book does not reach 10.111.0.2 of air by en6: en6 is a member of bridge0; run this again with" in done.stderr
    )


@pytest.mark.parametrize(
    ("answer", "words"),
    [(("yes", "en2"), ""), (("yes", ""), ""), (("yes", "en9"), "by en9, not by en2"), (("no", ""), "does not reach")],
)
def test_the_way_to_a_peer(answer, words):
    found = problem(Check("a", "b", "10.111.0.2", "en2"), *answer)
    assert words in found and bool(found) == bool(words)


def test_a_hostfile_that_is_replaced_is_kept(two_macs, tmp_path):
    (tmp_path / "rmlx-hosts.json").write_text("mine")
    done = config(two_macs, *BOTH)
    assert done.exit_code == 0 and "is now rmlx-hosts.json.old" in done.stderr
    assert (tmp_path / "rmlx-hosts.json.old").read_text() == "mine"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "Give --hosts A,B"),
        (("--hosts", "a", "--range", "10.0.0.1/8"), "--range 10.0.0.1/8: 10.0.0.1/8 has host bits set"),
        (("--hosts", "a", "--env", "x y"), "--env: 'x y' sets no environment variable"),
        (("--hosts", "a", "--over", "ethernet", "--backend", "jaccl"), "needs cables"),
        (("--hosts", "a", "--auto-setup", "--dry-run"), "--dry-run runs none"),
        (("--hosts", "localhost", "--dry-run"), "Linux does not tell which cable leads where"),
    ],
)
def test_what_is_refused(words, said):
    done = config(None, *words)
    assert done.exit_code != 0 and said in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="looks at Linux")
def test_this_machine_over_ethernet():
    done = config(None, "--hosts", "localhost", "--over", "ethernet", "--output", "-")
    assert [h.name for h in parse(done.stdout, "x").hosts] == ["localhost"], done.stderr


# Linux hosts that are there


@pytest.fixture
def linux(tmp_path):
    """Two hosts with a network, and a cable between them that has no addresses."""
    (tmp_path / "ssh").mkdir()
    with ssh_hosts(tmp_path / "ssh") as found:
        a, b = (host.namespace for host in found.hosts[:2])
        subprocess.run(
            ["ip", "link", "add", "cable0", "netns", a, "type", "veth", "peer", "name", "cable0", "netns", b],
            check=True,
        )
        yield found


def config_on(hosts, folder, *words):
    command = hosts.command(sys.executable, "-m", "mlxdist", "config", "--ssh", hosts.ssh, *words)
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def addresses_on(hosts):
    shown = [["ip", "-n", host.namespace, "-json", "addr", "show", "cable0"] for host in hosts.hosts[:2]]
    found = [json.loads(subprocess.run(words, capture_output=True, check=True).stdout)[0] for words in shown]
    return [("UP" in f["flags"], [a["local"] for a in f["addr_info"] if a["family"] == "inet"]) for f in found]


@pytest.mark.long
def test_linux_over_ethernet(linux, tmp_path):
    names = ",".join(linux.names[:2])
    done = config_on(linux, tmp_path, "--hosts", names, "--over", "ethernet", "--verify")
    assert done.returncode == 0, done.stderr
    found = parse((tmp_path / "rmlx-hosts.json").read_text(), "x")
    assert [h.ips for h in found.hosts] == [(host.address,) for host in linux.hosts[:2]]
    assert "2 of 2 ways work" in done.stdout
    linux.hosts[1].pull_cable()
    done = config_on(linux, tmp_path, "--hosts", names, "--over", "ethernet", "--verify")
    assert done.returncode == 1 and f"{linux.names[1]} does not answer" in done.stderr


@pytest.mark.long
def test_linux_cables(linux, tmp_path):
    a, b = linux.names[:2]
    words = ["--hosts", f"{a},{b}", "--cable", f"{a}:cable0={b}:cable0"]
    before = addresses_on(linux)
    assert before == [(False, []), (False, [])]
    done = config_on(linux, tmp_path, *words, "--auto-setup", "--verify")
    assert done.returncode == 0 and "2 of 2 ways work" in done.stdout, done.stdout + done.stderr
    assert addresses_on(linux) == [(True, ["10.111.0.1"]), (True, ["10.111.0.2"])]
    again = config_on(linux, tmp_path, *words, "--auto-setup")
    assert again.returncode == 0 and "sudo" not in again.stdout and "(there already)" in again.stdout
    back = config_on(linux, tmp_path, "--undo")
    assert back.returncode == 0 and addresses_on(linux) == before, back.stderr


def test_the_range_that_is_documented():
    from mlxdist.config import command

    assert ipaddress.IPv4Network(command._RANGE) == RANGE


# scripts/setup_rdma.py


def setup_rdma(*words, **variables):
    script = Path(__file__).parent.parent / "scripts" / "setup_rdma.py"
    return subprocess.run(
        [sys.executable, str(script), *words], capture_output=True, text=True, timeout=60, env=os.environ | variables
    )


def test_setup_of_two_nodes(two_macs, tmp_path):
    nodes = {"RMLX_NODE0": "book", "RMLX_NODE1": "air"}
    words = ["--ssh", two_macs.ssh, "--wait", "0.1", "--node0-ip", "10.9.0.1", "--node1-ip", "10.9.0.2/30"]
    shown = setup_rdma(*words, "--dry-run", **nodes)
    assert shown.returncode == 0 and "would run on air: sudo networksetup -setmanual Own 10.9.0.2" in shown.stdout, (
        shown
    )
    assert "book: rdma_ctl enabled, devices rdma_en3" in shown.stdout and not (tmp_path / "rmlx-hosts.json").exists()
    done = setup_rdma(*words, **nodes)
    assert done.returncode == 0, done.stderr
    assert "now: the addresses hold" in done.stdout and "after 0.1 s: the addresses hold" in done.stdout
    assert two_macs.read("air")["addresses"]["en6"] == "10.9.0.2/255.255.255.252"
    assert parse((tmp_path / "rmlx-hosts.json").read_text(), "x").hosts[1].rdma == (("rdma_en6",), ())
    assert config(two_macs, "--undo").exit_code == 0 and two_macs.read("air")["addresses"]["en6"] == ""


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ((), 2, "give --node0, or set RMLX_NODE0"),
        (("--node0", "a", "--node1=-b"), 2, "--node1: '-b' is no name"),
        (("--node0", "a", "--node1", "b", "--node0-ip", "10.0.0.1"), 2, "both --node0-ip and --node1-ip"),
        (("--node0", "a", "--node1", "b", "--ssh", "/no/such/ssh"), 1, "a does not answer: /no/such/ssh"),
    ],
)
def test_setup_that_is_refused(words, status, said):
    done = setup_rdma(*words)
    assert done.returncode == status and said in done.stderr


def test_setup_without_rdma(two_macs):
    two_macs.write("book", two_macs.read("book") | {"devices": [], "rdma_ctl": "disabled"})
    words = ["--node0", "book", "--node1", "air", "--ssh", two_macs.ssh, "--remote-dir", "/no/such/folder"]
    done = setup_rdma(*words, "--dry-run")
    assert done.returncode == 1 and "RDMA is switched off on book (Thunderbolt 2)" in done.stderr
    assert "run `rdma_ctl enable` in Terminal there" in done.stderr
    assert "air: sh: " in done.stderr and "clone mlxdist there, and `make setup` in /no/such/folder" in done.stderr
