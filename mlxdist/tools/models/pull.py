"""Brings a model to hosts: fetches it on the first one, then sends it from host to host."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxdist.base.byte_progress import byte_progress
from mlxdist.base.child_process import module_command
from mlxdist.base.errors import Error, InvalidArgument, ResourceError
from mlxdist.base.json_reader import parse_json
from mlxdist.base.model_directory import is_hub_name
from mlxdist.base.validation import printable
from mlxdist.cluster.hostfile.hosts import Hostfile
from mlxdist.launch.run_job import host_arguments, run_job

from .pull_rank import MARK

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from mlxdist.cluster.hostfile.options import HostSelection

__all__ = ["Pulled", "pull"]

# Errors of ranks that have found the first cause on another one.
_CONSEQUENCES = ("Aborted", "PeerLost")
_KEPT = "; what has arrived is kept: type the same command again"


@dataclass(frozen=True)
class Pulled:
    """``files``, ``size``: of the model, in bytes; ``received``: bytes that were sent to each host, by its name;
    ``shards``: of each host that has no more, which shards, in words."""

    model: str
    files: int
    size: int
    received: Mapping[str, int]
    shards: Mapping[str, str]


def pull(
    selection: HostSelection, model: str, to: str, console: Console, layout: Mapping[str, Any] | None = None
) -> Pulled:
    """Brings a model to the selected hosts.

    Args:
        selection: the hosts; the first one has the folder, or fetches the model from the hub.
        model: a path, or the name of a model on Hugging Face's hub.
        to: the folder to write to on the other hosts; empty: the same path, or the cache of the hub.
        console: where progress is shown.
        layout: the fields of `mlxdist.serve.placement.Layout`: hosts that do not have the model get just the shards
            that their ranks of the hostfile read by it. None: all of it.

    Raises:
        InvalidArgument: the arguments do not fit together.
        ResourceError: a host has failed; the text says which and why.
    """
    hub = is_hub_name(model) and not Path(model).exists()
    if to and hub:
        raise InvalidArgument(
            f"--to is for a folder; {model} comes from the hub, whose files go to the cache of each host"
        )
    if not hub and selection.hostfile is None:
        raise InvalidArgument(f"{model} is a folder; give the hosts that are to have it, with --hostfile or --hosts")
    where = {name: os.path.abspath(os.path.expanduser(path)) for name, path in (("model", model), ("to", to)) if path}
    arguments = {"to": "", **where, "hub": hub} | ({"model": model} if hub else {})
    if layout is not None and len(selection.hosts()) == 1:
        raise InvalidArgument("--only-shards is for several hosts; one host reads all of a model")
    hostfile = selection.hostfile or Hostfile(tuple(selection.hosts()))
    only = None if layout is None else {"hosts": [host.slots for host in hostfile.hosts], "layout": dict(layout)}
    names = [host.name for host in hostfile.hosts]
    with byte_progress(console) as progress:
        problem = ""
        if hub:
            try:
                _run(replace(selection, hostfile=hostfile.only(names[:1])), arguments | {"step": "fetch"}, progress)
            except ResourceError as error:
                if len(names) == 1:
                    raise
                problem = f"{names[0]}: {error}"  # another host may have it
        try:
            step = {"step": "spread", "fetched": not problem, "only_shards": only}
            found = _run(replace(selection, hostfile=hostfile), arguments | step, progress)
        except ResourceError as error:
            raise ResourceError(f"{problem}; {error}" if problem else str(error)) from None
    if problem:
        console.print(f"{problem}; it came from another host", markup=False)
    shards = {name: shards for name, shards in zip(names, found["shards"]) if shards}
    return Pulled(model, found["files"], found["size"], dict(zip(names, found["received"])), shards)


def _run(selection: HostSelection, arguments: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
    """Runs a step, with one rank on each host, and returns its result.

    Raises:
        ResourceError: it failed.
    """
    assert selection.hostfile is not None
    hostfile = selection.hostfile.with_one_rank_each().for_mlxdist()
    selection = replace(selection, hostfile=hostfile)
    program = module_command("mlxdist.tools.models.pull_rank", json.dumps(arguments), python=selection.python)
    task = progress.add_task("starting", total=None)
    result: dict[str, Any] = {}
    errors: list[dict[str, Any]] = []

    def take(line: str) -> None:
        text, mark, told = line.partition(MARK)
        if not mark:
            progress.console.print(text, end="", markup=False, highlight=False)
            return
        fields = parse_json(told)
        if "what" in fields:
            progress.update(task, description=printable(fields["what"]), completed=fields["done"], total=fields["of"])
        elif "error" in fields:
            errors.append(fields)
        else:
            result.update(fields["result"])

    with host_arguments(selection) as where:
        ended = run_job(program, where, variables=_variables(selection), directory="/", prefix=False, on_line=take)
    progress.remove_task(task)
    if errors:
        raise ResourceError(_first_cause(errors, hostfile))
    if ended.status:
        raise ResourceError(f"a rank has ended with status {ended.status}, and its output is above{_KEPT}")
    return result


def _variables(selection: HostSelection) -> dict[str, str]:
    """Variables of the ranks that the user has not set. In a ring each host sends every byte once. Where each pair of
    hosts has a cable of its own, the mesh, which is the default, is faster: the first host then sends different parts
    over each of them. A host that waits while others send a file is none to warn of."""
    has_cables = all(host.rdma for host in selection.hosts()) and len(selection.hosts()) > 1
    ours = {"MLXDIST_STALL_WARNING": "0"} | ({} if has_cables else {"MLXDIST_ALGO": "ring"})
    return {name: value for name, value in ours.items() if name not in os.environ} | {"MLXDIST_FLIGHT_DIR": "none"}


def _first_cause(errors: Sequence[Mapping[str, Any]], hostfile: Hostfile) -> str:
    """The error of the host that has failed first, with the name of that host."""
    own = [error for error in errors if error["kind"] not in _CONSEQUENCES] or list(errors)
    first = min(own, key=lambda error: error["rank"])
    rank, text = first["rank"], first["error"]
    named = Error(text).rank
    if named is not None and named < len(hostfile.hosts):  # a hub's answer may have anything in it
        rank, text = named, text.rpartition(" [rank ")[0]
    kept = _KEPT if first["kind"] in _CONSEQUENCES else ""
    return f"{hostfile.hosts[rank].name}: {printable(text)}{kept}"
