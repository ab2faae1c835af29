"""A rank of the sleep probe: the last rank is late for a collective whose result the other ranks compute with.

macOS ends GPU work that waits for about 5 s. Each rank prints one line of JSON after `MARK`, whether it fails or not.

`python -m mlxdist.tools.doctor.diagnostics.late_rank SECONDS`
"""

import json
import sys
import time

import mlx.core as mx
import numpy as np

import mlxdist

from ..probe_rank import MARK

__all__ = ["main"]

_ELEMENTS = 4096


def main() -> None:
    seconds = float(sys.argv[1])
    world = mlxdist.init()
    x = mx.ones(_ELEMENTS)
    mx.eval(mlxdist.all_sum(x, group=world) * 2)  # everything is connected and compiled before the clock starts
    is_late = world.rank() == world.size() - 1
    found = {"rank": world.rank(), "late": is_late, "device": str(mx.default_device()), "right": False, "error": ""}
    begin = time.perf_counter()
    try:
        if is_late:
            time.sleep(seconds)
        y = mlxdist.all_sum(x, group=world) * 2  # the product runs on the default device: the GPU, where there is one
        mx.eval(y)
        found["right"] = bool(np.all(np.array(y) == 2 * world.size()))
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        found["seconds"] = round(time.perf_counter() - begin, 2)
        print(MARK + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
