"""`mlxdist bench tp` and benchmarks/layers_vs_mlx.py: that they run, check and judge. No test looks at times."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from mlxdist.tools.bench.limits import limits_line
from mlxdist.tools.bench.tp import communication, failed, withhold
from mlxdist.tools.bench.tp_rank import impossible

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def run(*arguments: str, status: int = 0) -> subprocess.CompletedProcess:
    finished = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=240)
    assert finished.returncode == status, finished.stdout + finished.stderr
    return finished


@pytest.mark.long
def test_layers(tmp_path):
    output = tmp_path / "layers.json"
    arguments = ["--shape", "all", "--hidden", "128", "--phase", "all", "--tokens", "3", "--rounds", "3"]
    printed = run("-m", "mlxdist", "bench", "tp", *arguments, "--device", "cpu", "--output", str(output)).stdout
    results = json.loads(output.read_text())
    assert (results["ranks"], results["dtype"], len(results["cases"])) == (2, "float32", 4)
    names = {"per-op", "split", "lazy", "graph", "mlx", "ring", "ring compiled", "tp1", "tp1 split"}
    for case in results["cases"]:
        assert set(case["wrong"]) == names and not any(case["wrong"].values())
        assert set(case["microseconds"]) == names | {f"{name} compute" for name in ("split", "lazy", "mlx")}
        # The last one is the caller's, who wants the result.
        assert {n: case["submitted"][n] for n in ("split", "lazy", "graph", "mlx", "per-op")} == {
            "split": 3, "lazy": 1, "graph": 1, "mlx": 1, "per-op": case["submitted"]["per-op"],
        }  # fmt: skip
        assert case["submitted"]["per-op"] > 10
        assert 0 < communication(case, "split")
        for times in case["microseconds"].values():
            assert 0 <= times["min"] <= times["median"] <= times["max"]
    assert "in its two all_sum" in printed and "times split" in printed
    assert limits_line(results["limits"]) in printed


@pytest.mark.long
def test_whole_models_and_targets(tmp_path):
    output = tmp_path / "layers.json"
    arguments = ["--shape", "qwen", "--hidden", "128", "--model-hidden", "128", "--model-layers", "2", "--tokens", "3"]
    script = str(BENCHMARKS / "layers_vs_mlx.py")
    printed = run(script, *arguments, "--rounds", "3", "--device", "cpu", "--json", str(output)).stdout
    results = json.loads(output.read_text())
    generated = [case for case in results["cases"] if case["phase"] == "generate"]
    assert len(generated) == 1 and {"split", "ring", "tp1", "tp1 split"} <= set(generated[0]["microseconds"])
    assert not any(generated[0]["wrong"].values())
    assert "not measured" in printed and "whole model, generate" in printed


def test_refused():
    words = run("-m", "mlxdist", "bench", "tp", "--hidden", "100", status=2).stderr
    assert "'100' is not a multiple of 128" in words


def test_a_time_below_the_roofline_is_no_result():
    assert impossible("split", 100.0, 1000, 1000, 30.0) is None
    why = impossible("split", 9.0, 1000, 1000, 30.0)  # a copy reads and writes; reading alone takes 10 at least
    assert "0.1 GB/s" in why and "split" in why
    assert impossible("tp1", 19.0, 2000, 1000, 30.0) and not impossible("tp1", 21.0, 2000, 1000, 30.0)
    case = {"microseconds": {"split": {"median": 9.0}}, "refused": {"split": why}, "wrong": {"split": 0}}
    assert withhold(case)["microseconds"] == {"split": None}
    assert failed({"cases": [case]}) and not failed({"cases": [case | {"refused": {}}]})
    assert failed({"cases": [case | {"refused": {}, "wrong": {"split": 1}}]})


def load(name: str):
    specification = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    specification.loader.exec_module(module)
    return module


def test_targets(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    layers = load("layers_vs_mlx")

    def case(hidden: int, ours: float, wrong: int = 0, **more: object) -> dict:
        times = {"lazy": ours, "split": ours, "ring": 2.0, "ring compiled": 1.5, "tp1": 3.0}
        made = {"family": "mixtral", "hidden": hidden, "phase": "decode", "device": "cpu", "wrong": {"lazy": wrong}}
        times = {name: {"median": time} for name, time in times.items()}
        return made | {"microseconds": times, "engine": {"lazy": {"median": ours / 100}}} | more

    def met(*cases: dict) -> list[bool | None]:
        return [target.met for target in layers.targets({"cases": list(cases)})[:4]]

    model = case(1024, 1.0, phase="generate")
    assert met(case(256, 1.0), case(1024, 1.0), case(4096, 1.0), model) == [True] * 4
    # The faster form of MLX's layer counts; and what is wrong meets nothing.
    assert met(case(256, 1.2), case(4096, 1.6)) == [False, None, False, None]
    assert met(case(256, 1.0, wrong=1), case(1024, 1.0, wrong=1)) == [False, False, None, None]
    assert met() == [None] * 4
