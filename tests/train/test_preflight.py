"""`mlxdist train`: what is wrong is found before any work, in one sentence; what --check prints."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("mlx_lm")
import training_folder
from click.testing import CliRunner

from mlxdist.base.errors import InvalidArgument
from mlxdist.cli.train import train as command
from mlxdist.train.checkpoint.directory import Lock
from mlxdist.train.config import CheckpointConfig, TrainConfig
from mlxdist.train.trainer import train


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return training_folder.make(tmp_path_factory.mktemp("preflight"))


@pytest.fixture
def config(folder, tmp_path, monkeypatch) -> TrainConfig:
    monkeypatch.chdir(tmp_path)
    return TrainConfig(
        model=str(folder / "qwen3"), data=str(folder / "data"), num_layers=1, batch_size=4, max_seq_length=17, iters=2,
        steps_per_report=1, val_batches=1, seed=7,
    )  # fmt: skip


def rejected(config: TrainConfig, sentence: str, **changed: object) -> None:
    """Also by --check; and nothing has been written."""
    before = sorted(Path().rglob("*"))
    for check in (False, True):
        with pytest.raises(InvalidArgument) as raised:
            train(replace(config, **changed), check=check)
        assert sentence in str(raised.value) and "\n" not in str(raised.value)
    assert sorted(Path().rglob("*")) == before


LORA = {"rank": 8, "dropout": 0.0, "scale": 20.0}


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"grad_accumulation_steps": 3}, "there would be no step"),
        ({"lora_parameters": LORA | {"scale": float("nan")}}, "lora_parameters.scale is nan"),
        ({"lora_parameters": LORA | {"rank": 0}}, "lora_parameters.rank is 0"),
        ({"lora_parameters": LORA | {"dropout": 1.0}}, "lora_parameters.dropout is 1.0"),
        ({"lora_parameters": LORA | {"alpha": 16}}, "there is no setting lora_parameters.alpha; there are rank, scale"),
        ({"lora_parameters": LORA | {"drop_out": 0.1}}, "did you mean lora_parameters.dropout?"),
        ({"lora_parameters": LORA | {"scale": 10**400}}, "lora_parameters.scale is 1000"),
        ({"lora_parameters": LORA | {"keys": "q_proj"}}, "lora_parameters.keys is 'q_proj', not a list of names"),
        ({"lora_parameters": {"rank": 8, "dropout": 0.0}}, "lora_parameters.scale is missing"),
        ({"lora_parameters": LORA | {"keys": ["nothing"]}}, "nothing to train"),
        ({"optimizer_config": {"betas": [0.9, float("inf")]}}, "optimizer_config.betas.1 is inf"),
        ({"lr_schedule": {"name": "cosine_decay", "arguments": [1e-3, 10], "warm_up": 3}},
         "there is no setting lr_schedule.warm_up; did you mean lr_schedule.warmup?"),
        ({"lr_schedule": {"name": "cosine_decay", "arguments": [1e-3, 10], "warmup": -1}}, "lr_schedule.warmup is -1"),
        ({"lr_schedule": {"name": "join_schedules", "arguments": []}}, "name is 'join_schedules', not one of"),
        ({"lr_schedule": {"name": "cosine_decay", "arguments": []}}, "lr_schedule is wrong"),
        ({"lr_schedule": {"name": "linear_schedule", "arguments": [1e-3, -1e-3, 4]}, "iters": 9},
         "learning rate -0.0005 at step 3"),
        ({"lr_schedule": {"name": "exponential_decay", "arguments": [1e-3, float("nan")]}}, "arguments.1 is nan"),
        ({"report_to": "nowhere"}, "report_to nowhere"),
    ],
)  # fmt: skip
def test_settings(config, changed, sentence):
    rejected(config, sentence, **changed)


def test_folders(config, tmp_path):
    (tmp_path / "file").touch()
    rejected(config, "is a file, not a folder", output="file")
    rejected(config, "is a file, not a folder", output="file/below")
    rejected(config, "is a file, not a folder", checkpoints=CheckpointConfig("file/below"))
    rejected(config, "cannot be written", output="/proc/trained")
    rejected(config, "cannot be written", checkpoints=CheckpointConfig("/proc/checkpoints"))
    rejected(config, "file exists", weights="random", output="file")


def test_another_job_saves_there(config, tmp_path):
    """A lock that another open file has is that of another job."""
    import fcntl

    (tmp_path / "checkpoints").mkdir()
    with (tmp_path / "checkpoints" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        rejected(config, "another job saves into")
    assert Lock(tmp_path / "checkpoints", "run").is_there


def broken(config: TrainConfig, tmp_path: Path, name: str) -> Path:
    return Path(shutil.copytree(config.model, tmp_path / name))


def test_models(config, folder, tmp_path):
    no_weights = broken(config, tmp_path, "no_weights")
    (no_weights / "model.safetensors").unlink()
    rejected(config, "has no weights", model=str(no_weights))
    short = broken(config, tmp_path, "short")
    data = (short / "model.safetensors").read_bytes()
    (short / "model.safetensors").write_bytes(data[:-100])
    rejected(config, "model.safetensors is damaged", model=str(short))
    for name, fields, sentence in [
        ("unknown", {"model_type": "qwen_of_tomorrow"}, "qwen_of_tomorrow not supported"),
        ("other_sizes", {"hidden_size": 24}, "cannot be opened"),
        ("no_sizes", {"hidden_size": "wide"}, "cannot be loaded"),
    ]:
        copy = broken(config, tmp_path, name)
        settings = json.loads((copy / "config.json").read_text()) | fields
        (copy / "config.json").write_text(json.dumps(settings))
        rejected(config, sentence, model=str(copy))
    rejected(config, "is quantized", model=str(folder / "quantized"), fine_tune_type="full")


def test_tokens_without_an_embedding(config, tmp_path):
    small = broken(config, tmp_path, "small")
    settings = json.loads((small / "config.json").read_text()) | {"vocab_size": 50}
    (small / "config.json").write_text(json.dumps(settings))
    rejected(config, "its vocab_size is 50", model=str(small), weights="random", data=few(tmp_path, "w1 w2 w3"))
    rejected(config, "and the vocab_size of", model=str(small), weights="random", data=few(tmp_path, "w1 w59 w3"))


def few(tmp_path: Path, text: str) -> str:
    training_folder.write(tmp_path / "few", "train", [{"text": text}] * 4)
    training_folder.write(tmp_path / "few", "valid", [{"text": text}] * 4)
    return str(tmp_path / "few")


@pytest.mark.parametrize(
    ("samples", "sentence", "changed"),
    [
        ([{"text": "w1 w2"}, {"text": " "}] * 2, "sample 1 (from 0) of the train data has no tokens", {}),
        ([{"text": "w1 \ud800 w2"}] * 4, "sample 0 (from 0) of the train data cannot be made into tokens", {}),
        ([{"messages": [{"role": "user", "content": "w1"}]}] * 4, "no chat template", {}),
        ([{"prompt": "w1", "completion": "w2"}] * 4, "no chat template", {}),
    ],
)
def test_samples(config, tmp_path, samples, sentence, changed):
    training_folder.write(tmp_path / "bad", "train", samples)
    rejected(config, sentence, data=str(tmp_path / "bad"), **changed)


def test_all_targets_are_truncated(config, tmp_path):
    model = broken(config, tmp_path, "with_template")
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }} {% endfor %}")
    prompts = [{"prompt": " ".join(["w1"] * 20), "completion": "w2"}] * 4
    training_folder.write(tmp_path / "long", "train", prompts)
    training_folder.write(tmp_path / "long", "valid", prompts)
    changed = {"model": str(model), "data": str(tmp_path / "long"), "mask_prompt": True}
    rejected(config, "no sample of the train data has a target", **changed)
    assert train(replace(config, **changed, max_seq_length=30)).loss > 0


def test_check(folder, tmp_path, monkeypatch):
    """The numbers are those of the texts; nothing is written."""
    monkeypatch.chdir(tmp_path)
    text = training_folder.settings(folder, weights="pretrained", num_layers=1, iters=8, grad_accumulation_steps=2)
    Path("config.toml").write_text(text)
    found = CliRunner().invoke(command, ["--check", "config.toml"])
    assert found.exit_code == 0, found.output
    texts = [json.loads(line)["text"].split() for line in (folder / "data" / "train.jsonl").read_text().splitlines()]
    tokens = sum(len(words) + 1 for words in texts)  # and the end
    targets = sum(min(len(words) + 1, 17) - 1 for words in texts)
    assert f"40 samples, {tokens} tokens, {targets} targets" in " ".join(found.output.split())
    assert "4 of 8 rows" in found.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.toml"]


@pytest.mark.long
def test_check_on_ranks(folder, tmp_path):
    """A sample that only one rank reads fails all of them, with one sentence."""
    import subprocess
    import sys

    training_folder.write(tmp_path / "bad", "train", [{"text": "w1 w2"}] * 7 + [{"text": " "}])
    settings = training_folder.settings(folder, weights="pretrained", num_layers=1, data=str(tmp_path / "bad"))
    (tmp_path / "config.toml").write_text(settings)
    program = [sys.executable, "-m", "mlxdist"]
    command = [*program, "launch", "-n", "2", "--", *program, "train", "--check", "config.toml"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert found.returncode == 2, found.stdout + found.stderr
    output = found.stdout + found.stderr
    assert "sample 7 (from 0) of the train data has no tokens" in output and "Traceback" not in output, output
