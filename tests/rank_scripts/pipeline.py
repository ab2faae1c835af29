"""One rank of test_pipeline.py. Arguments: the scenario and its arguments.

Every rank has the model of one process, too. The operations are the same, so the values are bitwise the same.
"""

import os
import signal
import sys
from collections import Counter
from inspect import signature
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import does_model_support_input_embeddings, save_config, save_model
from scenarios import group, rank, run_scenario, size

import mlxdist
from mlxdist.debug import NanGuard
from mlxdist.nn import PipelineBatchGenerator, load_sharded, pipeline_parallel, plan_shards, plan_stages, shard_model
from mlxdist.train import fully_shard

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import tiny_models
from serving import save_adapters

PROMPT = [list(range(1, 12)), [7, 8, 9], [3], [5]]  # in parts, the last as in decoding


def logits(model, parts, batch=1):
    """Of each part in turn, with the cache of those before; the states of the cache are evaluated alone at first, as
    mlx-lm does while it reads a prompt."""
    cache, found = make_prompt_cache(model), []
    for part in parts:
        result = model(mx.array([part] * batch), cache=cache)
        if not found:
            mx.eval([layer.state for layer in cache])
        mx.eval(result, [layer.state for layer in cache])
        found.append(result)
    return found, cache


def same(name, got, expected):
    for number, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert a.shape == b.shape and a.dtype == b.dtype, f"{name}, part {number}: {a.shape} {a.dtype}"
        assert mx.array_equal(a, b, equal_nan=True), f"{name}, part {number}: off by {mx.abs(a - b).max().item()}"


def models(*names):
    """Every layer is on one rank, which holds no other; the logits are those of the full model on all ranks."""
    refused = []
    for name in names:
        full, model = tiny_models.build(name), tiny_models.build(name)
        try:
            pipeline_parallel(model, group=group)
        except mlxdist.InvalidArgument as error:
            refused.append(name)
            assert "layer" in str(error), error
            continue
        got, cache = logits(model, PROMPT)
        expected, full_cache = logits(full, PROMPT)
        same(name, got, expected)
        held = [path for path, _ in tree_flatten(model.parameters())]
        everyones = mlxdist.all_sum(np.array([sum(x.nbytes for _, x in tree_flatten(model.parameters()))]))
        plan = model.stage.stage_plan
        start, stop = plan.ranges[rank]
        assert repr(model.stage) == f"<mlxdist.nn.Stage {rank} of {size}: layers {start} to {stop - 1}>"
        assert everyones[0] == sum(map(plan.bytes, range(size))), name
        assert len(held) == len(set(held))
        # Caches of other stages' layers hold nothing, and are as long.
        for layer, whole in zip(cache, full_cache, strict=True):
            assert getattr(layer, "offset", 0) == getattr(whole, "offset", 0), name
        total = mlxdist.all_sum(np.array([sum(layer.nbytes for layer in cache)]))
        everywhere = name == "longcat_flash_ngram"  # whose last tokens are in a cache of no layer
        assert everywhere or total[0] == sum(layer.nbytes for layer in full_cache), name
    if refused:
        print("refused:", *refused)


def cuts(name):
    """Uneven stages, and virtual ones, each of which the logits pass in turn."""
    full = tiny_models.build(name, num_hidden_layers=9)
    expected, _ = logits(full, PROMPT, 2)
    for options in ({"rank_shares": range(1, size + 1)}, {"virtual": 2}, {"virtual": 3 if size < 4 else 2}):
        model = tiny_models.build(name, num_hidden_layers=9)
        plan = plan_stages(model, size, **options)
        pipeline_parallel(model, group=group, stage_plan=plan)
        assert [list(chunk) for chunk in model.stage.chunks] == [list(range(*pair)) for pair in plan.ranges[rank::size]]
        same(str(options), logits(model, PROMPT, 2)[0], expected)


