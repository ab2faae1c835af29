"""Meshes: the ranks of a group along named axes, one for each way to be parallel."""

import itertools
import math
import warnings
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from mlxdist.base.errors import InvalidArgument, Mismatch
from mlxdist.base.opaque import Opaque, create

from .devices.paths import Path
from .group.group import Group, GroupLike, engine_of
from .operations import collectives
from .operations.arguments import group_of

__all__ = ["Mesh", "group_without", "mesh"]

# Outermost first: the more an axis communicates, the further inside it is, where neighbors have the best paths. A
# pipeline sends one activation a stage, data parallelism reduces once a step, a layer of experts exchanges tokens
# twice, and tensor parallelism reduces twice in every layer and waits for it.
AXES = ("pp", "dp", "fsdp", "cp", "ep", "tp")
_WAITED_FOR = ("ep", "tp")  # in every layer
_MAX_HOST_BYTES = 256
_MAX_TRIES = 10_000  # of `_partition`, for each axis and kind of path


class Mesh(GroupLike, metaclass=Opaque):
    """Ranks along named axes; made by :func:`mesh`. ``mesh["tp"]`` is the group of this rank's neighbors along tp. A
    mesh of one axis may be given as a ``group``, and is that of its axis.

    Attributes:
        group: all ranks of the mesh.
        sizes: of each axis, by its name, outermost first; 1 for those that were not asked for.
        coordinates: where this rank is, by the names of the axes.
        ranks: the ranks of ``group`` by coordinates, int32 of one dimension for each axis.
        hosts: of each rank of ``group``.
    """

    _made_by = "mlxdist.mesh"

    def __init__(self, group: Group, sizes: dict[str, int]) -> None:
        self.group, self.sizes = group, sizes
        self.hosts, self._paths = _gather(group, sizes)
        self.ranks = np.array(place(self._paths, list(sizes.values())), np.int32).reshape(list(sizes.values()))
        where = np.argwhere(self.ranks == group.rank())[0]
        self.coordinates = dict(zip(sizes, map(int, where)))
        self._groups: dict[tuple[str, ...], Group] = {}
        for names in ((), *((name,) for name, size in sizes.items() if size > 1)):
            self._groups[names] = self._split(names)
        if group.rank() == 0:
            self._warn()

    def size(self, axis: str) -> int:
        """The number of ranks along ``axis``, such as "tp". Raises InvalidArgument: there is no such axis."""
        return math.prod(self.sizes[name] for name in self._axes(axis))

    def __getitem__(self, axes: str | tuple[str, ...]) -> Group:
        """The group of this rank's neighbors along an axis, or along several: ``mesh["dp", "fsdp"]``.

        Ranks are in the order of their coordinates. Along axes of size 1 this rank is alone. The group of several axes
        is made when it is first used, which all ranks of the mesh must do at the same place.

        Raises:
            InvalidArgument: there is no such axis.
            Mismatch: other ranks use another group for the first time here.
        """
        names = tuple(name for name in self._axes(axes) if self.sizes[name] > 1)
        if names not in self._groups:
            own = np.array([name in names for name in self.sizes], np.int32)
            for rank, theirs in enumerate(collectives.all_gather(own[None], group=self.group)):
                if not np.array_equal(own, theirs):
                    others = [name for name, is_used in zip(self.sizes, theirs) if is_used]
                    raise Mismatch(f"mesh: this rank makes the group of {names}, and rank {rank} that of {others}")
            self._groups[names] = self._split(names)
        return self._groups[names]

    def _as_group(self) -> Group:
        if len(axes := [name for name, size in self.sizes.items() if size > 1]) > 1:
            raise InvalidArgument(f"group is a mesh of {_product(self.sizes)}: give one axis of it, mesh[{axes[-1]!r}]")
        return self[tuple(axes)]

    def __str__(self) -> str:
        """A line for each rank, with its coordinates and its host; then the worst path along each axis."""
        shown = [name for name, size in self.sizes.items() if size > 1]
        lines = [f"mesh of {self.group.size()} ranks: {_product(self.sizes)}"]
        rows = [["rank", *shown, "host"]]
        for rank, host in enumerate(self.hosts):
            where = dict(zip(self.sizes, np.argwhere(self.ranks == rank)[0]))
            rows.append([str(rank), *(str(where[name]) for name in shown), host])
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines += ["  " + "  ".join(map(str.rjust, row[:-1], widths)) + f"  {row[-1]}" for row in rows]
        return "\n".join([*lines, *(f"  {name} over {self._worst_path(name).label}" for name in shown)])

    def __repr__(self) -> str:
        where = ", ".join(f"{name} {place}" for name, place in self.coordinates.items() if self.sizes[name] > 1)
        return f"<mlxdist.Mesh {_product(self.sizes)}, rank {self.group.rank()}{where and ' at '}{where}>"

    def _worst_path(self, axis: str) -> Path:
        """The worst path between two neighbors along ``axis``, of more than one rank."""
        return Path(min(self._paths[pair] for pair in self._pairs(axis)))

    def _split(self, names: Sequence[str]) -> Group:
        group = self.group.split(self._position(set(self.sizes) - set(names)), self._position(names))
        assert group is not None  # the color is not negative
        return group

    def _axes(self, axes: str | tuple[str, ...]) -> tuple[str, ...]:
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        if wrong := [name for name in names if name not in self.sizes]:
            raise InvalidArgument(f"mesh: there is no axis {wrong[0]!r}; there are {', '.join(self.sizes)}")
        return tuple(name for name in self.sizes if name in names)

    def _position(self, axes: Collection[str]) -> int:
        """This rank's number among all coordinates of ``axes``."""
        number = 0
        for name in self.sizes:
            if name in axes:
                number = number * self.sizes[name] + self.coordinates[name]
        return number

    def _pairs(self, axis: str) -> list[tuple[int, int]]:
        lines = np.moveaxis(self.ranks, list(self.sizes).index(axis), -1).reshape(-1, self.sizes[axis])
        return [(int(a), int(b)) for line in lines for a, b in itertools.combinations(line, 2)]

    def _warn(self) -> None:
        for axis in _WAITED_FOR:
            a, b = min(self._pairs(axis), key=lambda pair: self._paths[pair], default=(0, 0))
            if self._paths[a, b] <= Path.TCP:
                ends = " and ".join(f"rank {rank} on {self.hosts[rank]}" for rank in (a, b))
                warnings.warn(
                    f"mesh: axis {axis} has {Path(self._paths[a, b]).label} between {ends}, and every layer waits for "
                    f"it: make {axis} smaller, or connect these hosts by RDMA (`mlxdist doctor` says what is missing)",
                    stacklevel=5,
                )


