"""Files for results: tried before the work, and not the end of it."""

import os
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from mlxdist.base.output_file import OUTPUT_FILE, is_written
from mlxdist.cli import commands


def convert(path):
    return OUTPUT_FILE.convert(str(path), None, None)


@pytest.fixture
def closed(tmp_path):
    """A directory that nothing can be written into, not even by root."""
    if os.getuid() == 0 and sys.platform != "linux":
        pytest.skip("root may write everywhere")
    if os.getuid() == 0:
        yield Path("/sys")
        return
    tmp_path.chmod(0o500)
    yield tmp_path
    tmp_path.chmod(0o700)


def test_what_is_there_stays_and_nothing_is_made(tmp_path):
    old, link = tmp_path / "old", tmp_path / "link"
    old.write_text("old")
    link.symlink_to("new")
    assert [convert(path) for path in (old, link, tmp_path / "new")] == [old, link, tmp_path / "new"]
    assert old.read_text() == "old" and sorted(os.listdir(tmp_path)) == ["link", "old"]


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert convert(tmp_path / "pipe") == tmp_path / "pipe"


def test_what_cannot_be_written_is_rejected(tmp_path, closed):
    for path, words in ((tmp_path / "a" / "b", "there is no directory"), (closed / "a.json", "cannot be written: ")):
        with pytest.raises(click.BadParameter, match=words):
            convert(path)
    with pytest.raises(click.BadParameter, match="is a directory"):
        convert(tmp_path)


@pytest.mark.parametrize(
    "command, option, status",
    [
        ("bench suite", "--output", 2),
        ("bench suite", "--html", 2),
        ("calibrate", "--output", 1),
        ("dump", "--trace", 2),
    ],
)
def test_commands_reject_it_before_their_work(closed, command, option, status):
    refused = CliRunner().invoke(commands, [*command.split(), option, str(closed / "a.json")])
    assert refused.exit_code == status and "name another file" in " ".join(refused.output.split()), refused.output


def test_a_full_disk_is_reported(tmp_path, capsys):
    def write(path):
        raise OSError(28, "No space left on device")

    assert not is_written(tmp_path / "a", write)
    assert capsys.readouterr().err == f"Error: {tmp_path / 'a'} is not written: No space left on device\n"
    assert is_written(tmp_path / "a", "a") and (tmp_path / "a").read_text() == "a"
