"""One rank of test_pipeline_training.py. Arguments: the scenario and its arguments.

Every rank has the model of one process, too, and its gradients of the whole batch, or of the plain 1F1B
(support/reference_1f1b.py).
"""

import os
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tuner.trainer import default_loss
from mlx_lm.tuner.utils import linear_to_lora_layers
from scenarios import group, rank, run_scenario, size

import mlxdist
from mlxdist.nn import (
    Action,
    Schedule,
    context_parallel,
    pipeline_parallel,
    pipeline_schedule,
    plan_shards,
    plan_stages,
    shard_model,
)
from mlxdist.nn.models.cuts import cuts
from mlxdist.runtime.diagnostics.step import current_computing
from mlxdist.runtime.group.group import engine_of
from mlxdist.runtime.native import bridge
from mlxdist.train import clip_grad_norm, fully_shard, stage_loss, value_and_grad
from mlxdist.train.training_loop import masked_loss

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import reference_1f1b as reference
import tiny_models

LAYERS = 9


def batch_of(rows, seed=1):
    """Tokens, and where the targets of each row begin and end, as mlx-lm has them."""
    random = np.random.default_rng(seed)
    tokens = mx.array(random.integers(0, 90, (rows, 8)))
    return tokens, mx.array([[int(random.integers(0, 3)), int(random.integers(4, 8))] for _ in range(rows)])


def staged(name, mesh, virtual=1, **sizes):
    model = tiny_models.build(name, **sizes)
    plan = plan_stages(model, mesh.size("pp"), virtual=virtual)
    return pipeline_parallel(model, group=mesh["pp"], stage_plan=plan)


def by_reference(full, batch, micro_batches):
    """((loss, tokens), gradients) of ``full``, a dense model of mlx-lm, as ``size`` stages in this process."""
    layers = [len(full.layers) * stage // size for stage in range(size + 1)]

    def stage_of(index):
        def stage(parameters, x, micro_batch):
            full.update(tree_unflatten(list(parameters.items())))
            if x is None:
                x = full.model.embed_tokens(micro_batch[0][:, :-1])
                x = x * full.args.hidden_size**0.5 if full.model_type == "gemma" else x
            for layer in full.layers[layers[index] : layers[index + 1]]:
                x = layer(x, "causal")
            if index < size - 1:
                return x
            head = full.lm_head if "lm_head" in full else full.model.embed_tokens.as_linear
            loss, tokens = default_loss(lambda _: head(full.model.norm(x)), *micro_batch)
            return loss * tokens, tokens

        return stage

    def held(index):
        """Both the first and the last stage have an embedding that is the head, too."""
        inner = ["model.norm.", "lm_head.", "model.embed_tokens."] if index == size - 1 else []
        inner += ["model.embed_tokens."] if index == 0 else []
        inner += [f"model.layers.{number}." for number in range(layers[index], layers[index + 1])]
        return {path: array for path, array in tree_flatten(full.parameters()) if path.startswith(tuple(inner))}

    parts = list(zip(*(mx.split(x, micro_batches) for x in batch)))
    value, gradients = reference.train_step([stage_of(i) for i in range(size)], [held(i) for i in range(size)], parts)
    total = {path: mx.zeros_like(array) for path, array in tree_flatten(full.parameters())}
    for path, array in (pair for of_stage in gradients for pair in of_stage.items()):
        total[path] += array
    return value, tree_unflatten(list(total.items()))


def compare(model, value, gradients, expected_value, expected, tolerance=2e-5):
    found, wanted = dict(tree_flatten(gradients)), dict(tree_flatten(expected))
    held = [path for path, _ in tree_flatten(model.trainable_parameters())]
    assert list(found) == held
    for path, array in found.items():
        assert array.dtype == wanted[path].dtype, path
        a, b = (np.array(x.astype(mx.float32)) for x in (array, wanted[path]))
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=tolerance, err_msg=path)
    for a, b in zip(value, expected_value, strict=True):
        np.testing.assert_allclose(np.array(a), np.array(b), rtol=1e-5, atol=1e-6)


