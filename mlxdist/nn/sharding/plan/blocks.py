"""Which parts of a model can be sharded, found by the names and shapes of what is in it.

A model is searched for blocks: attention, MLPs, experts. Each is sharded only if everything in it is understood, by the
tables of patterns.py; otherwise all of it stays unsharded, which is right on every number of ranks, and says why. Heads
are sharded one by one, keys and values with the queries that use them: where there are fewer KV heads than ranks,
several ranks hold the same one. A sharded block ends with one sum over the ranks (Shoeybi et al. 2019, "Megatron-LM:
Training Multi-Billion Parameter Language Models Using Model Parallelism", https://arxiv.org/abs/1909.08053).
"""

from collections.abc import Sequence
from math import gcd

import mlx.nn as nn

from mlxdist.base.errors import InvalidArgument
from mlxdist.nn.experts.placement import Placement
from mlxdist.nn.partition import split_sizes
from mlxdist.nn.tensor_parallel.linear_layers import quantization_unit
from mlxdist.nn.tensor_parallel.lora import SWITCH_LINEARS
from mlxdist.nn.tensor_parallel.parallel_attention import split_heads

from . import patterns
from .block import (
    Block,
    Heads,
    Known,
    Ranges,
    Unsharded,
    attribute,
    children,
    consecutive,
    copies,
    first,
    input_dims_of,
    join_path,
    lengths,
    output_dims,
    own_arrays,
    source_of,
)
from .parameters import Shard, dtype_name

__all__ = ["expert_shares", "find_blocks"]


def find_blocks(
    model: nn.Module, tp: int, ep: int = 1, rank_shares: Sequence[float] | None = None
) -> tuple[list[Block], dict[str, str]]:
    """The blocks of ``model`` that are sharded, and by path of a module why it stays unsharded. Nothing is evaluated.

    Raises InvalidArgument where heads, hidden layers, quantization groups or experts cannot be sharded as asked.
    """
    finder = _Finder(tp, ep, rank_shares)
    finder.search(model, "")
    if finder.shares and not finder.all_cut_alike():
        for block in finder.of_heads:
            finder.blocks.remove(block)
            finder.reasons[block.path] = "layers work with the heads of others, and not all of these are sharded alike"
    for block in finder.blocks:
        block.repeat(ep)
    return finder.blocks, finder.reasons


