"""`train.value_and_grad` of models in stages: the gradients of one process with the whole batch."""

from pathlib import Path

import pytest
from guides import program_of

pytest.importorskip("mlx_lm")

LONG = pytest.mark.long


def test_every_schedule(run_scenarios):
    """With fewer micro-batches than stages, as many, and more. In gemma the embedding is the head, too."""
    run_scenarios("pipeline_training.py", 2, "schedules", "gemma", 1, 3)


@LONG
@pytest.mark.parametrize("virtual", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["gemma", "qwen3"])
def test_every_schedule_and_number_of_micro_batches(run_scenarios, name, ranks, virtual):
    run_scenarios("pipeline_training.py", ranks, "schedules", name, virtual, 8)


@LONG
@pytest.mark.parametrize("name", ["gpt_oss", "nemotron_h", "qwen3_moe", "qwen3_next", "rwkv7"])
def test_other_models(run_scenarios, name):
    run_scenarios("pipeline_training.py", 2, "training", name)


@pytest.mark.parametrize("check", ["training", "norms"])
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=LONG)])
def test_several_stages_hold_one_parameter(run_scenarios, ranks, check):
    run_scenarios("pipeline_training.py", ranks, check, "gemma")


@LONG
@pytest.mark.parametrize("name", ["gemma", "qwen3"])
@pytest.mark.parametrize("axis", ["data_parallel", "tensor_parallel", "context_parallel", "sharded_optimizer"])
def test_with_another_axis(run_scenarios, axis, name):
    run_scenarios("pipeline_training.py", 4, f"with_{axis}", name)


def test_gradient_checkpointing(run_scenarios):
    run_scenarios("pipeline_training.py", 2, "with_checkpointing", "qwen3")


@LONG
def test_gradient_checkpointing_with_a_sharded_optimizer(run_scenarios):
    run_scenarios("pipeline_training.py", 4, "with_sharded_optimizer", "qwen3", "checkpointed")


@pytest.mark.parametrize(("ranks", "layers"), [(2, 1), *(pytest.param(*case, marks=LONG) for case in [(2, 4), (3, 2)])])
def test_adapters_on_the_last_layers(run_scenarios, ranks, layers):
    run_scenarios("pipeline_training.py", ranks, "adapters", "qwen3", layers)


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=LONG)])
def test_what_a_loss_may_return(run_scenarios, ranks):
    run_scenarios("pipeline_training.py", ranks, "other_losses")


@LONG
@pytest.mark.parametrize("ranks", [2, 3])
def test_16_bits(run_scenarios, ranks):
    run_scenarios("pipeline_training.py", ranks, "dtypes")


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=LONG)])
def test_bytes_that_are_sent(run_scenarios, ranks):
    run_scenarios("pipeline_training.py", ranks, "counted", "qwen3")


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=LONG)])
def test_bad_input(run_scenarios, ranks):
    run_scenarios("pipeline_training.py", ranks, "bad_input")


@pytest.mark.parametrize(
    ("ranks", "model", "virtual"),
    [
        (2, "gemma", "2"),
        *(pytest.param(ranks, "qwen3", "1", marks=LONG) for ranks in (1, 2, 3, 4)),
        pytest.param(4, "gemma", "1", marks=LONG),
    ],
)
def test_terms_of_a_loss_that_are_not_made_of_logits(run_scenarios, ranks, model, virtual):
    run_scenarios("pipeline_training.py", ranks, "own_terms", model, virtual)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=LONG)])
def test_terms_of_a_loss_that_would_be_lost(run_scenarios, ranks):
    run_scenarios("pipeline_training.py", ranks, "lost_terms")


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=LONG)])
def test_what_two_stages_hold_is_frozen_on_one(run_scenarios, ranks):
    run_scenarios("pipeline_training.py", ranks, "frozen_on_one_stage")


@LONG
def test_activations_of_another_dtype(run_scenarios):
    run_scenarios("pipeline_training.py", 2, "other_dtype")


@LONG
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_stage_that_is_killed(run_ranks, ranks):
    outputs = run_ranks("pipeline_training.py", ranks, "killed", status=None)
    assert all("passed" in output for output in outputs[:-1]), outputs


@LONG
def test_the_program_of_the_guide(run_ranks, tmp_path):
    """It prints the same losses on one rank as on two, and then pictures."""
    program = program_of(Path(__file__).parents[2] / "docs" / "pipeline.md", tmp_path, 1)
    (alone,) = run_ranks(program, 1)
    first, second = run_ranks(program, 2)
    assert first.splitlines()[:5] == alone.splitlines() and len(alone.split()) == 5
    assert first.splitlines()[5].startswith("1f1b: 2 stages, 8 micro-batches; bubble") and second == ""
