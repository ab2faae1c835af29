"""`mlxdist.kv`: a prompt that one rank has computed is gone on with by another, bitwise as by one process."""

from pathlib import Path

import pytest
import tiny_models
from guides import program_of

pytest.importorskip("mlx_lm")

LONG = pytest.mark.long
# Keys and values; two kinds in one model; a cache without length; lists of caches; latent attention.
TYPICAL = ["qwen3", "gpt_oss", "mamba", "falcon_h1", "deepseek_v3"]


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=LONG)])
def test_caches_of_models(run_ranks, ranks):
    right(run_ranks, ranks, "models", "plain", *TYPICAL)


@pytest.mark.parametrize("made", ["quantized", "rotating"])
def test_other_caches(run_ranks, made):
    right(run_ranks, 2, "models", made, "qwen3")


@LONG
def test_every_model_file_of_mlx_lm(run_ranks):
    names = [name for name in tiny_models.compared_files() if name != "deepseek_v41"]  # whose caches are its own
    right(run_ranks, 2, "models", "plain", *names, timeout=400)


@pytest.mark.parametrize("scenario", ["bytes_sent", "all_shapes", "bad_input"])
def test_caches(run_ranks, scenario):
    right(run_ranks, 2, scenario)


ARRAY_OF_NO_DTYPE = '[["KVCache", [{"shape": [1], "dtype": "os"}]]]'


@pytest.mark.parametrize("text", ["long", "[", "3", "[" * 9999, '[["os", []]]', ARRAY_OF_NO_DTYPE])
def test_bytes_that_describe_no_cache(run_ranks, text):
    right(run_ranks, 2, "bad_bytes", text)


def test_a_sender_that_dies(run_ranks):
    outputs = run_ranks("kv.py", 2, "lost", status=9)
    assert "right" in outputs[1]


def test_the_program_of_the_guide(run_ranks, tmp_path):
    first, second = run_ranks(program_of(Path(__file__).parents[2] / "docs" / "kv.md", tmp_path), 2)
    assert first == "" and len(second.split()) == 8


def right(run_ranks, ranks, *arguments, **options):
    outputs = run_ranks("kv.py", ranks, *arguments, **options)
    assert all(output.endswith("right\n") for output in outputs), outputs
