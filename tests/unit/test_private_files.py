"""Files at places where others may write: what another user has put there is neither followed, written nor trusted."""

import contextlib
import os
import stat
import sys
from pathlib import Path

import pytest
from launching import launch, nothing_left, python  # noqa: F401  (a fixture of every test)

from mlxdist.base.errors import ResourceError
from mlxdist.base.private_files import is_private_directory, make_private_directory, open_private
from mlxdist.launch import jit_cache
from mlxdist.launch.jobs import list_jobs
from mlxdist.launch.runtime_directory import runtime_directory

STRANGER = 54321
APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


def of_another(path):
    os.chown(path, STRANGER, STRANGER)
    return path


def test_a_new_file_is_for_this_user_only(tmp_path):
    before = os.umask(0)
    try:
        descriptor = open_private(tmp_path / "new", APPEND)
    finally:
        os.umask(before)
    assert os.get_blocking(descriptor) and not os.get_inheritable(descriptor)
    os.write(descriptor, b"text")
    os.close(descriptor)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o600
    os.close(open_private(tmp_path / "new", APPEND))
    assert (tmp_path / "new").read_text() == "text"
    os.close(open_private(os.devnull, APPEND))


def test_what_is_not_opened(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / "link").symlink_to(precious)
    (tmp_path / "dangling").symlink_to(tmp_path / "made")
    os.link(precious, tmp_path / "other name")
    for name, words in {"link": "it is a link", "dangling": "it is a link", "other name": "another name"}.items():
        with pytest.raises(OSError, match=words):
            open_private(tmp_path / name, APPEND | os.O_TRUNC)
    assert precious.read_text() == "mine" and not (tmp_path / "made").exists()
    os.mkfifo(tmp_path / "pipe")  # without a reader, opening it would wait
    with pytest.raises(OSError):
        open_private(tmp_path / "pipe", APPEND)


@as_root
def test_files_and_directories_of_another_user(tmp_path):
    (tmp_path / "file").touch()
    of_another(tmp_path / "file")
    with pytest.raises(OSError, match="belongs to another user"):
        open_private(tmp_path / "file", APPEND)
    (tmp_path / "directory").mkdir()
    of_another(tmp_path / "directory")
    assert not is_private_directory(tmp_path / "directory") and not make_private_directory(tmp_path / "directory")
    assert stat.S_IMODE((tmp_path / "directory").stat().st_mode) == 0o755, "left as it is"


# Each place.


@pytest.mark.parametrize("name", ["rank-0.out", "rank-1.err"])
def test_a_log_that_is_a_link(tmp_path, name):
    precious, logs = tmp_path / "precious", tmp_path / "logs"
    precious.write_text("mine")
    logs.mkdir()
    (logs / name).symlink_to(precious)
    job = python(2, "import sys; print('out'); print('err', file=sys.stderr)", options=["--log-dir", str(logs)])
    assert precious.read_text() == "mine"
    assert job.returncode == 1 and f"{logs / name} cannot be written: it is a link".encode() in job.stderr
    assert b"Traceback" not in job.stderr and b"out" not in job.stdout, "before any rank has started"


def test_logs_are_for_this_user_only(tmp_path):
    assert python(1, "print('out')", options=["--log-dir", str(tmp_path / "logs")]).returncode == 0
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "logs").iterdir()} == {0o600}


def test_a_file_for_debug_output_that_is_a_link(tmp_path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "0.log").symlink_to(tmp_path / "precious")
    program = "import mlxdist\nmlxdist.init()"
    variables = ["--env", f"MLXDIST_DEBUG_FILE={tmp_path}/%r.log", "--env", "MLXDIST_DEBUG=trace"]
    job = launch(2, sys.executable, "-c", program, options=variables)
    assert job.returncode and f"{tmp_path}/0.log cannot be written: it is a link".encode() in job.stderr
    assert (tmp_path / "precious").read_text() == "mine"


@pytest.mark.parametrize("level", ["mlxdist", "mlxdist/jit"])
@pytest.mark.parametrize("whose", ["link", pytest.param("another user's", marks=as_root)])
def test_kernels_of_another_user_are_not_loaded(tmp_path, level, whose):
    """Ranks load the libraries that lie there."""
    place = tmp_path / "cache" / level
    place.parent.mkdir(parents=True)
    if whose == "link":
        (tmp_path / "theirs").mkdir()
        place.symlink_to(tmp_path / "theirs")
    else:
        place.mkdir(mode=0o777)
        of_another(place)
    (tmp_path / "job").mkdir()
    with contextlib.closing(jit_cache.JitCache(tmp_path / "job", has_gpus=False)) as cache:
        assert cache.directory == tmp_path / "job" / "jit"
        assert list(place.iterdir()) == []


@as_root
def test_another_user_cannot_block_every_launch(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    temporary = Path(os.environ["TMPDIR"])
    first = temporary / f"mlxdist-{os.getuid()}"
    first.mkdir()
    of_another(first)
    decoy = temporary / f"{first.name}-0"
    decoy.symlink_to(tmp_path)
    try:
        job = python(1, "import mlxdist.launch.jobs as jobs; print([one.name for one in jobs.list_jobs()])")
        assert job.returncode == 0 and job.stderr == b"", job.stderr
        found = runtime_directory()
        assert found.name.startswith(f"{first.name}-") and found != decoy and is_private_directory(found)
        assert runtime_directory() == found, "where later commands find what this one has left"
        assert list(first.iterdir()) == [] and list_jobs() == []
    finally:
        for path in temporary.glob(f"{first.name}*"):
            path.unlink() if path.is_symlink() else path.rmdir()


def test_a_path_where_no_directory_can_be_created(monkeypatch):
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setenv("TMPDIR", "/proc")
    with pytest.raises(ResourceError, match="cannot be prepared in /proc/mlxdist-"):
        runtime_directory()
