"""`mlxdist bench cp`: that it runs, checks and judges. No test looks at times."""

import json

import pytest
from test_bench import bench, require_times

from mlxdist.tools.bench.cp import GATHERED, RING, ULYSSES, targets


@pytest.mark.long
@pytest.mark.parametrize("kv_heads, names", [(2, {RING, GATHERED, ULYSSES}), (1, {RING, GATHERED})])
def test_cp(kv_heads, names, tmp_path):
    output = tmp_path / "results.json"
    arguments = ["--tokens", "64", "--heads", "2", "--kv-heads", str(kv_heads), "--dims", "8", "--repeats", "3"]
    printed = bench("cp", *arguments, "--output", str(output)).stdout
    results = json.loads(output.read_text())
    measured = {(result["case"]["operation"], result["variant"]) for result in results["cases"]}
    assert measured == {(name, way) for name in ("forward", "training") for way in names}
    for result in results["cases"]:
        require_times(result["microseconds"])
        assert (result["wrong"], result["refused"]) == (0, None) and result["peak"] > 0
    assert len(results["targets"]) == 4 and "targets: " in printed and "ring: MiB at most" in printed


def test_arguments_that_do_not_fit():
    assert "--heads 3 is not a multiple of --kv-heads 2" in bench("cp", "--heads", "3", status=2).stderr
    assert "--tokens 6 is not a multiple of 4" in bench("cp", "--tokens", "6", status=2).stderr


def test_targets():
    case = {"operation": "forward", "tokens": 8, "heads": 2, "kv_heads": 1, "dims": 8}
    cases = [
        {"case": case, "variant": name, "peak": peak, "microseconds": dict.fromkeys(("median", "min", "max"), time)}
        for name, time, peak in ((RING, 2.0, 60), (GATHERED, 3.0, 100))
    ]
    found = [target.judged() for target in targets({"cases": cases})]
    assert [(target["measured"], target["met"]) for target in found] == [(1.5, True), (0.6, False)]
