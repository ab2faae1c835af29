"""One rank of tests/project/test_rxe.py: in the middle of the job, nothing gets through for three seconds."""

import json
import subprocess
import threading

import numpy as np

import mlxdist

SECONDS = 3
group = mlxdist.init()
rank = group.rank()


def cable(change: str) -> None:
    for end in (0, 1):
        subprocess.run(["tc", "qdisc", change, "dev", f"veth{end}", "root", "netem", "loss", "100%"], check=True)


for turn in range(12):
    if turn == 4 and rank == 0:
        cable("add")
        threading.Timer(SECONDS, cable, ["del"]).start()
    for elements in (1, 1000, 100_000):
        x = np.arange(elements, dtype=np.int32) * (rank + 1) + turn
        expected = np.arange(elements, dtype=np.int32) * 3 + 2 * turn
        assert np.array_equal(mlxdist.all_sum(x), expected), f"rank {rank}: turn {turn}, {elements} elements"
print(json.dumps(group.stats()), flush=True)
group.finalize()
