"""One rank of test_mesh.py. Arguments: sizes of axes, dp=2 tp=2."""

import sys
import warnings

import mlx.core as mx
import numpy as np

import mlxdist
import mlxdist.nn as mnn

group = mlxdist.init()
rank = group.rank()
sizes = {name: int(size) for name, size in (word.split("=") for word in sys.argv[1:])}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    mesh = mlxdist.mesh(**sizes)
for warning in caught:
    print("warning", warning.message)
print(str(mesh) if rank == 0 else mesh.coordinates)

shown = [f"{name} {place}" for name, place in mesh.coordinates.items() if mesh.sizes[name] > 1]
product = str(mesh).splitlines()[0].partition(": ")[2]
assert repr(mesh) == f"<mlxdist.Mesh {product}, rank {rank}{' at ' * bool(shown)}{', '.join(shown)}>", repr(mesh)
assert list(mesh.sizes) == ["pp", "dp", "fsdp", "cp", "ep", "tp"] and mesh.ranks.size == group.size()
assert mesh.ranks[tuple(mesh.coordinates.values())] == rank
everyone = mlxdist.all_gather(np.array([rank], np.int32))
assert sorted(mesh.ranks.ravel()) == sorted(everyone)


def along(*axes: str) -> list[int]:
    """The ranks whose other coordinates are those of this one, in the order of coordinates."""
    place = tuple(slice(None) if name in axes else at for name, at in mesh.coordinates.items())
    return mesh.ranks[place].ravel().tolist()


for axes in [(axis,) for axis in mesh.sizes] + [("dp", "tp"), ("tp", "dp"), tuple(mesh.sizes), ()]:
    part = mesh[axes if len(axes) != 1 else axes[0]]
    members = mlxdist.all_gather(np.array([rank], np.int32), group=part).tolist()
    assert members == along(*axes), (axes, members, along(*axes))
    assert members[part.rank()] == rank and mesh[axes] is part
    if len(axes) == 1:
        assert part.size() == mesh.size(axes[0])

inner = mlxdist.mesh(tp=-1, group=mesh["tp"])  # a mesh of a part
assert inner.size("tp") == mesh.size("tp") and inner.hosts == [mesh.hosts[member] for member in along("tp")]

# A mesh of one axis is a group, wherever one is taken.
assert mlxdist.all_gather(np.array([rank], np.int32), group=inner).tolist() == along("tp")
assert mlxdist.mesh(tp=-1, group=inner).ranks.tolist() == inner.ranks.tolist()
layer = mnn.ColumnParallelLinear(4, 8 * mesh.size("tp"), group=inner)
assert layer(mx.ones((1, 4))).shape == (1, 8)
if sum(size > 1 for size in mesh.sizes.values()) > 1:
    try:
        mlxdist.all_sum(mx.ones(3), group=mesh)
        raise AssertionError("a mesh of several axes is no group")
    except mlxdist.InvalidArgument as error:
        assert "give one axis of it, mesh[" in str(error), error
