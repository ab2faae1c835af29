"""Checkpoints: what a training needs to go on where it stopped, written by all ranks while it goes on.

A checkpoint is complete or not there, whatever is killed and when: :mod:`.directory` says how. It carries the run that
wrote it: the job of `mlxdist launch` with all its restarts, MLXDIST_JOB where something else starts the ranks, else the
processes that started together. A program takes another run's checkpoint for its own only where it says so.
"""

import os
import secrets
import sys
import threading
import time
import warnings
from collections.abc import Mapping
from importlib.metadata import version
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import Any

import mlx.core as mx

from mlxdist.base import logger
from mlxdist.base.errors import InvalidArgument
from mlxdist.nn.layout.cut import Cut
from mlxdist.runtime.group.default_group import current_run
from mlxdist.runtime.group.group import Group, GroupLike
from mlxdist.runtime.mesh import Mesh
from mlxdist.runtime.operations.arguments import group_of
from mlxdist.version import __version__

from . import directory as layout
from .complete import Problems, complete, none_usable
from .files import Snapshot, Unusable, take_snapshots
from .manifest import Manifest, stored
from .ranks import each, gather, together
from .resharding import match
from .room import require_room
from .saving import SavePlan, make_plan, require_equal, sizes_to_write, write
from .state import State, collect, put_back

__all__ = ["Checkpoints"]


