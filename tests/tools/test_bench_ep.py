"""`mlxdist bench ep`: that it runs, checks data and prints what it promises. No test looks at the times themselves."""

import json

import pytest
from test_bench import bench, require_times

from mlxdist.nn.expert_parallel.policy import MODES
from mlxdist.tools.bench.ep import AUTO, COMPILED, INSIDE, ONE_PROCESS, RING, targets
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
    arguments = ["-n", str(ranks), "--tokens", "1,5", "--shape", shape, "--scale", str(scale), "--repeats", "3"]
    arguments += ["--sharded"] if sharded else []
    printed = bench("ep", *arguments, "--output", str(output), "--plot", str(plot)).stdout
    results = json.loads(output.read_text())
    ways = {ONE_PROCESS, RING, AUTO, *MODES} | (set() if sharded else {COMPILED, INSIDE})
    measured = {
        (result["case"]["operation"], result["case"]["tokens"], result["variant"]) for result in results["cases"]
    }
    assert measured == {(shape, tokens, way) for tokens in (1, 5) for way in ways}
    for result in results["cases"]:
        require_times(result["microseconds"])
        assert (result["wrong"], result["refused"]) == (0, None) and result["mode"] in MODES
        assert f"{shape}: {result['described']}" in printed
    assert [target["met"] in (True, False) for target in results["targets"]] == [True, True]
    assert "targets: " in printed and all(target["case"] in printed for target in results["targets"])
    assert limits_line(results["setup"]["limits"]) in printed
    assert plot.stat().st_size > 10_000


def test_targets():
    def results(tokens: int, ring: float, one: float, refused: str | None) -> list[dict]:
        case = {"operation": "mixtral", "tokens": tokens}
        return [
            {
                "case": case,
                "variant": name,
                "refused": refused,
                "microseconds": None if refused else dict.fromkeys(("median", "min", "max"), time),
            }
            for name, time in ((RING, ring), (ONE_PROCESS, one), (AUTO, 100.0))
        ]

    cases = results(1, 90.0, 50.0, None) + results(128, 110.0, 139.0, None) + results(64, 1.0, 1.0, "too fast")
    found = [target.judged() for target in targets({"cases": cases})]
    assert [(target["case"], target["measured"], target["bound"], target["met"]) for target in found] == [
        ("mixtral, 1 token: mlx-lm's sharding", 0.9, 1.0, False),
        ("mixtral, 128 tokens: mlx-lm's sharding", 1.1, 1.0, True),
        ("mixtral, 128 tokens: one process", 1.39, 1.4, False),
        ("mixtral, 64 tokens: mlx-lm's sharding", None, 1.0, None),
    ]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--shape", "llama"], "'llama' is not one of mixtral, qwen3.5-moe"),
        (["--tokens", "1,many"], "'many' is not a number from 1 to 65536"),
        (["--tokens", "0"], "'0' is not a number from 1 to 65536"),
    ],
)
def test_rejects(arguments, words):
    pytest.importorskip("mlx_lm")
    assert words in " ".join(bench("ep", *arguments, status=2).stderr.split())
