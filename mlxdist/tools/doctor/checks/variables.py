"""Checks that variables that change the work of ranks are the same on all hosts, above all MLX_METAL_FAST_SYNCH."""

from collections.abc import Iterator

from ..cluster import Cluster
from ..findings import Finding, difference, fail, note, ok, outliers, skip, warn

__all__ = ["FAST_SYNCH", "check_fast_synch", "check_gpu_sync", "check_variables"]

FAST_SYNCH = "MLX_METAL_FAST_SYNCH"
_UNSET = "(not set)"
_SLOW_SYNC = 50.0  # microseconds


def check_variables(cluster: Cluster) -> Iterator[Finding]:
    errors = {name: facts["variables_error"] for name, facts in cluster.each("facts") if facts["variables_error"]}
    for name, error in errors.items():
        yield fail(name, error, "unset it in the start files of its shell")
    variables = _of_ranks(cluster)
    same, is_same = [], not errors
    for variable in sorted({variable for of_host in variables.values() for variable in of_host}):
        values = {name: of_host.get(variable, _UNSET) for name, of_host in variables.items()}
        if len(set(values.values())) == 1:
            same.append(variable)
        elif variable != FAST_SYNCH:
            differs = difference(variable, values)
            usual = next(value for value, _ in differs.values if value != _UNSET)
            is_same = False
            yield warn(outliers(values), f"{variable} differs", _remedy(variable, usual), [differs])
    if variables and is_same:
        shown = ", ".join(same[:4]) + (f" and {len(same) - 4} more" if len(same) > 4 else "")
        yield ok(list(variables), f"the same: {shown}" if same else "none of those that matter is set")


def check_fast_synch(cluster: Cluster) -> Iterator[Finding]:
    values = {name: of_host.get(FAST_SYNCH, _UNSET) for name, of_host in _of_ranks(cluster).items()}
    crowded = [h.name for h, facts in cluster.each_host("facts") if facts["system"] == "Darwin" and h.slots > 1]
    if len(set(values.values())) > 1:
        differs = difference(FAST_SYNCH, values)
        what = f"{FAST_SYNCH} differs: some ranks wait for the GPU in another way than others"
        yield fail(outliers(values), what, _remedy(FAST_SYNCH, "0"), [differs])
    elif crowded and not {*values.values()} <= {_UNSET, "", "0"}:
        what = f"{FAST_SYNCH} is set, and two or more ranks on one Mac have locked up its GPU with that"
        yield fail(crowded, what, f"start one rank on each Mac; or {_remedy(FAST_SYNCH, '0')}")
    elif values:
        yield ok(list(values), f"{FAST_SYNCH} {next(iter(values.values()))}")


def check_gpu_sync(cluster: Cluster) -> Iterator[Finding]:
    """Compares the cost of a GPU-CPU synchronization with MLX_METAL_FAST_SYNCH and without."""
    variables = _of_ranks(cluster)
    for name, measured in cluster.each("gpu_sync"):
        if measured["skipped"]:
            yield skip(name, measured["skipped"])
        elif measured["error"]:
            remedy = f"for all ranks --env {FAST_SYNCH}=0, and restart the Mac: sudo shutdown -r now"
            yield warn(name, measured["error"], remedy)
        else:
            without, fast = measured["microseconds"]["0"], measured["microseconds"]["1"]
            what = f"{without:.0f} us a synchronization, {fast:.0f} us with {FAST_SYNCH}=1"
            is_on = variables.get(name, {}).get(FAST_SYNCH) == "1"
            if not is_on and without > _SLOW_SYNC and fast < without / 2:
                remedy = f"with one rank a Mac try --env {FAST_SYNCH}=1; it has locked up GPUs, so watch the first runs"
                yield note(name, what, remedy)
            else:
                yield ok(name, what)


def _of_ranks(cluster: Cluster) -> dict[str, dict[str, str]]:
    """The variables of the ranks on each host: those that the launcher sets override those of the host's shell."""
    return {name: facts["variables"] | dict(cluster.options.variables) for name, facts in cluster.each("facts")}


def _remedy(variable: str, value: str) -> str:
    where = "remove it from /etc/zshenv, ~/.zshenv, /etc/environment and ~/.ssh/environment"
    return f"set it for all ranks, --env {variable}={value:.60}; or {where}"
