"""Seeds: the random numbers of a training, the same for each step when it is repeated or resumed."""

import random
import secrets
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import mlx.core as mx
import numpy as np

from mlxdist.base.errors import InvalidArgument
from mlxdist.nn.rank_checks import agree, agreed
from mlxdist.runtime.group.group import GroupLike
from mlxdist.runtime.mesh import Mesh
from mlxdist.runtime.operations.arguments import group_of

__all__ = ["MAX_SEED", "Seeds", "mix"]

MAX_SEED = 2**63 - 1  # ranks compare it as int64


class Seeds:
    """A seed for all ranks, from which the seeds of every step follow. All ranks of a group or a mesh make it.

        seeds = train.Seeds(mesh=mesh)
        model = make_model()      # the same parameters on every rank
        for step in range(steps):
            seeds.set_step(step)
            ...                   # dropout: other elements on each rank that has other data

    Making it seeds the global generators of MLX, NumPy and Python with ``seed``, the same on all ranks. So models are
    to be made before the first :meth:`set_step`, in full: a shard of a full layer has the variance of the full fan-in.
    Rank 0 prints the seed.

    Args:
        seed: from 0 to 2**63 - 1, the same on all ranks. ``None``: rank 0 picks one.
        group: ranks that all have other data; ``None`` for those of ``mlxdist.init()``.
        mesh: in place of ``group``.

    Attributes:
        seed: of all ranks.

    Raises:
        InvalidArgument: on all ranks alike: ``seed`` is no such number; there are both a group and a mesh.
        Mismatch: on all ranks: they have different seeds.
    """

    def __init__(self, seed: int | None = None, *, group: GroupLike | None = None, mesh: Mesh | None = None) -> None:
        if group is not None and mesh is not None:
            raise InvalidArgument("Seeds: give a group or a mesh, not both")
        self._group = group_of(group) if mesh is None else mesh.group
        picked = agree("Seeds", self._group, _problem("Seeds", seed), {"seed": seed}, [secrets.randbelow(2**31)])
        self._given = seed
        self.seed = int(picked[0, 0]) if seed is None else seed
        if mesh is None:
            self._place = (0, self._group.rank(), 0)
        else:
            # Not tp and ep, along which ranks have equal activations; stages of a pipeline have other layers.
            self._place = (mesh.coordinates["pp"], mesh["dp", "fsdp"].rank(), mesh.coordinates["cp"])
        self._say("" if seed is not None else ", picked at random")
        _seed_all(self.seed)

    def set_step(self, step: int) -> None:
        """Seeds the global generators of MLX, NumPy and Python for a step. Not a collective.

        The numbers that follow are the same on ranks with the same activations (those along tp and ep), and different
        on others: along dp and fsdp, whose ranks have other rows, along cp, with other tokens, and along pp, with other
        layers. They depend on the seed, the step and the rank's place alone, not on what was drawn before, so a
        training that is resumed at this step has them, too. On another number of ranks they are others.

        Args:
            step: from 0.

        Raises:
            InvalidArgument: it is no integer from 0.
        """
        if type(step) is not int or step < 0:
            raise InvalidArgument(f"Seeds.set_step: step is {step!r:.50}, not an integer from 0")
        _seed_all(mix("step", self.seed, step, *self._place))

    @property
    def state(self) -> dict[str, int]:
        """The state for a checkpoint, the same on all ranks."""
        return {"seed": self.seed}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on with the seed of a ``state``. All ranks call it, before the next :meth:`set_step`.

        Args:
            state: what :attr:`state` was.

        Raises:
            InvalidArgument: on all ranks alike: it is no such state; or this object was made with another seed, which
                would not be that of the training.
        """
        with agreed("Seeds.restore", self._group, state):
            if not isinstance(state, Mapping):
                raise InvalidArgument(f"Seeds.restore: the state is a {type(state).__name__}, not that of Seeds")
            seed = state.get("seed")
            if problem := "the state has no seed" if seed is None else _problem("the state", seed):
                raise InvalidArgument(f"Seeds.restore: {problem}")
            if self._given not in (None, seed):
                raise InvalidArgument(
                    f"Seeds.restore: the state has seed {seed}, and this training was given {self._given}; leave the "
                    "seed out to go on with that of the state, or start a training of its own"
                )
        if seed != self.seed:
            self.seed = int(state["seed"])
            self._say(", of the state that is restored")

    def _say(self, origin: str) -> None:
        if self._group.rank() == 0:
            print(f"Using seed: {self.seed}{origin}", flush=True)


def mix(*parts: int | str) -> int:
    """64 bits that depend on all of ``parts``, on every machine and in every version of Python and NumPy alike."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def _seed_all(seed: int) -> None:
    mx.random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # it takes no more
    random.seed(seed)


def _problem(name: str, seed: Any) -> str | None:
    if seed is None or (type(seed) is int and 0 <= seed <= MAX_SEED):
        return None
    return f"{name}: seed is {seed!r:.50}, not an integer from 0 to 2**63 - 1"
