"""`context_parallel`: models of mlx-lm called with shards of sequences train and generate as in one process."""

from pathlib import Path

import pytest
from guides import program_of

pytest.importorskip("mlx_lm")

LONG = pytest.mark.long
MODELS = ["qwen3", "llama", "qwen3_moe", "gpt_oss", "gemma3_text"]  # plain, a tiny MoE, sinks and windows


@pytest.mark.parametrize(
    ("model", "ranks"),
    [
        (MODELS[0], 2),
        *(pytest.param(MODELS[0], ranks, marks=LONG) for ranks in (1, 3, 4)),
        *(pytest.param(model, 3, marks=LONG) for model in MODELS[1:]),
    ],
)
@pytest.mark.parametrize("scenario", ["training", "prefilling"])
def test_ring(run_scenarios, scenario, model, ranks):
    run_scenarios("context_parallel.py", ranks, scenario, model, "ring")


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=LONG)])  # tiny models have four heads
@pytest.mark.parametrize("model", ["qwen3_moe", pytest.param("gpt_oss", marks=LONG)])
@pytest.mark.parametrize("scenario", ["training", pytest.param("prefilling", marks=LONG)])
def test_ulysses(run_scenarios, scenario, model, ranks):
    run_scenarios("context_parallel.py", ranks, scenario, model, "ulysses")


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "arguments"),
    [
        (2, ["ring"]),
        *(pytest.param(ranks, ["ring"], marks=LONG) for ranks in (1, 3, 4)),
        *(pytest.param(ranks, ["ulysses"], marks=LONG) for ranks in (2, 4)),
        *(pytest.param(4, [method, axis], marks=LONG) for method in ("ring", "ulysses") for axis in ("dp", "fsdp")),
    ],
)
def test_ranks_without_targets(run_scenarios, ranks, arguments):
    """Of masked prompts and padding: their gradients are those of the other ranks' targets."""
    run_scenarios("context_parallel.py", ranks, "masked", *arguments)


@LONG
def test_prompts_of_a_model_whose_offset_is_an_array(run_scenarios):
    run_scenarios("context_parallel.py", 3, "prefilling", "gemma4", "ring")


@LONG
def test_a_layer_that_is_computed_again_in_backward(run_scenarios):
    run_scenarios("context_parallel.py", 2, "training", "llama", "ring", "checkpointed")


@LONG
@pytest.mark.parametrize("order", ["first", "last"])
def test_with_tensor_parallel(run_scenarios, order):
    run_scenarios("context_parallel.py", 4, "with_tensor_parallel", order)


@LONG
def test_every_model_file_of_mlx_lm(run_scenarios):
    run_scenarios("context_parallel.py", 2, "every_model", timeout=400)


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=LONG)])
def test_bad_input(run_scenarios, ranks):
    run_scenarios("context_parallel.py", ranks, "bad_input")


@LONG
def test_the_program_of_the_guide(run_ranks, tmp_path):
    """It prints the same on one rank as on two."""
    program = program_of(Path(__file__).parents[2] / "docs" / "context-parallel.md", tmp_path)
    (alone,) = run_ranks(program, 1)
    assert len(alone.split()) == 4 and run_ranks(program, 2) == [alone] * 2
