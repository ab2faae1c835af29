"""benchmarks/vs_peers.py: that it runs, compares right data, and judges its targets."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mlxdist.tools.bench.limits import LIMIT_COLUMNS, LIMITS
from mlxdist.tools.bench.timing import CORES

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
        for spread in [*case["microseconds"].values(), case["memcpy"], *([case["transfer"]] if len(CORES) > 1 else [])]:
            assert 0 < spread["min"] <= spread["median"] <= spread["max"]
    assert [line["bytes"] for line in results["engine"]] == [4 << 10, 1 << 20, 16 << 20]
    for line in results["engine"]:
        assert line["wrong"] == 0
        for name in ("all_reduce", "memcpy", *(["transfer"] if len(CORES) > 1 else [])):
            assert 0 < line[name]["min"] <= line[name]["median"] <= line[name]["max"]
    assert (folder / "vs_peers.png").read_bytes().startswith(b"\x89PNG")
    return results


@pytest.mark.long
def test_against_the_ring(tmp_path):
    printed = vs_peers(tmp_path, "--quick", "--against", "ring").stdout
    results = require_complete(tmp_path, {"ring"})
    assert "ring: times ours" in printed and "targets" in printed
    assert all(column in printed for column in LIMIT_COLUMNS)
    judged = {(target["case"], target["wanted"]): target for target in results["targets"]}
    assert judged["all_sum 8 KiB float16, lazy chain", "ring takes 20x or more"]["met"] in (True, False)
    if len(CORES) > 1:
        small = judged["all_sum 8 KiB float32, lazy chain", "1.5x transfer or less"]
        assert small["met"] in (True, False) and small["ends"][0] <= small["measured"] <= small["ends"][1]
    assert judged["all_sum 16 MiB float32", "1.5x memcpy or less"]["met"] is None  # --quick stops before
    assert [case["ranks"] for case in results["oversubscribed"]] == [4, 8]
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


def spread(median: float) -> dict:
    return {"median": median, "min": median / 2, "max": median * 2}


def results(targets, ours: float, others: float, wrong: int = 0) -> dict:
    """Limits and peers take ``others`` microseconds."""
    names, limits = ("mlxdist", "ring", "mpi", "mpi4py"), {name: spread(others) for name in LIMITS}
    times = {name: spread(ours if name == "mlxdist" else others) for name in names}
    measured = limits | {"microseconds": times, "wrong": dict.fromkeys(names, wrong)}
    return {
        "cases": [case | measured for case in targets.cases(64 << 20)],
        "engine": [limits | {"all_reduce": spread(ours), "wrong": wrong, "bytes": size} for size in targets.ENGINE],
        "slab_bytes": int(ours * (16 << 20)),
        "oversubscribed": [
            {"ranks": ranks, "microseconds": spread(ours * bound), "wrong": wrong}
            for ranks, bound in targets.OVERSUBSCRIBED_US.items()
        ],
    }


def test_targets():
    targets = load_targets()
    met = targets.targets(results(targets, ours=1.0, others=25.0))
    assert all(target.met is True for target in met), [target for target in met if not target.met]
    assert not any(target.met for target in targets.targets(results(targets, ours=8.1, others=1.0)))
    # A wrong sum meets nothing; only the memory is still what it is.
    assert [target.case for target in targets.targets(results(targets, 1.0, 25.0, wrong=1)) if target.met] == [
        "slab memory per rank, 8 ranks"
    ]
    nothing = {"cases": [], "engine": [], "slab_bytes": None, "oversubscribed": []}
    assert {target.met for target in targets.targets(nothing)} == {None}


def test_targets_are_multiples_of_limits_with_their_range():
    targets = load_targets()
    judged = {(target.case, target.wanted): target for target in targets.targets(results(targets, 3.0, 2.0))}
    large = judged["all_sum 16 MiB float32", "1.5x memcpy or less"]
    assert large.met and large.shown() == "1.50 [0.75..3.00]"
    assert not judged["all_sum 1 MiB float32", "1x transfer or less"].met
    gather = judged["all_gather 1 MiB float32", "mpi takes 1x or more"]
    assert not gather.met and gather.shown() == "0.67 [0.33..1.33]"


def test_without_a_transfer_its_targets_are_not_measured():
    targets = load_targets()
    found = results(targets, 1.0, 25.0)
    for case in found["cases"]:
        case["transfer"] = None
    for line in found["engine"]:
        del line["transfer"]  # as engine.c prints it
    missing = [target.wanted for target in targets.targets(found) if target.met is None]
    assert missing == [f"{bound}x transfer or less" for bound in ("1.5", "1", "8", "2")]
