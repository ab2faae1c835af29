"""Checks before any work of a training: its settings, its folders, the rows of its data. All ranks fail alike."""

import dataclasses
import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten
from rich.console import Console
from rich.table import Table

from mlxdist.base import validation
from mlxdist.base.errors import InvalidArgument
from mlxdist.nn.models.cuts import cuts
from mlxdist.nn.models.load.adapters import LORA, check_lora
from mlxdist.nn.rank_checks import agreed
from mlxdist.runtime.mesh import Mesh

from .checkpoint.ranks import gather
from .config import MAX_STEPS, MeshConfig, TrainConfig, require_settings
from .flops import vocabulary_size
from .model_folder import require_no_folder
from .report import check_reporters
from .rows import Dataset

__all__ = ["RowCounts", "check_elastic", "check_folders", "check_settings", "check_tokens", "count_rows", "show"]

_SCHEDULE = ("name", "arguments", "warmup", "warmup_init")
_SCHEDULES = ("cosine_decay", "exponential_decay", "linear_schedule", "step_decay")
_STEPS_AT_ONCE = 100_000


def check_settings(config: TrainConfig) -> None:
    """Raises InvalidArgument: settings do not fit each other, or are none that mlx-lm knows."""
    try:
        _check_settings(config)
    except ValueError as error:  # of a check, or InvalidArgument
        raise InvalidArgument(str(error)) from error


def check_elastic(config: TrainConfig) -> None:
    """Raises InvalidArgument: the others could not go on where a rank is lost."""
    given = dataclasses.asdict(config.mesh).items() - dataclasses.asdict(MeshConfig()).items()
    if given:
        axes = ", ".join(f"{axis} = {size}" for axis, size in sorted(given))
        raise InvalidArgument(
            f"[mesh] has {axes}, and a job of `mlxdist launch --elastic` trains replicas, as many as there are ranks, "
            "so that no rank has what the others cannot go on without: leave out [mesh]; or leave out --elastic, and "
            "go on from checkpoints, by --max-restarts"
        )


def check_folders(config: TrainConfig) -> None:
    """Raises InvalidArgument: the training could not write into a folder that it needs. The check leaves no files."""
    output = Path(config.output)
    if config.weights == "random":
        require_no_folder(output)
        output = output.absolute().parent
    _require_writable("output", output)
    _require_writable("checkpoints.directory", Path(config.checkpoints.directory))


@dataclass(frozen=True)
class RowCounts:
    """The rows of a dataset, counted.

    Attributes:
        samples: how many.
        tokens: of all samples, before they are truncated.
        targets: tokens that the loss is of, in an epoch.
        truncated: samples that are longer than ``max_seq_length``.
        largest: the largest token id.
    """

    samples: int
    tokens: int
    targets: int
    truncated: int
    largest: int


def count_rows(split: str, dataset: Dataset, tokenizer: Any, config: TrainConfig, mesh: Mesh) -> RowCounts:
    """Makes tokens of all samples, on each rank of its share of them. Collective.

    Raises:
        InvalidArgument: on all ranks: a sample cannot be made into tokens, or has none; no sample has a target.
    """
    ranks = mesh.group.size()
    found: list[int] = [0, 0, 0, 0]
    with agreed("train", mesh.group):
        for number in range(mesh.group.rank(), len(dataset), ranks):
            length, offset, largest = _sample(split, dataset, number, tokenizer)
            kept = length if config.pack else min(length, config.max_seq_length)
            found[0] += length
            found[1] += max(0, kept - max(offset, 1))
            found[2] += length > config.max_seq_length and not config.pack
            found[3] = max(found[3], largest)
    tokens, targets, truncated, largest_ids = zip(*gather(found, mesh.group))
    counts = RowCounts(len(dataset), sum(tokens), sum(targets), sum(truncated), max(largest_ids))
    if counts.targets == 0:
        raise InvalidArgument(
            f"no sample of the {split} data has a target in its first {config.max_seq_length} tokens, so there is "
            "nothing to learn; make max_seq_length larger, or prompts shorter"
        )
    return counts


def check_tokens(
    counts: Mapping[str, RowCounts], model: nn.Module, tokenizer: Any, config: TrainConfig, mesh: Mesh
) -> None:
    """Raises InvalidArgument: on all ranks: a token has no embedding."""
    size = vocabulary_size(model)
    with agreed("train", mesh.group):
        if size is None:
            return
        for split, found in counts.items():
            if found.largest >= size:
                raise InvalidArgument(
                    f"the {split} data has the token {found.largest}, and the vocab_size of {config.model} is {size}: "
                    "its tokenizer is another model's"
                )
        if config.weights == "random" and (largest := max(tokenizer.get_vocab().values(), default=0)) >= size:
            raise InvalidArgument(
                f"the tokenizer of {config.model} has tokens up to {largest}, and its vocab_size is {size}; set "
                f"vocab_size in its config.json to at least {largest + 1}"
            )


