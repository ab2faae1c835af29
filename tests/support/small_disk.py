"""A file system that is small, for what happens where one is full: a tmpfs in a mount namespace of its own."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, options: str) -> Iterator[list[str]]:
    """Mounts it on ``folder`` with ``options`` of tmpfs. Yields the words before a command that sees it there."""
    if sys.platform != "linux" or not shutil.which("nsenter"):
        pytest.skip("there is no nsenter, of Linux: apt-get install util-linux")
    script = f"mount -t tmpfs -o {options} small {folder} && echo mounted && exec sleep infinity"
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as holder:
        try:
            if holder.stdout.readline() != "mounted\n":
                pytest.skip(f"this machine allows no file system in a namespace: {holder.stderr.readline().strip()}")
            yield [
                "nsenter",
                "--user",
                "--mount",
                "--preserve-credentials",
                f"--target={holder.pid}",
                f"--wd={os.getcwd()}",
            ]
        finally:
            holder.kill()
