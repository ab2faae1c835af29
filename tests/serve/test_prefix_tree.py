"""The prefix tree against plain sets of prefixes, with caches whose content tells which tokens they are of; and what it
holds, keeps and evicts in the cases that people have."""

import gc
from collections.abc import Sequence
from functools import partial
from typing import Any

import hypothesis.strategies as st
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

from mlxdist.serve.adapters import AdapterCache
from mlxdist.serve.cache_blocks import can_be_cut
from mlxdist.serve.memory import CacheMemory
from mlxdist.serve.prefix_tree import BLOCK, PrefixTree
from mlxdist.serve.quantized_cache import QuantizedKVCache

MODULUS = 2**61 - 1
WINDOW = 4


def prefixes(adapter: int, tokens: Sequence[int]) -> list[int]:
    """A number for each prefix, the empty one first, that no other prefix has."""
    found = [adapter + 1]
    for token in tokens:
        found.append((found[-1] * 1_000_003 + token + 1) % MODULUS)
    return found


def content(adapter: int, tokens: Sequence[int], layer: int, heads: int, size: int) -> mx.array:
    """What a model would compute: (1, heads, tokens, size), where each token's rows depend on its whole prefix."""
    rows = np.array([each % (1 << 20) for each in prefixes(adapter, tokens)[1:]], np.float32)
    rows = rows[None, :, None] + 1000 * layer + np.arange(heads, dtype=np.float32)[:, None, None]
    return mx.array(np.broadcast_to(rows[None], (1, heads, len(tokens), size)))


def new_caches(kind: str) -> list[Any]:
    """Those of a model before its first token."""
    layers = {
        "plain": [KVCache(), KVCache(), KVCache()],
        "quantized": [QuantizedKVCache(32, 8), KVCache()],
        "hybrid": [ArraysCache(2), KVCache(), CacheList(KVCache(), RotatingKVCache(WINDOW))],
        "sliding window": [RotatingKVCache(WINDOW), KVCache(), RotatingKVCache(WINDOW)],
        "quantized hybrid": [ArraysCache(1), QuantizedKVCache(32, 8)],
        "recurrent": [ArraysCache(2)],
    }
    return [*layers[kind], AdapterCache([0])]


def computed(kind: str, adapter: int, tokens: Sequence[int], heads: int = 1) -> list[Any]:
    """Caches after these tokens. Of layers that another stage has, one has no keys and one has keys of width zero."""
    caches = new_caches(kind)
    if not len(tokens):
        return caches
    caches[-1].adapters = [adapter]
    for layer, cache in enumerate(_flat(caches[:-1])):
        made = partial(content, adapter, tokens, layer, heads)
        if isinstance(cache, ArraysCache):
            for place in range(len(cache.cache)):
                cache[place] = made(2)[:, :, -1] + place
        elif isinstance(cache, RotatingKVCache):
            if kind == "hybrid" or layer == 0:
                cache.keys, cache.values = made(2)[..., -WINDOW:, :], -made(2)[..., -WINDOW:, :]
                cache.offset, cache._idx = len(tokens), min(WINDOW, len(tokens))
        elif kind != "plain" or layer != 1:
            size = 0 if kind == "plain" and layer == 2 else 32
            cache.update_and_fetch(made(size), -made(size))
    return caches


def _flat(caches: Sequence[Any]) -> list[Any]:
    """The caches, of lists those in them; but quantized ones as they are."""
    found = []
    for cache in caches:
        is_list = isinstance(cache, CacheList) and not isinstance(cache, QuantizedKVCache)
        found += cache.caches if is_list else [cache]
    return found


def require_same(found: Sequence[Any], expected: Sequence[Any]) -> None:
    """All that a model reads from caches, of the same classes."""
    for one, other in zip(_flat(found[:-1]), _flat(expected[:-1]), strict=True):
        assert type(one) is type(other)
        if isinstance(other, QuantizedKVCache):
            pairs = list(zip(one.caches, other.caches, strict=True))
        else:
            pairs = [(one, other)]
        for have, want in pairs:
            if isinstance(want, ArraysCache):
                assert [x if x is None else x.tolist() for x in have.cache] == [
                    x if x is None else x.tolist() for x in want.cache
                ]
                continue
            assert have.empty() == want.empty()
            if not want.empty():
                assert have.offset == want.offset
                for x, y in zip(have.keys_and_values(), want.keys_and_values()):
                    assert x.dtype == y.dtype and mx.array_equal(x, y)


