"""Whether a sharded model computes what the full one does: its logits, for a prompt and for tokens after it."""

import json
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxdist.base.errors import InvalidArgument, Mismatch, name_ranks
from mlxdist.base.json_reader import parse_json
from mlxdist.base.model_directory import model_directory
from mlxdist.runtime.group.group import Group, GroupLike
from mlxdist.runtime.operations.arguments import group_of
from mlxdist.runtime.operations.blobs import broadcast_blob
from mlxdist.runtime.operations.collectives import all_gather, broadcast

from ..layout.modules import dtype_name
from ..rank_checks import agreed

__all__ = ["TOLERANCES", "Verification", "require_agreement", "verify"]

# Of the largest logit. Ranks add up in another order than one process, and round their sums to the dtype before those
# are added: twice in a layer, by at most the unit roundoff u (2^-11 in float16, 2^-8 in bfloat16). Such errors add up
# like a random walk, to u * sqrt(2 * layers), 13 u for 80 layers; twice that is the tolerance. In float32 (2^-24) the
# order of the sums counts for more, which are thousands of products long. Quantized weights are the same numbers in
# both models, and what counts is the dtype of what they are multiplied with.
TOLERANCES = {"float32": 1e-4, "float16": 0.0125, "bfloat16": 0.1}
PROMPT, DECODED = 12, 4  # tokens: at once, and then one by one with the KV cache


@dataclass(frozen=True)
class Verification:
    """How far the logits of a sharded model are from those of the full one; the same on every rank.

    Attributes:
        dtype: of the full model's logits.
        tolerance: the largest difference that is allowed, as a part of the largest logit.
        differences: on each rank, as a part of the largest logit; NaN where there are NaNs.
        largest_logit: by magnitude, of the full model.
        tokens_equal: at how many of the positions both models have the same most likely token, on all ranks.
        positions: how many positions were compared.
    """

    dtype: str
    tolerance: float
    differences: tuple[float, ...]
    largest_logit: float
    tokens_equal: int
    positions: int

    @property
    def agrees(self) -> bool:
        """Whether every rank is within the tolerance."""
        return not self._outside()

    def __str__(self) -> str:
        verdict = "agree" if self.agrees else f"DO NOT AGREE on {name_ranks(self._outside())}"
        return (
            f"logits of the sharded and the full model {verdict}: they differ by {max(self.differences):.2g} of the "
            f"largest, {self.largest_logit:.3g}, where {self.tolerance:g} is allowed for {self.dtype}; the most likely "
            f"token is the same at {self.tokens_equal} of {self.positions} positions"
        )

    def _outside(self) -> list[int]:
        return [rank for rank, difference in enumerate(self.differences) if not difference <= self.tolerance]


def verify(
    model: nn.Module,
    reference: nn.Module | str | Path | None,
    tokens: mx.array | np.ndarray | None = None,
    *,
    group: GroupLike | None = None,
    tolerance: float | None = None,
) -> Verification:
    """Compares the logits of a sharded model with those of the full one: for a prompt, then token by token.

    Every rank calls it. Both models get the same tokens: all but the last four at once, the others one by one with
    mlx-lm's KV cache. Rank 0 computes the full model, and needs the memory for it.

    Args:
        model: sharded over the ranks of ``group``; its logits must be full on every rank.
        reference: on rank 0 the full model, or its directory or name, as for :func:`load_sharded`; ignored elsewhere.
        tokens: integers of shape (tokens,), at least 5; ``None``: 16 random ones. The tokens of rank 0 are used.
        tolerance: of the largest logit; ``None`` is that of the dtype in ``TOLERANCES``.

    Raises:
        InvalidArgument: on every rank, where rank 0 cannot load the full model or ``tokens`` are none of it.
    """
    group = group_of(group)
    about, expected = {}, np.zeros(0, np.float32)
    with agreed("verify", group, tolerance):
        if group.rank() == 0:
            full = _full_model(reference)
            ids = _checked_tokens(tokens, full)
            logits = _logits(full, ids)
            expected = np.array(logits.astype(mx.float32))
            about = {"tokens": ids, "dtype": dtype_name(logits), "shape": logits.shape}
            if tolerance is None and about["dtype"] not in TOLERANCES:
                raise InvalidArgument(f"verify: logits are {about['dtype']}; give a tolerance= for that")
            del full, logits  # before the sharded model runs
    about = parse_json(broadcast_blob(json.dumps(about).encode(), group))
    expected = broadcast(expected if group.rank() == 0 else np.zeros(about["shape"], np.float32), group=group)
    found = _logits(model, about["tokens"])
    with agreed("verify", group):
        if found.shape != expected.shape:
            raise InvalidArgument(
                f"verify: the sharded model gives logits of shape {found.shape}, the full one {expected.shape}; they "
                "must be full on every rank"
            )
    tolerance = TOLERANCES[about["dtype"]] if tolerance is None else tolerance
    return _compared(np.array(found.astype(mx.float32)), expected, about["dtype"], tolerance, group)


