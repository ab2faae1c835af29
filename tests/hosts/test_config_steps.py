"""`mlxdist config`: what is run on each host, and what takes it back."""

from dataclasses import replace
from ipaddress import IPv4Interface

import pytest
from surveys import macs

from mlxdist.base.errors import InvalidArgument
from mlxdist.cluster.facts.collect import HostFacts
from mlxdist.cluster.facts.interfaces import Interface, Service
from mlxdist.cluster.setup.addresses import assign_addresses
from mlxdist.cluster.setup.steps import Step, plan_steps
from mlxdist.cluster.setup.undo import UndoFile
from mlxdist.cluster.topology.topology import build_topology

A, B = IPv4Interface("10.111.0.1/30"), IPv4Interface("10.111.0.2/30")


def steps_of(machine, **options):
    """On the first of two Macs with one cable."""
    other = macs(2, [(0, 1)])[1]
    pair = [
        replace(machine, name="a"),
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


def test_the_bridge_is_changed_only_on_request():
    machine = macs(2, [(0, 1)])[0]
    bridged = replace(machine, interfaces=(*machine.interfaces, Interface("bridge0", members=("en2", "en3"))))
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
        HostFacts("a", "Linux", interfaces=(interface,), network_manager=manager),
        HostFacts("b", "Linux", interfaces=(Interface("eth1", True, (B,)),)),
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
