"""`pipeline_parallel`: models of mlx-lm in stages compute, bitwise, what they compute in one process."""

from pathlib import Path

import pytest
import tiny_models
from guides import program_of

pytest.importorskip("mlx_lm")

LONG = pytest.mark.long
# Plain; tied embedding and a cache without length; several arrays between layers; windows; layers without a cache.
TYPICAL = ["qwen3", "mamba", "rwkv7", "gpt_oss", "nemotron_h"]
NO_STAGES = ["afm7", "gemma3n", "gemma4", "gemma4_text", "iquestloopcoder", "kimi_k3"]


@pytest.mark.parametrize(
    ("ranks", "names"), [(2, TYPICAL[:2]), *(pytest.param(n, TYPICAL, marks=LONG) for n in (1, 3, 4))]
)
def test_logits(run_scenarios, ranks, names):
    run_scenarios("pipeline.py", ranks, "models", *names)


@LONG
def test_every_model_file_of_mlx_lm(run_ranks):
    names = tiny_models.compared_files()
    for output in run_ranks("pipeline.py", 2, "models", *names, timeout=400):
        assert {f"refused: {' '.join(NO_STAGES)}", "passed"} <= set(output.splitlines())


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=LONG), pytest.param(4, marks=LONG)])
def test_uneven_and_virtual_stages(run_scenarios, ranks):
    run_scenarios("pipeline.py", ranks, "cuts", "qwen3")


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=LONG)])
@pytest.mark.parametrize("name", ["qwen3", *(pytest.param(name, marks=LONG) for name in ("gpt_oss", "qwen3_next"))])
def test_generators_of_mlx_lm(run_scenarios, name, ranks):
    run_scenarios("pipeline.py", ranks, "generation", name)


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=LONG)])
def test_calls_that_are_evaluated_together(run_scenarios, ranks):
    run_scenarios("pipeline.py", ranks, "together", "qwen3")


@pytest.mark.parametrize("ranks", [2, *(pytest.param(n, marks=LONG) for n in (1, 3))])
def test_compiled_and_plain_calls(run_scenarios, ranks):
    run_scenarios("pipeline.py", ranks, "compiled", "qwen3")


@pytest.mark.parametrize("ranks", [2, *(pytest.param(n, marks=LONG) for n in (1, 3, 4))])
@pytest.mark.parametrize("name", ["qwen3", *(pytest.param(name, marks=LONG) for name in ("gpt_oss", "qwen3_next"))])
def test_several_batches_on_their_way(run_scenarios, name, ranks):
    run_scenarios("pipeline.py", ranks, "in_flight", name)


def test_calls_of_a_token(run_scenarios):
    run_scenarios("pipeline.py", 2, "calls_of_a_token", "qwen3")


@LONG
@pytest.mark.parametrize("ranks", [2, 4])
def test_stages_without_communication(run_scenarios, ranks):
    run_scenarios("pipeline.py", ranks, "stages", "qwen3")


@LONG
@pytest.mark.parametrize("name", ["qwen3", "gpt_oss", "qwen3_moe"])
def test_with_tensor_parallel(run_scenarios, name):
    run_scenarios("pipeline.py", 4, "with_tensor_parallel", name)


@pytest.mark.parametrize(("ranks", "tp"), [(2, 1), *(pytest.param(*case, marks=LONG) for case in [(3, 1), (4, 2)])])
def test_loading(run_scenarios, tmp_path, ranks, tp):
    run_scenarios("pipeline.py", ranks, "loading", tmp_path, tp)


@pytest.mark.parametrize("ranks", [2, *(pytest.param(n, marks=LONG) for n in (1, 3))])
def test_signatures_that_mlx_lm_reads(run_scenarios, ranks):
    run_scenarios("pipeline.py", ranks, "signatures")


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=LONG)])
def test_bad_input(run_scenarios, ranks):
    run_scenarios("pipeline.py", ranks, "bad_input")


def test_activations_of_another_dtype(run_scenarios):
    run_scenarios("pipeline.py", 2, "other_dtype")


@LONG
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_stage_that_is_killed(run_ranks, ranks):
    outputs = run_ranks("pipeline.py", ranks, "killed", status=None)
    assert all("passed" in output for output in outputs[:-1]), outputs


@LONG
def test_the_program_of_the_guide(run_ranks, tmp_path):
    """It prints the same on one rank as on two."""
    program = program_of(Path(__file__).parents[2] / "docs" / "pipeline.md", tmp_path)
    (alone,) = run_ranks(program, 1)
    assert len(alone.split()) == 8 and run_ranks(program, 2) == [alone, ""]