def schedules(name, virtual, most):
    """Every schedule, with 1 to ``most`` micro-batches: the gradients and the loss of one process."""
    mesh, virtual = mlxdist.mesh(pp=size), int(virtual)
    full = tiny_models.build(name, num_hidden_layers=LAYERS)
    model = staged(name, mesh, virtual, num_hidden_layers=LAYERS)
    for count in range(1, int(most) + 1):
        batch = batch_of(2 * count)
        expected = by_reference(full, batch, count)
        for schedule in ("gpipe", "1f1b", "zero_bubble"):
            step = value_and_grad(model, default_loss, mesh=mesh, micro_batches=count, schedule=schedule)
            for _ in range(2):
                compare(model, *step(model, *batch), *expected)
            if size == 1:  # all of it is one stage
                continue
            (spans,) = model.stage.timeline.spans
            assert len(spans) == (3 if schedule == "zero_bubble" else 2) * count * virtual
            assert 0 <= model.stage.timeline.bubble < 1
        if size > 1:  # what `mlxdist top` and `dump` show is the step before
            computing = current_computing()
            assert [span.name for span in computing.spans] == [str(span.action) for span in spans]
            assert all(a.ended_ns <= b.started_ns + 1 for a, b in zip(computing.spans, computing.spans[1:]))


