"""One rank of test_mpi_shim.py: MLX's MPI beside another one in the same process, loaded first or last.

Arguments: "first" or "last"; "mpi4py", or the library made of tests/fixtures/another_mpi.c. Prints "as expected".
"""

import ctypes
import sys

import mlx.core as mx

NAMES = {"world": "ompi_mpi_comm_world", "type": "ompi_mpi_uint8_t", "init": "MPI_Init"}


def use_mlx() -> None:
    size = mx.distributed.init(strict=True).size()
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        assert mx.distributed.all_sum(mx.ones((3,), dtype)).tolist() == [size] * 3


def use_mpi4py() -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD  # of this rank alone, since no mpirun has started it
    assert (world.Get_size(), world.allreduce(7), world.Dup().allgather(7)) == (1, 7, [7])


def use_library(path: str) -> None:
    library = ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
    for function, name in NAMES.items():
        found = getattr(library, f"found_{function}")
        found.restype = ctypes.c_void_p
        assert found() == ctypes.addressof(ctypes.c_char.in_dll(library, name)), f"{name} is another library's"
    for name, text in (("ompi_mpi_comm_world", b"a communicator"), ("ompi_mpi_uint8_t", b"a type")):
        assert ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(library, name))).startswith(text)


def use_other(which: str) -> None:
    if which == "mpi4py":
        use_mpi4py()
    else:
        use_library(which)


if __name__ == "__main__":
    order, other = sys.argv[1:]
    if order == "first":
        use_other(other)
    use_mlx()
    use_other(other)
    use_mlx()
    print("as expected")
