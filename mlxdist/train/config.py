"""The configuration of `mlxdist train`: a TOML file. The names are mlx-lm's own, of its ``lora`` command, where it has
one; the tables are what several ranks add."""

import dataclasses
import difflib
import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from mlxdist.base.errors import InvalidArgument
from mlxdist.base.validation import Check, flag, list_of, number, one_of, plain_text, positive, read_bounded
from mlxdist.nn.pipeline_parallel.schedule import SCHEDULES

__all__ = [
    "CHANGES",
    "CheckpointConfig",
    "ControlConfig",
    "MeshConfig",
    "PipelineConfig",
    "PrecisionConfig",
    "ShardConfig",
    "TrainConfig",
]

# What a run that goes on may have another one of where `allow_changes` says so; see fingerprint.py.
CHANGES = (
    "base", "data", "fine_tune_type", "lora_parameters", "mask_prompt", "max_seq_length", "num_layers", "optimizer",
    "pack", "precision", "tokenizer", "weights",
)  # fmt: skip
_MAX_BYTES = 1_000_000
_MAX_STEPS = 2**53
_REQUIRED = dataclasses.MISSING

_count = number(1, 2**31 - 1)
_text = plain_text(4096)
_path: Check = lambda name, value: os.path.expanduser(_text(name, value))
_rank_count = number(-1, 65536)
_seed = number(0, 2**32 - 1)


def _setting(default: Any, check: Check) -> Any:
    """A field with its check. ``default``: `_REQUIRED` where the file must say it; a dict is copied."""
    metadata = {"check": check}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(metadata=metadata) if default is _REQUIRED else field(default=default, metadata=metadata)


class _Settings:
    """Base of the configuration's dataclasses: checks what they are made of, and keeps what the checks return.

    Raises:
        InvalidArgument: a setting is wrong.
    """

    _table: ClassVar[str] = ""  # in the file

    def __post_init__(self) -> None:
        for one in _checked_fields(type(self)):
            value = getattr(self, one.name)
            if value is not one.default:  # which may be what the file cannot say, such as None
                value = list(value) if type(value) is tuple else value
                try:
                    checked = one.metadata["check"](f"{self._table}.{one.name}".lstrip("."), value)
                except ValueError as error:
                    raise InvalidArgument(str(error)) from None
                object.__setattr__(self, one.name, checked)


def _checked_fields(kind: Any) -> list[dataclasses.Field]:
    return [one for one in dataclasses.fields(kind) if "check" in one.metadata]


