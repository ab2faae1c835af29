"""Which parts of a model can be sharded, found by the names and shapes of what is in it.

A model is searched for blocks: attention, MLPs, experts. Each is sharded only if everything in it is understood, by the
tables of patterns.py; otherwise all of it stays unsharded, which is right on every number of ranks, and says why. Heads
are sharded one by one, keys and values with the queries that use them: where there are fewer KV heads than ranks,
several ranks hold the same one. A sharded block ends with one sum over the ranks (Shoeybi et al. 2019, "Megatron-LM:
Training Multi-Billion Parameter Language Models Using Model Parallelism", https://arxiv.org/abs/1909.08053).
"""

from collections.abc import Callable, Sequence
from math import gcd

import mlx.nn as nn

from mlxdist.base.errors import InvalidArgument
from mlxdist.nn.expert_parallel.placement import Placement
from mlxdist.nn.layout.modules import children, join_path, own_arrays, source_of
from mlxdist.nn.layout.partition import split_sizes
from mlxdist.nn.tensor_parallel.linear_layers import quantization_unit
from mlxdist.nn.tensor_parallel.lora import SWITCH_LINEARS
from mlxdist.nn.tensor_parallel.parallel_attention import split_heads

from . import patterns
from .block import Block, Heads, Units, Unsharded, attribute, consecutive, copies, first, input_dims_of, output_dims

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
            block, has_heads = Block(path, module), cut in (self.attention, self.heads_elsewhere)
            self.shares |= has_heads and shares_heads(module)
            try:
                cut(block)
            except Unsharded as why:
                self.reasons[path] = str(why)
                self.all_attention_cut &= not has_heads
                # A mixture that is not understood stays full, but experts in it may still be sharded by themselves.
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
        numbers = {(split.query.count, split.kv.count) for split in self.splits}
        return self.all_attention_cut and len(numbers) == len(self.splits)

    def recognized(self, module: nn.Module) -> Callable[[Block], None] | None:
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

    def attention(self, block: Block) -> None:
        module = block.module
        if reason := patterns.NOT_TO_CUT.get(source_of(module)):
            raise Unsharded(f"{type(module).__name__} {reason}")
        if getattr(module, "block_sparse", False):
            raise Unsharded("its sparse mask depends on the numbers of the heads")
        output = block.one_of(patterns.OUTPUTS, "output projection")
        heads = attribute(module, patterns.QUERY_HEADS)
        if heads is None:
            raise Unsharded("attention whose number of heads is not known")
        kv_heads = self.kv_heads(module, heads)
        split = self.heads(block.path, heads, kv_heads, block.check_linear(output))
        if is_latent(module):
            # Nothing is broadcast from the latent keys to one head: another graph, as in heads().
            if len({count > 1 for count in split.query.counts}) > 1:
                raise Unsharded(f"of {heads} heads over latent keys some ranks would have one, others more")
            block.done.update(patterns.LATENT)
            for name in patterns.LATENT_HEADS:
                if name in module:
                    block.heads_first(name, split.query)
            columns = {"kv_b_proj": split.query}
        else:
            if split.copied and attribute(module, patterns.KV_HEADS) is None:
                raise Unsharded(
                    f"of {heads} heads with {kv_heads} KV heads some ranks would have one for each, others more, and "
                    f"{type(module).__name__} cannot have copies of KV heads"
                )
            if fused := first(module, (*patterns.FUSED, *patterns.FUSED_BY_KV_HEAD)):
                self.fused(block, fused, split)
            columns = {
                projection: split.kv
                for names in (patterns.KEYS, patterns.VALUES)
                if (projection := first(module, names))
            }
        if (queries := first(module, patterns.QUERIES)) and queries not in block.done:
            columns[queries] = split.query
        for name, units in (columns | dict.fromkeys(patterns.GATES, split.query)).items():
            if name in module:
                block.column(name, units)
        block.row(output, split.query)
        norms = dict.fromkeys(patterns.QUERY_NORMS, split.query) | dict.fromkeys(patterns.KEY_NORMS, split.kv)
        for name, units in norms.items():
            if name in module:
                block.norm(name, units, split)
        for path, (axis, whose) in patterns.PER_HEAD.items():
            block.per_head(path, axis, split.query if whose == "query" else split.kv)
        self.head_attributes(block, split, input_dims_of(module[output]))
        block.finish(input_dims=output_dims(module[output]))
        self.splits.add(split)

    def heads_elsewhere(self, block: Block) -> None:
        """Shards a module outside of attention that works on its heads."""
        heads = attribute(block.module, patterns.QUERY_HEADS)
        if [split.query.count for split in self.splits] != [heads]:
            raise Unsharded(f"{type(block.module).__name__} of {heads} heads, and attention is not sharded in one way")
        (split,) = self.splits
        for name, _ in own_arrays(block.module):
            block.per_head(name, 0, split.query)
        self.head_attributes(block, split, 0)
        block.roles[block.path] = "inside"

    def kv_heads(self, module: nn.Module, heads: int) -> int:
        if is_latent(module):
            return heads
        if (kv_heads := attribute(module, patterns.KV_HEADS)) is not None:
            return kv_heads
        if shares_heads(module):
            raise Unsharded("attention over other layers' keys whose number of KV heads is not known")
        queries, keys = first(module, patterns.QUERIES), first(module, patterns.KEYS)
        if queries is None or keys is None:
            return heads
        head_dim = output_dims(module[queries]) // heads
        return max(1, output_dims(module[keys]) // head_dim)

    def fused(self, block: Block, name: str, split: Heads) -> None:
        source, heads, kv_heads = source_of(block.module), split.query.count, split.kv.count
        by_kv_head = (
            name in patterns.FUSED_BY_KV_HEAD
            or name == "query_key_value"
            and source in patterns.QUERY_KEY_VALUE_BY_KV_HEAD
        )
        if name == "query_key_value" and not by_kv_head and source not in patterns.QUERY_KEY_VALUE_IN_TURN:
            raise Unsharded(f"the order of queries, keys and values in {name} is not known for {source}")
        outputs = output_dims(block.module[name])
        if outputs % (heads + 2 * kv_heads):
            raise Unsharded(f"{name} has {outputs} outputs, which are not those of {heads} + 2 * {kv_heads} heads")
        if by_kv_head and split.replicated:
            raise Unsharded(f"{kv_heads} KV heads are fewer than {self.tp} ranks, and {name} has each with its queries")
        if by_kv_head:
            block.column(name, split.kv)
            return
        pieces = ((0, split.query), (heads, split.kv), (heads + kv_heads, split.kv))
        ranges = tuple(
            tuple((start + first, start + last) for start, units in pieces for first, last in units.ranges[rank])
            for rank in range(self.tp)
        )
        block.column(name, Units(ranges, heads + 2 * kv_heads))

    def heads(self, path: str, heads: int, kv_heads: int, output: nn.Module) -> Heads:
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
        return Heads(consecutive(sizes), Units(kv, kv_heads), sum(map(len, held)) > kv_heads, copied)

    def head_attributes(self, block: Block, split: Heads, width: int) -> None:
        """The numbers that the module's forward pass reads; `width` is that of all heads, before the output."""
        held, query, kv = vars(block.module), split.query.counts, split.kv.counts
        groups = tuple(q // k for q, k in zip(query, kv, strict=True))
        numbers = dict.fromkeys(patterns.QUERY_HEADS, query) | dict.fromkeys(patterns.GROUPS, groups)
        numbers |= dict.fromkeys(patterns.KV_HEADS, query if is_latent(block.module) else kv)
        for names, units in ((patterns.QUERY_SIZES, split.query), (patterns.KV_SIZES, split.kv)):
            for name in names:
                size = held.get(name)
                if type(size) is int and size % units.count == 0 and (units is split.kv or size == width):
                    numbers[name] = tuple(size // units.count * local for local in units.counts)
        for name, counts in numbers.items():
            if held.get(name) is not None:
                block.attributes[block.path, name] = counts

    def mlp(self, block: Block) -> None:
        module = block.module
        inputs, output = next((i, o) for i, o in patterns.MLPS if all(name in module for name in (*i, o)))
        if getattr(module, "activation_sparsity", 0):
            raise Unsharded("its activation looks at the whole hidden layer at once")
        hidden = self.hidden(block, inputs, output)
        for name, size in vars(module).items():
            if name in ("intermediate_size", "hidden_dim", "ffn_dim") and size == hidden.count:
                block.attributes[block.path, name] = hidden.counts
        block.finish(input_dims=input_dims_of(module[inputs[0]]))

    def hidden(self, block: Block, inputs: Sequence[str], output: str) -> Units:
        """Shards the hidden layer: equally if it can be, otherwise as equally as whole quantization groups allow."""
        layer = block.check_linear(output)
        width, multiple = input_dims_of(layer), quantization_unit(layer)
        shares = self.rank_shares
        if shares is None and width % (self.tp * multiple):
            shares = [1] * self.tp
        hidden = consecutive(split_sizes(join_path(block.path, output), width, self.tp, shares, multiple))
        for name in inputs:
            outputs = output_dims(block.check_linear(name))
            if outputs == width or outputs == 2 * width and name in patterns.GATE_UP_IN_TURN:
                block.column(name, hidden)
            elif outputs == 2 * width and name in patterns.GATE_THEN_UP:
                both = tuple(((start, stop), (width + start, width + stop)) for ((start, stop),) in hidden.ranges)
                block.column(name, Units(both, outputs))
            else:
                raise Unsharded(f"{name} has {outputs} outputs, but {output} {width} inputs")
        block.row(output, hidden)
        return hidden

    def switch(self, block: Block) -> None:
        inputs, output = patterns.SWITCHES[type(block.module).__name__]
        for name in (*inputs, output):
            if type(block.module.get(name)).__name__ not in SWITCH_LINEARS:
                raise Unsharded(f"experts whose {name} is {type(block.module.get(name)).__name__}")
        if self.ep > 1:
            self.whole_experts(block, (*inputs, output))
        else:
            self.hidden(block, inputs, output)
            # Their results are added up behind all of them, with those of adapters on them.
            block.roles = {block.path: "sum"}
        block.finish(input_dims=None)

    def whole_experts(self, block: Block, names: Sequence[str]) -> None:
        ranks = self.tp * self.ep
        try:
            experts = block.module[names[0]].weight.shape[0]
            placement = Placement(experts, ranks, expert_shares(self.rank_shares, self.ep))
        except InvalidArgument as error:
            raise InvalidArgument(f"experts of {block.path}: {error}") from error
        ranges = tuple(((held.start, held.stop),) for held in map(placement.local, range(ranks)))
        for name in names:
            for parameter, array in own_arrays(block.module[name]):
                block.add(name, parameter, array, "experts", 0, ranges)
        block.roles[block.path] = "experts"

    def mixture(self, block: Block) -> None:
        """Shards a mixture of experts. Its results are added up once, by mlx-lm's block itself if that has a group."""
        for name, child in children(block.module):
            part = Block(join_path(block.path, name), child)
            if type(child).__name__ in patterns.SWITCHES:
                self.switch(part)
            elif self.recognized(child) == self.mlp:
                self.mlp(part)
            elif name not in patterns.ROUTERS and child.parameters():
                raise Unsharded(f"what {name} does in {type(block.module).__name__} is not known")
            block.shards |= part.shards
            block.attributes |= part.attributes
        block.roles[block.path] = "group" if "sharding_group" in vars(block.module) else "sum"


def is_latent(module: nn.Module) -> bool:
    return any(name in module for name in ("kv_a_proj_with_mqa", *patterns.LATENT_HEADS))


def shares_heads(module: nn.Module) -> bool:
    """Whether attention, or what belongs to it, works with heads of another module."""
    has_keys = (
        is_latent(module) or first(module, (*patterns.FUSED, *patterns.FUSED_BY_KV_HEAD, *patterns.KEYS)) is not None
    )
    return not has_keys or source_of(module) in patterns.HEADS_ELSEWHERE


def expert_shares(rank_shares: Sequence[float] | None, ep: int) -> list[float] | None:
    """The shares of all ranks of the grid, from those of one row."""
    return None if rank_shares is None else [weight for _ in range(ep) for weight in rank_shares]
