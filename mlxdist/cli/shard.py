"""The command line of `mlxdist shard`. It must be cheap to import: `mlxdist --help` does."""

from __future__ import annotations

import functools
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import click

from mlxdist.base.child_process import module_command
from mlxdist.base.json_reader import parse_json
from mlxdist.base.user_path import USER_PATH

__all__ = ["shard"]

RANKS = click.IntRange(min=1)


class RankShares(click.ParamType):
    """The type of --rank-shares: a positive number per rank, ``2,1``, or the name of a measurement of hosts."""

    name = "numbers"

    def convert(
        self, value: Any, parameter: click.Parameter | None, context: click.Context | None
    ) -> list[float] | str:
        from mlxdist.cluster.hostfile.rank_shares import MEASUREMENTS

        if value in MEASUREMENTS:
            return value
        try:
            rank_shares = [float(part) for part in value.split(",")]
        except ValueError:
            rank_shares = []
        if not rank_shares or not all(weight > 0 and math.isfinite(weight) for weight in rank_shares):
            self.fail(f"{value!r} is not positive numbers with commas between them, such as 2,1", parameter, context)
        return rank_shares


@click.command()
@click.argument("model")
@click.option("--tp", type=RANKS, help="Ranks that share every layer.  [default: 1, or the hostfile's ranks]")
@click.option("--ep", default=1, show_default=True, type=RANKS, help="Ranks (times --tp) that share the experts.")
@click.option(
    "--rank-shares",
    type=RankShares(),
    help="Shares of the --tp ranks, for machines of unequal size: 2,1; with --hostfile also memory (the default) or "
    "compute.",
)
@click.option(
    "--hostfile", type=USER_PATH, metavar="FILE", help="Shares as its hosts were measured by `mlxdist calibrate`."
)
@click.option("--verify", is_flag=True, help="Load it so on ranks of this machine and compare the logits.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan, and what --verify found, as JSON.")
def shard(
    model: str,
    tp: int | None,
    ep: int,
    rank_shares: list[float] | str | None,
    hostfile: str | None,
    verify: bool,
    as_json: bool,
) -> None:
    """Show how a model for mlx-lm is sharded over several ranks: each parameter, the bytes on each rank, what stays
    unsharded.

    \b
        mlxdist shard MODEL --tp 2             the plan; reads no weights and starts nothing
        mlxdist shard MODEL --tp 2 --verify    and compares the logits of 2 ranks with those of the full model
        mlxdist shard MODEL --hostfile FILE    the plan for measured hosts of unequal speed

    MODEL is a directory with config.json and model*.safetensors, or the name of a model that `mlxdist pull` has
    fetched. --verify needs memory for the full model twice. The exit status is 1 if the logits differ by more than the
    tolerance of their dtype, and 2 if the model cannot be sharded so.
    """
    from mlxdist.base.errors import InvalidArgument
    from mlxdist.base.model_directory import model_directory

    directory = model_directory(model)
    if hostfile is not None:
        tp, rank_shares = _measured(hostfile, tp, ep, rank_shares)
    elif isinstance(rank_shares, str):
        raise InvalidArgument(f"--rank-shares {rank_shares} is a figure of measured hosts; give their --hostfile, too")
    plan = _plan(directory, tp or 1, ep, rank_shares)
    if not as_json:
        click.echo(str(plan))
    verification = _verify(directory, plan) if verify else None
    if as_json:
        click.echo(json.dumps({"plan": parse_json(plan.to_json()), "verification": verification}, indent=2))
    elif verification is not None:
        click.echo(verification["text"])
    if verification is not None and not verification["agrees"]:
        raise SystemExit(1)


def _measured(
    hostfile: str, tp: int | None, ep: int, rank_shares: list[float] | str | None
) -> tuple[int, list[float] | None]:
    """The values of --tp and --rank-shares for the ranks of a hostfile."""
    from mlxdist.base.errors import InvalidArgument
    from mlxdist.cluster.hostfile.parsing import read
    from mlxdist.cluster.hostfile.rank_shares import speeds
    from mlxdist.nn.layout.measured_shares import slowest_of_columns

    found = read(hostfile)
    tp = found.ranks // ep if tp is None else tp
    if tp * ep != found.ranks:
        raise InvalidArgument(f"{hostfile} has {found.ranks} ranks, not --tp {tp} times --ep {ep}")
    if isinstance(rank_shares, list):
        return tp, rank_shares
    return tp, slowest_of_columns(speeds(found, rank_shares or "memory"), tp)


def _plan(path: Path, tp: int, ep: int, rank_shares: list[float] | None) -> Any:
    from mlxdist.base.safetensors_reader import Checkpoint
    from mlxdist.nn.models.load.weight_sources import open_model
    from mlxdist.nn.models.plan import plan_shards

    model, _, _ = open_model(Checkpoint(path))
    return plan_shards(model, tp, ep, rank_shares=rank_shares)


def _verify(path: Path, plan: Any) -> dict[str, Any]:
    """The result that rank 0 writes; see :mod:`mlxdist.tools.shard.verify_rank`."""
    from mlxdist.launch.run_job import run_job

    with tempfile.TemporaryDirectory(prefix="mlxdist-shard-") as directory:
        given, result = Path(directory, "plan.json"), Path(directory, "verification.json")
        given.write_text(plan.to_json())
        program = module_command("mlxdist.tools.shard.verify_rank", str(path), str(given), str(result))
        # The ranks' own output is for reading, the results alone are for a pipe.
        job = run_job(program, ["-n", str(plan.ranks)], on_line=functools.partial(click.echo, nl=False, err=True))
        if job.status:
            raise click.ClickException(f"a rank failed with status {job.status}; its output is above")
        return parse_json(result.read_text())
