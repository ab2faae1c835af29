"""One rank of test_equal_inputs.py. Arguments: the model's kind, a generator of mlx-lm, and what differs on the ranks.

Prints what it has generated, and the error.
"""

import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.generate import BatchGenerator, generate_step, generation_stream, speculative_generate_step
from mlx_lm.sample_utils import make_sampler

import mlxdist
from mlxdist.nn import PipelineBatchGenerator, SplitModel, adapters_of_rows, pipeline_parallel, plan_shards, shard_model
from mlxdist.nn.tensor_parallel.vocab_parallel import VocabParallelEmbedding

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import tiny_models

group = mlxdist.init()
rank, size = group.rank(), group.size()
PROMPT = [5, 17, 3, 60, 21, 9, 44]
TOKENS = 24
DRAFT = tiny_models.build("qwen3", num_hidden_layers=1)


def placed(kind):
    """Over all ranks: by shards ("tp"), experts ("ep"), stages ("pp"), two by two, or as split blocks."""
    model = tiny_models.build("qwen3_moe" if kind == "ep" else "qwen3")
    if kind == "blocks":
        return SplitModel.from_model(model, group=group)
    if kind == "tp x pp":
        mesh = mlxdist.mesh(pp=2, tp=2)
        shard_model(model, plan_shards(model, tp=2), group=mesh["tp"])
        return pipeline_parallel(model, group=mesh["pp"])
    if kind == "pp":
        return pipeline_parallel(model, group=group)
    return shard_model(
        model, plan_shards(model, tp=1, ep=size) if kind == "ep" else plan_shards(model, tp=size), group=group
    )


def one_by_one(model, prompt, sampler):
    return (token for token, _ in generate_step(mx.array(prompt), model, max_tokens=TOKENS, sampler=sampler))


def in_chunks(model, prompt, sampler):
    return (
        token
        for token, _ in generate_step(mx.array(prompt), model, max_tokens=TOKENS, sampler=sampler, prefill_step_size=2)
    )


def batches(model, prompt, sampler):
    kind = PipelineBatchGenerator if hasattr(model, "stage") else BatchGenerator
    generator = kind(model, max_tokens=TOKENS, sampler=sampler)
    generator.insert([prompt, prompt[:4], prompt[1:]])
    while responses := generator.next_generated():
        yield from (response.token for response in responses)
    generator.close()


def drafts(model, prompt, sampler):
    found = speculative_generate_step(mx.array(prompt), model, DRAFT, max_tokens=TOKENS, sampler=sampler)
    return (token for token, _, _ in found)


def generated(kind, generator, differs):
    model = placed(kind)
    state = rank + 3 if differs in ("seed", "sampler") else 3
    mx.random.seed(state)
    prompt = list(PROMPT)
    prompt[1] += rank * (differs == "prompt")  # in the middle of the first chunk, of one length
    sampler = make_sampler(temp=1.0)
    if differs == "sampler":
        own = sampler
        sampler = lambda x: mlxdist.broadcast(own(x), 0)
    tokens, error = [], ""
    try:
        for token in globals()[generator](model, prompt, sampler):
            tokens.append(token)
        mx.synchronize()
    except mlxdist.Mismatch as caught:
        error = str(caught)
    print("tokens", tokens)
    print("error", error)


def arrays():
    """What else ranks call a model with. The last fails, as a group that has failed stays so."""
    model = placed("tp")
    embeddings = mx.random.normal((1, 3, 64), key=mx.random.key(1))
    inputs = mx.array([[1, 2, 3]])
    # mlx-lm looks for input_embeddings in the signature, as generate_step does here.
    list(generate_step(mx.array([1, 2, 3]), model, max_tokens=2, input_embeddings=embeddings[0]))
    mx.synchronize(generation_stream)  # a token is on its way for nothing
    mx.eval(model(mx.zeros((1, 0), mx.int32), input_embeddings=embeddings))
    value, gradient = mx.value_and_grad(lambda x: model(inputs, input_embeddings=x).sum())(embeddings)
    whole = tiny_models.build("qwen3")
    expected = mx.grad(lambda x: whole(inputs, input_embeddings=x).sum())(embeddings)
    assert mx.allclose(gradient, expected, atol=1e-3 * mx.abs(expected).max().item())
    compiled = mx.compile(lambda tokens: model(tokens))
    assert mx.allclose(compiled(inputs), model(inputs), atol=1e-5)
    state = [np.array(array) for array in mx.random.state]
    mx.eval(model(inputs))
    assert all((a == np.array(b)).all() for a, b in zip(state, mx.random.state, strict=True))
    fails = {
        "embeddings": lambda: model(inputs, input_embeddings=embeddings + rank),
        "embedding": lambda: VocabParallelEmbedding(96, 8)(inputs + rank),
        "adapters": lambda: model(inputs),
        "shape": lambda: model(mx.zeros((1, 2 + rank), mx.int32)),
        "compiled": lambda: compiled(inputs + rank),
    }
    which = sys.argv[2]
    with adapters_of_rows([rank if which == "adapters" else 0]):
        try:
            mx.eval(fails[which]())
        except mlxdist.Mismatch as caught:
            print("error", caught)


arrays() if sys.argv[1] == "arrays" else generated(*sys.argv[1:])
