"""docs/train.md: the file that it shows is complete and read as it is, and its program runs on ranks."""

import dataclasses
import re
import tomllib
from pathlib import Path

import pytest

from mlxdist.train.config import TrainConfig

GUIDE = (Path(__file__).parents[2] / "docs" / "train.md").read_text()


def shown(language: str) -> str:
    blocks = re.findall(rf"^```{language}\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 1
    return blocks[0]


def test_the_file_shows_every_setting(tmp_path):
    file = tmp_path / "finetune.toml"
    file.write_text(shown("toml"))
    config = TrainConfig.read(file)
    table = tomllib.loads(file.read_text())
    for kind, settings in [(config, table), *((getattr(config, name), table[name])
                           for name in table if dataclasses.is_dataclass(getattr(config, name)))]:  # fmt: skip
        assert settings.keys() == {field.name for field in dataclasses.fields(kind)}


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_the_program_runs(run_ranks, tmp_path, monkeypatch, ranks):
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "program.py"
    program.write_text(shown("python"))
    for output in run_ranks(program, ranks):
        assert re.search(r"step 20: loss \d\.\d{3}", output)
