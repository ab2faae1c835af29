"""`mlxdist config`: cables and the shapes they make, and their pictures."""

import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
from surveys import mac, macs, mesh, surveys_of

from mlxdist.base.errors import InvalidArgument
from mlxdist.cluster.topology.drawing import as_dot, as_svg, as_text
from mlxdist.cluster.topology.topology import Shape, build_topology


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


def test_missing_cables_are_reported_with_a_free_port():
    files = [f"synthetic_missing_{host}.json" for host in "abcd"]
    found = build_topology(surveys_of(*files))
    assert found.shape is Shape.RING and found.ring == (0, 1, 3, 2)
    assert found.advice() == ["for a mesh 1 cable is missing:", "  from a Thunderbolt 3 to d Thunderbolt 3"]
    line = build_topology(macs(3, [(0, 1), (1, 2)]))
    assert line.advice()[0] == "one more cable makes it a ring: from a Thunderbolt 2 to c Thunderbolt 2"
    full = build_topology(macs(3, [(0, 1), (0, 1)], size=2))
    assert full.advice()[1:] == ["  from a to c Thunderbolt 1", "  from b to c Thunderbolt 2"]


def test_more_cables_than_are_used():
    assert "5 cables between a and b: mlxdist uses 4" in build_topology(macs(2, [(0, 1)] * 5, size=5)).notes[0]
    assert not build_topology(macs(2, [(0, 1)] * 4, size=5)).notes


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


def test_the_picture():
    machines = macs(3, [(0, 1), (1, 2)], size=2)
    assert as_text(build_topology(machines)).plain.splitlines() == [
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
