"""A sender's description of its cache: checked data, without communication."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, CacheList

from ..base.errors import InvalidArgument
from .holdings import Held
from .states import CACHES, DTYPES, described, is_array, parts_of, split, state_of, widths_of

__all__ = ["Offer", "Offers", "alike", "as_json", "not_of_model", "offer", "read_offers"]


@dataclass(frozen=True)
class Offer:
    """A sender's part of one cache.

    Attributes:
        name: the name of the class, one of ``CACHES``.
        state: the state, as :func:`described` returns it.
        listed, heads, total, widths: as in :class:`Held`.

    Raises:
        ValueError: the state has other heads or widths, or is of no such cache.
    """

    name: str
    state: list[Any]
    listed: bool
    heads: list[int]
    total: int
    widths: list[int | None]

    def __post_init__(self) -> None:
        # A CacheList is offered as its parts.
        if self.name not in CACHES or self.name == CacheList.__name__:
            raise ValueError(f"a cache of class {self.name!r}")
        if any(type(head) is not int or not 0 <= head < self.total for head in self.heads):
            raise ValueError(f"of {self.total} heads the numbers {self.heads}")
        for x in arrays_of(self.state):
            if x["dtype"] not in DTYPES or any(type(size) is not int or size < 0 for size in x["shape"]):
                raise ValueError(f"an array {x}")
        shapes = [x["shape"] for x in arrays_of(self.contents)]
        if self.by_heads and any(len(shape) != 4 for shape in shapes):
            raise ValueError(f"keys and values of the shapes {shapes}")
        if self.by_heads and self.heads and any(shape[1] != len(self.heads) for shape in shapes):
            raise ValueError(f"{len(self.heads)} heads, and arrays of the shapes {shapes}")
        if not alike(self.widths, widths_of(self.name, self.state)):
            raise ValueError(f"arrays of the shapes {shapes}, and not of the widths {self.widths}")

    @property
    def by_heads(self) -> bool:
        """Whether it has keys and values; otherwise states."""
        return self.name != ArraysCache.__name__

    @property
    def contents(self) -> list[Any]:
        """The first part of the state."""
        return split(self.name, self.state)[0]

    @property
    def rest(self) -> list[Any]:
        """The second part, which all senders have."""
        return split(self.name, self.state)[1]

    @property
    def common(self) -> Any:
        """The values that are the same on all senders of one cache: class, rest of the state, batch size and tokens."""
        sizes = sorted({(x["shape"][0], x["shape"][2] if self.by_heads else 0) for x in arrays_of(self.contents)})
        return self.name, self.listed, self.rest, sizes


def arrays_of(state: Any) -> list[dict[str, Any]]:
    """The descriptions of arrays in a described state."""
    flat: Any = tree_flatten(state, is_leaf=is_array)
    return [x for _, x in flat if is_array(x)]


Offers = list[list[Offer]]  # of each layer, of each of its caches


def offer(cache: Sequence[Any], held: list[list[Held]]) -> tuple[list[list[Any]], Offers]:
    """The states of a cache, as :func:`state_of` returns them, and the offer for each of them.

    Raises:
        InvalidArgument: the cache is not one of the model whose parts are ``held``.
    """
    parts = [parts_of(layer) for layer in cache]
    if [len(layer) for layer in parts] != [len(layer) for layer in held]:
        raise InvalidArgument(f"kv.send: the cache has {len(parts)} layers, and is not one of the model: {len(held)}")
    states = [[state_of(part, number) for part in layer] for number, layer in enumerate(parts)]
    offers: Offers = []
    for number, layer in enumerate(cache):
        offers.append([])
        for part, state, one in zip(parts[number], states[number], held[number], strict=True):
            name, heads, widths = type(part).__name__, list(one.heads), list(one.widths)
            try:
                found = Offer(name, described(list(state)), part is not layer, heads, one.total, widths)
            except ValueError as error:
                raise not_of_model(number, name, "kv.send", str(error)) from None
            if (found.by_heads, found.listed) != (one.by_heads, one.listed):
                raise not_of_model(number, name, "kv.send", "it is of another kind")
            offers[-1].append(found)
    return states, offers


def read_offers(layers: Any) -> Offers:
    """Offers from JSON. Raises ValueError or TypeError, or another of ``INVALID``, where they are none."""
    return [[Offer(**one) for one in layer] for layer in layers]


def as_json(offers: Offers) -> Any:
    """Offers as a value of JSON, which :func:`read_offers` reads."""
    return [[asdict(one) for one in layer] for layer in offers]


def alike(widths: Sequence[int | None], others: Sequence[int | None]) -> bool:
    """Whether widths are the same where both are known."""
    return all(a == b or a is None or b is None for a, b in zip(widths, others, strict=True))


def not_of_model(number: int, name: str, where: str, reason: str) -> InvalidArgument:
    """The error of ``where`` for a cache of another model."""
    return InvalidArgument(f"{where}: the cache of layer {number}, a {name}, is not one of the model: {reason}")
