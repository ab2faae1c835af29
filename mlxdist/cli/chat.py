"""The command line of `mlxdist chat`. It must be cheap to import: `mlxdist --help` does."""

from __future__ import annotations

import sys
from typing import Any

import click

from mlxdist.cluster.hostfile.options import HostSelection

from .serve import COUNT, layout_of, layout_options, max_context_option, model_options, start_ranks, template_option

__all__ = ["chat"]


@click.command()
@model_options
@layout_options
@click.option("--system-prompt", default="", metavar="TEXT", help="Before the first question.")
@click.option("--max-tokens", "-m", type=COUNT, default=256, show_default=True, help="Of an answer.")
@click.option("--temp", type=click.FloatRange(0, 100), default=0.0, show_default=True, help="Temperature.")
@click.option("--top-p", type=click.FloatRange(0, 1), default=1.0, show_default=True, help="Nucleus sampling.")
@click.option("--seed", type=click.IntRange(0, 2**64 - 1), help="Of each answer.  [default: another one each time]")
@max_context_option
@template_option
@click.option("--interactive/--no-interactive", default=None, help="Prompts and statistics.  [default: on a terminal]")
@click.pass_context
def chat(
    context: click.Context,
    model: str,
    ranks: int | None,
    selection: HostSelection,
    interactive: bool | None,
    **given: Any,
) -> None:
    """Chat with a model of mlx-lm in the terminal, sharded over all ranks of a job.

    \b
        mlxdist chat models/qwen
        mlxdist chat models/qwen -n 2 --system-prompt "Be brief."
        mlxdist chat models/qwen --hostfile rmlx-hosts.json
        echo "What is a ring?" | mlxdist chat models/qwen

    MODEL is as for `mlxdist serve`. Each line is a question: q exits, r forgets what was said, h helps. Ctrl-C stops an
    answer; twice before a question, it exits. Without a terminal only answers go to the standard output.
    """
    if interactive is None:
        interactive = sys.stdin is not None and sys.stdin.isatty()
    if ranks is not None or selection.hostfile is not None:
        shown = "--interactive" if interactive else "--no-interactive"
        launcher = ["--stdin", "0", "--no-prefix", "--pass-sigint"]
        start_ranks(context, model, ranks, selection, given, launcher=launcher, more=[shown])
        return
    from mlxdist.serve.chat import ChatOptions
    from mlxdist.serve.chat import chat as run

    own = (
        "stream_weights",
        "system_prompt",
        "max_tokens",
        "temp",
        "top_p",
        "seed",
        "max_context",
        "chat_template_args",
    )
    options = {name: given[name] for name in own}
    run(ChatOptions(model, layout=layout_of(given), interactive=interactive, **options))