def mesh(
    *, pp: int = 1, dp: int = 1, fsdp: int = 1, cp: int = 1, ep: int = 1, tp: int = 1, group: GroupLike | None = None
) -> Mesh:
    """Arranges ranks along axes. The axes that communicate most, tp and ep, get the ranks with the best paths.

    It takes an arrangement with shared memory along tp, else one with RDMA, else one with TCP; then
    likewise for ep, and so on outwards. Where all paths are alike, ranks are in row-major order.

    Args:
        pp: stages of a pipeline.
        dp: replicas that have parts of a batch each.
        fsdp: ranks that have parts of a batch each, and shards of the parameters.
        cp: parts of a sequence.
        ep: ranks that share the experts of a layer.
        tp: ranks that share each layer. A single size may be -1: as many as fit.
        group: whose ranks; ``None`` for that of ``mlxdist.init()``. All of them must call it.

    Raises:
        InvalidArgument: the sizes do not multiply to the size of the group; the text has sizes that do.
        Mismatch: ranks called it with other sizes.
    """
    members = group_of(group)
    asked = dict(zip(AXES, (pp, dp, fsdp, cp, ep, tp)))
    return create(Mesh, members, _sizes(asked, members.size()))


def group_without(mesh: Mesh, axis: str) -> Group:
    """The group of this rank's neighbors along all axes but ``axis``; of all ranks where that has size 1."""
    return mesh.group if mesh.size(axis) == 1 else mesh[tuple(name for name in mesh.sizes if name != axis)]


