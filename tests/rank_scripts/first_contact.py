"""Ranks that start on devices whose messages are not known, sum, and print how many messages of the device that took.

argv: faults of the last rank's devices, if any.
"""

import os
import sys

LAST = int(os.environ["MLXDIST_WORLD_SIZE"]) - 1
if sys.argv[1:] and os.environ["MLXDIST_RANK"] == str(LAST):
    os.environ["SOFTVERBS_FAULTS"] = sys.argv[1]

import numpy as np

import mlxdist

try:
    group = mlxdist.init()
except mlxdist.Error as error:
    print(f"{type(error).__name__}: {error}", flush=True)
    sys.exit(1)


def data_messages() -> int:
    """Those that carry data, each once: how many others there are depends on how busy the machine is."""
    stats = group.stats()
    return stats["messages_sent"] - stats["control_messages_sent"] - stats["retransmissions"]


group.barrier()
before = data_messages()
ones = np.ones(1 << 18, dtype=np.float32)
assert (mlxdist.all_sum(ones) == group.size()).all()
print("messages", data_messages() - before, flush=True)
