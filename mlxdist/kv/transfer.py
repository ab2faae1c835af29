"""Sends a prompt cache, and receives it."""

import socket
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models.cache import CacheList

from ..base.errors import InvalidArgument, Mismatch, located
from ..runtime.default_group import init
from ..runtime.group import Group
from .holdings import Held, holdings
from .messages import INVALID, Receives, Sends, hear, tell
from .offers import Offers, as_json, offer, read_offers
from .states import CACHES, arrays_in, described, is_array, state_of
from .takes import Takes, choose, described_blocks, join, read_takes, taken

__all__ = ["recv", "send"]


def send(cache: Sequence[Any], dst: int | Sequence[int], *, model: Any = None, group: Group | None = None) -> None:
    """Sends a prompt cache to rank ``dst``, which must call :func:`recv`; returns when it has left.

    Each layer leaves once it is computed, while the next ones still are: call this before the cache is evaluated. What
    is sent has the dtypes, or the quantized form, of the cache, and of :class:`KVCache` and :class:`QuantizedKVCache`
    the tokens that are in it, not the room for more. The cache stays as it is.

    With ``model`` the ranks that have shards or stages of it send together: each calls this with its own part of the
    cache, all with the same ``dst``, and each rank of ``dst`` calls :func:`recv` with all of them. A receiver gets the
    layers and KV heads that its own model has; what several senders have is sent by one.

    Args:
        cache: what ``mlx_lm.models.cache.make_prompt_cache`` makes, one for each layer.
        dst: the rank, in ``group``; with ``model`` also several ranks.
        model: that has computed the cache: full, of ``shard_model``, ``pipeline_parallel`` or both.
        group: default: all ranks.

    Raises:
        InvalidArgument: a layer has a cache that is not mlx-lm's, or ``dst`` is no other rank of the group. With
            ``model``, the same on all ranks that send and receive, before any array is sent: a rank has no model, the
            caches are not those of the models, or it is not known how a layer's cache is cut.
    """
    group = init() if group is None else group
    if model is None and not _is_several(dst):
        _send_all(cache, dst, group)
    else:
        _send_parts(cache, _peers("dst", dst, group), model, group)


def recv(src: int | Sequence[int], *, model: Any = None, group: Group | None = None) -> list[Any]:
    """The prompt cache that rank ``src`` sends with :func:`send`: a copy of its own, which is complete.

    Args:
        src: the rank, in ``group``; with ``model`` also several ranks, the same on all receivers.
        model: that goes on with the cache, the same as the senders' but for shards and stages; needed if they have
            one. It is called with one token, of which nothing is computed.
        group: as for :func:`send`.

    Returns:
        One cache for each layer; with ``model`` as its own are: with its KV heads, and without width for layers of
        other stages.

    Raises:
        InvalidArgument: ``src`` is no other rank of the group; with ``model``, as for :func:`send`.
        Mismatch: what ``src`` sends is no prompt cache of mlx-lm, or of an mlx-lm with other classes; one side has a
            ``model``, and the other none.
    """
    group = init() if group is None else group
    if model is None and not _is_several(src):
        return _recv_all(src, group)
    return _recv_parts(_peers("src", src, group), model, group)


def _send_all(cache: Sequence[Any], dst: Any, group: Group) -> None:
    states = [state_of(layer, number) for number, layer in enumerate(cache)]
    tell([[type(layer).__name__, described(state)] for layer, state in zip(cache, states, strict=True)], dst, group)
    sends = Sends(group)
    for x in arrays_in(states):
        sends.add(x, dst)
    sends.wait()


def _recv_all(src: Any, group: Group) -> list[Any]:
    layers, receives = hear(src, group), Receives(group)
    if isinstance(layers, dict):
        raise Mismatch(f"kv.recv: rank {src} sends with a model, and this rank has called kv.recv without one")
    with_arrays = _received_by(receives, src)
    try:
        cache = [CACHES[name].from_state(with_arrays(state)) for name, state in layers]
    except INVALID as error:
        raise _no_cache(src, error) from error
    receives.wait()
    return cache


def _send_parts(cache: Sequence[Any], dst: Sequence[int], model: Any, group: Group) -> None:
    states: list[list[Any]] = []
    offers: Offers = []
    refusal: Exception | None = None
    try:
        states, offers = offer(cache, _holdings(model))
    except Exception as error:  # the receivers wait to hear of it
        refusal = error
    for peer in dst:
        tell({"problem": _text(refusal, group), "layers": as_json(offers)}, peer, group)
    takes, problem = [], None
    for peer in dst:
        answer = hear(peer, group)
        try:
            problem = problem or answer["problem"]
            takes.append(read_takes(answer["layers"], offers) if answer["problem"] is None else [])
        except INVALID as error:
            raise _no_cache(peer, error) from error
    for peer in dst:
        tell(problem, peer, group)
    if problem is not None:
        raise InvalidArgument(problem) from refusal
    _send_arrays(states, offers, dict(zip(dst, takes, strict=True)), group)


def _send_arrays(states: list[list[Any]], offers: Offers, takes: dict[int, Takes], group: Group) -> None:
    """In the order of :func:`_recv_arrays`: by layer, by receiver, by sender, so no rank waits for one that waits."""
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


def _recv_parts(src: Sequence[int], model: Any, group: Group) -> list[Any]:
    held: list[list[Held]] = []
    refusal: Exception | None = None
    try:
        held = _holdings(model)
    except Exception as error:  # the senders wait to hear of it
        refusal = error
    offers, problem = [], _text(refusal, group)
    for peer in src:
        said = hear(peer, group)
        if isinstance(said, list):
            raise Mismatch(f"kv.recv: rank {peer} sends without a model, and this rank has called kv.recv with one")
        try:
            problem = problem or said["problem"]
            offers.append(read_offers(said["layers"]))
        except INVALID as error:
            raise _no_cache(peer, error) from error
    takes: list[Takes] = [[] for _ in src]
    try:
        takes = takes if problem else choose(offers, held, group.rank())
    except InvalidArgument as error:
        problem = _text(error, group)
    for peer, of_peer in zip(src, takes, strict=True):
        tell({"problem": problem, "layers": of_peer}, peer, group)
    problem = next(filter(None, [hear(peer, group) for peer in src]), None)
    if problem is not None:
        raise InvalidArgument(problem) from refusal
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
            try:
                parts.append(CACHES[first.name].from_state([*join(blocks, order, one, first), *rest]))
            except INVALID as error:
                raise _no_cache(src[0], error) from error
        cache.append(CacheList(*parts) if layer[0].listed else parts[0])
    receives.wait()
    mx.eval([part.state for part in cache])
    return cache


def _received_by(receives: Receives, src: int) -> Callable[[Any], Any]:
    """From a described state to one with the arrays that ``src`` sends."""
    leaf = lambda x: receives.add(src=src, **x) if is_array(x) else x
    return lambda state: tree_map(leaf, state, is_leaf=is_array)


def _holdings(model: Any) -> list[list[Held]]:
    if model is None:
        raise InvalidArgument("kv: several ranks that send or receive need model=, and this one has none")
    return holdings(model)


def _text(refusal: Exception | None, group: Group) -> str | None:
    if refusal is None:
        return None
    return located(str(refusal) or type(refusal).__name__, group.rank(), socket.gethostname())


def _no_cache(src: int, error: Exception) -> Mismatch:
    return Mismatch(f"kv: what rank {src} sends is no prompt cache of this mlx-lm: {error!r}")


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
