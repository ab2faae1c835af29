"""The names of the weights of multi-token prediction (MTP) heads in the folders of models.

mlx-lm leaves these weights out when it loads a model. Each name here becomes one of a model of mlx-lm with a single
layer, and of the parts before that layer.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["EMBEDDING_NORM", "HIDDEN_NORM", "PROJECTION", "MtpFormat", "declares_mtp", "mtp_format", "without_mtp"]

_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
LAYER, NORM = "model.layers.0.", "model.norm."
# mlx-lm adds one to the norms of Qwen3-Next that end like this; in the files they are centered at zero.
EMBEDDING_NORM, HIDDEN_NORM = "model.embedding.input_layernorm.", "model.hidden.input_layernorm."
PROJECTION = "model.projection."


@dataclass(frozen=True)
class MtpFormat:
    """The names of one head in a folder.

    Attributes:
        prefix: the beginning of each name.
        parts: how names go on, and the beginnings that these get; the first that fits counts.
        shared: how those names go on that are other copies of weights of the model.
        fields: the configuration of a model whose only layer is that of the head, where it differs.
        also: tensors with this in their names are given to mlx-lm, too: it looks at them to find the form of the norms.
    """

    prefix: str
    parts: Mapping[str, str]
    fields: Mapping[str, Any]
    shared: tuple[str, ...] = ()
    also: str | None = None

    def names(self, names: Iterable[str]) -> dict[str, str]:
        """The names of the head among those in a folder, with what they become."""
        found: dict[str, str] = {}
        for name in names:
            rest = name.removeprefix(self.prefix)
            if rest == name or rest.startswith(self.shared):
                continue
            found |= {name: new + rest.removeprefix(old) for old, new in self.parts.items() if rest.startswith(old)}
        return found

    def is_given(self, name: str) -> bool:
        """Whether mlx-lm gets this tensor of the model, too."""
        return self.also is not None and self.also in name

    def original(self, name: str) -> str:
        """The name in a folder of what has become ``name``."""
        for old, new in self.parts.items():
            if name.startswith(new):
                return self.prefix + old + name.removeprefix(new)
        return name


def mtp_format(config: Mapping[str, Any]) -> MtpFormat | None:
    """The format of the MTP head of a model with this config.json; None where none is known."""
    kind = config.get("model_type")
    if kind == "deepseek_v3" and isinstance(layers := config.get("num_hidden_layers"), int):
        parts = {"enorm.": EMBEDDING_NORM, "hnorm.": HIDDEN_NORM, "eh_proj.": PROJECTION, "shared_head.norm.": NORM}
        one_layer = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "moe_layer_freq": 1}
        of_layer = {part: LAYER + part for part in ("self_attn.", "mlp.", "input_layernorm.", "post_attention_")}
        return MtpFormat(f"model.layers.{layers}.", parts | of_layer, one_layer, ("embed_tokens.", "shared_head.head."))
    if kind in ("qwen3_next", "qwen3_5", "qwen3_5_moe"):
        parts = {"pre_fc_norm_embedding.": EMBEDDING_NORM, "pre_fc_norm_hidden.": HIDDEN_NORM, "fc.": PROJECTION}
        one_layer = {"num_hidden_layers": 1, "full_attention_interval": 1}
        also = "conv1d.weight" if kind != "qwen3_next" else None
        return MtpFormat("mtp.", parts | {"norm.": NORM, "layers.0.": LAYER}, one_layer, also=also)
    return None


def declares_mtp(config: Mapping[str, Any]) -> bool:
    """Whether config.json says that there is a head, of a known format. Qwen3-Next's does not say, and it has one."""
    levels = (config, config.get("text_config") or {})
    said = [level[name] for level in levels for name in _COUNTS if name in level]
    return mtp_format(config) is not None and any(said or [config.get("model_type") == "qwen3_next"])


def without_mtp(config: Mapping[str, Any], weights: Mapping[str, Any]) -> dict[str, Any]:
    """The weights of a folder without those of an MTP head, which mlx-lm does not always leave out."""
    found = mtp_format(config)
    return {name: array for name, array in weights.items() if found is None or not name.startswith(found.prefix)}
