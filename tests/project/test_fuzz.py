"""Bytes from outside: every target of tests/fuzz on its corpus, and for a while on whatever the fuzzers make of it."""

import subprocess
import sys
from pathlib import Path

import pytest
from native_build import SANITIZE_MEMORY, run_program

FUZZ = Path(__file__).parents[1] / "fuzz"
CORPUS = FUZZ / "corpus"
SCRIPT = Path(__file__).parents[2] / "scripts" / "fuzz.py"
sys.path.insert(0, str(FUZZ))
import of_models
import of_rendezvous
import of_settings

import native

PYTHON = of_models.TARGETS | of_rendezvous.TARGETS | of_settings.TARGETS


def corpus(target):
    return sorted(file for file in (CORPUS / target).iterdir())


def test_every_target_has_a_corpus():
    assert {directory.name for directory in CORPUS.iterdir()} == {
        *PYTHON,
        *(f"native_{name}" for name in native.TARGETS),
    }


@pytest.mark.parametrize("target", PYTHON)
def test_corpus_in_python(target):
    for file in corpus(target):
        PYTHON[target](file.read_bytes())


@pytest.mark.sanitize
@pytest.mark.long
@pytest.mark.parametrize("target", native.TARGETS)
def test_corpus_in_c(tmp_path, target):
    files = corpus(f"native_{target}")
    program = native.build_for_files(tmp_path, target, SANITIZE_MEMORY)
    assert f"{len(files)} inputs" in run_program(program, *map(str, files))


@pytest.mark.long
def test_fuzzing():
    """Eight seconds for each target; four at a time share the cores. `make fuzz` takes longer."""
    command = [sys.executable, str(SCRIPT), "--seconds", "8", "--jobs", "4"]
    script = subprocess.run(command, capture_output=True, text=True)
    if script.returncode == 2:
        pytest.skip(script.stderr.strip())
    assert script.returncode == 0, script.stdout + script.stderr
