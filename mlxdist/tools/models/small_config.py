"""Sizes of a small model with the structure of a large one, from the names of the sizes in its config.json.

Kept are ratios that decide how a model is sharded: heads, KV heads and experts keep whether 2, 3 and 4 ranks divide
them; layers of every kind are kept. Fields that are not known keep their value. No size grows.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["LAYERS", "SIZES", "small_config"]

LAYERS = ("n_layer", "n_layers", "num_hidden_layers", "num_layers", "num_transformer_layers")
# Values that are numbers of layers, from 1, in models that count them so.
LAYER_NUMBERS = ("full_attn_layers", "kda_layers")
# Values that are indices of layers, from 0.
LAYER_INDICES = ("full_attn_idxs", "mlp_only_layers", "moe_layers", "sliding_window_layers")
# Layers of one kind follow each other at this distance.
PERIODS = (
    *("_sliding_window_pattern", "attn_layer_period", "dense_attention_every_n_layers", "expert_layer_period"),
    *("full_attention_interval", "global_attn_every_n_layers", "interleave_moe_layer_step", "layer_group_size"),
    *("no_rope_layer_interval", "sliding_window_pattern"),
)
# How many layers of some kind there are, at the beginning or at the end.
SOME_LAYERS = ("num_kv_shared_layers", "num_kv_reuse_layers")
FIRST_LAYERS = ("first_k_dense_replace", "num_dense_layers")

# Numbers of heads, and of what each group of them shares.
HEADS = {
    "n_head": "n_kv_heads",
    "n_heads": "n_kv_heads",
    "num_attention_heads": "num_key_value_heads",
    "num_heads": "num_kv_heads",
    "linear_num_value_heads": "linear_num_key_heads",
    "swa_num_attention_heads": "swa_num_key_value_heads",
}
# Of these fields there are fewer, each by itself.
COUNTS = (
    *("index_n_heads", "linear_num_heads", "mamba_n_heads", "mamba_num_heads", "mamba_n_groups", "n_groups"),
    *("kv_n_heads", "num_global_key_value_heads", "num_attention_groups"),
)
EXPERTS = ("moe_num_experts", "n_routed_experts", "num_experts", "num_local_experts")
EXPERTS_OF_A_TOKEN = (
    *("moe_k", "moe_top_k", "moe_topk", "num_experts_per_tok", "num_experts_per_token", "num_selected_experts"),
    *("top_k_experts", "zero_expert_num"),
)
SHARED_EXPERTS = ("moe_num_shared_experts", "n_shared_experts", "num_shared_experts")
EXPERT_GROUPS = {"n_group": "topk_group", "num_expert_group": "topk_group"}

WIDTHS = ("block_dim", "d_model", "hidden_size", "model_dim", "n_embd")
INNER_WIDTHS = (
    *("block_ff_dim", "dense_intermediate_size", "expert_ffn_hidden_size", "ffn_hidden_size", "intermediate_size"),
    *("intermediate_size_mlp", "moe_intermediate_size", "moe_shared_expert_intermediate_size", "n_inner"),
    *("share_expert_dim", "shared_expert_intermediate_size", "shared_intermediate_size"),
)
# The widths of one head: of these many units.
HEAD_WIDTHS = {
    "global_head_dim": 2,
    "head_dim": 1,
    "index_head_dim": 2,
    "kv_channels": 1,
    "linear_head_dim": 1,
    "linear_key_head_dim": 1,
    "linear_value_head_dim": 1,
    "mamba_d_head": 1,
    "mamba_head_dim": 1,
    "qk_head_dim": 2,
    "qk_nope_head_dim": 1,
    "qk_rope_head_dim": 1,
    "rotary_dim": 1,
    "swa_head_dim": 1,
    "swa_v_head_dim": 1,
    "v_head_dim": 1,
    "hidden_size_per_layer_input": 1,
    "kv_lora_rank": 1,
    "laurel_rank": 1,
    "mamba_d_state": 1,
    "q_lora_rank": 2,
    "ssm_state_size": 1,
    "state_size": 1,
}
VOCABULARIES = ("num_vocab", "vocab_size", "vocab_size_per_layer_input")
# A model has one or more of each.
SIZES = {*LAYERS, *HEADS, *HEADS.values(), *WIDTHS, *VOCABULARIES}

_LAYERS, _RANKS, _VOCABULARY = 4, 4, 256
_HEAD_WIDTH = 32
_OF_MEDIA = ("audio_config", "vision_config")  # which mlx-lm does not load


def small_config(
    config: Mapping[str, Any],
    fixed: Mapping[str, Any] = {},
    unit: int = _HEAD_WIDTH,
    keep_vocabulary: bool = False,
    keep_sizes: bool = False,
) -> dict[str, Any]:
    """A copy of ``config`` with small sizes, inside of objects such as text_config, too.

    Args:
        config: the content of a config.json.
        fixed: values of fields, wherever these are.
        unit: the width of a head, which divides every other width: no less than the group size of quantized weights.
        keep_vocabulary: for a tokenizer that comes with the model.
        keep_sizes: change nothing but what is fixed, and the lists with an entry for each layer.
    """
    small = {
        name: small_config(value, fixed, unit, keep_vocabulary, keep_sizes)
        if isinstance(value, dict) and name not in _OF_MEDIA
        else value
        for name, value in config.items()
    }
    here = {name: value for name, value in fixed.items() if name in config}
    if not keep_sizes or any(name in here for name in LAYERS):
        small |= _layers(config, here)
    if keep_sizes:
        return small | here
    small |= _counts(config) | _experts(config) | here
    small |= _widths(config, small, unit)
    if not keep_vocabulary:
        small |= {name: min(value, _VOCABULARY) for name, value in _numbers(config, VOCABULARIES)}
    if "vocab_size" in (text := small.get("text_config") or {}):
        small["vocab_size"] = text["vocab_size"]  # some models of mlx-lm have a default here that counts more
    return small | here


def _layers(config: Mapping[str, Any], fixed: Mapping[str, Any]) -> dict[str, Any]:
    """Fewer layers, of every kind one, or as many as are fixed; and the lists that have an entry for each."""
    before = next((value for _, value in _numbers(config, LAYERS)), 0)
    if not before:
        return {}
    of_each = {name: value for name, value in config.items() if _is_sequence(value) and len(value) == before}
    periods = [value for _, value in _numbers(config, PERIODS)]
    wanted = max([_LAYERS, *periods, *map(_first_with_all_kinds, of_each.values())])
    shared = _numbers(config, SOME_LAYERS)
    wanted = 2 * wanted if any(value for _, value in shared) else wanted
    count = next((value for _, value in _numbers(fixed, LAYERS)), min(before, wanted))
    small: dict[str, Any] = {name: count for name, _ in _numbers(config, LAYERS)}
    small |= {name: value[:count] for name, value in of_each.items()}
    small |= {name: value * count // before for name, value in shared}
    small |= {name: min(value, 1) for name, value in _numbers(config, FIRST_LAYERS)}
    small |= {name: min(value, count - 1) for name, value in _numbers(config, ("moe_layer_end_index",))}
    for names, last in ((LAYER_NUMBERS, count), (LAYER_INDICES, count - 1)):
        lists = {name: config[name] for name in names if isinstance(config.get(name), list)}
        small |= {name: [layer for layer in layers if layer <= last] for name, layers in lists.items()}
    if isinstance(numbers := config.get("linear_attn_config"), dict):  # whose layers are counted outside
        inner = {
            name: [layer for layer in numbers[name] if layer <= count] for name in LAYER_NUMBERS if name in numbers
        }
        small["linear_attn_config"] = small_config(numbers) | inner
    return small


def _counts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fewer heads. Those that share a KV head stay as many as before, or become two or a few more."""
    small = {}
    for name, of_groups in HEADS.items():
        for _, heads in _numbers(config, (name,)):
            groups = dict(_numbers(config, (of_groups,))).get(of_groups, heads)
            few = _fewest(groups, min(groups, _RANKS))
            small[name] = few if groups == heads else _fewest(heads, 2 * few, few)
            small |= {of_groups: few} if of_groups in config and config[of_groups] is not None else {}
    return small | {name: _fewest(value, min(value, _RANKS)) for name, value in _numbers(config, COUNTS)}


