"""`mlxdist.mesh`: every rank has a place, axes are groups, and the axes that communicate most have the best paths."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlxdist
from mlxdist.runtime.devices.paths import Path
from mlxdist.runtime.mesh import place


@pytest.mark.parametrize(
    ("ranks", "sizes"), [(1, []), (2, ["tp=2"]), (3, ["dp=-1"]), (4, ["dp=2", "tp=2"]), (4, ["pp=2", "ep=-1"])]
)
def test_groups_along_axes(run_ranks, ranks, sizes):
    outputs = run_ranks("mesh.py", ranks, *sizes)
    assert outputs[0].startswith(f"mesh of {ranks} ranks: ") and not any("warning" in output for output in outputs)


def test_a_mesh_as_text(run_ranks):
    lines = run_ranks("mesh.py", 4, "dp=2", "tp=2")[0].splitlines()
    host = lines[2].split()[-1]
    assert lines == [
        "mesh of 4 ranks: dp=2 x tp=2",
        "  rank  dp  tp  host",
        f"     0   0   0  {host}",
        f"     1   0   1  {host}",
        f"     2   1   0  {host}",
        f"     3   1   1  {host}",
        "  dp over shared memory",
        "  tp over shared memory",
    ]


def test_neighbors_have_links(run_ranks):
    """A ring of links in another order than the ranks."""
    environment = {"MLXDIST_TOPOLOGY": "0-2,2-1,1-3,3-0"}
    outputs = run_ranks("mesh.py", 4, "dp=2", "tp=2", environment=environment)
    assert "  dp over shared memory\n  tp over shared memory" in outputs[0] and "warning" not in outputs[0]
    assert "'dp': 0" in outputs[2] and "'dp': 1" in outputs[1]


def test_a_slow_tp_axis_warns(run_ranks):
    outputs = run_ranks("mesh.py", 2, "tp=2", environment={"MLXDIST_SOFT_TRANSPORT": "tcp"})
    assert "warning mesh: axis tp has TCP between rank 0 on " in outputs[0] and "mlxdist doctor" in outputs[0]
    assert "warning" not in outputs[1]


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"dp": 2}, "mesh: dp=2 is for 2 ranks, but there are 1: take dp=1"),
        ({"tp": -1, "dp": -1}, "dp and tp are -1"),
        ({"tp": 0}, "tp is 0, not a number of ranks from 1, or -1"),
        ({"tp": 1.5}, "tp is 1.5"),
        ({"tp": True}, "tp is True"),
    ],
)
def test_sizes_that_do_not_fit(sizes, words):
    with pytest.raises(mlxdist.InvalidArgument, match=words):
        mlxdist.mesh(**sizes)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (["dp=2", "tp=3"], "mesh: dp=2 x tp=3 is for 6 ranks, but there are 4: take dp=2 x tp=2"),
        (["dp=3", "tp=3"], "is for 9 ranks, but there are 4: take sizes that multiply to 4, such as dp=4"),
        (["dp=2", "tp=4"], "there are 4: take tp=4 or dp=2 x tp=2"),
        (["dp=3", "tp=-1"], "mesh: dp=3 x tp=-1 is for 3 ranks, but there are 4: take"),
    ],
)
def test_sizes_that_would_fit_are_named(run_ranks, sizes, words):
    outputs = run_ranks("mesh_refused.py", 4, *sizes)
    assert all(words in output for output in outputs), outputs


def test_an_axis_that_is_none():
    with pytest.raises(mlxdist.InvalidArgument, match="no axis 'sp'; there are pp, dp, fsdp, cp, ep, tp"):
        mlxdist.mesh()["sp"]


# Where ranks go


@st.composite
def clusters(draw):
    """Ranks on hosts in any order, and axes."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4).filter(lambda sizes: math.prod(sizes) <= 24))
    ranks = math.prod(sizes)
    hosts = np.array(draw(st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks)))
    between = draw(st.sampled_from([Path.NONE, Path.TCP, Path.RDMA]))
    return sizes, np.where(hosts[:, None] == hosts, Path.SHARED_MEMORY, between).astype(np.uint8)


@pytest.mark.long
@given(clusters())
@settings(deadline=None)
def test_every_rank_has_one_place(cluster):
    sizes, paths = cluster
    assert sorted(place(paths, sizes)) == list(range(len(paths)))


@given(st.permutations(range(12)), st.sampled_from([1, 2, 3, 4, 6]))
@settings(deadline=None)
def test_what_fits_a_host_is_on_a_host(order, tp):
    """Two hosts of six ranks, however they are numbered; four do not fit three times."""
    hosts = np.array(order) // 6
    paths = np.where(hosts[:, None] == hosts, Path.SHARED_MEMORY, Path.TCP)
    rows = np.reshape(place(paths, [12 // tp, tp]), (-1, tp))
    crossing = sum(len(set(hosts[row])) > 1 for row in rows)
    assert crossing == 0 or tp == 4


def test_equal_paths_keep_the_order_of_ranks():
    assert place(np.full((24, 24), Path.RDMA), [2, 3, 4]) == list(range(24))


def test_many_ranks_that_fit_nowhere_are_placed_in_time():
    """63 ranks on hosts of seven cannot be paired on them, whatever is tried."""
    hosts = np.arange(64) // 7
    paths = np.where(hosts[:, None] == hosts, Path.SHARED_MEMORY, Path.TCP)
    assert sorted(place(paths, [32, 2])) == list(range(64))
