"""Runs a rank of test_tuned_hosts.py: what a table of rows for one host and for two decides, what the tuner measures.

Arguments: the number of the virtual host of each rank.
"""

import os
import sys

rank, hosts = int(os.environ["MLXDIST_RANK"]), sys.argv[1:]
os.environ["MLXDIST_EMULATED_NODE"] = hosts[rank]

import mlxdist
from mlxdist.tools.calibrate.algorithms import choose
from mlxdist.tools.calibrate.ranks import Algorithms

world = mlxdist.init()
within = world.split(int(hosts[rank]))
between = world.split(hosts[:rank].count(hosts[rank]))
print("decided:", *[group.algorithm("all_sum", 1000) for group in (world, within, between)])

measure = Algorithms(world, {"repeats": 3})
cases = [{"operation": name, "bytes": 1024} for name in ("all_reduce", "all_gather", "all_to_all")]
results = [result for case in [*cases, {"operation": "barrier"}] for result in measure(case)]
assert not any(result["refused"] for result in results)
for case in cases:
    print(f"{case['operation']}:", *[result["variant"] for result in results if result["case"] == case])
rows = choose({"setup": {"ranks": world.size()} | measure.summary, "cases": results})
print("rows:", *sorted({row.operation for row in rows}), *{(row.ranks, row.hosts) for row in rows})
