"""mlxdist.train.Throughput: rates of the slowest rank, shares of a measured peak, communication exposed and hidden."""

import json
import socket
from pathlib import Path

import pytest

import mlxdist
from mlxdist import train


@pytest.mark.parametrize(
    "check, ranks", [pytest.param("rates", 1, marks=pytest.mark.long), ("rates", 3), ("hidden", 2), ("refused", 2)]
)
def test_throughput(run_scenarios, check, ranks):
    run_scenarios("throughput.py", ranks, check)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "hosts, peak",
    [
        ({"localhost": 1.25}, 1.25),
        ({f"me@{socket.gethostname().upper()}.local": 2.5, "localhost": 9.0}, 2.5),
        ({"another": 3.0}, None),
    ],
)
def test_the_peak_is_that_of_calibrate(run_scenarios, tmp_path, ranks, hosts, peak):
    """Once for each host, however many ranks it has."""
    tuning = tmp_path / "tuning.json"
    measured = {name: {"tflops": tflops, "memory_gbps": 10.0} for name, tflops in hosts.items()}
    tuning.write_text(json.dumps({"schema": 3, "hosts": measured}))
    run_scenarios("throughput.py", ranks, "peak", peak, environment={"MLXDIST_TUNING_FILE": str(tuning)})


@pytest.mark.parametrize(
    "arguments, text",
    [
        ({"flops_per_token": 12}, "flops_per_token is 12, not a FlopsPerToken"),
        ({"recompute": -0.5}, "recompute is -0.5, not a share from 0 to 1"),
        ({"recompute": float("nan")}, "recompute is nan"),
        ({"peak_tflops": 0}, "peak_tflops is 0, not a number above 0"),
        ({"peak_tflops": float("inf")}, "peak_tflops is inf"),
    ],
)
def test_bad_arguments(arguments, text):
    with pytest.raises(mlxdist.InvalidArgument, match=text):
        train.Throughput(**arguments)


def test_bad_steps():
    throughput = train.Throughput(peak_tflops=1.0)
    for tokens in (-1, 1.5, True):
        with pytest.raises(mlxdist.InvalidArgument, match="tokens is"):
            with throughput.step(tokens=tokens):
                pass
    with pytest.raises(mlxdist.InvalidArgument, match="repeats is 0"):
        throughput.measure_compute(lambda: None, repeats=0)


def test_flops_are_those_of_the_rows(tmp_path, monkeypatch):
    """Of rows shorter than max_seq_length, as each is; also of prompts, which are no targets."""
    pytest.importorskip("mlx_lm")
    import training_folder
    from mlx_lm.utils import load_model

    from mlxdist.train.config import TrainConfig
    from mlxdist.train.trainer import train as run

    folder = training_folder.make(tmp_path)
    monkeypatch.chdir(tmp_path)
    (folder / "qwen3" / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }} {% endfor %}")
    pairs = [{"prompt": " ".join(["w1"] * number), "completion": "w2 w3"} for number in range(1, 9)]
    training_folder.write(folder / "pairs", "train", pairs)
    model, _ = load_model(folder / "qwen3")
    model.freeze()
    for layer in model.layers:
        layer.unfreeze()
    lengths = [number + 2 - 1 for number in range(1, 9)]  # the last token has no successor
    expected = sum(length * train.flops_per_token(model, length).total for length in lengths)
    settings = {"model": str(folder / "qwen3"), "data": str(folder / "pairs"), "val_batches": 0, "report_to": "json"}
    run(TrainConfig(**settings, fine_tune_type="full", num_layers=-1, batch_size=8, iters=1, mask_prompt=True))
    (report,) = map(json.loads, Path("checkpoints/reports.jsonl").read_text().splitlines())
    assert report["tflops"] * 1e12 / report["iterations_per_second"] == pytest.approx(expected, rel=1e-5)
    assert report["trained_tokens"] == 8 * 2
