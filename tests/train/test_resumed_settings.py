"""`mlxdist train`: a run that goes on is the same run; what has changed takes effect and is said, or is an error."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest

pytest.importorskip("mlx_lm")
import training_folder
from mlx_lm.utils import load_model, save_model

from mlxdist.base.errors import InvalidArgument
from mlxdist.train import Checkpoints, MixedPrecision
from mlxdist.train.config import CheckpointConfig, PrecisionConfig, TrainConfig
from mlxdist.train.trainer import train

LORA = {"rank": 4, "dropout": 0.0, "scale": 2.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return training_folder.make(tmp_path_factory.mktemp("resumed"))


def config_of(folder: Path, **changed: Any) -> TrainConfig:
    values: dict[str, Any] = {
        "model": str(folder / "qwen3"), "data": str(folder / "data"), "num_layers": 1, "lora_parameters": LORA,
        "optimizer": "adamw", "learning_rate": 1e-3, "batch_size": 4, "max_seq_length": 17, "iters": 4,
        "steps_per_report": 1, "steps_per_eval": 4, "val_batches": 1, "seed": 7, "report_to": "json",
        "checkpoints": CheckpointConfig(resume=True),
    } | changed  # fmt: skip
    return TrainConfig(**values)


@pytest.fixture(scope="module")
def four_steps(folder, tmp_path_factory) -> Path:
    """The directory of a run of four steps."""
    directory = tmp_path_factory.mktemp("four")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        train(config_of(folder))
    return directory


@pytest.fixture
def done(four_steps, tmp_path, monkeypatch) -> Path:
    """A copy of it, which is the current directory."""
    shutil.copytree(four_steps, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def reports(name: str = "train_loss", directory: Path = Path()) -> list[tuple[int, float]]:
    lines = map(json.loads, (directory / "checkpoints" / "reports.jsonl").read_text().splitlines())
    return [(line["iteration"], line[name]) for line in lines if name in line]


def test_learning_rate_takes_effect_and_is_said(folder, done, capfd):
    train(config_of(folder, iters=6, learning_rate=5e-4))
    assert "learning_rate was 0.001 until now, and is 0.0005" in capfd.readouterr().err
    assert [rate for _, rate in reports("learning_rate")] == pytest.approx([1e-3] * 4 + [5e-4] * 2)
    changed = mx.load("trained/adapters.safetensors")
    mx.eval(changed)
    shutil.rmtree("checkpoints")
    train(config_of(folder, iters=6))
    same = mx.load("trained/adapters.safetensors")
    assert not all(mx.array_equal(array, same[path]) for path, array in changed.items())


def test_a_schedule_and_options_of_the_optimizer_are_said(folder, done, capfd):
    schedule = {"name": "linear_schedule", "arguments": [8e-4, 2e-4, 6]}
    train(config_of(folder, iters=6, lr_schedule=schedule, optimizer_config={"weight_decay": 0.3}))
    said = capfd.readouterr().err
    assert "lr_schedule was {} until now" in said and 'optimizer_config was {} until now, and is {"weight' in said
    assert [rate for _, rate in reports("learning_rate")][4:] == pytest.approx([4e-4, 3e-4])


def other_base(folder: Path, tmp_path: Path) -> str:
    """A model of the same shapes, of which one weight is another."""
    copy = Path(shutil.copytree(folder / "qwen3", tmp_path / "other"))
    model, _ = load_model(copy)
    model.layers[0].self_attn.q_proj.weight = model.layers[0].self_attn.q_proj.weight * 1.01
    save_model(copy, model)
    return str(copy)


def other_data(folder: Path, tmp_path: Path) -> str:
    """As many samples, of which one is another."""
    copy = Path(shutil.copytree(folder / "data", tmp_path / "more"))
    lines = (copy / "train.jsonl").read_text().splitlines(keepends=True)
    (copy / "train.jsonl").write_text("".join([*lines[1:], '{"text": "w1 w2"}\n']))
    return str(copy)


@pytest.mark.parametrize("name", ["base", "data", "lora_parameters", "optimizer", "precision"])
def test_what_has_to_be_the_same(folder, done, name):
    """An error that names it and the option; with the option the run goes on from the same step."""
    changed: dict[str, Any] = {
        "base": lambda: {"model": other_base(folder, done)},
        "data": lambda: {"data": other_data(folder, done)},
        "lora_parameters": lambda: {"lora_parameters": LORA | {"scale": 20.0}},
        "optimizer": lambda: {"optimizer": "muon"},
        "precision": lambda: {"precision": PrecisionConfig("float32", state_dtype="bfloat16")},
    }[name]()
    before = reports()
    with pytest.raises(InvalidArgument, match=f'with another {name}: .* allow_changes = \\["{name}"\\]'):
        train(config_of(folder, iters=6, **changed))
    assert reports() == before
    allowed = CheckpointConfig(resume=True, allow_changes=(name,))
    train(config_of(folder, iters=6, checkpoints=allowed, **changed))
    assert [iteration for iteration, _ in reports()] == [1, 2, 3, 4, 5, 6] and reports()[:4] == before


def test_another_mask(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = Path(shutil.copytree(folder / "qwen3", tmp_path / "model"))
    template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    (model / "chat_template.jinja").write_text(template)
    samples = [{"prompt": f"w{number} w2", "completion": "w3 w4 w5"} for number in range(8)]
    for split in ("train", "valid"):
        training_folder.write(tmp_path / "pairs", split, samples)
    config = config_of(folder, model=str(model), data=str(tmp_path / "pairs"))
    train(config)
    with pytest.raises(
        InvalidArgument, match='mask_prompt: false in it, and true here.*allow_changes = \\["mask_prompt"'
    ):
        train(replace(config, mask_prompt=True))
    (model / "chat_template.jinja").write_text(template + "w6")
    with pytest.raises(InvalidArgument, match="with another tokenizer"):
        train(config)


def test_reports_once_and_checkpoints_to_keep(folder, done, tmp_path):
    """A run that ended between two checkpoints has reported steps that come once more."""
    keep = CheckpointConfig(resume=True, every=2, keep=1, keep_every=4)
    train(config_of(folder, iters=7, checkpoints=keep))
    straight, validated = reports(), reports("val_loss")
    shutil.rmtree("checkpoints/step-00000007")
    with open("checkpoints/reports.jsonl", "a") as file:
        file.write('{"iteration": 8, "train_')
    train(config_of(folder, iters=7, checkpoints=keep))
    assert [iteration for iteration, _ in reports()] == [1, 2, 3, 4, 5, 6, 7]
    assert reports() == straight and reports("val_loss") == validated
    assert sorted(path.name for path in Path("checkpoints").glob("step-*")) == ["step-00000004", "step-00000007"]


@pytest.mark.parametrize(("accumulate", "expected"), [(1, [0, 4, 8, 9]), (3, [0, 6, 9])])
def test_validation_comes_at_the_step_after_it_is_due(folder, tmp_path, monkeypatch, accumulate, expected):
    monkeypatch.chdir(tmp_path)
    config = config_of(folder, iters=9, grad_accumulation_steps=accumulate, steps_per_report=4, batch_size=3)
    train(config)
    assert [iteration for iteration, _ in reports("val_loss")] == expected
    assert [iteration for iteration, _ in reports()] == expected[1:]


def test_steps_that_are_left_out_hide_nothing_that_is_due(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = CheckpointConfig(every=4, keep=9)
    train(config_of(folder, iters=9, skip_steps=(3, 4, 7), steps_per_report=4, checkpoints=settings))
    assert [iteration for iteration, _ in reports("val_loss")] == [0, 6, 9]
    assert [iteration for iteration, _ in reports()] == [6, 9]
    assert sorted(path.name for path in Path("checkpoints").glob("step-*")) == [f"step-{n:08}" for n in (6, 9)]


def test_numbers_that_are_not_finite_are_null(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = Path(shutil.copytree(folder / "qwen3", tmp_path / "model"))
    loaded, _ = load_model(model)
    loaded.model.norm.weight = loaded.model.norm.weight * mx.nan
    save_model(model, loaded)
    train(config_of(folder, model=str(model), iters=1))
    lines = (tmp_path / "checkpoints" / "reports.jsonl").read_text()
    assert '"val_loss": null' in lines and "NaN" not in lines


def model_and_state(optimizer: optim.Optimizer) -> dict[str, Any]:
    mx.random.seed(0)
    model = nn.Linear(4, 4)
    optimizer.init(model if isinstance(optimizer, MixedPrecision) else model.trainable_parameters())
    return {"model": model, "optimizer": optimizer}


def test_the_state_of_another_optimizer(tmp_path):
    """Of programs of their own, too: a named error, and nothing is changed."""
    kinds = {
        "AdamW": lambda: optim.AdamW(1e-3),
        "Muon": lambda: optim.Muon(1e-3),
        "SGD": lambda: optim.SGD(1e-3),
        "Adafactor": lambda: optim.Adafactor(1e-3),
        "MultiOptimizer": lambda: optim.MultiOptimizer([optim.AdamW(1e-3), optim.SGD(1e-3)], [lambda *_: True]),
    }
    for saved, make in kinds.items():
        with Checkpoints(tmp_path / saved) as checkpoints:
            checkpoints.save(1, model_and_state(make()))
            checkpoints.wait()
            assert checkpoints.load(model_and_state(make())) == 1
            for other, make_other in kinds.items():
                if other != saved:
                    state = model_and_state(make_other())
                    before = mx.array(state["model"].weight)
                    with pytest.raises(InvalidArgument, match=f"'optimizer' is the state of {saved}.*of {other}"):
                        checkpoints.load(state)
                    assert mx.array_equal(state["model"].weight, before)
    with_momentum = lambda beta: model_and_state(optim.Adafactor(1e-3, beta_1=beta))
    with Checkpoints(tmp_path / "Adafactor with momentum") as checkpoints:
        checkpoints.save(1, with_momentum(None))
        checkpoints.wait()
        with pytest.raises(InvalidArgument, match="the state of another Adafactor.*exp_avg"):
            checkpoints.load(with_momentum(0.9))


def test_the_state_of_another_precision(tmp_path):
    make = lambda masters: MixedPrecision(optim.AdamW(1e-3), mx.bfloat16, masters)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, model_and_state(make(True)))
        checkpoints.wait()
        with pytest.raises(InvalidArgument, match="masters=True.*masters=kahan"):
            checkpoints.load(model_and_state(make("kahan")))
