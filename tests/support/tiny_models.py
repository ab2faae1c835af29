"""A tiny model of every model file of the installed mlx-lm, made from the fields of its ModelArgs.

Fields with a name of SIZES get that value, whatever their default; the rest keep their default. What a file needs
beyond that is in CONFIGS. A file without a Model is no model file.
"""

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
from mlx.utils import tree_map

# More than one layer, so that layers that alternate have one of each kind; sizes differ where they can.
LAYERS = 4
SIZES = {
    "attention_bias": True,
    "attn_layer_offset": 1,
    "attn_layer_period": 2,
    "block_size": 64,
    "d_model": 64,
    "decoder_sparse_step": 1,
    "dense_intermediate_size": 96,
    "expert_ffn_hidden_size": 48,
    "expert_layer_offset": 1,
    "expert_layer_period": 2,
    "ffn_hidden_size": 96,
    "first_k_dense_replace": 1,
    "head_dim": 16,
    "hidden_dim": 64,
    "hidden_size": 64,
    "hidden_size_per_layer_input": 16,
    "index_head_dim": 32,
    "index_n_heads": 4,
    "index_topk": 4,
    "intermediate_size": 96,
    "intermediate_size_mlp": 96,
    "kv_lora_rank": 32,
    "layer_group_size": 2,
    "mamba_d_conv": 4,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_head_dim": 16,
    "mamba_num_heads": 8,
    "max_position_embeddings": 256,
    "moe_intermediate_size": 48,
    "moe_num_experts": 4,
    "moe_shared_expert_intermediate_size": 48,
    "moe_topk": 2,
    "n_ctx": 64,
    "n_embd": 64,
    "n_group": 1,
    "n_groups": 2,
    "n_head": 4,
    "n_heads": 4,
    "n_inner": 96,
    "n_kv_heads": 2,
    "n_layer": LAYERS,
    "n_layers": LAYERS,
    "n_positions": 64,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_attention_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_heads": 4,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "num_layers": LAYERS,
    "num_local_experts": 4,
    "num_shared_experts": 1,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "rope_scaling": None,
    "shared_expert_intermediate_size": 48,
    "shared_intermediate_size": 48,
    "sliding_window": 8,
    "state_size": 16,
    "ssm_state_size": 16,
    "topk_group": 1,
    "v_head_dim": 16,
    "vocab_size": 96,
    "vocab_size_per_layer_input": 96,
}
HEADS = ("n_head", "n_heads", "num_attention_heads", "num_heads", "swa_num_attention_heads")
KV_HEADS = ("kv_n_heads", "n_kv_heads", "num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads")
WIDTHS = ("block_dim", "d_model", "hidden_dim", "hidden_size", "model_dim", "n_embd")
# Of gemma4_text: over two ranks, one of which has two of the three query heads, those of one KV head have copies of it.
GLOBAL_KV_HEAD = {
    "num_attention_heads": 3, "num_key_value_heads": 3, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
}  # fmt: skip
# For fields without a default and not in SIZES.
REQUIRED = {"bool": False, "float": 1.0, "int": 4, "str": "", "Dict": None, "dict": None}
_MIXED = ["sliding_attention", "full_attention"] * (LAYERS // 2)
_LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_LLAMA_4_ROPE = {"rope_theta": 1e4, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 64}
_KDA = {
    "linear_attn_config": {
        "kda_layers": [1, 3], "full_attn_layers": [2, 4], "num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4,
    },
}  # fmt: skip
_QWEN_3_5 = {"text_config": {**SIZES, **_LINEAR, "num_experts": 0, "full_attention_interval": 2}}
_BLOCK = {
    "attention": {"no_op": False, "replace_with_linear": False, "n_heads_in_group": 2},
    "ffn": {"no_op": False, "replace_with_linear": False, "ffn_mult": 2.0},
}
# Beyond SIZES; a str stands for the configuration of that other file.
CONFIGS: dict[str, dict[str, Any]] = {
    "Klear": {"mlp_only_layers": [0]},
    "afm7": {"num_kv_reuse_layers": 2},
    "afmoe": {"layer_types": _MIXED},
    "baichuan_m1": {"sliding_window_layers": [0, 2], "conv_window": 2},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"rope_scaling": {"factor": 1.0, "original_max_position_embeddings": 64}},
    "exaone_moe": {"layer_types": _MIXED, "is_moe_layer": [False, True, True, True]},
    "gear": {"layer_types": _MIXED},
    "gemma3": {"text_config": "gemma3_text"},
    "gemma3_text": {"sliding_window_pattern": 2},
    "gemma3n": {
        "text_config": {
            **SIZES,
            "model_type": "gemma3n_text",
            "rms_norm_eps": 1e-6,
            "num_kv_shared_layers": 2,
            "rope_local_base_freq": 1e4,
            "rope_theta": 1e5,
            "final_logit_softcapping": 30.0,
            "layer_types": _MIXED,
            "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
            "altup_num_inputs": 2,
            "altup_coef_clip": 120.0,
            "altup_correct_scale": True,
            "altup_active_idx": 0,
            "laurel_rank": 8,
            "intermediate_size": [96] * LAYERS,
        }
    },
    "gemma4": {"text_config": "gemma4_text"},
    "gemma4_text": {
        "num_kv_shared_layers": 2,
        "layer_types": _MIXED,
        "global_head_dim": 32,
        "enable_moe_block": True,
        "top_k_experts": 2,
    },
    "glm_moe_dsa": {
        "rope_parameters": {"rope_theta": 1e4},
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "moe_layer_freq": 1,
    },
    "gptj": {"rotary_dim": 8},
    "granite": {"residual_multiplier": 0.22},  # as all that IBM has published
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"] * (LAYERS // 2),
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_n_groups": 2,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
    },
    "hunyuan": {
        "cla_share_factor": 2,
        "use_cla": True,
        "num_shared_expert": [1] * LAYERS,
        "moe_topk": [2] * LAYERS,
        "use_mixed_mlp_moe": True,
        "use_qk_norm": True,
        "rope_scaling": {"factor": 1.0, "type": "dynamic", "alpha": 1.0},
    },
    "kimi_k25": {"text_config": "deepseek_v3"},
    "kimi_k3": {
        "text_config": {
            **SIZES,
            **_KDA,
            "num_experts_per_token": 2,
            "num_shared_experts": 1,
            "attn_res_block_size": 2,
            "activation_situ_beta": 1.0,
            "activation_situ_linear_beta": 1.0,
        }
    },
    "kimi_linear": {**_KDA, "num_experts_per_token": 2, "num_shared_experts": 1},
    "kimi_vl": {"text_config": "deepseek_v3"},
    "lfm2": {
        "block_dim": 64,
        "block_multiple_of": 8,
        "layer_types": ["conv", "full_attention"] * (LAYERS // 2),
        "conv_L_cache": 3,
    },
    "lfm2-vl": {"text_config": "lfm2"},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * (LAYERS // 2), "conv_L_cache": 3, "num_dense_layers": 1},
    "llama4": {
        "text_config": {
            **SIZES,
            "model_type": "llama4_text",
            "attention_chunk_size": 8,
            "interleave_moe_layer_step": 2,
            "mlp_bias": False,
            "num_experts_per_tok": 1,
            "num_local_experts": 4,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e4,
            "tie_word_embeddings": False,
            "use_qk_norm": True,
        }
    },
    "llama4_text": {"no_rope_layers": [1, 0, 1, 0]},
    "longcat_flash": {
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "zero_expert_num": 2,
        "zero_expert_type": "identity",
    },
    "longcat_flash_ngram": {
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "zero_expert_num": 2,
        "zero_expert_type": "identity",
    },
    "mamba2": {"num_heads": 8, "hidden_size": 64, "time_step_limit": (0.0, 1e9), "time_step_rank": 8},
    "mellum": {
        "layer_types": _MIXED,
        "rope_parameters": {kind: {"rope_theta": 1e4, "rope_type": "default"} for kind in _MIXED},
    },
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1, 0, 1],
        "moe_layer_freq": [0, 1, 1, 1],
        "add_swa_attention_sink_bias": True,
        "sliding_window_size": 8,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "swa_v_head_dim": 16,
        "partial_rotary_factor": 0.5,
        "n_shared_experts": None,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    },
    "minicpm3": {
        "rope_scaling": {"factor": 1.0, "original_max_position_embeddings": 64, "short_factor": 1.0, "long_factor": 1.0}
    },
    "minimax_m3_vl": {
        "text_config": {
            **SIZES,
            "moe_layer_freq": [0, 1, 1, 1],
            "sparse_attention_freq": [0, 1, 0, 1],
            "index_block_size": 4,
            "index_topk_blocks": 2,
            "index_n_heads": 2,
            "index_head_dim": 16,
        }
    },
    "ministral3": {"rope_parameters": _LLAMA_4_ROPE},
    "mistral3": {"text_config": "llama"},
    "mistral4": {"rope_parameters": _LLAMA_4_ROPE},
    "muse_spark": {
        "text_config": {
            **SIZES,
            "num_shared_experts": 0,
            "layer_rope_theta": [0, 1e4, 0, 1e4],
            "layer_types": _MIXED,
            "rope_parameters": {"rope_theta": 1e4},
            "rms_norm_eps": 1e-5,
            "post_norm_eps": 1e-5,
            "final_logit_softcapping": 30.0,
            "output_multiplier": 1.0,
            "moe_hidden_size": 32,
        }
    },
    "nemotron-nas": {"block_configs": [_BLOCK] * LAYERS},
    "nemotron_h": {
        "hybrid_override_pattern": ["M", "*", "-", "E"],
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
    },
    "openelm": {
        "num_transformer_layers": 2,
        "model_dim": 64,
        "num_query_heads": [4, 8],
        "num_kv_heads": [2, 2],
        "ffn_multipliers": [1.0, 2.0],
        "ffn_dim_divisor": 16,
    },
    "phi3small": {"vocab_size": 100352, "ff_intermediate_size": 96, "dense_attention_every_n_layers": 2},
    "phixtral": {"num_vocab": 96, "model_dim": 64, "rotary_dim": 8},
    "pixtral": {"text_config": "llama"},
    "plamo": {"n_shared_head": 2},
    "qwen": {"kv_channels": 16},
    "qwen2_vl": {"text_config": "qwen2"},
    "qwen3": {"rope_theta": 1e4},
    "qwen3_5": _QWEN_3_5,
    "qwen3_5_moe": {"text_config": {**SIZES, **_LINEAR, "full_attention_interval": 2}},
    "qwen3_moe": {"mlp_only_layers": [0]},
    "qwen3_next": {**_LINEAR, "mlp_only_layers": [0], "full_attention_interval": 2},
    "qwen3_vl": {"text_config": "qwen3"},
    "qwen3_vl_moe": {"text_config": "qwen3_moe"},
    "prism_hadamard_qwen35": {
        "text_config": _QWEN_3_5["text_config"] | {"hidden_size": 512, "intermediate_size": 512},
        "tensor_namespace": "mlx-vlm-qwen3_5",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [
            {"path": f"model.layers.{i}.mlp.{name}_proj", "block": 512, "embedding": False, "dtype": "float16"}
            for i in range(LAYERS)
            for name in ("gate", "up", "down")
        ],
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "attention_window_size": 8, "logits_soft_cap": 30.0},
    "spark2_5": {"rope_parameters": {kind: {"rope_theta": 1e4} for kind in _MIXED}},
    "step3p5": {"num_attention_groups": 2, "moe_top_k": 2, "share_expert_dim": 48},
}
# Files that cannot be imported here, and models that cannot run here.
NOT_IMPORTED = {"olmo": "it needs the package ai2-olmo"}
NOT_COMPARED = {"bitnet": "its layers are Metal kernels", "muse_spark": "its attention is a Metal kernel"}
# Models that mlx-lm itself cannot train, cut or not.
NOT_TRAINED = {"recurrent_gemma": "mlx-lm's Model is no complete nn.Module, which MLX needs to freeze and train it"}

