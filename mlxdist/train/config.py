"""The configuration of `mlxdist train`: a TOML file. The names are mlx-lm's own, of its ``lora`` command, where it has
one; the tables are what several ranks add."""

import dataclasses
import math
import os
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, ClassVar

from mlxdist.base.errors import InvalidArgument
from mlxdist.base.validation import (
    Check,
    checked,
    checks_of,
    flag,
    list_of,
    number,
    one_of,
    plain_text,
    positive,
    printable,
    read_bounded,
    share,
    suggestion,
)
from mlxdist.nn.pipeline_parallel.schedule import SCHEDULES

__all__ = [
    "CHANGES",
    "MAX_STEPS",
    "CheckpointConfig",
    "ControlConfig",
    "ElasticConfig",
    "MeshConfig",
    "PipelineConfig",
    "PrecisionConfig",
    "ShardConfig",
    "TrainConfig",
    "require_settings",
]

# What a run that goes on may have another one of where `allow_changes` says so; see fingerprint.py.
CHANGES = (
    "base", "data", "fine_tune_type", "lora_parameters", "mask_prompt", "max_seq_length", "num_layers", "optimizer",
    "pack", "precision", "tokenizer", "weights",
)  # fmt: skip
_MAX_BYTES = 1_000_000
MAX_STEPS = 2**53

_count = number(1, 2**31 - 1)
_text = plain_text(4096)
_path: Check = lambda name, value: os.path.expanduser(_text(name, value))
_rank_count = number(-1, 65536)
_seed = number(0, 2**32 - 1)


@dataclass(frozen=True)
class _Settings:
    """Base of the configuration's dataclasses: checks what they are made of, and keeps what the checks return.

    Raises:
        InvalidArgument: a setting is wrong.
    """

    _table: ClassVar[str] = ""  # in the file

    def __post_init__(self) -> None:
        kind: Any = type(self)
        checks = checks_of(kind)
        for one in dataclasses.fields(self):
            value = getattr(self, one.name)
            if one.name not in checks:
                continue
            if _is_default(value, one.default):  # which need not pass the check: None, or 0 for none
                value = one.default
            else:
                value = list(value) if type(value) is tuple else value
                try:
                    value = checks[one.name](f"{self._table}.{one.name}".lstrip("."), value)
                except ValueError as error:
                    raise InvalidArgument(str(error)) from None
            object.__setattr__(self, one.name, value)


def _is_default(value: Any, default: Any) -> bool:
    """Whether both are equal and of one type, where a whole number is a float, and True is no number."""
    kinds = (int, float) if type(default) is float else (type(default),)
    return type(value) in kinds and bool(value == default)


def _arguments(name: str, value: Any) -> dict[str, Any]:
    """Checks that a value is a table. MLX's optimizers and schedules check the arguments in it themselves."""
    if type(value) is not dict:
        raise ValueError(f"{name} is {value!r:.50}, not a table")
    return value


@dataclass(frozen=True)
class MeshConfig(_Settings):
    """``[mesh]``: the sizes of the axes; see :func:`mlxdist.mesh`. By default all ranks are along dp."""

    _table = "mesh"
    pp: int = checked(_rank_count, 1)
    dp: int = checked(_rank_count, -1)
    fsdp: int = checked(_rank_count, 1)
    cp: int = checked(_rank_count, 1)
    tp: int = checked(_rank_count, 1)


@dataclass(frozen=True)
class PipelineConfig(_Settings):
    """``[pipeline]``: for an axis pp of more than one rank; see :func:`mlxdist.nn.pipeline_schedule`.

    ``rank_shares``: the speeds of the stages; "compute" is what `mlxdist calibrate` has measured.
    """

    _table = "pipeline"
    schedule: str = checked(one_of(SCHEDULES), "1f1b")
    virtual: int = checked(number(1, 1024), 1)
    rank_shares: str = checked(one_of(("equal", "compute")), "equal")


@dataclass(frozen=True)
class ShardConfig(_Settings):
    """``[fully_shard]``: for an axis fsdp of more than one rank; see :func:`mlxdist.train.fully_shard`."""

    _table = "fully_shard"
    stage: int = checked(number(1, 3), 3)
    reshard_after_forward: bool = checked(flag, True)
    prefetch: int = checked(number(0, 64), 1)


@dataclass(frozen=True)
class PrecisionConfig(_Settings):
    """``[precision]``: see :class:`mlxdist.train.MixedPrecision`. By default the model trains in its own dtype."""

    _table = "precision"
    dtype: str = checked(one_of(("model", "float32", "bfloat16", "float16")), "model")
    masters: str = checked(one_of(("float32", "kahan", "stochastic")), "float32")
    state_dtype: str = checked(one_of(("float32", "bfloat16", "float16")), "float32")


@dataclass(frozen=True)
class CheckpointConfig(_Settings):
    """``[checkpoints]``: what a restart goes on from; see :class:`mlxdist.train.Checkpoints`.

    ``every``, ``keep_every``: steps; 0 for none. ``every_minutes``: beside ``every``; 0 for none. ``allow_changes``:
    what may be another than in the checkpoint, of ``CHANGES``.
    """

    _table = "checkpoints"
    directory: str = checked(_path, "checkpoints")
    every: int = checked(number(0, 2**31 - 1), 100)
    every_minutes: float = checked(positive(1e6), 0.0)
    keep: int = checked(_count, 2)
    keep_every: int = checked(number(0, 2**31 - 1), 0)
    resume: bool = checked(flag, False)
    allow_changes: tuple[str, ...] = checked(list_of(one_of(CHANGES), len(CHANGES)), ())


