"""`mlxdist bench dp`: that it runs, checks and judges. No test looks at times."""

import json

import pytest
from test_bench import bench, require_times

from mlxdist.tools.bench.dp import AFTER, ALONE, OVERLAPPED, targets


@pytest.mark.long
def test_dp(tmp_path):
    output = tmp_path / "results.json"
    arguments = ["--layers", "3", "--dims", "16", "--rows", "2", "--bucket", "1KiB", "--repeats", "3"]
    printed = bench("dp", *arguments, "--output", str(output)).stdout
    results = json.loads(output.read_text())
    assert {result["variant"] for result in results["cases"]} == {OVERLAPPED, AFTER, ALONE}
    for result in results["cases"]:
        require_times(result["microseconds"])
        assert (result["wrong"], result["refused"]) == (0, None)
        assert result["gradient_bytes"] == 3 * 4 * 16 * 16
    assert len(results["targets"]) == 1 and "free cores" in printed and "targets: " in printed


def found(overlapped: float, after: float, alone: float) -> list[tuple[float | None, bool | None]]:
    case = {"operation": "step", "layers": 1, "dims": 16, "rows": 1, "bucket": 1}
    cases = [
        {"case": case, "variant": name, "free_cores": 1, "microseconds": {"median": time} if time else None}
        for name, time in ((OVERLAPPED, overlapped), (AFTER, after), (ALONE, alone))
    ]
    judged = [target.judged() for target in targets({"cases": cases})]
    return [(target["measured"], target["met"]) for target in judged]


def test_targets():
    assert found(5.0, 8.0, 4.0) == [(0.75, True)]
    assert found(7.0, 8.0, 4.0) == [(0.25, False)]
    assert found(9.0, 8.0, 4.0) == [(-0.25, False)]
    assert found(5.0, 4.0, 4.0) == found(0.0, 8.0, 4.0) == [(None, None)], "no communication to be seen; no time"
