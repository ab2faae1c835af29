"""One rank of test_rxe.py: every operation on the dtypes and sizes asked for, against reference.py.

Arguments: "every" for all dtypes, or some of them with commas between; the sizes in bytes, likewise. Prints how many
cases of each operation were exact, and at the end the counters of the group as JSON.
"""

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "rank_scripts"))
from collectives import OPERATIONS, elements, group, keyword, patterns, rank, reference, require, whole

import mlxdist


def sendrecv(dtype: str, count: int, seed: int) -> None:
    inputs = patterns(dtype, count, seed)
    other = 1 - rank
    x = whole(inputs[rank], count)
    result = mlxdist.sendrecv(x, other, other, **keyword(dtype))
    require(result, whole(inputs[other], count), f"sendrecv {dtype} {count}")


def barrier(dtype: str, count: int, seed: int) -> None:
    """Between two messages that would otherwise be equal."""
    mlxdist.barrier()
    broadcast, _ = OPERATIONS["broadcast"]
    broadcast(dtype, count, seed)


def main(dtypes: list[str], sizes: list[int]) -> None:
    operations = {name: operation for name, (operation, _) in OPERATIONS.items()}
    for name, operation in (operations | {"sendrecv": sendrecv, "barrier": barrier}).items():
        begin = time.monotonic()
        cases = [(dtype, size) for dtype in dtypes for size in sizes]
        for seed, (dtype, size) in enumerate(cases):
            operation(dtype, elements(dtype, size), seed)
        print(f"{len(cases)} cases of {name} are exact, in {time.monotonic() - begin:.1f} s", flush=True)
    mlxdist.barrier()
    print(json.dumps(group.stats()), flush=True)
    group.finalize()


if __name__ == "__main__":
    selected = reference.DTYPES if sys.argv[1] == "every" else sys.argv[1].split(",")
    main(selected, [int(size) for size in sys.argv[2].split(",")])