def _sizes(asked: dict[str, int], ranks: int) -> dict[str, int]:
    for axis, size in asked.items():
        if type(size) is not int or (size < 1 and size != -1):
            raise InvalidArgument(f"mesh: {axis} is {size!r}, not a number of ranks from 1, or -1 for as many as fit")
    free = [axis for axis, size in asked.items() if size == -1]
    if len(free) > 1:
        raise InvalidArgument(f"mesh: {free[0]} and {free[1]} are -1; one axis alone can be as large as fits")
    fixed = math.prod(size for size in asked.values() if size != -1)
    if free and ranks % fixed == 0:
        return asked | {free[0]: ranks // fixed}
    if fixed == ranks and not free:
        return asked
    fitting = [asked | {axis: ranks * size // fixed} for axis, size in asked.items() if _fits(ranks, fixed, size)]
    advice = " or ".join(_product(sizes) for sizes in fitting) or f"sizes that multiply to {ranks}, such as dp={ranks}"
    raise InvalidArgument(f"mesh: {_product(asked)} is for {abs(fixed)} ranks, but there are {ranks}: take {advice}")


def _fits(ranks: int, fixed: int, size: int) -> bool:
    """Whether another size in place of this one makes the product that of all ranks."""
    return size > 1 and ranks * size % fixed == 0 and ranks * size // fixed > 0


def _product(sizes: dict[str, int]) -> str:
    return " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size != 1) or "dp=1"


def _gather(group: Group, sizes: dict[str, int]) -> tuple[list[str], np.ndarray]:
    """The host of each rank, and the `Path` between every two."""
    world, n = engine_of(group).world, group.size()
    own = [world.rank, *sizes.values()]
    rows = collectives.all_gather(np.array([own], np.int32), group=group)
    for rank, row in enumerate(rows.tolist()):
        if row[1:] != own[1:]:
            theirs = _product(dict(zip(sizes, row[1:])))
            raise Mismatch(f"mesh: this rank makes one of {_product(sizes)}, and rank {rank} one of {theirs}")
    known = np.zeros((1, n + _MAX_HOST_BYTES), np.uint8)
    known[0, :n] = [world.native_group.paths[rank] for rank in rows[:, 0]]
    host = world.host.encode()[:_MAX_HOST_BYTES]
    known[0, n : n + len(host)] = list(host)
    known = collectives.all_gather(known, group=group)
    hosts = [bytes(row[n:]).rstrip(b"\0").decode(errors="replace") for row in known]
    return hosts, np.minimum(known[:, :n], known[:, :n].T)


def place(paths: np.ndarray, sizes: Sequence[int]) -> list[int]:
    """The ranks in row-major order of coordinates.

    Args:
        paths: the `Path` between every two ranks, integers of shape (ranks, ranks).
        sizes: of the axes, outermost first; they multiply to the number of ranks.
    """
    blocks = [[rank] for rank in range(len(paths))]
    for size in reversed(sizes):
        for worst in sorted(set(paths.ravel().tolist()), reverse=True) if size > 1 else ():
            found = _partition(blocks, size, worst, paths, itertools.count())
            if found is not None:
                blocks = found
                break
    return blocks[0]


def _partition(
    blocks: list[list[int]], size: int, worst: int, paths: np.ndarray, tries: Iterator[int]
) -> list[list[int]] | None:
    """Joins ``size`` blocks each, so that ranks of the same position have no path below ``worst``.

    By backtracking: the first block is in some part. None where there is no such partition, or none is found in time.
    """
    if not blocks:
        return []
    first, *others = blocks
    partners = [other for other in others if _join([first, other], worst, paths)]
    for part in itertools.combinations(partners, size - 1):
        if next(tries) >= _MAX_TRIES:
            return None
        if joined := _join([first, *part], worst, paths):
            rest = _partition([other for other in others if other not in part], size, worst, paths, tries)
            if rest is not None:
                return [joined, *rest]
    return None


def _join(blocks: Sequence[list[int]], worst: int, paths: np.ndarray) -> list[int] | None:
    """Joins blocks, each forwards or backwards: around a ring of links, neighbors face each other so. None: no way."""
    placed: list[list[int]] = []
    for block in blocks:
        ways = (way for way in (block, block[::-1]) if all(paths[other, way].min() >= worst for other in placed))
        if (way := next(ways, None)) is None:
            return None
        placed.append(way)
    return [rank for block in placed for rank in block]
