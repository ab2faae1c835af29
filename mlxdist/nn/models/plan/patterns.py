"""The names by which parts of mlx-lm's models are known: what they are, and so how they can be sharded.

blocks.py searches models for them. To teach it another model, add its names here and run tests/support/model_table.py.
"""

QUERIES = ("q_proj", "c_q", "attn_query", "q_b_proj")
KEYS = ("k_proj", "c_k", "attn_key")
VALUES = ("v_proj", "c_v", "attn_value")
OUTPUTS = ("o_proj", "out_proj", "wo", "dense", "c_proj", "attn_resid")
# Fused: all queries, then all keys, then all values.
FUSED = ("qkv_proj", "Wqkv", "c_attn", "W_pack", "q_k_v_proj", "query_key_value")
# Fused: for each KV head its queries, its key and its value; by the name of the class's module where it is ambiguous.
FUSED_BY_KV_HEAD = ("wqkv",)
QUERY_KEY_VALUE_BY_KV_HEAD = ("gpt_neox", "phi3small")
QUERY_KEY_VALUE_IN_TURN = ("bailing_moe", "bailing_moe_linear", "bailing_hybrid")
# What scales the output of attention, made from its input: for each head or for each element of each.
GATES = ("gate_proj", "g_proj")
QUERY_HEADS = ("n_heads", "num_heads", "num_attention_heads", "n_head", "q_num_heads", "num_query_heads")
KV_HEADS = ("n_kv_heads", "num_kv_heads", "num_key_value_heads", "k_num_heads", "v_num_heads", "kv_n_heads")
GROUPS = ("repeats", "n_rep", "num_key_value_groups", "n_kv_groups", "n_q_per_kv")
QUERY_SIZES = ("q_size", "q_proj_dim", "dim", "d_model", "hidden_size")
KV_SIZES = ("kv_size", "kv_dim", "k_proj_dim", "v_proj_dim")
QUERY_NORMS = ("q_norm", "q_layernorm", "query_layernorm")
KEY_NORMS = ("k_norm", "k_layernorm", "key_layernorm")
# Arrays with one entry a head: the axis, and whose heads.
PER_HEAD = {
    "sinks": (0, "query"),
    "attention_sink_bias": (0, "query"),
    "head_gain.head_g": (0, "query"),
    "q_weight": (0, "query"),
    "k_weight": (0, "kv"),
    "conv_k": (2, "kv"),
    "conv_v": (2, "kv"),
}
# What stands outside of attention and works on its heads, with one entry a head along the first axis of each parameter:
# by the module of its class, the class.
HEADS_ELSEWHERE = {"iquestloopcoder": "LoopGateProjection"}
# Attention that is written so that it cannot be sharded, by the module of its class.
NOT_TO_CUT = {
    "baichuan_m1": "takes the width of all its heads from its input",
    "exaone": "takes the width of all its heads from its input",
    "plamo": "gives queries their KV heads in turn, with a fixed number of turns",
}
# The latent projections of multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434) stay unsharded.
LATENT = ("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm")
LATENT_HEADS = ("embed_q", "unembed_out")

# An MLP: from the input to the hidden layer, and back.
MLPS = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("gate_up_proj",), "down_proj"),
    (("up_proj",), "down_proj"),
    (("fc1",), "fc2"),
    (("fc_in",), "fc_out"),
    (("c_fc",), "c_proj"),
    (("c_fc_0", "c_fc_1"), "c_proj"),
    (("w1", "w3"), "w2"),
    (("w1", "v1"), "w2"),
    (("w1", "w2"), "c_proj"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
    (("input_linear",), "output_linear"),
    (("proj_1",), "proj_2"),
    (("mlp_gate", "mlp_linear"), "mlp_resid"),
    (("key",), "value"),
)
# Gate and up in one matrix: one after the other; those of phi3small's up_proj alternate, so that any sharding keeps
# pairs.
GATE_THEN_UP = ("gate_up_proj", "input_linear", "proj_1")
GATE_UP_IN_TURN = ("up_proj",)

SWITCHES = {"SwitchGLU": (("gate_proj", "up_proj"), "down_proj"), "SwitchMLP": (("fc1",), "fc2")}
# Mixtures of experts of mlx-lm whose result is a sum over the results of what is in them, with these routers: one sum
# over the ranks at the end is enough, where otherwise the result of each token's every expert is summed.
SUMS_OF_EXPERTS = (
    "Klear", "afmoe", "bailing_hybrid", "bailing_moe", "bailing_moe_linear", "bailing_moe_v3", "deepseek", "dots1",
    "ernie4_5_moe", "granitemoe", "granitemoehybrid", "hunyuan", "jamba", "kimi_linear", "laguna", "lfm2_moe", "llama4",
    "mellum", "mimo_v2_flash", "mixtral", "nemotron_h", "olmoe", "phimoe", "phixtral", "qwen2_moe",
)  # fmt: skip
ROUTERS = ("gate", "router", "shared_expert_gate", "coefficient", "gate_act")