class _Finder:
    def __init__(self, tp: int, ep: int, rank_shares: Sequence[float] | None) -> None:
        self.tp, self.ep, self.rank_shares = tp, ep, rank_shares
        self.blocks: list[Block] = []
        self.reasons: dict[str, str] = {}
        self.seen: set[int] = set()
        self.all_attention_cut = True
        self.of_heads: list[Block] = []  # attention, and what works with its heads outside of it
        self.shares = False  # whether some of that works with the heads of another layer, such as its keys and values
        self.splits: set[Heads] = set()  # of all attention that is sharded

    def search(self, module: nn.Module, path: str) -> None:
        if id(module) in self.seen:
            self.reasons[path] = "is another name of a part that was seen before"
            return
        self.seen.add(id(module))
        if cut := self.recognized(module):
            block, has_heads = Block(path), cut in (self.attention, self.heads_elsewhere)
            self.shares |= has_heads and shares_heads(module)
            try:
                cut(block, module)
            except Unsharded as why:
                self.reasons[path] = str(why)
                self.all_attention_cut &= not has_heads
                if cut != self.mixture:
                    return
            else:
                self.blocks.append(block)
                self.of_heads += [block] if has_heads else []
                return
        for name, child in children(module):
            self.search(child, join_path(path, name))

    def all_cut_alike(self) -> bool:
        """Whether all attention is sharded, and such of the same numbers of heads in one way."""
        numbers = {(sum(lengths(split.query)), max(map(max, map(max, split.kv)))) for split in self.splits}
        return self.all_attention_cut and len(numbers) == len(self.splits)

    def recognized(self, module: nn.Module):
        """The method that shards this kind of module, or None."""
        names = {name for name, child in module.items() if isinstance(child, nn.Module)}
        if type(module).__name__ in patterns.SWITCHES:
            return self.switch
        if type(module).__name__ == patterns.HEADS_ELSEWHERE.get(source_of(module)):
            return self.heads_elsewhere
        if any(type(module[name]).__name__ in patterns.SWITCHES for name in names):
            known = "sharding_group" in vars(module) or source_of(module) in patterns.SUMS_OF_EXPERTS
            return self.mixture if known and self.ep == 1 else None
        if names & {*patterns.QUERIES, *patterns.FUSED, *patterns.FUSED_BY_KV_HEAD} and names & set(patterns.OUTPUTS):
            return self.attention
        if any({*inputs, output} <= names for inputs, output in patterns.MLPS):
            return self.mlp
        return None

    # Attention.

    def attention(self, block: Block, module: nn.Module) -> None:
        known = Known(block, module)
        if reason := patterns.NOT_TO_CUT.get(source_of(module)):
            raise Unsharded(f"{type(module).__name__} {reason}")
        if getattr(module, "block_sparse", False):
            raise Unsharded("its sparse mask depends on the numbers of the heads")
        output = known.one_of(patterns.OUTPUTS, "output projection")
        queries = first(module, patterns.QUERIES)
        heads = attribute(module, patterns.QUERY_HEADS)
        if heads is None:
            raise Unsharded("attention whose number of heads is not known")
        kv_heads = attribute(module, patterns.KV_HEADS)
        latent = is_latent(module)
        fused = first(module, (*patterns.FUSED, *patterns.FUSED_BY_KV_HEAD))
        if latent:
            kv_heads = heads
        elif kv_heads is None:
            if shares_heads(module):
                raise Unsharded("attention over other layers' keys whose number of KV heads is not known")
            kv_heads = self.kv_heads_by_shape(module, queries, heads)
        split = self.heads(block.path, heads, kv_heads, known.check_linear(output))
        query_ranges, kv_ranges = split.query, split.kv
        if split.copied and attribute(module, patterns.KV_HEADS) is None:
            raise Unsharded(
                f"of {heads} heads with {kv_heads} KV heads some ranks would have one for each, others more, and "
                f"{type(module).__name__} cannot have copies of KV heads"
            )
        # Nothing is broadcast from the latent keys to one head: another graph, as in heads().
        if latent and len({count > 1 for count in lengths(split.query)}) > 1:
            raise Unsharded(f"of {heads} heads over latent keys some ranks would have one, others more")

        if latent:
            self.latent(known, module, query_ranges, heads)
        elif fused:
            self.fused(known, module, fused, heads, kv_heads, split)
        for names, ranges, count in ((patterns.KEYS, kv_ranges, kv_heads), (patterns.VALUES, kv_ranges, kv_heads)):
            if not latent and (name := first(module, names)):
                known.column(name, ranges, count)
        if queries and queries not in known.done:
            known.column(queries, query_ranges, heads)
        for name in patterns.GATES:
            if name in module:
                known.column(name, query_ranges, heads)
        known.row(output, query_ranges, heads)
        for names, ranges, count in (
            (patterns.QUERY_NORMS, query_ranges, heads),
            (patterns.KEY_NORMS, kv_ranges, kv_heads),
        ):
            for name in names:
                if name in module:
                    known.norm(name, ranges, count, split)
        for path, (axis, whose) in patterns.PER_HEAD.items():
            known.per_head(path, axis, *((query_ranges, heads) if whose == "query" else (kv_ranges, kv_heads)))
        self.head_attributes(block, module, split, heads, kv_heads, latent, input_dims_of(module[output]))
        known.finish(input_dims=output_dims(module[output]))
        self.splits.add(split)

    def heads_elsewhere(self, block: Block, module: nn.Module) -> None:
        """What works on the heads of attention outside of it."""
        heads = attribute(module, patterns.QUERY_HEADS)
        if [sum(lengths(split.query)) for split in self.splits] != [heads]:
            raise Unsharded(f"{type(module).__name__} of {heads} heads, and attention is not sharded in one way")
        (split,) = self.splits
        known = Known(block, module)
        for name, _ in own_arrays(module):
            known.per_head(name, 0, split.query, heads)
        self.head_attributes(block, module, split, heads, heads, False, 0)
        block.roles[block.path] = "inside"

    def kv_heads_by_shape(self, module: nn.Module, queries: str | None, heads: int) -> int:
        keys = first(module, patterns.KEYS)
        if queries is None or keys is None:
            return heads
        head_dim, keys_dim = output_dims(module[queries]) // heads, output_dims(module[keys])
        return max(1, keys_dim // head_dim)

    def latent(self, known: "Known", module: nn.Module, ranges: "Ranges", heads: int) -> None:
        for name in patterns.LATENT:
            if name in module:
                known.full(name)
        for name in patterns.LATENT_HEADS:
            if name in module:
                known.heads_first(name, ranges, heads)
        if "kv_b_proj" in module:
            known.column("kv_b_proj", ranges, heads)

    def fused(self, known: "Known", module: nn.Module, name: str, heads: int, kv_heads: int, split: "Heads") -> None:
        source = source_of(module)
        by_kv_head = (
            name in patterns.FUSED_BY_KV_HEAD
            or name == "query_key_value"
            and source in patterns.QUERY_KEY_VALUE_BY_KV_HEAD
        )
        if name == "query_key_value" and not by_kv_head and source not in patterns.QUERY_KEY_VALUE_IN_TURN:
            raise Unsharded(f"the order of queries, keys and values in {name} is not known for {source}")
        outputs = output_dims(module[name])
        if outputs % (heads + 2 * kv_heads):
            raise Unsharded(f"{name} has {outputs} outputs, which are not those of {heads} + 2 * {kv_heads} heads")
        head_dim = outputs // (heads + 2 * kv_heads)
        if by_kv_head:
            if split.replicated:
                raise Unsharded(
                    f"{kv_heads} KV heads are fewer than {self.tp} ranks, and {name} has each with its queries"
                )
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

    def heads(self, path: str, heads: int, kv_heads: int, output: nn.Module) -> "Heads":
        """Which heads each rank has: as equally many as can be of whole KV heads with the queries that use them, or,
        with fewer of these than ranks, a KV head for several ranks. No quantization group of ``output`` is sharded."""
        where = f"heads of {path or 'the model'}"
        if heads % kv_heads:
            raise Unsharded(f"{heads} heads are no multiple of {kv_heads} KV heads")
        head_dim, unit = input_dims_of(output) // heads, quantization_unit(output)
        multiple = unit // gcd(unit, head_dim)
        if multiple > 1:
            where += f" of {head_dim} features, with quantization groups of {unit} behind them"
        sizes, held = split_heads(where, heads, kv_heads, self.tp, self.rank_shares or [1] * self.tp, multiple)
        # MLX computes one query head for each KV head in another graph than several, and the order of a graph's
        # collectives must be that of all ranks: if it is one on some ranks alone, each query head has a copy.
        copied = len({size > len(here) for size, here in zip(sizes, held, strict=True)}) > 1
        kv = copies(sizes, held) if copied else tuple(((here.start, here.stop),) for here in held)
        return Heads(consecutive(sizes), kv, sum(map(len, held)) > kv_heads, copied)

    def head_attributes(
        self, block: Block, module: nn.Module, split: "Heads", heads: int, kv_heads: int, latent: bool, width: int
    ) -> None:
        """The numbers that the module's forward pass reads; `width` is that of all heads, before the output."""
        query_counts, kv_counts = lengths(split.query), lengths(split.kv)
        for name in patterns.QUERY_HEADS:
            if name in vars(module):
                block.attributes[block.path, name] = query_counts
        for name in patterns.KV_HEADS:
            if name in vars(module) and vars(module)[name] is not None:
                block.attributes[block.path, name] = query_counts if latent else kv_counts
        for name in patterns.GROUPS:
            if name in vars(module):
                block.attributes[block.path, name] = tuple(q // k for q, k in zip(query_counts, kv_counts, strict=True))
        for names, counts, count in (
            (patterns.QUERY_SIZES, query_counts, heads),
            (patterns.KV_SIZES, kv_counts, kv_heads),
        ):
            for name in names:
                size = vars(module).get(name)
                if type(size) is int and size % count == 0 and (names is patterns.KV_SIZES or size == width):
                    block.attributes[block.path, name] = tuple(size // count * local for local in counts)

    # MLPs and experts.

    def mlp(self, block: Block, module: nn.Module, partial: bool = False) -> None:
        inputs, output = next((i, o) for i, o in patterns.MLPS if all(name in module for name in (*i, o)))
        if getattr(module, "activation_sparsity", 0):
            raise Unsharded("its activation looks at the whole hidden layer at once")
        known = Known(block, module)
        self.hidden(known, module, inputs, output, partial)
        hidden = input_dims_of(module[output])
        for name, size in vars(module).items():
            if name in ("intermediate_size", "hidden_dim", "ffn_dim") and size == hidden:
                shard = block.shards[join_path(block.path, output, "weight")]
                block.attributes[block.path, name] = tuple(hidden * part // shard.shape[-1] for part in shard.sizes)
        known.finish(input_dims=input_dims_of(module[inputs[0]]))

    def hidden(
        self, known: "Known", module: nn.Module, inputs: Sequence[str], output: str, partial: bool = False
    ) -> None:
        known.check_linear(output)
        width = input_dims_of(module[output])
        ranges = consecutive(
            self.hidden_sizes(join_path(known.block.path, output), width, quantization_unit(module[output]))
        )
        for name in inputs:
            known.check_linear(name)
            outputs = output_dims(module[name])
            if outputs == width or outputs == 2 * width and name in patterns.GATE_UP_IN_TURN:
                known.column(name, ranges, width)
            elif outputs == 2 * width and name in patterns.GATE_THEN_UP:
                both = tuple(((start, stop), (width + start, width + stop)) for ((start, stop),) in ranges)
                known.column(name, both, outputs)
            else:
                raise Unsharded(f"{name} has {outputs} outputs, but {output} {width} inputs")
        known.row(output, ranges, width)
        if partial:
            for name in (*inputs, output):
                known.block.roles.pop(join_path(known.block.path, name))

    def hidden_sizes(self, name: str, width: int, multiple: int) -> list[int]:
        """Equal shards if they can be, otherwise as equal as whole quantization groups allow."""
        if self.rank_shares is None and width % (self.tp * multiple):
            return split_sizes(name, width, self.tp, [1] * self.tp, multiple)
        return split_sizes(name, width, self.tp, self.rank_shares, multiple)

    def switch(self, block: Block, module: nn.Module) -> None:
        inputs, output = patterns.SWITCHES[type(module).__name__]
        known = Known(block, module)
        for name in (*inputs, output):
            if type(module.get(name)).__name__ not in SWITCH_LINEARS:
                raise Unsharded(f"experts whose {name} is {type(module.get(name)).__name__}")
        if self.ep > 1:
            self.whole_experts(block, module, (*inputs, output))
            known.done.update((*inputs, output))
        else:
            self.hidden(known, module, inputs, output)
            # Their results are added up behind all of them, with those of adapters on them.
            block.roles = {block.path: "sum"}
        known.finish(input_dims=None)

    def whole_experts(self, block: Block, module: nn.Module, names: Sequence[str]) -> None:
        ranks = self.tp * self.ep
        experts = module[names[0]].weight.shape[0]
        try:
            placement = Placement(experts, ranks, expert_shares(self.rank_shares, self.ep))
        except InvalidArgument as error:
            raise InvalidArgument(f"experts of {block.path}: {error}") from error
        ranges = tuple(((held.start, held.stop),) for held in map(placement.local, range(ranks)))
        for name in names:
            for parameter, array in own_arrays(module[name]):
                path = join_path(block.path, name, parameter)
                block.shards[path] = Shard(path, "experts", array.shape, dtype_name(array), 0, ranges)
        block.roles[block.path] = "experts"

    def mixture(self, block: Block, module: nn.Module) -> None:
        """Experts, routed and shared, whose results are added up once, by mlx-lm's block itself if it knows a group."""
        for name, child in children(module):
            part = Block(join_path(block.path, name))
            if type(child).__name__ in patterns.SWITCHES:
                self.switch(part, child)
                part.roles.clear()
            elif self.recognized(child) == self.mlp:
                self.mlp(part, child, partial=True)
            elif name not in patterns.ROUTERS and child.parameters():
                raise Unsharded(f"what {name} does in {type(module).__name__} is not known")
            block.shards |= part.shards
            block.attributes |= part.attributes
        block.roles[block.path] = "group" if "sharding_group" in vars(module) else "sum"


def is_latent(module: nn.Module) -> bool:
    return any(name in module for name in ("kv_a_proj_with_mqa", *patterns.LATENT_HEADS))


def shares_heads(module: nn.Module) -> bool:
    """Whether attention, or what belongs to it, works with heads of another module."""
    has_keys = (
        is_latent(module) or first(module, (*patterns.FUSED, *patterns.FUSED_BY_KV_HEAD, *patterns.KEYS)) is not None
    )
    return not has_keys or source_of(module) in patterns.HEADS_ELSEWHERE


def expert_shares(rank_shares: Sequence[float] | None, ep: int) -> list[float] | None:
    """Those of all ranks of the grid, from those of one row."""
    return None if rank_shares is None else [weight for _ in range(ep) for weight in rank_shares]
