"""Conversions between checkpoints and model folders of mlx-lm, and of their weights to another dtype.

A model folder is written one array at a time: neither the checkpoint nor the model is in memory.
"""

import json
import shutil
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from mlxdist.base.disk_space import require_room
from mlxdist.base.errors import InvalidArgument, ResourceError
from mlxdist.base.json_reader import parse_json
from mlxdist.base.safetensors_reader import INDEX, Checkpoint
from mlxdist.nn.layout.cut import Cut
from mlxdist.nn.layout.modules import dtype_name, parameters
from mlxdist.nn.models.load.weight_sources import open_model
from mlxdist.runtime.group.group import Group

from .checkpoint import Checkpoints
from .checkpoint.complete import Problems, complete, none_usable
from .checkpoint.files import DTYPES, Layout, TensorWriter, Unusable, crc32_of, take_snapshots
from .checkpoint.files import dtype_name as stored_name
from .checkpoint.manifest import Manifest
from .checkpoint.ranks import each, together
from .checkpoint.reading import Reader
from .checkpoint.resharding import match
from .checkpoint.state import collect
from .model_folder import new_folder, other_files

__all__ = ["to_checkpoint", "to_model_folder"]

# Gets the bytes that are done, and those that there are.
OnProgress = Callable[[int, int], object]
_T = TypeVar("_T")


def to_model_folder(
    source: Path,
    target: Path,
    base: Path,
    name: str,
    group: Group,
    *,
    step: int | None = None,
    dtype: mx.Dtype | None = None,
    on_progress: OnProgress = lambda done, total: None,
) -> tuple[int, nn.Module]:
    """Writes the model of a checkpoint as a model folder of mlx-lm, on rank 0's disk. Collective.

    Args:
        source: the directory of the checkpoints.
        target: the folder, which is complete or not there.
        base: the folder of the model that was trained: config, tokenizer.
        name: the path of the model in the tree that was saved.
        group: the ranks, which see the files of the checkpoint together.
        step: the step of the checkpoint; None for the last one.
        dtype: of the floating-point weights in the folder, but for those that mlx-lm keeps as they are; None for that
            of the checkpoint.
        on_progress: is called on rank 0.

    Returns:
        The step, and the model, whose arrays have the shapes and dtypes of the folder and no memory.

    Raises:
        InvalidArgument: on all ranks: there is no such checkpoint, it is of another model, or weights cannot have
            ``dtype``.
        ResourceError: on all ranks: the folder cannot be written.
    """
    model = each(lambda: open_model(Checkpoint(base))[0], group)
    reader, wanted = _open(source, model, name, step, group)
    dtypes = each(lambda: _dtypes(model, dtype), group)
    model.update(tree_unflatten([(path, _without_memory(shape, kind)) for path, (kind, shape) in dtypes.items()]))
    with ExitStack() as stack:
        make = lambda: _new_folder(stack, target, model) if group.rank() == 0 else None
        folder = each(_on_disk(make), group)
        _Writer(reader, wanted, name, model, group, on_progress).write(folder)
        together(_on_disk(partial(_finish, folder, base, model, dtype)), group)
        together(_on_disk(stack.close), group)  # which renames the folder
    return reader.manifest.step, model


def to_checkpoint(
    source: Path, target: Path, name: str, *, dtype: mx.Dtype | None = None, on_progress: OnProgress = lambda *_: None
) -> nn.Module:
    """Saves a model folder of mlx-lm as a checkpoint of step 0. Collective of all ranks, each of which has the model.

    Args:
        source, target: the folder, and the directory of the checkpoint.
        name: the path of the model in the tree that is saved.
        dtype: as for :func:`to_model_folder`.
        on_progress: is called on all ranks.

    Returns:
        The model.

    Raises:
        InvalidArgument: the folder is not usable, or weights cannot have ``dtype``.
        ResourceError: the checkpoint cannot be written.
    """
    open_model(Checkpoint(source))  # what is wrong with it, before anything is read
    from mlx_lm.utils import load_model

    model, _ = load_model(source, lazy=True)
    arrays, done = parameters(model), 0
    total = sum(array.nbytes for array in arrays.values())
    for path, (kind, _) in _dtypes(model, dtype).items():
        array = arrays.pop(path)
        done += array.nbytes
        model.update(tree_unflatten([(path, _cast(path, array, kind))]))
        on_progress(done, total)
    with Checkpoints(target) as checkpoints:
        checkpoints.save(0, model_tree(name, model))
    return model


