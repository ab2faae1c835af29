"""Folders of models with heads for multi-token prediction, and what such a head computes, plainly."""

import json
import random
from pathlib import Path

import mlx.core as mx
import tiny_models
from mlx import nn
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.models.base import create_attention_mask
from serving import save_model_folder

__all__ = ["KINDS", "agreeing_folder", "plain_logits", "save_mtp_folder", "with_original_weights"]

# What the tiny model needs so that the layer of its head has experts, where the family has them.
KINDS: dict[str, dict[str, object]] = {
    "deepseek_v3": {},
    "qwen3_next": {"mlp_only_layers": [1]},
    "qwen3_5": {},
    "qwen3_5_moe": {},
}
_ONE_LAYER = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "full_attention_interval": 1}
_LINEAR = ("o_proj", "out_proj", "down_proj", "unembed_out")  # the last of each part of a layer


def save_mtp_folder(folder: Path, kind: str, seed: int = 1, bits: int | None = None, **fields: object) -> Path:
    """A folder as `serving.save_model_folder` makes it, with a head of random weights in a file of its own."""
    save_model_folder(folder, kind, seed, bits, **KINDS[kind] | fields)
    mx.save_safetensors(str(folder / "mtp.safetensors"), _head(folder, kind, seed + 100), {"format": "mlx"})
    return folder


def _head(folder: Path, kind: str, seed: int) -> dict[str, mx.array]:
    config = json.loads((folder / "config.json").read_text())
    if "text_config" in config:
        fields: dict = {"text_config": config["text_config"] | _ONE_LAYER}
    else:
        fields = {name: value for name, value in config.items() if name != "model_type"} | _ONE_LAYER
    model = tiny_models.build(kind, seed=seed, **fields)
    size = model.model.norm.weight.size
    layer = {name: 2 * array for name, array in tree_flatten(model.layers[0].parameters())}
    norms = [1 + 0.1 * mx.random.normal((size,)) for _ in range(3)]
    projection = mx.random.normal((size, 2 * size)) / size**0.5
    if kind == "deepseek_v3":
        prefix = f"model.layers.{config['num_hidden_layers']}."
        names = ("enorm", "hnorm", "shared_head.norm", "eh_proj", "")
    else:
        prefix, names = "mtp.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "fc", "layers.0.")
    parts = {f"{prefix}{name}.weight": array for name, array in zip(names, [*norms, projection])}
    if kind == "deepseek_v3":  # copies of the model's, which are not read
        parts |= {f"{prefix}{name}.weight": mx.zeros((3, 3)) for name in ("embed_tokens", "shared_head.head")}
    return parts | {f"{prefix}{names[-1]}{name}": array for name, array in layer.items()}


def with_original_weights(source: Path, target: Path) -> Path:
    """The same model in the form of before mlx-lm's conversion: experts one by one, norms as they were, the head with
    the other weights."""
    target.mkdir()
    for path in source.iterdir():
        if "safetensors" not in path.name:
            (target / path.name).write_bytes(path.read_bytes())
    kind = json.loads((source / "config.json").read_text())["model_type"]
    found: dict[str, mx.array] = {}
    weights = mx.load(str(source / "model.safetensors")) | mx.load(str(source / "mtp.safetensors"))
    for name, array in weights.items():
        before, between, after = name.partition("switch_mlp.")
        if between and kind == "qwen3_5_moe":
            if after.startswith("down_proj"):
                found[f"{before}experts.down_proj"] = array
            elif after.startswith("gate_proj"):
                both = [array, weights[name.replace("gate_proj", "up_proj")]]
                found[f"{before}experts.gate_up_proj"] = mx.concatenate(both, axis=-2)
        elif between:
            found |= {f"{before}experts.{number}.{after}": array[number] for number in range(array.shape[0])}
        elif name.endswith("embed_q.weight"):
            others = weights[name.replace("embed_q", "unembed_out")]
            joined = mx.concatenate([array.swapaxes(-1, -2), others], axis=1)
            found[name.replace("embed_q", "kv_b_proj")] = joined.reshape(-1, joined.shape[-1])
        elif name.endswith("conv1d.weight"):
            found[name] = mx.moveaxis(array, 1, 2)
        elif kind != "deepseek_v3" and array.ndim == 1 and "norm" in name and "linear_attn" not in name:
            found[name] = array - 1
        elif not name.endswith("unembed_out.weight"):
            found[name] = array
    mx.save_safetensors(str(target / "model.safetensors"), found)
    return target


def plain_logits(model: nn.Module, head: nn.Module, tokens: list[int], unknown: set[int] = frozenset()) -> mx.array:
    """The logits after each token, of the head, without caches: of the model's hidden states before each.

    Args:
        unknown: the places of tokens before which the hidden state is not known.
    """
    array = mx.array([tokens])
    hidden = model.model(array)
    places = mx.array([place == 0 or place in unknown for place in range(len(tokens))])[None, :, None]
    before = mx.where(places, 0, mx.concatenate([hidden[:, :1], hidden[:, :-1]], axis=1))
    embeddings = model.model.embed_tokens(array)
    joined = mx.concatenate([head.embedding_norm(embeddings), head.hidden_norm(before)], axis=-1)
    x = head.projection(joined)
    x = head.block.norm(head.block.layers[0](x, create_attention_mask(x, return_array=True)))
    text = getattr(model, "language_model", model)
    return text.lm_head(x)[0]


def agreeing_folder(folder: Path, kind: str, agreement: float, tokens: int = 320) -> tuple[Path, dict[int, int]]:
    """A folder whose model goes round through all tokens, and whose head is right about that after a share of them.

    Layers add nothing, and embeddings are unit vectors. Returns the folder, and the token after each.
    """
    generator = random.Random(5)
    around = generator.sample(range(tokens), tokens)
    following = dict(zip(around, around[1:] + around[:1]))
    wrong = set(generator.sample(range(tokens), round((1 - agreement) * tokens)))
    save_mtp_folder(folder, kind, vocab_size=tokens, hidden_size=tokens, num_hidden_layers=2)
    unit = mx.eye(tokens)
    output = unit[mx.array([token for token, _ in sorted(following.items(), key=lambda pair: pair[1])])]
    taken = mx.array([following[token] if token in wrong else token for token in range(tokens)])
    projection = mx.concatenate([unit[taken].T, mx.zeros((tokens, tokens))], axis=-1)

    def made(name: str, array: mx.array) -> mx.array:
        part = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
        if part in _LINEAR:
            return mx.zeros_like(array)
        if part in ("eh_proj", "fc"):
            return projection
        if "norm" in part and array.size == tokens:
            return mx.ones_like(array)
        return {"embed_tokens": unit, "lm_head": output}.get(part, array) if array.size == unit.size else array

    for path in folder.glob("*.safetensors"):
        weights = tree_map_with_path(made, mx.load(str(path)))
        mx.eval(weights)
        mx.save_safetensors(str(path), weights, {"format": "mlx"})
    return folder, following
