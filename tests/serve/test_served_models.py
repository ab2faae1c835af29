"""`mlxdist serve` with a tiny model of every file of mlx-lm: what docs/models.md says is served."""

import mlx.core as mx
import pytest
import tiny_models
from mlx_lm.generate import BatchGenerator, generate_step
from overlapping import ANSWER, PROMPTS
from serving import require_answers, save_model_folder

from mlxdist.serve.worker import PROMPTS_ALONE, REQUESTS_ALONE

pytestmark = pytest.mark.long

# Its signs must be 1 and -1, so that it cannot be saved and loaded; test_worker.py has it.
KINDS = [kind for kind in tiny_models.compared_files() if kind != "prism_hadamard_qwen35"]


def test_every_model_on_two_ranks(run_ranks, tmp_path):
    """Overlapping requests, one of which is cancelled, and a cached prefix: the tokens of one process."""
    save_model_folder(tmp_path)
    for output in run_ranks("served_models.py", 2, tmp_path, *KINDS, timeout=600):
        found = dict(line.split(": ", 1) for line in output.splitlines() if line.partition(":")[0] in KINDS)
        assert found == dict.fromkeys(KINDS, "served")


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_model_over_packets(tmp_path, ranks):
    """On devices that play those of macOS 27, where each packet of 4 KiB is a message."""
    folder = save_model_folder(tmp_path / "model", num_attention_heads=8, num_key_value_heads=4)
    require_answers(folder, ranks, MLXDIST_SOFT_PROFILE="apple-tb5-27")


@pytest.mark.parametrize("kind", [*PROMPTS_ALONE, *REQUESTS_ALONE])
def test_models_whose_batches_of_mlx_lm_give_other_tokens(kind):
    """On one process; where this fails mlx-lm has been mended, and the name can go from the worker."""
    model = tiny_models.build(kind)
    prompts = 1 if kind in REQUESTS_ALONE else 8
    generator = BatchGenerator(
        model, prefill_batch_size=prompts, prefill_step_size=4, stream=mx.default_stream(mx.default_device())
    )
    numbers = generator.insert(PROMPTS, max_tokens=[ANSWER] * len(PROMPTS))
    found: dict[int, list[int]] = {number: [] for number in numbers}
    try:
        while responses := generator.next_generated():
            for response in responses:
                found[response.uid].append(response.token)
    except ValueError as error:
        assert kind == "longcat_flash_ngram" and "dimensions must match" in str(error)
        return
    finally:
        generator.close()
    alone = [[token for token, _ in generate_step(mx.array(prompt), model, max_tokens=ANSWER)] for prompt in PROMPTS]
    assert list(found.values()) != alone
