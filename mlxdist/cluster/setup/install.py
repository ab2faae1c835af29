"""`mlxdist config --install`: makes an environment with the launcher's Python, mlxdist and MLX on every host.

A script goes to each host over ssh; packages come from PyPI, or with the script. It makes the environment in a new
directory next to DIR, imports mlxdist there, and only then replaces DIR, a symbolic link, by one to it. Where something
fails, DIR stays as it was. DIR.previous leads to the environment before, which may be the one that runs this.
"""

import importlib.metadata
import io
import platform
import re
import shlex
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from mlxdist.base.errors import InvalidArgument
from mlxdist.version import __version__

from ..hostfile.options import HostSelection
from ..ssh.ssh import LOST, CommandResult, run_everywhere

__all__ = ["DIRECTORY", "Installed", "install", "read_result"]

DIRECTORY = "~/.mlxdist/venv"
_SECONDS = 1800.0

# sh -c _SCRIPT sh DIR PYTHON_VERSION yes|no PIP_ARGUMENTS...; yes: a tar archive of wheels is on standard input. The
# PATH that ssh sets seldom leads to where uv and Homebrew install.
_SCRIPT = r"""
directory=$1 version=$2 wheels=$3
shift 3
PATH=$PATH:$HOME/.local/bin:$HOME/.cargo/bin:/opt/homebrew/bin:/usr/local/bin
export PATH
fail() { echo "$1" >&2; exit 1; }
find_python() {
  for python in "python$version" python3 "/Library/Frameworks/Python.framework/Versions/$version/bin/python3"; do
    "$python" -I -c 'import sys, ensurepip, venv; sys.exit("%d.%d" % sys.version_info[:2] != sys.argv[1])' "$version" \
      2>/dev/null && return
  done
  fail "there is neither uv nor Python $version with venv; install uv (https://docs.astral.sh/uv) or it"
}
case $directory in "~/"*) directory=$HOME/${directory#??} ;; esac
former=$(readlink "$directory")
case $former in "$directory".??????) ;; *)
  if [ -e "$directory" ] || [ -L "$directory" ]; then
    fail "$directory is there, and mlxdist has not made it; choose another one with --venv"
  fi
esac
mkdir -p "$(dirname "$directory")" && new=$(mktemp -d "$directory.XXXXXX") || exit 1
trap 'rm -rf "$new"' EXIT
trap 'exit 1' HUP INT TERM
if command -v uv >/dev/null; then
  uv venv --quiet --allow-existing --python "$version" "$new" || exit 1
  add() { uv pip install --quiet --python "$new/bin/python" "$@"; }
else
  find_python
  "$python" -I -m venv "$new" || exit 1
  add() { "$new/bin/python" -I -m pip --disable-pip-version-check install --quiet "$@"; }
fi
mkdir "$new/wheels" || exit 1
if [ "$wheels" = yes ]; then tar -xf - -C "$new/wheels" || exit 1; fi
(cd "$new/wheels" && add "$@") || exit 1
rm -r "$new/wheels"
found=$("$new/bin/python" -I -c 'import platform, mlx.core, mlxdist.runtime.native, mlxdist.version as ours
print(platform.python_version(), ours.__version__, mlx.core.__version__)') || exit 1
"$new/bin/python" -I -c 'import os, sys
new, directory = sys.argv[1:]
os.symlink(new, new + ".link")
os.replace(new + ".link", directory)' "$new" "$directory" || exit 1
trap - EXIT
if [ -n "$former" ]; then
  older=$(readlink "$directory.previous")
  ln -sfn "$former" "$directory.previous"
  if [ "$older" != "$former" ]; then
    case $older in "$directory".??????) rm -rf "$older" ;; esac
  fi
fi
printf '\n@mlxdist:%s %s\n' "$found" "$directory/bin/python"
"""
_RESULT = re.compile(r"^@mlxdist:(\S+) (\S+) (\S+) (/.*)$", re.MULTILINE)
_ADVICE = (
    ("No space left on device", "free some of its disk, or choose another one with --venv"),
    ("Failed to establish a new connection", "that host does not reach PyPI; give a directory of wheels with --from"),
    ("error sending request", "that host does not reach PyPI; give a directory of wheels with --from"),
    ("No matching distribution found for mlxdist", "this version is not on PyPI for that host; give --from WHEEL"),
    (
        "is not a supported wheel",
        "that wheel is for another system or Python; give --from a directory with one for each",
    ),
)


