"""`mlxdist checkpoint`: what is in a directory, whether it is as it was written, and to and from a folder of mlx-lm."""

import json
import subprocess
import sys

import mlx.core as mx
import mlx.optimizers as optim
import pytest
from click.testing import CliRunner
from launching import LAUNCH
from mlx.utils import tree_flatten, tree_map
from mlx_lm.utils import load_model, quantize_model, save_config, save_model

from mlxdist.cli import commands
from mlxdist.train import Checkpoints

CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


def make_model(config=CONFIG):
    from mlx_lm.models import qwen3

    return qwen3.Model(qwen3.ModelArgs.from_dict(config))


def save_folder(path, model, **changed):
    save_model(path, model)
    save_config(CONFIG | changed, path / "config.json")
    return path


def run(*arguments, status=0):
    result = CliRunner().invoke(commands, ["checkpoint", *map(str, arguments)])
    assert result.exit_code == status, result.output
    return result.output


def same(a, b):
    a, b = dict(tree_flatten(a.parameters())), dict(tree_flatten(b.parameters()))
    return a.keys() == b.keys() and all(mx.array_equal(a[path], b[path]) for path in a)


@pytest.fixture
def folder(tmp_path):
    """A model of mlx-lm, with what stands for a tokenizer."""
    path = save_folder(tmp_path / "folder", make_model())
    (path / "tokenizer.json").write_text("{}")
    return path


@pytest.fixture
def saved(tmp_path):
    """Two checkpoints of a model that has been trained, and the model."""
    model, optimizer = make_model(), optim.AdamW(1e-3)
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        for step in (5, 10):
            model.update(tree_map(lambda x: x + 1, model.parameters()))
            checkpoints.save(step, {"model": model, "optimizer": optimizer, "seed": 3})
    return tmp_path / "checkpoints", model


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_show(saved):
    directory, _ = saved
    rows = json.loads(run("show", directory, "--json"))
    assert [(row["step"], row["problem"], row["ranks"], row["files"]) for row in rows] == [
        (5, None, 1, 1),
        (10, None, 1, 1),
    ]
    assert rows[0]["bytes"] == sum(path.stat().st_size for path in directory.glob("step-00000005/*.safetensors"))
    text = run("show", directory)
    assert text.split()[:7] == ["step", "saved", "ranks", "mesh", "MB", "run", "state"] and text.count("complete") == 2


def test_show_one_step(saved):
    directory, model = saved
    found = json.loads(run("show", directory, "--step", 10, "--json"))
    weight = model.model.embed_tokens.weight
    assert found["arrays"]["model.model.embed_tokens.weight"] == {"dtype": "F32", "shape": [64, 32], "parts": 1}
    assert found["values"]["seed"] == 3 and weight.shape == (64, 32)
    assert "64 x 32" in run("show", directory, "--step", 10)


def test_an_incomplete_save_is_shown_and_is_no_damage(saved):
    directory, _ = saved
    (directory / "step-00000015").mkdir()
    assert "saving it was not completed" in run("show", directory)
    run("verify", directory)


def test_verify_finds_a_flipped_bit(saved):
    directory, _ = saved
    assert run("verify", directory).count("complete") == 2
    flip_a_bit(next((directory / "step-00000010").glob("*.safetensors")))
    assert "complete" in run("show", directory), "only sizes are compared"
    assert "its CRC-32 differs" in run("verify", directory, status=1)
    run("verify", directory, "--step", 5)
    rows = json.loads(run("verify", directory, "--json", status=1))
    assert [row["damaged"] for row in rows] == [False, True]


def test_to_a_model_folder_and_back(saved, folder, tmp_path):
    directory, model = saved
    target = tmp_path / "new" / "target"
    assert json.loads(run("convert", directory, target, "--like", folder, "--json"))["step"] == 10
    assert same(load_model(target)[0], model)
    assert (target / "tokenizer.json").read_text() == "{}"
    assert [path.name for path in target.parent.iterdir()] == ["target"], "nothing is left beside it"

    assert "step 0" in run("convert", target, tmp_path / "again")
    back = make_model()
    assert Checkpoints(tmp_path / "again").load({"model": back}, other_run=True) == 0
    assert same(back, model)


def test_an_earlier_step_and_another_name(saved, folder, tmp_path):
    directory, _ = saved
    run("convert", directory, tmp_path / "a", "--like", folder, "--step", 5)
    found = load_model(tmp_path / "a")[0]
    run("convert", tmp_path / "a", tmp_path / "b", "--name", "state.network")
    run("convert", tmp_path / "b", tmp_path / "c", "--like", folder, "--name", "state.network")
    assert same(load_model(tmp_path / "c")[0], found)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtype(tmp_path, dtype):
    """Of all floating-point weights, in a model folder and in a checkpoint, by what MLX makes of each array. One array
    of the checkpoint is in memory at a time."""
    config = {"num_hidden_layers": 12, "torch_dtype": "float32"}
    model, optimizer = make_model(CONFIG | config), optim.AdamW(1e-3)
    optimizer.init(model.trainable_parameters())
    folder = save_folder(tmp_path / "folder", model, **config)
    model.update(tree_map(lambda array: array + 0.1, model.parameters()))
    with Checkpoints(tmp_path / "saved") as checkpoints:
        checkpoints.save(3, {"model": model, "optimizer": optimizer})
    expected = {name: array.astype(getattr(mx, dtype)) for name, array in tree_flatten(model.parameters())}
    mx.eval(expected)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    run("convert", tmp_path / "saved", tmp_path / "small", "--like", folder, "--dtype", dtype)
    assert mx.get_peak_memory() - before < sum(array.nbytes for array in expected.values()) / 2
    assert json.loads((tmp_path / "small" / "config.json").read_text())["torch_dtype"] == dtype

    run("convert", tmp_path / "small", tmp_path / "step 0", "--dtype", "float32")
    wide = make_model(CONFIG | config)
    assert Checkpoints(tmp_path / "step 0").load({"model": wide}, other_run=True) == 0
    exact = {name: array.astype(mx.float32) for name, array in expected.items()}
    for found, wanted in ((load_model(tmp_path / "small")[0], expected), (wide, exact)):
        arrays = dict(tree_flatten(found.parameters()))
        assert arrays.keys() == wanted.keys()
        assert all(arrays[name].dtype == wanted[name].dtype for name in wanted)
        assert all(mx.array_equal(arrays[name], wanted[name]) for name in wanted)


