"""`mlxdist bench tp`: that it runs, checks and judges. No test looks at times."""

import json
import subprocess
import sys

import pytest

from mlxdist.tools.bench.limits import limits_line
from mlxdist.tools.bench.results import by_case
from mlxdist.tools.bench.tp import communication, targets


def run(*arguments: str, status: int = 0) -> subprocess.CompletedProcess:
    finished = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=600)
    assert finished.returncode == status, finished.stdout + finished.stderr
    return finished


@pytest.mark.long
def test_layers(tmp_path):
    output = tmp_path / "layers.json"
    arguments = ["--shape", "all", "--hidden", "128", "--phase", "decode,prefill", "--tokens", "3", "--repeats", "3"]
    printed = run("-m", "mlxdist", "bench", "tp", *arguments, "--device", "cpu", "--output", str(output)).stdout
    results = json.loads(output.read_text())
    rows = by_case(results)
    assert (results["setup"]["ranks"], results["setup"]["dtype"], len(rows)) == (2, "float32", 4)
    names = {"per-op", "split", "lazy", "graph", "mlx", "ring", "ring compiled", "tp1", "tp1 split"}
    for row in rows:
        assert not any(result["wrong"] or result["refused"] for result in row.values())
        assert set(row) == names | {f"{name} compute" for name in ("split", "lazy", "mlx")}
        # The last one is the caller's, who wants the result.
        submitted = {name: row[name]["submitted"] for name in ("split", "lazy", "graph", "mlx")}
        assert submitted == {"split": 3, "lazy": 1, "graph": 1, "mlx": 1}
        assert row["per-op"]["submitted"] > 10
        assert 0 < communication(row["split"])
        for result in row.values():
            assert 0 <= result["microseconds"]["min"] <= result["microseconds"]["median"]
    assert "in its two all_sum" in printed and "times split" in printed
    assert limits_line(results["setup"]["limits"]) in printed


@pytest.mark.long
def test_whole_models_and_targets(tmp_path):
    output = tmp_path / "layers.json"
    arguments = ["--shape", "qwen", "--hidden", "128", "--phase", "generate", "--layers", "2", "--targets"]
    arguments += ["--repeats", "3", "--device", "cpu", "--output", str(output)]
    printed = run("-m", "mlxdist", "bench", "tp", *arguments).stdout
    results = json.loads(output.read_text())
    generated = {r["variant"]: r for r in results["cases"] if r["case"]["operation"] == "generate"}
    assert {"split", "ring", "tp1", "tp1 split"} <= set(generated)
    assert not any(result["wrong"] for result in generated.values())
    assert "not measured" in printed and "whole model, generate" in printed


def test_rejected():
    words = run("-m", "mlxdist", "bench", "tp", "--hidden", "100", status=2).stderr
    assert "'100' is not a multiple of 128" in words


def test_targets():
    def row(hidden: int, ours: float, wrong: int = 0, operation: str = "decode") -> list[dict]:
        times = {"lazy": ours, "split": ours, "ring": 2.0, "ring compiled": 1.5, "tp1": 3.0}
        case = {"family": "mixtral", "operation": operation, "hidden": hidden}
        refused = "wrong" if wrong else None
        return [
            {"case": case, "variant": name, "wrong": wrong, "refused": refused, "engine": {"median": ours / 100}}
            | {"microseconds": None if refused else dict.fromkeys(("median", "min", "max"), time)}
            for name, time in times.items()
        ]

    def met(*rows: list[dict]) -> list[bool | None]:
        results = {"setup": {"device": "cpu"}, "cases": [result for row in rows for result in row]}
        return [target.judged()["met"] for target in targets(results, ["mixtral"])]

    model = row(1024, 1.0, operation="generate")
    assert met(row(256, 1.0), row(1024, 1.0), row(4096, 1.0), model) == [True] * 4
    # The faster form of MLX's layer counts; and what is wrong meets nothing.
    assert met(row(256, 1.2), row(4096, 1.6)) == [False, None, False, None]
    assert met(row(256, 1.0, wrong=1), row(1024, 1.0, wrong=1)) == [None] * 4
    assert met() == [None] * 4
