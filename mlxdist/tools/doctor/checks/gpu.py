"""What a crossing between GPU and CPU costs, with MLX_METAL_FAST_SYNCH and without."""

from __future__ import annotations

from ..cluster import Cluster
from ..findings import Finding, note, ok, skip, warn
from .variables import FAST_SYNCH, of_ranks

__all__ = ["check_gpu_crossing"]

_SLOW = 50.0  # microseconds


def check_gpu_crossing(cluster: Cluster) -> list[Finding]:
    found = []
    variables = of_ranks(cluster)
    for name, told in cluster.each("crossing"):
        if told["skipped"]:
            found.append(skip(name, told["skipped"]))
        elif told["error"]:
            remedy = f"for all ranks --env {FAST_SYNCH}=0, and restart the Mac: sudo shutdown -r now"
            found.append(warn(name, told["error"], remedy))
        else:
            without, fast = told["microseconds"]["0"], told["microseconds"]["1"]
            what = f"{without:.0f} us a crossing, {fast:.0f} us with {FAST_SYNCH}=1"
            is_on = variables.get(name, {}).get(FAST_SYNCH) == "1"
            if not is_on and without > _SLOW and fast < without / 2:
                remedy = f"with one rank a Mac try --env {FAST_SYNCH}=1; it has locked up GPUs, so watch the first runs"
                found.append(note(name, what, remedy))
            else:
                found.append(ok(name, what))
    return found
