"""The model is on every host, complete and the same: sizes of all files, checksums of all or of parts."""

from __future__ import annotations

import os
import shlex

from mlxdist.cluster.ssh.ssh import is_this_machine

from ..cluster import Cluster
from ..findings import Finding, difference, fail, odd_ones, ok, skip, warn
from .memory import gib

__all__ = ["check_model"]

_SHOWN = 3


def check_model(cluster: Cluster) -> list[Finding]:
    model = cluster.question.model
    if not model:
        return [skip((), "no --model was given, and there is none in the command")]
    found, files = [], {}
    told_by = dict(cluster.each("model"))
    if told_by and cluster.question.guessed and all(told["error"] for told in told_by.values()):
        return [skip(list(told_by), f"{model}, the command's --model, is not on these hosts; it may load it first")]
    for name, told in told_by.items():
        if told["error"]:
            found.append(fail(name, f"{model}: {told['error']}", _copy(cluster, name)))
        else:
            files[name] = told
    for name, told in files.items():
        unread = [path for path, digest in told["digests"].items() if digest.startswith("error: ")]
        if unread:
            what = f"{unread[0]}: {told['digests'][unread[0]].removeprefix('error: ')}"
            found.append(fail(name, what, _copy(cluster, name)))
    found += _compare(cluster, files)
    bad = {name for finding in found for name in finding.hosts}
    good = [name for name in files if name not in bad]
    if good:
        told = files[good[0]]
        how = "compared whole" if cluster.question.full else "weights compared in parts (whole: --full)"
        found.append(ok(good, f"{len(told['files'])} files, {gib(sum(told['files'].values()))}, {how}"))
        found += _room(cluster, good, sum(told["files"].values()))
    return found


def _compare(cluster: Cluster, files: dict[str, dict]) -> list[Finding]:
    """One finding for each host that differs, with the first few files that do."""
    model = cluster.question.model
    differing: dict[str, list] = {}
    for path in sorted({path for told in files.values() for path in told["files"]}):
        values = {name: _describe(told, path) for name, told in files.items()}
        if len(set(values.values())) > 1:
            for odd in odd_ones(values):
                differing.setdefault(odd, []).append(difference(path, values))
    found = []
    for name, differs in differing.items():
        paths = ", ".join(d.what for d in differs[:_SHOWN]) + (" ..." if len(differs) > _SHOWN else "")
        what = f"{len(differs)} file{'s' * (len(differs) > 1)} of {model} differ{'s' * (len(differs) == 1)}: {paths}"
        found.append(fail(name, what, _copy(cluster, name), differs[:_SHOWN]))
    return found


def _describe(told: dict, path: str) -> str:
    if path not in told["files"]:
        return "missing"
    return f"{told['files'][path]} bytes, sha256 {told['digests'].get(path, '')[:12] or 'not taken'}"


def _room(cluster: Cluster, names: list[str], size: int) -> list[Finding]:
    """Whether the hosts' memory together can hold it at all."""
    totals = [facts["memory"].get("total") for name, facts in cluster.each("facts") if name in names]
    if not totals or None in totals or sum(totals) >= size:
        return []
    what = f"the model has {gib(size)}, and the memory of these hosts together {gib(sum(totals))}"
    return [warn(names, what, "take a model with fewer bits (mlx_lm convert -q), or more hosts")]


def _copy(cluster: Cluster, name: str) -> str:
    model = cluster.question.model
    if is_this_machine(name):
        return f"write the path of a folder that is there, or load it: hf download {shlex.quote(model)}"
    path = os.path.normpath(os.path.join(cluster.question.folder, os.path.expanduser(model)))
    there = f"{shlex.quote(name)}:{shlex.quote(os.path.join(os.path.dirname(path), ''))}"
    of_hub = f"a name of the hub: hf download {shlex.quote(model)}, there"
    return f"rsync -a --checksum {shlex.quote(path)} {there}; {of_hub}"
