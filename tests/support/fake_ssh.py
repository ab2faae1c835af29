"""An ssh for tests of what other hosts may answer: its other side is a program on this machine."""

import sys
from pathlib import Path

from mlxdist.cluster.ssh.ssh import SshConfig

__all__ = ["fake_ssh", "through_a_shell"]


def fake_ssh(directory: Path, program: str) -> SshConfig:
    """An ssh whose other side is ``program``: Python that finds what a shell would run in ``command``."""
    path = directory / "ssh"
    path.write_text(f"#!{sys.executable}\nimport sys, subprocess\ncommand = sys.argv[-1]\n{program}\n")
    path.chmod(0o700)
    return SshConfig((str(path),))


def through_a_shell(directory: Path, noise: str = "") -> SshConfig:
    return fake_ssh(
        directory, f"print({noise!r}, flush=True)\nsys.exit(subprocess.run(['sh', '-c', command]).returncode)"
    )