def use_up(caches: Sequence[Any], heads: int) -> None:
    """Goes on as a request does, which writes into its caches."""
    for cache in _flat(caches[:-1]):
        if isinstance(cache, ArraysCache):
            for place in range(len(cache.cache)):
                cache[place] = None
        elif not cache.empty():
            size = 0 if not isinstance(cache, QuantizedKVCache) and cache.keys.shape[-1] == 0 else 32
            size = 2 if isinstance(cache, RotatingKVCache) else size
            if isinstance(cache, KVCache):
                cache.keys[..., :1, :] = mx.array(-1.0)
            mx.eval(cache.update_and_fetch(*[mx.full((1, heads, 1, size), -7.0)] * 2))


def nodes(tree: PrefixTree) -> list[tuple[int, list[int], Any]]:
    """All nodes, each with its adapter and the tokens to its end."""
    found: list[tuple[int, list[int], Any]] = []
    pending = [(adapter, [], root) for adapter, root in tree._roots.items()]
    while pending:
        adapter, before, node = pending.pop()
        for first, child in node.children.items():
            tokens = [*before, *child.tokens.tolist()]
            assert child.parent is node and child.tokens[0] == first and child.stop == len(tokens)
            found.append((adapter, tokens, child))
            pending.append((adapter, tokens, child))
    return found


def active_memory() -> int:
    mx.synchronize()
    gc.collect()
    return mx.get_active_memory()


class Reference:
    """What is stored: the numbers of all prefixes, each with that of the prefix before it; and of those with states."""

    def __init__(self) -> None:
        self.parents: dict[int, int] = {}
        self.ends: set[int] = set()

    def with_sequence(self, adapter: int, tokens: Sequence[int], has_states: bool) -> "Reference":
        made, ids = Reference(), prefixes(adapter, tokens)
        made.parents = self.parents | dict(zip(ids[1:], ids))
        made.ends = self.ends | ({ids[-1]} if has_states and len(tokens) else set())
        return made

    def longest(self, adapter: int, tokens: Sequence[int], has_states: bool) -> int:
        stored = self.ends if has_states else self.parents
        return max((i for i, each in enumerate(prefixes(adapter, tokens)) if each in stored), default=0)

    @property
    def sequences(self) -> int:
        return len(self.parents.keys() - set(self.parents.values()))


def reference_of(tree: PrefixTree) -> Reference:
    found = Reference()
    for adapter, tokens, node in nodes(tree):
        ids = prefixes(adapter, tokens)
        own = dict(zip(ids[node.start + 1 :], ids[node.start :]))
        assert not own.keys() & found.parents.keys(), "a prefix is held twice"
        found.parents |= own
        if node.states is not None:
            found.ends.add(ids[-1])
    return found


def shape_of(tree: PrefixTree) -> list[tuple[object, ...]]:
    """What ranks have in common."""
    return sorted((a, tuple(t), n.stop, n.used, n.states is not None) for a, t, n in nodes(tree))


# Tokens that are as large as a vocabulary has them, in runs that are shorter and longer than a block.
WORDS = st.tuples(st.sampled_from([0, 7, 2**32 - 1]), st.sampled_from([1, 1, 2, 3, 40, BLOCK - 1, BLOCK + 1]))
# A sequence as one of those before, up to a place, and words after it.
SEQUENCES = st.tuples(st.integers(0, 7), st.sampled_from([0.0, 0.5, 0.9, 1.0, 1.0, 1.0]), st.lists(WORDS, max_size=2))


