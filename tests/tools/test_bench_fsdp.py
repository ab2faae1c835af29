"""`mlxdist bench fsdp`: that it runs, checks and judges. No test looks at times."""

import json

import pytest
from test_bench import bench, require_times

from mlxdist.tools.bench.fsdp import MLX, OURS, RING, targets


@pytest.mark.long
def test_fsdp(tmp_path):
    output = tmp_path / "results.json"
    arguments = ["--hidden", "128", "--layers", "2", "--vocabulary", "64", "--tokens", "4", "--repeats", "3"]
    printed = bench("fsdp", *arguments, "--output", str(output)).stdout
    results = json.loads(output.read_text())
    assert [result["variant"] for result in results["cases"]] == [OURS, MLX, RING]
    for result in results["cases"]:
        require_times(result["microseconds"])
        assert (result["wrong"], result["refused"]) == (0, None)
        assert 0 < result["parameter_bytes"] // 2 <= result["peak"], "each rank has half of the gradients at least"
    assert len(results["targets"]) == 2 and "MiB at most" in printed and "targets: " in printed


def test_sizes_that_mlx_cannot_shard():
    failed = bench("fsdp", "-n", "3", "--hidden", "128", status=2)
    assert "multiples of 3" in failed.stderr


def test_targets():
    case = {"operation": "step", "hidden": 128, "layers": 1, "vocabulary": 64, "tokens": 1}
    times = {OURS: 4.0, MLX: 5.0, RING: 5.0}
    cases = [
        {"case": case, "variant": name, "microseconds": dict.fromkeys(("median", "p10", "p90", "min", "max"), time)}
        for name, time in times.items()
    ]
    assert [target.judged()["met"] for target in targets({"cases": cases})] == [True, False]