@dataclass(frozen=True)
class ControlConfig(_Settings):
    """``[control]``: when a training ends or saves by itself; see :class:`mlxdist.train.Control`.

    ``nan_guard_every``: steps from one that :class:`mlxdist.debug.NanGuard` observes to the next; 0 for none.
    """

    _table = "control"
    hours: float = checked(positive(1e6), 0.0)
    memory_share: float = checked(share, 0.0)
    device_memory_gib: float = checked(positive(1e6), 0.0)
    nan_guard_every: int = checked(number(0, 2**31 - 1), 0)
    kill_file: str = checked(_path, "")
    save_file: str = checked(_path, "")


@dataclass(frozen=True)
class ElasticConfig(_Settings):
    """``[elastic]``: for jobs of `mlxdist launch --elastic`; see :func:`mlxdist.train.elastic`.

    ``grow_every``: steps from one at which ranks may join to the next.
    """

    _table = "elastic"
    grow_every: int = checked(_count, 10)


_TABLES: dict[str, type[_Settings]] = {
    kind._table: kind
    for kind in (
        MeshConfig, PipelineConfig, ShardConfig, PrecisionConfig, CheckpointConfig, ControlConfig, ElasticConfig,
    )
}  # fmt: skip


@dataclass(frozen=True)
class TrainConfig(_Settings):
    """The configuration of a training. Made by `TrainConfig.read`, `TrainConfig.from_mapping`, or of its fields.

    Fields that mlx-lm has, too, mean the same as there: ``batch_size`` is of all ranks together, an iteration is one
    such batch, and ``grad_accumulation_steps`` iterations are one step of the optimizer.
    """

    model: str = checked(_text)
    data: str = checked(_path)
    weights: str = checked(one_of(("pretrained", "random")), "pretrained")
    fine_tune_type: str = checked(one_of(("lora", "dora", "full")), "lora")
    num_layers: int = checked(number(-1, 65536), 16)
    lora_parameters: dict[str, Any] = checked(_arguments, {"rank": 8, "dropout": 0.0, "scale": 20.0})
    optimizer: str = checked(one_of(("adam", "adamw", "muon", "sgd", "adafactor")), "adam")
    optimizer_config: dict[str, Any] = checked(_arguments, {})
    learning_rate: float = checked(positive(1e6), 1e-5)
    lr_schedule: dict[str, Any] = checked(_arguments, {})
    router_aux_loss_coef: float = checked(positive(1e6), 0.0)
    max_grad_norm: float = checked(positive(math.inf), math.inf)
    batch_size: int = checked(_count, 4)
    grad_accumulation_steps: int = checked(_count, 1)
    grad_checkpoint: bool = checked(flag, False)
    max_seq_length: int = checked(_count, 2048)
    pack: bool = checked(flag, False)
    rank_shares: str = checked(one_of(("equal", "compute")), "equal")
    mask_prompt: bool = checked(flag, False)
    iters: int = checked(number(1, MAX_STEPS), 1000)
    steps_per_report: int = checked(_count, 10)
    steps_per_eval: int = checked(_count, 200)
    val_batches: int = checked(number(-1, 2**31 - 1), 25)
    seed: int | None = checked(_seed, None)
    skip_steps: tuple[int, ...] = checked(list_of(number(0, MAX_STEPS), 100_000), ())
    context_parallel: str = checked(one_of(("ring", "ulysses")), "ring")
    output: str = checked(_path, "trained")
    report_to: str = checked(_text, "")
    project_name: str = checked(_text, "")
    prometheus_file: str = checked(_path, "")
    mesh: MeshConfig = MeshConfig()
    pipeline: PipelineConfig = PipelineConfig()
    fully_shard: ShardConfig = ShardConfig()
    precision: PrecisionConfig = PrecisionConfig()
    checkpoints: CheckpointConfig = CheckpointConfig()
    control: ControlConfig = ControlConfig()
    elastic: ElasticConfig = ElasticConfig()

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
            path: the path of the TOML file.

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
        """Makes a configuration from the contents of a file of `mlxdist train`, as `tomllib` returns them.

        Args:
            settings: values by name; a table, such as ``mesh``, is a mapping.

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


def _build(kind: Any, table: Any, tables: Mapping[str, Any] = {}) -> Any:
    if not isinstance(table, Mapping):
        raise InvalidArgument(f"{kind._table} is {table!r:.50}, not a table: write [{kind._table}]")
    checks, prefix = checks_of(kind), f"{kind._table}.".lstrip(".")
    try:
        require_settings(prefix, table, [*checks, *tables])
    except ValueError as error:
        raise InvalidArgument(str(error)) from None
    for one in dataclasses.fields(kind):
        if one.name in checks and one.name not in table and one.default is one.default_factory is MISSING:
            raise InvalidArgument(f"{prefix}{one.name} is missing")
    return kind(**table, **tables)


def require_settings(prefix: str, table: Iterable[str], known: Collection[str]) -> None:
    """Raises ValueError: the table has a setting that is none of those known."""
    for name in table:
        if name not in known:
            raise ValueError(f"there is no setting {prefix}{printable(name[:50])}; {suggestion(name, known, prefix)}")
