"""Choosing tokens, log-probabilities and the loss from logits that are sharded over the vocabulary: as from all of
them."""

import mlx.core as mx
import numpy as np
import pytest
from rank_counts import one_to_four

from mlxdist.nn.tensor_parallel.sampling import VocabParallelSampler


@one_to_four()
def test_as_with_all_logits(run_scenarios, ranks):
    """Tokens: those of a dense formula with the same noise, ties included. Losses and gradients: within 1e-5."""
    samplers = "all_samplers" if ranks == 1 else "samplers"
    checks = ["argmax", samplers, "distribution", "inverse_transform", "log_probs", "cross_entropy"]
    checks += ["traffic", "bad_input"]
    run_scenarios("parallel_sampling.py", ranks, *checks)


@pytest.mark.parametrize("arguments", [{"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 9}, {"top_p": 0.9, "min_p": 0.1}])
def test_tokens_are_those_that_mlx_lm_keeps(arguments):
    """Of logits without ties, where mlx-lm's filters leave nothing open."""
    sample_utils = pytest.importorskip("mlx_lm.sample_utils")
    mx.random.seed(6)
    logits = mx.random.permutation(mx.arange(60) / 9)[None]
    kept = logits - mx.logsumexp(logits)
    for name, value in arguments.items():
        kept = getattr(sample_utils, f"apply_{name}")(kept, value)
    possible = set(np.flatnonzero(np.isfinite(np.array(kept[0]))).tolist())
    sampler = VocabParallelSampler(temp=5.0, **arguments, sizes=[60])
    assert set(np.array(sampler(mx.repeat(logits, 2000, axis=0))).tolist()) == possible