def _experts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fewer experts, of which a token has two at most."""
    groups = next((min(value, 2) for _, value in _numbers(config, EXPERT_GROUPS)), 1)
    small = {name: _fewest(value, 2 * groups, groups) for name, value in _numbers(config, EXPERTS)}
    small |= {name: min(value, 2) for name, value in _numbers(config, EXPERTS_OF_A_TOKEN)}
    small |= {name: min(value, 1) for name, value in _numbers(config, SHARED_EXPERTS)}
    for name, chosen in EXPERT_GROUPS.items():
        for _, before in _numbers(config, (name,)):
            small[name] = groups
            small |= {chosen: max(1, value * groups // before) for _, value in _numbers(config, (chosen,))}
    return small


def _widths(config: Mapping[str, Any], small: Mapping[str, Any], unit: int) -> dict[str, int]:
    """Widths of heads; as many of these side by side as there are heads are the width of the model."""
    heads = next((small[name] for name, _ in _numbers(config, HEADS)), _RANKS)
    widths = {name: min(config[name], units * unit) for name, units in HEAD_WIDTHS.items() if _is_number(config, name)}
    widths |= {name: min(value, heads * unit) for name, value in _numbers(config, WIDTHS)}
    if "mamba_d_ssm" in config and "mamba_n_heads" in small and "mamba_d_head" in widths:
        widths["mamba_d_ssm"] = small["mamba_n_heads"] * widths["mamba_d_head"]
    # 2, 3 and 4 ranks divide it.
    widths |= {name: min(value, 12 * unit) for name, value in _numbers(config, INNER_WIDTHS)}
    return widths


def _fewest(count: int, at_least: int = 1, multiple_of: int = 1) -> int:
    """The smallest number that the same of 2, 3 and 4 divide as ``count``; ``count`` if there is no smaller one."""
    least = max(at_least, 1 if count == 1 else 2)
    candidates = range(-(-least // multiple_of) * multiple_of, count, multiple_of)
    return next((few for few in candidates if math.gcd(few, 12) == math.gcd(count, 12)), count)


def _first_with_all_kinds(kinds: Any) -> int:
    """How many entries of a list, from the first one, have each of its different values. 0 if all are different."""
    seen = [str(kind) for kind in kinds]
    return max(map(seen.index, set(seen))) + 1 if len(set(seen)) < len(seen) else 0


def _is_sequence(value: Any) -> bool:
    return isinstance(value, list | str)


def _is_number(config: Mapping[str, Any], name: str) -> bool:
    return type(config.get(name)) is int


def _numbers(config: Mapping[str, Any], names: Iterator[str] | Any) -> list[tuple[str, int]]:
    return [(name, config[name]) for name in names if _is_number(config, name)]
