"""`mlxdist train`: losses and weights of one process, whatever the mesh; restarts; what it leaves; bad input."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from prometheus_client.parser import text_string_to_metric_families
from waiting import wait_for

mlx_lm = pytest.importorskip("mlx_lm")
import training_folder
from mlx_lm.utils import save_model
from training_folder import STEPS, settings

LONG = pytest.mark.long
TOLERANCE = 1e-5  # of a loss of about 3, in float32, after 20 steps


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return training_folder.make(tmp_path_factory.mktemp("trainer"))


def start(directory: Path, ranks: int, text: str, **variables: str) -> subprocess.Popen:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.toml").write_text(text)
    program = [sys.executable, "-m", "mlxdist"]
    environment = ["env", *(f"{name}={value}" for name, value in variables.items())]
    launch = [*program, "launch", "-n", str(ranks), "--", *environment] if ranks > 1 else []
    command = [*launch, *program, "train", "config.toml"]
    return subprocess.Popen(
        command, cwd=directory, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def run(directory: Path, ranks: int, text: str, status: int = 0, **variables: str) -> str:
    process = start(directory, ranks, text, **variables)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == status, output
    return output


def losses(directory: Path, name: str = "train_loss") -> list[float]:
    lines = (directory / "checkpoints" / "reports.jsonl").read_text().splitlines()
    return [report[name] for report in map(json.loads, lines) if name in report]


def weights(directory: Path, file: str = "model.safetensors") -> dict[str, mx.array]:
    return mx.load(str(directory / "trained" / file))


@pytest.fixture(scope="module")
def one(folder, tmp_path_factory):
    """What one process has trained, by the settings that matter. Made once."""
    found: dict[str, Path] = {}

    def train(**changed: object) -> Path:
        key = repr(sorted(changed.items()))
        if key not in found:
            found[key] = tmp_path_factory.mktemp("one")
            run(found[key], 1, settings(folder, **changed))
        return found[key]

    return train


def require_equal(directory: Path, reference: Path, tolerance: float = TOLERANCE) -> None:
    for name in ("train_loss", "val_loss"):
        assert len(losses(reference, name)) > 0
        assert losses(directory, name) == pytest.approx(losses(reference, name), rel=tolerance)
    expected = weights(reference)
    found = weights(directory)
    assert found.keys() == expected.keys()
    for path, array in expected.items():
        # AdamW divides by the root of a moment, so where a gradient is nearly 0 its rounding moves a weight.
        assert mx.abs(found[path] - array).max().item() < 100 * tolerance * max(1.0, mx.abs(array).max().item()), path


MESHES = [
    pytest.param(2, "[mesh]\nfsdp = 2", {}, id="fsdp=2"),
    *(
        pytest.param(ranks, tables, changed, id=name, marks=LONG)
        for name, ranks, tables, changed in [
            ("dp=2", 2, "[mesh]\ndp = 2", {}),
            ("pp=2", 2, "[mesh]\npp = 2", {}),
            ("dp=4", 4, "", {}),
            ("dp=3", 3, "", {"batch_size": 6}),
            ("fsdp=3", 3, "[mesh]\nfsdp = 3", {"batch_size": 6}),
            ("fsdp=4", 4, "[mesh]\nfsdp = 4", {}),
            ("stage=1", 2, "[mesh]\nfsdp = 2\n[fully_shard]\nstage = 1", {}),
            ("stage=2", 2, "[mesh]\nfsdp = 2\n[fully_shard]\nstage = 2", {}),
            ("not resharded", 2, "[mesh]\nfsdp = 2\n[fully_shard]\nreshard_after_forward = false", {}),
            ("dp=2 fsdp=2", 4, "[mesh]\ndp = 2\nfsdp = 2", {}),
            ("cp=2", 2, "[mesh]\ncp = 2", {}),
            ("cp=3", 3, "[mesh]\ncp = 3", {}),
            ("ulysses", 2, "[mesh]\ncp = 2", {"context_parallel": "ulysses"}),
            ("tp=2", 2, "[mesh]\ntp = 2", {}),
            ("dp=2 tp=2", 4, "[mesh]\ndp = 2\ntp = 2", {}),
            ("dp=2 cp=2", 4, "[mesh]\ndp = 2\ncp = 2", {}),
            ("fsdp=2 cp=2", 4, "[mesh]\nfsdp = 2\ncp = 2", {}),
            ("fsdp=2 tp=2", 4, "[mesh]\nfsdp = 2\ntp = 2", {}),
            ("cp=2 tp=2", 4, "[mesh]\ncp = 2\ntp = 2", {}),
            ("pp=3", 3, "[mesh]\npp = 3", {"grad_accumulation_steps": 2}),
            ("gpipe", 2, '[mesh]\npp = 2\n[pipeline]\nschedule = "gpipe"\nvirtual = 2', {"grad_accumulation_steps": 4}),
            ("zero_bubble", 2, '[mesh]\npp = 2\n[pipeline]\nschedule = "zero_bubble"', {"grad_accumulation_steps": 4}),
            ("pp=2 dp=2", 4, "[mesh]\npp = 2\ndp = 2", {"grad_accumulation_steps": 2}),
            ("pp=2 tp=2", 4, "[mesh]\npp = 2\ntp = 2", {"grad_accumulation_steps": 2}),
            ("pp=2 cp=2", 4, "[mesh]\npp = 2\ncp = 2", {"grad_accumulation_steps": 2}),
            (
                "pp=2 fsdp=2 checkpointed",
                4,
                "[mesh]\npp = 2\nfsdp = 2\n[fully_shard]\nstage = 1",
                {"grad_accumulation_steps": 2, "grad_checkpoint": True},
            ),
            ("dp=2 accumulated", 2, "", {"grad_accumulation_steps": 2}),
            ("fsdp=2 accumulated", 2, "[mesh]\nfsdp = 2", {"grad_accumulation_steps": 2}),
            ("stage=1 accumulated", 2, "[mesh]\nfsdp = 2\n[fully_shard]\nstage = 1", {"grad_accumulation_steps": 2}),
            ("fsdp=2 cp=2 accumulated", 4, "[mesh]\nfsdp = 2\ncp = 2", {"grad_accumulation_steps": 2}),
            ("tp=2 accumulated", 2, "[mesh]\ntp = 2", {"grad_accumulation_steps": 2}),
            ("checkpointed", 2, "[mesh]\nfsdp = 2", {"grad_checkpoint": True}),
            ("packed", 2, "", {"pack": True}),
        ]
    ),
]


@pytest.mark.parametrize(("ranks", "tables", "changed"), MESHES)
def test_equal_to_one_process(folder, one, tmp_path, ranks, tables, changed):
    reference = {name: value for name, value in changed.items() if name != "context_parallel"}
    run(tmp_path, ranks, settings(folder, tables, **changed))
    require_equal(tmp_path, one(**reference))


@LONG
@pytest.mark.parametrize("tables", ["dp = 2\nfsdp = 2", "fsdp = 2\ntp = 2", "fsdp = 2\ncp = 2", "cp = 2\ntp = 2"])
def test_experts_equal_to_one_process(folder, one, tmp_path, tables):
    run(tmp_path, 4, settings(folder, f"[mesh]\n{tables}", "qwen3_moe"))
    require_equal(tmp_path, one(model="qwen3_moe"))


@LONG
def test_balanced_routers_equal_to_one_process(folder, one, tmp_path):
    """With micro-batches, stages and replicas. The balance loss is in the training loss, not in the validation's."""
    changed = {"model": "qwen3_moe", "router_aux_loss_coef": 0.1, "grad_accumulation_steps": 2}
    run(tmp_path, 4, settings(folder, "[mesh]\npp = 2\ndp = 2", **changed))
    require_equal(tmp_path, one(**changed))
    plain = one(model="qwen3_moe", grad_accumulation_steps=2)
    assert losses(tmp_path)[0] > losses(plain)[0] + 0.1
    assert losses(tmp_path, "val_loss")[0] == pytest.approx(losses(plain, "val_loss")[0], rel=1e-5)


