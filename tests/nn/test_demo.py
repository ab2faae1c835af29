"""The main job, shortened: ranks train a model together, save it, load it, and run it sharded."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx_lm
import pytest
from mlx.utils import tree_flatten

EXAMPLES = Path(__file__).parents[2] / "examples"
EXAMPLE = EXAMPLES / "train_and_generate.py"


@pytest.fixture
def run_example(run_ranks, tmp_path) -> Callable[..., tuple[list[str], dict[str, Any] | None]]:
    """Runs the example with files in tmp_path. Returns what each rank printed, and the report, if there is one."""

    def run(ranks: int, *options: object, status: int = 0) -> tuple[list[str], dict[str, Any] | None]:
        report = tmp_path / "demo.json"
        files = ["--out", tmp_path / "model", "--json", report]
        outputs = run_ranks(EXAMPLE, ranks, *files, *options, timeout=120, status=status)
        return outputs, json.loads(report.read_text()) if report.exists() else None

    return run


@pytest.mark.long
def test_trains_saves_and_generates_sharded(run_example, run_ranks, tmp_path):
    steps, tokens, prompt = 10, 20, 'The "while" statement'
    outputs, report = run_example(2, "--steps", steps, "--tokens", tokens, "--prompt", prompt)
    model, tokenizer = mlx_lm.load(str(tmp_path / "model"))
    ids = tokenizer.encode(prompt)
    generated = [step.token for step in mlx_lm.stream_generate(model, tokenizer, ids, max_tokens=tokens)]
    assert report["generation"]["text"] == tokenizer.decode(ids + generated)

    assert (report["ranks"], report["tokens_equal"]) == (2, True)
    assert (report["provider"], report["provider_reason"]) == ("soft", "all ranks are on one host")
    # At first all of the 1024 tokens are about equally likely: ln 1024 is 6.9.
    assert 6.5 < report["loss_first"] < 8
    assert report["loss_last"] < report["loss_first"] - 0.5

    training, generation = report["training"], report["generation"]
    # A step averages all gradients in one bucket, and the loss; checkpoints have a group of their own.
    assert training["collectives"] == 2 * steps
    assert training["bytes"] > steps * sum(weight.nbytes for _, weight in tree_flatten(model.parameters()))
    # Each of the two layers sums up after attention and after the MLP, for every token and the one mlx-lm is ahead;
    # for the prompt, the second layer only has to fill its cache.
    assert generation["collectives"] == 2 * 2 * (tokens + 1) + 2
    # Sums over ranks are rounded at other places; no difference at all would mean that the model was not sharded.
    assert 0 < generation["largest_difference"] < 1e-3
    for phase in (training, generation):
        assert 0 < phase["seconds_waiting"] <= phase["seconds_communicating"] < phase["seconds"]
        assert phase["tokens_per_second"] > 0
    assert report["work_requests"] >= training["work_requests"] + generation["work_requests"] > 2 * steps
    assert report["bytes"] >= training["bytes"] + generation["bytes"]

    assert generation["text"] in outputs[0] and "2 ranks, soft: all ranks are on one host" in outputs[0]
    for options in ([], ["--stream"]):
        arguments = [tmp_path / "model", "--prompt", prompt, "--max-tokens", tokens, *options]
        again = run_ranks(EXAMPLES / "generate.py", 2, *arguments)
        assert f"{tokenizer.decode(generated).strip()}\n" in again[0] and again[1] == ""
    assert re.search(rf"training .* {steps}/{steps}  loss \d\.\d\d  \d+ tokens/s 0:00:00", outputs[0])
    assert outputs[1] == ""


@pytest.mark.long
def test_trains_the_same_on_any_number_of_ranks(run_example):
    _, one = run_example(1, "--steps", 3, "--tokens", 2)
    _, four = run_example(4, "--steps", 3, "--tokens", 2)
    assert (one["provider"], one["bytes"], four["ranks"]) == ("none", 0, 4)
    assert one["loss_first"] == pytest.approx(four["loss_first"], rel=1e-5)
    assert one["loss_last"] == pytest.approx(four["loss_last"], rel=1e-4)


def test_a_rank_that_fails_ends_the_job(run_example, tmp_path):
    (tmp_path / "file").touch()
    outputs, report = run_example(2, "--out", tmp_path / "file" / "model", status=1)
    assert "NotADirectoryError" in outputs[0]
    assert "rank 0" in outputs[1]
    assert report is None


@pytest.mark.long
@pytest.mark.parametrize(
    "ranks, options, message",
    [
        (3, [], "can be split over 1, 2 or 4 ranks, not over 3"),
        (1, ["--prompt", ""], "The prompt is empty"),
        (1, ["--steps", 0], "Invalid value for '--steps'"),
    ],
)
def test_rejects(run_example, tmp_path, ranks, options, message):
    outputs, report = run_example(ranks, *options, status=2)
    assert all(message in output for output in outputs)
    assert not list(tmp_path.iterdir())