@dataclass(frozen=True)
class Installed:
    """The environment on a host. ``error``: why there is none, and what to do. ``path``: its Python's path."""

    host: str
    python: str = ""
    mlxdist: str = ""
    mlx: str = ""
    path: str = ""
    error: str = ""


def install(selection: HostSelection, source: str, directory: str, others: Sequence[str]) -> str:
    """Installs on all hosts at once and prints what each has. Returns the path of their Python; empty if any failed.

    Args:
        source: a wheel of this version, the rest from PyPI; a directory of all wheels; empty for PyPI.
        directory: where the environment will be on each host.
        others: requirements of packages to install, too.

    Raises:
        InvalidArgument: ``source`` has no wheel of this version, ``directory`` is no absolute path, or one of
            ``others`` is no requirement.
    """
    directory = directory.rstrip("/")
    if not directory.startswith(("/", "~/")):
        raise InvalidArgument(f"--venv {directory or '/'}: write an absolute path, or one that begins with ~/")
    for requirement in others:
        if requirement.startswith("-"):
            raise InvalidArgument(f"--with {requirement}: write a package such as mlx-lm")
    wheels = _wheels(source)
    version = ".".join(platform.python_version_tuple()[:2])
    packages = [*_arguments(source, wheels), *others]
    words = ["sh", "-c", _SCRIPT, "sh", directory, version, "yes" if wheels else "no", *packages]
    names = [host.name for host in selection.hosts()]
    results = run_everywhere(names, words, selection.ssh_config, input=_archive(wheels), seconds=_SECONDS)
    found = [read_result(result) for result in results]
    _print_table(found)
    if any(host.error for host in found):
        return ""
    if len({host.path for host in found}) > 1:
        click.echo(
            "--python names one path for all hosts, and these differ; use one, such as --venv /opt/mlxdist", err=True
        )
        return ""
    return found[0].path


def read_result(result: CommandResult) -> Installed:
    """The result of the script on a host."""
    if found := _RESULT.search(result.output):
        return Installed(result.name, *found.groups())
    advice = next((advice for words, advice in _ADVICE if words in result.errors), "")
    if not advice and result.status == LOST:
        advice = f"try: ssh -o BatchMode=yes {shlex.quote(result.name)} true"
    return Installed(result.name, error="; ".join(filter(None, (result.failure, advice))))


def _wheels(source: str) -> list[Path]:
    if not source:
        return []
    path = Path(source)
    wheels = sorted(path.glob("*.whl")) if path.is_dir() else [path]
    ours = [wheel for wheel in wheels if wheel.name.startswith("mlxdist-") and wheel.is_file()]
    if not ours:
        raise InvalidArgument(f"--from {source}: there is no wheel mlxdist-{__version__}-*.whl")
    for wheel in ours:
        if not wheel.name.startswith(f"mlxdist-{__version__}-"):
            raise InvalidArgument(f"{wheel}: this is mlxdist {__version__}, and hosts must have the same version")
    return wheels


def _arguments(source: str, wheels: Sequence[Path]) -> list[str]:
    """Arguments of pip that install the same versions as here."""
    mlx = importlib.metadata.version("mlx")
    return [
        *(["--no-index"] if Path(source).is_dir() and wheels else []),
        *(["--find-links", "."] if wheels else []),
        f"mlxdist=={__version__}",
        f"mlx[cpu]=={mlx}; sys_platform == 'linux'",
        f"mlx=={mlx}; sys_platform == 'darwin'",
    ]


def _archive(wheels: Sequence[Path]) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w", dereference=True) as archive:
        for wheel in wheels:
            archive.add(wheel, wheel.name)
    return data.getvalue()


def _print_table(found: Sequence[Installed]) -> None:
    rows = [("host", "python", "mlxdist", "mlx", "result")]
    rows += [(h.host, h.python or "-", h.mlxdist or "-", h.mlx or "-", h.error or f"ok: {h.path}") for h in found]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row in rows:
        click.echo("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[4]]))