@pytest.mark.parametrize(
    ("ranks", "before", "after"),
    [
        pytest.param(1, "", "", marks=LONG),
        pytest.param(2, "", "", marks=LONG),
        pytest.param(2, "[mesh]\nfsdp = 2", "[mesh]\nfsdp = 2", marks=LONG),
        pytest.param(2, "[mesh]\nfsdp = 2", "[mesh]\ntp = 2", marks=LONG),
        pytest.param(2, "[mesh]\ntp = 2", "[mesh]\ndp = 2", marks=LONG),
        pytest.param(2, "[mesh]\npp = 2", "[mesh]\npp = 2", marks=LONG),
        pytest.param(2, "[mesh]\npp = 2", "[mesh]\nfsdp = 2", marks=LONG),
        pytest.param(2, "[mesh]\nfsdp = 2", "[mesh]\npp = 2", marks=LONG),
        pytest.param(4, "[mesh]\nfsdp = 2\ndp = 2", "[mesh]\nfsdp = 4", marks=LONG),
    ],
)
def test_resumed(folder, tmp_path, ranks, before, after):
    """20 steps are 10, a kill switch and 10 more: bitwise on the same mesh."""
    switch = '[control]\nkill_file = "STOP"\n'
    resume = "[checkpoints]\nresume = true\n"
    run(tmp_path / "straight", ranks, settings(folder, after))
    process = start(tmp_path / "stopped", ranks, settings(folder, before + "\n" + switch))
    reports = tmp_path / "stopped" / "checkpoints" / "reports.jsonl"
    wait_for(lambda: reports.exists() and reports.read_text().count("train_loss") >= 5, 200)
    (tmp_path / "stopped" / "STOP").touch()
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    done = len(losses(tmp_path / "stopped"))
    if done < STEPS:
        assert "the kill switch" in output
        assert not (tmp_path / "stopped" / "trained").exists()
        run(tmp_path / "stopped", ranks, settings(folder, after + "\n" + resume))
    found, expected = losses(tmp_path / "stopped"), losses(tmp_path / "straight")
    if before == after:
        assert found == expected
        assert all(mx.array_equal(array, weights(tmp_path / "straight")[path])
                   for path, array in weights(tmp_path / "stopped").items())  # fmt: skip
    else:
        require_equal(tmp_path / "stopped", tmp_path / "straight")


