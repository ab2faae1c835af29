#!/usr/bin/env python3
"""Fuzzes everything in mlxdist that reads bytes from outside: `make fuzz SECONDS=60`, or fuzz.py --help.

Targets are native/tests/fuzz_*.c (libFuzzer: needs clang and its run-time library) and tests/fuzz/of_*.py (atheris).
Each begins with its corpus in tests/fuzz/corpus; what it finds on top of that is kept in build/fuzz/corpus.
"""

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "tests" / "fuzz")]

import of_models
import of_rendezvous
import of_settings

import native

BUILD = ROOT / "build" / "fuzz"
CORPUS = ROOT / "tests" / "fuzz" / "corpus"
PYTHON = [*of_rendezvous.TARGETS, *of_settings.TARGETS, *of_models.TARGETS]
NATIVE = [f"native_{target}" for target in native.TARGETS]
# An input that takes longer is a finding, too.
INPUT_SECONDS = 20
# libFuzzer ends soon after its time, unless it hangs.
SPARE_SECONDS = 60


def command_of(target: str) -> list[str]:
    """How the target is run, without arguments for libFuzzer."""
    if target in PYTHON:
        return [sys.executable, str(ROOT / "tests" / "fuzz" / "run.py"), target]
    return [str(native.build_for_libfuzzer(BUILD, target.removeprefix("native_")))]


def missing(targets: list[str]) -> str | None:
    """What has to be installed first, in words."""
    if any(target in NATIVE for target in targets) and shutil.which("clang") is None:
        return "there is no clang: apt-get install clang libclang-rt-dev"
    if any(target in PYTHON for target in targets) and importlib.util.find_spec("atheris") is None:
        return "there is no atheris: `make fuzz` installs it, as does pip install atheris"
    return None


def fuzz(target: str, command: list[str], seconds: int) -> tuple[str, str]:
    """Runs one target. Returns what it did in a line, and what it found, empty if nothing."""
    found = BUILD / "corpus" / target
    found.mkdir(parents=True, exist_ok=True)
    arguments = [f"-max_total_time={seconds}", f"-timeout={INPUT_SECONDS}", f"-artifact_prefix={BUILD}/{target}-"]
    arguments += ["-print_final_stats=1", "-max_len=4096", str(found), str(CORPUS / target)]
    # libFuzzer ends its process without what Python does at exit: temporary files are for us to delete.
    with tempfile.TemporaryDirectory(prefix="mlxdist-fuzz-") as temporary:
        try:
            run = subprocess.run(
                [*command, *arguments],
                env={**os.environ, "TMPDIR": temporary},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=seconds + SPARE_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return f"{target}: hangs", f"{target} has not ended {SPARE_SECONDS} s after its time"
    (BUILD / f"{target}.log").write_text(run.stdout)
    lines = run.stdout.splitlines()
    runs = next((line.split()[-1] for line in lines if line.startswith("stat::number_of_executed_units")), "?")
    coverage = next((line.split("cov: ")[1].split()[0] for line in reversed(lines) if "cov: " in line), "?")
    if run.returncode == 0:
        return f"{target}: {runs} inputs, {coverage} edges", ""
    return f"{target}: found something", "\n".join([f"--- {target}, the end of {BUILD / target}.log", *lines[-40:]])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"default: all, {', '.join(NATIVE + PYTHON)}")
    parser.add_argument("--seconds", type=int, default=60, help="for each target (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="targets at a time (default: %(default)s)")
    parser.add_argument("--input", type=Path, help="runs this one input, for example what a target has found")
    options = parser.parse_args()
    targets = options.targets or NATIVE + PYTHON
    if unknown := set(targets) - {*NATIVE, *PYTHON}:
        parser.error(f"there is no target {unknown.pop()}")
    if reason := missing(targets):
        print(f"fuzz: {reason}", file=sys.stderr)
        return 2
    BUILD.mkdir(parents=True, exist_ok=True)
    commands = {target: command_of(target) for target in targets}
    if options.input:
        return max(subprocess.run([*command, str(options.input)]).returncode for command in commands.values())
    with ThreadPoolExecutor(options.jobs) as pool:
        outcomes = list(pool.map(lambda target: fuzz(target, commands[target], options.seconds), targets))
    print(*(line for line, _ in outcomes), sep="\n")
    findings = [finding for _, finding in outcomes if finding]
    print(*findings, sep="\n")
    if findings:
        print(f"What made it fail is in {BUILD}; see it again with fuzz.py TARGET --input FILE")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
