"""Several processes train one small language model together, then run it together.

    mlxdist launch -n 2 -- python examples/train_and_generate.py

1. Training, data-parallel: every rank computes the gradients of its own share of each batch, and
   `mlxdist.average_gradients` averages them. The text is the sections on control flow of Python's own
   documentation, which every Python carries; the model is mlx-lm's Qwen3, small.
2. Saving, as mlx-lm saves models: `mlx_lm.generate --model demo-model --prompt ...` opens it.
3. Generation, tensor-parallel: mlx-lm's own `model.shard(group.mlx)` splits every layer over the ranks. The tokens must
   be those of the full model in one process; if they are not, the program fails.

The ranks write a checkpoint now and then. With `mlxdist launch --max-restarts 3 ...` a job that has lost a rank starts
again and goes on from its last one; with --resume, so does a job that you start again yourself.

Runs with 1, 2 or 4 ranks of one machine, without network, and takes less than a minute on two cores.
"""

import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

# Before transformers is imported: never look for a model on the network, and do not miss PyTorch.
os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}

import click
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import mlx_lm
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.generate import generation_stream
from mlx_lm.models import qwen3
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_tokenizer, save_config, save_model
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import mlxdist
import mlxdist.train

SECTIONS = ("if", "while", "for", "try", "with")  # short enough that a small model learns them in 250 steps
SEQUENCE = 64  # tokens
BATCH = 4  # sequences of one step, on all ranks together
LEARNING_RATE = 6e-3
MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 1024,
    "hidden_size": 128,
    "num_hidden_layers": 2,  # deeper models learn less in the time that two cores have here
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
DIRECTORY = click.Path(path_type=Path, file_okay=False, writable=True)
FILE = click.Path(path_type=Path, dir_okay=False, writable=True)