def generation(name):
    """mlx-lm's generators: a cache that is quantized on the way, and one that rotates; several prompts at a time."""
    full, model = tiny_models.build(name, head_dim=32), tiny_models.build(name, head_dim=32)
    pipeline_parallel(model, group=group)
    for options in ({}, {"max_kv_size": 8}, {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 4}):
        if options and hasattr(model, "make_cache"):
            continue  # it has kinds of its own
        rows = [
            [
                token
                for token, _ in generate_step(mx.array(PROMPT[0]), one, max_tokens=12, prefill_step_size=4, **options)
            ]
            for one in (full, model)
        ]
        assert rows[0] == rows[1], (options, rows)
    same_batches(full, model)


def same_batches(full, model):
    """Prompts of several lengths, of which some end early and others come later."""
    found = []
    for one in (full, model):
        generator = BatchGenerator(
            one, max_tokens=9, completion_batch_size=3, prefill_batch_size=2, prefill_step_size=4
        )
        order = generator.insert([PROMPT[0], PROMPT[1], PROMPT[0][:7], PROMPT[2]], max_tokens=[9, 3, 6, 5])
        tokens = {uid: [] for uid in order}
        while responses := generator.next_generated():
            for response in responses:
                tokens[response.uid].append(response.token)
        found.append([tokens[uid] for uid in order])
        generator.close()
    assert found[0] == found[1], found


def together(name):
    """Several calls that are evaluated at once: right, or an error on all ranks, and never another call's result."""
    full, model = tiny_models.build(name), tiny_models.build(name)
    pipeline_parallel(model, group=group)
    parts = [mx.array([row]) for row in ([1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12])]
    results = [model(part) for part in parts]
    try:
        mx.eval(results)
    except mlxdist.Error as error:
        assert "different calls of a model in stages" in str(error), error
        return
    same(name, results, [full(part) for part in parts])


def compiled(name):
    """Calls that MLX traces, between plain ones: neither sees what the other has left."""
    full, model = tiny_models.build(name), tiny_models.build(name)
    pipeline_parallel(model, group=group)
    tokens = mx.array([PROMPT[0]])
    expected, traced = full(tokens), mx.compile(lambda tokens: model(tokens))
    twice = mx.compile(lambda tokens: [model(tokens), model(tokens)])
    for call in (model, traced, model, traced, twice, model):
        results = call(tokens)
        mx.eval(results)
        for result in results if isinstance(results, list) else [results]:
            assert mx.allclose(result, expected, atol=1e-5, rtol=1e-5), mx.abs(result - expected).max().item()


def calls_of_a_token(name):
    """A token calls at most 7 functions of mlxdist for each layer, on the average of a stage's own and the others': the
    graph is built on the core that computes. It is one of an own layer, and up to nine of another stage's."""
    counts, package = [], str(Path(mlxdist.__file__).parent)
    for layers in (4 * size, 8 * size):
        model = pipeline_parallel(tiny_models.build(name, num_hidden_layers=layers), group=group)
        _, cache = logits(model, PROMPT)
        calls = Counter()

        def count(frame, event, argument, calls=calls):
            if event == "call" and frame.f_code.co_filename.startswith(package):
                calls[frame.f_code.co_name] += 1

        sys.setprofile(count)
        try:
            result = model(mx.array([[5]]), cache=cache)
        finally:
            sys.setprofile(None)
        mx.eval(result)
        counts.append(calls.total())
    assert 0 < counts[1] - counts[0] <= 7 * 4 * size, counts


def in_flight(name):
    """1 to 8 requests in several batches, some of which end early, come later or are removed: as one process."""
    full, model = tiny_models.build(name), tiny_models.build(name)
    pipeline_parallel(model, group=group)
    prompts = [PROMPT[0][start : start + 2 + 3 * (start % 3)] for start in range(8)]
    for count, options in [(1, {}), (2, {}), (5, {"max_kv_size": 8}), (8, {"prefill_batch_size": 1})]:
        if options and hasattr(model, "make_cache"):
            options = {}
        wanted = BatchGenerator(full, prefill_step_size=4, **options)
        generator = PipelineBatchGenerator(model, prefill_step_size=4, **options)
        found = [tokens_of(one, prompts[:count], prompts[7:]) for one in (wanted, generator)]
        assert found[0] == found[1], (count, found)
        assert generator.next() == ([], [])
        generator.close()
    assert len(set(map(tuple, found[0].values()))) > 1
    if size > 1:
        with pytest.raises(mlxdist.Mismatch, match="disagree about the prefill_step_size: 4 on rank 0, 8 on rank 1"):
            PipelineBatchGenerator(model, prefill_step_size=8 if rank == 1 else 4)


