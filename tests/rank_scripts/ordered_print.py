"""One rank of test_ordered_print.py: what rank 0 prints is there in the order of the ranks."""

import io

import mlx.core as mx
from scenarios import group, rank, run_scenario, size

import mlxdist


def shown(*values: object, **options: object) -> str:
    file = io.StringIO()
    mlxdist.print(*values, file=file, **options)
    return file.getvalue()


def everywhere(text: str) -> str:
    return "".join(f"rank {r}: {text.format(r=r)}" for r in range(size)) if size > 1 else text.format(r=0)


def prints() -> None:
    mlxdist.print("rank", rank, mlxdist.all_sum(mx.array([1])), flush=True)
    here = everywhere if rank == 0 else lambda text: ""
    assert shown("é", rank, sep="-", end="!\n") == here("é-{r}!\n")
    assert shown() == here("\n")
    assert shown(end="") == ""
    if size > 1:
        lines = "".join(f"rank {r}: line\n" * (r + 1) for r in range(size))
        assert shown(*["line\n"] * (rank + 1), sep="", end="") == (lines if rank == 0 else "")
        cut = shown("é" * 100_000).splitlines()
        assert not cut or all(line.endswith(" ... (134465 bytes more)") for line in cut) and len(cut) == size
    pair = group.split(rank // 2)
    assert pair is not None
    assert shown(rank, group=pair).count("\n") == (pair.size() if pair.rank() == 0 else 0)


class Unprintable:
    def __str__(self) -> str:
        raise ValueError("it has no words")


class Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


def fails_alike() -> None:
    """Whatever one rank cannot do is the same error on all, and the next print works."""
    for call, kind, text in [
        (
            lambda: mlxdist.print(Unprintable() if rank == size - 1 else 1),
            mlxdist.InvalidArgument,
            "ValueError: it has",
        ),
        (lambda: mlxdist.print(1, file=Full() if rank == 0 else None), mlxdist.ResourceError, "No space left"),
        (
            lambda: mlxdist.print(1, sep=2 if rank == 1 else " "),
            mlxdist.InvalidArgument,
            "sep must be None or a string",
        ),
    ]:
        try:
            call()
            raise AssertionError("no error")
        except kind as error:
            assert text in str(error), error
    assert shown(rank) == (everywhere("{r}\n") if rank == 0 else "")


run_scenario(globals())
