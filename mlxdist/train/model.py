"""The model of a configuration: opened, sharded, its optimizer, and saved as mlx-lm saves models and adapters."""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_unflatten

from mlxdist.base.errors import InvalidArgument
from mlxdist.base.model_directory import model_directory
from mlxdist.nn.context_parallel import context_parallel
from mlxdist.nn.layout.modules import dtype_name
from mlxdist.nn.models.cuts import cuts
from mlxdist.nn.models.plan import plan_shards, shard_model
from mlxdist.nn.pipeline_parallel import pipeline_parallel, plan_stages
from mlxdist.nn.rank_checks import agreed
from mlxdist.runtime.group.group import Group
from mlxdist.runtime.mesh import Mesh

from .checkpoint import Checkpoints
from .checkpoint.ranks import gather
from .config import TrainConfig
from .fingerprint import weight_files
from .flops import FlopsPerToken, flops_by_length
from .fully_shard.fully_shard import fully_shard
from .mixed_precision import MixedPrecision
from .model_folder import other_files, write_model_folder

__all__ = ["make_model", "make_optimizer", "open_tokenizer", "save_trained"]

_OPTIMIZERS = {
    "adam": optim.Adam,
    "adamw": optim.AdamW,
    "muon": optim.Muon,
    "sgd": optim.SGD,
    "adafactor": optim.Adafactor,
}
_OF_FULL_MATRICES = ("muon", "adafactor")  # the update of an element depends on others
_DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}


def open_tokenizer(config: TrainConfig, group: Group) -> Any:
    """Returns mlx-lm's tokenizer of the model. Raises InvalidArgument: on all ranks: one has no such model."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it warns when there is no PyTorch
    from mlx_lm.utils import load_tokenizer

    with agreed("train", group):
        try:
            return load_tokenizer(model_directory(config.model))
        except InvalidArgument:
            raise
        except Exception as error:  # of transformers, about files of whatever model
            raise InvalidArgument(f"the tokenizer of {config.model} cannot be loaded: {_sentence(error)}") from error


def make_model(config: TrainConfig, seed: int, mesh: Mesh) -> tuple[nn.Module, Callable[[float], FlopsPerToken]]:
    """This rank's part of the model, with only what is trained unfrozen, and the cost of a token in the full one, by
    the length of its row.

    Parameters are lazy until they are cut.

    Raises:
        InvalidArgument: on all ranks: there is no such model, its weights are damaged, or it has fewer layers;
            ``lora_parameters`` are wrong; the model cannot be sharded as the mesh says.
    """
    with agreed("train", mesh.group):
        try:
            model = _open_random(config) if config.weights == "random" else _open_pretrained(config)
        except InvalidArgument:
            raise
        except Exception as error:  # of mlx-lm or of the file of a model, about a config.json or weights
            raise InvalidArgument(f"{config.model} cannot be opened: {_sentence(error)}") from error
    if mesh.size("tp") > 1:
        shard_model(model, plan_shards(model, tp=mesh.size("tp")), group=mesh["tp"])
    if config.weights == "pretrained":
        with agreed("train", mesh.group):
            mx.random.seed(seed)  # where mlx-lm does; sharding has drawn numbers since
            _freeze(model, config)
    flops = flops_by_length(model)
    context_parallel(model, group=mesh["cp"], method=config.context_parallel)
    is_pipeline = mesh.size("pp") > 1
    if is_pipeline:  # whose layers are others to mx.checkpoint; those of fully_shard have to be sharded before
        _checkpoint_layers(config, model)
        _make_stage(config, model, mesh)
    if mesh.size("fsdp") > 1:
        options = dataclasses.asdict(config.fully_shard)
        fully_shard(model, mesh=mesh, compute_dtype=_DTYPES.get(config.precision.dtype), **options)
    if not is_pipeline:
        _checkpoint_layers(config, model)
    model.train()
    return model, flops


def _sentence(error: Exception) -> str:
    """The text of another library's error on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _checkpoint_layers(config: TrainConfig, model: nn.Module) -> None:
    if config.grad_checkpoint:
        from mlx_lm.tuner.trainer import grad_checkpoint

        for layer in {type(layer): layer for layer in model.layers}.values():
            grad_checkpoint(layer)


def _make_stage(config: TrainConfig, model: nn.Module, mesh: Mesh) -> None:
    """Leaves only this rank's layers in the model. Activations pass between stages in the dtype of computation."""
    parameters: Any = tree_flatten(model.parameters())
    if (dtype := _DTYPES.get(config.precision.dtype)) is not None:
        model.set_dtype(dtype)
    rank_shares = None if config.pipeline.rank_shares == "equal" else config.pipeline.rank_shares
    with agreed("train", mesh.group):
        stage_plan = plan_stages(model, mesh.size("pp"), rank_shares=rank_shares, virtual=config.pipeline.virtual)
    pipeline_parallel(model, group=mesh["pp"], stage_plan=stage_plan)
    held = dict(cast(Any, tree_flatten(model.parameters())))
    model.update(tree_unflatten([pair for pair in parameters if pair[0] in held]))