def _share(name: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value <= 1:
        raise ValueError(f"{name} is {value!r:.50}, not a number from 0 to 1")
    return float(value)


def _arguments(name: str, value: Any) -> dict[str, Any]:
    """Of an optimizer or a schedule of MLX: they check these themselves."""
    if type(value) is not dict:
        raise ValueError(f"{name} is {value!r:.50}, not a table")
    return value


@dataclass(frozen=True)
class MeshConfig(_Settings):
    """``[mesh]``: the sizes of the axes; see :func:`mlxdist.mesh`. By default all ranks are along dp."""

    _table = "mesh"
    pp: int = _setting(1, _rank_count)
    dp: int = _setting(-1, _rank_count)
    fsdp: int = _setting(1, _rank_count)
    cp: int = _setting(1, _rank_count)
    tp: int = _setting(1, _rank_count)


@dataclass(frozen=True)
class PipelineConfig(_Settings):
    """``[pipeline]``: for an axis pp of more than one rank; see :func:`mlxdist.nn.pipeline_schedule`.

    ``rank_shares``: the speeds of the stages; "compute" is what `mlxdist calibrate` has measured.
    """

    _table = "pipeline"
    schedule: str = _setting("1f1b", one_of(SCHEDULES))
    virtual: int = _setting(1, number(1, 1024))
    rank_shares: str = _setting("equal", one_of(("equal", "compute")))


@dataclass(frozen=True)
class ShardConfig(_Settings):
    """``[fully_shard]``: for an axis fsdp of more than one rank; see :func:`mlxdist.train.fully_shard`."""

    _table = "fully_shard"
    stage: int = _setting(3, number(1, 3))
    reshard_after_forward: bool = _setting(True, flag)
    prefetch: int = _setting(1, number(0, 64))


@dataclass(frozen=True)
class PrecisionConfig(_Settings):
    """``[precision]``: see :class:`mlxdist.train.MixedPrecision`. By default the model trains in its own dtype."""

    _table = "precision"
    dtype: str = _setting("model", one_of(("model", "float32", "bfloat16", "float16")))
    masters: str = _setting("float32", one_of(("float32", "kahan", "stochastic")))
    state_dtype: str = _setting("float32", one_of(("float32", "bfloat16", "float16")))


@dataclass(frozen=True)
class CheckpointConfig(_Settings):
    """``[checkpoints]``: what a restart goes on from; see :class:`mlxdist.train.Checkpoints`.

    ``keep_every``: steps; 0 for none. ``allow_changes``: what may be another than in the checkpoint, of ``CHANGES``.
    """

    _table = "checkpoints"
    directory: str = _setting("checkpoints", _path)
    every: int = _setting(100, _count)
    keep: int = _setting(2, _count)
    keep_every: int = _setting(0, number(0, 2**31 - 1))
    resume: bool = _setting(False, flag)
    allow_changes: tuple[str, ...] = _setting((), list_of(one_of(CHANGES), len(CHANGES)))


@dataclass(frozen=True)
class ControlConfig(_Settings):
    """``[control]``: when a training ends or saves by itself; see :class:`mlxdist.train.Control`.

    ``nan_guard_every``: steps from one that :class:`mlxdist.debug.NanGuard` observes to the next; 0 for none.
    """

    _table = "control"
    hours: float = _setting(0.0, positive(1e6))
    memory_share: float = _setting(0.0, _share)
    device_memory_gib: float = _setting(0.0, positive(1e6))
    nan_guard_every: int = _setting(0, number(0, 2**31 - 1))
    kill_file: str = _setting("", _path)
    save_file: str = _setting("", _path)


_TABLES: dict[str, type[_Settings]] = {
    kind._table: kind
    for kind in (MeshConfig, PipelineConfig, ShardConfig, PrecisionConfig, CheckpointConfig, ControlConfig)
}


@dataclass(frozen=True)
class TrainConfig(_Settings):
    """The configuration of a training. Made by `TrainConfig.read`, `TrainConfig.from_mapping`, or of its fields.

    Those that mlx-lm has mean what they mean there: ``batch_size`` is of all ranks together, an iteration is one such
    batch, and ``grad_accumulation_steps`` of them are one step of the optimizer.
    """

    model: str = _setting(_REQUIRED, _text)
    data: str = _setting(_REQUIRED, _path)
    weights: str = _setting("pretrained", one_of(("pretrained", "random")))
    fine_tune_type: str = _setting("lora", one_of(("lora", "dora", "full")))
    num_layers: int = _setting(16, number(-1, 65536))
    lora_parameters: dict[str, Any] = _setting({"rank": 8, "dropout": 0.0, "scale": 20.0}, _arguments)
    optimizer: str = _setting("adam", one_of(("adam", "adamw", "muon", "sgd", "adafactor")))
    optimizer_config: dict[str, Any] = _setting({}, _arguments)
    learning_rate: float = _setting(1e-5, positive(1e6))
    lr_schedule: dict[str, Any] = _setting({}, _arguments)
    router_aux_loss_coef: float = _setting(0.0, positive(1e6))
    max_grad_norm: float = _setting(math.inf, positive(math.inf))
    batch_size: int = _setting(4, _count)
    grad_accumulation_steps: int = _setting(1, _count)
    grad_checkpoint: bool = _setting(False, flag)
    max_seq_length: int = _setting(2048, _count)
    pack: bool = _setting(False, flag)
    rank_shares: str = _setting("equal", one_of(("equal", "compute")))
    mask_prompt: bool = _setting(False, flag)
    iters: int = _setting(1000, number(1, _MAX_STEPS))
    steps_per_report: int = _setting(10, _count)
    steps_per_eval: int = _setting(200, _count)
    val_batches: int = _setting(25, number(-1, 2**31 - 1))
    seed: int | None = _setting(None, _seed)
    skip_steps: tuple[int, ...] = _setting((), list_of(number(0, _MAX_STEPS), 100_000))
    context_parallel: str = _setting("ring", one_of(("ring", "ulysses")))
    output: str = _setting("trained", _path)
    report_to: str = _setting("", _text)
    project_name: str = _setting("", _text)
    mesh: MeshConfig = MeshConfig()
    pipeline: PipelineConfig = PipelineConfig()
    fully_shard: ShardConfig = ShardConfig()
    precision: PrecisionConfig = PrecisionConfig()
    checkpoints: CheckpointConfig = CheckpointConfig()
    control: ControlConfig = ControlConfig()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.router_aux_loss_coef and (self.grad_checkpoint or (self.mesh.cp, self.mesh.tp) != (1, 1)):
            raise InvalidArgument(
                "router_aux_loss_coef works without grad_checkpoint, cp and tp; leave out one of them"
            )

    @classmethod
    def read(cls, path: str | Path) -> "TrainConfig":
        """Reads the file of `mlxdist train`.

        Args:
            path: of the TOML file.

        Raises:
            InvalidArgument: the file cannot be read, is not TOML, or has a setting that does not exist or is wrong.
        """
        try:
            return cls.from_mapping(tomllib.loads(read_bounded(path, _MAX_BYTES).decode("utf-8-sig")))
        except UnicodeDecodeError:
            raise InvalidArgument(f"{path} is not UTF-8") from None
        except ValueError as error:  # of TOML, with line and column; or of a setting
            raise InvalidArgument(f"{path}: {error}") from None

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any]) -> "TrainConfig":
        """Makes a configuration of what the file of `mlxdist train` says, as `tomllib` returns it.

        Args:
            settings: values by name; those of a table, such as ``mesh``, are a mapping.

        Raises:
            InvalidArgument: a setting does not exist, is missing or is wrong.
        """
        given = dict(settings)
        tables = {name: _build(kind, given.pop(name, {})) for name, kind in _TABLES.items()}
        config: TrainConfig = _build(cls, given, tables)
        return config

    @property
    def steps(self) -> int:
        """The number of steps of the optimizer."""
        return self.iters // self.grad_accumulation_steps


def _build(kind: type[_Settings], table: Any, tables: Mapping[str, Any] | None = None) -> Any:
    if not isinstance(table, Mapping):
        raise InvalidArgument(f"{kind._table} is {table!r:.50}, not a table: write [{kind._table}]")
    fields = {one.name: one for one in _checked_fields(kind)}
    prefix = f"{kind._table}.".lstrip(".")
    for name in table.keys() - fields.keys():
        known = [*fields, *(tables or {})]
        close = difflib.get_close_matches(name, known, n=1)
        raise InvalidArgument(
            f"there is no setting {prefix}{name:.50}; "
            + (f"did you mean {prefix}{close[0]}?" if close else f"there are {', '.join(known)}")
        )
    for name, one in fields.items():
        if name not in table and one.default is _REQUIRED and one.default_factory is _REQUIRED:
            raise InvalidArgument(f"{prefix}{name} is missing")
    return kind(**table, **(tables or {}))
