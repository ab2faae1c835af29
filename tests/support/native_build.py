"""Compiles C files of native/ into a program and runs it, for the tests of the parts below Python."""

import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

__all__ = [
    "LAYERS",
    "NATIVE",
    "SANITIZE_MEMORY",
    "SANITIZE_THREADS",
    "build_program",
    "c_compiler",
    "compile_source",
    "directory_sources",
    "layer_includes",
    "layer_sources",
    "link",
    "run_program",
    "with_simulated_clock",
]

NATIVE = Path(__file__).parents[2] / "native"
# The directories of each layer, from the bottom up, as CMakeLists.txt has them. Each sees those above it in this list.
LAYERS = {
    "verbs": ("verbs",),
    "providers": ("providers", "providers/soft", "providers/soft/emulation"),
    "transport": ("transport",),
    "engine": ("engine",),
    "reduce": ("reduce",),
    "collectives": ("collectives",),
}
SANITIZE_MEMORY = ["-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
SANITIZE_THREADS = ["-g", "-O1", "-fsanitize=thread"]
_BUILD_SECONDS = 120


def layer_sources(top: str = "collectives", segment: str | None = None) -> list[Path]:
    """The C files of the layer ``top`` and of those below it, as CMakeLists.txt chooses them for this system.

    ``segment``: "memfd" or "posix", to take that one of a pair of files instead of this system's.
    """
    layers = list(LAYERS)[: list(LAYERS).index(top) + 1]
    return [file for layer in layers for directory in LAYERS[layer] for file in directory_sources(directory, segment)]


def with_simulated_clock(sources: Iterable[Path]) -> list[Path]:
    """``sources`` with the clock of native/tests/simulated_clock.c in place of those of transport and provider."""
    clocks = (NATIVE / "transport/steady_clock.c", NATIVE / "providers/soft/clock.c")
    return [NATIVE / "tests" / "simulated_clock.c", *(source for source in sources if source not in clocks)]


def directory_sources(directory: str, segment: str | None = None) -> list[Path]:
    unwanted = ("_posix",) if (segment or _own_segment()) == "memfd" else ("_memfd", "_abstract")
    return [file for file in sorted((NATIVE / directory).glob("*.c")) if not file.stem.endswith(unwanted)]


def layer_includes(top: str = "collectives") -> list[str]:
    """The compiler's flags for the header of the engine, and those of the layer ``top`` and of those below it."""
    layers = list(LAYERS)[: list(LAYERS).index(top) + 1]
    return [f"-I{NATIVE / directory}" for directory in ("include", *layers)]


def build_program(
    output: Path,
    sources: Iterable[Path],
    flags: Iterable[str] = (),
    compiler: str | None = None,
    libraries: Iterable[object] = (),
) -> Path:
    """Compiles ``sources``, warnings being errors, links them and ``libraries`` into ``output`` and returns that.

    ``compiler``: one for another processor, instead of this machine's. A file is compiled once for a
    compiler and a set of flags. Skips the test where the compiler's sanitizers that ``flags`` ask for do not work.
    """
    flags = tuple(flags)
    for flag in flags:
        if flag.startswith("-fsanitize=") and (reason := _why_unusable(flag)):
            pytest.skip(f"{flag} does not work here: {reason}")
    command = (compiler,) if compiler else c_compiler()
    _object_directory()  # before the threads, each of which would make one
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        objects = list(threads.map(lambda source: compile_source(source, command, flags), sources))
    return link(output, command, flags, [*objects, *libraries])


def link(output: Path, compiler: tuple[str, ...], flags: Iterable[str], objects: Iterable[object]) -> Path:
    libraries = ["-lpthread", "-ldl"] if sys.platform == "linux" else []
    _call([*compiler, *flags, *map(str, objects), "-o", str(output), *libraries])
    return output


def run_program(program: Path, *arguments: str, timeout: float = 600, environment: dict[str, str] | None = None) -> str:
    """Runs ``program``, at most ``timeout`` seconds, and returns what it printed; it must end with status 0."""
    process = subprocess.run(
        [str(program), *arguments],
        env=os.environ | (environment or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=timeout,
    )
    if process.returncode:
        pytest.fail(f"{program.name} ended with {process.returncode}; it printed\n{process.stdout}")
    return process.stdout


def _own_segment() -> str:
    return "memfd" if sys.platform == "linux" else "posix"


@functools.cache
def compile_source(source: Path, compiler: tuple[str, ...], flags: tuple[str, ...]) -> Path:
    """The object file of ``source``, kept for other processes and later sessions. Warnings are errors."""
    command = [*compiler, "-std=c11", "-Wall", "-Wextra", "-Werror", *flags]
    executable = os.stat(shutil.which(compiler[0]) or compiler[0])
    key = hashlib.sha256(f"{command} {executable.st_mtime_ns} {executable.st_size}".encode() + source.read_bytes())
    kept = _object_directory() / f"{source.stem}-{key.hexdigest()[:32]}.o"
    if not kept.exists():
        with tempfile.TemporaryDirectory(dir=kept.parent) as directory:
            _call([*command, "-c", str(source), "-o", str(made := Path(directory, "made.o"))])
            made.replace(kept)
    return kept


@functools.cache
def _object_directory() -> Path:
    """The directory for objects of the headers as they are now. Removes those of other headers."""
    headers = hashlib.sha256()
    for header in sorted(NATIVE.rglob("*.h")):
        headers.update(f"{header} ".encode() + header.read_bytes())
    directory = NATIVE.parent / "build" / "test-objects" / headers.hexdigest()[:32]
    directory.mkdir(parents=True, exist_ok=True)
    for other in set(directory.parent.iterdir()) - {directory}:
        shutil.rmtree(other, ignore_errors=True)
    return directory


def _call(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_SECONDS)
    assert result.returncode == 0, f"{shlex.join(command)}\n{result.stderr}"


@functools.cache
def c_compiler() -> tuple[str, ...]:
    command = tuple(shlex.split(os.environ.get("CC", "cc")))
    if not shutil.which(command[0]):
        pytest.fail(f"there is no C compiler {command[0]!r}: install one (apt-get install gcc), or set CC")
    return command


@functools.cache
def _why_unusable(flag: str) -> str | None:
    """What goes wrong with an empty program compiled with ``flag``: sanitizers have libraries that may be missing, and
    the thread sanitizer does not start on kernels that spread addresses more than it expects."""
    with tempfile.TemporaryDirectory() as directory:
        source, program = Path(directory, "empty.c"), Path(directory, "empty")
        source.write_text("int main(void) { return 0; }\n")
        for command in ([*c_compiler(), flag, str(source), "-o", str(program)], [str(program)]):
            result = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_SECONDS)
            if result.returncode:
                return (result.stderr.strip() or f"exit status {result.returncode}").splitlines()[-1]
    return None
