"""`mlxdist bench`: that it runs, checks data and prints what it promises. No test looks at the numbers themselves."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from reference import DTYPES

import mlxdist
from mlxdist.cluster.hostfile import parse
from mlxdist.cluster.hostfile.options import HostSelection
from mlxdist.tools.bench.bandwidth import OPERATIONS, algorithm_bandwidth, bus_bandwidth, impossible
from mlxdist.tools.bench.collectives import withhold
from mlxdist.tools.bench.job import _launch
from mlxdist.tools.bench.limits import LIMIT_COLUMNS, LIMITS
from mlxdist.tools.bench.operations import CASES, Inputs, add, count_wrong, storage
from mlxdist.tools.bench.sizes import format_size, parse_size, size_range
from mlxdist.tools.bench.through import Eager, Lazy
from mlxdist.tools.bench.timing import CORES
from mlxdist.tools.bench.tune import measured_sizes

MIB = 1 << 20


def bench(*arguments: str, status: int = 0) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "mlxdist", "bench", *arguments]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert finished.returncode == status, finished.stdout + finished.stderr
    return finished


def require_times(measured: dict) -> None:
    assert 0 < measured["min"] <= measured["median"] <= measured["p99"] <= measured["max"]
    assert measured["count"] > 0


def require_limits(case: dict) -> None:
    for name in LIMITS if len(CORES) > 1 else ["memcpy"]:
        require_times(case[name])
        assert case[f"times_{name}"] == pytest.approx(case["microseconds"]["median"] / case[name]["median"])


def require_case(case: dict, ranks: int) -> None:
    require_times(case["microseconds"])
    require_limits(case)
    median, size = case["microseconds"]["median"], case["bytes"]
    assert (case["wrong"], case["refused"]) == (0, None)
    assert case["algbw"] == pytest.approx(size / median / 1e3)
    assert case["busbw"] == pytest.approx(bus_bandwidth(case["operation"], ranks, size, median))
    assert case["algorithm"] in ("direct", "mesh", "ring", "doubling", "tree")


@pytest.mark.parametrize("level", ["mlx", pytest.param("engine", marks=pytest.mark.long)])
def test_collectives(level, tmp_path):
    output = tmp_path / "results.json"
    arguments = ["--level", level, "--sizes", "4KiB,128KiB", "--rounds", "3", "--dtype", "float32,bfloat16"]
    printed = bench("collectives", *arguments, "--output", str(output)).stdout
    results = json.loads(output.read_text())
    cases = {(case["operation"], case["dtype"], case["bytes"]): case for case in results["cases"]}
    assert set(cases) == {(o, d, s) for o in OPERATIONS for d in ("float32", "bfloat16") for s in (4096, 128 << 10)}
    assert (results["ranks"], results["level"], len(results["cases"])) == (2, level, len(cases))
    for case in cases.values():
        require_case(case, ranks=2)
        assert case["operation"] in printed and format_size(case["bytes"]) in printed
    assert "#wrong" in printed and all(column in printed for column in LIMIT_COLUMNS)
    assert "\x1b" not in printed  # no colours in a pipe


@pytest.mark.long
@pytest.mark.parametrize("level", ["mlx", "engine"])
def test_three_ranks_and_every_dtype(level):
    """One rank of three has no partner in send_recv, and 1008 bytes are no power of 2."""
    arguments = ["-n", "3", "--dtype", "all", "--sizes", "1008", "--rounds", "3", "--level", level, "--json"]
    results = json.loads(bench("collectives", *arguments, "--no-pin").stdout)
    measured = {(case["operation"], case["dtype"]) for case in results["cases"]}
    assert measured == {(operation, dtype) for operation in OPERATIONS for dtype in DTYPES}
    for case in results["cases"]:
        require_case(case, ranks=3)
    assert results["pinned"] is False


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--op", "all_som"], "'all_som' is not one of all_sum, all_gather"),
        (["--dtype", "float33"], "'float33' is not one of bool"),
        (["--sizes", "12 apples"], "'12 apples' is not a size"),
        (["--min", "1MiB", "--max", "1KiB"], "1 MiB is more than --max"),
        (["-n", "1"], "1 rank in all; this needs 2 to 1024"),
        (["-n", "1025"], "1025 ranks in all; this needs 2 to 1024"),
        (["--sizes", "3"], "all_sum of float32 on 2 ranks has no size of 3 B, only multiples of 4 B; write 4"),
        (["--sizes", "1000", "-n", "3", "--dtype", "int8"], "all_gather of int8 on 3 ranks has no size of 1000 B"),
        (["--sizes", "4KiB", "-n", "3", "--op", "sum_scatter"], "only multiples of 12 B; write 4092 or 4104"),
        (["--min", "6", "--op", "broadcast,all_to_all"], "6 B is too little for all_to_all of float32 on 2 ranks"),
    ],
)
def test_collectives_refuses(arguments, words):
    assert words in " ".join(bench("collectives", *arguments, status=2).stderr.split())


@pytest.mark.long
def test_collectives_on_more_ranks_than_bfloat16_sums_exactly():
    arguments = ["-n", "9", "--dtype", "bfloat16,float32", "--sizes", "36KiB", "--rounds", "3", "--no-pin", "--json"]
    results = json.loads(bench("collectives", *arguments, "--op", "all_sum,sum_scatter", "--level", "engine").stdout)
    assert (results["ranks"], len(results["cases"])) == (9, 4)
    assert all((case["bytes"], case["wrong"]) == (36 << 10, 0) for case in results["cases"])


@pytest.mark.long
def test_fragmentation():
    results = json.loads(bench("fragmentation", "--bytes", "64KiB", "--pieces", "50", "--rounds", "3", "--json").stdout)
    cases = {(case["operation"], case["pieces"]): case for case in results["cases"]}
    assert set(cases) == {(operation, pieces) for operation in ("send_recv", "all_sum") for pieces in (1, 50)}
    for (operation, pieces), case in cases.items():
        require_times(case["microseconds"])
        require_limits(case)
        assert (case["bytes"], case["wrong"]) == (64 << 10, 0)
        # Two ranks: whatever the pieces, rank 0's own bytes go to rank 1 once.
        assert case["counters"]["payload_bytes_sent"] == 64 << 10, operation
        assert case["counters"]["messages_sent"] >= pieces
    for operation in ("send_recv", "all_sum"):
        whole, parts = (cases[operation, pieces]["counters"]["header_bytes_sent"] for pieces in (1, 50))
        assert whole < parts


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full to stand in for a full disk")
def test_results_that_cannot_be_written_are_shown():
    finished = bench("fragmentation", "--bytes", "64KiB", "--rounds", "3", "--output", "/dev/full", status=1)
    assert "all_sum" in finished.stdout and all(column in finished.stdout for column in LIMIT_COLUMNS)
    assert "Traceback" not in finished.stderr
    assert "Error: /dev/full is not written: No space left on device" in finished.stderr


def test_fragmentation_refuses_pieces_of_nothing():
    assert "too few for 1000 pieces" in bench("fragmentation", "--bytes", "100", status=2).stderr
    assert "4001 B are no whole number of float32" in bench("fragmentation", "--bytes", "4001", status=2).stderr


@pytest.mark.long
def test_tune_saves_a_table_that_jobs_can_read(tmp_path):
    table = tmp_path / "tuning.json"
    arguments = ["--min", "1KiB", "--max", "4KiB", "--rounds", "3", "--force", "--table", str(table), "--json"]
    results = json.loads(bench("tune", *arguments).stdout)
    assert json.loads(table.read_text())["rows"] == results["rows"]
    assert {row["operation"] for row in results["rows"]} == {case["operation"] for case in results["cases"]}
    for case in results["cases"]:
        assert len(case["microseconds"]) >= 2 and min(case["microseconds"].values()) > 0
        assert case["default"] in case["microseconds"]
    for ranks in ("2", "3"):
        arguments = ["-n", ranks, "--min", "1KiB", "--max", "1KiB", "--rounds", "3", "--force", "--table", str(table)]
        printed = bench("tune", *arguments).stdout.replace("\n", "")
        assert str(table) in printed and "copied by all ranks at once" in printed
    assert {row["ranks"] for row in json.loads(table.read_text())["rows"]} == {2, 3}


@pytest.mark.long
@pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="the system does not say what other processes use")
def test_tune_saves_nothing_that_was_measured_under_load(tmp_path):
    table = tmp_path / "tuning.json"
    arguments = ["--min", "1KiB", "--max", "1KiB", "--rounds", "3", "--table", str(table)]
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(1 + os.cpu_count() // 4)]
    try:
        said = bench("tune", *arguments, status=1)
        assert f"nothing is saved to {table}: other processes used " in said.stderr and "give --force" in said.stderr
        assert "Other processes used" in said.stdout and not table.exists()
        bench("tune", *arguments, "--force")
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert json.loads(table.read_text())["rows"]


@pytest.mark.parametrize(
    "smallest, ranks, sizes",
    [
        (1024, 2, [1024, 4096, 16384]),
        (1024, 300, [1200, 4800, 16800]),
        (256, 3, [264, 1032, 4104, 16392]),
        (64, 1024, [4096, 16384]),
    ],
)
def test_tune_rounds_sizes_up_to_what_the_ranks_can_divide(smallest, ranks, sizes):
    assert measured_sizes(smallest, 16 << 10, ranks) == sizes


def test_tune_refuses_what_does_not_fit_into_memory():
    said = " ".join(bench("tune", "-n", "1024", "--max", "4GiB", "--table", "/dev/null", status=2).stderr.split())
    assert "all_gather of 4 GiB by 1024 ranks" in said and "or fewer ranks" in said


def test_result_lines_from_other_hosts_stay_whole_under_mpirun():
    """Open MPI before version 5 tags each piece that it reads, in the middle of long lines, too."""
    hosts = HostSelection(parse("a\nb"), arguments=["--hosts", "a,b"])
    assert "--no-prefix" in _launch(2, {}, hosts, under_mpirun=True)
    assert "--no-prefix" not in _launch(2, {}, hosts, under_mpirun=False)


def test_tune_refuses_to_replace_a_file_it_does_not_understand(tmp_path):
    table = tmp_path / "tuning.json"
    table.write_text("my notes")
    assert "line 1, column 1" in bench("tune", "--table", str(table), status=1).stderr
    assert table.read_text() == "my notes"


# busbw of 1 MB in 1 ms, an algbw of 1 GB/s, worked out by hand from nccl-tests' PERFORMANCE.md
@pytest.mark.parametrize(
    "operation, ranks, expected",
    [
        ("all_sum", 2, 1.0),
        ("all_sum", 4, 1.5),
        ("all_sum", 8, 1.75),
        ("all_gather", 2, 0.5),
        ("all_gather", 4, 0.75),
        ("sum_scatter", 4, 0.75),
        ("all_to_all", 8, 0.875),
        ("broadcast", 4, 1.0),
        ("send_recv", 2, 1.0),
    ],
)
def test_bus_bandwidth(operation, ranks, expected):
    assert algorithm_bandwidth(10**6, 1000) == pytest.approx(1)
    assert bus_bandwidth(operation, ranks, 10**6, 1000) == pytest.approx(expected)


def test_a_number_that_memory_cannot_deliver_is_refused():
    """16 MiB by two ranks: an all_sum must copy as much as the copy did, so a tenth of its time cannot be."""
    reason = impossible("all_sum", 2, 16 * MIB, 100, 1000)
    assert "167.8 GB/s" in reason and "25.2 GB/s at most" in reason
    assert impossible("all_sum", 2, 16 * MIB, 700, 1000) is None
    # A quarter of the bytes have to move: what is impossible for all_sum is not for these.
    assert impossible("broadcast", 2, 16 * MIB, 400, 1000) is None
    assert impossible("broadcast", 2, 16 * MIB, 300, 1000)
    assert impossible("all_sum", 8, 16 * MIB, 1000, 1000)


def test_refused_numbers_are_not_handed_on():
    numbers = {"microseconds": {"median": 1.0}, "algbw": 9.0, "busbw": 9.0, "times_memcpy": 0.1, "times_transfer": 0.1}
    good, bad = numbers | {"refused": None, "wrong": 0}, numbers | {"refused": "too fast", "wrong": 0}
    assert withhold(good) == good
    assert withhold(bad) == {name: None for name in numbers} | {"refused": "too fast", "wrong": 0}


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_checker_finds_each_wrong_element(dtype):
    expected = add(Inputs(dtype, 1000, 3))
    assert expected.dtype == storage(dtype) and count_wrong(expected.copy(), expected) == 0
    result = expected.copy()
    for position in (0, 501, 999):
        result.view(np.uint8).reshape(1000, -1)[position, -1] ^= 1  # one bit
    assert count_wrong(result, expected) == 3
    assert count_wrong(expected[:-1], expected) == 1000


@pytest.mark.parametrize("ranks", [9, 33, 100, 1024])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_sums_of_many_ranks_are_exact_in_every_order(dtype, ranks):
    data = Inputs(dtype, 1000, ranks)
    wide = [(array.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else array for array in data]
    assert np.sum(wide, axis=0, dtype=np.int64).max() <= {"bfloat16": 256, "float16": 2048, "float32": 1 << 24}[dtype]
    assert np.count_nonzero(add(data)) > 900 and all(np.count_nonzero(array) for array in data)


def test_parts_in_each_others_place_are_found():
    data = Inputs("float32", 4096, 2)
    assert count_wrong(data[0], data[1]) > 3900
    for distance in (1, 8, 64, 1008, 1024):
        assert count_wrong(np.roll(data[0], distance), data[0]) > 3900


@pytest.mark.parametrize("way", [Eager, Lazy])
def test_wrong_results_are_counted_before_and_after_the_timed_calls(way):
    """An operation that leaves one element as it was, or changes one, in a group of one."""

    def eager(x, out):
        out[1:] = x[1:]

    def lazy(x):
        return x.at[0].add(1)

    data = Inputs("float32", 100, 1)
    through = way(CASES["all_to_all"], data, mlxdist.init(), eager if way is Eager else lazy)
    assert through.wrong == 1
    through.call()
    assert through.count_wrong() == 1 + through.chain


def test_sizes():
    assert [parse_size(text) for text in ("1", "4KiB", "16mib", "1 GiB")] == [1, 4096, 16 * MIB, 1 << 30]
    shown = [format_size(size) for size in (1, 1000, 4096, 1536, 16 * MIB)]
    assert shown == ["1 B", "1000 B", "4 KiB", "1.5 KiB", "16 MiB"]
    assert size_range(4096, 100_000) == [4096, 16384, 65536]
    for text in ("", "0", "-1", "1.5KiB", "4KB", "9GiB", "1e3", "١"):
        with pytest.raises(ValueError, match="is not a size"):
            parse_size(text)
