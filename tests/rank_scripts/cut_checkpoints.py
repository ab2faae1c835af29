"""One rank of test_checkpoint.py: checkpoints of a model that is sharded over the ranks. Arguments: a
directory."""

import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchGLU

import mlxdist
import mlxdist.nn as mnn
from mlxdist.train import checkpoint_file

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import tiny_models

group = mlxdist.init()
rank, size = group.rank(), group.size()
directory = Path(sys.argv[1])
PROMPT = mx.array([[5, 17, 3, 60, 21, 9, 44]])


def whole() -> nn.Module:
    mx.random.seed(0)
    return tiny_models.build("llama")


def cut() -> nn.Module:
    model = whole()
    return mnn.shard_model(model, mnn.plan_shards(model, tp=size), group)


def refused() -> None:
    """The parameters of one rank are not the model, whatever has sharded it; those of a full model are."""
    by_mlx_lm = whole()
    by_mlx_lm.shard(group.mlx)
    linear = mnn.ColumnParallelLinear.from_linear(nn.Linear(8, 8), group=group)
    adapted = mnn.LoRALinear.from_base(linear, r=2)
    experts = mnn.ExpertParallelSwitchGLU.from_switch(SwitchGLU(8, 8, 4), group)
    for model in (cut(), by_mlx_lm, linear, adapted, experts):
        with pytest.raises(mlxdist.InvalidArgument, match=r"parameters of \w+, .* group=group\)"):
            mlxdist.save_checkpoint(directory / f"refused-{rank}", {"model": model.parameters()}, 1)
    assert not list(directory.glob("refused-*"))
    mlxdist.save_checkpoint(directory / f"whole-{rank}", {"model": whole().parameters()}, 1)


def comes_back() -> None:
    model, optimizer = cut(), optim.AdamW(1e-3)
    gradients = nn.value_and_grad(model, lambda model: model(PROMPT).square().mean())(model)[1]
    optimizer.update(model, gradients)
    logits = model(PROMPT)
    for step in (10, 20, 30):
        tree = {"model": model.parameters(), "optimizer": optimizer.state}
        path = mlxdist.save_checkpoint(directory / "parts", tree, step, group=group)
    assert path == directory / "parts" / f"rank-{rank}-of-{size}" / "step-00000030.safetensors"

    found = mlxdist.latest_checkpoint(directory / "parts", group=group)
    tree, step = mlxdist.load_checkpoint(found, group=group)
    again = cut()
    again.update(tree["model"])
    assert (found, step) == (path, 30) and mx.array_equal(again(PROMPT), logits)
    state = dict(tree_flatten(optimizer.state))
    assert all(mx.array_equal(value, state[name]) for name, value in tree_flatten(tree["optimizer"]))


def other_parts() -> None:
    """Only what all ranks have, and only this rank's."""
    with pytest.raises(mlxdist.InvalidArgument, match="has the shard rank-0-of-2 .*; pass group="):
        mlxdist.latest_checkpoint(directory / "parts")
    (theirs,) = (directory / "parts" / f"rank-{1 - rank}-of-2").glob("*30.safetensors")
    with pytest.raises(mlxdist.InvalidArgument, match=f"has the shard rank-{1 - rank}-of-2 of a model that is"):
        mlxdist.load_checkpoint(theirs)
    with pytest.raises(mlxdist.InvalidArgument, match="has the shard rank-1-of-2 .*; not rank-0-of-2 .rank 0 on"):
        mlxdist.load_checkpoint(theirs, group=group)
    mlxdist.barrier()
    if rank == 1:
        theirs.parent.with_name("rank-1-of-2").joinpath("step-00000030.safetensors").unlink()
    mlxdist.barrier()
    assert mlxdist.latest_checkpoint(directory / "parts", group=group).name == "step-00000020.safetensors"


def lose(name: str, step: int, *ranks: int) -> None:
    """As if these ranks had been killed before they renamed their shards."""
    mlxdist.barrier()
    if rank in ranks:
        (directory / name / f"rank-{rank}-of-{size}" / f"step-{step:08}.safetensors").unlink()
    mlxdist.barrier()


def steps(name: str) -> list[int]:
    return sorted(int(path.stem[5:]) for path in (directory / name / f"rank-{rank}-of-{size}").glob("step-*"))


def killed_between_the_parts() -> None:
    """What only some ranks have is no checkpoint: it neither stops the next start nor becomes shard of its own."""
    tree = {"w": mx.ones(1)}
    for step in (100, 200):
        mlxdist.save_checkpoint(directory / "killed", tree, step, group=group)
    lose("killed", 200, 1)
    found = mlxdist.latest_checkpoint(directory / "killed", group=group)
    assert mlxdist.load_checkpoint(found, group=group)[1] == 100
    mlxdist.save_checkpoint(directory / "killed", tree, 150, group=group)
    assert steps("killed") == [100, 150]
    with pytest.raises(mlxdist.InvalidArgument, match="step 150, later than 140"):
        mlxdist.save_checkpoint(directory / "killed", tree, 140, group=group)
    assert steps("killed") == [100, 150]


