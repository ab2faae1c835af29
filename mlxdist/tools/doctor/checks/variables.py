"""Variables that change what ranks do are the same on all hosts: MLX_METAL_FAST_SYNCH above all."""

from ..cluster import Cluster
from ..findings import Finding, difference, fail, note, ok, outliers, skip, warn

__all__ = ["FAST_SYNCH", "check_fast_synch", "check_gpu_sync", "check_variables"]

FAST_SYNCH = "MLX_METAL_FAST_SYNCH"
_UNSET = "(not set)"
_SLOW_SYNC = 50.0  # microseconds


def check_variables(cluster: Cluster) -> list[Finding]:
    remedy = "unset it in the start files of its shell"
    errors = [(name, facts["variables_error"]) for name, facts in cluster.each("facts")]
    found = [fail(name, error, remedy) for name, error in errors if error]
    variables = _of_ranks(cluster)
    same = []
    for variable in sorted({variable for of_host in variables.values() for variable in of_host}):
        values = {name: of_host.get(variable, _UNSET) for name, of_host in variables.items()}
        if len(set(values.values())) == 1:
            same.append(variable)
        elif variable != FAST_SYNCH:
            differs = difference(variable, values)
            usual = next(value for value, _ in differs.values if value != _UNSET)
            found.append(warn(outliers(values), f"{variable} differs", _remedy(variable, usual), [differs]))
    if variables and not found:
        shown = ", ".join(same[:4]) + (f" and {len(same) - 4} more" if len(same) > 4 else "")
        found.append(ok(list(variables), f"the same: {shown}" if same else "none of those that matter is set"))
    return found


def check_fast_synch(cluster: Cluster) -> list[Finding]:
    values = {name: of_host.get(FAST_SYNCH, _UNSET) for name, of_host in _of_ranks(cluster).items()}
    if len(set(values.values())) > 1:
        differs = difference(FAST_SYNCH, values)
        what = f"{FAST_SYNCH} differs: some ranks wait for the GPU in another way than others"
        return [fail(outliers(values), what, _remedy(FAST_SYNCH, "0"), [differs])]
    crowded = [h.name for h, facts in cluster.each_host("facts") if facts["system"] == "Darwin" and h.slots > 1]
    if crowded and not {*values.values()} <= {_UNSET, "", "0"}:
        what = f"{FAST_SYNCH} is set, and two or more ranks on one Mac have locked up its GPU with that"
        return [fail(crowded, what, f"start one rank on each Mac; or {_remedy(FAST_SYNCH, '0')}")]
    return [ok(list(values), f"{FAST_SYNCH} {value}") for value in set(values.values())]


def check_gpu_sync(cluster: Cluster) -> list[Finding]:
    """The cost of a synchronization between GPU and CPU, with MLX_METAL_FAST_SYNCH and without."""
    found = []
    variables = _of_ranks(cluster)
    for name, measured in cluster.each("gpu_sync"):
        if measured["skipped"]:
            found.append(skip(name, measured["skipped"]))
        elif measured["error"]:
            remedy = f"for all ranks --env {FAST_SYNCH}=0, and restart the Mac: sudo shutdown -r now"
            found.append(warn(name, measured["error"], remedy))
        else:
            without, fast = measured["microseconds"]["0"], measured["microseconds"]["1"]
            what = f"{without:.0f} us a synchronization, {fast:.0f} us with {FAST_SYNCH}=1"
            is_on = variables.get(name, {}).get(FAST_SYNCH) == "1"
            if not is_on and without > _SLOW_SYNC and fast < without / 2:
                remedy = f"with one rank a Mac try --env {FAST_SYNCH}=1; it has locked up GPUs, so watch the first runs"
                found.append(note(name, what, remedy))
            else:
                found.append(ok(name, what))
    return found


def _of_ranks(cluster: Cluster) -> dict[str, dict[str, str]]:
    """What ranks have on each host: what the launcher sets goes before what the host's shell does."""
    return {name: facts["variables"] | dict(cluster.options.variables) for name, facts in cluster.each("facts")}


def _remedy(variable: str, value: str) -> str:
    where = "remove it from /etc/zshenv, ~/.zshenv, /etc/environment and ~/.ssh/environment"
    return f"set it for all ranks, --env {variable}={value:.60}; or {where}"
