"""The command can be started on every host, in the same folder, and the script is the same there."""

from __future__ import annotations

import os
import shlex

from mlxdist.cluster.ssh.ssh import is_this_machine

from ..cluster import Cluster
from ..findings import Finding, difference, fail, odd_ones, ok, skip

__all__ = ["check_script"]


def check_script(cluster: Cluster) -> list[Finding]:
    question = cluster.question
    if not question.command and not question.script:
        return [skip((), "no command and no --script was given")]
    found, sums = [], {}
    for name, told in cluster.each("program"):
        if told["folder_error"]:
            what = f"the folder {question.folder} cannot be entered: {told['folder_error']}"
            found.append(fail(name, what, f"there: mkdir -p {shlex.quote(question.folder)}; or another one: --cwd"))
        elif told["command_error"]:
            remedy = "install it there under the same name, or write its whole path"
            found.append(fail(name, told["command_error"], remedy))
        elif told["script_error"]:
            found.append(fail(name, f"{question.script}: {told['script_error']}", _copy(cluster, name)))
        else:
            sums[name] = f"sha256 {told['sha256'][:12]}, {told['bytes']} bytes" if told["sha256"] else ""
    if len(set(sums.values())) > 1:
        for odd in odd_ones(sums):
            what = f"{question.script} is another one"
            found.append(fail(odd, what, _copy(cluster, odd), [difference(question.script, sums)]))
    good = [name for name in sums if not any(name in finding.hosts for finding in found)]
    what = f"{question.script}, {sums[good[0]]}" if good and question.script else "the command is there"
    return [*found, *([ok(good, what)] if good else [])]


def _copy(cluster: Cluster, name: str) -> str:
    path = os.path.join(cluster.question.folder, cluster.question.script)
    if is_this_machine(name):
        return f"write the path of a file that is there (ls {shlex.quote(os.path.dirname(path))}), or copy it there"
    return f"scp {shlex.quote(path)} {shlex.quote(name)}:{shlex.quote(path)}"