# Models whose layers mlx-lm reads past their adapters, or whose gradient with them is refused.
NOT_ADAPTED = ("deepseek_v41", "gemma3n", "kimi_k3", "longcat_flash", "longcat_flash_ngram")


def model_files() -> list[str]:
    """The names of mlx-lm's model files, found in its directory."""
    files = []
    for path in sorted(Path(mlx_lm.models.__file__).parent.glob("*.py")):
        text = path.read_text()
        if "class Model(" in text or "Model(" in text and "ModelArgs" in text:
            files.append(path.stem)
    return files


def compared_files() -> list[str]:
    """Those whose models can run here."""
    return [name for name in model_files() if name not in NOT_IMPORTED | NOT_COMPARED]


def config_of(name: str) -> dict[str, Any]:
    """A tiny configuration for a model file."""
    module = importlib.import_module(f"mlx_lm.models.{name}")
    config = {"model_type": name}
    for field in dataclasses.fields(module.ModelArgs):
        required = field.default is field.default_factory is dataclasses.MISSING
        if field.name in SIZES:
            config[field.name] = SIZES[field.name]
        elif required:
            kind = getattr(field.type, "__name__", str(field.type))
            if field.name.endswith("eps") or field.name.endswith("epsilon"):
                config[field.name] = 1e-5
            elif "theta" in field.name or "base" in field.name:
                config[field.name] = 10000.0
            elif field.name != "model_type":
                config[field.name] = REQUIRED.get(kind)
    config |= CONFIGS.get(name, {})
    if isinstance(other := config.get("text_config"), str):
        config["text_config"] = config_of(other)
    return config