class TreeMachine(RuleBasedStateMachine):
    """Two ranks' trees, of 1 and 3 heads, and a reference of what is stored."""

    kind = "plain"

    @initialize(
        most_sequences=st.sampled_from([None, None, None, 1, 3]),
        most_tokens=st.sampled_from([None, None, None, 20, 1500]),
        costs=st.sampled_from([(1.0, 0.0), (64.0, 4096.0), (0.0, 64.0)]),
    )
    def begin(self, most_sequences, most_tokens, costs):
        self.before = active_memory()
        self.is_cut = can_be_cut(new_caches(self.kind))
        self.trees = [PrefixTree(self.is_cut, most_sequences, most_tokens, costs) for _ in range(2)]
        self.most = most_sequences, most_tokens
        self.memory, self.reference = CacheMemory(), Reference()
        self.known: list[tuple[int, list[int]]] = [(0, []), (0, []), (65_535, [])]

    def fits(self, reference: Reference) -> bool:
        """Whether all limits hold for it."""
        counts = reference.sequences, len(reference.parents)
        return all(most is None or count <= most for count, most in zip(counts, self.most)) and self.memory.fits(
            len(reference.parents), len(reference.ends)
        )

    def sequence(self, drawn: tuple[int, float, list[tuple[int, int]]]) -> tuple[int, list[int]]:
        earlier, share, words = drawn
        adapter, before = self.known[-1 - earlier % len(self.known)]
        return adapter, before[: int(share * len(before))] + [token for token, count in words for _ in range(count)]

    @rule(drawn=SEQUENCES, beyond=st.sampled_from([0, 0, 3, 300]), steps=st.sampled_from([0, 1, 5000]))
    def request(self, drawn, beyond, steps):
        """Finds what there is of a sequence, and keeps all of it. With ``beyond``, the caches have more tokens, as
        after a stop word, where they can be cut."""
        adapter, tokens = self.sequence(drawn)
        self.fetch(adapter, tokens)
        self.known.append((adapter, tokens))
        for heads, tree in zip((1, 3), self.trees):
            tree.step += steps
            tree.insert(adapter, tokens, computed(self.kind, adapter, tokens + [3] * (beyond * self.is_cut), heads))
        wanted = self.reference.with_sequence(adapter, tokens, not self.is_cut)
        fits_alone = self.fits(Reference().with_sequence(adapter, tokens, not self.is_cut))
        found = reference_of(self.trees[0])
        assert found.parents.keys() <= wanted.parents.keys() and found.ends <= wanted.ends
        if self.fits(wanted):
            assert found.parents == wanted.parents and found.ends == wanted.ends
        elif not fits_alone:
            assert self.reference.parents.keys() <= found.parents.keys() and self.reference.ends == found.ends
        self.reference = found

    @rule(drawn=SEQUENCES)
    def another_prompt(self, drawn):
        self.fetch(*self.sequence(drawn))

    def fetch(self, adapter: int, tokens: list[int]) -> None:
        expected = self.reference.longest(adapter, tokens, not self.is_cut)
        for heads, tree in zip((1, 3), self.trees):
            caches = new_caches(self.kind)
            assert tree.fetch(adapter, tokens, caches) == expected
            require_same(caches, computed(self.kind, adapter, tokens[:expected], heads))
            use_up(caches, heads)

    @rule(share=st.sampled_from([0.1, 0.5, 0.9]), states=st.sampled_from([0.0, 1.0, 50.0, 4000.0]), stays=st.booleans())
    def limit(self, share, states, stays):
        """As after an admission, to a share of what there is; the ranks' shares and states are unequal."""
        left = share * (len(self.reference.parents) + states * len(self.reference.ends))
        self.memory = CacheMemory((left, left * 2), (1.0, 3.0), (states, states / 2))
        for tree in self.trees:
            tree.make_room(self.memory.fits)
        found = reference_of(self.trees[0])
        if self.fits(self.reference):
            assert found.parents == self.reference.parents and found.ends == self.reference.ends
        assert found.parents.keys() <= self.reference.parents.keys() and found.ends <= self.reference.ends
        assert self.fits(found)
        self.reference = found
        if not stays:
            self.memory = CacheMemory()
            for tree in self.trees:
                tree.make_room(self.memory.fits)

    @rule()
    def evict_all(self):
        for tree in self.trees:
            tree.make_room(lambda tokens, states: tokens <= 0)
            assert (len(tree), tree.tokens, tree.states, nodes(tree)) == (0, 0, 0, [])
            tree.make_room(self.memory.fits)
        self.reference = Reference()

    @invariant()
    def all_is_counted_once(self):
        if not hasattr(self, "trees"):
            return
        for tree in self.trees:
            found = reference_of(tree)
            assert found.parents == self.reference.parents and found.ends == self.reference.ends
            assert tree.tokens == len(found.parents) and tree.states == len(found.ends)
            assert len(tree) == found.sequences
            for _, _, node in nodes(tree):
                assert len(node.tokens) <= BLOCK
                assert (node.children or self.is_cut or node.states is not None) and (
                    node.states is None or not self.is_cut
                )
                arrays = [array for part in node.block if part is not None for array in part]
                assert all(array.shape[-2] == len(node.tokens) for array in arrays)
        assert self.fits(self.reference)
        assert shape_of(self.trees[0]) == shape_of(self.trees[1])

    def teardown(self):
        if hasattr(self, "trees"):
            self.evict_all()
            assert active_memory() == self.before


