"""`mlxdist models`: which models are on a host, and what those lack that cannot be loaded."""

import json
import os

import pytest
from click.testing import CliRunner

from mlxdist.cli import commands
from mlxdist.tools.models.inventory import list_here
from mlxdist.tools.models.tiny_model import make_tiny_model

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "vocab_size": 64,
}
COMMIT = "01234567" * 5


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"quantization": {"group_size": 64, "bits": 4}}))
    make_tiny_model(str(tmp_path / "config.json"), tmp_path / "models" / "tiny")
    return tmp_path / "models" / "tiny"


@pytest.fixture
def kept(folder, tmp_path, monkeypatch):
    """The model, in the cache of the hub, as `hf download` lays it."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    kept = tmp_path / "cache" / "models--org--tiny"
    for name in ("blobs", "refs", f"snapshots/{COMMIT}"):
        (kept / name).mkdir(parents=True)
    for number, file in enumerate(folder.iterdir()):
        blob = kept / "blobs" / f"{number:040x}"
        blob.write_bytes(file.read_bytes())
        (kept / "snapshots" / COMMIT / file.name).symlink_to(f"../../blobs/{blob.name}")
    (kept / "refs" / "main").write_text(COMMIT)
    return kept


def run(*words, status=0):
    done = CliRunner().invoke(commands, ["models", *map(str, words)])
    assert done.exit_code == status, done.output
    return done


def test_the_cache_and_folders(kept, folder):
    size = sum(file.stat().st_size for file in folder.iterdir())
    row = {"type": "llama, 4-bit", "bytes": size, "missing": "", "shards": ""}
    of_hub = row | {"model": "org/tiny", "path": str(kept / "snapshots" / COMMIT)}
    of_folder = row | {"model": str(folder), "path": str(folder)}
    assert json.loads(run("--json").stdout) == [of_hub]
    assert (
        json.loads(run("--json", folder.parent).stdout)
        == json.loads(run("--json", folder).stdout)
        == [of_hub, of_folder]
    )
    lines = run(folder.parent).stdout.splitlines()
    assert lines[0].split() == ["model", "type", "size", "state", "path"]
    rows = [line for line in lines[1:] if "llama" in line]  # a long path goes on in the next line
    assert [line.split()[0] for line in rows] == [str(folder), "org/tiny"]
    assert all(" complete " in line for line in rows)


def test_hosts_list_their_own(kept):
    rows = json.loads(run("--json", "--hosts", "localhost").stdout)
    assert [(row["host"], row["model"]) for row in rows] == [("localhost", "org/tiny")]


def test_a_host_that_does_not_respond(kept):
    done = run("--json", "--hosts", "localhost,a-host-that-is-not-there", "--ssh", "false", status=1)
    assert [row["host"] for row in json.loads(done.stdout)] == ["localhost"]
    assert "a-host-that-is-not-there does not respond" in done.stderr


def remove_main(kept):
    (kept / "refs" / "main").unlink()


def remove_config(kept):
    (kept / "snapshots" / COMMIT / "config.json").unlink()


def remove_weights(kept):
    (kept / "snapshots" / COMMIT / "model.safetensors").resolve().unlink()


def rename_weights(kept):
    snapshot = kept / "snapshots" / COMMIT
    (snapshot / "model.safetensors.index.json").unlink()
    (snapshot / "model.safetensors").rename(snapshot / "model-00001-of-00002.safetensors")


def cut_weights(kept):
    path = (kept / "snapshots" / COMMIT / "model.safetensors").resolve()
    os.truncate(path, path.stat().st_size - 1)


def damage_main(kept):
    (kept / "refs" / "main").write_bytes(b"\xff\xfe")


@pytest.mark.parametrize(
    ("change", "missing"),
    [
        (damage_main, "the download was interrupted"),
        (remove_main, "the download was interrupted"),
        (remove_config, "there is no config.json"),
        (remove_weights, "model.safetensors cannot be read: No such file"),
        (rename_weights, "model-00002-of-00002.safetensors is missing, as the names of other files say"),
        (cut_weights, "is damaged"),
    ],
)
def test_what_a_model_lacks(kept, change, missing):
    change(kept)
    (row,) = list_here([])
    assert row["model"] == "org/tiny" and missing in row["missing"]
    assert "incomplete: " in run().stdout


def test_what_is_in_files_does_not_steer_the_terminal(kept):
    snapshot = kept / "snapshots" / COMMIT
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").write_text(json.dumps({"model_type": "\33[31mred"}))
    index = snapshot / "model.safetensors.index.json"
    index.unlink()
    index.write_text(json.dumps({"weight_map": {"a": "model\33[2J.safetensors"}}))
    (row,) = list_here([])
    assert row["type"] == "?[31mred" and "model?[2J.safetensors is missing" in row["missing"]


def test_a_directory_that_is_not_there(kept, tmp_path):
    """Of several hosts, some may have it."""
    done = CliRunner().invoke(commands, ["models", str(tmp_path / "none")])
    assert done.exit_code == 2 and f"there is no directory {tmp_path / 'none'}" in done.output
    assert len(json.loads(run("--json", "--hosts", "localhost", tmp_path / "none").stdout)) == 1


def test_no_models(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "none"))
    done = run()
    assert done.stdout == "" and done.stderr == "There are no models here.\n"
    (tmp_path / "models--org--x" / "snapshots").mkdir(parents=True)
    (tmp_path / "datasets--org--x").mkdir()
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert [row["model"] for row in list_here([])] == ["org/x"]
