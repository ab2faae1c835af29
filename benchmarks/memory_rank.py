"""What each rank runs for the memory row of vs_peers.py: one operation, then the registered memory of all slabs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import mlxdist
from mlxdist.tools.bench.job import serve


def measure(world: mlxdist.Group, parameters: dict[str, Any]) -> Iterator[dict[str, Any]]:
    mlxdist.all_sum(np.ones(1 << 20, np.float32), group=world)
    largest = mlxdist.all_max(np.array([world.stats()["slab_bytes"]], np.int64), group=world)
    yield {"slab_bytes": int(largest[0])}


if __name__ == "__main__":
    serve(measure)
