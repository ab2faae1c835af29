"""Pretrain a model of mlx-lm, from random weights, on all ranks. A loop to copy and own.

    python examples/pretrain.py MODEL DATA
    mlxdist launch -n 4 -- python examples/pretrain.py MODEL DATA --fsdp 2

MODEL is a folder with the config and the tokenizer of a model, DATA a directory with train.jsonl, or a file (.txt).
With --fsdp 2 the parameters, their gradients and the optimizer's state are sharded over 2 ranks, and each such pair
has a replica. The losses are those of one process. A job that is stopped goes on with --resume, on any number of ranks.
"""

import os
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it warns when there is no PyTorch

import click
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx_lm.tuner.trainer import default_loss
from mlx_lm.utils import _get_classes, load_config, load_tokenizer

import mlxdist
from mlxdist import train

FOLDER = click.Path(exists=True, path_type=Path, file_okay=False)
COUNT = click.IntRange(min=1)


@click.command()
@click.argument("model_folder", metavar="MODEL", type=FOLDER)
@click.argument("data", type=click.Path(exists=True, path_type=Path))
@click.option("--fsdp", default=1, show_default=True, type=COUNT, help="Ranks that the parameters are sharded over.")
@click.option("--steps", default=1000, show_default=True, type=COUNT, help="Training steps.")
@click.option("--batch-size", default=8, show_default=True, type=COUNT, help="Rows of all ranks.")
@click.option("--micro-batches", default=1, show_default=True, type=COUNT, help="Micro-batches of a step.")
@click.option("--length", default=512, show_default=True, type=click.IntRange(min=2), help="Tokens of a row.")
@click.option("--rate", default=1e-3, show_default=True, type=click.FloatRange(min=0), help="Highest learning rate.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(min=0), help="For weights and batches.")
@click.option("--checkpoints", "directory", default="checkpoints", show_default=True, help="What a restart reads.")
@click.option("--resume", is_flag=True, help="Go on from the last checkpoint of an earlier job.")
def main(
    model_folder: Path, data: Path, fsdp: int, steps: int, batch_size: int, micro_batches: int, length: int,
    rate: float, seed: int, directory: str, resume: bool,
) -> None:  # fmt: skip
    """Train a model like MODEL, from random weights, with DATA."""
    mesh = mlxdist.mesh(dp=-1, fsdp=fsdp)
    if mesh.group.rank() == 0:
        print(mesh, flush=True)
    seeds = train.Seeds(seed, mesh=mesh)  # before the model: its weights are then equal on all ranks
    model = make_model(model_folder)
    train.fully_shard(model, mesh=mesh)  # leaves the model as it is where fsdp is 1
    optimizer = optim.AdamW(train.warm_up(rate, steps=max(1, steps // 20)))
    optimizer.init(model.trainable_parameters())  # the state of this rank's shards, before a checkpoint is loaded

    dataset = train.load_dataset(data, load_tokenizer(model_folder))
    # Packed: each row is `length` tokens, from all texts one after the other.
    batches = train.Batches(
        dataset, batch_size, length, seed=seeds.seed, packed=True, micro_batches=micro_batches, mesh=mesh
    )
    # MLX's nn.value_and_grad, with the gradients of the whole batch: they travel while the backward pass computes.
    loss_and_gradients = train.value_and_grad(model, default_loss, mesh=mesh, micro_batches=micro_batches)
    throughput = train.Throughput(train.flops_per_token(model, length), group=mesh.group)

    state = {"model": model, "optimizer": optimizer, "batches": batches, "seeds": seeds}
    with (
        train.Checkpoints(directory, mesh=mesh) as checkpoints,
        # Saves and stops all ranks at the same step: `touch STOP`, SIGTERM, SIGUSR1, the end of a SLURM job.
        train.Control(group=mesh.group, save_every=100, kill_switch="STOP") as control,
    ):
        checkpoints.load(state, other_run=resume)
        while batches.step < steps:
            decision = control.decide(batches.step)
            if decision.save:
                checkpoints.save(batches.step, state)  # goes on in the background
            if decision.stop:
                return
            batch, lengths = next(batches)  # this rank's rows
            seeds.set_step(batches.step)
            with throughput.step() as step:
                (loss, tokens), gradients = loss_and_gradients(model, batch, lengths)
                gradients, _ = train.clip_grad_norm(gradients, 1.0, model=model, mesh=mesh)
                optimizer.update(model, gradients)
                sums = mlxdist.all_sum(mx.stack([loss * tokens, tokens.astype(mx.float32)]), group=mesh.group)
                mx.eval(model.parameters(), optimizer.state, sums)
                step.tokens = int(sums[1])
            if batches.step % 10 == 0 or batches.step == steps:
                speed = throughput.report()["tokens_per_second"]  # of all ranks, which all ask
                if mesh.group.rank() == 0:
                    loss = (sums[0] / sums[1]).item()
                    print(f"step {batches.step}: loss {loss:.4f}, {speed:.0f} tokens/s", flush=True)
        checkpoints.save(batches.step, state)

    if mesh.group.rank() == 0:
        print(f"To get a model folder: mlxdist checkpoint convert {directory} FOLDER --like {model_folder}")


def make_model(folder: Path) -> nn.Module:
    """A new model of the config of `folder`. Lazy: a rank that keeps a shard computes one layer at a time in full."""
    config = load_config(folder)
    kind, arguments = _get_classes(config)
    return kind(arguments.from_dict(config)).train()


if __name__ == "__main__":
    main()
