"""The source of each parameter of a model: a tensor in a file, or something that mlx-lm computes from several.

mlx-lm builds the model itself, with its own ``sanitize`` and quantization; nothing is evaluated, so no weight is read.
Each array that the model then holds is either the very one that stands for a tensor of a file, so that any slice of it
can be read from there, or the result of a computation, for which its tensors must be read in full.
"""

import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten

from mlxdist.base.errors import InvalidArgument
from mlxdist.base.host_shards import ShardCheckpoint
from mlxdist.base.safetensors_reader import MTP_FILE, Checkpoint, StoredTensor, runs
from mlxdist.nn.layout.modules import dtype_name, parameters

from .mtp_format import without_mtp

__all__ = ["UNSIGNED", "ComputedTensor", "Source", "bytes_of", "open_model"]

UNSIGNED = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


class ComputedTensor:
    """A parameter that ``Model.sanitize`` or a change of its format computes. Reading any of it computes all of it."""

    offset = 0

    def __init__(self, array: mx.array) -> None:
        self.shape, self.itemsize = array.shape, array.dtype.size
        self.nbytes = math.prod(self.shape) * self.itemsize
        self.array = array

    def read(self, axis: int, slices: Sequence[slice], start: int, memory: memoryview) -> None:
        """Reads as :meth:`StoredTensor.read` does, once the full parameter is computed."""
        self.array = mx.contiguous(self.array)
        try:
            full, filled = bytes_of(self.array).data, 0
        except RuntimeError as error:
            raise InvalidArgument(f"mlx-lm cannot compute a parameter from the files: {error}") from error
        for offset, length in runs(self, axis, slices, start, start + len(memory)):
            memory[filled : filled + length] = full[offset : offset + length]
            filled += length

    def release(self) -> None:
        """Frees the memory; nothing can be read any more."""
        del self.array


Source = StoredTensor | ComputedTensor


def bytes_of(array: mx.array) -> np.ndarray:
    """The memory of an array, which is evaluated and contiguous. MLX documents that one may write to it so."""
    if array.dtype not in UNSIGNED.values():
        array = array.view(UNSIGNED[array.dtype.size], stream=mx.cpu)
    mx.eval(array)
    return np.array(array, copy=False).reshape(-1).view(np.uint8)


Classes = Callable[[dict[str, Any]], tuple[Any, Any]]


def open_model(
    checkpoint: Checkpoint, get_model_classes: Classes | None = None
) -> tuple[nn.Module, dict[str, Source], dict[str, Any]]:
    """mlx-lm's model of a directory, whose parameters have shapes and dtypes but no memory; their sources by path;
    config.

    Args:
        checkpoint: the directory.
        get_model_classes: as mlx-lm's argument of this name: returns, for config.json, another class than mlx-lm's
            model, and that of its arguments. An InvalidArgument of these continues a sentence with the directory.

    Raises:
        InvalidArgument: there is no mlx-lm, it does not know the model, or weights are missing, too many, of another
            shape than config.json says, or integers where the model has floats. Or this host has shards of the
            weights, and mlx-lm computes a parameter from whole tensors, or other weights than its model's are read.
    """
    if isinstance(checkpoint, ShardCheckpoint) and get_model_classes is not None:
        raise checkpoint.refusal("other weights are read than those that mlx-lm's model has")
    # Before transformers is imported: it warns when there is no PyTorch, which mlx-lm does not need.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        from mlx_lm import utils
    except ImportError as error:
        raise InvalidArgument(f"loading a model needs mlx-lm ({error}); pip install 'mlxdist[lm]'") from None
    stored: dict[int, tuple[str, mx.array]] = {}  # with the arrays, so that no other gets an id of theirs
    floats: set[str] = set()

    def classes(config: dict[str, Any]) -> tuple[Any, Any]:
        model_class, arguments_class = (get_model_classes or utils._get_classes)(config)
        chosen = partial(without_mtp, config) if get_model_classes is None else partial(_with_mtp_file, checkpoint)
        return lambda arguments: _recording(model_class(arguments), stored, floats, chosen), arguments_class

    try:
        with checkpoint.with_headers() as directory:
            model, config = utils.load_model(directory, lazy=True, get_model_classes=classes)
    except InvalidArgument as error:
        raise InvalidArgument(f"{checkpoint.directory} {error}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, RuntimeError) as error:
        what = f"{type(error).__name__}: {error}" if isinstance(error, KeyError | TypeError | AttributeError) else error
        raise InvalidArgument(f"mlx-lm cannot build the model in {checkpoint.directory}: {what}") from error
    sources: dict[str, Source] = {}
    placeholders = []
    for path, array in parameters(model).items():
        if path in floats and not mx.issubdtype(array.dtype, mx.floating):
            name = stored[id(array)][0] if id(array) in stored else path
            raise InvalidArgument(
                f"{checkpoint.directory}: tensor {name!r:.200} has dtype {dtype_name(array)}, "
                "but the model has floats there; the file is damaged, so copy or download it again"
            )
        if isinstance(checkpoint, ShardCheckpoint) and id(array) not in stored:
            raise checkpoint.refusal(f"mlx-lm computes {path} from whole tensors")
        sources[path] = checkpoint.tensors[stored[id(array)][0]] if id(array) in stored else ComputedTensor(array)
        placeholders.append((path, mx.broadcast_to(mx.zeros((), array.dtype), array.shape)))
    model.update(tree_unflatten(placeholders))
    return model, sources, config


def _with_mtp_file(checkpoint: Checkpoint, weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """The weights with those in a file that mlx-lm does not look at."""
    for file in checkpoint.files:
        if file.path.name == MTP_FILE:
            arrays: Any = mx.load(str(file.path))
            weights = weights | arrays
            if file.metadata.get("format") != "mlx":  # mlx-lm knows what it has not converted by such an axis
                weights["original.conv1d.weight"] = mx.zeros((1, 1, 2))
    return weights


def _recording(
    model: nn.Module,
    stored: dict[int, tuple[str, mx.array]],
    floats: set[str],
    chosen: Callable[[dict[str, mx.array]], dict[str, mx.array]],
) -> nn.Module:
    """Notes which array stands for which tensor when mlx-lm hands the weights to the model for the first time. The
    model gets those that ``chosen`` returns.

    And then, once it has quantized the layers, which parameters are floats: MLX compares the shapes alone.
    """
    sanitize = getattr(model, "sanitize", lambda weights: weights)

    def recorded(weights: dict[str, mx.array]) -> dict[str, mx.array]:
        weights = chosen(weights)
        stored.update({id(array): (name, array) for name, array in weights.items()})
        del model.sanitize  # this function; that of the class stays
        return sanitize(weights)

    def loaded(weights: list[tuple[str, mx.array]], strict: bool = True) -> nn.Module:
        floats.update(path for path, array in parameters(model).items() if mx.issubdtype(array.dtype, mx.floating))
        del model.load_weights  # this function; that of the class stays
        return model.load_weights(weights, strict)

    vars(model).update(sanitize=recorded, load_weights=loaded)
    return model
