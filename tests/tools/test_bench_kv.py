"""`mlxdist bench kv`: that it runs, checks and judges. No test looks at times."""

import json

import pytest
from test_bench import bench, require_times, results_of

from mlxdist.tools.bench.kv import ALONE, KV, MESSAGES, SPLIT, targets


@pytest.mark.long
def test_kv(tmp_path):
    output = tmp_path / "results.json"
    arguments = ["--hidden", "128", "--layers", "2", "--tokens", "9,32", "--repeats", "3", "--output", str(output)]
    printed = bench("kv", *arguments).stdout
    results = json.loads(output.read_text())
    assert [result["variant"] for result in results["cases"]] == [KV, MESSAGES] * 2 + [SPLIT, ALONE] * 2
    for result in results["cases"]:
        require_times(result["microseconds"])
        assert (result["wrong"], result["refused"]) == (0, None)
    assert len(results["targets"]) == 4 and "targets: " in printed


def test_other_numbers_of_ranks():
    assert "-n 2, not 3" in bench("kv", "-n", "3", status=2).stderr


def test_targets():
    for kv, split, met in ((1.0, 1.04, [True, True]), (1.2, 1.06, [False, False])):
        first_token = results_of("first token", **{SPLIT: split, ALONE: 1.0})
        cases = [*results_of("transfer", **{KV: kv, MESSAGES: 1.0}), *first_token]
        assert [target.judged()["met"] for target in targets({"cases": cases})] == met