def _open_random(config: TrainConfig) -> nn.Module:
    """Returns the model with random weights, which follow from MLX's global seed."""
    from mlx_lm.utils import _get_classes, load_config

    settings = load_config(model_directory(config.model))
    kind, arguments = _get_classes(settings)
    return kind(arguments.from_dict(settings))


def _open_pretrained(config: TrainConfig) -> nn.Module:
    from mlx_lm.utils import load_model

    directory = model_directory(config.model)
    weight_files(directory)  # whole, as far as their headers say: MLX reads them when they are used
    model, _ = load_model(directory, lazy=True)
    if config.num_layers > len(model.layers):
        raise InvalidArgument(f"num_layers is {config.num_layers}, but {config.model} has {len(model.layers)} layers")
    return model


def _freeze(model: nn.Module, config: TrainConfig) -> None:
    """Freezes the model as mlx-lm's ``lora`` does: all but the last layers, or all but the adapters on them."""
    from mlx_lm.tuner.utils import linear_to_lora_layers

    layers = model.layers
    count = len(layers) if config.num_layers < 0 else config.num_layers
    model.freeze()
    if config.fine_tune_type == "full":
        for layer in layers[len(layers) - count :]:
            if any("scales" in module for module in layer.modules()):
                raise InvalidArgument(
                    f"{config.model} is quantized, and packed weights cannot be trained; instead of fine_tune_type "
                    '= "full" take "lora" or "dora", or a model that is not quantized'
                )
            layer.unfreeze()
    else:
        try:
            linear_to_lora_layers(model, count, config.lora_parameters, config.fine_tune_type == "dora")
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidArgument(f"lora_parameters: {error}") from error
    if not tree_flatten(model.trainable_parameters()):
        raise InvalidArgument(
            "there is nothing to train: num_layers is 0, or no layer has what lora_parameters.keys names"
        )


def make_optimizer(config: TrainConfig, model: nn.Module, mesh: Mesh) -> optim.Optimizer:
    """Makes the optimizer as mlx-lm's ``lora`` does, with its state for the shards of ``model``.

    Raises:
        InvalidArgument: on all ranks: the optimizer has no such arguments, or does not work on shards.
    """
    from mlx_lm.tuner.utils import build_schedule

    with agreed("train", mesh.group):
        if config.optimizer in _OF_FULL_MATRICES and mesh.size("fsdp") * mesh.size("tp") > 1:
            raise InvalidArgument(
                f"optimizer {config.optimizer} needs full matrices, but fsdp and tp shard them; use adamw, or dp alone"
            )
        try:
            rate = build_schedule(config.lr_schedule) if config.lr_schedule else config.learning_rate
            optimizer = _OPTIMIZERS[config.optimizer](learning_rate=rate, **config.optimizer_config)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InvalidArgument(f"optimizer_config or lr_schedule is wrong: {error!r}") from error
    precision = config.precision
    masters: Any = True if precision.masters == "float32" else precision.masters
    if precision.dtype in ("bfloat16", "float16"):
        optimizer = MixedPrecision(
            optimizer,
            _DTYPES[precision.dtype],
            masters=masters,
            loss_scale="dynamic" if precision.dtype == "float16" else None,
            state_dtype=_DTYPES[precision.state_dtype],
            group=mesh.group,
        )
        optimizer.init(model)
    else:
        if precision.dtype == "float32":
            model.set_dtype(mx.float32)
        optimizer.init(model.trainable_parameters())
    return optimizer


def save_trained(
    config: TrainConfig, model: nn.Module, checkpoints: Checkpoints, mesh: Mesh, *, again: bool = False
) -> Path:
    """Writes the trained parameters of the last checkpoint into ``config.output`` on rank 0's host, as mlx-lm does.

    A fine-tuning leaves what mlx-lm's ``lora`` leaves in its ``--adapter-path``; a training from random weights a model
    folder. Rank 0 needs memory for what was trained, in full. ``again``: a rank that has been lost since may have
    written it.

    Returns:
        The folder.
    """
    is_writer = mesh.group.rank() == 0
    known = cuts(model)
    trained: Any = tree_flatten(model.trainable_parameters())
    own = {path: (known[path].shape, dtype_name(array)) for path, array in trained}
    described: dict[str, Any] = {}
    for found in gather(own, mesh["pp"]):  # of all stages
        described |= found
    arrays = [(path, mx.zeros(shape, getattr(mx, dtype))) for path, (shape, dtype) in described.items()]  # lazy
    full = arrays if is_writer else []
    # The other ranks, too, load something: the seed.
    state = {"model": tree_unflatten(full) if full else {}, "seeds": {"seed": 0}}
    checkpoints.load(state)
    target = Path(config.output)
    with agreed("train", mesh.group):
        if is_writer:
            if config.weights != "random":
                _write_adapters(target, config, dict(tree_flatten(state["model"])))
            elif not again or not (target / "config.json").exists():  # it was not there at the start
                whole = _open_random(config)
                whole.update(state["model"])
                write_model_folder(target, whole, other_files(model_directory(config.model)))
    return target


def _write_adapters(target: Path, config: TrainConfig, arrays: dict[str, mx.array]) -> None:
    from mlx_lm.utils import save_config

    target.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(target / "adapters.safetensors"), arrays)
    save_config(dataclasses.asdict(config), target / "adapter_config.json")
