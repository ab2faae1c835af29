"""One rank of test_batches_on_ranks.py: `check` is the name of a function below."""

import random
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx import optimizers
from mlx.utils import tree_map
from mlx_lm.tuner.trainer import default_loss
from scenarios import group, rank, run_scenario, size

import mlxdist
from mlxdist import train
from mlxdist.train.seeds import mix

DATASET = [[i + 1] * (i % 5 + 1) for i in range(30)]


def gathered(rows: list[int]) -> list[list[int]]:
    """Of all ranks; they may have different numbers of rows."""
    padded = np.full((1, 64), -1, np.int32)
    padded[0, : len(rows)] = rows
    return [row[row >= 0].tolist() for row in mlxdist.all_gather(padded)]


def numbers(batch: tuple[mx.array, mx.array]) -> list[int]:
    return (np.array(batch[0])[:, 0] - 1).tolist()


def reference(steps: int, batch_size: int = 12, seed: int = 3) -> list[list[int]]:
    """The rows of one process."""
    alone = group.split(rank)
    batches = train.Batches(DATASET, batch_size, seed=seed, group=alone)
    return [numbers(next(batches)) for _ in range(steps)]


def parts() -> None:
    batches = train.Batches(DATASET, 12, seed=3)
    for expected in reference(6):
        own = gathered(numbers(next(batches)))
        assert sum(own, []) == expected and {len(rows) for rows in own} == {12 // size}, own
    shares = list(range(1, size + 1))
    batches = train.Batches(DATASET, 12, seed=3, rank_shares=shares)
    for expected in reference(3):
        own = gathered(numbers(next(batches)))
        assert sum(own, []) == expected and [len(rows) for rows in own] == sorted(map(len, own)), own
    any_batches()


def any_batches() -> None:
    """Whatever the arguments are, the parts of the ranks together are the rows of one process, from any position."""
    drawn = random.Random(9)
    alone = group.split(rank)
    for _ in range(60):
        micro_batches = drawn.randint(1, 3)
        batch_size = size * micro_batches * drawn.randint(1, 3)
        count = batch_size + drawn.randint(0, 40)
        dataset = [[number + 1] * drawn.randint(1, 6) for number in range(count)]
        options = {"seed": drawn.randrange(2**63), "shuffle": drawn.random() < 0.7}
        options["skip_steps"] = drawn.sample(range(9), 3)
        if drawn.random() < 0.3 and sum(map(len, dataset)) > 3 * batch_size:
            options |= {"packed": True, "max_seq_length": 3}
        shares = [drawn.uniform(0.5, 4) for _ in range(size)] if drawn.random() < 0.5 else None
        ours = train.Batches(dataset, batch_size, micro_batches=micro_batches, rank_shares=shares, **options)
        theirs = train.Batches(dataset, batch_size, group=alone, **options)
        if drawn.random() < 0.5:
            theirs.restore(theirs.state | {"position": drawn.randrange(10**9), "step": drawn.randrange(8)})
            ours.restore(theirs.state)
        for _ in range(4):
            batch, lengths = next(ours)
            assert len(batch) % micro_batches == 0 and lengths.shape == (len(batch), 2)
            assert sum(gathered(numbers((batch, lengths))), []) == numbers(next(theirs))
            assert ours.state == theirs.state


def meshes() -> None:
    """Ranks along tp and cp have the same rows, those along dp and fsdp parts."""
    for sizes in ({"tp": size}, {"cp": size}, {"fsdp": size}, {"dp": 2, "tp": -1}, {"dp": 2, "fsdp": -1}):
        mesh = mlxdist.mesh(**sizes)
        parts = mesh["dp", "fsdp"]
        own = gathered(numbers(next(train.Batches(DATASET, 12, seed=3, mesh=mesh))))
        found = {}
        for other, place in enumerate(mlxdist.all_gather(np.array([parts.rank()], np.int32)).tolist()):
            assert found.setdefault(place, own[other]) == own[other]
        assert sum((found[place] for place in sorted(found)), []) == reference(1)[0]


def save(directory: str, first: str) -> None:
    """Five steps from ``first``, of which those before are in a checkpoint of another number of ranks."""
    expected = reference(10)
    batches, seeds = train.Batches(DATASET, 12, seed=8 if int(first) else 3), train.Seeds()
    tree, checkpoints = {"batches": batches, "seeds": seeds}, train.Checkpoints(directory)
    checkpoints.load(tree, other_run=True)
    assert batches.step == int(first)
    for step in range(batches.step, batches.step + 5):
        assert sum(gathered(numbers(next(batches))), []) == expected[step]
    checkpoints.save(batches.step, tree)
    checkpoints.wait()
    print(seeds.seed)


def training(directory: str) -> None:
    """Ten steps equal five, a restart and five: the rows, what dropout has drawn, losses and parameters, bitwise."""
    ten = trained(f"{directory}/ten", range(10))
    trained(f"{directory}/five", range(5))
    resumed = trained(f"{directory}/five", range(5, 10))
    assert resumed["losses"] == ten["losses"][5:] and resumed["parameters"] == ten["parameters"]
    assert len(set(same_on(str(ten["losses"])))) == size and len(set(same_on(ten["parameters"]))) == 1


def trained(directory: str, steps: range) -> dict:
    """Makes everything from nothing, as a new process does; a range that does not begin at 0 resumes."""
    seeds = train.Seeds(5 if steps.start == 0 else None)
    model = nn.Sequential(nn.Embedding(32, 16), nn.Dropout(0.3), nn.Linear(16, 32))
    optimizer = optimizers.Adam(1e-2)
    batches = train.Batches(DATASET, 12, seed=seeds.seed)
    tree = {"model": model, "optimizer": optimizer, "batches": batches, "seeds": seeds}
    checkpoints = train.Checkpoints(directory)
    assert (checkpoints.load(tree) or 0) == batches.step == steps.start
    step_fn, losses = nn.value_and_grad(model, default_loss), []
    for step in steps:
        assert batches.step == step
        seeds.set_step(step)
        (loss, _), gradients = step_fn(model, *next(batches))
        optimizer.update(model, train.average_gradients(gradients))
        losses.append(loss.item())
    checkpoints.save(batches.step, tree)
    checkpoints.wait()
    return {"losses": losses, "parameters": str(tree_map(lambda p: p.tolist(), model.parameters()))}


def same_on(text: str) -> list[int]:
    """A hash of each rank's text."""
    return mlxdist.all_gather(np.array([mix(text) >> 33], np.int32)).tolist()


def refused(directory: str) -> None:
    """The same error on all ranks, whichever rank has the cause."""
    last = rank == size - 1
    start = train.Batches(DATASET, size).state
    for make, problem in (
        (lambda: train.Seeds(7 if last else 8), "ranks disagree about the seed: 8 on rank 0, 7 on rank"),
        (lambda: train.Seeds(-1 if last else 8), "seed is -1"),
        (lambda: train.Batches(DATASET, size + 1), f"a batch of {size + 1} rows does not divide into {size} ranks"),
        (lambda: train.Batches(DATASET[last:], size), "ranks disagree about the arguments"),
        (lambda: train.Batches(DATASET, size * (1 + last)), "ranks disagree about the arguments"),
        (lambda: train.Batches([{}] if last else DATASET, size, 4, packed=True), "sample 0 of the dataset is a dict"),
        (lambda: train.Batches(DATASET, size).restore({} if last else {"step": 0}), "the state has no"),
        (
            lambda: train.Batches(DATASET, size).restore(None if last else {}),
            "the state is a NoneType|the state has no",
        ),
        (lambda: train.Seeds(8).restore(None if last else {"seed": 8}), "the state is a NoneType"),
        (lambda: train.Batches(DATASET, size).restore(start | {"position": size * last}), "ranks disagree"),
        (lambda: train.Seeds(8).restore({"seed": 9}), "the state has seed 9, and this training was given 8"),
        (lambda: train.load_dataset(Path(directory) / f"{last:d}.jsonl", None), "line 2 is not JSON"),
        (lambda: train.load_dataset(Path(directory) / f"{2 + last}.jsonl", None), "ranks disagree about the arguments"),
    ):
        with pytest.raises(mlxdist.Mismatch if "disagree" in problem else mlxdist.InvalidArgument, match=problem):
            make()
    mlxdist.barrier()


run_scenario(globals())
