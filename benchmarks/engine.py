"""Compiles the C files of this directory against the installed library; engine.c times all_reduce without Python."""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
import tempfile
from pathlib import Path

import click
import numpy as np

import mlxdist
from mlxdist import _native
from mlxdist.runtime.group.group import engine_of
from mlxdist.runtime.native import check, ffi
from mlxdist.tools.bench.operations import Inputs, add, count_wrong
from mlxdist.tools.bench.timing import Work

HERE = Path(__file__).parent
NATIVE = HERE.parent / "native"
SECONDS = 120


def engine_work(size: int, world: mlxdist.Group) -> Work:
    """all_reduce of ``size`` bytes of float32, called from C.

    Raises:
        click.ClickException: there is no C compiler, or it failed.
    """
    with tempfile.TemporaryDirectory(prefix="mlxdist-engine-") as directory:
        call = ctypes.CDLL(str(compile_plugin(HERE / "engine.c", Path(directory)))).time_all_reduce
    data = Inputs("float32", size // 4, world.size())
    x, expected = data[world.rank()], add(data)
    out = np.full_like(expected, -1)
    group = ctypes.c_void_p(int(ffi.cast("uintptr_t", engine_of(world).native)))

    def block(calls: int) -> list[float]:
        times = (ctypes.c_double * calls)()
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in (x, out)]
        check(call(group, *pointers, ctypes.c_int64(data.elements), ctypes.c_int(calls), times))
        return list(times)

    return Work(lambda: None, elsewhere=block, wrong=lambda: count_wrong(out, expected))


def compile_program(source: str, directory: Path) -> Path:
    """Compiles a C file of this directory, and returns the program, which lies in ``directory``.

    Raises:
        click.ClickException: there is no C compiler, or it failed.
    """
    program = directory / Path(source).stem
    _compile([str(HERE / source), "-o", str(program)])
    return program


def compile_plugin(source: Path, directory: Path) -> Path:
    """The same to a plugin."""
    plugin = directory / f"{source.stem}.so"
    _compile(["-shared", "-fPIC", str(source), "-o", str(plugin)])
    return plugin


def _compile(arguments: list[str]) -> None:
    library = Path(_native.__file__).parent
    command = [*shlex.split(os.environ.get("CC", "cc")), "-std=c11", "-D_GNU_SOURCE", "-O3", "-Wall", "-Wextra"]
    command += ["-Werror", f"-I{NATIVE / 'include'}", f"-I{NATIVE / 'tests'}", *arguments]
    command += [f"-L{library}", "-lmlxdist", f"-Wl,-rpath,{library}"]
    try:
        finished = subprocess.run(command, timeout=SECONDS)
    except FileNotFoundError:
        raise click.ClickException(f"there is no C compiler {command[0]!r}: install one, or set CC") from None
    except subprocess.TimeoutExpired:
        raise click.ClickException(f"{command[0]} has not ended after {SECONDS} s") from None
    if finished.returncode:
        raise click.ClickException(f"{shlex.join(command)} ended with status {finished.returncode}")
