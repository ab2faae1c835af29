"""Variables that change what ranks do are the same on all hosts: MLX_METAL_FAST_SYNCH above all."""

from __future__ import annotations

from ..cluster import Cluster
from ..findings import Finding, difference, fail, odd_ones, ok, warn

__all__ = ["FAST_SYNCH", "check_fast_synch", "check_variables", "of_ranks"]

FAST_SYNCH = "MLX_METAL_FAST_SYNCH"
_UNSET = "(not set)"


def check_variables(cluster: Cluster) -> list[Finding]:
    found = []
    for name, facts in cluster.each("facts"):
        if facts["variables_error"]:
            found.append(fail(name, facts["variables_error"], "unset it in the start files of its shell"))
    variables = of_ranks(cluster)
    names = sorted({variable for told in variables.values() for variable in told})
    for variable in names:
        values = {name: told.get(variable, _UNSET) for name, told in variables.items()}
        if variable != FAST_SYNCH and len(set(values.values())) > 1:
            others = odd_ones(values)
            remedy = _remedy(variable, _usual(values))
            found.append(warn(others, f"{variable} differs", remedy, [difference(variable, values)]))
    same = [variable for variable in names if len({told.get(variable) for told in variables.values()}) == 1]
    if variables and not found:
        shown = ", ".join(same[:4]) + (f" and {len(same) - 4} more" if len(same) > 4 else "")
        found.append(ok(list(variables), f"the same: {shown}" if same else "none of those that matter is set"))
    return found


def check_fast_synch(cluster: Cluster) -> list[Finding]:
    values = {name: told.get(FAST_SYNCH, _UNSET) for name, told in of_ranks(cluster).items()}
    if len(set(values.values())) > 1:
        differs = difference(FAST_SYNCH, values)
        what = f"{FAST_SYNCH} differs: some ranks wait for the GPU in another way than others"
        return [fail(odd_ones(values), what, _remedy(FAST_SYNCH, "0"), [differs])]
    macs = [name for name, facts in cluster.each("facts") if facts["system"] == "Darwin"]
    crowded = [host.name for host in cluster.only(macs) if host.slots > 1]
    if crowded and not {*values.values()} <= {_UNSET, "", "0"}:
        what = f"{FAST_SYNCH} is set, and two or more ranks on one Mac have locked up its GPU with that"
        return [fail(crowded, what, f"start one rank on each Mac; or {_remedy(FAST_SYNCH, '0')}")]
    return [ok(list(values), f"{FAST_SYNCH} {value}") for value in set(values.values())]


def of_ranks(cluster: Cluster) -> dict[str, dict[str, str]]:
    """What ranks have on each host: what the launcher sets goes before what the host's shell does."""
    return {name: facts["variables"] | dict(cluster.question.variables) for name, facts in cluster.each("facts")}


def _usual(values: dict[str, str]) -> str:
    usual = max(list(values.values()), key=list(values.values()).count)
    return usual if usual != _UNSET else next(value for value in values.values() if value != _UNSET)


def _remedy(variable: str, value: str) -> str:
    where = "remove it from /etc/zshenv, ~/.zshenv, /etc/environment and ~/.ssh/environment"
    return f"set it for all ranks, --env {variable}={value:.60}; or {where}"