def model_tree(name: str, model: nn.Module) -> dict[str, Any]:
    """Nests the model in one dict per part of its name: ``a.b`` gives {"a": {"b": model}}."""
    tree: Any = model
    for key in reversed(name.split(".")):
        tree = {key: tree}
    return tree


def _open(source: Path, model: nn.Module, name: str, step: int | None, group: Group) -> tuple[Reader, dict[str, Cut]]:
    """The reader of a checkpoint that is whole, and the arrays of the model in it. The model gets its dtypes."""
    problems = Problems()

    def fit(manifest: Manifest) -> dict[str, Cut]:
        _follow(model, name, manifest)
        return match(manifest, collect(model_tree(name, model)))[0]

    for reader in complete("checkpoint convert", source, group, problems):
        manifest = reader.manifest
        if step not in (None, manifest.step):
            continue
        wanted = each(lambda: fit(manifest), group)
        if problem := reader.verify():
            problems.add(manifest.step, problem)
            continue
        if step is None and problems and group.rank() == 0:
            later = "; that of ".join(f"step {number} {problem}" for number, problem in sorted(problems.items()))
            warnings.warn(f"step {manifest.step} is converted, since the checkpoint of {later}", stacklevel=3)
        return reader, wanted
    if step is not None or problems.damaged:
        raise none_usable(source, step, problems)
    raise InvalidArgument(f"{source} has no checkpoint")


def _follow(model: nn.Module, name: str, manifest: Manifest) -> None:
    """Gives floating-point parameters the dtypes that the checkpoint has them in: it may have been trained in another
    one than that of the folder."""
    found = []
    for path, array in parameters(model).items():
        saved = manifest.arrays.get(f"{name}.{path}")
        if saved is not None and _is_floating(array.dtype) and _is_floating(DTYPES[saved.dtype]):
            found.append((path, _without_memory(array.shape, DTYPES[saved.dtype])))
    model.update(tree_unflatten(found))


def _dtypes(model: nn.Module, dtype: mx.Dtype | None) -> dict[str, tuple[mx.Dtype, tuple[int, ...]]]:
    """The dtype that each parameter is to have, and its shape.

    Raises:
        InvalidArgument: the model is quantized, and ``dtype`` is given.
    """
    kept = getattr(model, "cast_predicate", lambda path: True)  # as in mlx-lm's convert
    if dtype is not None:
        if packed := next((path for path, module in model.named_modules() if "scales" in module), None):
            raise InvalidArgument(
                f"the model has quantized weights, such as {packed}, whose scales are a part of the packed bits and "
                "have no other dtype; leave out --dtype, or dequantize the model first: mlx_lm.convert --dequantize"
            )
    return {
        path: (dtype if dtype is not None and _is_floating(array.dtype) and kept(path) else array.dtype, array.shape)
        for path, array in parameters(model).items()
    }


def _is_floating(dtype: mx.Dtype) -> bool:
    return mx.issubdtype(dtype, mx.floating)


