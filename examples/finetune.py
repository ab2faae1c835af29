"""Fine-tune a model of mlx-lm on all ranks: adapters (LoRA), or with --full all parameters. A loop to copy and own.

    python examples/finetune.py MODEL DATA
    mlxdist launch -n 2 -- python examples/finetune.py MODEL DATA
    mlxdist launch -n 2 -- python examples/finetune.py MODEL DATA --full

MODEL is a model folder of mlx-lm, DATA a directory with train.jsonl in a format of mlx-lm. With LoRA each rank has the
whole model and a part of each batch; with --full the parameters, their gradients and the optimizer's state are
sharded over the ranks as well. The losses are those of one process. A job that is stopped goes on with --resume.
"""

import json
import os
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it warns when there is no PyTorch

import click
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten
from mlx_lm.tuner.trainer import default_loss
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load_model, load_tokenizer

import mlxdist
from mlxdist import train

LORA = {"rank": 8, "dropout": 0.0, "scale": 20.0}
FOLDER = click.Path(exists=True, path_type=Path, file_okay=False)


@click.command()
@click.argument("model_folder", metavar="MODEL", type=FOLDER)
@click.argument("data", type=FOLDER)
@click.option("--full", is_flag=True, help="Train all parameters, sharded over the ranks.")
@click.option("--steps", default=200, show_default=True, type=click.IntRange(min=1), help="Training steps.")
@click.option("--batch-size", default=4, show_default=True, type=click.IntRange(min=1), help="Rows of all ranks.")
@click.option("--rate", default=1e-4, show_default=True, type=click.FloatRange(min=0), help="Learning rate.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(min=0), help="For adapters and batches.")
@click.option("--out", default="adapters", show_default=True, type=click.Path(path_type=Path), help="For the adapters.")
@click.option("--checkpoints", "directory", default="checkpoints", show_default=True, help="What a restart reads.")
@click.option("--resume", is_flag=True, help="Go on from the last checkpoint of an earlier job.")
def main(
    model_folder: Path, data: Path, full: bool, steps: int, batch_size: int, rate: float, seed: int, out: Path,
    directory: str, resume: bool,
) -> None:  # fmt: skip
    """Fine-tune MODEL with DATA."""
    # Ranks along dp have a replica of the model each; those along fsdp a shard. Both have different rows of a batch.
    mesh = mlxdist.mesh(fsdp=-1) if full else mlxdist.mesh(dp=-1)
    is_first = mesh.group.rank() == 0
    seeds = train.Seeds(seed, mesh=mesh)  # before the model: new adapters are then equal on all ranks
    model = make_model(model_folder, full, mesh)
    optimizer = optim.AdamW(learning_rate=rate)
    optimizer.init(model.trainable_parameters())  # the state of this rank's shards, before a checkpoint is loaded

    dataset = train.load_dataset(data, load_tokenizer(model_folder))
    batches = train.Batches(dataset, batch_size, seed=seeds.seed, mesh=mesh)
    # MLX's nn.value_and_grad, with the gradients of the whole batch: they travel while the backward pass computes.
    loss_and_gradients = train.value_and_grad(model, default_loss, mesh=mesh)

    state = {"model": model, "optimizer": optimizer, "batches": batches, "seeds": seeds}
    with (
        train.Checkpoints(directory, mesh=mesh, trainable_only=True) as checkpoints,
        train.Control(group=mesh.group, save_every=100) as control,  # saves and stops all ranks at the same step
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
            (loss, tokens), gradients = loss_and_gradients(model, batch, lengths)
            gradients, _ = train.clip_grad_norm(gradients, 1.0, model=model, mesh=mesh)
            optimizer.update(model, gradients)
            total, count = mlxdist.all_sum(mx.stack([loss * tokens, tokens.astype(mx.float32)]), group=mesh.group)
            mx.eval(model.trainable_parameters(), optimizer.state, total, count)
            if is_first:
                print(f"step {batches.step}: loss {(total / count).item():.4f}", flush=True)
        checkpoints.save(batches.step, state)

    if is_first and full:
        print(f"To get a model folder: mlxdist checkpoint convert {directory} FOLDER --like {model_folder}")
    elif is_first:
        save_adapters(out, model)


def make_model(folder: Path, full: bool, mesh: mlxdist.Mesh) -> nn.Module:
    """The model, with what is to be trained not frozen. Lazy: a rank reads no more than it keeps."""
    model, _ = load_model(folder, lazy=True)
    if full:
        train.fully_shard(model, mesh=mesh)
    else:
        model.freeze()
        linear_to_lora_layers(model, len(model.layers), LORA)
    return model.train()


def save_adapters(out: Path, model: nn.Module) -> None:
    """As mlx-lm's `lora` does, so that `mlx_lm.generate --adapter-path` opens them."""
    out.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(out / "adapters.safetensors"), dict(tree_flatten(model.trainable_parameters())))
    config = {"fine_tune_type": "lora", "num_layers": len(model.layers), "lora_parameters": LORA}
    (out / "adapter_config.json").write_text(json.dumps(config, indent=4) + "\n")


if __name__ == "__main__":
    main()
