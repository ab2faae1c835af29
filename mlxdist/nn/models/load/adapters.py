"""Adapters that mlx-lm's lora training has saved, on a model that is sharded: each rank takes its shard of them."""

import io
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from mlxdist.base import validation
from mlxdist.base.errors import InvalidArgument
from mlxdist.base.json_reader import parse_json
from mlxdist.base.safetensors_reader import WeightFile
from mlxdist.nn.layout.modules import dtype_name, parameters
from mlxdist.nn.pipeline_parallel.stage import parameters_of, stage_of
from mlxdist.nn.rank_checks import agree, agreed
from mlxdist.nn.tensor_parallel.multi_lora import MultiLoRALinear
from mlxdist.runtime.group.group import Group
from mlxdist.runtime.operations.blobs import broadcast_blob

from ..plan import Plan
from ..plan.adapters import adapter_shard

__all__ = [
    "LORA",
    "Adapters",
    "check_lora",
    "full_model",
    "put_adapters",
    "put_several",
    "read_adapters",
    "require_adapters_of",
]

Adapters = tuple[dict[str, Any], dict[str, mx.array]]  # the settings and the matrices of a directory

CONFIG, WEIGHTS = "adapter_config.json", "adapters.safetensors"
MAX_CONFIG_BYTES = 1_000_000
MAX_RANK = 65536  # of an adapter


def read_adapters(path: str | Path | None, group: Group, stream: bool) -> Adapters:
    """The settings and the matrices in a directory of adapters, which every rank reads in full: they are small. Raises
    InvalidArgument on every rank where files are missing or damaged, Mismatch where they are not the same on all."""
    files = [b"", b""]
    with agreed("load_sharded", group):
        if group.rank() == 0 or not stream:
            files = _read(path)
    if stream:
        files = [broadcast_blob(file, group) for file in files]
    agree("load_sharded", group, None, {"adapters": [blake2b(file, digest_size=8).hexdigest() for file in files]})
    with agreed("load_sharded", group):
        read = _parsed(*files)
    return read


def require_adapters_of(
    model: nn.Module, plan: Plan, config: Mapping[str, Any], weights: dict[str, mx.array], several: bool
) -> None:
    """Raises InvalidArgument, before weights are read, if the adapters are not for ``model``, full and with shapes
    alone; with ``several`` also if they are not all on linear layers. It may have adapters then, and has none
    otherwise."""
    if several and config.get("fine_tune_type") == "full":
        raise InvalidArgument(
            "load_sharded: each of several adapters must be of the kind 'lora'; 'full' are the weights of another model"
        )
    layers = model.leaf_modules()
    _put_on(model, config)
    _require_names(model, plan, config, weights)
    if several:
        _require_linear(model)
    held = parameters(model)
    model.update_modules(layers)
    for name, array in weights.items():
        if shard := plan.shards.get(name):
            fits = (array.shape, dtype_name(array)) == (shard.shape, shard.dtype)
        else:
            fits = array.shape == held[name].shape and mx.issubdtype(array.dtype, mx.floating)
        if not fits:
            raise InvalidArgument(
                f"load_sharded: {name} in {WEIGHTS} is {dtype_name(array)} of shape {array.shape}, which is not that "
                "of this model"
            )


def put_adapters(
    model: nn.Module, plan: Plan, config: Mapping[str, Any], weights: dict[str, mx.array], rank: int, group: Group
) -> None:
    """Puts adapters of :func:`read_adapters` on ``model``, which is sharded and has its weights. ``rank``: of the plan;
    ``group``: all ranks, those of other stages too."""
    with agreed("load_sharded", group):
        _put_on(model, config)
        if (stage := stage_of(model)) is not None:
            holders = parameters_of(stage).holders
            weights = {name: full for name, full in weights.items() if stage.index in holders(name)}
        model.update(tree_unflatten(list(_shards(plan, weights, rank))))
        model.eval()  # without dropout, as mlx-lm loads them
        mx.eval(model.parameters())


def put_several(model: nn.Module, plan: Plan, adapters: Sequence[Adapters], rank: int, group: Group) -> None:
    """Puts several adapters on ``model``, as :func:`put_adapters` does one: a layer with any of them has all."""
    # mlx-lm puts a single adapter on a layer. So each is put on the layers as given, then they are joined.
    given = model.leaf_modules()
    layers: dict[str, list[nn.Module | None]] = {}
    for number, (config, weights) in enumerate(adapters):
        put_adapters(model, plan, config, weights, rank, group)
        for path, layer in _adapted(model):
            layers.setdefault(path, [None] * len(adapters))[number] = layer
        model.update_modules(given)
    with agreed("load_sharded", group):
        if layers:  # a stage may have none
            model.update_modules(tree_unflatten([(path, MultiLoRALinear(each)) for path, each in layers.items()]))
            mx.eval(model.parameters())


def full_model(directory: Path, path: str | Path) -> nn.Module:
    """The model of ``directory``, not sharded, with the adapters, as mlx-lm loads it."""
    from mlx_lm import utils

    model = utils.load_model(directory, lazy=True)[0]
    utils.load_adapters(model, str(Path(path).expanduser()))
    return model.eval()


