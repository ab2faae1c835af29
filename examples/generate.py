"""Generates text with a model of which every rank holds only its shard.

    mlxdist launch -n 2 -- python examples/generate.py MODEL --prompt "Once upon a time"
    mlxdist launch --hostfile rmlx-hosts.json -- python examples/generate.py MODEL --stream

MODEL is a directory as mlx_lm.convert writes it, on every host; with --stream only rank 0 needs it. Layers of experts
stay on their ranks with --experts; `mlxdist shard MODEL --tp 2` shows what each rank will hold.
"""

import argparse

import mlx.core as mx
from mlx_lm.generate import stream_generate

import mlxdist
from mlxdist import nn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--prompt", default="Once upon a time")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--experts", action="store_true", help="whole experts on the ranks, instead of parts of all")
    parser.add_argument(
        "--stream", action="store_true", help="rank 0 reads the files, and sends the others their parts"
    )
    arguments = parser.parse_args()

    group = mlxdist.init()
    grid = {"tp": 1, "ep": group.size()} if arguments.experts else {"tp": group.size()}
    model, tokenizer = nn.load_sharded(arguments.model, group=group, stream=arguments.stream, **grid)
    if group.rank() == 0:
        print(f"{mx.get_active_memory() / 1e6:.1f} MB of weights on each of {group.size()} ranks")
    for token in stream_generate(model, tokenizer, arguments.prompt, max_tokens=arguments.max_tokens):
        if group.rank() == 0:
            print(token.text, end="", flush=True)
    if group.rank() == 0:
        print()


if __name__ == "__main__":
    main()
