"""The limits of the machine that benchmarks compare with: right data, positive times, and what tables make of them."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from native_build import NATIVE, SANITIZE_MEMORY, SANITIZE_THREADS, build_program, run_program
from rich.console import Console

import mlxdist
from mlxdist.tools.bench import timing
from mlxdist.tools.bench.collectives import _show
from mlxdist.tools.bench.limits import LIMITS, explain_limits, limit_cells, limits_line
from mlxdist.tools.bench.timing import CORES, Transfer, measure_limits

VARIANTS = {"optimized": ["-O3"], "memory": SANITIZE_MEMORY, "threads": SANITIZE_THREADS}
two_cores = pytest.mark.skipif(len(CORES) < 2, reason="a transfer needs two cores")


@pytest.mark.parametrize(
    "variant",
    [
        "optimized",
        pytest.param("memory", marks=[pytest.mark.sanitize, pytest.mark.long]),
        pytest.param("threads", marks=[pytest.mark.sanitize, pytest.mark.long]),
    ],
)
def test_transfer_in_c(tmp_path, variant):
    parts = [NATIVE / "tests" / "limits_test.c"]
    parts += [NATIVE / "transport" / f"{name}.c" for name in ("core_transfer", "error", "steady_clock", "thread")]
    flags = [f"-I{NATIVE / 'include'}", "-D_DEFAULT_SOURCE", *VARIANTS[variant]]
    assert "0 failed" in run_program(build_program(tmp_path / "limits", parts, flags))


@two_cores
@pytest.mark.parametrize("size", [1, 8 << 10, 1 << 20])
def test_a_transfer_delivers_what_was_sent(size):
    transfer = Transfer(size)
    times = transfer.block(4)
    assert len(times) == 4 and min(times) > 0
    assert all(map(np.array_equal, transfer.received, reversed(transfer.sent)))
    assert [array.nbytes for array in transfer.received] == [size, size] and transfer.received[0].all()


@two_cores
def test_a_transfer_of_wrong_bytes_is_an_error():
    transfer = Transfer(1 << 10)
    transfer.block(1)
    transfer.sent.reverse()  # what is compared is then not what arrives
    with pytest.raises(RuntimeError, match="delivered wrong bytes"):
        transfer.block(1)


@two_cores
def test_a_large_transfer_is_a_part_of_it_times_what_is_left_out(monkeypatch):
    monkeypatch.setattr(timing, "TRANSFER_UP_TO", 1 << 10)
    assert Transfer(1 << 10)._scale == 1
    transfer = Transfer(4 << 10)
    assert (transfer.sent[0].nbytes, transfer._scale) == (1 << 10, 4)
    transfer.block(1)


def test_limits_are_works_like_any_other():
    """Of a group of one, at the sizes of `measure_limits`."""
    found = measure_limits(mlxdist.init())
    assert [case["bytes"] for case in found] == [8 << 10, 1 << 20, 16 << 20]
    for case in found:
        assert set(case) == {"bytes", *LIMITS}
        for name in LIMITS if len(CORES) > 1 else ["memcpy"]:
            assert 0 < case[name]["min"] <= case[name]["median"] <= case[name]["max"]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system cannot keep a process on one core")
def test_on_one_core_there_is_no_transfer(tmp_path):
    def one_core():
        os.sched_setaffinity(0, {CORES[0]})

    words = ["bench", "collectives", "--op", "all_sum", "--sizes", "4KiB", "--repeats", "3", "--api", "engine"]
    command = [sys.executable, "-m", "mlxdist", *words, "--output", str(tmp_path / "results.json")]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120, preexec_fn=one_core)
    assert finished.returncode == 0, finished.stderr
    assert "There is no transfer, since rank 0 has one core." in finished.stdout
    (case,) = json.loads((tmp_path / "results.json").read_text())["cases"]
    assert case["transfer"] is None and case["memcpy"]["median"] > 0


def test_tables_show_multiples_of_limits():
    limits = {"bytes": 8 << 10, "transfer": {"median": 2.0}, "memcpy": {"median": 0.5}}
    result = limits | {"microseconds": {"median": 6.0}}
    assert limit_cells(result) == ["3.00 of 2.00", "12.0 of 0.50"]
    assert limit_cells(result | {"microseconds": None}) == limit_cells(None) == ["", ""]
    alone = result | {"transfer": None}
    assert limit_cells(alone) == ["", "12.0 of 0.50"]
    assert limit_cells({"microseconds": {"median": 6.0}, "memcpy": {"median": 0.5}}) == ["", ""]  # a layer
    assert len(explain_limits([result])) == 2 and len(explain_limits([result, alone])) == 3
    assert "8 KiB 2.00 from core to core; 8 KiB 0.50 copied by all ranks at once" in limits_line([limits])
    assert "no transfer, since rank 0 has one core; 8 KiB 0.50" in limits_line([alone])


def test_a_table_with_limits_loses_nothing_in_100_columns(capsys):
    case = {"operation": "sum_scatter", "dtype": "float32", "bytes": 16 << 20}
    result = {
        "case": case,
        "variant": "mlxdist",
        "wrong": 0,
        "refused": None,
        "chain": 1,
        "algorithm": "recursive_doubling",
    }
    result |= {"microseconds": {"median": 4123.45, "p99": 5234.56}, "algbw": 10.25, "busbw": 10.25}
    result |= {"transfer": {"median": 1298.9}, "memcpy": {"median": 31.2}}
    results = {"setup": {"ranks": 2, "api": "mlx"}, "cases": [result, result]}
    _show(results, Console(width=100, color_system=None))
    shown = capsys.readouterr().out
    assert "sum_scatter" in shown and "4123" in shown and "…" not in shown and max(map(len, shown.splitlines())) <= 100
