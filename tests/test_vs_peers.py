"""benchmarks/vs_peers.py: that it runs, compares right data, and judges its targets."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "benchmarks" / "vs_peers.py"


def vs_peers(folder: Path, *arguments: str, status: int = 0) -> subprocess.CompletedProcess:
    finished = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], cwd=folder, capture_output=True, text=True, timeout=240
    )
    assert finished.returncode == status, finished.stdout + finished.stderr
    return finished


def require_complete(folder: Path, backends: set[str]) -> dict:
    results = json.loads((folder / "vs_peers.json").read_text())
    assert results["ranks"] == 2
    for case in results["cases"]:
        if case["operation"] == "all_sum":
            assert set(case["microseconds"]) == {"mlxdist", *backends}
        assert set(case["wrong"].values()) == {0}, case
        for spread in [*case["microseconds"].values(), case["memcpy"]]:
            assert 0 < spread["min"] <= spread["median"] <= spread["max"]
    assert [line["bytes"] for line in results["engine"]] == [4 << 10, 1 << 20, 16 << 20]
    for line in results["engine"]:
        assert line["wrong"] == 0 and 0 < line["all_reduce"]["min"] <= line["memcpy"]["max"] * 1e6
    assert (folder / "vs_peers.png").read_bytes().startswith(b"\x89PNG")
    return results


@pytest.mark.long
def test_against_the_ring(tmp_path):
    printed = vs_peers(tmp_path, "--quick", "--against", "ring").stdout
    results = require_complete(tmp_path, {"ring"})
    assert "ring: times ours" in printed and "targets" in printed
    measured = {target["case"]: target for target in results["targets"] if "ring" in target["wanted"]}
    assert measured["all_sum 8 KiB float32, lazy chain"]["met"] in (True, False)
    assert measured["all_sum 16 MiB float32"]["met"] is None  # --quick stops before
    assert results["slab_bytes"] > 0


@pytest.mark.long
def test_open_mpi_in_the_same_processes(tmp_path):
    if not shutil.which("mpirun"):
        pytest.skip("there is no mpirun on the path (Debian: apt install openmpi-bin)")
    vs_peers(tmp_path, "--quick")
    require_complete(tmp_path, {"ring", "mpi"})


@pytest.mark.parametrize(
    "arguments, status, words",
    [
        (["--against", "carrier-pigeon"], 2, "'carrier-pigeon' is not one of ring, mpi"),
        (["--gloo", "nowhere"], 1, "there is no environment in nowhere; make it with --setup-gloo nowhere"),
        (["--against", "ring", "--mpi4py", "nowhere"], 1, "--mpi4py needs Open MPI in the same processes"),
    ],
)
def test_refused(tmp_path, arguments, status, words):
    assert words in vs_peers(tmp_path, *arguments, status=status).stderr
    assert os.listdir(tmp_path) == []


def load_targets():
    specification = importlib.util.spec_from_file_location("targets", SCRIPT.with_name("targets.py"))
    module = importlib.util.module_from_spec(specification)
    sys.modules["targets"] = module  # dataclasses look their module up
    specification.loader.exec_module(module)
    return module


def measured(ours: float, peers: float, wrong: int = 0) -> dict:
    names = ("mlxdist", "ring", "mpi", "mpi4py")
    times = {name: {"median": ours if name == "mlxdist" else peers} for name in names}
    return {"microseconds": times, "memcpy": {"median": 100.0}, "wrong": {name: wrong for name in names}}


def results(targets, ours: float, peers: float, wrong: int = 0) -> dict:
    times = {"all_reduce": {"median": ours}, "memcpy": {"median": 1.0}, "wrong": wrong}
    return {
        "cases": [case | measured(ours, peers, wrong) for case in targets.cases(64 << 20)],
        "engine": [times | {"bytes": size} for size in targets.ENGINE],
        "slab_bytes": int(ours * (16 << 20)),
        "oversubscribed": {"median": ours * 100, "wrong": wrong},
    }


def test_targets():
    targets = load_targets()
    met = targets.targets(results(targets, ours=1.0, peers=25.0))
    assert all(target.met is True for target in met), [target for target in met if not target.met]
    assert [target.met for target in targets.targets(results(targets, ours=4.1, peers=2.0))].count(True) == 1
    assert {target.met for target in targets.targets(results(targets, 1.0, 25.0, wrong=1))} <= {True, False}
    # A wrong sum meets nothing; only the memory is still what it is.
    assert [target.case for target in targets.targets(results(targets, 1.0, 25.0, wrong=1)) if target.met] == [
        "slab memory per rank, 8 ranks"
    ]
    nothing = {"cases": [], "engine": [], "slab_bytes": None, "oversubscribed": {"median": None, "wrong": 0}}
    assert {target.met for target in targets.targets(nothing)} == {None}
