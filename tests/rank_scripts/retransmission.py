"""One rank of test_retransmission.py: every collective over a provider that loses and repeats messages.

Argument: the faults (soft/emulation/fault_injection.h). They last until the process ends, so that finalize() meets
them, too.
"""

import sys

import numpy as np
from collectives import KIB, OPERATIONS, elements, group

import mlxdist
from mlxdist.runtime.group.group import engine_of
from mlxdist.runtime.native import check, lib

# Within one message, at its limits, within what may be sent unasked, and above.
SIZES = [0, 1, 3967, 28 * KIB, 300 * KIB, 1200 * KIB]
DTYPES = ["float16", "int32", "complex64"]


def main(faults: str) -> None:
    check(lib.mlxdist_group_inject_faults(engine_of(group).native, f"{faults},seed={group.rank() + 3}".encode()))
    case = 0
    for operation, _ in OPERATIONS.values():
        for dtype in DTYPES:
            for nbytes in SIZES:
                operation(dtype, elements(dtype, nbytes), case)
                case += 1
    handles = [mlxdist.all_sum(np.full(1000 * i, group.rank()), async_op=True) for i in range(50)]
    total = group.size() * (group.size() - 1) // 2
    assert all((handle.wait() == total).all() for handle in handles)
    counters = group.stats()
    print({name: counters[name] for name in ("retransmissions", "duplicates", "provider_dropped_by_fault")})
    print(f"{case} cases are exact")


main(sys.argv[1])
