"""Makes a small model with random weights from the config.json of a large one, for tests and first tries."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxdist.base.disk_space import require_room
from mlxdist.base.errors import InvalidArgument
from mlxdist.base.model_directory import model_directory
from mlxdist.base.validation import fields_of, number, suggestion

from .places import parse_config
from .small_config import LAYERS, SIZES, small_config

if TYPE_CHECKING:
    import mlx.core as mx
    import mlx.nn as nn

__all__ = ["make_tiny_model", "read_config"]

_MOST = 2**31 - 1
_MOST_LAYERS = 1024
_DTYPES = ("bfloat16", "float16", "float32")


def read_config(source: str) -> tuple[dict[str, Any], Path]:
    """The content and path of the config.json of ``source``: a file, a directory, or the name of a model.

    Raises:
        InvalidArgument: there is none, or it is no configuration of a model for mlx-lm.
    """
    path = Path(os.path.expanduser(source))
    path = path if path.is_file() else model_directory(source) / "config.json"
    try:
        config = parse_config(path)
    except ValueError as error:
        raise InvalidArgument(f"{path} cannot be read: {error}") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise InvalidArgument(f"{path} is no configuration of a model: it has no model_type")
    if "model_file" in config:
        raise InvalidArgument(f"{path} names a program (model_file) that builds the model; tiny-model runs none")
    return config, path


def make_tiny_model(
    source: str, target: Path, seed: int = 0, fixed: Mapping[str, Any] = {}, keep_sizes: bool = False
) -> dict[str, Any]:
    """Writes the folder ``target`` of a model like ``source``; it is complete or not there.

    Args:
        source: see `read_config`. Its tokenizer and generation_config.json are copied, where it has them.
        target: missing, or an empty folder.
        seed: of the random weights.
        fixed: values of fields of the configuration, by their names.
        keep_sizes: change no other sizes.

    Returns:
        "target", "model_type", "parameters", "bytes" with those of a head for multi-token prediction, and "sizes":
        [before, after] of each number that has changed.

    Raises:
        InvalidArgument: an argument is wrong, or mlx-lm cannot build the model.
        ResourceError: the disk has no room for it.
    """
    from mlxdist.nn.layout.modules import parameters
    from mlxdist.nn.models.load.streaming import TOKENIZER_FILES, WITH_TOKENIZER
    from mlxdist.train.model_folder import require_no_folder, write_model_folder

    require_no_folder(target)
    config, path = read_config(source)
    extra = _extra(config, fixed)
    found = [file for pattern in WITH_TOKENIZER for file in path.parent.glob(pattern) if file.is_file()]
    has_tokenizer = any(True for pattern in TOKENIZER_FILES for _ in path.parent.glob(pattern))
    quantization = _quantization(config)
    unit = max(32, quantization["group_size"]) if quantization else 32
    small = small_config(config, fixed, unit, has_tokenizer, keep_sizes)
    _require_few_layers(small)
    # Weights of another format would have to be packed so; the plain ones load without.
    for part in (small, small.get("text_config")):
        if isinstance(part, dict):
            part.pop("quantization_config", None)
    small |= extra
    model = _build(small, seed)
    _convert(model, config, quantization)
    mtp = _mtp_weights(small, config, quantization)
    from mlx_lm.utils import get_total_parameters

    nbytes = sum(array.nbytes for array in [*parameters(model).values(), *mtp.values()])
    require_room(target.absolute().parent, nbytes, "the small model")
    write_model_folder(target, model, sorted(set(found)), small, mtp)
    return {
        "target": str(target),
        "model_type": config["model_type"],
        "parameters": get_total_parameters(model),
        "bytes": nbytes,
        "sizes": _changes(config, small),
    }


def _classes(config: Mapping[str, Any]) -> tuple[Any, Any]:
    """mlx-lm's classes of a model and of its arguments."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it warns when there is no PyTorch
    try:
        from mlx_lm import utils

        return utils._get_classes(dict(config))
    except ImportError as error:
        raise InvalidArgument(f"tiny-model needs mlx-lm ({error}); pip install 'mlxdist[lm]'") from None
    except ValueError as error:
        raise InvalidArgument(f"mlx-lm does not know this model: {error}") from None