def tokens_of(generator, prompts, late):
    """Of each request; one comes later, and one is removed once it has generated three."""
    numbers = generator.insert(prompts, max_tokens=[7 + row % 3 for row in range(len(prompts))])
    tokens, left, removed = {number: [] for number in numbers}, set(numbers), 2 if len(numbers) > 3 else None
    while left:
        for response in generator.next()[1]:
            tokens.setdefault(response.uid, []).append(response.token)
            left -= {response.uid} if response.finish_reason else set()
        if late and len(tokens[numbers[0]]) == 2:
            left.update(generator.insert(late, max_tokens=[6]))
            late = []
        if len(tokens.get(removed, ())) == 3:
            assert list(generator.remove([removed], return_prompt_caches=True)) == [removed]
            left.remove(removed)
            tokens.pop(removed)
    return tokens


def stages(name):
    """Stages called without communication: what each returns is sent by hand, with several batches on their way."""
    full, model = tiny_models.build(name), tiny_models.build(name)
    pipeline_parallel(model, group=group)
    stage = model.stage
    batches = [mx.array([row[:7]] * (1 + number)) for number, row in enumerate(PROMPT[:1] * 3)]
    results = []
    for batch in batches:
        hidden = None
        if not stage.is_first:
            hidden = stage.transfer.recv(stage.taken(stage.chunks[0].start), *batch.shape, rank - 1)
        result = stage(batch, hidden)
        if not stage.is_last:
            result = stage.transfer.send(result, rank + 1, stage.taken(stage.chunks[0].stop))
        mx.async_eval(result)  # one after the other, on all ranks
        results.append(result)
    if stage.is_last:
        same(name, results, [full(batch) for batch in batches])
    mx.eval(results)


