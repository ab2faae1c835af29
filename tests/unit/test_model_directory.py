"""A model is a directory, or a name in the local cache of the Hugging Face Hub: nothing uses the network."""

import json
import os
import subprocess
import sys

import pytest
from huggingface_hub import snapshot_download

from mlxdist import InvalidArgument
from mlxdist.base.model_directory import find_model, model_directory

VARIABLES = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME")
CACHES = [
    {},
    {"XDG_CACHE_HOME": "~/caches"},
    {"HF_HOME": "$HOME/hf", "XDG_CACHE_HOME": "/elsewhere"},
    {"HUGGINGFACE_HUB_CACHE": "{home}/old", "HF_HOME": "/elsewhere"},
    {"HF_HUB_CACHE": "~/new", "HUGGINGFACE_HUB_CACHE": "/elsewhere", "HF_HOME": "/elsewhere"},
]
# The cache that huggingface_hub takes, for each of the environments that it is given.
ASK = """
import importlib, json, os, sys
from huggingface_hub import constants
found = []
for variables in json.loads(sys.argv[1]):
    os.environ.update(variables)
    found.append(importlib.reload(constants).HF_HUB_CACHE)
    for name in variables:
        del os.environ[name]
print(json.dumps(found))
"""


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Without a model, and without variables that name another cache."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def download(cache, name="org/model", config=b"{}"):
    """Puts a model into a cache, as `hf download` does: a blob, a link to it, and a reference to the snapshot."""
    kept = cache / f"models--{name.replace('/', '--')}"
    snapshot = kept / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    for directory in (kept / "blobs", kept / "refs", snapshot):
        directory.mkdir(parents=True)
    (kept / "refs" / "main").write_text(snapshot.name)
    (kept / "blobs" / "b10b").write_bytes(config)
    (snapshot / "config.json").symlink_to("../../blobs/b10b")
    return snapshot


def test_the_cache_is_that_of_huggingface_hub(home, monkeypatch):
    caches = [{name: value.format(home=home) for name, value in variables.items()} for variables in CACHES]
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    command = [sys.executable, "-c", ASK, json.dumps(caches)]
    asked = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    for number, (variables, cache) in enumerate(zip(caches, json.loads(asked.stdout))):
        with monkeypatch.context() as here:
            for name, value in variables.items():
                here.setenv(name, value)
            snapshot = download(home / cache, f"org/model-{number}")
            assert model_directory(f"org/model-{number}") == snapshot
            assert snapshot_download(f"org/model-{number}", cache_dir=cache, local_files_only=True) == str(snapshot)


def test_a_name_without_an_organization(home, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(home / "hub"))
    assert find_model("gpt2") is None
    assert download(home / "hub", "gpt2") == model_directory("gpt2")


def test_a_directory_takes_precedence_over_a_name(home, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(home / "hub"))
    download(home / "hub")
    directory = home / "org" / "model"
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    for spelling in ("org/model", directory, "~/org/model", "./org/model"):
        assert model_directory(spelling).samefile(directory)


def test_a_missing_model_is_reported_with_what_to_type(home):
    (home / "directory").mkdir()
    cases = [
        (
            "org/model",
            "there is no org/model, and no such model in .*hub; .* type: mlxdist pull org/model, for several hosts",
        ),
        ("~/org/model", "there is no ~/org/model; give the directory of a model, or org/model after"),
        ("directory", r"there is no directory/config\.json; give the directory of a model, or"),
        ("../org/model", r"there is no \.\./org/model; give the directory"),
        ("/data/a model", r"if another host has it, type: mlxdist pull '/data/a model' --hostfile FILE$"),
        (None, "must be the directory or the name of one, not None"),
    ]
    for model, words in cases:
        with pytest.raises(InvalidArgument, match=words):
            model_directory(model)
    (download(home / ".cache" / "huggingface" / "hub") / "config.json").unlink()
    with pytest.raises(
        InvalidArgument,
        match=r"there is no .*/config\.json; .* type: mlxdist pull org/model, for several hosts with --hostfile FILE$",
    ):
        model_directory("org/model")
