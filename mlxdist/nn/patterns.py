"""Which parts of a model can be cut, found by the names and shapes of what is in it.

A model is searched for blocks: attention, MLPs, experts. Each is cut only if everything in it is understood, by the
tables below; otherwise all of it stays whole, which is right on every number of ranks, and says why. Heads are cut
whole, keys and values with the queries that use them: where there are fewer KV heads than ranks, several ranks hold the
same one. A cut block ends with one sum over the ranks (Shoeybi et al. 2019, "Megatron-LM", https://arxiv.org/abs/1909.08053).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import gcd, lcm

import mlx.core as mx
import mlx.nn as nn

from ..errors import InvalidArgument
from .experts.placement import Placement
from .parameters import Range, Shard, dtype_name
from .shards import split_sizes

__all__ = ["Block", "expert_weights", "find_blocks"]

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
# Attention that is written so that it cannot be cut, by the module of its class.
NOT_TO_CUT = {
    "baichuan_m1": "takes the width of all its heads from its input",
    "exaone": "takes the width of all its heads from its input",
    "plamo": "gives queries their KV heads in turn, with a fixed number of turns",
}
# The latent projections of multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434) stay whole.
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
# Gate and up in one matrix: one after the other; those of phi3small's up_proj alternate, so that any cut keeps pairs.
GATE_THEN_UP = ("gate_up_proj", "input_linear", "proj_1")
GATE_UP_IN_TURN = ("up_proj",)

LINEARS = (nn.Linear, nn.QuantizedLinear)
SWITCH_LINEARS = ("SwitchLinear", "QuantizedSwitchLinear")
SWITCHES = {"SwitchGLU": (("gate_proj", "up_proj"), "down_proj"), "SwitchMLP": (("fc1",), "fc2")}
# Mixtures of experts of mlx-lm whose result is a sum over the results of what is in them, with these routers: one sum
# over the ranks at the end is enough, where otherwise the result of each token's every expert is summed.
SUMS_OF_EXPERTS = (
    "Klear", "afmoe", "bailing_hybrid", "bailing_moe", "bailing_moe_linear", "bailing_moe_v3", "deepseek", "dots1",
    "ernie4_5_moe", "granitemoe", "granitemoehybrid", "hunyuan", "jamba", "kimi_linear", "laguna", "lfm2_moe", "llama4",
    "mellum", "mimo_v2_flash", "mixtral", "nemotron_h", "olmoe", "phimoe", "phixtral", "qwen2_moe",
)  # fmt: skip
ROUTERS = ("gate", "router", "shared_expert_gate", "coefficient", "gate_act")


@dataclass
class Block:
    """A part of a model that is cut as one.

    Attributes:
        path: of its module.
        shards: what is cut in it, by path in the model.
        roles: what the layers in it become, by path: "column", "row", "norm" (over all ranks' heads), "sum" (its results
            are added up over the ranks), "group" (it adds them up itself, over its ``sharding_group``), "experts" (whole
            experts).
        attributes: numbers that a rank has its part of: (path of the module, name) -> value on each rank.
        shares: takes keys and values from another block.
    """

    path: str
    shards: dict[str, Shard] = field(default_factory=dict)
    roles: dict[str, str] = field(default_factory=dict)
    attributes: dict[tuple[str, str], tuple[int, ...]] = field(default_factory=dict)
    shares: bool = False

    def repeat(self, ep: int) -> None:
        """From the ranks of a row of the grid to all: each row is the same, but for whole experts."""
        for path, shard in self.shards.items():
            if shard.kind != "experts":
                self.shards[path] = replace(shard, ranges=shard.ranges * ep)
        self.attributes = {name: values * ep for name, values in self.attributes.items()}


class _Whole(Exception):
    """The block is not understood; the text says why it stays whole."""


def find_blocks(
    model: nn.Module, tp: int, ep: int = 1, weights: Sequence[float] | None = None
) -> tuple[list[Block], dict[str, str]]:
    """The blocks of ``model`` that are cut, and by path of a module why it stays whole. Nothing is evaluated.

    Raises InvalidArgument where heads, hidden layers, quantization groups or experts cannot be cut as asked.
    """
    finder = _Finder(tp, ep, weights)
    finder.search(model, "")
    if not finder.all_attention_cut:
        # Who takes keys and values from another layer must have the same heads as that.
        for block in [block for block in finder.blocks if block.shares]:
            finder.blocks.remove(block)
            finder.reasons[block.path] = "takes keys and values from another layer, and not all of these are cut"
    for block in finder.blocks:
        block.repeat(ep)
    return finder.blocks, finder.reasons


class _Finder:
    def __init__(self, tp: int, ep: int, weights: Sequence[float] | None) -> None:
        self.tp, self.ep, self.weights = tp, ep, weights
        self.blocks: list[Block] = []
        self.reasons: dict[str, str] = {}
        self.seen: set[int] = set()
        self.all_attention_cut = True

    def search(self, module: nn.Module, path: str) -> None:
        if id(module) in self.seen:
            self.reasons[path] = "is another name of a part that was seen before"
            return
        self.seen.add(id(module))
        if cut := self.recognized(module):
            block = Block(path)
            try:
                cut(block, module)
            except _Whole as why:
                self.reasons[path] = str(why)
                self.all_attention_cut &= cut != self.attention
            else:
                if block.shards:
                    self.blocks.append(block)
            if cut != self.mixture:
                return
        for name, child in _children(module):
            below = f"{path}.{name}" if path else name
            if not any(below in block.roles or _within(below, block) for block in self.blocks[-1:]):
                self.search(child, below)

    def recognized(self, module: nn.Module):
        """The method that cuts this kind of module, or None."""
        names = {name for name, child in module.items() if isinstance(child, nn.Module)}
        if type(module).__name__ in SWITCHES:
            return self.switch
        if any(type(module[name]).__name__ in SWITCHES for name in names):
            known = "sharding_group" in vars(module) or _source(module) in SUMS_OF_EXPERTS
            return self.mixture if known and self.ep == 1 else None
        if names & {*QUERIES, *FUSED, *FUSED_BY_KV_HEAD} and names & set(OUTPUTS):
            return self.attention
        if any({*inputs, output} <= names for inputs, output in MLPS):
            return self.mlp
        return None

    # Attention.

    def attention(self, block: Block, module: nn.Module) -> None:
        known = _Known(block, module)
        if reason := NOT_TO_CUT.get(_source(module)):
            raise _Whole(f"{type(module).__name__} {reason}")
        if getattr(module, "block_sparse", False):
            raise _Whole("its sparse mask depends on the numbers of the heads")
        output = known.one_of(OUTPUTS, "output projection")
        queries = _first(module, QUERIES)
        heads = _attribute(module, QUERY_HEADS)
        if heads is None:
            raise _Whole("attention whose number of heads is not known")
        kv_heads = _attribute(module, KV_HEADS)
        latent = any(name in module for name in ("kv_a_proj_with_mqa", *LATENT_HEADS))
        fused = _first(module, (*FUSED, *FUSED_BY_KV_HEAD))
        if latent:
            kv_heads = heads
        elif kv_heads is None:
            kv_heads = self.kv_heads_by_shape(module, queries, heads)
        split = self.heads(block.path, heads, kv_heads)
        query_ranges, kv_ranges = split.query, split.kv

        if latent:
            self.latent(known, module, query_ranges, heads)
        elif fused:
            self.fused(known, module, fused, heads, kv_heads, split)
        for names, ranges, count in ((KEYS, kv_ranges, kv_heads), (VALUES, kv_ranges, kv_heads)):
            if not latent and (name := _first(module, names)):
                known.column(name, ranges, count)
        if queries and queries not in known.done:
            known.column(queries, query_ranges, heads)
        block.shares = not fused and not latent and _first(module, KEYS) is None
        for name in GATES:
            if name in module:
                known.column(name, query_ranges, heads)
        known.row(output, query_ranges, heads)
        for names, ranges, count in ((QUERY_NORMS, query_ranges, heads), (KEY_NORMS, kv_ranges, kv_heads)):
            for name in names:
                if name in module:
                    known.norm(name, ranges, count, replicated=split.replicated and names is KEY_NORMS)
        for path, (axis, whose) in PER_HEAD.items():
            known.per_head(path, axis, *((query_ranges, heads) if whose == "query" else (kv_ranges, kv_heads)))
        self.head_attributes(block, module, split, heads, kv_heads, latent, _input_dims(module[output]))
        known.finish(input_dims=_output_dims(module[output]))

    def kv_heads_by_shape(self, module: nn.Module, queries: str | None, heads: int) -> int:
        keys = _first(module, KEYS)
        if queries is None or keys is None:
            return heads
        head_dim, keys_dim = _output_dims(module[queries]) // heads, _output_dims(module[keys])
        return max(1, keys_dim // head_dim)

    def latent(self, known: "_Known", module: nn.Module, ranges: "Ranges", heads: int) -> None:
        for name in LATENT:
            if name in module:
                known.whole(name)
        for name in LATENT_HEADS:
            if name in module:
                known.heads_first(name, ranges, heads)
        if "kv_b_proj" in module:
            known.column("kv_b_proj", ranges, heads)

    def fused(self, known: "_Known", module: nn.Module, name: str, heads: int, kv_heads: int, split: "_Heads") -> None:
        source = _source(module)
        by_kv_head = name in FUSED_BY_KV_HEAD or name == "query_key_value" and source in QUERY_KEY_VALUE_BY_KV_HEAD
        if name == "query_key_value" and not by_kv_head and source not in QUERY_KEY_VALUE_IN_TURN:
            raise _Whole(f"the order of queries, keys and values in {name} is not known for {source}")
        outputs = _output_dims(module[name])
        if outputs % (heads + 2 * kv_heads):
            raise _Whole(f"{name} has {outputs} outputs, which are not those of {heads} + 2 * {kv_heads} heads")
        head_dim = outputs // (heads + 2 * kv_heads)
        if by_kv_head:
            if split.replicated:
                raise _Whole(f"{kv_heads} KV heads are fewer than {self.tp} ranks, and {name} has each with its queries")
            known.column(name, split.kv, kv_heads)
            return
        starts = (0, heads * head_dim, (heads + kv_heads) * head_dim)
        ranges = tuple(
            tuple(
                (start + first * head_dim, start + last * head_dim)
                for start, whose in zip(starts, (split.query, split.kv, split.kv), strict=True)
                for first, last in whose[rank]
            )
            for rank in range(self.tp)
        )
        known.column(name, ranges, outputs)

    def heads(self, path: str, heads: int, kv_heads: int) -> "_Heads":
        """Which heads each rank has: whole KV heads with the queries that use them, or a KV head for several ranks."""
        where = path or "the model"
        if heads % kv_heads:
            raise _Whole(f"{heads} heads are no multiple of {kv_heads} KV heads")
        if kv_heads >= self.tp or self.weights is not None:
            sizes = split_sizes(f"KV heads of {where}", kv_heads, self.tp, self.weights)
            kv = _consecutive(sizes)
            queries_each = heads // kv_heads
            return _Heads(_scaled(kv, queries_each), kv, False)
        split_sizes(f"heads of {where}", heads, self.tp)
        if self.tp % kv_heads:
            raise InvalidArgument(
                f"{where}: {kv_heads} KV heads cannot be held by {self.tp} ranks, each of which needs one: choose tp "
                f"as a divisor or a multiple of {kv_heads}"
            )
        copies = self.tp // kv_heads
        kv = tuple(((rank // copies, rank // copies + 1),) for rank in range(self.tp))
        return _Heads(_consecutive([heads // self.tp] * self.tp), kv, True)

    def head_attributes(
        self, block: Block, module: nn.Module, split: "_Heads", heads: int, kv_heads: int, latent: bool, width: int
    ) -> None:
        """The numbers that the module's forward pass reads; `width` is that of all heads, before the output."""
        query_counts, kv_counts = _lengths(split.query), _lengths(split.kv)
        for name in QUERY_HEADS:
            if name in vars(module):
                block.attributes[block.path, name] = query_counts
        for name in KV_HEADS:
            if name in vars(module) and vars(module)[name] is not None:
                block.attributes[block.path, name] = query_counts if latent else kv_counts
        for name in GROUPS:
            if name in vars(module):
                block.attributes[block.path, name] = tuple(
                    q // k for q, k in zip(query_counts, kv_counts, strict=True)
                )
        for names, counts, count in ((QUERY_SIZES, query_counts, heads), (KV_SIZES, kv_counts, kv_heads)):
            for name in names:
                size = vars(module).get(name)
                if type(size) is int and size % count == 0 and (names is KV_SIZES or size == width):
                    block.attributes[block.path, name] = tuple(size // count * local for local in counts)

    # MLPs and experts.

    def mlp(self, block: Block, module: nn.Module, partial: bool = False) -> None:
        inputs, output = next((i, o) for i, o in MLPS if all(name in module for name in (*i, o)))
        if getattr(module, "activation_sparsity", 0):
            raise _Whole("its activation looks at the whole hidden layer at once")
        known = _Known(block, module)
        self.hidden(known, module, inputs, output, partial)
        hidden = _input_dims(module[output])
        for name, size in vars(module).items():
            if name in ("intermediate_size", "hidden_dim", "ffn_dim") and size == hidden:
                shard = block.shards[_join(block.path, output, "weight")]
                block.attributes[block.path, name] = tuple(hidden * part // shard.shape[-1] for part in shard.sizes)
        known.finish(input_dims=_input_dims(module[inputs[0]]))

    def hidden(
        self, known: "_Known", module: nn.Module, inputs: Sequence[str], output: str, partial: bool = False
    ) -> None:
        known.check_linear(output)
        width = _input_dims(module[output])
        ranges = _consecutive(self.hidden_sizes(_join(known.block.path, output), width, _group_size(module[output])))
        for name in inputs:
            known.check_linear(name)
            outputs = _output_dims(module[name])
            if outputs == width or outputs == 2 * width and name in GATE_UP_IN_TURN:
                known.column(name, ranges, width)
            elif outputs == 2 * width and name in GATE_THEN_UP:
                both = tuple(((start, stop), (width + start, width + stop)) for ((start, stop),) in ranges)
                known.column(name, both, outputs)
            else:
                raise _Whole(f"{name} has {outputs} outputs, but {output} {width} inputs")
        known.row(output, ranges, width)
        if partial:
            for name in (*inputs, output):
                known.block.roles.pop(_join(known.block.path, name))

    def hidden_sizes(self, name: str, width: int, multiple: int) -> list[int]:
        """Equal parts if they can be, otherwise as equal as whole quantization groups allow."""
        if self.weights is None and width % (self.tp * multiple):
            return split_sizes(name, width, self.tp, [1] * self.tp, multiple)
        return split_sizes(name, width, self.tp, self.weights, multiple)

    def switch(self, block: Block, module: nn.Module) -> None:
        inputs, output = SWITCHES[type(module).__name__]
        known = _Known(block, module)
        for name in (*inputs, output):
            if type(module.get(name)).__name__ not in SWITCH_LINEARS:
                raise _Whole(f"experts whose {name} is {type(module.get(name)).__name__}")
        if self.ep > 1:
            self.whole_experts(block, module, (*inputs, output))
            known.done.update((*inputs, output))
        else:
            self.hidden(known, module, inputs, output)
            for name in inputs:
                block.roles.pop(_join(block.path, name))
            block.roles[_join(block.path, output)] = "sum"
        known.finish(input_dims=None)

    def whole_experts(self, block: Block, module: nn.Module, names: Sequence[str]) -> None:
        ranks = self.tp * self.ep
        experts = module[names[0]].weight.shape[0]
        try:
            placement = Placement(experts, ranks, expert_weights(self.weights, self.ep))
        except InvalidArgument as error:
            raise InvalidArgument(f"experts of {block.path}: {error}") from error
        ranges = tuple(((held.start, held.stop),) for held in map(placement.local, range(ranks)))
        for name in names:
            for parameter, array in _arrays(module[name]):
                path = _join(block.path, name, parameter)
                block.shards[path] = Shard(path, "experts", array.shape, dtype_name(array), 0, ranges)
        block.roles[block.path] = "experts"

    def mixture(self, block: Block, module: nn.Module) -> None:
        """Experts, routed and shared, whose results are added up once, by mlx-lm's block itself if it knows a group."""
        for name, child in _children(module):
            part = Block(_join(block.path, name))
            if type(child).__name__ in SWITCHES:
                self.switch(part, child)
                part.roles.clear()
            elif self.recognized(child) == self.mlp:
                self.mlp(part, child, partial=True)
            elif name not in ROUTERS and child.parameters():
                raise _Whole(f"what {name} does in {type(module).__name__} is not known")
            block.shards |= part.shards
            block.attributes |= part.attributes
        block.roles[block.path] = "group" if "sharding_group" in vars(module) else "sum"


def expert_weights(weights: Sequence[float] | None, ep: int) -> list[float] | None:
    """Those of all ranks of the grid, from those of one row."""
    return None if weights is None else [weight for _ in range(ep) for weight in weights]


Ranges = tuple[tuple[Range, ...], ...]


@dataclass(frozen=True)
class _Heads:
    query: Ranges
    kv: Ranges
    replicated: bool


class _Known:
    """Collects what is understood of a block's module; finish() refuses the block if that is not all of it."""

    def __init__(self, block: Block, module: nn.Module) -> None:
        self.block, self.module = block, module
        self.done: set[str] = set()

    def one_of(self, names: Sequence[str], what: str) -> str:
        found = [name for name in names if name in self.module]
        if len(found) != 1:
            raise _Whole(f"{len(found)} candidates for the {what}: {', '.join(found)}")
        return found[0]

    def check_linear(self, name: str) -> nn.Module:
        layer = self.module[name]
        if type(layer) not in LINEARS and type(layer).__name__ not in SWITCH_LINEARS:
            raise _Whole(f"{name} is {type(layer).__name__}, which cannot be cut")
        return layer

    def column(self, name: str, ranges: Ranges, count: int) -> None:
        """Cuts a linear layer's outputs, which are `count` equal units, of which each rank has `ranges`."""
        layer = self.check_linear(name)
        outputs = _output_dims(layer)
        if outputs % count:
            raise _Whole(f"{name} has {outputs} outputs, which are not those of {count} heads")
        ranges = _scaled(ranges, outputs // count)
        for parameter, array in _arrays(layer):
            if parameter == "global_scale":
                continue
            self.add(name, parameter, array, "column", array.ndim - (1 if parameter == "bias" else 2), ranges)
        self.block.roles[_join(self.block.path, name)] = "column"
        self.done.add(name)

    def row(self, name: str, ranges: Ranges, count: int) -> None:
        """Cuts a linear layer's inputs."""
        layer = self.check_linear(name)
        inputs = _input_dims(layer)
        if inputs % count:
            raise _Whole(f"{name} has {inputs} inputs, which are not those of {count} heads")
        ranges = _scaled(ranges, inputs // count)
        unit = _group_size(layer)
        if bad := [edge for pieces in ranges for piece in pieces for edge in piece if edge % unit]:
            raise InvalidArgument(
                f"{_join(self.block.path, name)}: a rank's inputs would begin or end at {bad[0]}, inside a quantization "
                f"group of {unit}: choose another number of ranks, or quantize with a smaller group_size"
            )
        for parameter, array in _arrays(layer):
            if parameter == "bias":
                scale = 1.0 if array.ndim == 1 else 1.0 / len(ranges)
                path = _join(self.block.path, name, parameter)
                reason = "is added once, after the sum over the ranks" if scale == 1 else "each rank adds its share"
                self.block.shards[path] = Shard(path, "whole", array.shape, dtype_name(array), scale=scale, reason=reason)
            elif parameter != "global_scale":
                # A quantized weight holds 32 / bits inputs in a word, scales and biases one for each group.
                here = tuple(
                    tuple((start * array.shape[-1] // inputs, stop * array.shape[-1] // inputs) for start, stop in pieces)
                    for pieces in ranges
                )
                self.add(name, parameter, array, "row", array.ndim - 1, here)
        self.block.roles[_join(self.block.path, name)] = "row"
        self.done.add(name)

    def heads_first(self, name: str, ranges: Ranges, heads: int) -> None:
        """Cuts what has one matrix a head."""
        for parameter, array in _arrays(self.module[name]):
            if array.shape[0] != heads:
                raise _Whole(f"{name}.{parameter} has {array.shape[0]} matrices for {heads} heads")
            self.add(name, parameter, array, "column", 0, ranges)
        self.done.add(name)

    def norm(self, name: str, ranges: Ranges, count: int, replicated: bool) -> None:
        """Norms over one head stay whole; a norm over all heads needs all ranks' squares, one of each head is cut."""
        layer = self.module[name]
        arrays = list(_arrays(layer)) if isinstance(layer, nn.Module) else []
        if all(array.size == array.shape[-1] for _, array in arrays):
            weight = next((array for parameter, array in arrays if parameter == "weight"), None)
            over_all = weight is not None and count > 1 and weight.size == self.heads_dim(name)
            if not over_all:
                self.whole(name)
                return
            if type(layer) is not nn.RMSNorm or replicated:
                raise _Whole(f"{name} is a {type(layer).__name__} over all heads")
            self.block.roles[_join(self.block.path, name)] = "norm"
            ranges = _scaled(ranges, weight.size // count)
            self.add(name, "weight", weight, "column", 0, ranges)
        else:
            for parameter, array in arrays:
                if array.ndim != 2 or array.shape[0] != count:
                    raise _Whole(f"{name}.{parameter} of shape {array.shape} is not one row a head")
                self.add(name, parameter, array, "column", 0, ranges)
        self.done.add(name)

    def heads_dim(self, name: str) -> int:
        """The width of all heads that a norm may be over."""
        names = QUERIES if name in QUERY_NORMS else KEYS
        projection = _first(self.module, names)
        return _output_dims(self.module[projection]) if projection else -1

    def per_head(self, path: str, axis: int, ranges: Ranges, count: int) -> None:
        name, _, parameter = path.partition(".")
        value = self.module.get(name)
        array = value.get(parameter) if isinstance(value, nn.Module) and parameter else value
        if not isinstance(array, mx.array) or not parameter and isinstance(value, nn.Module):
            return
        if array.ndim <= axis or array.shape[axis] != count:
            raise _Whole(f"{path} of shape {array.shape} does not have one entry a head along axis {axis}")
        full = _join(self.block.path, path)
        self.block.shards[full] = Shard(full, "column", array.shape, dtype_name(array), axis, ranges)
        self.done.add(name)

    def whole(self, name: str) -> None:
        self.done.add(name)

    def add(self, name: str, parameter: str, array: mx.array, kind: str, axis: int, ranges: Ranges) -> None:
        path = _join(self.block.path, name, parameter)
        self.block.shards[path] = Shard(path, kind, array.shape, dtype_name(array), axis, ranges)

    def finish(self, input_dims: int | None) -> None:
        """Everything else must be without parameters, or belong to the block's input or to single numbers."""
        for name, value in self.module.items():
            if name in self.done or name.startswith("_"):
                continue
            if isinstance(value, nn.Module):
                arrays = [array for _, array in _arrays(value)]
                nested = any(isinstance(item, nn.Module) for item in value.values())
            elif isinstance(value, mx.array):
                arrays, nested = [value], False
            else:
                arrays, nested = [], bool(isinstance(value, (list, dict)) and _holds_parameters(value))
            fits = all(array.size == 1 or array.size == input_dims != self.inner() for array in arrays)
            if nested or not (fits or name in ("norm", "x_k") and all(array.size == input_dims for array in arrays)):
                raise _Whole(f"what {name} does in {type(self.module).__name__} is not known")

    def inner(self) -> int:
        """The width inside of the block."""
        rows = [path for path, role in self.block.roles.items() if role in ("row", "sum")]
        return _input_dims(self.module[rows[0].rpartition(".")[2]]) if rows else -1


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules in a module, also in its lists and dicts, by path."""

    def inside(name: str, value) -> Iterator[tuple[str, nn.Module]]:
        if isinstance(value, nn.Module):
            yield name, value
        elif isinstance(value, (list, tuple)):
            for index, item in enumerate(value):
                yield from inside(f"{name}.{index}", item)
        elif isinstance(value, dict):
            for key, item in value.items():
                yield from inside(f"{name}.{key}", item)

    for name, value in module.items():
        yield from inside(name, value)


def _within(path: str, block: Block) -> bool:
    """Whether something of the module at `path` is cut in the block."""
    return any(shard.startswith(f"{path}.") for shard in block.shards)


def _holds_parameters(value: Mapping | Sequence) -> bool:
    items = value.values() if isinstance(value, Mapping) else value
    return any(
        isinstance(item, mx.array)
        or isinstance(item, nn.Module)
        and bool(item.parameters())
        or isinstance(item, (list, tuple, dict))
        and _holds_parameters(item)
        for item in items
    )


def _arrays(layer: nn.Module) -> Iterator[tuple[str, mx.array]]:
    """The parameters that a module has itself."""
    return ((name, value) for name, value in layer.items() if isinstance(value, mx.array) and not name.startswith("_"))


def _source(module: nn.Module) -> str:
    """The name of the file of a module's class."""
    return type(module).__module__.rpartition(".")[2]


def _first(module: nn.Module, names: Sequence[str]) -> str | None:
    return next((name for name in names if isinstance(module.get(name), nn.Module)), None)


def _attribute(module: nn.Module, names: Sequence[str]) -> int | None:
    return next((vars(module)[name] for name in names if type(vars(module).get(name)) is int), None)


def _output_dims(layer: nn.Module) -> int:
    return layer.weight.shape[-2]


def _input_dims(layer: nn.Module) -> int:
    bits = getattr(layer, "bits", None)
    return layer.weight.shape[-1] * 32 // bits if bits else layer.weight.shape[-1]


def _group_size(layer: nn.Module) -> int:
    """What a cut of the inputs must be a multiple of: whole quantization groups, in whole words."""
    bits = getattr(layer, "bits", None)
    return lcm(layer.group_size, 32 // gcd(32, bits)) if bits else 1


def _consecutive(sizes: Sequence[int]) -> Ranges:
    stops = [sum(sizes[: rank + 1]) for rank in range(len(sizes))]
    return tuple(((stop - size, stop),) for size, stop in zip(sizes, stops, strict=True))


def _scaled(ranges: Ranges, unit: int) -> Ranges:
    return tuple(tuple((start * unit, stop * unit) for start, stop in pieces) for pieces in ranges)


def _lengths(ranges: Ranges) -> tuple[int, ...]:
    return tuple(sum(stop - start for start, stop in pieces) for pieces in ranges)


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)