def share(batch, mesh):
    """The rows of this rank's replicas."""
    index, count = (
        mesh.coordinates["dp"] * mesh.size("fsdp") + mesh.coordinates["fsdp"],
        mesh.size("dp") * mesh.size("fsdp"),
    )
    return tuple(x[index * len(x) // count : (index + 1) * len(x) // count] for x in batch)


def with_data_parallel(name):
    """Replicas of each stage, with unequal numbers of tokens: the gradients of one process with all rows."""
    mesh = mlxdist.mesh(pp=size // 2, dp=2)
    full, model = tiny_models.build(name), staged(name, mesh)
    batch = batch_of(12)
    expected = nn.value_and_grad(full, default_loss)(full, *batch)
    for micro_batches in (1, 3):
        step = value_and_grad(model, default_loss, mesh=mesh, micro_batches=micro_batches)
        for _ in range(2):
            (loss, tokens), gradients = step(model, *share(batch, mesh))
            sums = mlxdist.all_sum(mx.stack([loss * tokens, tokens]), group=mesh["dp"])
            compare(model, (sums[0] / sums[1], sums[1]), gradients, *expected)


def with_tensor_parallel(name):
    """Layers over two ranks: the norm of the gradients, and what an optimizer makes of them."""
    mesh = mlxdist.mesh(pp=size // 2, tp=2)
    full, model = tiny_models.build(name), tiny_models.build(name)
    shard_model(model, plan_shards(model, tp=2), group=mesh["tp"])
    pipeline_parallel(model, group=mesh["pp"])
    batch = batch_of(8)
    value, expected = nn.value_and_grad(full, default_loss)(full, *batch)
    step = value_and_grad(model, default_loss, mesh=mesh, micro_batches=4)
    found, gradients = step(model, *batch)
    for a, b in zip(found, value, strict=True):
        np.testing.assert_allclose(np.array(a), np.array(b), rtol=1e-5, atol=1e-6)
    where, wanted = cuts(model), dict(tree_flatten(expected))
    for path, array in tree_flatten(gradients):
        np.testing.assert_allclose(
            np.array(array), np.array(where[path].take(wanted[path])), rtol=1e-4, atol=2e-5, err_msg=path
        )
    same_norm(model, gradients, expected, mesh)


def same_norm(model, gradients, expected, mesh):
    _, norm = clip_grad_norm(gradients, 1.0, model=model, mesh=mesh)
    _, wanted = optim.clip_grad_norm(expected, 1.0)
    np.testing.assert_allclose(norm.item(), wanted.item(), rtol=1e-5)


def norms(name):
    """What several stages hold is counted once."""
    mesh = mlxdist.mesh(pp=size)
    full, model = tiny_models.build(name), staged(name, mesh)
    batch = batch_of(8)
    _, expected = by_reference(full, batch, 4)
    _, gradients = value_and_grad(model, default_loss, mesh=mesh, micro_batches=4)(model, *batch)
    same_norm(model, gradients, expected, mesh)


def with_context_parallel(name):
    """Sequences over two ranks, one of which may have no targets."""
    mesh = mlxdist.mesh(pp=size // 2, cp=2)
    full, model = tiny_models.build(name), tiny_models.build(name)
    context_parallel(model, group=mesh["cp"])
    pipeline_parallel(model, group=mesh["pp"])
    alone = mlxdist.mesh(dp=size)["cp"]
    step = value_and_grad(model, masked_loss, mesh=mesh, micro_batches=4)
    tokens, lengths = batch_of(8)
    for batch in (tokens, lengths), (tokens, mx.array([[0, 2]] * 8)):
        value, expected = nn.value_and_grad(full, masked_loss)(full, *batch, cp=alone)
        (loss, count), gradients = step(model, *batch, cp=mesh["cp"])
        sums = mlxdist.all_sum(mx.stack([loss * count, count.astype(mx.float32)]), group=mesh["cp"])
        compare(model, (sums[0] / sums[1], sums[1]), gradients, value, expected)


def with_sharded_optimizer(name, checkpointed=""):
    """ZeRO-1: a shard of each parameter on each replica, gathered once a step and reduced once."""
    mesh = mlxdist.mesh(pp=size // 2, fsdp=2)
    full, model = tiny_models.build(name), tiny_models.build(name)
    if checkpointed:
        tiny_models.checkpoint_layers(model)
    pipeline_parallel(model, group=mesh["pp"])
    fully_shard(model, mesh=mesh, stage=1)
    batch = batch_of(8)
    value, expected = nn.value_and_grad(full, default_loss)(full, *batch)
    where, wanted = cuts(model), dict(tree_flatten(expected))
    for schedule in ("gpipe", "1f1b", "zero_bubble"):
        step = value_and_grad(model, default_loss, mesh=mesh, micro_batches=4, schedule=schedule)
        for _ in range(2):
            (loss, tokens), gradients = step(model, *share(batch, mesh))
            sums = mlxdist.all_sum(mx.stack([loss * tokens, tokens.astype(mx.float32)]), group=mesh["fsdp"])
            np.testing.assert_allclose((sums[0] / sums[1]).item(), value[0].item(), rtol=1e-5)
            for path, array in tree_flatten(gradients):
                np.testing.assert_allclose(
                    np.array(array), np.array(where[path].take(wanted[path])), rtol=1e-4, atol=2e-5, err_msg=path
                )

    def penalized(model, *batch):
        loss, tokens = default_loss(model, *batch)
        squares = sum((p * p).sum() for _, p in tree_flatten(model.stage.trainable_parameters()))
        return loss + stage_loss(model, squares), tokens

    with pytest.raises(mlxdist.InvalidArgument, match="is made of '.*' itself, of which this rank has a part"):
        value_and_grad(model, penalized, mesh=mesh, micro_batches=4)(model, *share(batch, mesh))
    for stage in (2, 3):
        other = staged(name, mesh)
        fully_shard(other, mesh=mesh, stage=stage)
        with pytest.raises(mlxdist.InvalidArgument, match=f"fully_shard\\(stage={stage}\\).* each micro-batch"):
            value_and_grad(other, default_loss, mesh=mesh, micro_batches=4)


def with_checkpointing(name):
    """mlx-lm's grad_checkpoint: layers are computed again in the backward pass."""
    mesh = mlxdist.mesh(pp=size)
    full, model = tiny_models.build(name), tiny_models.build(name)
    batch = batch_of(8)
    expected = by_reference(full, batch, 4)
    tiny_models.checkpoint_layers(model)
    pipeline_parallel(model, group=mesh["pp"])
    step = value_and_grad(model, default_loss, mesh=mesh, micro_batches=4, schedule="zero_bubble")
    compare(model, *step(model, *batch), *expected)


def adapters(name, layers):
    """LoRA of mlx-lm on the last layers: only adapters are trained, and maybe none on the first stages."""
    mesh = mlxdist.mesh(pp=size)
    full, model = tiny_models.build(name), tiny_models.build(name)
    for one in (full, model):
        mx.random.seed(3)
        one.freeze()
        linear_to_lora_layers(one, int(layers), {"rank": 2, "scale": 1.0, "dropout": 0.0})
        for path, array in tree_flatten(one.trainable_parameters()):
            one.update(tree_unflatten([(path, mx.random.normal(array.shape) * 0.1)]))
    pipeline_parallel(model, group=mesh["pp"])
    batch = batch_of(8)
    expected = nn.value_and_grad(full, default_loss)(full, *batch)
    step = value_and_grad(model, default_loss, mesh=mesh, micro_batches=4)
    value, gradients = step(model, *batch)
    assert all("lora" in path for path, _ in tree_flatten(gradients))
    compare(model, value, gradients, *expected)


def training(name):
    """Five steps of Adam end with the parameters of one process, also those that two stages hold."""
    mesh = mlxdist.mesh(pp=size)
    full, model = tiny_models.build(name), staged(name, mesh)
    step, alone = value_and_grad(model, default_loss, mesh=mesh, micro_batches=4), nn.value_and_grad(full, default_loss)
    first, second = optim.SGD(0.01), optim.SGD(0.01)
    for number in range(5):
        batch = batch_of(8, seed=number)
        first.update(model, step(model, *batch)[1])
        second.update(full, alone(full, *batch)[1])
        mx.eval(model.parameters(), full.parameters())
    wanted = dict(tree_flatten(full.parameters()))
    for path, array in tree_flatten(model.parameters()):
        np.testing.assert_allclose(np.array(array), np.array(wanted[path]), rtol=1e-3, atol=1e-4, err_msg=path)
    for a, b in zip(model(batch_of(2)[0]), full(batch_of(2)[0])):  # and the model in stages still works as a whole
        np.testing.assert_allclose(np.array(a), np.array(b), rtol=1e-3, atol=1e-3)


def other_losses():
    """A loss alone; with others behind it; no tokens in a micro-batch."""
    mesh = mlxdist.mesh(pp=size)
    full, model = tiny_models.build("qwen3"), staged("qwen3", mesh)
    tokens, lengths = batch_of(8)

    def mean(model, tokens):
        return nn.losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:], reduction="mean")

    def more(model, tokens, lengths):
        logits = model(tokens[:, :-1])
        mask = mx.arange(tokens.shape[1] - 1) < lengths[:, :1]
        losses = nn.losses.cross_entropy(logits, tokens[:, 1:]) * mask
        return losses.sum() / mask.sum(), mask.sum(), logits.max()

    step = value_and_grad(model, mean, mesh=mesh, micro_batches=4)
    value, gradients = step(model, tokens)
    wanted, expected = nn.value_and_grad(full, mean)(full, tokens)
    compare(model, [value], gradients, [wanted], expected)
    lengths = mx.where(mx.arange(8)[:, None] < 2, 0, 5)  # the first micro-batch has none
    (loss, count, highest), gradients = value_and_grad(model, more, mesh=mesh, micro_batches=4)(model, tokens, lengths)
    (wanted, total, most), expected = nn.value_and_grad(full, more)(full, tokens, lengths)
    compare(model, [loss, count, mx.max(mx.stack(highest))], gradients, [wanted, total, most], expected)


def dtypes():
    """16 bits between the stages, and gradients that are added up in 32."""
    mesh, (tokens, _) = mlxdist.mesh(pp=size), batch_of(8)

    def mean(model, tokens):
        return nn.losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:], reduction="mean")

    for dtype in (mx.bfloat16, mx.float16):
        full, model = tiny_models.build("gemma"), tiny_models.build("gemma")
        full.set_dtype(dtype)
        model.set_dtype(dtype)
        pipeline_parallel(model, group=mesh["pp"])
        value, gradients = value_and_grad(model, mean, mesh=mesh, micro_batches=4, schedule="zero_bubble")(
            model, tokens
        )
        wanted, expected = nn.value_and_grad(full, mean)(full, tokens)
        assert value.dtype == wanted.dtype and abs(value.item() - wanted.item()) < 0.05
        expected = dict(tree_flatten(expected))
        for path, array in tree_flatten(gradients):
            off = mx.abs(array.astype(mx.float32) - expected[path].astype(mx.float32)).max().item()
            assert array.dtype == dtype and off < 0.05 * mx.abs(expected[path]).max().item(), (path, off)


def counted(name):
    """Messages: a micro-batch's activation and its gradient pass each boundary once, and nothing else but the loss."""
    mesh = mlxdist.mesh(pp=size)
    model = staged(name, mesh)
    step = value_and_grad(model, default_loss, mesh=mesh, micro_batches=4)
    batch = batch_of(8)

    def sent_after_a_step():
        mx.eval(step(model, *batch))
        bridge.wait_for_cpu_streams()  # no gradient waits for what this rank sends
        group.meet()
        return engine_of(group).world.counters()["payload_bytes_sent"]

    before = sent_after_a_step()
    sent = sent_after_a_step() - before
    hidden = 2 * (batch[0].shape[1] - 1) * 64 * 4
    neighbors = (rank > 0) + (rank < size - 1)
    assert 0 <= sent - 4 * neighbors * hidden <= 64 * size, (sent, 4 * neighbors * hidden)


def own_terms(name, virtual=1):
    """Terms of parameters, and of activations inside the model: the loss and gradients of one process."""
    mesh, virtual = mlxdist.mesh(pp=size), int(virtual)
    full = tiny_models.build(name, num_hidden_layers=LAYERS)
    model = staged(name, mesh, virtual, num_hidden_layers=LAYERS)
    seen = []

    def noting(kind):
        def call(self, x, *args, **keywords):
            y = kind.__call__(self, x, *args, **keywords)
            seen.append(y.square().mean())
            return y

        return type(kind.__name__, (kind,), {"__call__": call})

    for layer in [*full.layers, *model.layers]:
        if "mlp" in layer and tree_flatten(layer.mlp.parameters()):  # not of another stage
            layer.mlp.__class__ = noting(type(layer.mlp))

    def loss(model, tokens, lengths):
        seen.clear()
        value, count, *_ = default_loss(model, tokens, lengths)
        own = getattr(model, "stage", model).trainable_parameters()
        squares = sum((p * p).sum() for _, p in tree_flatten(own))
        return value + 0.1 * stage_loss(model, squares) + stage_loss(model, 1e-3 * sum(seen)) ** 2, count

    batch = batch_of(8)
    expected = nn.value_and_grad(full, loss)(full, *batch)
    for schedule in ("gpipe", "1f1b", "zero_bubble"):
        step = value_and_grad(model, loss, mesh=mesh, schedule=schedule)
        for _ in range(2):
            compare(model, *step(model, *batch), *expected)

    def penalty(model, tokens):
        own = getattr(model, "stage", model).trainable_parameters()
        squares = sum((p * p).sum() for _, p in tree_flatten(own))
        return nn.losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:], reduction="mean") + stage_loss(
            model, squares
        )

    wanted, expected = nn.value_and_grad(full, penalty)(full, batch[0])
    value, gradients = value_and_grad(model, penalty, mesh=mesh, micro_batches=4)(model, batch[0])
    compare(model, [value], gradients, [wanted], expected, 1e-4)
    np.testing.assert_allclose(penalty(model, batch[0]).item(), wanted.item(), rtol=1e-5)  # without gradients


