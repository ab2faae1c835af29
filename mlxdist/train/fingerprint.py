"""The fingerprint of a training: facts that must be the same where it is resumed, and settings that may change."""

import dataclasses
import json
import sys
from collections.abc import Collection, Iterable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from mlxdist.base.errors import InvalidArgument
from mlxdist.base.model_directory import model_directory
from mlxdist.base.safetensors_reader import WeightFile
from mlxdist.nn.rank_checks import agreed
from mlxdist.runtime.group.group import Group

from .config import TrainConfig
from .datasets import digest_of

__all__ = ["Fingerprint", "weight_files"]

# Settings that may be others in a run that goes on: they take effect.
_FREE = (
    "learning_rate", "lr_schedule", "optimizer_config", "max_grad_norm", "batch_size", "grad_accumulation_steps",
    "iters", "skip_steps",
)  # fmt: skip
_SAMPLE_BYTES = 256  # of a tensor, at its beginning and in its middle
_TOKENIZER = ("tokenizer*", "vocab*", "merges*", "special_tokens*", "chat_template*")


class Fingerprint:
    """The base model, the data and the settings of a training. A checkpoint keeps it in its manifest.

    All ranks of a group make it.

    Raises:
        InvalidArgument: on all ranks: a file of the model or of the data cannot be read, or ranks have different ones.
    """

    def __init__(self, config: TrainConfig, group: Group) -> None:
        self._saved: Mapping[str, Any] = {}
        fixed: dict[str, Any] = {}
        with agreed("train", group, fixed):
            try:
                fixed |= _fixed(config)
            except OSError as error:
                raise InvalidArgument(f"{error.filename} cannot be read: {error.strerror}") from None
        self._own = {"fixed": _texts(fixed), "free": _texts({name: getattr(config, name) for name in _FREE})}

    @property
    def state(self) -> dict[str, dict[str, str]]:
        """The state for a checkpoint: JSON texts, by name."""
        return self._own

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes the state of the training that goes on, which :meth:`changes` compares with this one's."""
        self._saved = state or {}

    def changes(self, allowed: Collection[str], group: Group) -> set[str]:
        """Returns the names of fixed facts that differ from the restored state. Rank 0 prints every difference.

        Raises:
            InvalidArgument: on all ranks: one of the names is not ``allowed``.
        """
        changed = set(self._different("fixed"))
        with agreed("train", group):
            if wrong := sorted(changed - set(allowed)):
                was, now = (side["fixed"][wrong[0]] for side in (self._saved, self._own))
                raise InvalidArgument(
                    f"the checkpoint is of a training with another {wrong[0]}: {was:.200} in it, and {now:.200} here; "
                    f"take the same again, or to go on with the change, set allow_changes = {json.dumps(wrong)} in "
                    "[checkpoints]"
                )
        if group.rank() == 0:
            for kind in ("free", "fixed"):
                for name in self._different(kind):
                    was, now = (side[kind][name] for side in (self._saved, self._own))
                    print(f"mlxdist: {name} was {was:.200} until now, and is {now:.200}", file=sys.stderr, flush=True)
        return changed

    def _different(self, kind: str) -> list[str]:
        saved = self._saved.get(kind, {})
        return [name for name, text in self._own[kind].items() if saved.get(name, text) != text]


def weight_files(directory: Path) -> list[WeightFile]:
    """The weights of a model as mlx-lm finds them, whose headers are right.

    Raises:
        InvalidArgument: there are none, or one is damaged or cannot be read.
    """
    files = [WeightFile(path) for path in sorted(directory.glob("model*.safetensors"))]
    if not files:
        raise InvalidArgument(
            f"{directory} has no weights (model*.safetensors); copy or download the model again, or train a new one: "
            'weights = "random"'
        )
    return files


def _fixed(config: TrainConfig) -> dict[str, Any]:
    """The facts that must not change, by their names in ``allow_changes``."""
    directory = model_directory(config.model)
    base = [(directory / "config.json").read_bytes()]
    found: dict[str, Any] = {"weights": config.weights}
    if config.weights == "pretrained":
        base += (part for file in weight_files(directory) for part in _samples(file))
        found |= {"fine_tune_type": config.fine_tune_type, "num_layers": config.num_layers}
        if config.fine_tune_type != "full":
            found["lora_parameters"] = config.lora_parameters
    files = sorted({path for pattern in _TOKENIZER for path in directory.glob(pattern) if path.is_file()})
    return found | {
        "base": _hash(base),
        "tokenizer": _hash(path.read_bytes() for path in files),
        "data": digest_of(config.data, "train"),
        "mask_prompt": config.mask_prompt,
        "max_seq_length": config.max_seq_length,
        "pack": config.pack,
        "optimizer": config.optimizer,
        "precision": dataclasses.asdict(config.precision),
    }


def _samples(file: WeightFile) -> Iterable[bytes]:
    """The header, and some bytes of each tensor: two models of the same shapes differ in nearly all tensors."""
    yield file.header
    for tensor in file.tensors.values():
        length = min(_SAMPLE_BYTES, tensor.nbytes)
        memory = bytearray(2 * length)
        runs = [(tensor.offset, length), (tensor.offset + (tensor.nbytes - length) // 2, length)]
        file.read_runs(runs, memoryview(memory))
        yield bytes(memory)


def _hash(parts: Iterable[bytes]) -> str:
    digest = blake2b(digest_size=8)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    return {name: json.dumps(value, sort_keys=True) for name, value in values.items()}
