"""The keys and values of prompts and answers, for later prompts that begin alike: a radix tree over tokens.

A node holds the keys and values of the tokens between its parent and itself, so that a prefix which several sequences
share is held once (SGLang's RadixAttention; Zheng et al. 2023, arXiv:2312.07104). mlx-lm's attention takes contiguous
keys and values, so a running request has a copy of its own: to find a prefix is one concatenation a layer, and an
insertion copies only what is new. Models with states that cannot be cut (cache_blocks.py) have states at the ends of
some nodes, and go on from one of those.

With a disk (prefix_disk.py) every node is written, too, and a node that memory has no room for stays in the tree
without its arrays, until a prompt needs them.

Every rank has a tree of its shards. What a tree does depends on tokens and on the numbers of steps alone, and on what
the ranks have compared, so that all of them find, keep and evict the same.
"""

import heapq
import io
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import mlx.core as mx
import numpy as np

from .cache_blocks import Block, States, copied_states, cut, fill, packed, part_of, unpacked
from .prefix_disk import PrefixDisk, StoredNode, extended, hash_of

__all__ = ["PrefixTree", "Reading"]

BLOCK = 512  # tokens of a node, at most: what eviction frees at a time
_MAX_READ = 16  # nodes: memory has their files beside their arrays

# What a token costs to compute, in the unit of the first one: attention costs as much as all else about here.
_ATTENTION_TOKENS = 1 << 15
# Steps within which a later use says little more: some seconds of decoding.
_RECENT_STEPS = 256


class _Node:
    """Tokens after those of ``parent``, with their keys and values.

    Attributes:
        block: the keys and values; None where only the disk has them.
        hash: that of all tokens up to its end, which names its file; a split does not change it.
        states: those after the last token, in memory.
        has_states: whether memory or the disk has states.
        write: the number of the write of its file; 0 without a file.
        is_stored: whether every rank has its file, of ``file_bytes`` by the tree's ``costs``.
    """

    __slots__ = (
        "adapter",
        "block",
        "children",
        "file_bytes",
        "has_states",
        "hash",
        "is_stored",
        "number",
        "parent",
        "states",
        "stop",
        "tokens",
        "used",
        "write",
    )

    def __init__(
        self, parent: "_Node | None", adapter: int, tokens: np.ndarray, block: Block | None, number: int, used: int
    ) -> None:
        self.parent, self.adapter, self.tokens, self.block, self.number = parent, adapter, tokens, block, number
        self.used = used
        self.stop: int = len(tokens) + (0 if parent is None else parent.stop)
        self.children: dict[int, _Node] = {}  # by their first tokens
        self.states: States | None = None
        self.has_states = self.is_stored = False
        self.write, self.file_bytes = 0, 0.0
        self.hash: Any = hash_of(adapter) if parent is None else extended(parent.hash, tokens)

    @property
    def start(self) -> int:
        return self.stop - len(self.tokens)

    @property
    def key(self) -> str:
        found: str = self.hash.hexdigest()
        return found

    @property
    def is_leaf(self) -> bool:
        """Whether memory has this node and none after it."""
        return self.block is not None and all(child.block is None for child in self.children.values())


class Reading:
    """Nodes that are read from the disk for a prompt, which passes ``path``."""

    def __init__(
        self, nodes: list[_Node], path: list[_Node], files: "Future[list[tuple[bytes, dict[str, object]]]]"
    ) -> None:
        self.nodes, self.path, self.files = nodes, path, files

    def count(self, wait: bool) -> int:
        """How many of them this rank has read, one after the other; -1 while it reads."""
        return len(self.files.result()) if wait or self.files.done() else -1