def lost_terms():
    """A term that a stage would lose, or count twice, is an error on all, which names the parameter."""
    mesh, (tokens, _) = mlxdist.mesh(pp=size), batch_of(4)
    model = staged("gemma", mesh)  # whose embedding is its head, too

    def refused(words, term):
        def loss(model, x):
            logits = model(x[:, :-1])
            return nn.losses.cross_entropy(logits, x[:, 1:], reduction="mean") + term(logits)

        with pytest.raises(mlxdist.InvalidArgument, match=words):
            value_and_grad(model, loss, mesh=mesh, micro_batches=2)(model, tokens)

    squares = lambda tree: sum((p * p).sum() for _, p in tree_flatten(tree))
    lost = r"depends on 'model.layers.0.*' of stage 0 not only .* train.stage_loss\(model, term\)"
    refused(lost, lambda _: squares(model.trainable_parameters()))
    refused(lost, lambda _: squares(model.stage.trainable_parameters()))
    refused(lost, lambda _: stage_loss(model, 1.0) * squares(model.trainable_parameters()))
    twice = "depends on 'model.embed_tokens.weight', which another stage counts, too; take model.stage"
    refused(twice, lambda _: stage_loss(model, squares(model.trainable_parameters())))
    refused("made of what the model returns", lambda logits: stage_loss(model, logits.square().mean()))
    refused(r"the term has shape \(3,\)", lambda _: stage_loss(model, mx.ones(3)))
    with pytest.raises(mlxdist.Mismatch, match="the number of calls of stage_loss: 0 on rank 0, 1 on rank"):
        once = lambda x: default_loss(model, x, mx.full((len(x), 2), 7))[0] + (stage_loss(model, 1.0) if rank else 0.0)
        value_and_grad(model, once, mesh=mesh)(tokens)
    kind, seen = type(model.layers[0]), []

    def call(self, *args, **keywords):
        y = kind.__call__(self, *args, **keywords)
        seen.append(y.square().mean())
        return y

    if rank == 0:
        model.layers[0].__class__ = type(kind.__name__, (kind,), {"__call__": call})
    refused("depends on 'model.embed_tokens.weight'|depends on 'model.layers.0", lambda _: sum(seen))
    model.layers[0].__class__ = kind
    # What the last stage has, it counts itself.
    step = value_and_grad(
        model, lambda x: default_loss(model, x, mx.full((len(x), 2), 7))[0] + squares(model.model.norm), mesh=mesh
    )
    full = tiny_models.build("gemma")
    wanted = nn.value_and_grad(
        full, lambda x: default_loss(full, x, mx.full((len(x), 2), 7))[0] + squares(full.model.norm)
    )(tokens)
    found = step(tokens)
    compare(model, [found[0]], found[1], [wanted[0]], wanted[1])