def _without_memory(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    return mx.broadcast_to(mx.zeros((), dtype), shape)


def _cast(path: str, array: mx.array, dtype: mx.Dtype) -> mx.array:
    """The array in ``dtype``, evaluated. Raises InvalidArgument: finite values become infinite."""
    found = array.astype(dtype)
    mx.eval(found)
    if dtype != array.dtype and not mx.isfinite(found).all() and mx.isfinite(array).all():
        raise InvalidArgument(
            f"'{path}' has values up to {mx.abs(array.astype(mx.float32)).max().item():g}, which {dtype_name(dtype)} "
            "has not; take another --dtype"
        )
    return found


def _new_folder(stack: ExitStack, target: Path, model: nn.Module) -> Path:
    require_room(target.absolute().parent, sum(array.nbytes for array in parameters(model).values()), "the model")
    return stack.enter_context(new_folder(target))


@dataclass
class _Writer:
    """Writes the arrays of a checkpoint into the files of a model folder, on rank 0. Collective."""

    reader: Reader
    wanted: dict[str, Cut]  # by path in the checkpoint
    name: str
    model: nn.Module
    group: Group
    on_progress: OnProgress

    def write(self, folder: Path | None) -> None:
        """Writes all files, those that mlx-lm would, and their index. ``folder``: None on other ranks."""
        from mlx_lm.utils import get_total_parameters, make_shards

        arrays = parameters(self.model)
        total, done = sum(array.nbytes for array in arrays.values()), 0
        weight_map: dict[str, str] = {}
        shards = make_shards(arrays)
        for number, shard in enumerate(shards, 1):
            file = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
            weight_map |= dict.fromkeys(shard, file)
            layout = {path: (stored_name(array), array.shape) for path, array in shard.items()}
            make = partial(_open_writer, folder, file, layout)
            writer = each(_on_disk(make), self.group)
            for path, array in shard.items():
                self._copy(path, array.dtype, writer)
                done += array.nbytes
                if writer:
                    self.on_progress(done, total)
            together(_on_disk(partial(_close, folder, file, writer)), self.group)
        metadata = {"total_size": total, "total_parameters": get_total_parameters(self.model)}
        index = json.dumps({"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}, indent=4)
        together(_on_disk(lambda: folder and (folder / INDEX).write_text(index)), self.group)

    def _copy(self, path: str, dtype: mx.Dtype, writer: TensorWriter | None) -> None:
        saved = f"{self.name}.{path}"
        try:
            arrays = self.reader.read({saved: self.wanted[saved]} if writer else {})
        except Unusable as error:
            raise InvalidArgument(f"the checkpoint of step {self.reader.manifest.step} {error}") from None

        def put() -> None:
            if writer:
                array = _cast(path, arrays.pop(saved), dtype)
                writer.write(take_snapshots({path: array})[path].data)

        together(_on_disk(put), self.group)


def _open_writer(folder: Path | None, file: str, layout: Mapping[str, Layout]) -> TensorWriter | None:
    return None if folder is None else TensorWriter(folder / file, layout, {"format": "mlx"})


def _close(folder: Path | None, file: str, writer: TensorWriter | None) -> None:
    """Completes a file, and compares what is on the disk with what was written."""
    if folder is None or writer is None:
        return
    _, crc = writer.finish()
    if crc32_of(folder / file) != crc:
        raise ResourceError(f"{file} is not on the disk as it was written: its CRC-32 differs; try another disk")


def _on_disk(function: Callable[[], _T]) -> Callable[[], _T]:
    def call() -> _T:
        try:
            return function()
        except OSError as error:
            raise ResourceError(f"the model cannot be written: {error}") from error

    return call


def _finish(folder: Path | None, base: Path, model: nn.Module, dtype: mx.Dtype | None) -> None:
    """Adds the files without weights, and compares the arrays that a reader finds with those that were to be there."""
    if folder is None:
        return
    for file in other_files(base):
        shutil.copy(file, folder)
    if dtype is not None:
        path = folder / "config.json"
        config = parse_json(path.read_bytes())
        for part in (config, config.get("text_config")):
            for key in ("torch_dtype", "dtype"):
                if isinstance(part, dict) and key in part:
                    part[key] = dtype_name(dtype)
        path.write_text(json.dumps(config, indent=4))
    found = {name: (tensor.dtype, tensor.shape) for name, tensor in Checkpoint(folder).tensors.items()}
    if found != {path: (stored_name(array), array.shape) for path, array in parameters(model).items()}:
        raise ResourceError("the model folder has not the arrays that were written into it; try another disk")
