"""Files that are replaced as a whole: what is there before, and what it leads to."""

import stat

import pytest

from mlxdist.base.atomic_file import atomic_write, back_up, replace_file


@pytest.fixture
def link(tmp_path):
    """To a file with a mode of its own."""
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to(target)
    return link


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_file_that_the_user_has_named(tmp_path, link):
    atomic_write(link, "new")
    target = tmp_path / "target"
    assert link.is_symlink() and target.read_text() == "new" and mode_of(target) == 0o640
    atomic_write(tmp_path / "other", "x")
    assert mode_of(tmp_path / "other") == 0o644


def test_a_file_of_our_own_never_writes_through_a_link(tmp_path, link):
    replace_file(link, "new", 0o600)
    assert not link.is_symlink() and link.read_text() == "new" and mode_of(link) == 0o600
    assert (tmp_path / "target").read_text() == "old"


def test_nothing_is_left_of_what_cannot_be_written(tmp_path):
    (tmp_path / "directory").mkdir()
    with pytest.raises(OSError):
        replace_file(tmp_path / "directory", "x", 0o600)
    assert [path.name for path in tmp_path.iterdir()] == ["directory"]


def test_the_former_file_is_kept(tmp_path):
    path = tmp_path / "hosts.json"
    assert back_up(path, "new") is None
    path.write_text("old")
    assert back_up(path, "old") is None and path.exists()
    assert back_up(path, "new") == f"{path}.old" and not path.exists()
