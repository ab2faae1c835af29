"""Whether a disk has room, by what the system says of it."""

import shutil
import sys
from pathlib import Path

import pytest

from mlxdist.base.disk_space import require_room, room_of
from mlxdist.base.errors import ResourceError


def test_what_fits_and_what_does_not(tmp_path):
    total = shutil.disk_usage(tmp_path).total
    for directory in (tmp_path, tmp_path / "not" / "there"):
        require_room(directory, 0, "a model")
        with pytest.raises(ResourceError, match=rf"^a model needs .* in {directory}, whose disk has .* left"):
            require_room(directory, total + 1, "a model")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is a file system of Linux that says no sizes")
def test_a_file_system_that_does_not_say():
    """Zeros for all of it are no full disk."""
    require_room(Path("/proc"), 1 << 40, "a model")
    assert room_of(Path("/proc")).lack("in /proc", 1 << 40, 1000) is None
