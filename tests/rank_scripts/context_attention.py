"""One rank of test_context_attention.py. Arguments: the scenario, "ring" or "ulysses". Prints "equal" at the end.

Every rank makes the full sequence, so that it can compute by itself what all of them together compute.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import pytest

import mlxdist
from mlxdist import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from reference_ring_attention import ring_attention

group = mlxdist.init()
rank, size = group.rank(), group.size()
METHOD = sys.argv[2]
attention = {"ulysses": nn.ulysses_attention, "ring": nn.ring_attention}[METHOD]
own = partial(nn.shard_sequence, group=group)


class Case(NamedTuple):
    batch: int = 1
    heads: int = 12  # a multiple of 1 to 4
    key_heads: int = 12
    chunk: int = 3
    dims: tuple[int, int] = (8, 8)
    mask: Any = "causal"
    sinks: bool = False
    window: int | None = None
    dtype: mx.Dtype = mx.float32

    @property
    def length(self) -> int:
        return 2 * size * self.chunk


def causal(length: int, window: int | None = None) -> mx.array:
    distance = mx.arange(length)[:, None] - mx.arange(length)
    return (distance >= 0) & (distance < (window or length))


def documents(case: Case) -> mx.array:
    """Two packed sequences, each causal."""
    of = mx.arange(case.length) >= case.length // 3
    return causal(case.length) & (of[:, None] == of)


def padding(case: Case) -> mx.array:
    """(batch, 1, 1, length): the first sequence is shorter than the others."""
    return (mx.arange(case.length) < case.length - (mx.arange(case.batch) == 0)[:, None])[:, None, None]


def bias(case: Case) -> mx.array:
    """(heads, length, length), to be added, as ALiBi has it, with 16-bit masks."""
    distance = mx.arange(case.length)[:, None] - mx.arange(case.length)
    slopes = 0.5 ** mx.arange(1, case.heads + 1)[:, None, None]
    return mx.where(distance >= 0, -slopes * distance, -mx.inf)


CASES = {
    "causal": Case(),
    "not causal": Case(mask=None, batch=2),
    "one token a chunk": Case(chunk=1, batch=3),
    "grouped": Case(key_heads=4 if size == 4 else size, batch=2, chunk=5),
    "one key head": Case(heads=4 * size, key_heads=1),
    "other values": Case(dims=(16, 5), chunk=4),
    "sinks": Case(sinks=True, key_heads=12, batch=2),
    "sinks, not causal": Case(sinks=True, mask=None),
    "window": Case(window=4, chunk=7),
    "window of one": Case(window=1),
    "wide window": Case(window=10_000),
    "documents": Case(mask=documents, chunk=5),
    "padding": Case(mask=padding, batch=2),
    "bias": Case(mask=bias, batch=2, chunk=4),
    "several tiles": Case(heads=2 * size, key_heads=size, chunk=300, dims=(4, 4)),
    "several tiles, window": Case(heads=2 * size, key_heads=size, chunk=300, dims=(4, 4), window=123),
}


def inputs(case: Case) -> list[mx.array]:
    """q, k, v, the cotangent and, where there are some, sinks; equal on all ranks."""
    mx.random.seed(case.chunk)
    (dims, value_dims), normal = case.dims, partial(mx.random.normal, dtype=mx.float32)
    shapes = [(case.heads, dims), (case.key_heads, dims), (case.key_heads, value_dims), (case.heads, value_dims)]
    arrays = [normal((case.batch, heads, case.length, d)).astype(case.dtype) for heads, d in shapes]
    return arrays + ([normal((case.heads,)).astype(case.dtype)] if case.sinks else [])


def reference(case: Case, arrays: list[mx.array]) -> tuple[mx.array, list[mx.array]]:
    mask = case.mask(case) if callable(case.mask) else case.mask
    if isinstance(mask, str):
        mask = causal(case.length, case.window)

    def loss(q: mx.array, k: mx.array, v: mx.array, sinks: mx.array | None = None) -> tuple[mx.array, mx.array]:
        blocks = [mx.split(x, size, axis=2) for x in (q, k, v)]
        out = mx.concatenate(ring_attention(*blocks, scale=0.3, mask=mask, sinks=sinks), axis=2)
        return (out * arrays[3]).sum(), out

    return differentiated(loss, arrays)


def ours(case: Case, arrays: list[mx.array]) -> tuple[mx.array, list[mx.array]]:
    mask = case.mask
    if callable(mask):
        mask = mask(case)
        mask = own(mask, -2) if mask.shape[-2] > 1 else mask

    def loss(q: mx.array, k: mx.array, v: mx.array, sinks: mx.array | None = None) -> tuple[mx.array, mx.array]:
        out = attention(q, k, v, scale=0.3, mask=mask, sinks=sinks, window_size=case.window, group=group)
        return (out * own(arrays[3], 2)).sum(), out

    return differentiated(loss, [own(x, 2) for x in arrays[:4]] + arrays[4:])


def differentiated(loss: Any, arrays: list[mx.array]) -> tuple[mx.array, list[mx.array]]:
    primals = arrays[:3] + arrays[4:]
    (_, out), gradients = mx.value_and_grad(loss, argnums=list(range(len(primals))))(*primals)
    mx.eval(out, gradients)
    return out, list(gradients)


def close(name: str, got: mx.array, expected: mx.array, tolerance: float = 1e-5) -> None:
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype), (name, got.shape, got.dtype, expected.shape)
    got, expected = got.astype(mx.float32), expected.astype(mx.float32)
    error = mx.abs(got - expected).max().item() if got.size else 0.0
    assert error <= tolerance * max(1.0, mx.abs(expected).max().item() if got.size else 0), f"{name}: {error}"


def check(name: str, case: Case, tolerance: float = 1e-5) -> None:
    arrays = inputs(case)
    expected, expected_gradients = reference(case, arrays)
    got, gradients = ours(case, arrays)
    close(name, got, own(expected, 2), tolerance)
    for which, mine, full in zip("qkv", gradients, expected_gradients):
        close(f"{name}: gradient of {which}", mine, own(full, 2), tolerance)
    if case.sinks:  # parameters: the sum over the ranks, as data parallelism takes it
        close(f"{name}: sinks", mlxdist.all_sum(gradients[3]), expected_gradients[3], tolerance)
    plain = attention(
        *[own(x, 2) for x in arrays[:3]], scale=0.3, mask=own(case.mask(case), -2) if case.mask is documents else None
    )
    assert plain.shape == got.shape


def cases() -> None:
    for name, case in CASES.items():
        check(name, case)


def dtypes() -> None:
    """The result of 16-bit inputs is as near to that of float32 as rounding allows."""
    for dtype, tolerance in ((mx.float16, 4e-3), (mx.bfloat16, 3e-2)):
        for sinks in (False, True):
            check(str(dtype), Case(dtype=dtype, sinks=sinks, chunk=10, key_heads=12), tolerance)


def messages() -> None:
    """One all_to_all before and one after, and as many backward."""
    case = Case(key_heads=12)
    arrays = [own(x, 2) for x in inputs(case)[:4]]
    mx.eval(arrays)

    def loss(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        return (attention(q, k, v, scale=1.0, mask="causal") * arrays[3]).sum()

    for call, expected in (
        (lambda: loss(*arrays[:3]), 2),
        (lambda: mx.value_and_grad(loss, (0, 1, 2))(*arrays[:3]), 4),
    ):
        before = group.stats()["collectives"]
        mx.eval(call())
        assert group.stats()["collectives"] - before == (expected if size > 1 else 0)


def ring_messages() -> None:
    """Keys and values go around once forward and once backward, and then also their gradients, in float32."""
    for dtype in (mx.float32, mx.bfloat16):
        arrays = [own(x, 2) for x in inputs(Case(key_heads=4, dtype=dtype))[:4]]
        mx.eval(arrays)
        shards, rounds = 2 * arrays[1].nbytes, size - 1

        def result(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
            return attention(q, k, v, scale=1.0, mask="causal", window_size=2)

        for call, times, sent in (
            (lambda: result(*arrays[:3]), 2, shards),
            (lambda: mx.vjp(result, arrays[:3], arrays[3:]), 6, 2 * shards + 2 * arrays[1].size * 4),
        ):
            before = group.stats()
            mx.eval(call())
            after = group.stats()
            assert after["point_to_point"] - before["point_to_point"] == times * rounds
            assert after["payload_bytes_sent"] - before["payload_bytes_sent"] == sent * rounds
            assert after["collectives"] == before["collectives"]


def memory() -> None:
    """Of keys and values, a rank needs less than half of what the gathered ones need on two ranks."""
    q, k, v = (mx.ones((1, 1, 4096, 256)) for _ in "qkv")
    mx.eval(q, k, v)

    def peak(call: Any) -> int:
        mx.clear_cache()
        group.barrier()
        held = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(call())
        return mx.get_peak_memory() - held

    gathered = peak(lambda: [nn.gather_sequence(x, 2, group=group) for x in (k, v)])
    # In a window of one token there are next to no scores; the result and scaled queries are still in the peak.
    passed_on = peak(lambda: attention(q, k, v, scale=1.0, mask="causal", window_size=1))
    assert passed_on <= gathered / 2, (passed_on, gathered)
    # The matrix of all scores of this rank would be 64 MiB a rank of the group.
    full = peak(lambda: attention(q, k, v, scale=1.0, mask="causal"))
    assert full <= passed_on + (16 << 20), (full, passed_on)


def bad_input() -> None:
    """Refused on one rank alone, before anything is sent: the group goes on."""
    x = mx.ones((1, 4 * size, 4, 8))
    for changed, message in [
        ({"q": x[0]}, "must have shape"),
        ({"k": x[..., :4]}, "do not fit each other"),
        ({"v": x[:, :, :2]}, "do not fit each other"),
        ({"q": x[:, : 4 * size - 1]}, "heads are not a multiple"),
        ({"q": x[:, :, :2]}, "shards of one sequence"),
        ({"q": x.astype(mx.int32)}, "must be float32, float16 or bfloat16"),
        ({"mask": "full"}, "mask must be None, 'causal' or an array, not 'full'"),
        ({"mask": mx.ones((4, 5), mx.bool_)}, "columns the keys of the full sequence"),
        ({"mask": mx.ones((4, 4 * size), mx.int32)}, "bool or floating point"),
        ({"sinks": mx.ones((3,))}, "sinks has shape"),
        ({"window_size": 3}, "window_size"),
        ({"window_size": 0, "mask": "causal"}, "window_size"),
        ({"group": mx.distributed.init()}, "group must be what mlxdist.init"),
    ]:
        if rank == 0:
            with pytest.raises(mlxdist.InvalidArgument, match=message):
                attention(**({"q": x, "k": x, "v": x, "scale": 1.0} | changed))
    if size > 1:
        odd = x[:, :, :3]
        with pytest.raises(mlxdist.InvalidArgument, match="two equal chunks"):
            attention(odd, odd, odd, scale=1.0)
    assert attention(x, x, x, scale=1.0).shape == x.shape


def unequal_shards() -> None:
    """One rank has a longer sequence: the same error on all, and none waits."""
    x = mx.ones((1, 4, 8 + 4 * (rank == 1), 8))
    with pytest.raises(mlxdist.Mismatch, match="ranks disagree"):
        mx.eval(attention(x, x, x, scale=1.0, mask="causal"))


def wrong_heads() -> None:
    """The error has the numbers of ranks that would do."""
    q, k = mx.ones((1, 6, 4, 8)), mx.ones((1, 2, 4, 8))
    if size == 4:
        with pytest.raises(mlxdist.InvalidArgument, match="6 query heads and 2 key heads .* only by 1, 2, 6; ring"):
            attention(q, k, k, scale=1.0)
    q, k = mx.ones((1, 7, 4, 8)), mx.ones((1, 7, 4, 8))
    with pytest.raises(mlxdist.InvalidArgument, match="only by 1, 7"):
        attention(q, k, k, scale=1.0)


globals()[sys.argv[1]]()
print("equal")
