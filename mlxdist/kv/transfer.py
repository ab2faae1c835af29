"""Sends a prompt cache, and receives it."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models.cache import CacheList

from ..base.errors import InvalidArgument
from ..runtime.group.group import Group, GroupLike
from ..runtime.operations.arguments import group_of
from .agreement import answer, attempt, no_cache, propose
from .cache_layout import CacheLayout
from .holdings import Held
from .messages import INVALID, Receives, Sends
from .offers import Offers, as_json, offer, read_offers
from .same_model import require_same_model
from .states import CACHES, arrays_in, checked_layers, described, is_array, state_of
from .takes import Takes, choose, described_blocks, join, read_takes, taken

__all__ = ["recv", "send"]


def send(cache: Sequence[Any], dst: int | Sequence[int], *, model: Any = None, group: GroupLike | None = None) -> None:
    """Sends a prompt cache to rank ``dst``, which must call :func:`recv`; returns when it has left.

    Each layer leaves once it is computed, while the next ones still are: call this before the cache is evaluated. The
    arrays have the dtypes, or the quantized form, of the cache. A :class:`KVCache` or :class:`QuantizedKVCache` sends
    the tokens that are in it, not its spare capacity. The cache stays as it is.

    The ranks that have shards or stages of a model send together: each calls this with its own part of the cache, all
    with the same ``dst``, and each rank of ``dst`` calls :func:`recv` with all of them. A receiver gets the layers and
    KV heads that its own model has; what several senders have is sent by one.

    Args:
        cache: what ``mlx_lm.models.cache.make_prompt_cache`` makes, one for each layer.
        dst: the rank, in ``group``, or several.
        model: that has computed the cache: full, of ``shard_model``, ``pipeline_parallel`` or both; or what
            :func:`layout_of` has found about it.
        group: default: all ranks.

    Raises:
        InvalidArgument: ``dst`` is no other rank of the group. Or, the same on all ranks that send and receive, before
            any array is sent: a layer has a cache that is not mlx-lm's, a rank has no model, the caches are not those
            of the models, or it is not known how a layer's cache is cut.
        Mismatch: on all of them, what is sent is no prompt cache of the receiver's mlx-lm.
    """
    group = group_of(group)
    peers = _peers("dst", dst, group)
    layout, refusal = attempt(lambda: _layout(model))
    said = None
    if layout is not None:
        said, refusal = attempt(lambda: _described(cache, layout, len(peers) == 1))
    if propose(said, refusal, peers, group) == [True]:
        _send_whole(cache, peers[0], group)
    else:
        assert layout is not None  # or there was a refusal
        _send_parts(cache, peers, layout, group)


def recv(src: int | Sequence[int], *, model: Any = None, group: GroupLike | None = None) -> list[Any]:
    """Receives the prompt cache that rank ``src`` sends with :func:`send`: a complete copy.

    Args:
        src: the rank, in ``group``, or several, the same on all receivers.
        model: that goes on with the cache, the same as the senders' but for shards and stages; or what
            :func:`layout_of` has found about it. A model is called with one token, of which nothing is computed, unless
            it has what the one sender has.
        group: as for :func:`send`.

    Returns:
        A cache for each layer, of the model's classes: with the KV heads of this rank's model, and of width 0 for
        layers of other stages.

    Raises:
        InvalidArgument, Mismatch: as :func:`send`; ``src`` is no other rank of the group.
    """
    group = group_of(group)
    peers = _peers("src", src, group)
    layout, refusal = attempt(lambda: _layout(model))
    own: Any = layout and layout.described  # None where it is refused, which the answer says first
    models: list[Any] = []  # of the senders
    layers: list[list[Any]] = []

    def decide(said: list[Any]) -> list[bool]:
        models.extend(one["model"] for one in said)
        is_same = len(said) == 1 and said[0]["layers"] is not None and models[0]["part"] == own["part"]
        if is_same:
            require_same_model(models, own, peers)
            layers.extend(checked_layers(said[0]["layers"]))
        return [is_same] * len(said)

    if answer(decide, refusal, peers, group) == [True]:
        return _recv_whole(layers, peers[0], group)
    assert layout is not None  # or there was a refusal
    return _recv_parts(peers, layout, lambda: require_same_model(models, own, peers), group)


def _layout(model: Any) -> CacheLayout:
    return model if isinstance(model, CacheLayout) else CacheLayout(model)


def _described(cache: Any, layout: CacheLayout, is_alone: bool) -> dict[str, Any]:
    """Describes the model to the receivers, and the cache if there is one receiver, which may get it as it is."""
    if not isinstance(cache, list | tuple):
        raise InvalidArgument(f"kv.send: cache must be a list with a cache for each layer, not {type(cache).__name__}")
    layers = [[type(layer).__name__, described(state_of(layer, number))] for number, layer in enumerate(cache)]
    if len(cache) != layout.layers:
        raise InvalidArgument(
            f"kv.send: the cache has {len(cache)} layers, and is not one of the model: {layout.layers}"
        )
    return {"model": layout.described, "layers": layers if is_alone else None}


def _send_whole(cache: Sequence[Any], dst: int, group: Group) -> None:
    """Sends all of a cache to a rank that has the same part of the model."""
    sends = Sends(group)
    for x in arrays_in([state_of(layer, number) for number, layer in enumerate(cache)]):
        sends.add(x, dst)
    sends.wait()


def _recv_whole(layers: list[list[Any]], src: int, group: Group) -> list[Any]:
    receives = Receives(group)
    with_arrays = _received_by(receives, src)
    cache = [CACHES[name].from_state(with_arrays(state)) for name, state in layers]
    receives.wait()
    return cache


def _send_parts(cache: Sequence[Any], dst: Sequence[int], layout: CacheLayout, group: Group) -> None:
    offered, refusal = attempt(lambda: offer(cache, layout.held))
    states, offers = offered or ([], [])
    answers = propose(as_json(offers), refusal, dst, group)
    try:
        takes = {peer: read_takes(layers, offers) for peer, layers in zip(dst, answers, strict=True)}
    except INVALID as error:
        raise no_cache(f"ranks {dst}", error) from error
    _send_arrays(states, offers, takes, group)


def _send_arrays(states: list[list[Any]], offers: Offers, takes: dict[int, Takes], group: Group) -> None:
    """Sends arrays in the order of :func:`_recv_arrays`, by layer, receiver and sender, so no rank waits in a cycle."""
    sends = Sends(group)
    for number, layer in enumerate(states):
        for place, state in enumerate(layer):
            for peer, of_peer in takes.items():
                for x in arrays_in(taken(offers[number][place].name, state, of_peer[number][place])):
                    sends.add(x, peer)
            # Also what no receiver takes: other shards and stages wait for this one.
            for x in arrays_in(state):
                sends.compute(x)
    sends.wait()


def _recv_parts(src: Sequence[int], layout: CacheLayout, require_model: Callable[[], None], group: Group) -> list[Any]:
    held, refusal = attempt(lambda: layout.held)
    held = held or []
    offers: list[Offers] = []

    def decide(said: list[Any]) -> list[Takes]:
        offers.extend(map(read_offers, said))
        takes = choose(offers, held, group.rank())
        require_model()
        return takes

    takes = answer(decide, refusal, src, group)
    return _recv_arrays(src, offers, takes, held, group)


def _recv_arrays(
    src: Sequence[int], offers: list[Offers], takes: list[Takes], held: list[list[Held]], group: Group
) -> list[Any]:
    receives = Receives(group)
    cache: list[Any] = []
    for number, layer in enumerate(held):
        parts: list[Any] = []
        for place, one in enumerate(layer):
            blocks, order, rest = list[Any](), list[int](), list[Any]()
            first = offers[0][number][place]
            for sender, peer in enumerate(src):
                said, take = offers[sender][number][place], takes[sender][number][place]
                with_arrays = _received_by(receives, peer)
                blocks += map(with_arrays, described_blocks(said, take))
                order += [head for run in take.runs for head in said.heads[slice(*run)]]
                rest = with_arrays(said.rest) if take.rest else rest
            parts.append(CACHES[first.name].from_state([*join(blocks, order, one, first), *rest]))
        cache.append(CacheList(*parts) if layer[0].listed else parts[0])
    receives.wait()
    mx.eval([part.state for part in cache])
    return cache


def _received_by(receives: Receives, src: int) -> Callable[[Any], Any]:
    """A function that turns a described state into one with the arrays that ``src`` sends."""
    leaf = lambda x: receives.add(src=src, **x) if is_array(x) else x
    return lambda state: tree_map(leaf, state, is_leaf=is_array)


def _is_several(peers: Any) -> bool:
    return isinstance(peers, Sequence) and not isinstance(peers, str)


def _peers(argument: str, given: Any, group: Group) -> list[int]:
    peers, own, size = list(given) if _is_several(given) else [given], group.rank(), group.size()
    for peer in peers:
        if peer not in range(size) or peer == own:
            raise InvalidArgument(
                f"kv: {argument} is {given!r}, but must be other ranks than {own}, from 0 to {size - 1}"
            )
    if not peers or len(set(peers)) < len(peers):
        raise InvalidArgument(f"kv: {argument} is {given!r}, but must be ranks, each once")
    return sorted(peers)  # one order on all ranks: that of the arrays
