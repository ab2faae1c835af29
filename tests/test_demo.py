"""The main job, shortened: two ranks train a model, save it, load it, and run it sharded."""

import json
import re
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parent.parent / "examples" / "train_and_generate.py"


@pytest.fixture
def run_example(run_ranks, tmp_path):
    """Runs the example with these options; returns what each rank printed. Files are in tmp_path."""

    def run(ranks: int, *options: object, status: int | None = 0) -> list[str]:
        files = ["--out", tmp_path / "model", "--json", tmp_path / "demo.json"]
        return run_ranks(EXAMPLE, ranks, *files, *options, timeout=120, status=status)

    return run


def test_trains_saves_and_generates_sharded(run_example, tmp_path):
    steps, tokens = 12, 20
    outputs = run_example(2, "--steps", steps, "--tokens", tokens)
    results = json.loads((tmp_path / "demo.json").read_text())
    assert (results["ranks"], results["provider"], results["tokens_equal"]) == (2, "soft", True)
    assert results["provider_reason"] == "no RDMA device found"
    # At the start all 1024 tokens are about equally likely: ln 1024 = 6.9.
    assert 6.5 < results["loss_first"] < 8 and results["loss_last"] < results["loss_first"] - 0.5

    training, generation = results["training"], results["generation"]
    weights = parameters_of(tmp_path / "model")
    # Two collectives per step: all gradients in one bucket, and the loss.
    assert training["collectives"] == 2 * steps
    assert training["bytes"] >= steps * 4 * weights
    # Two per layer: after attention and after the MLP. mlx-lm computes one token ahead. Of the prompt, the last layer
    # only has to fill the cache.
    assert generation["tokens"] == tokens
    assert generation["collectives"] == 2 * 2 * (tokens + 1) + 2
    # The sums of the sharded model are rounded at other places: a difference of 0 would mean that it is not sharded.
    assert 0 < generation["largest_difference"] < generation["smallest_margin"] / 2
    for phase in (training, generation):
        assert 0 < phase["seconds_waiting"] <= phase["seconds_communicating"] < phase["seconds"]
        assert 0 < phase["tokens_per_second"]
    assert results["work_requests"] >= training["work_requests"] + generation["work_requests"] > 0
    assert results["bytes"] >= training["bytes"] + generation["bytes"]

    assert "2 ranks, soft: no RDMA device found" in outputs[0] and results["text"] in outputs[0]
    assert re.search(rf"training .* {steps}/{steps}  loss \d\.\d\d  \d+ tokens/s 0:00:00", outputs[0])
    assert outputs[1] == ""
    assert_mlx_lm_generates(tmp_path / "model", results["text"], tokens)
    ...
