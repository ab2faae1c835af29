"""examples/finetune.py and examples/pretrain.py: on two ranks they train what they train on one."""

import json
import re
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import tiny_models
from mlx_lm import load
from mlx_lm.utils import save_config, save_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

EXAMPLES = Path(__file__).parents[2] / "examples"
WORDS = [f"w{number}" for number in range(60)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny model with a tokenizer, and a dataset: texts of unequal lengths."""
    root = tmp_path_factory.mktemp("examples")
    vocabulary = {"<pad>": 0, "<eos>": 1} | {word: 2 + number for number, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    save_model(root / "model", tiny_models.build("qwen3"))
    config = tiny_models.config_of("qwen3") | {"model_type": "qwen3", "eos_token_id": 1}
    save_config(config, root / "model" / "config.json")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(root / "model")
    random = np.random.default_rng(0)
    texts = [" ".join(random.choice(WORDS, random.integers(3, 20))) for _ in range(40)]
    (root / "data").mkdir()
    (root / "data" / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return root


def run(name: str, folder: Path, directory: Path, ranks: int, *options: str) -> str:
    directory.mkdir(exist_ok=True)
    launch = [sys.executable, "-m", "mlxdist", "launch", "-n", str(ranks), "--"] if ranks > 1 else []
    command = [*launch, sys.executable, str(EXAMPLES / name), str(folder / "model"), str(folder / "data"), *options]
    job = subprocess.run(
        command, cwd=directory, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=120,
    )  # fmt: skip
    assert job.returncode == 0, job.stdout
    return job.stdout


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", output)]


def trained_model(folder: Path, directory: Path) -> dict[str, mx.array]:
    """By the command that the examples print."""
    words = ["checkpoint", "convert", "checkpoints", "converted", "--like", str(folder / "model")]
    subprocess.run([sys.executable, "-m", "mlxdist", *words], cwd=directory, check=True, capture_output=True)
    load(str(directory / "converted"))
    return mx.load(str(directory / "converted" / "model.safetensors"))


def require_close(found: dict[str, mx.array], expected: dict[str, mx.array]) -> None:
    assert found.keys() == expected.keys() and found
    for path, array in expected.items():
        assert mx.allclose(found[path], array, 1e-3, 2e-5), path


@pytest.mark.long
def test_adapters(folder, tmp_path):
    """Those of two ranks are those of one process, and mlx-lm opens them."""
    found = {}
    for ranks in (1, 2):
        directory = tmp_path / str(ranks)
        printed = losses(run("finetune.py", folder, directory, ranks, "--steps", "4", "--rate", "1e-5"))
        adapters = mx.load(str(directory / "adapters" / "adapters.safetensors"))
        load(str(folder / "model"), adapter_path=str(directory / "adapters"))
        found[ranks] = printed, adapters
    assert len(found[1][0]) == 4 and found[2][0] == pytest.approx(found[1][0], abs=2e-4)
    require_close(found[2][1], found[1][1])


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "options", "ranks", "mesh"),
    [
        ("finetune.py", ["--full", "--rate", "1e-5"], 2, []),
        ("pretrain.py", ["--length", "17", "--rate", "1e-5"], 2, []),
        ("pretrain.py", ["--length", "17", "--rate", "1e-5", "--micro-batches", "2"], 2, ["--fsdp", "2"]),
        ("pretrain.py", ["--length", "17", "--rate", "1e-5"], 4, ["--fsdp", "2"]),
    ],
)
def test_all_parameters(folder, tmp_path, name, options, ranks, mesh):
    """Ten steps on all ranks are five, and five more on one process; the checkpoint becomes a model folder."""
    one = losses(run(name, folder, tmp_path / "one", 1, *options, "--steps", "10"))
    straight = losses(run(name, folder, tmp_path / "ranks", ranks, *options, *mesh, "--steps", "10"))
    assert one and straight == pytest.approx(one, abs=2e-4)
    require_close(trained_model(folder, tmp_path / "ranks"), trained_model(folder, tmp_path / "one"))


@pytest.mark.long
@pytest.mark.parametrize(("name", "options"), [("finetune.py", ["--full"]), ("pretrain.py", ["--length", "17"])])
def test_resumed_on_one_process(folder, tmp_path, name, options):
    """Each 20th of the steps is one of the warm-up: with 10 and with 5 steps it is the first one."""
    options = [*options, "--rate", "1e-5"]
    run(name, folder, tmp_path / "straight", 1, *options, "--steps", "10")
    run(name, folder, tmp_path / "twice", 2, *options, "--steps", "5")
    run(name, folder, tmp_path / "twice", 1, *options, "--steps", "10", "--resume")
    require_close(trained_model(folder, tmp_path / "twice"), trained_model(folder, tmp_path / "straight"))


@pytest.mark.parametrize("name", ["finetune.py", "pretrain.py"])
def test_short_enough_to_copy(name):
    assert len((EXAMPLES / name).read_text().splitlines()) <= 120