def _extra(config: Mapping[str, Any], fixed: Mapping[str, Any]) -> dict[str, Any]:
    """The fixed values of fields that the model has, but that this configuration leaves out.

    Raises:
        InvalidArgument: the model has no such field, or it is a size, and the value is none.
    """
    known = set(_names(config))
    _, arguments = _classes(config)
    others = {field.name for field in dataclasses.fields(arguments)} if dataclasses.is_dataclass(arguments) else set()
    for name, value in fixed.items():
        if type(value) is int and abs(value) > _MOST:  # MLX would cut it off
            raise InvalidArgument(f"--set {name}: {value} is more than {_MOST}")
        if name in SIZES and isinstance(value, int | float) and (type(value) is not int or value < 1):
            raise InvalidArgument(f"--set {name}: {json.dumps(value)} is no size; give a whole number from 1 on")
        if name not in known | others:
            raise InvalidArgument(f"--set {name}: no such field; {suggestion(name, sorted(known | others))}")
    return {name: value for name, value in fixed.items() if name not in known}


def _require_few_layers(config: Mapping[str, Any]) -> None:
    """Raises InvalidArgument: there are more layers than memory has room for the modules of."""
    for name, value in config.items():
        if isinstance(value, dict):
            _require_few_layers(value)
        elif name in LAYERS and type(value) is int and value > _MOST_LAYERS:
            raise InvalidArgument(
                f"{name} would be {value}, and {_MOST_LAYERS} are the most; give fewer with --set {name}=4"
            )


def _names(config: Mapping[str, Any]) -> Iterator[str]:
    for name, value in config.items():
        yield name
        if isinstance(value, dict):
            yield from _names(value)


def _build(config: dict[str, Any], seed: int) -> nn.Module:
    import mlx.core as mx

    model_class, arguments = _classes(config)
    mx.random.seed(seed)
    try:
        return model_class(arguments.from_dict(copy.deepcopy(config)))
    except Exception as error:  # whatever the code of a model raises where sizes do not fit
        what = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        raise InvalidArgument(
            f"mlx-lm cannot build a {config['model_type']} of these sizes: {what}; give other sizes with "
            "--set NAME=VALUE, or keep those of the configuration with --keep-sizes --set num_hidden_layers=2"
        ) from error


def _mtp_weights(
    config: dict[str, Any], source: Mapping[str, Any], quantization: Mapping[str, Any]
) -> dict[str, mx.array]:
    """The weights of the model's head for multi-token prediction by their names in a folder; none without a head."""
    from mlxdist.nn.layout.modules import parameters
    from mlxdist.nn.models.load.mtp_format import declares_mtp
    from mlxdist.nn.models.mtp_head import head_classes

    if not declares_mtp(config):
        return {}
    make, arguments = head_classes(config)
    head = make(arguments.from_dict(config))
    _convert(head, source, quantization)
    return {head.original(name): array for name, array in parameters(head).items()}


def _convert(model: nn.Module, config: Mapping[str, Any], quantization: Mapping[str, Any]) -> None:
    """Gives the weights the dtype of the configuration, and quantizes them as it says."""
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_map_with_path

    text = config.get("text_config") or {}
    names = [part.get(key) for part in (config, text) for key in ("dtype", "torch_dtype")]
    dtype = getattr(mx, next((name for name in names if name in _DTYPES), _DTYPES[0]))
    is_cast = getattr(model, "cast_predicate", lambda path: True)

    def cast(path: str, array: mx.array) -> mx.array:
        return array.astype(dtype) if mx.issubdtype(array.dtype, mx.floating) and is_cast(path) else array

    model.update(tree_map_with_path(cast, model.parameters()))
    if not quantization:
        return
    size = quantization["group_size"]

    def how(path: str, module: nn.Module) -> Any:
        fits = hasattr(module, "to_quantized") and module.weight.shape[-1] % size == 0
        return fits and quantization.get(path, True)

    mode = quantization.get("mode", "affine")
    nn.quantize(model, group_size=size, bits=quantization["bits"], mode=mode, class_predicate=how)


def _quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """How MLX has quantized the weights; empty where it has not."""
    found = config.get("quantization") or {}
    try:
        return found | fields_of({"group_size": number(16, 1024), "bits": number(1, 8)}, found) if found else {}
    except ValueError as error:
        raise InvalidArgument(f"the quantization of the configuration is none of MLX: {error}") from None


def _changes(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = "") -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for name, value in after.items():
        if isinstance(value, dict) and isinstance(before.get(name), dict):
            found |= _changes(before[name], value, f"{prefix}{name}.")
        elif type(value) is int and value != before.get(name):
            found[prefix + name] = [before.get(name), value]
    return found
