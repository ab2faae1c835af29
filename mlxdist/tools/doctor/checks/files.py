"""Checks that the command can be started on every host, and that script and model are complete and the same there."""

import os
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from mlxdist.base.model_directory import is_hub_name, pull_command
from mlxdist.cluster.ssh.ssh import is_this_machine

from ..cluster import Cluster
from ..findings import Finding, difference, fail, ok, outliers, skip, warn
from .system import gib

__all__ = ["check_model", "check_script"]

_MAX_SHOWN = 3


def check_script(cluster: Cluster) -> Iterator[Finding]:
    options = cluster.options
    if not options.command and not options.script:
        yield skip((), "no command and no --script was given")
        return
    sums = {}
    for name, program in cluster.each("program"):
        if program["directory_error"]:
            what = f"the directory {options.directory} cannot be entered: {program['directory_error']}"
            yield fail(name, what, f"there: mkdir -p {shlex.quote(options.directory)}; or another one: --cwd")
        elif program["command_error"]:
            yield fail(name, program["command_error"], "install it there under the same name, or write its full path")
        elif program["script_error"]:
            yield fail(name, f"{options.script}: {program['script_error']}", _copy_script(cluster, name))
        else:
            sums[name] = f"sha256 {program['sha256'][:12]}, {program['bytes']} bytes" if program["sha256"] else ""
    others = outliers(sums)
    for name in others:
        differs = [difference(options.script, sums)]
        yield fail(name, f"{options.script} is another one", _copy_script(cluster, name), differs)
    if good := [name for name in sums if name not in others]:
        yield ok(good, f"{options.script}, {sums[good[0]]}" if options.script else "the command is there")


def check_model(cluster: Cluster) -> Iterator[Finding]:
    model = cluster.options.model
    listed = dict(cluster.each("model"))
    complete = {name: files for name, files in listed.items() if not files["error"]}
    if not model:
        yield skip((), "no --model was given, and there is none in the command")
    elif listed and cluster.options.guessed and not complete:
        yield skip(list(listed), f"{model}, the command's --model, is not on these hosts; it may load it first")
    else:
        wrong = [*_incomplete(cluster, listed), *_compare(cluster, complete)]
        yield from wrong
        bad = {name for finding in wrong for name in finding.hosts}
        if good := [name for name in complete if name not in bad]:
            sizes = complete[good[0]]["files"]
            how = "compared in full" if cluster.options.full else "weights compared by samples (in full: --full)"
            yield ok(good, f"{len(sizes)} files, {gib(sum(sizes.values()))}, {how}")
            yield from _fits(cluster, good, sum(sizes.values()))


def _incomplete(cluster: Cluster, listed: dict[str, dict[str, Any]]) -> Iterator[Finding]:
    complete = [name for name, files in listed.items() if not files["error"]]
    for name, files in listed.items():
        unread = [path for path, digest in files["digests"].items() if digest.startswith("error: ")]
        if files["error"]:
            yield fail(name, f"{cluster.options.model}: {files['error']}", _pull(cluster, name, complete))
        elif unread:
            what = f"{unread[0]}: {files['digests'][unread[0]].removeprefix('error: ')}"
            yield fail(name, what, _pull(cluster, name, complete))


def _compare(cluster: Cluster, listed: dict[str, dict[str, Any]]) -> Iterator[Finding]:
    """Yields a finding for each host that differs, with the first few files that differ there."""
    model = cluster.options.model
    differing: dict[str, list] = {}
    for path in sorted({path for files in listed.values() for path in files["files"]}):
        values = {name: _describe(files, path) for name, files in listed.items()}
        for name in outliers(values):
            differing.setdefault(name, []).append(difference(path, values))
    for name, differs in differing.items():
        paths = ", ".join(d.what for d in differs[:_MAX_SHOWN]) + (" ..." if len(differs) > _MAX_SHOWN else "")
        what = f"{len(differs)} file{'s' * (len(differs) > 1)} of {model} differ{'s' * (len(differs) == 1)}: {paths}"
        right = [other for other in listed if other not in differing]
        yield fail(name, what, _pull(cluster, name, right), differs[:_MAX_SHOWN])


def _describe(files: dict[str, Any], path: str) -> str:
    if path not in files["files"]:
        return "missing"
    return f"{files['files'][path]} bytes, sha256 {files['digests'].get(path, '')[:12] or 'not taken'}"


def _fits(cluster: Cluster, names: list[str], size: int) -> Iterator[Finding]:
    """A warning where the memory of all hosts together cannot hold the model."""
    totals = [facts["memory"]["total"] for name, facts in cluster.each("facts") if name in names]
    if totals and None not in totals and sum(totals) < size:
        what = f"the model has {gib(size)}, and the memory of these hosts together {gib(sum(totals))}"
        yield warn(names, what, "take a model with fewer bits (mlx_lm convert -q), or more hosts")


def _copy_script(cluster: Cluster, name: str) -> str:
    path = os.path.join(cluster.options.directory, cluster.options.script)
    if is_this_machine(name):
        return f"write the path of a file that is there (ls {shlex.quote(os.path.dirname(path))}), or copy it there"
    return f"scp {shlex.quote(path)} {shlex.quote(name)}:{shlex.quote(path)}"


def _pull(cluster: Cluster, name: str, right: Sequence[str]) -> str:
    """The command that brings the model to a host. ``right``: the hosts that have it; the first host is the source."""
    model, source = cluster.options.model, next((other for other in right if other != name), None)
    if source is None:
        return f"write the path of a directory that is there, or load it: {pull_command(model)}"
    if not is_hub_name(model):
        model = os.path.normpath(os.path.join(cluster.options.directory, os.path.expanduser(model)))
    return f"mlxdist pull {shlex.quote(model)} --hosts {shlex.quote(f'{source},{name}')}"
