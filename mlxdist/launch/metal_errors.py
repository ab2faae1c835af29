"""The ends of GPU work that macOS reports, explained: Metal's text names a class, but no cause and no remedy."""

import re
from collections.abc import Iterable

__all__ = ["explain"]

# "[METAL] Command buffer execution failed: Impacting Interactivity (0000000e:kIOGPUCommandBufferCallbackError...)". MLX
# throws it in a thread of Metal's, which ends the process with SIGABRT, or from an evaluation.
_CLASS = re.compile(r"\([0-9a-f]{8}:kIOGPUCommandBufferCallbackError(\w+)\)")
_RESOURCES = re.compile(r"\[metal::malloc\] Resource limit \(\d+\) exceeded")

_SMALLER = "evaluate in smaller pieces: a smaller --prefill-step-size, batch or micro-batch, or mx.eval between layers"
_MEMORY = "give the rank less: --rank-shares, fewer or shorter sequences, more Macs; mlxdist doctor shows memory"
# Clauses by class, without "macOS ended GPU work of this rank".
_ENDS = {
    "Timeout": "it ran, or waited for a late rank, for more than about 5 s; mlxdist.meet() before work that waits for "
    f"others, else {_SMALLER}",
    "Hang": f"it made no progress; {_SMALLER}",
    "ImpactingInteractivity": "it kept the GPU from the display for too long; let the display sleep "
    f"(pmset displaysleepnow) or unplug it, else {_SMALLER}",
    "OutOfMemory": f"there was no memory for it that the GPU may use (sysctl iogpu.wired_limit_mb); {_MEMORY}",
    "PageFault": "it read or wrote outside of its memory, an error of a kernel or of the driver; update macOS and "
    "MLX, and report it to MLX with the smallest program that shows it",
    "InvalidResource": "a buffer of it was not there any more, most often since memory was short; " + _MEMORY,
}
# They follow the end of other work: explained only where no cause was printed.
_CONSEQUENCES = {
    "InnocentVictim": "other work, perhaps of another process, made macOS reset the GPU; look there for the cause",
    "SubmissionsIgnored": "macOS takes no more work of a process whose work it has ended, most often since memory was "
    "short; " + _MEMORY,
}


def explain(lines: Iterable[str]) -> str:
    """The clause that explains the first end of GPU work in a rank's last ``lines``; empty where there is none.

    The classes are those of IOGPU, the kernel's driver, as public reports have them: Apple documents none.
    """
    text = "\n".join(lines)
    found = _CLASS.findall(text)
    for known in (_ENDS, _CONSEQUENCES):
        for name in found:
            if name in known:
                return f"macOS ended GPU work of this rank ({name}): {known[name]}"
    if found:
        return f"macOS ended GPU work of this rank: {found[0]}"
    if _RESOURCES.search(text):
        return (
            "Metal has a limit on the number of buffers, also of unused ones that MLX keeps: mx.set_cache_limit, or "
            "evaluate more often"
        )
    return ""