@pytest.mark.parametrize(
    "kind",
    [
        "plain",
        *(pytest.param(kind, marks=pytest.mark.long) for kind in ("hybrid", "quantized", "sliding window")),
        *(pytest.param(kind, marks=pytest.mark.long) for kind in ("quantized hybrid", "recurrent")),
    ],
)
def test_random_operations_against_sets_of_prefixes(kind):
    machine = type("Machine", (TreeMachine,), {"kind": kind})
    # To shrink an example takes minutes: the step that fails, and what the trees hold, say enough.
    phases = [Phase.explicit, Phase.reuse, Phase.generate]
    run_state_machine_as_test(machine, settings=settings(max_examples=20, stateful_step_count=25, phases=phases))


def stored(tree: PrefixTree, *sequences: list[int], kind: str = "plain") -> None:
    """Inserts them, each in a step of its own."""
    for tokens in sequences:
        tree.step += 1
        tree.insert(0, tokens, computed(kind, 0, tokens))


def found(tree: PrefixTree, tokens: list[int], kind: str = "plain") -> int:
    """How many of the tokens the tree has, which are right."""
    caches = new_caches(kind)
    length = tree.fetch(0, tokens, caches)
    require_same(caches, computed(kind, 0, tokens[:length]))
    return length


def chat(number: int, tokens: int) -> list[int]:
    """A sequence that begins like no other."""
    return [number, *range(1000, 999 + tokens)]


@pytest.mark.parametrize("heads", [1, 2])
def test_fifty_conversations_hold_their_system_prompt_once(heads):
    tree, system, before = PrefixTree(True), chat(0, 8000), active_memory()
    own = [300 + 7 * number for number in range(50)]
    for number, tokens in enumerate(own):
        tree.step += 1
        tokens = system + chat(number + 1, tokens)
        caches: list[Any] = [KVCache()]
        assert tree.fetch(0, tokens, caches) == (8000 if number else 0)
        rows = content(0, tokens[caches[0].offset :], 0, heads, 32)
        caches[0].update_and_fetch(rows, -rows)
        tree.insert(0, tokens, caches)
    assert tree.tokens == 8000 + sum(own) and len(tree) == 50
    del caches, rows
    needed = tree.tokens * heads * 32 * 2 * 4
    assert needed <= active_memory() - before <= 1.03 * needed
    tree.make_room(lambda tokens, states: tokens <= 8000)
    assert active_memory() - before <= 1.03 * 8000 * heads * 32 * 2 * 4
    assert tree.tokens == tree.fetch(0, system, [KVCache()]) == 8000


@pytest.mark.parametrize("limit", [32_768, 105_000, None])
def test_ten_short_chats_and_then_one_of_100_000_tokens(limit):
    """It takes the room of what costs less to compute, but of nothing where it does not fit itself."""
    tree, short, long = PrefixTree(True, max_tokens=limit), [chat(n, 1000) for n in range(10)], chat(99, 100_000)
    stored(tree, *short, long)
    kept = [found(tree, tokens) for tokens in short]
    assert found(tree, long) == (22_768 if limit == 32_768 else 100_000)
    if limit == 105_000:
        assert limit - BLOCK < tree.tokens == 100_000 + sum(kept) <= limit
    else:
        assert kept == [1000] * 10


@pytest.mark.parametrize("limit", [32_768, 105_000, None])
def test_one_of_100_000_tokens_and_then_ten_short_chats(limit):
    """They are kept, or as many as cost less than it."""
    tree, short, long = PrefixTree(True, max_tokens=limit), [chat(n, 1000) for n in range(10)], chat(99, 100_000)
    stored(tree, long, *short)
    kept = [found(tree, tokens) for tokens in short]
    rest = found(tree, long)
    assert tree.tokens == rest + sum(kept)
    if limit is None:
        assert (rest, kept) == (100_000, [1000] * 10)
    else:
        assert limit - BLOCK < tree.tokens <= limit