class PrefixTree:
    """The prefix cache of this rank.

    Args:
        can_be_cut: whether the model's caches have no states.
        max_sequences, max_tokens: what memory holds at most, beside the limit of :meth:`make_room`; None for any.
        costs: bytes of a token and of the states after one; the same on all ranks.

    Attributes:
        step: the number of the current step, by which what has been used recently is known.
        tokens: the number of tokens of all nodes in memory. Any thread may read it.
        states: the number of nodes in memory with states.
        disk_bytes: bytes of the files, by ``costs``.
    """

    def __init__(
        self,
        can_be_cut: bool,
        max_sequences: int | None = None,
        max_tokens: int | None = None,
        costs: tuple[float, float] = (1.0, 0.0),
    ) -> None:
        self.can_be_cut = can_be_cut
        self._max_sequences, self._max_tokens, self._costs = max_sequences, max_tokens, costs
        self._fits: Callable[[int, int], bool] = lambda tokens, states: True
        self._roots: dict[int, _Node] = {}
        self._leaves: dict[_Node, None] = {}  # of memory
        self._numbers = itertools.count()
        self._disk: PrefixDisk | None = None
        self._writes: deque[tuple[int, _Node]] = deque()  # whose ends the ranks have not compared
        self.step = self.tokens = self.states = 0
        self.disk_bytes = 0.0

    def __len__(self) -> int:
        """The number of sequences in memory of which none begins another."""
        return len(self._leaves)

    def fetch(self, adapter: int, tokens: Sequence[int], caches: list[Any]) -> int:
        """Puts the longest prefix of ``tokens`` in memory into ``caches``, which are new. Returns its length."""
        path, length = self._walk(adapter, np.asarray(tokens, np.uint32))
        path = [*itertools.takewhile(lambda node: node.block is not None, path)]
        if not self.can_be_cut:
            self._end_with_states(path, length, lambda node: node.states is not None)
        length = min(length, path[-1].stop if path else 0)
        if length:
            fill(caches, [node.block for node in path if node.block is not None], length, path[-1].states or ())
        self._touch(path)
        return length

    def insert(self, adapter: int, tokens: Sequence[int], caches: Sequence[Any]) -> None:
        """Keeps a prefix that has been computed. Takes the keys and values out of ``caches``.

        What would not fit into an empty tree is kept as far as there is room, and evicts nothing: the next request of
        its conversation has to compute the rest in any case.
        """
        array = np.array(tokens, np.uint32)
        path, found = self._walk(adapter, array)
        is_longer = bool(path) and path[-1] in self._leaves and path[-1].stop == found
        end = self._end(len(array), found, len(self._leaves) + (not is_longer))
        if end == 0 or (end < len(array) and not self.can_be_cut):
            return
        if path and path[-1].stop > found and (found < end or not self.can_be_cut or path[-1].block is None):
            path[-1] = self._split(path[-1], found)
        last = path[-1] if path else self._root(adapter)
        states = None if self.can_be_cut or (last.states is not None and last.stop == end) else copied_states(caches)
        absent = [node for node in path if node.block is None]
        borders = [*range(found, end, BLOCK), end]
        places = [slice(node.start, node.stop) for node in absent] + [*map(slice, borders, borders[1:])]
        blocks = cut(caches, places)
        for node, block in zip(absent, blocks):
            self._bring(node, block, None)
        changed = [node for node in absent if not node.write]  # halves of nodes that the disk has
        for place, block in zip(places[len(absent) :], blocks[len(absent) :]):
            last = self._new(last, array[place], block)
            path.append(last)
            changed.append(last)
        if states is not None and path:
            if not last.has_states and last not in changed:
                changed.append(last)
            last.states, last.has_states = states, True
            self.states += 1
        self._touch(path)
        self._write(changed)
        self._evict()

    def make_room(self, fits: Callable[[int, int], bool]) -> None:
        """Evicts until ``fits(tokens, states)``, and keeps to that in each later :meth:`insert`."""
        self._fits = fits
        self._evict()

    def open(self, disk: PrefixDisk, stored: Sequence[StoredNode]) -> int:
        """Keeps nodes on a disk, too, and begins with those that it has, parents first. Returns how many they are."""
        self._disk = disk
        nodes: dict[str, _Node] = {}
        for one in stored:
            parent = nodes.get(one.parent) if one.start else self._root(one.adapter)
            tokens = np.array(one.tokens, np.uint32)
            # Of a node that was split while the disk alone had it, the file has all tokens; shorter ones come first.
            while parent is not None and (above := parent.children.get(int(tokens[0]))) is not None:
                is_behind = len(above.tokens) < len(tokens) and (above.tokens == tokens[: len(above.tokens)]).all()
                parent, tokens = (above, tokens[len(above.tokens) :]) if is_behind else (None, tokens)
            if parent is None:
                continue
            node = _Node(parent, one.adapter, tokens, None, next(self._numbers), self.step)
            parent.children[int(tokens[0])] = nodes[one.key] = node
            node.write, node.is_stored, node.has_states = -1, True, one.has_states
            self._count_file(node)
        self._evict_files()
        disk.keep(nodes)
        return len(nodes)

    def read(self, adapter: int, tokens: Sequence[int]) -> Reading | None:
        """Begins to read what the disk alone has of the longest prefix of ``tokens``, 8,192 of them at most.

        Returns None if memory has all of it.
        """
        if self._disk is None:
            return None
        path, length = self._walk(adapter, np.asarray(tokens, np.uint32))
        if not self.can_be_cut:
            self._end_with_states(path, length, lambda node: node.has_states)
        absent = [node for node in path if node.block is None]
        if path and path[-1].has_states and path[-1].states is None and path[-1].block is not None:
            absent.append(path[-1])
        absent = absent[:_MAX_READ]
        return Reading(absent, path, self._disk.read([node.key for node in absent])) if absent else None

    def finish(self, reading: Reading, count: int) -> int:
        """Takes the first ``count`` nodes, which all ranks have read. The next one is removed on all of them.

        Returns the number of tokens that were read.
        """
        for node, (data, scalars) in zip(reading.nodes[:count], reading.files.result()):
            if node.is_stored and (node.block is None or node.states is None) and self._has_parent(node):
                arrays: Any = mx.load(io.BytesIO(data), format="safetensors")  # a dict
                mx.eval(arrays)  # the thread that writes cannot
                block, states = unpacked(arrays, scalars)
                if any(pair and pair[0].shape[-2] > len(node.tokens) for pair in block):  # it has been split since
                    block = part_of(block, slice(-len(node.tokens), None))
                self._bring(node, block, states)
                node.has_states = node.states is not None
        for node in reading.nodes[count : count + 1]:
            if node.is_stored and node.block is None:
                self._forget(node)
            elif node.is_stored and node.parent is not None:
                self._remove_file(node)
        self._touch(reading.path)
        self._evict(is_read=True)
        return sum(len(node.tokens) for node in reading.nodes)

    def progress(self) -> tuple[int, int]:
        """Returns what :meth:`compared` takes of each rank."""
        return (0, 0) if self._disk is None else self._disk.progress()

    def compared(self, done: int, failed: bool) -> None:
        """Takes how many writes all ranks have done, and whether the next one has failed on one of them."""
        while self._writes and self._writes[0][0] <= done:
            number, node = self._writes.popleft()
            if node.write == number:
                node.is_stored = True
        if failed and self._writes and self._disk is not None:
            number, node = self._writes.popleft()
            if node.write == number:
                self._remove_file(node)
            self._disk.skip(number)

    def _end(self, length: int, found: int, sequences: int) -> int:
        """How many of ``length`` tokens to keep, of which ``found`` are there; with more, there are ``sequences``."""
        states = int(not self.can_be_cut)
        if self._is_within(length, states, 1):
            return length
        low, high = found, length  # the largest number that fits beside all others
        while low < high:
            middle = (low + high + 1) // 2
            if self._is_within(self.tokens + middle - found, self.states + states, sequences):
                low = middle
            else:
                high = middle - 1
        return low

    def _is_within(self, tokens: int, states: int, sequences: int) -> bool:
        return (
            (self._max_sequences is None or sequences <= self._max_sequences)
            and (self._max_tokens is None or tokens <= self._max_tokens)
            and self._fits(tokens, states)
        )

    def _walk(self, adapter: int, tokens: np.ndarray) -> tuple[list[_Node], int]:
        """The nodes that ``tokens`` pass, the last one perhaps not to its end; and how many of the tokens they have."""
        node, path, found = self._roots.get(adapter), [], 0
        while node is not None and found < len(tokens):
            node = node.children.get(int(tokens[found]))
            if node is not None:
                path.append(node)
                part = tokens[found : found + len(node.tokens)]
                differing = np.flatnonzero(node.tokens[: len(part)] != part)
                found += int(differing[0]) if len(differing) else len(part)
                if found < node.stop:
                    break
        return path, found

    def _end_with_states(self, path: list[_Node], length: int, has: Callable[[_Node], bool]) -> None:
        """Shortens the path of ``length`` tokens to the last node that ends within them and ``has`` states."""
        if path and path[-1].stop > length:
            path.pop()
        while path and not has(path[-1]):
            path.pop()

    def _root(self, adapter: int) -> _Node:
        if adapter not in self._roots:
            self._roots[adapter] = _Node(None, adapter, np.zeros(0, np.uint32), (), next(self._numbers), 0)
        return self._roots[adapter]

    def _new(self, parent: _Node, tokens: np.ndarray, block: Block) -> _Node:
        node = _Node(parent, parent.adapter, tokens.copy(), None, next(self._numbers), self.step)
        parent.children[int(tokens[0])] = node
        self._bring(node, block, None)
        return node

    def _bring(self, node: _Node, block: Block, states: States | None) -> None:
        """Puts the arrays of a node into memory, which has those of its parent."""
        assert node.parent is not None and all(pair is None or pair[0].shape[-2] == len(node.tokens) for pair in block)
        if node.block is None:
            node.block = block
            self.tokens += len(node.tokens)
            self._leaves.pop(node.parent, None)
            if node.is_leaf:
                self._leaves[node] = None
        if states and node.states is None:
            node.states = states
            self.states += 1

    def _split(self, node: _Node, place: int) -> _Node:
        """Makes two nodes of one. Returns the first, which ends at ``place``.

        Where only the disk has the node, its file becomes that of the second; the first has no arrays yet.
        """
        assert node.parent is not None and node.start < place < node.stop
        length, first, number = place - node.start, None, next(self._numbers)
        if node.block is not None:
            first, node.block = part_of(node.block, slice(length)), part_of(node.block, slice(length, None))
        upper = _Node(node.parent, node.adapter, node.tokens[:length].copy(), first, number, node.used)
        node.parent.children[int(upper.tokens[0])] = upper
        node.parent, node.tokens = upper, node.tokens[length:].copy()
        upper.children[int(node.tokens[0])] = node
        if node.block is not None:  # where the disk alone has its states, its file stays, with more tokens than it has
            self._write([upper] if node.has_states and node.states is None else [upper, node])
        return upper

    def _touch(self, path: Iterable[_Node]) -> None:
        for node in path:
            node.used = self.step

    def _has_parent(self, node: _Node) -> bool:
        """Whether memory has the parent of a node, and the tree the node."""
        return node.parent is not None and node.parent.block is not None

    def _evict(self, is_read: bool = False) -> None:
        """Removes what is worth the least from memory, until the limits hold: ends of sequences, and states.

        ``is_read``: not what this step has used, which is about to be fetched.
        """

        def is_within() -> bool:
            return self._is_within(self.tokens, self.states, len(self._leaves))

        if is_within():
            return
        kept = self.step if is_read else -1
        old = (node for node in self._candidates() if node.used != kept)
        candidates = [(self._worth(node, self._held(node)), node.number, node) for node in old]
        heapq.heapify(candidates)
        while candidates and not is_within():
            _, _, node = heapq.heappop(candidates)
            if not node.is_leaf:
                self._drop_states(node)
                if node.write and not node.is_stored:
                    self._write([node])  # without the states, which the write that is due would keep
                continue
            if node.children and node.write and not node.is_stored:
                continue  # what the disk has behind it needs its file, which is due
            parent = self._drop(node)
            while parent.is_leaf and parent.parent is not None and not (parent.children or self._is_useful(parent)):
                parent = self._drop(parent)
            # One with states is a candidate since the start.
            if parent.is_leaf and parent.parent is not None and parent.states is None and parent.used != kept:
                heapq.heappush(candidates, (self._worth(parent, self._held(parent)), parent.number, parent))

    def _candidates(self) -> Iterator[_Node]:
        yield from self._leaves
        if not self.can_be_cut:
            yield from (node for node in self._nodes() if node.states is not None and not node.is_leaf)

    def _nodes(self) -> Iterator[_Node]:
        pending = list(self._roots.values())
        while pending:
            node = pending.pop()
            pending += node.children.values()
            if node.parent is not None:
                yield node

    def _is_useful(self, node: _Node) -> bool:
        """Whether a request could go on from a node without children."""
        return self.can_be_cut or node.has_states

    def _held(self, node: _Node) -> float:
        """Bytes that eviction from memory frees: of a leaf, or of states within a sequence."""
        of_token, of_states = self._costs
        return (len(node.tokens) * of_token if node.is_leaf else 0) + (of_states if node.states is not None else 0)

    def _worth(self, node: _Node, held: float) -> float:
        """Returns what the node costs to compute again, for a byte of ``held``; less the longer it has not been used.

        Without the states of a node, all tokens since the last states before it are computed again.
        """
        start, above = node.start, node.parent
        while not self.can_be_cut and above is not None and not above.has_states and above.parent is not None:
            start, above = above.start, above.parent
        cost = node.stop - start + (node.stop**2 - start**2) / (2 * _ATTENTION_TOKENS)
        return cost / max(held, 1e-9) / (self.step - node.used + _RECENT_STEPS)

    def _drop(self, node: _Node) -> _Node:
        """Removes a leaf from memory, and from the tree where the disk does not have it. Returns its parent."""
        parent = node.parent
        assert parent is not None and node.is_leaf
        self._drop_states(node)
        node.block = None
        self.tokens -= len(node.tokens)
        del self._leaves[node]
        if parent.is_leaf and parent.parent is not None:
            self._leaves[parent] = None
        if not (node.is_stored and (node.children or self._is_useful(node))):
            self._forget(node)
        return parent

    def _drop_states(self, node: _Node) -> None:
        if node.states is not None:
            node.states = None
            node.has_states = node.is_stored
            self.states -= 1

    def _forget(self, node: _Node) -> None:
        """Removes a node that memory does not have, and those after it, from the tree and the disk."""
        assert node.parent is not None and node.block is None
        del node.parent.children[int(node.tokens[0])]
        pending = [node]
        while pending:
            one = pending.pop()
            pending += one.children.values()
            one.parent = None
            if one.write:
                self._remove_file(one)

    def _write(self, nodes: Iterable[_Node]) -> None:
        """Has the files of new nodes written, or of nodes that have changed."""
        if self._disk is None:
            return
        for node in nodes:
            assert node.parent is not None and node.block is not None
            if node.write:
                self._remove_file(node)
            arrays, scalars = packed(node.block, node.states or ())
            tokens = tuple(node.tokens.tolist())
            stored = StoredNode(node.key, node.start, node.parent.key, tokens, node.adapter, node.has_states)
            node.write = self._disk.write(stored, arrays, scalars)
            self._writes.append((node.write, node))
            self._count_file(node)
        self._evict_files()

    def _remove_file(self, node: _Node) -> None:
        assert self._disk is not None
        self.disk_bytes -= node.file_bytes
        self._disk.remove(node.key)
        node.write, node.is_stored, node.has_states = 0, False, node.states is not None

    def _count_file(self, node: _Node) -> None:
        node.file_bytes = len(node.tokens) * self._costs[0] + self._costs[1] * node.has_states
        self.disk_bytes += node.file_bytes

    def _evict_files(self) -> None:
        """Removes the files that are worth the least, until the disk has room."""
        if self._disk is None or self.disk_bytes <= self._disk.max_bytes:
            return

        def is_last(node: _Node) -> bool:
            return bool(node.write) and not any(child.write for child in node.children.values())

        last = (node for node in self._nodes() if is_last(node))
        candidates = [(self._worth(node, node.file_bytes), node.number, node) for node in last]
        heapq.heapify(candidates)
        while candidates and self.disk_bytes > self._disk.max_bytes:
            _, _, node = heapq.heappop(candidates)
            parent = node.parent
            if node.block is None:
                self._forget(node)
            else:
                self._remove_file(node)
            if parent is not None and parent.parent is not None and is_last(parent):
                heapq.heappush(candidates, (self._worth(parent, parent.file_bytes), parent.number, parent))
