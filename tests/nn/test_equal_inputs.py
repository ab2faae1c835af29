"""Ranks that share a model and sample for themselves: the same tokens on all, or a Mismatch at the first other one."""

import ast

import pytest

pytest.importorskip("mlx_lm")

LONG = pytest.mark.long


QUICK = [("tp", 2, "one_by_one", "seed"), ("pp", 2, "batches", "seed")]
CASES = [
    (kind, ranks, generator, differs)
    for kind, ranks in (("tp", 2), ("pp", 2), ("ep", 2), ("blocks", 2), ("tp", 3), ("pp", 4), ("tp x pp", 4))
    for generator in ("one_by_one", "in_chunks", "batches", "drafts")
    for differs in ("seed", "prompt")
]


@pytest.mark.parametrize(
    ("kind", "ranks", "generator", "differs"),
    [pytest.param(*case, marks=[] if case in QUICK else LONG) for case in CASES],
)
def test_ranks_that_sample_or_begin_differently(run_ranks, kind, ranks, generator, differs):
    tokens, error = generated(run_ranks, kind, ranks, generator, differs)
    assert "mx.random.seed(0)" in error, (tokens, error)
    shown = min(map(len, tokens))
    other = next((place for place in range(shown) if len({one[place] for one in tokens}) > 1), shown)
    assert max(map(len, tokens)) <= other + 3, tokens  # those of a step that a rank has begun with


@LONG
@pytest.mark.parametrize(("kind", "ranks", "generator"), sorted({case[:3] for case in CASES}))
def test_ranks_with_one_seed(run_ranks, kind, ranks, generator):
    tokens, error = generated(run_ranks, kind, ranks, generator, "nothing")
    assert not error and len(set(map(tuple, tokens))) == 1 and len(tokens[0]) >= 24


@pytest.mark.long
@pytest.mark.parametrize("kind", ["tp", pytest.param("pp", marks=LONG), pytest.param("blocks", marks=LONG)])
def test_a_sampler_that_takes_rank_0s_tokens(run_ranks, kind):
    """What the error advises."""
    tokens, error = generated(run_ranks, kind, 2, "one_by_one", "sampler")
    assert not error and tokens[0] == tokens[1] and len(tokens[0]) == 24


@pytest.mark.parametrize(
    ("which", "words"),
    [
        ("embeddings", "192 elements that end with"),
        pytest.param("embedding", "3 elements that end with 3 on rank 0 and 3 elements that end with 4", marks=LONG),
        pytest.param("adapters", "adapters_of_rows", marks=LONG),
        pytest.param("shape", "2 elements that end with 0 on rank 0 and 3 elements", marks=LONG),
        pytest.param("compiled", "3 elements that end with 3 on rank 0 and 3 elements that end with 4", marks=LONG),
    ],
)
def test_other_arrays(run_ranks, which, words):
    outputs = run_ranks("equal_inputs.py", 2, "arrays", which)
    errors = [said(output, "error") for output in outputs]
    assert errors[0] == errors[1] and words in errors[0], outputs


def generated(run_ranks, kind, ranks, generator, differs):
    """The tokens of each rank, and the error that all of them have."""
    outputs = run_ranks("equal_inputs.py", ranks, kind, generator, differs)
    errors = {said(output, "error") for output in outputs}
    assert len(errors) == 1, errors
    return [ast.literal_eval(said(output, "tokens")) for output in outputs], errors.pop()


def said(output, word):
    """What is behind the word in the line that begins with it."""
    (line,) = (line for line in output.splitlines() if line.startswith(word))
    return line.removeprefix(word).strip()