@LONG
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_and_ends(folder, tmp_path, number):
    process = start(tmp_path, 2, settings(folder, iters=100000))
    reports = tmp_path / "checkpoints" / "reports.jsonl"
    wait_for(lambda: reports.exists() and reports.read_text().count("train_loss") >= 3, 200)
    process.send_signal(number)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    assert f"received {number.name}" in output
    shown = subprocess.run(
        [sys.executable, "-m", "mlxdist", "checkpoint", "show", str(tmp_path / "checkpoints"), "--json"],
        capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert json.loads(shown.stdout)[-1]["step"] == len(losses(tmp_path))


def fine_tuning(folder: Path, tables: str = "", **changed: object) -> str:
    values = {"weights": "pretrained", "num_layers": 2, "learning_rate": 1e-4, "iters": 6} | changed
    return settings(folder, tables, **values) + "\n[lora_parameters]\nrank = 4\ndropout = 0.0\nscale = 2.0\n"


@pytest.mark.parametrize(
    ("ranks", "tables"),
    [
        pytest.param(2, "", marks=LONG),
        pytest.param(2, "[mesh]\ntp = 2", marks=LONG),
        pytest.param(2, "[mesh]\nfsdp = 2", marks=LONG),
        pytest.param(2, "[mesh]\ncp = 2", marks=LONG),
        pytest.param(2, "[mesh]\npp = 2", marks=LONG),
        pytest.param(3, "[mesh]\nfsdp = 3", marks=LONG),
    ],
)
def test_adapters_are_those_of_mlx_lm(folder, tmp_path, ranks, tables):
    size = {"batch_size": 6}
    run(tmp_path / "one", 1, fine_tuning(folder, **size))
    run(tmp_path / "ranks", ranks, fine_tuning(folder, tables, **size))
    expected = weights(tmp_path / "one", "adapters.safetensors")
    found = weights(tmp_path / "ranks", "adapters.safetensors")
    assert found.keys() == expected.keys() and found
    for path, array in expected.items():
        assert mx.allclose(found[path], array, 1e-3, 2e-5), path
    model, _ = mlx_lm.load(str(folder / "qwen3"), adapter_path=str(tmp_path / "ranks" / "trained"))
    loaded = dict(tree_flatten(model.parameters()))
    assert all(mx.array_equal(loaded[path], array) for path, array in found.items())


def half_frozen(folder: Path, tables: str = "", **changed: object) -> str:
    values = {"weights": "pretrained", "num_layers": 1, "iters": 4} | changed
    return settings(folder, tables + '\n[precision]\ndtype = "float16"\n', **values)


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "type"), [("qwen3", "full"), *(pytest.param(m, "lora", marks=LONG) for m in ("qwen3", "quantized"))]
)
def test_float16_where_a_stage_has_nothing_to_train(folder, tmp_path, model, type):
    run(tmp_path / "one", 1, half_frozen(folder, model=model, fine_tune_type=type))
    run(tmp_path / "two", 2, half_frozen(folder, "[mesh]\npp = 2", model=model, fine_tune_type=type))
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-3)