def test_a_long_conversation_that_is_used_no_more_gives_way_to_short_ones():
    tree, short, long = PrefixTree(True, max_tokens=105_000), [chat(n, 1000) for n in range(10)], chat(99, 100_000)
    stored(tree, long)
    tree.step += 20_000
    stored(tree, *short)
    assert [found(tree, tokens) for tokens in short] == [1000] * 10
    assert 95_000 - BLOCK < found(tree, long) <= 95_000


def test_what_was_used_recently_is_kept():
    tree, chats = PrefixTree(True, max_tokens=2500), [chat(number, 1000) for number in range(3)]
    stored(tree, *chats[:2])
    tree.step += 5000
    assert found(tree, chats[0]) == 1000
    tree.step += 5000
    stored(tree, chats[2])
    assert found(tree, chats[0]) == found(tree, chats[2]) == 1000 and found(tree, chats[1]) < 1000


def test_what_costs_more_to_compute_is_kept_over_what_was_used_as_long_ago():
    """The same number of tokens, after 20,000 others and after none."""
    start = chat(0, 20_000)
    after, alone = start + chat(1, BLOCK), chat(2, BLOCK)
    for order in ((after, alone), (alone, after)):
        tree = PrefixTree(True)
        stored(tree, start, *order)
        tree.make_room(lambda tokens, states: tokens <= 20_000 + BLOCK)
        assert (found(tree, after), found(tree, alone)) == (20_000 + BLOCK, 0)


@pytest.mark.parametrize("kind", ["plain", "hybrid"])
@pytest.mark.parametrize("sequences, tokens", [(None, 100), (1, 100), (2, 100)])
def test_a_sequence_that_does_not_fit_into_the_whole_tree_evicts_nothing(kind, sequences, tokens):
    """It is kept as far as there is room; with states, which hold at its end alone, not at all."""
    for count in range(1, 1 + (sequences or 3)):
        tree, chats = PrefixTree(kind == "plain", sequences, tokens), [chat(number, 20) for number in range(count)]
        stored(tree, *chats, chat(9, 101), kind=kind)
        assert [found(tree, each, kind) for each in chats] == [20] * count
        has_room = kind == "plain" and count != sequences
        assert found(tree, chat(9, 101), kind) == (tokens - 20 * count) * has_room
        stored(tree, [*chats[0], *chat(9, 100)], kind=kind)  # it goes on from one that is there
        assert [found(tree, each, kind) for each in chats] == [20] * count
        assert tree.tokens == (100 if kind == "plain" else 20 * count)


@pytest.mark.parametrize("place", [1, 10, BLOCK // 2])
def test_a_block_that_was_split_keeps_no_memory_of_the_whole(place):
    """A slice of an array would: what is behind the place is evicted, and the memory is back."""
    tree, whole, before = PrefixTree(True), chat(0, BLOCK), active_memory()
    stored(tree, whole, whole[:place] + chat(1, 5))
    assert tree.tokens == BLOCK + 5
    used = active_memory() - before
    tree.make_room(lambda tokens, states: tokens <= place)
    assert tree.tokens == place == found(tree, whole)
    # MLX leaves an array in a buffer that has up to 16 KiB more than it needs.
    of_token = sum(array.nbytes for array in _arrays(computed("plain", 0, [1]))) // 256
    assert active_memory() - before <= place * of_token + 2 * (16 << 10) < used


def _arrays(caches: Sequence[Any]) -> list[mx.array]:
    return [array for cache in caches[:-1] if cache.keys is not None for array in (cache.keys, cache.values)]


def test_states_between_which_few_tokens_lie_are_evicted_first():
    """Without them, few tokens are computed again."""
    tree, tokens = PrefixTree(False, costs=(1.0, 100.0)), chat(0, 3000)
    for end in (1000, 1004, 2000, 3000):
        stored(tree, tokens[:end], kind="hybrid")
    assert (tree.tokens, tree.states, len(tree)) == (3000, 4, 1)
    tree.make_room(lambda tokens, states: tokens + 100 * states <= 3300)
    assert (tree.tokens, tree.states) == (3000, 3)
    assert [found(tree, tokens[:end], "hybrid") for end in (1000, 1004, 1999, 2000, 3000)] == [
        1000,
        1000,
        1000,
        2000,
        3000,
    ]
