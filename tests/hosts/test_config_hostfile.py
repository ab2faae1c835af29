"""`mlxdist config`: the hostfile that comes of a topology."""

from dataclasses import replace

import pytest
from surveys import macs, mesh

from mlxdist.base.errors import InvalidArgument
from mlxdist.cluster.hostfile.hosts import Host
from mlxdist.cluster.hostfile.parsing import parse
from mlxdist.cluster.hostfile.writing import write
from mlxdist.cluster.setup.addresses import assign_addresses
from mlxdist.cluster.setup.ethernet import choose_addresses
from mlxdist.cluster.setup.make_hostfile import make_hostfile
from mlxdist.cluster.topology.topology import build_topology


def hostfile_of(machines, **options):
    topology = build_topology(machines)
    links = assign_addresses(machines, topology)
    found = make_hostfile(machines, topology, links, choose_addresses(machines), **options)
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
    """Neighbors are next to each other in the list, and operations use the ring."""
    found = hostfile_of(macs(4, [(0, 2), (1, 2), (1, 3), (0, 3)]))
    assert [h.name for h in found.hosts] == ["a", "c", "b", "d"]
    assert found.envs == ("MLXDIST_TOPOLOGY=0-1,1-2,2-3,3-0",)
    assert found.only(["a", "c", "b", "d"]).envs == found.envs and not found.only(["a", "c", "b"]).envs
    uneven = hostfile_of(macs(4, [(0, 1), (1, 2), (2, 3), (0, 3)]), hosts=[Host("b", slots=2)])
    assert uneven.envs == ("MLXDIST_TOPOLOGY=0-1,1-2,2-3,3-4,4-0",)
    assert found.with_ranks(2).envs == ("MLXDIST_TOPOLOGY=0-1,1-2,2-3,3-4,4-5,5-6,6-7,7-0",)
    assert [bool(row) for row in found.hosts[0].rdma] == [False, True, False, True]
    jaccl = hostfile_of(macs(4, mesh(4)), backend="jaccl-ring")
    assert [bool(row) for row in jaccl.hosts[0].rdma] == [False, True, False, True] and not jaccl.envs
    ring = hostfile_of(macs(4, [(0, 1), (1, 2), (2, 3), (0, 3)]), backend="ring")
    assert ring.hosts[1].ips == ("10.111.0.2",) and not ring.hosts[0].rdma


def test_mlx_reads_the_hostfile(tmp_path):
    from mlx._distributed_utils.common import Hostfile

    machines = macs(3, mesh(3) + [(0, 1)])
    topology = build_topology(machines)
    links = assign_addresses(machines, topology)
    found = make_hostfile(machines, topology, links, choose_addresses(machines), backend="jaccl", envs=("A=1",))
    (tmp_path / "hosts.json").write_text(write(found, "json"))
    read = Hostfile.from_file(tmp_path / "hosts.json")
    assert [(host.ssh_hostname, host.ips, host.rdma[0]) for host in read.hosts][1:] == [
        ("b", ["192.168.1.98"], "rdma_en2"),
        ("c", ["192.168.1.99"], "rdma_en2"),
    ]
    assert read.backend == "jaccl" and read.envs == ["A=1"]


def test_hostfile_without_rdma():
    machines = macs(2, [(0, 1)], speed=40)
    assert [(h.rdma, h.ips) for h in hostfile_of(machines).hosts] == [
        ((), ("10.111.0.1", "192.168.1.97")),
        ((), ("10.111.0.2", "192.168.1.98")),
    ]
    off = [replace(machine, rdma={}, rdma_ctl="disabled") for machine in macs(2, [(0, 1)])]
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
