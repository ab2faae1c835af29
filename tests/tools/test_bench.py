"""`mlxdist bench`: that it runs, checks data and prints what it promises. No test looks at the numbers themselves."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from reference import DTYPES

import mlxdist
from mlxdist.base import tables
from mlxdist.runtime.group.tuning import ALGORITHMS
from mlxdist.tools.bench.bandwidth import OPERATIONS, algorithm_bandwidth, bus_bandwidth, impossible, least_copies
from mlxdist.tools.bench.limits import LIMIT_COLUMNS, LIMITS
from mlxdist.tools.bench.operations import CASES, Eager, Inputs, Lazy, add, count_wrong, storage
from mlxdist.tools.bench.runner import _mpi_options
from mlxdist.tools.bench.sizes import parse_size, size_range
from mlxdist.tools.bench.timing import CORES

MIB = 1 << 20


def bench(*arguments: str, status: int = 0) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "mlxdist", "bench", *arguments]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert finished.returncode == status, finished.stdout + finished.stderr
    return finished


def require_times(measured: dict) -> None:
    assert 0 < measured["min"] <= measured["median"] <= measured["p99"] <= measured["max"]
    assert measured["count"] > 0


def results_of(operation: str, **times: float) -> list[dict]:
    """Of one case, by variant."""
    case = {"operation": operation, "hidden": 128, "layers": 4}
    quantiles = ("median", "p10", "p90", "min", "max")
    return [{"case": case, "variant": name, "microseconds": dict.fromkeys(quantiles, t)} for name, t in times.items()]


def require_limits(result: dict) -> None:
    for name in LIMITS if len(CORES) > 1 else ["memcpy"]:
        require_times(result[name])


def require_result(result: dict, ranks: int) -> None:
    require_times(result["microseconds"])
    require_limits(result)
    median, case = result["microseconds"]["median"], result["case"]
    assert (result["variant"], result["wrong"], result["refused"]) == ("mlxdist", 0, None)
    assert result["algbw"] == pytest.approx(case["bytes"] / median / 1e3)
    assert result["busbw"] == pytest.approx(bus_bandwidth(case["operation"], ranks, case["bytes"], median))
    assert result["algorithm"] in ALGORITHMS


@pytest.mark.parametrize(
    "api, dtypes",
    [
        ("mlx", "bfloat16"),
        *(pytest.param(api, "float32,bfloat16", marks=pytest.mark.long) for api in ("mlx", "engine")),
    ],
)
def test_collectives(api, dtypes, tmp_path):
    output = tmp_path / "results.json"
    arguments = ["--api", api, "--sizes", "4KiB,128KiB", "--repeats", "3", "--dtype", dtypes]
    printed = bench("collectives", *arguments, "--output", str(output)).stdout
    results = json.loads(output.read_text())
    cases = {tuple(result["case"].values()): result for result in results["cases"]}
    assert set(cases) == {(o, d, s) for o in OPERATIONS for d in dtypes.split(",") for s in (4096, 128 << 10)}
    assert (results["setup"]["ranks"], results["setup"]["api"], len(results["cases"])) == (2, api, len(cases))
    for result in cases.values():
        require_result(result, ranks=2)
        assert result["case"]["operation"] in printed and tables.size(result["case"]["bytes"]) in printed
    assert "#wrong" in printed and all(column in printed for column in LIMIT_COLUMNS)
    assert "\x1b" not in printed  # no colours in a pipe


@pytest.mark.long
@pytest.mark.parametrize("api", ["mlx", "engine"])
def test_three_ranks_and_every_dtype(api):
    """One rank of three has no partner in send_recv, and 1008 bytes are no power of 2."""
    arguments = ["-n", "3", "--dtype", "all", "--sizes", "1008", "--repeats", "3", "--api", api, "--json"]
    results = json.loads(bench("collectives", *arguments, "--no-pin").stdout)
    measured = {(result["case"]["operation"], result["case"]["dtype"]) for result in results["cases"]}
    assert measured == {(operation, dtype) for operation in OPERATIONS for dtype in DTYPES}
    for result in results["cases"]:
        require_result(result, ranks=3)
    assert results["setup"]["pinned"] is False


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--op", "all_som"], "'all_som' is not one of all_sum, all_max, all_gather"),
        (["--dtype", "float33"], "'float33' is not one of bool"),
        (["--sizes", "12 apples"], "'12 apples' is not a size"),
        (["--min", "1MiB", "--max", "1KiB"], "1 MiB is more than --max"),
        (["-n", "1"], "1 rank in all; this needs 2 to 256"),
        (["-n", "257"], "257 ranks in all; this needs 2 to 256"),
        (["--sizes", "3"], "all_sum of float32 on 2 ranks has no size of 3 B, only multiples of 4 B; write 4"),
        (["--sizes", "1000", "-n", "3", "--dtype", "int8"], "all_gather of int8 on 3 ranks has no size of 1000 B"),
        (["--sizes", "4KiB", "-n", "3", "--op", "sum_scatter"], "only multiples of 12 B; write 4092 or 4104"),
        (["--min", "6", "--op", "broadcast,all_to_all"], "6 B is too little for all_to_all of float32 on 2 ranks"),
    ],
)
def test_collectives_rejects(arguments, words):
    assert words in " ".join(bench("collectives", *arguments, status=2).stderr.split())


@pytest.mark.long
def test_collectives_on_more_ranks_than_bfloat16_sums_exactly():
    arguments = ["-n", "9", "--dtype", "bfloat16,float32", "--sizes", "36KiB", "--repeats", "3", "--no-pin", "--json"]
    results = json.loads(bench("collectives", *arguments, "--op", "all_sum,sum_scatter", "--api", "engine").stdout)
    assert (results["setup"]["ranks"], len(results["cases"])) == (9, 4)
    assert all((result["case"]["bytes"], result["wrong"]) == (36 << 10, 0) for result in results["cases"])


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full to stand in for a full disk")
def test_results_that_cannot_be_written_are_shown():
    finished = bench(
        "collectives", "--sizes", "64KiB", "--op", "all_sum", "--repeats", "3", "--output", "/dev/full", status=1
    )
    assert "all_sum" in finished.stdout and all(column in finished.stdout for column in LIMIT_COLUMNS)
    assert "Traceback" not in finished.stderr
    assert "Error: /dev/full is not written: No space left on device" in finished.stderr


def test_result_lines_from_other_hosts_stay_whole_under_mpirun():
    """Open MPI before version 5 tags each piece that it reads, in the middle of long lines, too."""
    assert "--no-prefix" in _mpi_options(has_hosts=True) and "--no-prefix" not in _mpi_options(has_hosts=False)


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
        ("all_max", 4, 1.5),
        ("reduce", 4, 1.0),
        ("gather", 4, 0.75),
        ("scatter", 8, 0.875),
        ("all_to_all_v", 2, 0.5),
    ],
)
def test_bus_bandwidth(operation, ranks, expected):
    assert algorithm_bandwidth(10**6, 1000) == pytest.approx(1)
    assert bus_bandwidth(operation, ranks, 10**6, 1000) == pytest.approx(expected)


def test_parts_of_all_to_all_v():
    """Half of what would go to the rank before goes to the next one: rank 0 sends 4, 6 and 2 elements."""
    data = Inputs("int32", 12, 3)
    expected = [
        np.concatenate([data[0][:4], data[1][:2], data[2][:6]]),
        np.concatenate([data[0][4:10], data[1][2:6], data[2][6:8]]),
        np.concatenate([data[0][10:], data[1][6:], data[2][8:]]),
    ]
    for rank, array in enumerate(expected):
        np.testing.assert_array_equal(CASES["all_to_all_v"].expected(data, rank), array)


def test_a_time_that_memory_does_not_allow_is_rejected():
    """An all_sum by two ranks must copy as much as the copy did, so a tenth of its time cannot be."""

    def reason(operation: str, ranks: int, microseconds: float) -> str | None:
        return impossible(microseconds, 1000 * least_copies(operation, ranks))

    assert "took 100.00 us" in reason("all_sum", 2, 100) and "takes 666.67 us at least" in reason("all_sum", 2, 100)
    assert reason("all_sum", 2, 700) is None
    # A quarter of the bytes have to move: what is impossible for all_sum is not for these.
    assert reason("broadcast", 2, 400) is None
    assert reason("broadcast", 2, 300)
    assert reason("all_sum", 8, 1000)


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


def test_shifted_chunks_are_found():
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
    shown = [tables.size(size) for size in (1, 1000, 4096, 1536, 16 * MIB)]
    assert shown == ["1 B", "1000 B", "4 KiB", "1.5 KiB", "16 MiB"]
    assert size_range(4096, 100_000) == [4096, 16384, 65536]
    for text in ("", "0", "-1", "1.5KiB", "4KB", "9GiB", "1e3", "١"):
        with pytest.raises(ValueError, match="is not a size"):
            parse_size(text)
