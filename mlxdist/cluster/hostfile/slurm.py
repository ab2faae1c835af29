"""SLURM's descriptions of its hosts: compact lists such as ``node-[21,23-26],login``, and tasks per node."""

import re
from collections.abc import Iterator, Mapping

from mlxdist.base.environment import MAX_RANKS
from mlxdist.base.errors import InvalidArgument

from .hosts import Host, Hostfile, Problems, check_name

__all__ = ["expand", "from_slurm", "tasks_per_node"]

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_DIGITS = 18  # of a number in a list; more would be no host's


def expand(nodes: str) -> list[str]:
    """The names that a SLURM host list stands for, as ``scontrol show hostnames`` prints them.

    ``a,b``, ``n[7-8]``, ``n[08-11]`` (leading zeros stay), ``node-[21,23-26]``, ``rack[1-2]n[01-02]``, ``n[1-2]-ib``.

    Raises:
        InvalidArgument: malformed, or more than `MAX_RANKS` names.
    """
    names: list[str] = []
    for item in _items(nodes):
        for name in _expand_item(item, nodes):
            names.append(name)
            # Checked inside the loop, so that n[0-999999999] does not fill the memory first.
            if len(names) > MAX_RANKS:
                raise InvalidArgument(f"host list {nodes!r:.80}: more than {MAX_RANKS} hosts")
    return names


def _items(nodes: str) -> Iterator[str]:
    """The items of a host list, which commas outside of brackets separate."""
    depth = begin = 0
    for at, letter in enumerate(nodes + ","):
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            raise InvalidArgument(f"host list {nodes!r:.80}: unexpected {letter!r} at letter {at + 1}")
        if letter == "," and depth == 0:
            if begin == at:
                raise InvalidArgument(f"host list {nodes!r:.80}: a name is missing at letter {at + 1}")
            yield nodes[begin:at]
            begin = at + 1
    if depth:
        raise InvalidArgument(f"host list {nodes!r:.80}: a ] is missing")


def _expand_item(item: str, nodes: str) -> Iterator[str]:
    """The names that one item stands for. The first bracket varies slowest, so names are in numeric order."""
    before, bracket, rest = item.partition("[")
    if not bracket:
        if wrong := check_name(item):
            raise InvalidArgument(f"host list {nodes!r:.80}: {wrong}")
        yield item
        return
    inside, _, after = rest.partition("]")
    for number in _numbers(inside, nodes):
        yield from _expand_item(before + number + after, nodes)


def _numbers(inside: str, nodes: str) -> Iterator[str]:
    for part in inside.split(","):
        match = _RANGE.fullmatch(part)
        if not match or max(map(len, filter(None, match.groups()))) > _DIGITS:
            raise InvalidArgument(f"host list {nodes!r:.80}: {part!r:.80} is neither a number nor a range such as 3-7")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise InvalidArgument(f"host list {nodes!r:.80}: {part!r} goes backwards")
        for number in range(int(first), int(last) + 1):
            yield f"{number:0{len(first)}}"


def tasks_per_node(tasks: str, nodes: int) -> list[int]:
    """The tasks on each of ``nodes`` hosts, from SLURM_TASKS_PER_NODE: ``4``, ``2(x3),1``. Raises InvalidArgument: the
    text is malformed, or is for another number of hosts."""
    counts: list[int] = []
    for part in tasks.split(","):
        match = _TASKS.fullmatch(part)
        if not match or len(part) > _DIGITS:
            raise InvalidArgument(f"SLURM_TASKS_PER_NODE={tasks!r:.80}: {part!r:.80} is no number such as 4 or 4(x2)")
        counts += [int(match[1])] * min(int(match[2] or 1), MAX_RANKS + 1)
        if len(counts) > MAX_RANKS:
            raise InvalidArgument(f"SLURM_TASKS_PER_NODE={tasks!r:.80}: more than {MAX_RANKS} hosts")
    if len(counts) != nodes:
        raise InvalidArgument(f"SLURM_TASKS_PER_NODE={tasks!r:.80} is for {len(counts)} hosts, but there are {nodes}")
    if min(counts) < 1:
        raise InvalidArgument(f"SLURM_TASKS_PER_NODE={tasks!r:.80}: a host without a task")
    return counts


def from_slurm(environ: Mapping[str, str], slots: int | None = None) -> Hostfile:
    """The hosts of the allocation that this process runs in.

    Args:
        environ: SLURM_JOB_NODELIST, and SLURM_TASKS_PER_NODE where it is set.
        slots: ranks on each host, instead of SLURM's tasks.

    Raises:
        InvalidArgument: not inside an allocation, or SLURM's variables are malformed.
    """
    nodes = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if not nodes:
        raise InvalidArgument(
            "SLURM_JOB_NODELIST is not set: this is no SLURM allocation; run it inside salloc or sbatch, or give a list"
        )
    names = expand(nodes)
    tasks = environ.get("SLURM_TASKS_PER_NODE")
    counts = [slots] * len(names) if slots else tasks_per_node(tasks, len(names)) if tasks else [1] * len(names)
    problems = Problems()
    hosts = [Host(name, count) for name, count in zip(names, counts)]
    problems.check_hosts(hosts, repeated=False)
    if problems.errors:
        raise InvalidArgument(f"SLURM_JOB_NODELIST={nodes!r:.80}: {problems.errors[0][1]}")
    return Hostfile(tuple(hosts), source="SLURM_JOB_NODELIST", format="slots")
