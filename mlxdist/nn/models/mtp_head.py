"""Multi-token prediction (MTP) heads, of mlx-lm's own layers, sharded as those of the model.

DeepSeek-V3 technical report, arXiv:2412.19437, section 2.2: for each token, the last hidden state before it and its
embedding are normalized, joined and projected. From the result, a decoder layer makes the hidden state from which the
model's output layer predicts the token after it. Embedding and output layer are the model's.
"""

import copy
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxdist.base.errors import InvalidArgument
from mlxdist.nn.layout.modules import parameters
from mlxdist.runtime.group.group import GroupLike

from .load import load_sharded
from .load.mtp_format import EMBEDDING_NORM, HIDDEN_NORM, PROJECTION, MtpFormat, mtp_format
from .plan import Plan

__all__ = ["MtpHead", "head_classes", "load_mtp_head"]

_FAMILIES = "DeepSeek-V3, Qwen3-Next and Qwen3.5"
# Names of a model with a single layer, and of the head. No parameter of the head has the name of one of the model, by
# which config.json may say how that one is quantized.
_OWN = {EMBEDDING_NORM: "embedding_norm.", HIDDEN_NORM: "hidden_norm.", PROJECTION: "projection.", "model.": "block."}


class MtpHead(nn.Module):
    """A head of a model.

    Args:
        model: mlx-lm's, with a single layer, which becomes the head's.
        names: the names of the weights in the folder.
    """

    def __init__(self, model: nn.Module, names: MtpFormat) -> None:
        super().__init__()
        self._names, self._sanitize_model = names, model.sanitize
        backbone = model.model
        size, eps = backbone.norm.weight.size, backbone.norm.eps
        self.embedding_norm = nn.RMSNorm(size, eps=eps)
        self.hidden_norm = nn.RMSNorm(size, eps=eps)
        self.projection = nn.Linear(2 * size, size, bias=False)
        backbone.embed_tokens = nn.Identity()  # it gets what is projected
        if hasattr(backbone, "ssm_idx"):
            backbone.ssm_idx = None  # the layer is no recurrent one
        self.block = backbone

    def predict(self, embeddings: mx.array, hidden: mx.array, cache: Any) -> mx.array:
        """The hidden states from which the tokens after those of ``embeddings`` are predicted.

        Args:
            embeddings: of tokens, of shape (rows, tokens, size).
            hidden: the last hidden state before each of these tokens, of the same shape.
            cache: the KV cache of the layer.
        """
        joined = mx.concatenate([self.embedding_norm(embeddings), self.hidden_norm(hidden)], axis=-1)
        states: mx.array = self.block(self.projection(joined), [cache])
        return states

    def sanitize(self, weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """The weights of this head among those of a folder, with its own names.

        Raises:
            InvalidArgument: there are none, or some are missing that mlx-lm joins.
        """
        names = self._names.names(weights)
        if not names:
            raise self._missing(_OWN[PROJECTION] + "weight")
        given = {new: weights[name] for name, new in names.items()}
        also = {name: array for name, array in weights.items() if self._names.is_given(name)}
        try:
            made = self._sanitize_model(also | given)
        except KeyError as error:
            raise self._missing(_own(str(error.args[0]))) from None
        del self._sanitize_model  # and with it the rest of that model
        return {_own(name): array for name, array in made.items() if not self._names.is_given(name)}

    def load_weights(self, file_or_weights: Any, strict: bool = True) -> nn.Module:
        """Takes the weights, pairs of a name and an array.

        Raises:
            InvalidArgument: one is missing, or has another shape.
        """
        given = dict(file_or_weights)
        for name, array in parameters(self).items():
            if name not in given:
                raise self._missing(name)
            if given[name].shape != array.shape:
                raise InvalidArgument(
                    f"has MTP weights {self.original(name)} of shape {given[name].shape}, and config.json says "
                    f"{array.shape}; copy or download the folder again, or serve it without --mtp"
                )
        return super().load_weights(list(given.items()), strict)

    def _missing(self, name: str) -> InvalidArgument:
        return InvalidArgument(
            f"has no MTP weights {self.original(name)}, which mlx-lm leaves out when it converts a model; put those of "
            "the original into mtp.safetensors there, serve the folder of the original, or this one without --mtp"
        )

    def original(self, name: str) -> str:
        """The name in the folder of the parameter ``name``."""
        return self._names.original(
            next((a + name.removeprefix(b) for a, b in _OWN.items() if name.startswith(b)), name)
        )


def load_mtp_head(
    path: str | Path | None, plan: Plan, *, group: GroupLike | None = None, stream: bool = False
) -> MtpHead:
    """The MTP head in the folder of a model, sharded over the ranks of ``group`` as the model is. Collective.

    Args:
        path: the folder, or the name of a model.
        plan: of the model.
        group: the ranks.
        stream: whether only rank 0 has the folder.

    Raises:
        InvalidArgument: what `load_sharded` raises; no format of heads is known for the model; its folder has no MTP
            weights, or some of another shape.
    """
    head: Any
    head, _ = load_sharded(
        path,
        group=group,
        tp=plan.tp,
        ep=plan.ep,
        rank_shares=plan.rank_shares,
        stream=stream,
        get_model_classes=head_classes,
    )
    return head


def head_classes(config: dict[str, Any]) -> tuple[Any, Any]:
    """Returns what makes the head of a model with this config.json, and the class of its arguments: for mlx-lm's
    argument ``get_model_classes``.

    Raises:
        InvalidArgument: no format of heads is known for the model.
    """
    from mlx_lm.utils import _get_classes

    names = mtp_format(config)
    if names is None:
        raise InvalidArgument(f"is a {config.get('model_type')}; --mtp is for {_FAMILIES}")
    model_class, arguments_class = _get_classes(config)

    def arguments(config: dict[str, Any]) -> Any:
        one_layer = copy.deepcopy(config)
        one_layer.get("text_config", one_layer).update(names.fields)
        return arguments_class.from_dict(one_layer)

    return lambda given: MtpHead(model_class(given), names), SimpleNamespace(from_dict=arguments)


def _own(name: str) -> str:
    """The head's name of what is ``name`` in a model with a single layer."""
    name = name.removeprefix("language_model.")
    return next((b + name.removeprefix(a) for a, b in _OWN.items() if name.startswith(a)), name)
