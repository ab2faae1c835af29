"""Measures a prefix of the prefix cache of `mlxdist serve` from its disk, against computing it.

    python benchmarks/prefix_disk.py --directory /mnt/ssd

One process computes a prompt, writes its keys and values, evicts them, and has them again: from files that the system
has in memory, from files that it has not, and by computing. The three take turns; figures are medians with the least
and the most. The model is mlx-lm's Llama with random weights.
"""

import os
import sys
import tempfile
import time
from pathlib import Path

import click
import mlx.core as mx
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache
from rich.progress import track

import mlxdist
from mlxdist.serve.prefix_disk import PrefixDisk
from mlxdist.serve.prefix_tree import PrefixTree
from mlxdist.tools.bench.benchmark import repeats_option
from mlxdist.tools.bench.results import results_console, table_of

CHUNK = 512  # tokens of a prefill step
WAYS = ("computed", "disk, files in memory", "disk, files not in memory")


def model_of(hidden: int, layers: int) -> llama.Model:
    args = llama.ModelArgs(
        model_type="llama", hidden_size=hidden, num_hidden_layers=layers, intermediate_size=3 * hidden,
        num_attention_heads=hidden // 64, num_key_value_heads=max(1, hidden // 256), rms_norm_eps=1e-5, vocab_size=1000,
    )  # fmt: skip
    made = llama.Model(args)
    mx.eval(made.parameters())
    return made


def computed(model: llama.Model, tokens: list[int]) -> list:
    caches = make_prompt_cache(model)
    for start in range(0, len(tokens), CHUNK):
        model(mx.array([tokens[start : start + CHUNK]]), cache=caches)
        mx.eval([cache.state for cache in caches])
    return caches


def fetched(model: llama.Model, tree: PrefixTree, tokens: list[int]) -> None:
    reading = tree.read(0, tokens)
    assert reading is not None, "memory has the prefix"
    tree.finish(reading, reading.count(wait=True))
    caches = make_prompt_cache(model)
    found = tree.fetch(0, tokens, caches)
    assert found == len(tokens), f"the disk has {found} tokens"
    mx.eval([cache.state for cache in caches])


def forget(folder: Path) -> None:
    """Has the system drop the files from its memory, where it can."""
    for path in folder.rglob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):  # macOS has none: `sudo purge` before, and one repeat
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@click.command()
@click.option("--tokens", type=click.IntRange(min=1), default=8000, show_default=True, help="Of the prefix.")
@click.option("--hidden", type=click.IntRange(min=64), default=512, show_default=True, help="Width of the model.")
@click.option("--layers", type=click.IntRange(min=1), default=8, show_default=True, help="Its layers.")
@click.option("--directory", type=click.Path(file_okay=False, exists=True), help="Where the files are.")
@repeats_option(5)
def main(tokens: int, hidden: int, layers: int, directory: str | None, repeats: int) -> None:
    """Measures a prefix of the prefix cache from its disk, against computing it."""
    model, prompt, seconds = model_of(hidden, layers), [number % 997 for number in range(tokens)], {}
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        disk = PrefixDisk(folder, 1 << 50, mlxdist.init())
        tree = PrefixTree(can_be_cut=True)
        tree.open(disk, disk.open({"model": "benchmark"}))
        tree.insert(0, prompt, computed(model, prompt))
        while disk.progress()[0] < -(-tokens // CHUNK):
            time.sleep(0.01)
        tree.compared(*disk.progress())
        for _ in track(range(repeats), "rounds", transient=True, disable=not sys.stderr.isatty()):
            for way in WAYS:
                tree.make_room(lambda tokens, states: not tokens)
                tree.make_room(lambda tokens, states: True)
                if way == WAYS[2]:
                    forget(Path(folder))
                begin = time.perf_counter()
                computed(model, prompt) if way == WAYS[0] else fetched(model, tree, prompt)
                seconds.setdefault(way, []).append(time.perf_counter() - begin)
        disk.close()
    print_table(tokens, seconds)


def print_table(tokens: int, seconds: dict[str, list[float]]) -> None:
    middle = {way: sorted(found)[len(found) // 2] for way, found in seconds.items()}
    rows = [
        [way, f"{middle[way]:.3f}", f"{min(found):.3f}-{max(found):.3f}", f"{middle[WAYS[0]] / middle[way]:.1f}"]
        for way, found in seconds.items()
    ]
    results_console().print(table_of(f"{tokens} tokens", ["prefix", "s", "range", "x faster"], rows))


if __name__ == "__main__":
    main()
