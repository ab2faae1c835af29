"""What rank programs compare with, and what they expect to be refused."""

from collections.abc import Callable

import mlx.core as mx

import mlxdist

__all__ = ["close", "equal", "refused"]


def equal(a: mx.array, b: mx.array, what: str) -> None:
    """Bitwise, and of the same shape and dtype."""
    assert a.shape == b.shape and a.dtype == b.dtype, f"{what}: {a.shape} {a.dtype}, expected {b.shape} {b.dtype}"
    assert mx.array_equal(a, b), f"{what}: {a}, expected {b}"


def close(a: mx.array, b: mx.array, what: str, rtol: float = 1e-5, atol: float = 1e-5) -> None:
    assert a.shape == b.shape, f"{what}: shape {a.shape}, expected {b.shape}"
    assert mx.allclose(a, b, rtol=rtol, atol=atol), f"{what}: {a}, expected {b}"


def refused(words: str, call: Callable[[], object]) -> None:
    try:
        call()
    except mlxdist.Mismatch if "disagree" in words else mlxdist.InvalidArgument as error:
        assert words in str(error), f"{words!r} is not in {error}"
    else:
        raise AssertionError(f"no error: {words}")