def test_the_dtype_of_the_checkpoint_is_kept(folder, tmp_path):
    """Where the model folder has another one, and also of a model that is quantized."""
    model = make_model()
    model.set_dtype(mx.bfloat16)
    quantized, config = quantize_model(make_model(), dict(CONFIG), 32, 4)
    save_folder(tmp_path / "packed", quantized, **config)
    for name, saved, base in (("plain", model, folder), ("quantized", quantized, tmp_path / "packed")):
        with Checkpoints(tmp_path / name) as checkpoints:
            checkpoints.save(3, {"model": saved})
        run("convert", tmp_path / name, tmp_path / f"{name}-folder", "--like", base)
        found = dict(tree_flatten(load_model(tmp_path / f"{name}-folder")[0].parameters()))
        wanted = dict(tree_flatten(saved.parameters()))
        assert found.keys() == wanted.keys()
        assert all(found[path].dtype == wanted[path].dtype for path in wanted)
        assert all(mx.array_equal(found[path], wanted[path]) for path in wanted)
    for options in (["quantized", "new", "--like", "packed"], ["packed", "new"]):
        paths = [option if option.startswith("--") else tmp_path / option for option in options]
        output = run("convert", *paths, "--dtype", "bfloat16", status=2)
        assert "the model has quantized weights, such as" in " ".join(output.split()), output


def test_values_that_a_dtype_has_not(folder, tmp_path):
    model = make_model()
    model.model.norm.weight = model.model.norm.weight * 1e5
    with Checkpoints(tmp_path / "saved") as checkpoints:
        checkpoints.save(3, {"model": model})
    save_folder(tmp_path / "large", model)
    for source, *like in ((tmp_path / "saved", "--like", folder), (tmp_path / "large",)):
        output = run("convert", source, tmp_path / "new", *like, "--dtype", "float16", status=2)
        assert "'model.norm.weight' has values up to 100000, which float16 has not; take another" in output
        assert not (tmp_path / "new").exists() and not list(tmp_path.glob(".new*"))


@pytest.mark.long
def test_on_two_ranks(saved, folder, tmp_path):
    """Rank 0 writes what the ranks read together. What it cannot write is an error on both."""
    directory, model = saved
    launch = [*LAUNCH, "-n", "2", "--", sys.executable, "-m", "mlxdist", "checkpoint", "convert"]
    command = [*launch, directory, tmp_path / "new", "--like", folder, "--dtype", "bfloat16"]
    job = subprocess.run(command, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    assert job.returncode == 0 and job.stdout.count("new: step 10") == 1, job.stderr
    model.set_dtype(mx.bfloat16)
    assert same(load_model(tmp_path / "new")[0], model)

    model.set_dtype(mx.float32)
    model.model.norm.weight = model.model.norm.weight * 1e5
    with Checkpoints(tmp_path / "large") as checkpoints:
        checkpoints.save(1, {"model": model})
    command = [*launch, tmp_path / "large", tmp_path / "none", "--like", folder, "--dtype", "float16"]
    job = subprocess.run(command, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    assert job.returncode == 2 and not (tmp_path / "none").exists(), job.stderr
    lines = [line for line in job.stderr.splitlines() if "which float16 has not; take another --dtype" in line]
    assert {line[:3] for line in lines} >= {"[0]", "[1]"}, job.stderr


@pytest.mark.parametrize(
    "options, words",
    [
        (["show", "{empty}"], "has no checkpoint"),
        (["verify", "{directory}", "--step", "7"], "has no checkpoint of step 7"),
        (["convert", "{directory}", "{new}"], "give --like MODEL"),
        (["convert", "{directory}", "{folder}", "--like", "{folder}"], "exists; remove it"),
        (["convert", "{folder}", "{new}", "--like", "{folder}"], "is a model folder"),
        (["convert", "{directory}", "{new}", "--like", "{folder}", "--name", "policy"], "it has no 'policy."),
        (["convert", "{directory}", "{new}", "--like", "{folder}", "--step", "7"], "no checkpoint of step 7"),
        (["convert", "{empty}", "{new}", "--like", "{folder}"], "has no checkpoint"),
        (["convert", "{directory}", "{new}", "--like", "{empty}"], "config.json"),
    ],
)
def test_bad_input(saved, folder, tmp_path, options, words):
    names = {"directory": saved[0], "folder": folder, "empty": tmp_path / "empty", "new": tmp_path / "new"}
    names["empty"].mkdir()
    output = run(*(option.format(**names) for option in options), status=2)
    assert words in " ".join(output.replace("│", " ").split()), output
    assert not names["new"].exists()