def test_what_it_leaves(folder, tmp_path):
    """A model folder of mlx-lm, checkpoints by time alone, metrics of the last report, and output without colors or a
    bar in a pipe."""
    tables = "[checkpoints]\nevery = 0\nevery_minutes = 1e-6\nkeep = 9"
    output = run(tmp_path, 1, settings(folder, tables, iters=4, prometheus_file="train.prom", max_grad_norm=0.01))
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*")) == [
        f"step-{step:08}" for step in range(1, 5)
    ]
    found = {
        sample.name.removeprefix("mlxdist_train_"): sample.value
        for family in text_string_to_metric_families((tmp_path / "train.prom").read_text())
        for sample in family.samples
    }
    for name, of_report in [("loss", "train_loss"), ("validation_loss", "val_loss"), ("grad_norm", "grad_norm")]:
        assert found[name] == pytest.approx(losses(tmp_path, of_report)[-1], rel=1e-9)
    assert found["step"] == 4 and found["save_seconds_total"] > 0 and found["grad_norm"] > 0.01, "not the clipped one"
    shares = losses(tmp_path, "saving")
    assert shares[0] == 0 and all(0 < share < 1 for share in shares[1:]), "the first report comes before the first save"
    assert "\x1b" not in output
    assert "Using seed: 7" in output
    model, tokenizer = mlx_lm.load(str(tmp_path / "trained"))
    assert tokenizer.encode("w1 w2")
    assert mx.isfinite(model(mx.array([[3, 4]]))).all()


@LONG
def test_bad_input(folder, tmp_path):
    """One sentence, before any work."""
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "train.jsonl").write_text('{"text": "w1 w2"}\n{"text": \n')
    for number, (text, sentence) in enumerate(
        [
            (settings(folder, "[mesh]\ndp = 5"), "5"),
            (settings(folder, data=str(broken)), "train.jsonl, line 2 is not JSON"),
            (settings(folder, data=str(tmp_path / "none")), "is neither a directory nor"),
            (settings(folder, model="none"), "none"),
            (settings(folder, grad_accumulation_steps=3, batch_size=2, iters=0), "iters"),
            (settings(folder, batch_size=1000), "larger than an epoch"),
            (settings(folder, weights="pretrained", num_layers=99), "num_layers is 99"),
            (settings(folder, lerning_rate=1), "did you mean learning_rate?"),
            (settings(folder, optimizer_config={}).replace("optimizer_config = {}", "[optimizer_config]\nspeed = 1"),
             "optimizer_config"),
            (settings(folder, report_to="nowhere"), "report_to nowhere"),
        ]
    ):  # fmt: skip
        output = run(tmp_path / str(number), 2, text, status=2)
        assert sentence in output, (sentence, output)
        assert "Traceback" not in output, output


@LONG
def test_folders_that_are_there(folder, tmp_path):
    run(tmp_path, 1, settings(folder, iters=2))
    assert "trained exists; remove it or name another one" in run(tmp_path, 1, settings(folder, iters=2), status=2)
    output = run(tmp_path, 1, settings(folder, iters=2, output="other"), status=2)
    assert "resume = true" in output
    other = settings(folder, "[checkpoints]\nresume = true", model="qwen3_moe", iters=2, output="other")
    assert "is of a training with another base" in run(tmp_path, 1, other, status=2)


@LONG
def test_an_activation_that_is_not_finite_is_found(folder, tmp_path):
    model, _ = mlx_lm.utils.load_model(folder / "qwen3")
    norm = model.model.layers[1].post_attention_layernorm
    norm.weight = mx.where(mx.arange(norm.weight.size) == 1, mx.inf, norm.weight)
    shutil.copytree(folder / "qwen3", tmp_path / "broken")
    save_model(tmp_path / "broken", model)
    changed = {"model": str(tmp_path / "broken"), "weights": "pretrained", "fine_tune_type": "full", "num_layers": -1}
    text = settings(folder, "[control]\nnan_guard_every = 2\n[mesh]\nfsdp = 2", **changed)
    output = run(tmp_path / "job", 2, text, status=1)
    assert "model.layers.1.post_attention_layernorm" in output and "NonFinite" in output, output


@LONG
def test_little_device_memory_ends_it(folder, tmp_path):
    output = run(tmp_path, 1, settings(folder, "[control]\ndevice_memory_gib = 100_000.0"))
    assert "memory" in output, output
    assert losses(tmp_path) == [] and not (tmp_path / "trained").exists(), output


@LONG
def test_rows_by_measured_speeds(folder, one, tmp_path):
    text = settings(folder, "[mesh]\ndp = 2", batch_size=6, rank_shares="compute")
    run(tmp_path / "two", 2, text, MLXDIST_RANK_SHARES_COMPUTE="2,1")
    require_equal(tmp_path / "two", one(batch_size=6))
    assert "needs a job whose hosts are measured" in run(tmp_path / "not measured", 2, text, status=2)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_function(run_ranks, folder, tmp_path, monkeypatch, ranks):
    monkeypatch.chdir(tmp_path)
    run_ranks("train_function.py", ranks, folder)
