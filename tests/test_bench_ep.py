"""`mlxdist bench ep`: that it runs, checks data and prints what it promises. No test looks at the times themselves."""

import json

import pytest
from test_bench import bench, require_times

from mlxdist.nn.experts.policy import MODES
from mlxdist.tools.bench.ep import AUTO, COMPILED, INSIDE, ONE_PROCESS, RING, described, target_lines, targets
from mlxdist.tools.bench.limits import limits_line


@pytest.mark.long
@pytest.mark.parametrize(
    "ranks, shape, scale, sharded",
    [(2, "qwen3.5-moe", 64, False), (3, "mixtral", 148, True)],  # widths that mlx-lm cuts, too
)
def test_ep(ranks, shape, scale, sharded, tmp_path):
    """Also with fewer tokens than ranks."""
    pytest.importorskip("mlx_lm")
    output, plot = tmp_path / "results.json", tmp_path / "times.png"
    arguments = ["-n", str(ranks), "--tokens", "1,5", "--shape", shape, "--scale", str(scale), "--rounds", "3"]
    arguments += ["--sharded"] if sharded else []
    printed = bench("ep", *arguments, "--output", str(output), "--plot", str(plot)).stdout
    results = json.loads(output.read_text())
    ways = {ONE_PROCESS, RING, AUTO, *MODES} | (set() if sharded else {COMPILED, INSIDE})
    assert [(case["shape"], case["tokens"]) for case in results["cases"]] == [(shape, 1), (shape, 5)]
    for case in results["cases"]:
        assert set(case["microseconds"]) == set(case["wrong"]) == ways
        assert not any(case["wrong"].values()) and case["refused"] == []
        for measured in case["microseconds"].values():
            require_times(measured)
        assert case["chosen"] in MODES
        assert described(case) in printed
    assert all(line in printed for line in target_lines(results["targets"]))
    assert limits_line(results["limits"]) in printed
    assert plot.stat().st_size > 10_000


def test_targets():
    def case(tokens: int, ring: float, one: float, refused: list[str]) -> dict:
        times = {RING: ring, ONE_PROCESS: one, AUTO: 100.0}
        measured = {name: {"median": time} for name, time in times.items()}
        return {"shape": "mixtral", "tokens": tokens, "refused": refused, "microseconds": measured}

    found = targets([case(1, 90.0, 50.0, []), case(128, 110.0, 139.0, []), case(128, 1.0, 1.0, ["too fast"])])
    assert [(target["times"], target["wanted"], target["met"]) for target in found] == [
        (0.9, 1.0, False),
        (1.1, 1.0, True),
        (1.39, 1.4, False),
    ]
    assert target_lines(found) == [
        "Targets: 1 of 3 met.",
        "NOT MET: mixtral, 1 token: not slower than mlx-lm's sharding: 0.90, wanted 1.0",
        "met: mixtral, 128 tokens: not slower than mlx-lm's sharding: 1.10, wanted 1.0",
        "NOT MET: mixtral, 128 tokens: faster than one process: 1.39, wanted 1.4",
    ]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--shape", "llama"], "'llama' is not one of mixtral, qwen3.5-moe"),
        (["--tokens", "1,many"], "'1,many' is not a list of numbers"),
        (["--tokens", "0"], "numbers are from 1 to 65536"),
    ],
)
def test_refuses(arguments, words):
    pytest.importorskip("mlx_lm")
    assert words in " ".join(bench("ep", *arguments, status=2).stderr.split())
