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
from mlxdist.tools.bench.results import by_case, load
from mlxdist.tools.bench.timing import CORES

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "vs_peers.py"


def vs_peers(directory: Path, *arguments: str, status: int = 0) -> subprocess.CompletedProcess:
    finished = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], cwd=directory, capture_output=True, text=True, timeout=600
    )
    assert finished.returncode == status, finished.stdout + finished.stderr
    return finished


def require_complete(directory: Path, backends: set[str]) -> dict:
    results = json.loads((directory / "vs_peers.json").read_text())
    assert results["setup"]["ranks"] == 2 and load(directory / "vs_peers.json") == results
    for row in by_case(results):
        case = next(iter(row.values()))["case"]
        if case["operation"] == "all_sum" and "ranks" not in case:
            assert set(row) == {"mlxdist", *backends}
        for result in row.values():
            assert (result["wrong"], result["refused"]) == (0, None), result
            limits = [result["memcpy"], *([result["transfer"]] if len(CORES) > 1 else [])]
            for spread in [result["microseconds"], *limits]:
                assert 0 < spread["min"] <= spread["median"] <= spread["max"]
    assert {"operation": "all_reduce", "dtype": "float32", "bytes": 4096} in [r["case"] for r in results["cases"]]
    assert (directory / "vs_peers.png").read_bytes().startswith(b"\x89PNG")
    return results


@pytest.mark.long
def test_against_the_ring(tmp_path):
    printed = vs_peers(tmp_path, "--quick", "--baseline", "ring").stdout
    results = require_complete(tmp_path, {"ring"})
    assert "ring / mlxdist" in printed and "targets" in printed
    assert all(column in printed for column in LIMIT_COLUMNS)
    found = {(target["case"], target["wanted"]): target for target in results["targets"]}
    assert found["all_sum 8 KiB float16, lazy chain", "ring takes 20x or more"]["met"] in (True, False)
    if len(CORES) > 1:
        small = found["all_sum 8 KiB float32, lazy chain", "1.5x transfer or less"]
        assert small["met"] in (True, False) and small["ends"][0] <= small["measured"] <= small["ends"][1]
    assert found["all_sum 16 MiB float32", "1.5x memcpy or less"]["met"] is None  # --quick stops before
    assert [result["case"]["ranks"] for result in results["cases"] if "ranks" in result["case"]] == [4, 8]
    assert results["setup"]["slab_bytes"] > 0


@pytest.mark.long
def test_open_mpi_in_the_same_processes(tmp_path):
    if not shutil.which("mpirun"):
        pytest.skip("there is no mpirun on the path (Debian: apt install openmpi-bin)")
    vs_peers(tmp_path, "--quick")
    require_complete(tmp_path, {"ring", "mpi"})


@pytest.mark.parametrize(
    "arguments, status, words",
    [
        (["--baseline", "carrier-pigeon"], 2, "'carrier-pigeon' is not one of ring, mpi"),
        (["--gloo", "nowhere"], 1, "there is no environment in nowhere; make it: "),
        (["--baseline", "ring", "--mpi4py", "nowhere"], 1, "--mpi4py needs Open MPI in the same processes"),
    ],
)
def test_rejected(tmp_path, arguments, status, words):
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


def results(targets, ours: float, others: float, wrong: bool = False) -> dict:
    """Limits and peers take ``others`` microseconds."""

    def result(case: dict, name: str, time: float, **more: object) -> dict:
        refused = "wrong" if wrong else None
        times = None if wrong else spread(time)
        return {"case": case, "variant": name, "microseconds": times, "refused": refused} | more

    limits = {name: spread(others) for name in LIMITS}
    found = []
    for case in targets.cases(64 << 20):
        found.append(result(case, "mlxdist", ours, **limits))
        found += [result(case, name, others, **limits) for name in ("ring", "mpi", "mpi4py")]
    for ranks, bound in targets.OVERSUBSCRIBED_US.items():
        found.append(result({"operation": "all_sum", "bytes": 8 << 10, "ranks": ranks}, "mlxdist", ours * bound))
    return {"setup": {"slab_bytes": int(ours * (16 << 20))}, "cases": found}


def judged(targets, found: dict) -> list[dict]:
    return [target.judged() for target in targets.targets(found)]


def test_targets():
    targets = load_targets()
    found = judged(targets, results(targets, ours=1.0, others=25.0))
    assert all(target["met"] is True for target in found), [target for target in found if not target["met"]]
    assert not any(target["met"] for target in judged(targets, results(targets, ours=8.1, others=1.0)))
    # A wrong sum meets nothing; only the memory is still what it is.
    found = judged(targets, results(targets, 1.0, 25.0, wrong=True))
    assert [target["case"] for target in found if target["met"]] == ["slab memory per rank, 8 ranks"]
    assert {target["met"] for target in judged(targets, {"setup": {}, "cases": []})} == {None}


def test_targets_are_multiples_of_limits_with_their_range():
    targets = load_targets()
    found = {(target.case, target.wanted): target for target in targets.targets(results(targets, 3.0, 2.0))}
    large = found["all_sum 16 MiB float32", "1.5x memcpy or less"]
    assert large.judged()["met"] and large.shown() == "1.5 [0.75..3]"
    assert not found["all_sum 1 MiB float32", "1x transfer or less"].judged()["met"]
    gather = found["all_gather 1 MiB float32", "mpi takes 1x or more"]
    assert not gather.judged()["met"] and gather.shown() == "0.667 [0.333..1.33]"


def test_without_a_transfer_its_targets_are_not_measured():
    targets = load_targets()
    found = results(targets, 1.0, 25.0)
    for result in found["cases"]:
        result["transfer"] = None
    missing = [target["wanted"] for target in judged(targets, found) if target["met"] is None]
    assert missing == [f"{bound}x transfer or less" for bound in ("1.5", "1", "8", "2")]
