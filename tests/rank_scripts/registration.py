"""One rank of test_registration.py: memory that is registered, and that is not any more. Argument: the scenario."""

import ctypes
import gc
import mmap
import sys
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
from scenarios import group, rank, run_scenario, size

import mlxdist

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from waiting import late, seconds_of

other = 1 - rank  # the tests run on two ranks
MIB = 1 << 20


def grown(operation: Callable[[], object]) -> dict[str, int]:
    before = group.stats()
    operation()
    after = group.stats()
    return {name: after[name] - before[name] for name in after}


def values(count: int, salt: int) -> np.ndarray:
    return np.arange(count, dtype=np.int32) * 7 + salt


def zero_copy() -> None:
    """Large messages leave from where they are; the second time nothing is registered again."""
    x, out = values(4 * MIB // 4, rank), np.empty(4 * MIB // 4, np.int32)
    copied = grown(lambda: mlxdist.sendrecv(x, other, other, out=out))["bytes_copied"] if size == 2 else 0
    expected = values(x.size, other)
    assert np.array_equal(out, expected) and copied == x.nbytes
    with group.register(x) as registration:
        assert registration.nbytes == x.nbytes
        assert group.stats()["registered_bytes"] == 0, "the registration with the device is made on first use"
        for turn in range(5):
            out[:] = 0
            counters = grown(lambda: mlxdist.sendrecv(x, other, other, out=out))
            assert np.array_equal(out, expected)
            # What is received is copied out of its slots, what is sent is not copied into them.
            assert counters["bytes_copied"] == x.nbytes, counters
            assert counters["payload_bytes_sent"] == x.nbytes
            assert counters["memory_registrations"] == (1 if turn == 0 else 0), (turn, counters)
            assert counters["registration_hits"] > 0, (turn, counters)
            assert group.stats()["registered_bytes"] == x.nbytes
        # A part of it is found, too; a result that takes the place of its input waits for it, and nothing is copied.
        part = x[1000 : 1000 + 2 * MIB // 4]
        counters = grown(lambda: mlxdist.sendrecv(part, other, other, out=out[: part.size]))
        assert counters["memory_registrations"] == 0 and counters["registration_hits"] > 0
        counters = grown(lambda: mlxdist.all_sum(x, out=x))
        assert counters["bytes_copied"] == counters["memory_registrations"] == 0
        assert np.array_equal(x, values(x.size, 0) + values(x.size, 1))
    assert group.stats()["registered_bytes"] == 0
    assert mlxdist.sendrecv(x, other, other, out=out) is out and np.array_equal(out, x)


def small() -> None:
    """Below 256 KiB a copy into the slots is cheaper than the message that confirms, registered or not."""
    x = values((128 << 10) // 4, rank)
    with group.register(x):
        counters = grown(lambda: mlxdist.all_sum(x))
        assert counters["memory_registrations"] == 0 and counters["registration_hits"] == 0
        assert counters["bytes_copied"] == x.nbytes


def remapped(registered: str) -> None:
    """The same address with other memory behind it, thousands of times: what arrives is what lies there now.

    A registration that outlives its memory would send the pages that were there before.
    """
    nbytes = 1 * MIB
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    private = mmap.MAP_PRIVATE | mmap.MAP_ANON
    fixed = 0x10  # MAP_FIXED on Linux and macOS
    address = libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, private, -1, 0)
    assert address not in (None, ctypes.c_void_p(-1).value)
    out = np.empty(nbytes // 4, np.int32)
    turns = 2000
    for turn in range(turns):
        x = np.ctypeslib.as_array((ctypes.c_int32 * (nbytes // 4)).from_address(address))
        assert x[0] == 0 and x[-1] == 0, "the memory is new"
        x[:] = turn * 2 + rank
        x[turn % x.size] = -turn
        registration = group.register(x) if registered == "registered" else None
        mlxdist.sendrecv(x, other, other, out=out)
        assert out[turn % x.size] == -turn
        out[turn % x.size] = turn * 2 + other
        assert np.all(out == turn * 2 + other), f"turn {turn}: what lay here before has arrived"
        if registration is not None:
            registration.release()
        del x, registration
        assert libc.munmap(address, nbytes) == 0
        if turn % 2:  # something else lies here in between
            libc.mmap(address, nbytes, mmap.PROT_READ, private | fixed, -1, 0)
        again = libc.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, private | fixed, -1, 0)
        assert again == address


def released_while_in_use() -> None:
    """release() waits for the operation that sends from the memory, and the receiver has what lay there before."""
    x = values(8 * MIB // 4, 0)
    expected = x.copy()
    if rank == 0:
        registration = group.register(x)
        handle = mlxdist.send(x, 1, async_op=True)
        assert not handle.done()  # the receiver has not come
        waited, _ = seconds_of(registration.release)
        assert handle.done() and waited > 0.2, "release() did not wait"
        x[:] = -1
        handle.wait()
        assert group.stats()["registered_bytes"] == 0
    else:
        late(0.5)
        assert np.array_equal(mlxdist.recv_like(x, 0), expected)


def several() -> None:
    """Regions side by side, one dropped without release, one in another, and an mx.array."""
    x = values(6 * MIB // 4, rank)
    parts = [x[: x.size // 2], x[x.size // 2 :]]
    registrations = [group.register(part) for part in parts]
    out = np.empty_like(x)
    expected = values(x.size, other)
    for part, place in zip(parts, (out[: x.size // 2], out[x.size // 2 :])):
        assert grown(lambda p=part, o=place: mlxdist.sendrecv(p, other, other, out=o))["registration_hits"] > 0
    assert np.array_equal(out, expected)
    out[:] = 0
    mlxdist.sendrecv(x, other, other, out=out)  # in none of them as a whole
    assert np.array_equal(out, expected)
    assert group.stats()["registered_bytes"] == x.nbytes
    registrations.pop()
    gc.collect()
    assert group.stats()["registered_bytes"] == x.nbytes // 2
    registrations.pop().release()

    array = mx.arange(2 * MIB // 4, dtype=mx.int32) + rank
    with group.register(array):
        out = out[: array.size]
        counters = grown(lambda: mlxdist.sendrecv(memoryview(array), other, other, out=out))
        assert counters["registration_hits"] > 0 and np.array_equal(out, np.arange(array.size) + other)
        # MLX may go on with it.
        total = mlxdist.all_sum(array)
        assert mx.array_equal(total, 2 * mx.arange(array.size, dtype=mx.int32) + 1)
    assert group.stats()["registered_bytes"] == 0

    kept = group.register(x)  # finalize() ends it
    group.finalize()
    kept.release()


run_scenario(globals())
