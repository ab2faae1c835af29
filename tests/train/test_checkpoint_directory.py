"""The directory of train.Checkpoints: one job saves into it, and what others have put there is no checkpoint."""

import os
import subprocess
import sys

import pytest
from test_checkpoint import load, save, there

from mlxdist.base import errors


def test_two_jobs_do_not_save_into_one_directory(tmp_path):
    """Also where neither has saved before; and when the first has ended, however, the second may."""
    program = "c = Checkpoints(sys.argv[1]); c.save(1, {'w': mx.zeros(1)}); c.wait(); print(1, flush=True); input()"
    command = [sys.executable, "-c", f"import sys, mlx.core as mx; from mlxdist.train import Checkpoints; {program}"]
    first = subprocess.Popen([*command, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    first.stdout.readline()
    (tmp_path / "step-00000001" / "manifest.json").unlink()
    with pytest.raises(errors.InvalidArgument, match=rf"another job saves .* \(run .*, process {first.pid} on .*\)"):
        save(tmp_path, 2)
    first.kill()
    first.communicate()
    save(tmp_path, 2)
    assert there(tmp_path) == [2]


def test_a_directory_that_is_made_again_is_locked_again(tmp_path):
    directory = tmp_path / "checkpoints"
    program = """
import shutil, sys, mlx.core as mx
from mlxdist.train import Checkpoints
checkpoints = Checkpoints(sys.argv[1])
for step in (1, 2):
    checkpoints.save(step, {"w": mx.zeros(1)})
    checkpoints.wait()
    if step == 1:
        shutil.rmtree(sys.argv[1])
print(2, flush=True)
input()
"""
    first = subprocess.Popen(
        [sys.executable, "-c", program, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert first.stdout.readline() == b"2\n"
    (directory / "step-00000002" / "manifest.json").unlink()
    with pytest.raises(errors.InvalidArgument, match="another job saves"):
        save(directory, 3)
    first.communicate(b"\n")


def test_a_named_pipe_is_no_manifest(tmp_path):
    """Reading it would not end."""
    save(tmp_path, 1)
    save(tmp_path, 2)
    manifest = tmp_path / "step-00000002" / "manifest.json"
    manifest.unlink()
    os.mkfifo(manifest)
    with pytest.warns(UserWarning, match="no file"):
        assert load(tmp_path)[0] == 1


FULL = """
import resource, signal, sys, mlx.core as mx
from mlxdist import ResourceError
from mlxdist.train import Checkpoints
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
checkpoints = Checkpoints(sys.argv[1])
checkpoints.load({"weights": mx.zeros(0)}, other_run=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
checkpoints.save(2, {"w": mx.zeros(100_000)})
try: checkpoints.save(3, {"w": mx.zeros(100_000)})
except ResourceError as error: print(error)
checkpoints.save(3, {"w": mx.zeros(10)})
checkpoints.wait()
print(checkpoints.latest())
"""


def test_a_full_disk_is_an_error_of_the_next_save(tmp_path):
    """And the checkpoints before it stay."""
    save(tmp_path, 1)
    (tmp_path / "full.py").write_text(FULL)
    said = subprocess.run([sys.executable, tmp_path / "full.py", tmp_path], capture_output=True, text=True, timeout=60)
    assert "rank-0-of-1-" in said.stdout and "could not be written" in said.stdout, said.stderr
    assert "step 2 is not saved: Checkpoints.save" in said.stderr
    assert said.stdout.endswith("\n3\n") and there(tmp_path) == [1, 3]