@click.command()
@click.option("--steps", default=250, show_default=True, type=click.IntRange(min=2), help="Training steps.")
@click.option("--prompt", default='The "for" statement', show_default=True, help="What the generated text begins with.")
@click.option("--tokens", default=100, show_default=True, type=click.IntRange(2, 1024), help="Tokens to generate.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(min=0), help="For weights and batches.")
@click.option("--out", default="demo-model", show_default=True, type=DIRECTORY, help="Directory for the trained model.")
@click.option("--checkpoint-every", default=100, show_default=True, type=click.IntRange(min=1), help="In steps.")
@click.option("--resume", is_flag=True, help="Go on from the last checkpoint of an earlier job.")
@click.option("--json", "report", default="demo.json", show_default=True, type=FILE, help="File for the results.")
def main(
    steps: int, prompt: str, tokens: int, seed: int, out: Path, checkpoint_every: int, resume: bool, report: Path
) -> None:
    """Train a small language model on all ranks, then generate text with the model sharded over them."""
    if not prompt:
        raise click.UsageError("The prompt is empty; give at least one word.")
    group = mlxdist.init()
    if MODEL["num_key_value_heads"] % group.size() or BATCH % group.size():
        raise click.UsageError(f"This model can be split over 1, 2 or 4 ranks, not over {group.size()}.")
    if group.rank() == 0:
        report.unlink(missing_ok=True)  # of an earlier run
        report.parent.mkdir(parents=True, exist_ok=True)
    console = Console(quiet=group.rank() != 0, highlight=False, markup=False, soft_wrap=True)
    console.print(f"{group.size()} rank{'s' * (group.size() > 1)}, {group.provider}: {group.provider_reason}")

    checkpoints = Checkpoints(out / "checkpoints", checkpoint_every, resume)
    if not resume and os.environ.get("MLXDIST_RESTART_COUNT", "0") == "0":
        checkpoints.clear()
    text = prose()
    tokenizer = make_tokenizer(text, out)
    model, training = train(np.array(tokenizer.encode(text)), steps, seed, checkpoints, console)
    save(model, tokenizer, out)
    generation = generate_sharded(out, prompt, tokens)

    results = {
        "ranks": group.size(),
        "provider": group.provider,
        "provider_reason": group.provider_reason,
        "tokens_equal": generation.pop("tokens_equal"),
        "loss_first": training["loss_first"],
        "loss_last": training["loss_last"],
        "work_requests": group.stats()["messages_sent"],
        "bytes": bytes_sent(group.stats()),
        "training": training,
        "generation": generation,
        "versions": {
            "mlxdist": mlxdist.__version__,
            "mlx": mx.__version__,
            "mlx_lm": mlx_lm.__version__,
            "python": platform.python_version(),
        },
    }
    console.print(f"\n{generation['text']}\n\n{summary(results)}\n")
    if group.rank() == 0:
        report.write_text(json.dumps(results, indent=2) + "\n")
    if not results["tokens_equal"]:
        sys.exit("the sharded model has not generated the tokens of the full model on every rank")


def prose() -> str:
    """The sections, a line for every paragraph. What is indented is grammar and code; headings end without a point."""
    parts = [part for section in SECTIONS for part in topics[section].split("\n\n")]
    paragraphs = [part for part in parts if part[:1] != " " and part.endswith((".", ":"))]
    return "\n".join(" ".join(part.split()) for part in paragraphs)


def make_tokenizer(text: str, out: Path) -> TokenizerWrapper:
    """Rank 0 trains a tokenizer and saves it; the others wait, and all load the same."""
    if mlxdist.get_rank() == 0:
        train_tokenizer(text, out)
    mlxdist.barrier()
    return load_tokenizer(out)


def train_tokenizer(text: str, out: Path) -> None:
    """Trains a byte-level BPE tokenizer, and saves it the way transformers, and so mlx-lm, loads it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MODEL["vocab_size"],
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>").save_pretrained(out)


class Checkpoints:
    """What training needs to go on, written now and then: weights, the optimizer's state and the losses so far."""

    def __init__(self, directory: Path, every: int, resume: bool) -> None:
        self.directory, self.every, self.resume = directory, every, resume
        self.checkpoints = mlxdist.train.Checkpoints(directory)

    def clear(self) -> None:
        """Those of an earlier training are not this one's."""
        if mlxdist.get_rank() == 0:
            shutil.rmtree(self.directory, ignore_errors=True)
        mlxdist.barrier()

    def load(self, model: nn.Module, optimizer: optim.Optimizer) -> list[float]:
        """The last checkpoint, if there is one. Returns the losses of the steps that were done.

        Without --resume it must be of this job: any other one is an error, not the start of another training.
        """
        state = {"model": model, "optimizer": optimizer, "losses": mx.array([])}
        self.checkpoints.load(state, other_run=self.resume)
        return state["losses"].tolist()

    def save(self, model: nn.Module, optimizer: optim.Optimizer, losses: list[float], steps: int) -> None:
        """If it is time for one. The files are written while training goes on; the last ones are waited for."""
        if len(losses) % self.every == 0 or len(losses) == steps:
            state = {"model": model, "optimizer": optimizer, "losses": mx.array(losses)}
            self.checkpoints.save(len(losses), state)
        if len(losses) == steps:
            self.checkpoints.wait()


def train(
    corpus: np.ndarray, steps: int, seed: int, checkpoints: Checkpoints, console: Console
) -> tuple[nn.Module, dict[str, Any]]:
    """Trains a model on `corpus` (token ids). Returns it, the same on all ranks, and how that went."""
    group = mlxdist.init()
    mx.random.seed(seed)  # on all ranks the same, so that they begin with the same weights
    model = qwen3.Model(qwen3.ModelArgs.from_dict(MODEL))
    warm_up = max(1, steps // 20)
    learning_rate = optim.join_schedules(
        [
            optim.linear_schedule(0, LEARNING_RATE, warm_up),
            optim.cosine_decay(LEARNING_RATE, steps - warm_up, LEARNING_RATE / 20),
        ],
        [warm_up],
    )
    optimizer = optim.AdamW(learning_rate, bias_correction=True)
    loss_and_gradients = nn.value_and_grad(model, loss_of)

    losses = checkpoints.load(model, optimizer)
    resumed_at = len(losses)
    if resumed_at:
        console.print(f"resumed after step {resumed_at}")
    mlxdist.meet()
    tokens_per_second = 0.0
    before = group.stats()
    start = time.perf_counter()
    with progress_bar(console, steps, resumed_at) as advance:
        for rows in islice(batches(corpus, steps, seed), resumed_at, None):
            loss, gradients = loss_and_gradients(model, rows)
            loss = mlxdist.all_sum(loss) / group.size()
            gradients, _ = optim.clip_grad_norm(mlxdist.average_gradients(gradients), max_norm=1.0)
            optimizer.update(model, gradients)
            mx.eval(loss, model.parameters(), optimizer.state)
            losses.append(loss.item())
            mlxdist.set_step(len(losses), steps)  # for `mlxdist top`
            tokens_per_second = (len(losses) - resumed_at) * BATCH * SEQUENCE / (time.perf_counter() - start)
            advance(losses[-1], tokens_per_second)
            checkpoints.save(model, optimizer, losses, steps)

    seconds = time.perf_counter() - start
    costs = communication(before, group.stats())
    require_same_weights(model)
    return model, {
        "steps": steps,
        "resumed_at": resumed_at,
        "loss_first": losses[0],
        "loss_last": losses[-1],
        "seconds": seconds,
        "tokens_per_second": tokens_per_second,
        **costs,
    }


def require_same_weights(model: nn.Module) -> None:
    """Averaged gradients are bitwise equal on all ranks; so must be what was trained with them."""
    sums = mx.stack([mx.abs(weight).sum() for _, weight in tree_flatten(model.parameters())])
    if not mx.array_equal(mlxdist.all_max(sums), mlxdist.all_min(sums)):
        raise RuntimeError(f"rank {mlxdist.get_rank()}: the ranks have trained different weights")


def batches(corpus: np.ndarray, steps: int, seed: int) -> Iterator[mx.array]:
    """This rank's rows of each batch. The batches are the same for any number of ranks."""
    random = np.random.default_rng(seed)
    for _ in range(steps):
        starts = random.integers(0, len(corpus) - SEQUENCE, size=BATCH)
        mine = starts[mlxdist.get_rank() :: mlxdist.get_world_size()]
        yield mx.array(np.stack([corpus[start : start + SEQUENCE + 1] for start in mine]))


def loss_of(model: nn.Module, rows: mx.array) -> mx.array:
    return nn.losses.cross_entropy(model(rows[:, :-1]), rows[:, 1:], reduction="mean")


@contextmanager
def progress_bar(console: Console, steps: int, done: int) -> Iterator[Callable[[float, float], None]]:
    """A bar that moves on a terminal; elsewhere a line for every tenth of the way."""
    columns = (
        TextColumn("training"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}  {task.fields[state]}"),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=console, disable=not console.is_terminal)
    task = bar.add_task("", total=steps, completed=done, state="")

    def advance(loss: float, speed: float) -> None:
        bar.update(task, advance=1, state=f"loss {loss:.2f}  {speed:.0f} tokens/s")
        done = bar.tasks[task].completed
        if not console.is_terminal and done * 10 // steps > (done - 1) * 10 // steps:
            console.print(bar.get_renderable())

    with bar:
        yield advance


def save(model: nn.Module, tokenizer: TokenizerWrapper, out: Path) -> None:
    """Saves the model next to its tokenizer, as mlx-lm does. No rank goes on before it is there."""
    if mlxdist.get_rank() == 0:
        save_model(out, model)
        save_config(MODEL | {"eos_token_id": tokenizer.eos_token_id}, out / "config.json")
    mlxdist.meet()


def generate_sharded(directory: Path, prompt: str, tokens: int) -> dict[str, Any]:
    """Loads the model and generates twice: with the whole model on every rank, then sharded over the ranks."""
    group = mlxdist.init()
    model, tokenizer = mlx_lm.load(str(directory))
    whole = generate(model, tokenizer, prompt, tokens)
    model.shard(group.mlx)
    mlxdist.meet()
    before = group.stats()
    sharded = generate(model, tokenizer, prompt, tokens)
    costs = communication(before, group.stats())
    return {
        "tokens_equal": equal_on_all_ranks([whole, sharded], tokens),
        "text": sharded.text,
        "tokens": len(sharded.tokens),
        "seconds": sharded.seconds,
        "tokens_per_second": sharded.tokens_per_second,
        "tokens_per_second_whole": whole.tokens_per_second,
        **compare(whole, sharded),
        **costs,
    }


@dataclass
class Generation:
    """What a model generated, and the log-probabilities by which it chose every token."""

    tokens: list[int]
    text: str
    seconds: float  # with the prompt
    tokens_per_second: float  # after the first token
    logprobs: mx.array  # float32 (tokens, vocabulary)


def generate(model: nn.Module, tokenizer: TokenizerWrapper, prompt: str, tokens: int) -> Generation:
    """Generates with mlx-lm's KV cache and always takes the most likely token, up to `tokens` of them."""
    prompt_tokens = tokenizer.encode(prompt)
    start = time.perf_counter()
    steps = list(mlx_lm.stream_generate(model, tokenizer, prompt_tokens, max_tokens=tokens))
    mx.synchronize(generation_stream)  # mlx-lm computes one token ahead, which counts
    seconds = time.perf_counter() - start
    tokens_generated = [step.token for step in steps]
    return Generation(
        tokens=tokens_generated,
        text=tokenizer.decode(prompt_tokens + tokens_generated),
        seconds=seconds,
        tokens_per_second=steps[-1].generation_tps,
        logprobs=mx.stack([step.logprobs for step in steps]),
    )


def compare(whole: Generation, sharded: Generation) -> dict[str, float]:
    """How far the two models are from choosing different tokens.

    Sums over ranks are rounded at other places than sums in one process. That changes a token only where the two
    likeliest ones are closer than twice the difference.
    """
    steps = min(len(whole.tokens), len(sharded.tokens))
    differing = [i for i in range(steps) if whole.tokens[i] != sharded.tokens[i]]
    steps = differing[0] + 1 if differing else steps  # later ones continue another text
    best = mx.sort(whole.logprobs[:steps], axis=-1)[:, -2:]
    return {
        "largest_difference": mx.abs(whole.logprobs[:steps] - sharded.logprobs[:steps]).max().item(),
        "smallest_margin": (best[:, 1] - best[:, 0]).min().item(),
    }


def equal_on_all_ranks(generations: list[Generation], tokens: int) -> bool:
    rows = np.full((len(generations), tokens), -1, np.int32)
    for row, generation in zip(rows, generations):
        row[: len(generation.tokens)] = generation.tokens
    rows = mlxdist.all_gather(rows)
    return bool((rows == rows[0]).all())


def communication(before: dict[str, int], after: dict[str, int]) -> dict[str, Any]:
    """What this rank sent between two calls of `group.stats()`, and the time that took."""
    return {
        "collectives": after["collectives"] - before["collectives"],
        "work_requests": after["messages_sent"] - before["messages_sent"],
        "bytes": bytes_sent(after) - bytes_sent(before),
        "seconds_communicating": (after["operation_ns"] - before["operation_ns"]) / 1e9,
        "seconds_waiting": (after["wait_ns"] - before["wait_ns"]) / 1e9,  # for the other ranks; part of the above
    }


def bytes_sent(stats: dict[str, int]) -> int:
    return stats["payload_bytes_sent"] + stats["header_bytes_sent"]


def summary(results: dict[str, Any]) -> str:
    lines = [
        f"provider    {results['provider']}: {results['provider_reason']}",
        f"loss        {results['loss_first']:.2f} in the first step, {results['loss_last']:.2f} in the last",
    ]
    generation = results["generation"]
    for name, unit, units in (("training", "step", "steps"), ("generation", "token", "tokens")):
        phase = results[name]
        lines.append(
            f"{name:<11} {phase['tokens_per_second']:.0f} tokens/s; {phase['collectives']} collectives "
            f"({phase['collectives'] / phase[units]:.1f} a {unit}), {phase['bytes'] / 1e6:.2f} MB in "
            f"{phase['work_requests']} work requests; {phase['seconds_communicating']:.2f} of {phase['seconds']:.2f} s "
            f"in communication, {phase['seconds_waiting']:.2f} s of that waiting"
        )
    lines.append(
        f"tokens      {'equal' if results['tokens_equal'] else 'NOT EQUAL'}, sharded and whole, on all ranks: "
        f"log-probabilities differ by {generation['largest_difference']:.1g} at most, the two likeliest tokens by "
        f"{generation['smallest_margin']:.1g} at least; {generation['tokens_per_second_whole']:.0f} tokens/s whole"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