def _read(path: str | Path | None) -> list[bytes]:
    if not isinstance(path, str | Path):
        raise InvalidArgument(f"load_sharded: adapter_path must be a directory, not {path!r}")
    directory = Path(path).expanduser()
    try:
        if (length := (directory / CONFIG).stat().st_size) > MAX_CONFIG_BYTES:
            raise InvalidArgument(
                f"load_sharded: {directory / CONFIG} has {length} bytes, more than {MAX_CONFIG_BYTES}"
            )
        WeightFile(directory / WEIGHTS)  # rejects one whose header is damaged, which MLX would read
        return [(directory / name).read_bytes() for name in (CONFIG, WEIGHTS)]
    except OSError as error:
        raise InvalidArgument(
            f"load_sharded: adapter_path must be a directory of mlx-lm's lora training, with {CONFIG} and {WEIGHTS}: "
            f"{error}"
        ) from error


def _parsed(config: bytes, weights: bytes) -> tuple[dict[str, Any], dict[str, mx.array]]:
    try:
        parsed = parse_json(config)
        kind = parsed.get("fine_tune_type", "lora")
        arrays: Any = mx.load(io.BytesIO(weights), format="safetensors")  # a dict
    except (ValueError, AttributeError, RuntimeError) as error:
        raise InvalidArgument(f"load_sharded: {CONFIG} or {WEIGHTS} is damaged: {error}") from error
    if kind not in ("lora", "full"):
        raise InvalidArgument(
            f"load_sharded: adapters of the kind {kind!r} cannot be sharded; fuse them with mlx_lm.fuse"
        )
    if kind == "lora":
        try:
            validation.fields_of(_CONFIG, parsed)
        except ValueError as error:
            raise InvalidArgument(f"load_sharded: {CONFIG} is damaged: {error}") from None
    return parsed, arrays


def check_lora(name: str, parameters: Any) -> None:
    """Raises ValueError: they are none that mlx-lm's linear_to_lora_layers takes."""
    if not isinstance(parameters, dict):
        raise ValueError(f"{name} is {parameters!r:.50}, not an object")
    try:
        validation.fields_of(LORA, {"keys": None} | parameters)
    except ValueError as error:
        raise ValueError(f"{name}.{error}") from None


def _dropout(name: str, value: Any) -> None:
    if validation.finite(name, value) < 0 or value >= 1:
        raise ValueError(f"{name} is {value!r:.50}, not a number from 0 and below 1")


def _keys(name: str, value: Any) -> None:
    if value is not None and not (isinstance(value, list) and all(isinstance(key, str) for key in value)):
        raise ValueError(f"{name} is {value!r:.50}, not a list of names of modules")


# What mlx-lm's linear_to_lora_layers takes.
LORA: Mapping[str, validation.Check] = {
    "rank": validation.number(1, MAX_RANK),
    "scale": validation.finite,
    "dropout": _dropout,
    "keys": _keys,
}
_CONFIG: Mapping[str, validation.Check] = {"num_layers": validation.number(-1, 65536), "lora_parameters": check_lora}


def _put_on(model: nn.Module, config: Mapping[str, Any]) -> None:
    """Puts new adapters on ``model``, as the settings say."""
    from mlx_lm.tuner.utils import linear_to_lora_layers

    if config.get("fine_tune_type") != "full":
        try:
            linear_to_lora_layers(model, config["num_layers"], config["lora_parameters"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InvalidArgument(f"load_sharded: {CONFIG} is not for this model: {error!r}") from error


def _adapted(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers that have adapters, by their paths."""
    return [(path, module) for path, module in model.named_modules() if "lora_a" in module]


def _require_names(model: nn.Module, plan: Plan, config: Mapping[str, Any], weights: Mapping[str, mx.array]) -> None:
    """Raises InvalidArgument if the matrices are not those of the adapters on ``model``."""
    wanted = list(plan.shards)
    if config.get("fine_tune_type") != "full":
        wanted = [name for name in parameters(model) if name.rpartition(".")[2] in ("lora_a", "lora_b")]
        if missing := [name for name in wanted if name not in weights]:
            raise InvalidArgument(f"load_sharded: {WEIGHTS} does not have {missing[0]} ({len(missing)} are missing)")
    if more := [name for name in weights if name not in wanted]:
        raise InvalidArgument(f"load_sharded: {WEIGHTS} has {more[0]}, which the model does not ({len(more)} in all)")


def _require_linear(model: nn.Module) -> None:
    """Raises InvalidArgument if there are adapters on other layers: in a batch these cannot have several."""
    from mlx_lm.tuner.lora import LoRALinear

    for path, layer in _adapted(model):
        if not isinstance(layer, LoRALinear):
            raise InvalidArgument(
                f"load_sharded: each of several adapters must be on linear layers, and one is a {type(layer).__name__} "
                f"on {path}; train it with other keys, or fuse it with mlx_lm.fuse"
            )


def _shards(plan: Plan, weights: dict[str, mx.array], rank: int) -> Iterator[tuple[str, mx.array]]:
    """This rank's shard of each matrix, by name."""
    for name, full in weights.items():
        layer, _, matrix = name.rpartition(".")
        weight = plan.shards.get(f"{layer}.weight")
        if shard := plan.shards.get(name):
            yield name, shard.take(full, rank)
        else:
            yield name, adapter_shard(weight, matrix, full, rank) if weight else full
