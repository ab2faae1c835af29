"""A receiver's choice among the senders' offers, and the cache that it joins from them; without communication."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models.cache import ArraysCache

from ..base.errors import InvalidArgument
from ..nn.models.plan.parameters import runs_of
from .holdings import Held
from .offers import Offer, Offers, alike, not_of_model
from .states import DTYPES, is_array, split

__all__ = ["Take", "Takes", "choose", "described_blocks", "join", "read_takes", "taken"]


class Take(NamedTuple):
    """A receiver's choice from one offer: ``runs`` of heads, (start, stop) in the order of the sender's cache, and
    whether it takes the ``rest`` of the state."""

    runs: list[tuple[int, int]]
    rest: bool


Takes = list[list[Take]]  # of each layer, of each of its caches


def read_takes(layers: Any, offers: Offers) -> Takes:
    """Reads from JSON what a receiver takes of ``offers``; raises the errors of :func:`read_offers`."""
    takes = [[Take([(start, stop) for start, stop in runs], rest) for runs, rest in layer] for layer in layers]
    for many, said in zip(takes, offers, strict=True):
        for take, one in zip(many, said, strict=True):
            if not all(0 <= start < stop <= len(one.heads) for start, stop in take.runs):
                raise ValueError(f"of {len(one.heads)} heads {take.runs}")
    return takes


def choose(senders: Sequence[Offers], held: list[list[Held]], turn: int) -> list[Takes]:
    """Chooses the sender of each head of a receiver. ``turn`` is the receiver's number: receivers that need the same
    head take it from different senders, if several senders have it.

    Raises:
        InvalidArgument: the senders' caches differ, or are not those of the receiver's model, or no sender has a head.
    """
    takes: list[Takes] = [[] for _ in senders]
    if any(list(map(len, offers)) != list(map(len, held)) for offers in senders):
        numbers = ", ".join(str(len(offers)) for offers in senders)
        raise InvalidArgument(f"kv.recv: the caches sent have {numbers} layers, and that of the model {len(held)}")
    for number, layer in enumerate(held):
        for of_sender in takes:
            of_sender.append([])
        for place, one in enumerate(layer):
            offers = [sender[number][place] for sender in senders]
            _check(offers, one, number)
            runs = _runs(offers, one, number, turn)
            # All senders have the rest of the state: one is enough.
            first = next((sender for sender, some in enumerate(runs) if some), 0)
            for sender, some in enumerate(runs):
                takes[sender][-1].append(Take(some, sender == first))
    return takes


def _check(offers: list[Offer], held: Held, number: int) -> None:
    name = offers[0].name
    for said in offers:
        if said.common != offers[0].common:
            raise InvalidArgument(f"kv.recv: the senders' caches of layer {number}, {name} and {said.name}, differ")
        if (said.by_heads, said.listed) != (held.by_heads, held.listed):
            raise not_of_model(number, name, "kv.recv", "it is of another kind")
        if said.heads and held.heads and (said.total != held.total or not alike(said.widths, held.widths)):
            raise not_of_model(
                number,
                name,
                "kv.recv",
                f"{said.total} heads of the widths {said.widths}, and in the model {held.total} of {list(held.widths)}",
            )


def _runs(offers: list[Offer], held: Held, number: int, turn: int) -> list[list[tuple[int, int]]]:
    """Which heads of each sender's cache are taken."""
    places: list[set[int]] = [set() for _ in offers]
    for head in held.heads:
        holders = [sender for sender, said in enumerate(offers) if head in said.heads]
        if not holders:
            raise InvalidArgument(
                f"kv.recv: no sender has head {head} of layer {number}, whose cache is {offers[0].name}"
            )
        sender = holders[turn % len(holders)]
        places[sender].add(offers[sender].heads.index(head))
    return [runs_of(sorted(some)) for some in places]


def taken(name: str, state: Any, take: Take) -> list[Any]:
    """The trees of arrays of a state that a receiver takes, in the order in which they are sent."""
    contents, rest = split(name, state)
    cut = lambda start, stop: lambda x: x[:, start:stop] if isinstance(x, mx.array) else x
    blocks = [contents if name == ArraysCache.__name__ else tree_map(cut(*run), contents) for run in take.runs]
    return [*blocks, *([rest] if take.rest else [])]


def described_blocks(said: Offer, take: Take) -> list[Any]:
    """The contents that :func:`taken` gives, described."""

    def cut(length: int) -> Any:
        return lambda x: x | {"shape": [x["shape"][0], length, *x["shape"][2:]]} if is_array(x) else x

    if not said.by_heads:
        return [said.contents for _ in take.runs]
    return [tree_map(cut(stop - start), said.contents, is_leaf=is_array) for start, stop in take.runs]


def join(blocks: list[Any], order: list[int], held: Held, said: Offer) -> list[Any]:
    """The contents of the receiver's cache, from blocks with the heads numbered in ``order``. A receiver without heads
    gets arrays of width 0, as the layers of other stages have."""
    if not held.heads:
        return tree_map(lambda x: _without_width(x, said) if is_array(x) else x, said.contents, is_leaf=is_array)
    index = [order.index(head) for head in held.heads]

    def joined(*arrays: Any) -> Any:
        if arrays[0] is None:
            return None
        x = arrays[0] if len(arrays) == 1 else mx.concatenate(list(arrays), axis=1)
        return x if index == list(range(len(order))) else x[:, mx.array(index)]

    return tree_map(joined, *blocks)


def _without_width(x: Any, said: Offer) -> mx.array:
    batch, *dims = x["shape"]
    return mx.zeros((batch, 1, dims[1], 0) if said.by_heads else (batch, 0), DTYPES[x["dtype"]])
