"""The command line of `mlxdist serve`. It must be cheap to import: `mlxdist --help` does."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from mlxdist.base.child_process import module_command
from mlxdist.base.environment import MAX_RANKS, MAX_RESTARTS, VARIABLES
from mlxdist.cluster.hostfile.options import HostSelection, host_options

if TYPE_CHECKING:
    from mlxdist.serve.proxy import Proxy

__all__ = ["serve"]

_KEY = "MLXDIST_API_KEY"
_COUNT = click.IntRange(min=1)
_RESTARTS = 3


def _json(context: click.Context, parameter: click.Parameter, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise click.BadParameter(f"{text!r:.80} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise click.BadParameter(f"{text!r:.80} is not a JSON object")
    return found


@click.command()
@click.argument("model")
@click.option(
    "-n", "ranks", type=click.IntRange(1, MAX_RANKS), metavar="N", help="Number of ranks; with hosts: on each."
)
@host_options
@click.option("--host", default="127.0.0.1", show_default=True, help="Where rank 0 listens.")
@click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True, help="0 for a free one.")
@click.option("--proxy", hidden=True, default="", help="Address of the launcher's proxy, for which rank 0 listens.")
@click.option(
    "--max-restarts",
    type=click.IntRange(0, MAX_RESTARTS),
    metavar="K",
    help="When a rank has failed, start all again, at most K times.  [default: 3 where rank 0 is on this machine]",
)
@click.option("--pipeline", is_flag=True, help="Each rank has some of the layers, instead of a shard of each.")
@click.option("--api-key", envvar=_KEY, default="", metavar="KEY", help=f"That clients send.  [env: {_KEY}]")
@click.option("--allowed-origins", default="", metavar="A,B", help="Origins of web pages that may use it; * for all.")
@click.option("--max-queue", type=_COUNT, default=256, show_default=True, help="Requests that wait; more get 429.")
@click.option(
    "--request-timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=600.0,
    show_default=True,
    help="Seconds of a request.",
)
@click.option("--max-context", type=click.IntRange(min=2), help="Tokens of prompt and answer.  [default: the model's]")
@click.option("--decode-concurrency", type=_COUNT, default=32, show_default=True, help="Requests that run at a time.")
@click.option("--prompt-concurrency", type=_COUNT, default=8, show_default=True, help="Prompts in a chunk.")
@click.option("--prefill-step-size", type=_COUNT, default=512, show_default=True, help="Tokens of a prompt in a chunk.")
@click.option("--prompt-cache-size", type=_COUNT, default=64, show_default=True, help="Sequences in the prefix cache.")
@click.option(
    "--prompt-cache-tokens", type=click.IntRange(min=0), default=1 << 15, show_default=True, help="Their tokens in all."
)
@click.option("--max-tokens", type=_COUNT, default=512, show_default=True, help="Of an answer, unless it says.")
@click.option("--temp", type=click.FloatRange(0, 100), default=0.0, show_default=True, help="Its temperature.")
@click.option("--top-p", type=click.FloatRange(0, 1), default=1.0, show_default=True, help="Its top_p.")
@click.option("--top-k", type=click.IntRange(min=0), default=0, show_default=True, help="Its top_k; 0 for none.")
@click.option("--min-p", type=click.FloatRange(0, 1), default=0.0, show_default=True, help="Its min_p.")
@click.option(
    "--chat-template-args", callback=_json, default="{}", metavar="JSON", help="Such as '{\"enable_thinking\": false}'."
)
@click.pass_context
def serve(
    context: click.Context,
    model: str,
    ranks: int | None,
    selection: HostSelection,
    max_restarts: int | None,
    api_key: str,
    **given: Any,
) -> None:
    """Serve a model of mlx-lm over OpenAI's HTTP API, sharded over all ranks of a job.

    \b
        mlxdist serve models/qwen
        mlxdist serve models/qwen -n 2
        mlxdist serve models/qwen --hostfile rmlx-hosts.json --host 0.0.0.0
        mlxdist launch --hostfile rmlx-hosts.json --log-dir logs -- mlxdist serve models/qwen

    MODEL is a directory, or org/name after `hf download org/name`, on every host. With -n, --hostfile or --hosts, ranks
    are started as `mlxdist launch` does, whose other options are for the last form.
    """
    if api_key:
        api_key = next(variable for variable in VARIABLES if variable.name == _KEY).value(api_key)
    if ranks is not None or selection.hostfile is not None:
        if api_key:
            os.environ[_KEY] = api_key  # the launcher hands it on, and `ps` does not show it
        where = [*selection.arguments, *(["-n", str(ranks)] if ranks else [])]
        words = _words(context, given)
        proxy = None
        if _has_first_rank(selection):
            proxy = _proxy(given["host"], given["port"], given["request_timeout"])
            words += ["--proxy", proxy.address]
            max_restarts = _RESTARTS if max_restarts is None else max_restarts
        command = module_command("mlxdist", "serve", model, *words, python=selection.python)
        _launch([*where, "--max-restarts", str(max_restarts or 0), "--", *command], proxy)
        return
    if max_restarts is not None:
        raise click.UsageError("--max-restarts is for ranks that this command starts: -n, --hostfile or --hosts.")
    from mlxdist.serve.server import BatchLimits, ServeOptions
    from mlxdist.serve.server import serve as run

    def some(*names: str) -> dict[str, Any]:
        return {name: given[name] for name in names}

    limits = some(
        "decode_concurrency", "prompt_concurrency", "prefill_step_size", "prompt_cache_size", "prompt_cache_tokens"
    )
    options = ServeOptions(
        model,
        limits=BatchLimits(**limits),
        defaults=some("max_tokens", "temp", "top_p", "top_k", "min_p"),
        allowed_origins=tuple(filter(None, given["allowed_origins"].split(","))),
        api_key=api_key,
        **some("host", "port", "proxy", "pipeline", "max_queue"),
        **some("request_timeout", "max_context", "chat_template_args"),
    )
    sys.exit(run(options))


def _words(context: click.Context, given: dict[str, Any]) -> list[str]:
    """The options that the user has typed, for the ranks."""
    words = []
    for parameter in context.command.params:
        if parameter.name in given and context.get_parameter_source(parameter.name) == ParameterSource.COMMANDLINE:
            value = given[parameter.name]
            words.append(parameter.opts[0])
            if not isinstance(value, bool):
                words.append(json.dumps(value) if isinstance(value, dict) else str(value))
    return words


def _has_first_rank(selection: HostSelection) -> bool:
    """Whether rank 0 is on this machine."""
    if selection.hostfile is None:
        return True
    from mlxdist.cluster.ssh.this_machine import is_this_machine

    return is_this_machine(selection.hostfile.hosts[0].name)


def _proxy(host: str, port: int, request_timeout: float) -> Proxy:
    from mlxdist.launch.local import allow_descriptors
    from mlxdist.serve.listener import MAX_CONNECTIONS, listen
    from mlxdist.serve.proxy import Proxy

    allow_descriptors(0, connections=2 * MAX_CONNECTIONS)
    return Proxy(listen(host, port), request_timeout)


def _launch(words: list[str], proxy: Proxy | None) -> None:
    from .launch import launch

    launch.main(words, prog_name="mlxdist launch", standalone_mode=False, obj=proxy)
