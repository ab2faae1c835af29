"""Sizes that 32 bits do not hold."""

from pathlib import Path

import pytest

COUNT = (4 << 30) + 3
RANKS = 2


def available_bytes() -> int | None:
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return None
    (line,) = [line for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable:")]
    return int(line.split()[1]) * 1024


@pytest.mark.long
def test_more_than_4_gib(run_ranks):
    needed = RANKS * COUNT + (1 << 30)
    available = available_bytes()
    if available is None or available < needed:
        has = "is not known" if available is None else f"is {available / 2**30:.1f} GiB"
        pytest.skip(f"needs {needed / 2**30:.1f} GiB of memory, and what is available {has}")
    outputs = run_ranks("large.py", RANKS, COUNT, timeout=600)
    assert all("exact" in output for output in outputs)