def with_tensor_parallel(name):
    """Layers over two ranks, and stages over the others."""
    mesh = mlxdist.mesh(pp=size // 2, tp=2)
    full, model = tiny_models.build(name), tiny_models.build(name)
    shard_model(model, plan_shards(model, tp=2), group=mesh["tp"])
    pipeline_parallel(model, group=mesh["pp"])
    for a, b in zip(logits(model, PROMPT)[0], logits(full, PROMPT)[0]):
        assert mx.allclose(a, b, atol=1e-5, rtol=1e-5), mx.abs(a - b).max().item()


def loading(directory, tp):
    """Each rank reads its own layers and slices alone; streamed, it gets these from rank 0, which alone has files."""
    tp, stages = int(tp), size // int(tp)
    for name in ("qwen3", "gemma"):  # gemma's embedding is its head, too
        folder = Path(directory) / f"{name}-{tp}"
        full = tiny_models.build(name)
        if rank == 0:
            folder.mkdir()
            save_model(folder, full)
            save_config(tiny_models.config_of(name), folder / "config.json")
            save_adapters(folder / "adapters", folder, seed=1, keys=["self_attn.q_proj", "mlp.down_proj"])
        group.meet()
        expected, _ = logits(full, PROMPT)
        for options in (
            {},
            {"stream": True},
            {"stage_plan": plan_stages(full, stages, rank_shares=range(1, stages + 1))},
        ):
            reports = []
            streamed = "stream" in options
            path = folder if rank == 0 or not streamed else None
            model, _ = load_sharded(
                path, group=group, tp=tp, pp=stages, verify=True, on_report=reports.append, **options
            )
            for a, b in zip(logits(model, PROMPT)[0], expected):
                assert mx.allclose(a, b, atol=1e-5, rtol=1e-5), mx.abs(a - b).max().item()
            (report,) = reports
            assert report.bytes_held < report.bytes_total
            # What is sharded in a stage is compared between its ranks, by some more bytes.
            assert streamed or tp > 1 or report.bytes_read == report.bytes_held
            assert [model.stage.index, model.stage.stages] == [rank // tp, stages]
        load_sharded(folder, group=group, tp=tp, pp=stages, verify=True, adapter_path=folder / "adapters")
    with pytest.raises(mlxdist.InvalidArgument, match=f"the {size} ranks of the group are no pp=5 equal stages"):
        load_sharded(folder, group=group, pp=5)


def signatures():
    """What mlx-lm reads from the signature of a model's call, it reads from a changed one."""
    sharded = lambda model: shard_model(model, plan_shards(model, tp=size), group=group)
    for change in (lambda model: pipeline_parallel(model, group=group), sharded, fully_shard, watched):
        full, model = tiny_models.build("qwen3"), tiny_models.build("qwen3")
        change(model)
        assert does_model_support_input_embeddings(model)
        for one, other in zip(full.modules(), model.modules()):
            if type(one).__name__ == type(other).__name__.removeprefix("Sharded") and hasattr(type(one), "__call__"):
                assert signature(type(one).__call__) == signature(type(other).__call__), type(other)
    full, model = tiny_models.build("qwen3"), pipeline_parallel(tiny_models.build("qwen3"), group=group)
    embedded = mx.random.normal((8, 64))
    rows = [
        [token for token, _ in generate_step(mx.array([]), one, max_tokens=4, input_embeddings=embedded)]
        for one in (full, model)
    ]
    assert rows[0] == rows[1], rows


def watched(model):
    NanGuard(model, group=group)


def bad_input():
    """The same error on all ranks, and the model is as it was."""

    def refused(words, model, plan=None):
        before = [type(module) for module in model.modules()], tree_flatten(model.parameters())
        kind = mlxdist.Mismatch if "disagree" in words else mlxdist.InvalidArgument
        with pytest.raises(kind, match=words):
            pipeline_parallel(model, group=group, stage_plan=plan)
        assert [type(module) for module in model.modules()] == before[0]
        assert all(a is b for (_, a), (_, b) in zip(tree_flatten(model.parameters()), before[1], strict=True))

    llama = tiny_models.build("llama")
    refused("which is not what a layer has returned", tiny_models.build("gemma4_text"))
    refused("does not call each layer once", tiny_models.build("iquestloopcoder"))
    refused("another model", llama, plan_stages(tiny_models.build("llama", num_hidden_layers=5), size))
    refused(f"has 1 stages, and the group {size} ranks", llama, plan_stages(llama, 1))
    plan = plan_stages(llama, size)
    refused("stage_plan must be a StagePlan of plan_stages, not str", llama, "equal" if rank == 0 else plan)
    with pytest.raises(mlxdist.InvalidArgument, match="model must be an mlx.nn.Module, not str"):
        pipeline_parallel("llama" if rank == 0 else llama, group=group)
    own = plan_stages(llama, size, rank_shares=[4 if stage == rank else 1 for stage in range(size)])
    refused("the ranks disagree", llama, own)
    refused("the ranks disagree", tiny_models.build("llama", num_hidden_layers=8 + rank))
    stage = pipeline_parallel(llama, group=group).stage
    refused("a stage already", llama)
    with pytest.raises(mlxdist.InvalidArgument, match="what the stage before has returned"):
        stage(mx.array([PROMPT[0]]), [mx.zeros(1)] if stage.is_first else None)


def other_dtype():
    """What a stage sends is not what was agreed: an error that names both."""
    model = pipeline_parallel(tiny_models.build("llama"), group=group)
    model.set_dtype(mx.float16)
    words = r"a stage sends float16 of shape \(1, 11, 64\), but float32 of shape \(batch, length, 64\) was agreed"
    if not model.stage.is_last:
        with pytest.raises(mlxdist.InvalidArgument, match=words):
            model(mx.array([PROMPT[0]]))


def killed():
    """The last stage ends while the others wait for it."""
    model = pipeline_parallel(tiny_models.build("llama"), group=group)
    mx.eval(model(mx.array([PROMPT[0]])))
    if rank == size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(mlxdist.PeerLost, match=f"rank {size - 1}"):
        mx.eval(model(mx.array([PROMPT[0]])))


run_scenario(globals())