class Checkpoints:
    """The checkpoints of a training in one directory. All ranks of a group make it, and call its methods together.

        checkpoints = train.Checkpoints("checkpoints")
        state = {"model": model, "optimizer": optimizer}
        step = checkpoints.load(state) or 0
        ...
        checkpoints.save(step, state)   # goes on while the files are written
        ...
        checkpoints.wait()

    Args:
        directory: on a disk that all hosts see, or with the same name on a disk of each host. It is made if need be.
        group: the ranks that train; ``None`` for those of ``mlxdist.init()``.
        mesh: in place of ``group``: its ranks; its sizes are recorded.
        keep: how many checkpoints stay, the latest ones; at least 1.
        keep_every: those whose step is a multiple of this stay, too.
        trainable_only: models are saved without their frozen parameters, such as a base under adapters.

    Raises:
        InvalidArgument: a number is not positive, ``directory`` is no path, or there are both a group and a mesh.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        *,
        group: GroupLike | None = None,
        mesh: Mesh | None = None,
        keep: int = 2,
        keep_every: int | None = None,
        trainable_only: bool = False,
    ) -> None:
        if group is not None and mesh is not None:
            raise InvalidArgument("Checkpoints: give a group or a mesh, not both")
        ranks = group_of(group) if mesh is None else mesh.group
        # Of its own, since the thread that writes uses it while the program uses the other.
        self._group = _split(ranks)
        self._sizes = {} if mesh is None else {axis: size for axis, size in mesh.sizes.items() if size > 1}
        self._directory, self._keep, self._keep_every = Path(), keep, keep_every
        self._trainable_only = trainable_only

        def check() -> list[Any]:
            self._directory = layout.checked_path("Checkpoints", directory)
            self._keep = _checked_number(": keep", keep, 1, sys.maxsize)
            if keep_every is not None:
                self._keep_every = _checked_number(": keep_every", keep_every, 1, sys.maxsize)
            return [self._keep, self._keep_every, trainable_only]

        _require_equal("", "keep, keep_every and trainable_only", together(check, self._group))
        self._runs = {current_run()}  # whose checkpoints may be here: its own, and those that it goes on with
        self._known: set[int] = set()  # steps that this object has saved
        self._damaged: set[int] = set()  # later than the one that was loaded
        self._disks: list[int] = []  # of each rank: the lowest rank that sees the same directory
        self._lock: layout.Lock | None = None
        self._plan: SavePlan | None = None
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    @property
    def directory(self) -> Path:
        """The directory that holds them, each in a directory ``step-00000100`` of its own."""
        return self._directory

    def save(self, step: int, tree: Any, *, own: Any = None, cuts: Mapping[str, Cut] | None = None) -> None:
        """Saves what is in ``tree`` now, and returns before it is written; the save before is waited for.

        A thread of each rank writes the rank's file. Arrays that several ranks hold are written by one of them. When
        all files are on the disk, rank 0 writes the manifest, on every disk that has a directory one rank, and removes
        what is not to stay. Until then the arrays of now stay in memory, besides those of the steps that follow.

        Args:
            step: how many steps were done, from 0; an integer below 10**18.
            tree: dicts and lists with string keys, in them: ``mx.array``; models, whose parameters are saved, also
                where they are sharded (:func:`mlxdist.nn.models.cuts.cuts` finds how); optimizers and other objects
                with a ``state`` that consists of the same; numbers, strings, booleans and None. All but what is sharded
                is equal on all ranks that have it. It is evaluated.
            own: another such tree that is different on each rank, such as a state of random numbers. It comes back
                where as many ranks load it.
            cuts: how arrays of ``tree`` are sharded that belong to no model, by their paths.

        Raises:
            InvalidArgument: on all ranks alike: in the tree is something else, or nothing; ranks have different values
                where they should be equal; ``step`` is no such number; the directory has a later checkpoint, or one of
                another run that has not been loaded with ``other_run=True``; or another job saves there.
            ResourceError: on all ranks alike: this checkpoint does not fit on the disks, by the bytes or the inodes
                that are left: nothing is written then; the save before could not be written; or the directory cannot
                be. The next save tries again.
        """
        self.wait()
        state, number = State(), 0

        def check() -> Any:
            nonlocal state, number
            number = _checked_number(".save: step", step, 0, 10**layout.STEP_DIGITS - 1)
            shared, of_rank = self._collected("save", tree, own, cuts)
            state = shared | of_rank
            return [number, self._plan is not None and self._plan.is_for(state), secrets.token_hex(4)]

        answers = together(check, self._group)
        _require_equal(".save", "the step", [answer[0] for answer in answers])
        self._prepare(number)
        mx.eval(state.arrays)  # outside: an error of a collective that they wait for is none of saving
        plan = self._plan
        if plan is None or not all(answer[1] for answer in answers):
            plan = self._plan = make_plan(state, self._group)
        snapshots = take_snapshots(state.arrays)
        values = require_equal(plan, state, snapshots, self._group)
        tensors = {
            path: snapshots[path].first(stored(cut).length) if (cut := state.cuts[path]).flat else snapshots[path]
            for path in plan.mine
        }
        manifest = Manifest(
            step=number,
            run=current_run(),
            saved=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            ranks=self._group.size(),
            mesh=self._sizes,
            versions={"mlxdist": __version__, "mlx": version("mlx")},
            files=[],
            arrays=plan.arrays,
            values=values,
            kinds=state.kinds,
        )
        path = layout.step_directory(self._directory, number)
        sizes = lambda: sizes_to_write(path, tensors, manifest, plan, self._group.rank(), self._is_lead)
        require_room(self._directory, number, sizes, self._disks, self._group)
        arguments = (answers[0][2], tensors, manifest, plan)
        self._thread = threading.Thread(target=self._write, args=arguments, name="mlxdist-checkpoint")
        self._thread.start()

    def lock(self, step: int) -> None:
        """Makes sure, before any work, that later steps can be saved; :meth:`save` does so, too.

        Args:
            step: how many steps were done: what :meth:`load` has returned, or 0.

        Raises:
            InvalidArgument, ResourceError: as for :meth:`save`.
        """
        self._prepare(step)

    def wait(self) -> None:
        """Returns when the last save is complete. Raises what has kept it from being, on all ranks alike."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def latest(self) -> int | None:
        """The step of the last complete checkpoint, of whatever run; None if there is none.

        Sizes of files are compared; what is in them is when it is loaded.

        Raises:
            InvalidArgument: the directory is a file.
            ResourceError: it cannot be read.
        """
        self.wait()
        found = complete("Checkpoints.latest", self._directory, self._group, Problems())
        return next((reader.manifest.step for reader in found), None)

    def load(
        self,
        tree: Any,
        *,
        own: Any = None,
        cuts: Mapping[str, Cut] | None = None,
        step: int | None = None,
        other_run: bool = False,
    ) -> int | None:
        """Puts the last checkpoint into ``tree``, and returns its step; None, and nothing is changed, if there is none.

        Other ranks may have saved it, another number of them, and of a model that was sharded otherwise: each rank
        reads the slices that it needs, and gets those that are only on other hosts' disks from there. If the last
        checkpoint is damaged, a warning says so, and the one before is loaded.

        Args:
            tree: as for :meth:`save`. Models are updated, objects with a ``state`` get that by ``restore(state)``, if
                they have it, or assigned; in dicts and lists the loaded arrays and values replace what was there. It
                may be a part of what was saved, such as the model alone.
            own: as for :meth:`save`. It stays as it is where another number of ranks has saved.
            cuts: as for :meth:`save`.
            step: which checkpoint to load; ``None`` for the last one.
            other_run: take it also if another run has written it: to go on with what an earlier job has done, or to use
                its weights. Later checkpoints of this object may then be saved in its directory.

        Raises:
            InvalidArgument: on all ranks alike: it is of another model, of another run without ``other_run``, there is
                no complete one of this step, or there are some, but all are damaged.
            ResourceError: the directory cannot be read.
        """
        self.wait()
        state = of_rank = State()

        def check() -> Any:
            nonlocal state, of_rank
            state, of_rank = self._collected("load", tree, own, cuts)
            number = None if step is None else _checked_number(".load: step", step, 0, sys.maxsize)
            return [[number, other_run], sorted(state.parameters)]

        answers = together(check, self._group)
        _require_equal(".load", "step and other_run", [answer[0] for answer in answers])
        state.elsewhere = frozenset().union(*(answer[1] for answer in answers)) - state.parameters
        problems = Problems()
        for reader in complete("Checkpoints.load", self._directory, self._group, problems):
            manifest = reader.manifest
            if step is not None and manifest.step != step:
                continue
            has_own = manifest.ranks == self._group.size()

            def fit() -> tuple[dict[str, Cut], dict[str, Any]]:
                self._check_run(manifest, other_run)
                return match(manifest, state | of_rank if has_own else state)

            wanted, values = each(fit, self._group)
            try:
                if problem := reader.verify():
                    raise Unusable(problem)
                arrays = reader.read(wanted)
            except Unusable as error:
                problems.add(manifest.step, str(error))
                continue
            put_back(tree, arrays | values)
            if own is not None and has_own:
                put_back(own, arrays | values, f"{self._group.rank()}/")
            self._went_on_with(manifest, problems, step)
            return manifest.step
        if step is not None or problems.damaged:
            raise none_usable(self._directory, step, problems)
        return None

    @property
    def state(self) -> dict[str, list[Any]]:
        """What :meth:`load` has found out, for another object that goes on with the directory in another group."""
        return {"runs": sorted(self._runs), "damaged": sorted(self._damaged)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on in the directory where an object of an earlier group was, without loading.

        Args:
            state: what :attr:`state` was.
        """
        self._runs |= set(state.get("runs", ()))
        self._damaged |= set(state.get("damaged", ()))

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Waits for the last save. An error that ends the block stays the one that is raised."""
        try:
            self.wait()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"and {failure}")

    @property
    def _is_lead(self) -> bool:
        """Whether this rank acts for all ranks that see the same directory."""
        return self._disks[self._group.rank()] == self._group.rank()

    def _collected(self, name: str, tree: Any, own: Any, cuts: Mapping[str, Cut] | None) -> tuple[State, State]:
        """The states of the tree and of what this rank has of its own."""
        try:
            shared = collect(tree, cuts, trainable_only=self._trainable_only)
            of_rank = State() if own is None else collect(own, prefix=f"{self._group.rank()}/")
            if not any(state.arrays or state.values or state.stateful for state in (shared, of_rank)):
                raise InvalidArgument("the tree is empty")
            return shared, of_rank
        except InvalidArgument as error:
            raise InvalidArgument(f"Checkpoints.{name}: {error}") from None

    def _prepare(self, step: int) -> None:
        """Makes sure that the directory is there, no other job saves into it, and a checkpoint of ``step`` may be."""
        if not self._disks:
            token = gather(secrets.token_hex(4), self._group)[0]
            self._disks = gather(layout.find_disk(self._directory, token, self._group), self._group)

        def check() -> None:
            if self._is_lead:
                if self._lock is None or not self._lock.is_there:
                    self._lock = layout.Lock(self._directory, current_run())
                layout.require_next(self._directory, step, self._runs, self._known, self._damaged)

        together(check, self._group)

    def _write(self, token: str, tensors: dict[str, Snapshot], manifest: Manifest, plan: SavePlan) -> None:
        """Writes a checkpoint; runs in a thread of its own."""
        path = layout.step_directory(self._directory, manifest.step)
        prune = lambda: layout.prune(
            self._directory, self._kept, manifest.step, self._damaged, len(set(self._disks)) == 1
        )
        try:
            write(path, token, tensors, manifest, plan, self._group, self._is_lead, prune)
            self._known.add(manifest.step)
            self._damaged.clear()
        except Exception as error:  # for the program, which is elsewhere
            self._failure = error
            if self._group.rank() == 0:
                logger.warn("failure", f"step {manifest.step} is not saved: {error}")

    def _kept(self, steps: list[int]) -> set[int]:
        return {*steps[-self._keep :], *(step for step in steps if self._keep_every and step % self._keep_every == 0)}

    def _check_run(self, manifest: Manifest, other_run: bool) -> None:
        if manifest.run not in self._runs and not other_run:
            raise InvalidArgument(
                f"Checkpoints.load: the checkpoint of step {manifest.step} in {self._directory} is of another run, "
                f"{manifest.run}; this one is {current_run()}. To go on with it, call load(..., other_run=True), or "
                f"set resume = true in [checkpoints] of `mlxdist train`; to begin from step 0, remove "
                f"{self._directory} or choose another directory"
            )

    def _went_on_with(self, manifest: Manifest, problems: Problems, step: int | None) -> None:
        """Records the run that goes on. ``problems``: those of later checkpoints, if the last one was wanted."""
        self._runs.add(manifest.run)
        if step is not None:
            return
        self._damaged |= problems.damaged
        if problems and self._group.rank() == 0:
            warnings.warn(
                f"Checkpoints.load: step {manifest.step} is loaded from {self._directory}, since the checkpoint of "
                + "; that of ".join(f"step {later} {problem}" for later, problem in sorted(problems.items())),
                stacklevel=3,
            )


def _checked_number(name: str, number: Any, least: int, most: int) -> int:
    if not isinstance(number, Integral) or isinstance(number, bool) or not least <= int(number) <= most:
        raise InvalidArgument(f"Checkpoints{name} must be an integer from {least} to {most}, not {number!r}")
    return int(number)


def _require_equal(name: str, what: str, answers: list[Any]) -> None:
    for rank, answer in enumerate(answers):
        if answer != answers[0]:
            raise InvalidArgument(
                f"Checkpoints{name}: the ranks disagree about {what}: {answers[0]} on rank 0, {answer} on rank {rank}"
            )


def _split(group: Group) -> Group:
    own = group.split(0)
    assert own is not None  # the color is not negative
    if own.timeout is not None:  # such as a short one for the steps of a training; writing may take longer
        own.timeout = None
    return own
