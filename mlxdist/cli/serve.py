"""The command line of `mlxdist serve`. It must be cheap to import: `mlxdist --help` does."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from mlxdist.base.child_process import module_command
from mlxdist.base.environment import MAX_RANKS, MAX_RESTARTS, VARIABLES
from mlxdist.base.json_reader import parse_json
from mlxdist.base.user_path import USER_PATH
from mlxdist.cluster.hostfile.options import HostSelection, host_options
from mlxdist.tools.bench.sizes import Parsed

from .client_settings import CLIENTS, client_settings
from .shard import RankShares

if TYPE_CHECKING:
    from mlxdist.launch.restarts import Follower
    from mlxdist.serve.http_options import HttpOptions
    from mlxdist.serve.http_server import HttpServer
    from mlxdist.serve.placement import Layout

__all__ = [
    "COUNT",
    "layout_of",
    "layout_options",
    "max_context_option",
    "model_options",
    "placement_options",
    "serve",
    "start_ranks",
    "template_option",
]

_KEY = "MLXDIST_API_KEY"
COUNT = click.IntRange(min=1)


def _bytes(text: str) -> int:
    """Parses a number of bytes, such as 512MB or 1.5TB. Raises ValueError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMGT]?)B?", text.strip(), re.IGNORECASE)
    if found is None:
        raise ValueError(f"{text!r} is not a number of bytes, such as 200GB")
    return int(float(found[1]) * 1000 ** " KMGT".index(found[2].upper() or " "))


def _ranks(text: str) -> list[int]:
    """Parses numbers of ranks, such as 0,1. Raises ValueError."""
    if not re.fullmatch(r"\d{1,5}(,\d{1,5})*", text, re.ASCII):
        raise ValueError(f"{text!r:.80} are not ranks, such as 0,1")
    return [int(number) for number in text.split(",")]


_RESTARTS = 3