def require_agreement(
    model: nn.Module, reference: nn.Module | str | Path | None, *, group: GroupLike | None = None
) -> None:
    """:func:`verify`; raises Mismatch on every rank if the models do not agree."""
    verification = verify(model, reference, group=group)
    if not verification.agrees:
        raise Mismatch(f"{verification}")


def _compared(found: np.ndarray, expected: np.ndarray, dtype: str, tolerance: float, group: Group) -> Verification:
    largest = float(np.abs(expected, where=np.isfinite(expected), out=np.zeros_like(expected)).max())
    # Some models forbid tokens by -inf, which is no distance from itself.
    differences = np.subtract(found, expected, where=found != expected, out=np.zeros_like(found))
    difference = float(np.abs(differences).max()) / (largest or 1.0)
    equal = int((found.argmax(-1) == expected.argmax(-1)).sum())
    everyones = all_gather(np.array([[difference, equal]]), group=group)
    return Verification(
        dtype=dtype,
        tolerance=tolerance,
        differences=tuple(everyones[:, 0].tolist()),
        largest_logit=largest,
        tokens_equal=int(everyones[:, 1].min()),
        positions=expected.shape[0],
    )


def _full_model(reference: nn.Module | str | Path | None) -> nn.Module:
    if isinstance(reference, nn.Module):
        return reference
    if not isinstance(reference, str | Path):
        kind = type(reference).__name__
        raise InvalidArgument(f"verify: reference must be the full model or its directory on rank 0, not {kind}")
    from mlx_lm.utils import load_model

    try:
        return load_model(model_directory(reference), lazy=True)[0]
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise InvalidArgument(f"verify: cannot load the full model from {reference}: {error}") from error


def _checked_tokens(tokens: mx.array | np.ndarray | None, full: nn.Module) -> list[int]:
    embeddings = [module for module in full.modules() if isinstance(module, nn.Embedding | nn.QuantizedEmbedding)]
    vocabulary = min(module.weight.shape[0] for module in embeddings)
    if tokens is None:
        return np.random.default_rng(0).integers(vocabulary, size=PROMPT + DECODED).tolist()
    ids = np.array(tokens)
    if ids.ndim != 1 or len(ids) <= DECODED or ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= vocabulary:
        raise InvalidArgument(
            f"verify: tokens must be at least {DECODED + 1} integers from 0 to {vocabulary - 1} in one dimension, not "
            f"{ids.dtype} of shape {ids.shape}"
        )
    return ids.tolist()


def _logits(model: nn.Module, tokens: list[int]) -> mx.array:
    """The logits of every position: (tokens, vocabulary)."""
    from mlx_lm.models.cache import make_prompt_cache

    cache = make_prompt_cache(model)
    ids = mx.array(tokens)[None]
    steps = [model(ids[:, :-DECODED], cache=cache)]
    for i in range(len(tokens) - DECODED, len(tokens)):
        mx.eval(steps)
        steps.append(model(ids[:, i : i + 1], cache=cache))
    return mx.concatenate(steps, axis=1)[0]