def with_heads(config: Any, heads: int, kv_heads: int) -> Any:
    """A configuration with other numbers of heads, and the width of these, wherever it has them."""
    if not isinstance(config, dict):
        return [with_heads(item, heads, kv_heads) for item in config] if isinstance(config, list) else config
    numbers = dict.fromkeys(HEADS, heads) | dict.fromkeys(KV_HEADS, kv_heads) | dict.fromkeys(WIDTHS, 16 * heads)
    return {
        key: numbers[key] if type(value) is int and key in numbers else with_heads(value, heads, kv_heads)
        for key, value in config.items()
    }


def checkpoint_layers(model: nn.Module) -> None:
    """mlx-lm's grad_checkpoint of the layers of ``model`` alone.

    It replaces a method of their class, which the models of later tests in this process would have, too.
    """
    from mlx_lm.tuner.trainer import grad_checkpoint

    kind = type(model.layers[0])
    own = type(kind.__name__, (kind,), {"__module__": kind.__module__})
    for layer in model.layers:
        if type(layer) is kind:
            layer.__class__ = own
    grad_checkpoint(model.layers[0])


def build(name: str, seed: int = 0, heads: tuple[int, int] | None = None, **fields: Any) -> nn.Module:
    """The tiny model of a model file, with random float32 parameters; lazy. `fields` are for its configuration,
    `heads` are the numbers of heads and KV heads, if they are to be others."""
    module = importlib.import_module(f"mlx_lm.models.{name}")
    mx.random.seed(seed)
    config = config_of(name) | fields
    model = module.Model(module.ModelArgs.from_dict(with_heads(config, *heads) if heads else config))
    # Biases, sinks and norms begin as zeros and ones, with which it would not show where they are cut wrongly.
    noise = lambda array: array + 0.1 * mx.random.normal(array.shape, array.dtype)
    floats = (mx.float32, mx.float16)
    model.update(tree_map(lambda array: noise(array) if array.dtype in floats else array, model.parameters()))
    return model
