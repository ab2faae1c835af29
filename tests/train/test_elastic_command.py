"""`mlxdist train` in elastic jobs: the weights of one process, whatever ranks are lost or join."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from launching import nothing_left  # noqa: F401
from waiting import wait_for

pytest.importorskip("mlx_lm")
import training_folder

ITERS = 120
PROGRAM = [sys.executable, "-m", "mlxdist"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return training_folder.make(tmp_path_factory.mktemp("elastic"))


def settings(folder: Path, tables: str = "", **changed: object) -> str:
    # Rows that do not divide over three ranks, and a rate at which roundings of sums do not grow.
    values = {"iters": ITERS, "batch_size": 8, "steps_per_eval": 40, "learning_rate": 1e-4} | changed
    return training_folder.settings(folder, "[checkpoints]\nevery = 25\n" + tables, **values)


def start(directory: Path, ranks: int, text: str, *options: str) -> subprocess.Popen:
    directory.mkdir(exist_ok=True)
    (directory / "config.toml").write_text(text)
    elastic = ["--elastic", "1"] if ranks > 1 else []
    # One process by the launcher, too, which removes what MLX compiles.
    command = [*PROGRAM, "launch", "-n", str(ranks), *elastic, *options, "--", *PROGRAM, "train", "config.toml"]
    return subprocess.Popen(
        command, cwd=directory, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def end(process: subprocess.Popen, status: int = 0) -> str:
    output, _ = process.communicate(timeout=200)
    assert process.returncode == status, output
    return output


def reports(directory: Path, name: str) -> list[dict]:
    file = directory / "checkpoints" / "reports.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [report for report in (json.loads(line) for line in lines if line.endswith("\n")) if name in report]


def kill(rank: int) -> None:
    """Kills a rank of the only job."""
    listed = subprocess.run([*PROGRAM, "ps", "--json"], capture_output=True, check=True, stdin=subprocess.DEVNULL)
    (job,) = json.loads(listed.stdout)
    os.kill(job["pids"][str(rank)], signal.SIGKILL)


def weights(directory: Path) -> dict[str, mx.array]:
    (file,) = (directory / "trained").glob("*.safetensors")
    return mx.load(str(file))


def require_equal(directory: Path, reference: Path, missing: int = 0) -> None:
    """``missing``: reports that a rank may have had and not written when it was killed."""
    for name in ("train_loss", "val_loss"):
        expected, found = ({r["iteration"]: r[name] for r in reports(d, name)} for d in (reference, directory))
        assert len(expected.keys() - found.keys()) <= missing
        assert found == pytest.approx({number: expected[number] for number in found}, rel=1e-4)
    expected, found = weights(reference), weights(directory)
    assert found.keys() == expected.keys()
    for path, array in expected.items():
        assert mx.allclose(found[path], array, rtol=1e-3, atol=2e-4), path


@pytest.fixture(scope="module")
def reference(folder, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("reference")
    end(start(directory, 1, settings(folder)))
    return directory


@pytest.mark.long
@pytest.mark.parametrize("lost", [[1], [0], [2, 0]])
def test_the_others_go_on(folder, reference, tmp_path, lost):
    """Also without rank 0, which prints and writes. Three ranks have 3, 3 and 2 rows of a batch."""
    process = start(tmp_path, 3, settings(folder))
    for number, rank in enumerate(lost, 1):
        wait_for(lambda: len(reports(tmp_path, "train_loss")) >= 20 * number, 100)
        kill(rank)
        wait_for(lambda: len(reports(tmp_path, "lost")) >= number, 100)
    output = end(process)
    require_equal(tmp_path, reference, missing=lost.count(0))
    changes = reports(tmp_path, "lost")
    assert [change["lost"] for change in changes] == [[rank] for rank in lost]
    assert [change["ranks"] for change in changes] == [2, 1][: len(lost)]
    assert all(change["repeated_steps"] in (0, 1) for change in changes)
    assert f"rank {lost[0]} is lost: the training goes on with 2 ranks, and repeats " in output
    shown = subprocess.run([*PROGRAM, "checkpoint", "verify", str(tmp_path / "checkpoints")], stdin=subprocess.DEVNULL)
    assert shown.returncode == 0


@pytest.mark.long
@pytest.mark.parametrize("tuned", [False, True], ids=["all parameters", "adapters"])
def test_a_rank_that_is_started_again_joins(folder, tmp_path, tuned):
    """The step at which it stops depends on the machine; one process that trains as many steps has the same weights."""
    lora = {"weights": "pretrained", "num_layers": 2} if tuned else {}
    small = {"learning_rate": 1e-5, "iters": 10**6, **lora}
    tables = 'resume = true\n[control]\nkill_file = "STOP"\n[elastic]\ngrow_every = 5\n'
    elastic, alone = tmp_path / "elastic", tmp_path / "alone"
    # The job goes on from a checkpoint of another one, and has saved none of its own when the rank is lost.
    end(start(elastic, 1, settings(folder, tables, **small | {"iters": 26})))
    shutil.rmtree(elastic / "trained")
    process = start(elastic, 3, settings(folder, tables, **small), "--max-restarts", "1")
    wait_for(lambda: len(reports(elastic, "train_loss")) >= 30, 100)
    kill(1)
    wait_for(lambda: len(reports(elastic, "lost")) == 2, 100)
    joined = reports(elastic, "lost")[-1]
    wait_for(lambda: reports(elastic, "train_loss")[-1]["iteration"] >= joined["iteration"] + 20, 100)
    (elastic / "STOP").touch()
    output = end(process)
    assert (joined["joined"], joined["ranks"], joined["repeated_steps"]) == ([1], 3, 0)
    assert "rank 1 has joined: the training goes on with 3 ranks, and repeats 0 steps" in output
    (elastic / "STOP").unlink()
    small["iters"] = reports(elastic, "train_loss")[-1]["iteration"]
    end(start(elastic, 1, settings(folder, tables, **small)))
    end(start(alone, 1, settings(folder, tables, **small)))
    require_equal(elastic, alone)


def test_what_cannot_be_elastic(folder, tmp_path):
    output = end(start(tmp_path, 2, settings(folder, "[mesh]\nfsdp = 2\n")), status=2)
    assert "[mesh] has fsdp = 2, and a job of `mlxdist launch --elastic` trains replicas" in output
    assert "leave out [mesh]; or leave out --elastic, and go on from checkpoints, by --max-restarts" in output
