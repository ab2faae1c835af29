"""The arithmetic that a token costs, from the parameters and the configuration of a model."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from math import prod
from statistics import fmean
from typing import Any, NamedTuple

import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxdist.base.errors import InvalidArgument
from mlxdist.nn.models.cuts import cuts

__all__ = ["FlopsPerToken", "flops_by_length", "flops_per_token", "vocabulary_size"]

_ATTENTION = ("self_attn", "attention", "attn")  # what model files call the module of a layer
# What configurations call a number.
_HEADS = ("num_attention_heads", "n_heads", "num_heads", "n_head")
_WIDTH = ("hidden_size", "hidden_dim", "d_model", "model_dim", "dim", "n_embd")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")
_LATENT = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")  # of latent attention


class FlopsPerToken(NamedTuple):
    """Floating-point operations for one token of a training step, a multiply-add counted as two; made by
    :func:`flops_per_token`.

    Attributes:
        forward: operations of the forward pass, which gradient checkpointing repeats.
        backward: operations of the backward pass; 0 if all parameters are frozen.
    """

    forward: float
    backward: float

    @property
    def total(self) -> float:
        """Forward and backward: what counts for the model FLOPs utilization."""
        return self.forward + self.backward


def flops_per_token(model: nn.Module, sequence_length: int, *, attention_width: int | None = None) -> FlopsPerToken:
    """The model FLOPs of a token: 6 N + 12 L H Q T, if nothing is frozen and no experts are left out.

    This is the count of Chowdhery et al. 2022, "PaLM: Scaling Language Modeling with Pathways", arXiv:2204.02311,
    appendix B. N are the elements of all matrices by which a token is multiplied: one multiply-add in the forward pass,
    two in the backward pass, for the gradients of input and matrix. Embeddings are looked up and do not count, unless
    the output layer is tied to them; of experts those of a token count, norms and biases do not. L, H, Q and T are the
    layers with attention, their heads, the size of a head and ``sequence_length``: scores and values take 4 H Q T in
    the forward pass, and twice that in the backward pass. Scores that a causal mask or a window leaves out count, too,
    as they do in the published utilizations. A frozen matrix has no gradient: 4 in place of 6.

    Shards count as the full parameters that they are of. Nothing is evaluated.

    Args:
        model: any model; one of mlx-lm has its configuration in ``model.args``. In a pipeline, the layers of this rank
            count.
        sequence_length: tokens that attend to each other, from 1.
        attention_width: heads times size of a head, summed over the layers, for a model without a configuration; 0 for
            one without attention.

    Raises:
        InvalidArgument: ``sequence_length`` or ``attention_width`` is no such number; the configuration does not say
            what is needed; how a module is sharded is not known.
    """
    if type(sequence_length) is not int or sequence_length < 1:
        raise InvalidArgument(f"flops_per_token: sequence_length is {sequence_length!r:.50}, not a number from 1")
    if attention_width is not None and (type(attention_width) is not int or attention_width < 0):
        raise InvalidArgument(f"flops_per_token: attention_width is {attention_width!r:.50}, not a number from 0")
    widths = _attention_widths(model) if attention_width is None else 2 * attention_width
    attention = 2.0 * sequence_length * widths
    matrices = list(_matrices(model))
    products = 2.0 * sum(elements for elements, _ in matrices)
    gradients = 2.0 * sum(elements for elements, is_trained in matrices if is_trained)
    is_trained = bool(tree_flatten(model.trainable_parameters()))
    return FlopsPerToken(products + attention, products + gradients + 2 * attention if is_trained else 0.0)


def flops_by_length(model: nn.Module) -> Callable[[float], FlopsPerToken]:
    """:func:`flops_per_token` of a model for any length, also a mean: both counts are linear in it."""
    one, two = (flops_per_token(model, length) for length in (1, 2))
    return lambda length: FlopsPerToken(*(a + (length - 1) * (b - a) for a, b in zip(one, two)))


def vocabulary_size(model: nn.Module) -> int | None:
    """The number of tokens that a model of mlx-lm has embeddings for; ``None`` if its configuration lacks it."""
    found = _find(_configuration(model), ("vocab_size",))
    return None if found is None else int(found)


def _matrices(model: nn.Module) -> Iterator[tuple[float, bool]]:
    """The multiply-adds of a token with each matrix, and whether it is trained."""
    shapes = {path: cut.shape for path, cut in cuts(model).items()}
    modules = dict(model.named_modules())
    tied = _tied_embedding(modules, shapes)
    for path, shape in shapes.items():
        owner, _, name = path.rpartition(".")
        while owner not in modules:  # an array in a list or dict
            owner = owner.rpartition(".")[0]
        module = modules[owner]
        if len(shape) < 2 or (_is_embedding(module) and owner != tied) or _is_scale(module, name):
            continue
        elements = float(prod(shape))
        if name == "weight" and "scales" in module:
            elements *= 32 / module.bits  # packed into 32 bits
        if any("Switch" in type(modules[outer]).__name__ for outer in _outer(owner) if outer in modules):
            elements *= _number(model, _TOP_K, "experts of a token") / shape[0]
        yield elements, nn.Module.trainable_parameter_filter(module, name, None if name not in module else module[name])


def _outer(path: str) -> Iterator[str]:
    """Yields a path and the paths above it: for "a.b.c", "a.b.c", "a.b", "a"."""
    while path:
        yield path
        path = path.rpartition(".")[0]


def _is_embedding(module: nn.Module) -> bool:
    return "Embedding" in type(module).__name__


def _is_scale(module: nn.Module, name: str) -> bool:
    """Whether a parameter holds the scales or biases of the groups of a quantized matrix."""
    return name in ("scales", "biases") and "scales" in module


def _tied_embedding(modules: Mapping[str, nn.Module], shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """The path of the embedding that is the output layer, too: that of the most words, if no other matrix outside the
    layers has a row for each."""
    rows = {path.rpartition(".")[0]: shape[0] for path, shape in shapes.items() if path.endswith(".weight") and shape}
    words = max((path for path in rows if _is_embedding(modules[path])), key=lambda path: rows[path], default=None)
    if words is None:
        return None
    outside = [path for path in rows if not any(part.isdigit() for part in path.split("."))]
    others = [path for path in outside if rows[path] == rows[words] and not _is_embedding(modules[path])]
    return None if others else words


def _attention_widths(model: nn.Module) -> int:
    """Heads times the size of a query and of a value, summed over the layers with attention."""
    named = [path.split(".") for path, _ in model.named_modules()]
    layers = sum(path[-1] in _ATTENTION and not set(path[:-1]) & set(_ATTENTION) for path in named)
    if layers == 0:
        return 0
    heads = _number(model, _HEADS, "heads")
    nope, rope, value = (_find(_configuration(model), (name,)) for name in _LATENT)
    if nope and rope and value:
        return int(layers * heads * (nope + rope + value))
    size = _find(_configuration(model), ("head_dim",)) or _number(model, _WIDTH, "features") / heads
    return int(layers * heads * 2 * size)


def _configuration(model: nn.Module) -> Any:
    return getattr(model, "args", None) or getattr(model, "config", None)


def _number(model: nn.Module, names: tuple[str, ...], what: str) -> float:
    found = _find(_configuration(model), names)
    if found is None:
        raise InvalidArgument(
            f"flops_per_token: the configuration of {type(model).__name__} (model.args) does not have the number of "
            f"{what}, as {' or '.join(names)}; give attention_width, or count the FLOPs otherwise"
        )
    return found


def _find(configuration: Any, names: tuple[str, ...]) -> float | None:
    """A number in a configuration, or in one inside it, such as text_config; of a list by layers, the mean."""
    fields = configuration if isinstance(configuration, Mapping) else getattr(configuration, "__dict__", {})
    for name in names:
        value = fields.get(name)
        if isinstance(value, list) and value and all(type(one) is int for one in value):
            return fmean(value)
        if type(value) is int and value > 0:
            return value
    inner = (_find(value, names) for value in fields.values() if isinstance(value, Mapping) or is_dataclass(value))
    return next((found for found in inner if found is not None), None)
