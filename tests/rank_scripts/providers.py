"""One rank of test_providers.py: prints by what it reaches the others, or the error of init().

Arguments: settings of the last rank, NAME=VALUE.
"""

import os
import sys

if os.environ["MLXDIST_RANK"] == str(int(os.environ["MLXDIST_WORLD_SIZE"]) - 1):
    os.environ |= dict(setting.split("=", 1) for setting in sys.argv[1:])

import numpy as np

import mlxdist

try:
    group = mlxdist.init()
except mlxdist.Error as error:
    print(f"{type(error).__name__}: {error}", flush=True)
    sys.exit(1)
assert mlxdist.all_sum(np.full(100_000, group.rank() + 1.0))[-1] == sum(range(group.size() + 1))
print(f"{group.provider}: {group.provider_reason}")
