"""`mlxdist bench pp`: that it runs, checks and judges. No test looks at times."""

import json

import pytest
from test_bench import bench, require_times, results_of

from mlxdist.tools.bench.pp import ALONE, BATCH, BY_SPEED, EQUAL, IN_FLIGHT, MLX_LM, SCHEDULES, targets


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3])
def test_pp(tmp_path, ranks):
    output = tmp_path / "results.json"
    arguments = ["-n", str(ranks), "--hidden", "128", "--layers", "4", "--vocabulary", "64", "--tokens", "4"]
    printed = bench("pp", *arguments, "--requests", "3", "--repeats", "3", "--output", str(output)).stdout
    results = json.loads(output.read_text())
    variants = {*SCHEDULES, ALONE}, {IN_FLIGHT, BATCH, MLX_LM}, {BY_SPEED, EQUAL}
    assert {result["variant"] for result in results["cases"]} == set.union(*variants)
    for result in results["cases"]:
        require_times(result["microseconds"])
        assert (result["wrong"], result["refused"]) == (0, None)
        if result["variant"] in SCHEDULES:
            assert 0 < result["bubble"] < 1 and 0 < result["formula"] < 1
    assert len(results["targets"]) == 6 and "bubble (formula)" in printed and "targets: " in printed


def test_more_stages_than_layers():
    assert "--layers 2 are too few for 3 stages" in bench("pp", "-n", "3", "--layers", "2", status=2).stderr


def test_targets():
    training = results_of("training", **{"1f1b": 2.0, "gpipe": 2.0, "zero_bubble": 2.0, ALONE: 3.2})
    for result, bubble in zip(training, (0.1, 0.15, 0.2)):
        result |= {"bubble": bubble, "formula": 0.1}
    cases = [
        *training,
        *results_of("generation", **{IN_FLIGHT: 1.0, BATCH: 1.5, MLX_LM: 1.5}),
        *results_of("slowed", **{BY_SPEED: 1.0, EQUAL: 1.3}),
    ]
    met = [target.judged()["met"] for target in targets({"cases": cases})]
    assert met == [True, False, True, False, False, True]  # in the order of SCHEDULES: gpipe, 1f1b, zero_bubble
