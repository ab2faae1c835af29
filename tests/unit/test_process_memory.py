"""The memory of a process, by what its system says."""

import mmap
import sys

import pytest

from mlxdist.base.validation import build
from mlxdist.cluster.facts.memory import ProcessMemory, linux_process_memory, memory_now, process_memory, total_memory
from mlxdist.runtime.diagnostics.memory import RankMemory

STATUS = """Name:\tpython3
VmPeak:\t  400000 kB
VmRSS:\t    3072 kB
RssAnon:\t    2048 kB
RssFile:\t    1000 kB
RssShmem:\t      24 kB
Threads:\t4
"""


def test_linux():
    assert linux_process_memory(STATUS) == ProcessMemory(3 << 20, 2 << 20)
    assert linux_process_memory("Name:\tkthreadd\n") == ProcessMemory(None, None)


def test_what_this_process_takes_is_counted():
    before = process_memory()
    # Not from the heap, where another test may have left as much free.
    held = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    held.write(b"x" * len(held))
    after = process_memory()
    assert after.private - before.private >= 48 << 20 and after.resident - before.resident >= 48 << 20
    assert len(held) <= total_memory() == memory_now().total


@pytest.mark.skipif(sys.platform == "darwin", reason="the resident size and the footprint of a Mac may be the larger")
def test_files_are_resident_and_not_private():
    memory = process_memory()
    assert memory.private < memory.resident < total_memory()


def test_what_a_rank_sends_is_checked():
    fields = {"active": 1, "peak": 2, "resident": 30, "private": 40, "total": 100}
    assert build(RankMemory, fields).used == 40 and build(RankMemory, fields).share == 0.4
    nothing = build(RankMemory, fields | {"resident": None, "private": None, "total": 0})
    assert nothing.used is nothing.share is None
    for wrong in ({"active": -1}, {"peak": None}, {"resident": "1"}, {"total": 2**64}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            build(RankMemory, fields | wrong)