def killed_in_the_first_save() -> None:
    tree = {"w": mx.ones(1)}
    mlxdist.save_checkpoint(directory / "first", tree, 100, group=group)
    lose("first", 100, 1)
    assert mlxdist.latest_checkpoint(directory / "first", group=group) is None
    mlxdist.save_checkpoint(directory / "first", tree, 50, group=group)
    assert steps("first") == [50]

    for step in (100, 200):
        mlxdist.save_checkpoint(directory / "lost", tree, step, group=group)
    lose("lost", 100, 1)
    lose("lost", 200, 1)
    for call in (
        lambda: mlxdist.latest_checkpoint(directory / "lost", group=group),
        lambda: mlxdist.save_checkpoint(directory / "lost", tree, 150, group=group),
    ):
        with pytest.raises(mlxdist.InvalidArgument, match="no step with the shards of all 2 ranks"):
            call()
    assert steps("lost") == ([100, 200] if rank == 0 else [])


def saved_by_another_run(name: str, *steps: int) -> None:
    part = f"rank-{rank}-of-{size}"
    (directory / name / part).mkdir(parents=True)
    for step in steps:
        path = directory / name / part / f"step-{step:08}.safetensors"
        checkpoint_file.write(path, {"w": mx.ones(1)}, checkpoint_file.About(step, "another", part))


def parts_of_another_run_stay() -> None:
    """Also where this one goes on with it."""
    saved_by_another_run("theirs", *(100, 200)[: size - rank])
    mlxdist.barrier()
    found = mlxdist.latest_checkpoint(directory / "theirs", group=group)
    with pytest.raises(mlxdist.InvalidArgument, match=r"of another run, another; .* .rank 0 on"):
        mlxdist.load_checkpoint(found, group=group)
    assert mlxdist.load_checkpoint(found, other_run=True, group=group)[1] == 100
    with pytest.raises(mlxdist.InvalidArgument, match="step 200, later than 150"):
        mlxdist.save_checkpoint(directory / "theirs", {"w": mx.ones(1)}, 150, group=group)
    assert steps("theirs") == [100, 200][: size - rank]

    saved_by_another_run("their-first", *(100,)[: 1 - rank])
    mlxdist.barrier()
    for call in (
        lambda: mlxdist.latest_checkpoint(directory / "their-first", group=group),
        lambda: mlxdist.save_checkpoint(directory / "their-first", {"w": mx.ones(1)}, 150, group=group),
    ):
        with pytest.raises(mlxdist.InvalidArgument, match="no step with the shards of all 2 ranks"):
            call()
    assert steps("their-first") == [100][: 1 - rank]


def parts_of_two_runs() -> None:
    """Each is full, and they are of one step: together they are no checkpoint."""
    tree = {"w": mx.ones(1)}
    path = mlxdist.save_checkpoint(directory / "two", tree, 100, group=group)
    if rank == 1:
        checkpoint_file.write(path, tree, checkpoint_file.About(100, "another", path.parent.name))
    with pytest.raises(mlxdist.InvalidArgument, match="ranks disagree .*another"):
        mlxdist.load_checkpoint(path, other_run=True, group=group)
    with pytest.raises(mlxdist.InvalidArgument, match="rank-1-of-2.* is of another run, another; .* .rank 1 on"):
        mlxdist.load_checkpoint(path, group=group)
    path = mlxdist.save_checkpoint(directory / "damaged", tree, 100, group=group)
    if rank == 1:
        path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(mlxdist.InvalidArgument, match="rank-1-of-2.* is damaged: its CRC-32 differs"):
        mlxdist.load_checkpoint(path, group=group)


def failures() -> None:
    """Of one rank are errors on all."""
    if rank == 1:
        (directory / "file").mkdir()
        (directory / "file" / "rank-1-of-2").write_text("mine")
    mlxdist.barrier()
    tree = {"w": mx.ones(1)}
    for call in (
        lambda: mlxdist.save_checkpoint(directory / "file", tree, 1, group=group),
        lambda: mlxdist.latest_checkpoint(directory / "file", group=group),
    ):
        with pytest.raises(mlxdist.InvalidArgument, match="rank-1-of-2 is a file, not a directory"):
            call()
    with pytest.raises(mlxdist.InvalidArgument, match="ranks disagree"):
        mlxdist.save_checkpoint(directory / "steps", tree, rank + 1, group=group)
    with pytest.raises(mlxdist.InvalidArgument, match="None is no path"):
        mlxdist.save_checkpoint(None if rank == 1 else directory / "steps", tree, 1, group=group)


for check in (
    refused,
    comes_back,
    other_parts,
    killed_between_the_parts,
    killed_in_the_first_save,
    parts_of_another_run_stay,
    parts_of_two_runs,
    failures,
):
    check()
    mlxdist.barrier()
print("done")