def show(
    config: TrainConfig, counts: Mapping[str, RowCounts], model: nn.Module, optimizer: optim.Optimizer, mesh: Mesh
) -> None:
    """Prints on rank 0 what is known of a training without a step. Collective."""
    held, trained, state = (
        sum(array.nbytes for _, array in _flat(tree))
        for tree in (model.parameters(), model.trainable_parameters(), optimizer.state)
    )
    everyone = gather([held, trained, state, _parameters(model)], mesh.group)
    if mesh.group.rank() > 0:
        return
    parameters = {path: count for *_, found in everyone for path, count in found.items()}
    most = max(everyone, key=lambda rank: sum(rank[:3]))
    epoch, rows = counts["train"].samples, config.steps * config.batch_size * config.grad_accumulation_steps
    table = Table("", "", show_header=False, box=None)
    lines = {
        "ranks": " x ".join(f"{axis}={size}" for axis, size in mesh.sizes.items() if size > 1) or "1",
        "parameters": f"{sum(count for count, _ in parameters.values()):,}",
        "trained": f"{sum(count for count, is_trained in parameters.values() if is_trained):,}",
        "memory of a rank": f"{sum(most[:3]) / 2**20:,.1f} MiB and activations, on the rank with the most",
        "  parameters": f"{most[0] / 2**20:,.1f} MiB",
        "  gradients": f"{most[1] / 2**20:,.1f} MiB",
        "  optimizer": f"{most[2] / 2**20:,.1f} MiB",
        "steps": f"{config.steps:,} of {config.batch_size * config.grad_accumulation_steps:,} rows",
    }
    for split, found in counts.items():
        lines[f"{split} data"] = f"{found.samples:,} samples, {found.tokens:,} tokens, {found.targets:,} targets"
        if found.truncated:
            lines[f"{split} data"] += f"; {found.truncated:,} samples are truncated to {config.max_seq_length} tokens"
    if not config.pack:
        lines["epochs"] = f"{rows / epoch:.2f}"
    for name, value in lines.items():
        table.add_row(name, value)
    Console(highlight=False, soft_wrap=True).print(table)


def _check_settings(config: TrainConfig) -> None:
    if config.steps < 1:
        raise InvalidArgument(
            f"iters is {config.iters}, and a step takes grad_accumulation_steps = {config.grad_accumulation_steps} "
            "iterations, so there would be no step; make iters larger"
        )
    if config.weights == "pretrained" and config.fine_tune_type != "full":
        require_settings("lora_parameters.", config.lora_parameters, LORA)
        check_lora("lora_parameters", config.lora_parameters)
    _require_finite("optimizer_config", config.optimizer_config)
    if config.lr_schedule:
        _check_schedule(config.lr_schedule, config.steps)
    check_reporters(config)


def _check_schedule(settings: Mapping[str, Any], steps: int) -> None:
    from mlx_lm.tuner.utils import build_schedule

    require_settings("lr_schedule.", settings, _SCHEDULE)
    _require_finite("lr_schedule", settings)
    validation.one_of(_SCHEDULES)("lr_schedule.name", settings.get("name"))
    validation.number(0, MAX_STEPS)("lr_schedule.warmup", settings.get("warmup", 0))
    try:
        schedule = build_schedule(dict(settings))
        for start in range(0, steps, _STEPS_AT_ONCE):
            count = min(_STEPS_AT_ONCE, steps - start)
            rates = mx.array(schedule(mx.arange(start, start + count)))
            wrong = mx.logical_not(mx.logical_and(mx.isfinite(rates), rates >= 0))
            if wrong.any().item():
                place: Any = mx.argmax(wrong).item()
                rate: Any = mx.broadcast_to(rates, (count,))[place].item()
                raise InvalidArgument(
                    f"lr_schedule gives the learning rate {rate:g} at step {start + place}; the training has {steps} "
                    "steps, and the rate must be a number from 0 in each"
                )
    except (IndexError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        if isinstance(error, InvalidArgument):
            raise
        raise InvalidArgument(f"lr_schedule is wrong: {error!r}") from error


def _require_finite(name: str, value: Any) -> None:
    """Raises ValueError: a number in a table is not finite."""
    if isinstance(value, float):
        validation.finite(name, value)
    elif isinstance(value, Mapping | list):
        for key, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
            _require_finite(f"{name}.{key}", inner)


def _require_writable(name: str, directory: Path) -> None:
    there = directory.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        raise InvalidArgument(f"{name} is {directory}, but {there} is a file, not a folder; choose another name")
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise InvalidArgument(
            f"{name} is {directory}, but {there} cannot be written: {error.strerror}; choose another folder"
        ) from None


def _sample(split: str, dataset: Dataset, number: int, tokenizer: Any) -> tuple[int, int, int]:
    """The number of a sample's tokens, how many of the first are no targets, and the largest token."""
    from mlx_lm.tuner.datasets import ChatDataset, CompletionsDataset

    where = f"sample {number} (from 0) of the {split} data"
    try:
        tokens, offset = dataset[number]
    except IndexError:  # mlx-lm looks at the last token
        tokens, offset = [], 0
    except Exception as error:  # of the tokenizer or of its template
        is_chat = isinstance(getattr(dataset, "_data", None), ChatDataset | CompletionsDataset)
        if is_chat and not getattr(tokenizer, "has_chat_template", True):
            raise InvalidArgument(
                f"the {split} data has chats or prompts, and the tokenizer has no chat template; add "
                'chat_template.jinja to the model folder, or write samples as "text"'
            ) from None
        text = " ".join(str(error).split())
        raise InvalidArgument(f"{where} cannot be made into tokens: {type(error).__name__}: {text}") from error
    if not len(tokens):
        raise InvalidArgument(f"{where} has no tokens; remove it")
    return len(tokens), int(offset), int(max(tokens))


def _flat(tree: Any) -> list[tuple[str, mx.array]]:
    found: Any = tree_flatten(tree)
    return found


def _parameters(model: nn.Module) -> dict[str, tuple[int, bool]]:
    """The elements of each full parameter of this rank, by path, and whether it is trained."""
    modules, trained = dict(model.named_modules()), dict(_flat(model.trainable_parameters()))
    found = {}
    for path, cut in cuts(model).items():
        module, _, name = path.rpartition(".")
        owner, elements = modules.get(module), math.prod(cut.shape)
        if owner is not None and "scales" in owner:  # packed into 32 bits
            elements = (
                0 if name in ("scales", "biases") else elements * 32 // owner.bits if name == "weight" else elements
            )
        found[path] = elements, path in trained
    return found