def _json_object(context: click.Context, parameter: click.Parameter, text: str) -> dict[str, Any]:
    try:
        found = parse_json(text)
    except ValueError as error:
        raise click.BadParameter(f"{text!r:.80} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise click.BadParameter(f"{text!r:.80} is not a JSON object")
    return found


def _pairs(context: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    for text in given:
        if not all(text.partition("=")):
            raise click.BadParameter(f"{text!r:.80} is not NAME=PATH")
    return given


max_context_option = click.option(
    "--max-context", type=click.IntRange(min=2), help="Tokens of prompt and answer.  [default: the model's]"
)
template_option = click.option(
    "--chat-template-args",
    callback=_json_object,
    default="{}",
    metavar="JSON",
    help="Such as '{\"enable_thinking\": false}'.",
)
_PLACEMENT = (
    click.option("--tp", type=COUNT, help="Ranks that share every layer.  [default: chosen]"),
    click.option("--ep", type=COUNT, help="Ranks (times --tp) that share the experts.  [default: chosen]"),
    click.option(
        "--pipeline", is_flag=True, help="The ranks that --tp and --ep leave are stages, with some layers each."
    ),
    click.option(
        "--rank-shares",
        type=RankShares(),
        help="Shares of the --tp ranks, or of stages: 2,1; with measured hosts also memory (the default) or compute.",
    ),
    click.option("--plan", type=USER_PATH, metavar="FILE", help="Of `mlxdist shard --json`; only rank 0 needs it."),
)
_STREAM = click.option(
    "--stream-weights", is_flag=True, help="Only rank 0 has MODEL, and sends the others what they hold."
)


def model_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the argument MODEL and the options that select the ranks that the command starts."""
    ranks = click.IntRange(1, MAX_RANKS)
    command = host_options(command)
    command = click.option("-n", "-np", "ranks", type=ranks, metavar="N", help="Number of ranks; with hosts: on each.")(
        command
    )
    return click.argument("model")(command)


def placement_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options that say which rank holds which shard of MODEL."""
    for option in reversed(_PLACEMENT):
        command = option(command)
    return command


def layout_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options of `placement_options`, and where the shards come from."""
    return placement_options(_STREAM(command))


def layout_of(given: dict[str, Any]) -> Layout:
    """The layout that the values of `layout_options` describe."""
    from mlxdist.serve.placement import Layout

    return Layout(**{name: given[name] for name in ("tp", "ep", "pipeline", "rank_shares", "plan")})


@click.command()
@model_options
@click.option("--host", default="127.0.0.1", show_default=True, help="Address of this machine to listen at.")
@click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True, help="0 for a free one.")
@click.option("--application", hidden=True, default="", help="Address of the launcher's, for which rank 0 listens.")
@click.option(
    "--max-restarts",
    type=click.IntRange(0, MAX_RESTARTS),
    metavar="K",
    default=None,
    show_default=str(_RESTARTS),
    help="When a rank has failed, start all again, at most K times; 0: rank 0 listens itself, on its host.",
)
@layout_options
@click.option(
    "--prefill-ranks",
    type=Parsed("RANKS", _ranks),
    help="Ranks that compute prompts, such as 0,1; those of --decode-ranks generate. Default: all ranks do both.",
)
@click.option("--decode-ranks", type=Parsed("RANKS", _ranks), help="Ranks that generate; with --prefill-ranks.")
@click.option(
    "--split-blocks/--no-split-blocks",
    default=None,
    help="Layers as two compiled parts each, or mlx-lm's own. Default: what a measurement at the start finds faster.",
)
@click.option("--shard-vocabulary", is_flag=True, help="Each rank computes the logits of a part of the vocabulary.")
@click.option("--draft-model", metavar="MODEL", help="A smaller one with the same tokenizer, which drafts tokens.")
@click.option(
    "--shard-draft-model", is_flag=True, help="Each rank has a shard of the draft model, instead of all of it."
)
@click.option("--mtp", is_flag=True, help="Draft with the model's own head for multi-token prediction.")
@click.option("--prompt-lookup", is_flag=True, help="Draft what followed the last two tokens before.")
@click.option(
    "--num-draft-tokens",
    type=click.IntRange(1, 64),
    default=3,
    show_default=True,
    help="Drafts of a request in a step.",
)
@click.option(
    "--adapter", multiple=True, callback=_pairs, metavar="NAME=PATH", help="For requests that name it; repeatable."
)
@click.option("--adapter-path", type=USER_PATH, metavar="PATH", help="Adapters of all requests, in place of --adapter.")
@click.option("--api-key", envvar=_KEY, default="", metavar="KEY", help=f"That clients send.  [env: {_KEY}]")
@click.option("--allowed-origins", default="", metavar="A,B", help="Origins of web pages that may use it; * for all.")
@click.option(
    "--allowed-hosts", default="", metavar="A,B", help="Other names of this machine, where --host is its own."
)
@click.option("--ssl-certfile", type=USER_PATH, metavar="FILE", help="Certificate chain; with it, https.")
@click.option("--ssl-keyfile", type=USER_PATH, metavar="FILE", help="Its private key.  [default: in --ssl-certfile]")
@click.option("--ignore-unknown-fields", is_flag=True, help="Of requests; without, they are a 400 that names them.")
@click.option(
    "--normalize-heads/--no-normalize-heads",
    default=True,
    help="Leave out of system prompts what Claude Code changes with each request, for the prefix cache.",
)
@click.option("--access-log/--no-access-log", default=True, help="A line on stderr for each request.")
@click.option("--page/--no-page", default=True, help="A page with a chat and the cluster, at the address itself.")
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Of these.")
@click.option(
    "--drain",
    type=click.FloatRange(0, 3600),  # as the launcher's
    default=30.0,
    show_default=True,
    help="Seconds after SIGTERM in which requests may end; a second SIGTERM ends them.",
)
@click.option("--max-queue", type=COUNT, default=256, show_default=True, help="Requests that wait; more get 429.")
@click.option(
    "--request-timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=600.0,
    show_default=True,
    help="Seconds of a request.",
)
@click.option(
    "--print-service",
    is_flag=False,
    flag_value="here",
    type=click.Choice(["systemd", "launchd", "here"]),
    help="Print a unit of systemd or launchd (here: of this system) for this command line, and exit.",
)
@click.option(
    "--print-client",
    type=click.Choice(list(CLIENTS)),
    help="Print the settings with which this program asks the server of this command line, and exit.",
)
@max_context_option
@click.option("--decode-concurrency", type=COUNT, default=32, show_default=True, help="Requests that run at a time.")
@click.option("--prompt-concurrency", type=COUNT, default=8, show_default=True, help="Prompts in a chunk.")
@click.option("--prefill-step-size", type=COUNT, default=512, show_default=True, help="Tokens of a prompt in a chunk.")
@click.option(
    "--max-total-tokens", type=click.IntRange(min=2), help="Tokens of all KV caches.  [default: what the memory has]"
)
@click.option("--kv-bits", type=click.Choice([2, 3, 4, 5, 6, 8]), help="Of the KV caches.  [default: not quantized]")
@click.option(
    "--kv-group-size", type=click.Choice([32, 64, 128]), default=64, show_default=True, help="Group size of --kv-bits."
)
@click.option("--prompt-cache-size", type=COUNT, help="Sequences in the prefix cache.  [default: what memory has]")
@click.option("--prompt-cache-tokens", type=click.IntRange(min=0), help="Their tokens.  [default: what memory has]")
@click.option(
    "--snapshot-interval",
    type=COUNT,
    default=4096,
    show_default=True,
    help="Most tokens between the states that the prefix cache keeps of a model with recurrent layers or sliding "
    "windows.",
)
@click.option("--prompt-cache-dir", type=USER_PATH, metavar="DIR", help="The prefix cache's disk, also between runs.")
@click.option(
    "--prompt-cache-disk",
    type=Parsed("BYTES", _bytes),
    default="100GB",
    show_default=True,
    help="What each rank may have there.",
)
@click.option("--max-tokens", type=COUNT, default=512, show_default=True, help="Of an answer, unless it says.")
@click.option("--temp", type=click.FloatRange(0, 100), default=0.0, show_default=True, help="Its temperature.")
@click.option("--top-p", type=click.FloatRange(0, 1), default=1.0, show_default=True, help="Its top_p.")
@click.option("--top-k", type=click.IntRange(min=0), default=0, show_default=True, help="Its top_k; 0 for none.")
@click.option("--min-p", type=click.FloatRange(0, 1), default=0.0, show_default=True, help="Its min_p.")
@template_option
@click.pass_context
def serve(
    context: click.Context,
    model: str,
    ranks: int | None,
    selection: HostSelection,
    max_restarts: int | None,
    api_key: str,
    print_service: str | None,
    print_client: str | None,
    **given: Any,
) -> None:
    """Serve a model of mlx-lm over OpenAI's and Anthropic's HTTP APIs, sharded over all ranks of a job.

    \b
        mlxdist serve models/qwen
        mlxdist serve models/qwen -n 2
        mlxdist serve models/qwen --hostfile rmlx-hosts.json --host 0.0.0.0
        mlxdist launch --hostfile rmlx-hosts.json --log-dir logs -- mlxdist serve models/qwen

    MODEL is a directory, or org/name after `mlxdist pull org/name`, on every host, or on that of rank 0 with
    --stream-weights. With -n, --hostfile or --hosts, ranks are started as `mlxdist launch` does, whose other options
    are for the last form.
    """
    if api_key:
        api_key = next(variable for variable in VARIABLES if variable.name == _KEY).value(api_key)
    drafting = [name for name in ("draft_model", "mtp", "prompt_lookup") if given[name]]
    if len(drafting) > 1:
        raise click.UsageError("drafts are those of --draft-model, of --mtp or of --prompt-lookup")
    if given["shard_draft_model"] and not given["draft_model"]:
        raise click.UsageError("--shard-draft-model is for --draft-model")
    if print_service is not None:
        from .service_unit import service_unit

        kind: Any = ("launchd" if sys.platform == "darwin" else "systemd") if print_service == "here" else print_service
        words, variables = sys.argv[1:], os.environ | ({_KEY: api_key} if api_key else {})
        click.echo(service_unit(kind, words, variables, Path.cwd(), drain=given["drain"]), nl=False)
        return
    if print_client is not None:
        if not given["port"]:
            raise click.UsageError("--print-client needs a --port that is known before the server starts")
        where = given["host"], given["port"], given["ssl_certfile"] is not None
        click.echo(client_settings(print_client, *where, has_key=bool(api_key)), nl=False)
        return
    drafts = given["num_draft_tokens"] if drafting else 0
    if ranks is not None or selection.hostfile is not None:
        if api_key:
            os.environ[_KEY] = api_key  # the launcher hands it on, and `ps` does not show it
        follower, more = None, []
        if max_restarts != 0:
            follower = _application(_http_options(given, api_key))
            more = ["--application", follower.address]
            max_restarts = _RESTARTS if max_restarts is None else max_restarts
        launcher = ["--max-restarts", str(max_restarts or 0), "--drain", str(given["drain"])]
        launcher += ["--control-grace", "15"]  # users wait, and ranks that get no requests have nothing to go on with
        start_ranks(context, model, ranks, selection, given, launcher=launcher, more=more, follower=follower)
        return
    if max_restarts is not None:
        raise click.UsageError("--max-restarts is for ranks that this command starts: -n, --hostfile or --hosts.")
    from mlxdist.serve import BatchLimits, ServeOptions, Server

    def some(*names: str) -> dict[str, Any]:
        return {name: given[name] for name in names}

    limits = some(
        "decode_concurrency",
        "prompt_concurrency",
        "prefill_step_size",
        "max_total_tokens",
        "prompt_cache_size",
        "prompt_cache_tokens",
        "snapshot_interval",
    )
    options = ServeOptions(
        model,
        adapters=tuple((name, path) for name, _, path in (text.partition("=") for text in given["adapter"])),
        layout=layout_of(given),
        prefill_ranks=tuple(given["prefill_ranks"] or ()),
        decode_ranks=tuple(given["decode_ranks"] or ()),
        limits=BatchLimits(**limits, num_draft_tokens=drafts),
        defaults=some("max_tokens", "temp", "top_p", "top_k", "min_p"),
        http=_http_options(given, api_key),
        **some(
            "application",
            "drain",
            "stream_weights",
            "adapter_path",
            "draft_model",
            "shard_draft_model",
            "mtp",
            "shard_vocabulary",
            "split_blocks",
        ),
        **some("max_queue", "max_context", "chat_template_args", "prompt_cache_dir", "prompt_cache_disk"),
        **some("kv_bits", "kv_group_size"),
    )
    sys.exit(Server(options).run())


def start_ranks(
    context: click.Context,
    model: str,
    ranks: int | None,
    selection: HostSelection,
    given: dict[str, Any],
    launcher: Sequence[str] = (),
    more: Sequence[str] = (),
    follower: Follower | None = None,
) -> None:
    """Runs the command of ``context`` on all ranks, with the options in ``given`` that the user has typed.

    ``launcher``: options of `mlxdist launch`. ``more``: other arguments for the ranks. ``follower``: see
    `launch.restarts`.
    """
    words = []
    for parameter in context.command.params:
        # Only typed options: the ranks have the same defaults.
        if parameter.name in given and context.get_parameter_source(parameter.name) == ParameterSource.COMMANDLINE:
            values = given[parameter.name]
            for value in values if isinstance(values, tuple) else (values,):
                words.append((parameter.secondary_opts if value is False else parameter.opts)[0])
                if isinstance(value, list):
                    words.append(",".join(map(str, value)))
                elif not isinstance(value, bool):
                    words.append(json.dumps(value) if isinstance(value, dict) else str(value))
    from .launch import launch

    assert context.command.name is not None
    command = module_command("mlxdist", context.command.name, model, *words, *more, python=selection.python)
    where = [*selection.arguments, *(["-n", str(ranks)] if ranks else [])]
    launch.main([*where, *launcher, "--", *command], prog_name="mlxdist launch", standalone_mode=False, obj=follower)


def _http_options(given: dict[str, Any], api_key: str) -> HttpOptions:
    from mlxdist.serve.http_options import HttpOptions

    lists = {  # a browser shows an origin with a slash at its end, and sends it without
        name: tuple(filter(None, (text.strip().rstrip("/") for text in given[name].split(","))))
        for name in ("allowed_origins", "allowed_hosts")
    }
    same = (
        "host", "port", "request_timeout", "ssl_certfile", "ssl_keyfile", "ignore_unknown_fields", "normalize_heads",
        "access_log", "log_format", "page",
    )  # fmt: skip
    fields: dict[str, Any] = lists | {name: given[name] for name in same}
    return HttpOptions(api_key=api_key, **fields)


def _application(options: HttpOptions) -> HttpServer:
    """The application of HTTP in this process, which stays while ranks restart."""
    try:
        from mlxdist.serve.http_server import HttpServer
        from mlxdist.serve.listener import listen
        from mlxdist.serve.rank_zero import RankZero
    except ModuleNotFoundError as error:
        advice = "pip install 'mlxdist[lm]', or give --max-restarts 0, with which rank 0 alone needs it"
        raise click.ClickException(f"the server on this machine needs {error.name}: {advice}") from None
    return HttpServer(listen(options.host, options.port), options, RankZero(None, options.request_timeout))
