"""Compiles engine.c against the installed library and runs it: all_reduce without Python and MLX."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from mlxdist import _native

HERE = Path(__file__).parent
NATIVE = HERE.parent / "native"
SECONDS = 120


def run_engine(rounds: int) -> list[dict[str, Any]]:
    """One dictionary per size: bytes, wrong, and median, min and max in microseconds of all_reduce, memcpy and, with
    two cores, transfer.

    Raises:
        click.ClickException: there is no C compiler, or the program failed.
    """
    with tempfile.TemporaryDirectory(prefix="mlxdist-engine-") as folder:
        program = compile_program("engine.c", Path(folder))
        return [json.loads(line) for line in _call([str(program), str(rounds)]).splitlines()]


def compile_program(source: str, folder: Path) -> Path:
    """Compiles a C file of this folder against the installed library, and returns the program, which lies in ``folder``.

    Raises:
        click.ClickException: there is no C compiler, or it failed.
    """
    library = Path(_native.__file__).parent
    program = folder / Path(source).stem
    command = [f"-I{NATIVE / 'include'}", f"-I{NATIVE / 'tests'}", str(HERE / source)]
    _compile([*command, "-o", str(program), f"-L{library}", "-lmlxdist", f"-Wl,-rpath,{library}"])
    return program


def compile_plugin(source: Path, folder: Path) -> Path:
    """Compiles a C file to a plugin in ``folder``, and returns that.

    Raises:
        click.ClickException: there is no C compiler, or it failed.
    """
    plugin = folder / f"{source.stem}.so"
    _compile(["-shared", "-fPIC", str(source), "-o", str(plugin)])
    return plugin


def _compile(arguments: list[str]) -> None:
    command = [*shlex.split(os.environ.get("CC", "cc")), "-std=c11", "-D_GNU_SOURCE", "-O3", "-Wall", "-Wextra"]
    _call([*command, "-Werror", *arguments])


def _call(command: list[str]) -> str:
    try:
        finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=SECONDS)
    except FileNotFoundError:
        raise click.ClickException(f"there is no C compiler {command[0]!r}: install one, or set CC") from None
    except subprocess.TimeoutExpired:
        raise click.ClickException(f"{command[0]} has not ended after {SECONDS} s") from None
    if finished.returncode:
        raise click.ClickException(f"{shlex.join(command)} ended with status {finished.returncode}")
    return finished.stdout


if __name__ == "__main__":
    for size in run_engine(int(sys.argv[1]) if sys.argv[1:] else 15):
        print(json.dumps(size))
