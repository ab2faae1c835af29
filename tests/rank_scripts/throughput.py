"""One rank of test_throughput.py: `check` is the name of a function below."""

import sys
from pathlib import Path

import mlx.core as mx
import pytest
from scenarios import group, rank, run_scenario, size

import mlxdist
from mlxdist import train

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from waiting import late

FLOPS = train.FlopsPerToken(2e6, 4e6)


def rates() -> None:
    throughput = train.Throughput(FLOPS, peak_tflops=0.5, recompute=1.0)
    for _ in range(3):
        with throughput.step(tokens=1000):
            mx.eval(mlxdist.all_sum(mx.ones(100)))
            late(0.05 + 0.02 * rank)
    late(0.5)  # between steps, and not counted
    before = group.stats()["collectives"]
    report = throughput.report()
    assert group.stats()["collectives"] - before == (size > 1)
    assert report["trained_tokens"] == 3000
    seconds = 1000 / report["tokens_per_second"]
    assert seconds >= 0.05 + 0.02 * (size - 1)  # of the slowest
    assert report["iterations_per_second"] == pytest.approx(1 / seconds)
    assert report["tflops"] == pytest.approx(6e6 * report["tokens_per_second"] / 1e12)
    assert report["mfu"] == pytest.approx(report["tflops"] / 0.5)
    assert report["hfu"] == pytest.approx(report["mfu"] * 8 / 6)
    assert report["peak_memory"] > 0
    assert (0 < report["communication"] < 1) == (size > 1) and 0 <= report["waiting"] <= report["communication"]
    assert "communication_hidden" not in report
    reports = mlxdist.all_gather(mx.array([list(report.values())]))
    assert mx.array_equal(reports, mx.broadcast_to(reports[:1], reports.shape))
    with throughput.step(tokens=7):
        pass
    assert throughput.report()["trained_tokens"] == 3007
    with pytest.raises(ValueError):
        with throughput.step(tokens=1):
            raise ValueError
    with pytest.raises(mlxdist.InvalidArgument, match="there was no step since the last report"):
        throughput.report()


def hidden() -> None:
    """What steps take longer than their computation is exposed communication, and never more than there was."""
    throughput = train.Throughput()
    assert throughput.measure_compute(lambda: late(0.02), repeats=2) >= 0.02
    with throughput.step(tokens=1):
        late(0.3)
        mx.eval(mlxdist.all_sum(mx.ones(100)))
    report = throughput.report()
    # The step is much longer than the computation: all of it counts as exposed, up to what communication took.
    assert report["communication_exposed"] == pytest.approx(report["communication"])
    assert report["communication_hidden"] == pytest.approx(0, abs=1e-9)
    throughput.measure_compute(lambda: late(0.5), repeats=1)
    with throughput.step(tokens=1):
        mx.eval(mlxdist.all_sum(mx.ones(100)))
    report = throughput.report()
    assert report["communication_exposed"] == 0
    assert report["communication_hidden"] == report["communication"]


def refused() -> None:
    throughput = train.Throughput()
    with pytest.raises(mlxdist.InvalidArgument, match="carried out 2 operations"):
        throughput.measure_compute(lambda: mx.eval(mlxdist.all_sum(mx.ones(3))), repeats=1)
    with throughput.step(tokens=10 + rank):
        pass
    with pytest.raises(mlxdist.Mismatch, match="rank 0 had 1 steps of 10 tokens, and rank 1 had 1 steps of 11 tokens"):
        throughput.report()
    with pytest.raises(mlxdist.Mismatch, match="the ranks disagree about the arguments"):
        train.Throughput(recompute=rank / size)
    with pytest.raises(mlxdist.InvalidArgument, match="recompute is 2, not a share"):
        train.Throughput(recompute=2 if rank == size - 1 else 0)


def peak(tflops: str) -> None:
    """That of the tuning file that the test has written, on all ranks."""
    throughput = train.Throughput(FLOPS)
    assert throughput.peak_tflops == (None if tflops == "None" else float(tflops))
    with throughput.step(tokens=5):
        pass
    assert ("mfu" in throughput.report()) == (throughput.peak_tflops is not None)


run_scenario(globals())