def frozen_on_one_stage():
    """What two stages hold is frozen on one of them: a Mismatch on all, before any message of the step."""
    mesh, batch = mlxdist.mesh(pp=size), batch_of(4)
    model = staged("gemma", mesh)
    step = value_and_grad(model, default_loss, mesh=mesh, micro_batches=2)
    if rank == 0:
        model.model.embed_tokens.freeze()
    with pytest.raises(
        mlxdist.Mismatch,
        match=r"the parameter model.embed_tokens.weight: float32 \[96, 64\], frozen on rank 0, float32",
    ):
        step(model, *batch)
    model.unfreeze()
    mx.eval(step(model, *batch))
    compare(model, *step(model, *batch), *by_reference(tiny_models.build("gemma"), batch, 2))


def bad_input():
    """The same error on all ranks, and the next step is possible."""
    mesh = mlxdist.mesh(pp=size)
    model, batch = staged("qwen3", mesh), batch_of(8)

    def refused(words, call):
        kind = mlxdist.Mismatch if "disagree" in words else mlxdist.InvalidArgument
        with pytest.raises(kind, match=words):
            call()

    make = partial(value_and_grad, model, default_loss, mesh=mesh, micro_batches=4)
    refused("needs mesh=", lambda: value_and_grad(model, default_loss, micro_batches=4))
    refused("no schedule 'fast'", lambda: make(schedule="fast"))
    refused("is for .* 3 micro-batches", lambda: make(schedule=pipeline_schedule("1f1b", size, 3)))
    if size > 1:
        refused("must be a Schedule or its name", lambda: make(schedule=7 if rank == 0 else None))
        refused("differ|disagree", lambda: make(schedule="gpipe" if rank == 0 else None))
        own = pipeline_schedule("gpipe", size, 64)
        swap = {20: 21, 21: 20}
        swapped = tuple(
            tuple(replace(one, micro_batch=swap.get(one.micro_batch, one.micro_batch)) for one in row)
            for row in own.actions
        )
        other = replace(own, actions=swapped)
        refused("disagree about the schedule", lambda: make(schedule=other if rank else own, micro_batches=64))
        rows = [("F0", "B0", "F1", "B1", "F2", "B2", "F3", "B3"), ("F0", "F1", "B0", "B1", "F2", "B2", "F3", "B3")]
        actions = tuple(tuple(Action(name[0], int(name[1])) for name in rows[min(at, 1)]) for at in range(size))
        stuck = Schedule("stuck", size, 4, 1, actions)
        refused("wait for each other", lambda: make(schedule=None if rank else stuck))
        for layer, words in (0, "disagree about the parameter model.layers.0"), (-1, "disagree about the parameter "):
            other = tiny_models.build("qwen3")
            if rank == size - 1:
                other.layers[layer].freeze()
            refused(
                words + r".*: float32 \[.*\] on rank 0, .*, frozen on",
                lambda o=other: pipeline_parallel(o, group=group),
            )
    rows = tuple(x[:7] for x in batch)
    refused("7 rows, which do not divide into micro_batches=4", lambda: make()(model, *rows))
    twice = lambda model, tokens: model(tokens).sum() + model(tokens).sum()
    refused(
        "calls it once.*7\\), \\(2, 7",
        lambda: value_and_grad(model, twice, mesh=mesh, micro_batches=4)(model, batch[0][:, :-1]),
    )
    plain = tiny_models.build("qwen3")
    refused(
        "pipeline_parallel\\(model\\) first", lambda: value_and_grad(plain, default_loss, mesh=mesh, schedule="1f1b")
    )
    compare_twice = [make()(model, *batch) for _ in range(2)]
    assert all(mx.array_equal(a, b) for (_, a), (_, b) in zip(*map(tree_flatten, compare_twice)))


def other_dtype():
    """A stage whose activations are not those that were agreed on: an error that names both."""
    mesh = mlxdist.mesh(pp=size)
    model, batch = staged("qwen3", mesh), batch_of(8)
    model.set_dtype(mx.float16)
    with pytest.raises(
        (mlxdist.InvalidArgument, mlxdist.Aborted), match="float16 of shape .*float32 of shape .batch, length, 64."
    ):
        mx.eval(value_and_grad(model, default_loss, mesh=mesh, micro_batches=4)(model, *batch))


def killed():
    """A stage that dies in the middle of a step: a named error on the others."""
    mesh = mlxdist.mesh(pp=size)
    model, batch = staged("qwen3", mesh), batch_of(8)
    calls = []

    def loss(model, tokens, lengths):
        calls.append(1)
        if rank == size - 1 and len(calls) == 10:
            os.kill(os.getpid(), signal.SIGKILL)
        return default_loss(model, tokens, lengths)

    step = value_and_grad(model, loss, mesh=mesh, micro_batches=4)
    with pytest.raises((mlxdist.PeerLost, mlxdist.Aborted)):
        for _ in range(10):
            mx.eval(step(model, *batch))


run_scenario(globals())
