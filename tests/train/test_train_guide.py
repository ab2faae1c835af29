"""docs/train.md: the file that it shows is complete and read as it is, and its programs run on ranks."""

import dataclasses
import re
import tomllib
from pathlib import Path

import pytest
import training_folder
from guides import program_of

from mlxdist.train.config import TrainConfig

DOCS = Path(__file__).parents[2] / "docs"
GUIDE = DOCS / "train.md"


def shown_file() -> str:
    blocks = re.findall(r"^```toml\n(.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 1
    return blocks[0]


@pytest.fixture
def models_and_data(tmp_path, monkeypatch) -> None:
    """What the programs take, in the current directory."""
    folder = training_folder.make(tmp_path / "made")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "qwen").symlink_to(folder / "qwen3")
    (tmp_path / "data").symlink_to(folder / "data")
    monkeypatch.chdir(tmp_path)


def test_the_file_shows_every_setting(tmp_path):
    file = tmp_path / "finetune.toml"
    file.write_text(shown_file())
    config = TrainConfig.read(file)
    table = tomllib.loads(file.read_text())
    for kind, settings in [(config, table), *((getattr(config, name), table[name])
                           for name in table if dataclasses.is_dataclass(getattr(config, name)))]:  # fmt: skip
        assert settings.keys() == {field.name for field in dataclasses.fields(kind)}


@pytest.mark.long
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_the_command_as_a_function(run_ranks, tmp_path, models_and_data, ranks):
    for output in run_ranks(program_of(GUIDE, tmp_path), ranks):
        assert re.search(r"step 10: loss \d\.\d{3}, validation \d\.\d{3}; see trained", output)
    assert (tmp_path / "trained" / "adapters.safetensors").exists()


def test_the_program_of_the_reference(run_ranks, tmp_path, models_and_data):
    run_ranks(program_of(DOCS / "reference" / "train.md", tmp_path), 1)
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.long
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_the_loop_runs(run_ranks, tmp_path, monkeypatch, ranks):
    monkeypatch.chdir(tmp_path)
    for output in run_ranks(program_of(GUIDE, tmp_path, 1), ranks):
        assert re.search(r"step 20: loss \d\.\d{3}", output)
