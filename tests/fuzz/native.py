"""The fuzz targets in C, native/tests/fuzz_*.c: how they are built."""

from pathlib import Path

from native_build import NATIVE, build_program, compile_source, directory_sources, layer_includes, layer_sources, link

__all__ = ["FLAGS", "TARGETS", "build_for_libfuzzer", "build_for_files"]

TARGETS = ["connection", "messages", "settings", "tcp"]
FLAGS = ("-std=gnu11", '-DMLXDIST_VERSION="0.0.0"', *layer_includes())
SANITIZED = (*FLAGS, "-g", "-O1", "-fno-sanitize-recover=all")


def _sources(target: str) -> list[Path]:
    return [NATIVE / "tests" / name for name in (f"fuzz_{target}.c", "soft_side.c")]


def build_for_libfuzzer(directory: Path, target: str) -> Path:
    """Needs clang. The reductions, which read nothing from outside, are left to the compiler that is used elsewhere:
    clang 14 does not know all of what they use."""
    flags = (*SANITIZED, "-fsanitize=fuzzer-no-link,address,undefined")
    objects = [
        compile_source(source, ("clang",), flags)
        for source in [*_sources(target), *layer_sources()]
        if source.parent.name != "reduce"
    ]
    objects += [compile_source(source, ("cc",), (*FLAGS, "-O2")) for source in directory_sources("reduce")]
    return link(directory / target, ("clang",), ["-fsanitize=fuzzer,address,undefined"], objects)


def build_for_files(directory: Path, target: str, flags: list[str]) -> Path:
    """A program that runs the target once on each file."""
    sources = [*_sources(target), NATIVE / "tests" / "fuzz_main.c", *layer_sources()]
    return build_program(directory / target, sources, [*FLAGS, *flags])
