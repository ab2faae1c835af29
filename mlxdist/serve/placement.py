"""Which rank holds which shard of the model: given by the operator, or planned by rank 0, which sends the plans."""

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from mlx import nn
from rich.console import Console
from rich.table import Table

from mlxdist.base.environment import Environment
from mlxdist.base.errors import InvalidArgument
from mlxdist.base.host_shards import open_checkpoint
from mlxdist.base.json_reader import parse_json
from mlxdist.base.tables import size
from mlxdist.nn.layout.measured_shares import RankShares, resolve, resolve_stages
from mlxdist.nn.models.load import LoadReport
from mlxdist.nn.models.load.weight_sources import open_model
from mlxdist.nn.models.plan import Plan, plan_shards
from mlxdist.nn.pipeline_parallel import StagePlan, plan_stages
from mlxdist.nn.rank_checks import agreed, texts
from mlxdist.runtime.group.group import Group, engine_of
from mlxdist.runtime.operations.blobs import broadcast_blob

from .decode_cost import DecodeCost, Estimate, MeasuredRanks
from .log import say

__all__ = ["Demands", "Holding", "Layout", "ModelPlacement", "choose", "place", "show"]

Grid = tuple[int, int, int]  # tp, ep, pp


@dataclass(frozen=True)
class Layout:
    """An operator's choices about the placement; rank 0 makes the others.

    Attributes:
        tp, ep: the number of ranks that share every layer, and that share the experts.
        pipeline: whether the remaining ranks are stages, with different layers each.
        rank_shares: shares of the tp ranks, or of the stages where tp is 1: numbers, "memory" or "compute".
        plan: a file on rank 0, with the output of `mlxdist shard --json`.
    """

    tp: int | None = None
    ep: int | None = None
    pipeline: bool = False
    rank_shares: RankShares | None = None
    plan: str | None = None


@dataclass(frozen=True)
class ModelPlacement:
    """The plans that :func:`load_sharded` takes, the same on all ranks.

    Attributes:
        plan: which rank of a stage holds which shard of its layers.
        stage_plan: which stage has which layers; None for a single stage.
        reason: why rank 0 chose it, by predicted times, or why not an earlier candidate; empty if there was none.
    """

    plan: Plan
    stage_plan: StagePlan | None = None
    reason: str = ""

    @property
    def name(self) -> str:
        """A short name, such as "tp=2 x pp=2"."""
        pp = 1 if self.stage_plan is None else self.stage_plan.stages
        return _name((self.plan.tp, self.plan.ep, pp))

    def describe(self) -> str:
        """The name, the shares and the reason, in words."""
        shares = f", rank shares {list(self.plan.rank_shares)}" if self.plan.rank_shares else ""
        return f"{self.name}{shares}" + (f", since {self.reason}" if self.reason else "")

    def to_json(self) -> str:
        """All fields as JSON text."""
        stages = "" if self.stage_plan is None else self.stage_plan.to_json()
        return json.dumps([self.plan.to_json(), stages, self.reason])

    @property
    def most(self) -> float:
        """The largest share of the weights on a rank. Defined for stages or shards, but not for both together."""
        if self.stage_plan is not None:
            return max(map(self.stage_plan.bytes, range(self.stage_plan.stages))) / self.plan.full_bytes
        return max(map(self.plan.bytes, range(self.plan.ranks))) / self.plan.full_bytes


@dataclass(frozen=True)
class Demands:
    """The demands of a server on its placement, beside the operator's layout.

    Attributes:
        whole_layers: an option that is for ranks that share every layer, such as "--mtp"; "" for none.
        requests, chunk, neighbors: as of :func:`cache_memory`.
    """

    whole_layers: str = ""
    requests: int = 1
    chunk: int = 0
    neighbors: int | None = None


def place(directory: Path, group: Group, layout: Layout, demands: Demands = Demands()) -> ModelPlacement:
    """Rank 0's placement, on all ranks. Collective. Only rank 0 reads ``directory``, and no weights.

    Raises:
        InvalidArgument: on all ranks, the model cannot be sharded in this way, or over this number of ranks, or in
            stages with such an option; or the file has no plan.
    """
    document = ""
    measured = MeasuredRanks.of(group, demands.neighbors)
    with agreed("serve", group):
        if group.rank() == 0:
            model, _, _ = open_model(open_checkpoint(directory))
            document = choose(model, group.size(), layout, demands, measured).to_json()
    shards, stages, reason = parse_json(broadcast_blob(document.encode(), group))
    return ModelPlacement(Plan.from_json(shards), StagePlan.from_json(stages) if stages else None, reason)


@dataclass(frozen=True)
class Holding:
    """The shard that a rank holds.

    Attributes:
        rank, host: which rank it is, and where.
        layers: such as "all layers", or "layers 0 to 11".
        bytes: of its weights.
        share: of those of the model.
    """

    rank: int
    host: str
    layers: str
    bytes: int
    share: float


def show(placement: ModelPlacement, report: LoadReport, group: Group) -> list[Holding]:
    """Prints on the first rank of a group which rank holds which shard, and returns it there; others get an empty list.

    Collective: one all_gather.
    """
    world = engine_of(group).world
    rows = texts(f"{world.rank}\n{world.host}\n{report.bytes_held}\n{report.seconds:.1f}", group)
    if group.rank() != 0:
        return []
    say(f"{size(report.bytes_total)} of weights, {placement.describe()}")
    table = Table(box=None, pad_edge=False)
    for name in ("rank", "host", "layers", "holds", "share", "loaded in"):
        table.add_column(name, justify="left" if name in ("host", "layers") else "right")
    holdings = []
    for rank, row in enumerate(rows):
        number, host, held, seconds = row.split("\n")
        stage = placement.stage_plan and placement.stage_plan.layers(rank // placement.plan.ranks)
        layers = f"{stage[0]} to {stage[-1]}" if stage else "all"
        share = int(held) / report.bytes_total
        table.add_row(number, host, layers, size(int(held)), f"{share:.0%}", f"{seconds} s")
        named = f"layers {layers}" if stage else "all layers"
        holdings.append(Holding(int(number), host, named, int(held), share))
    Console(stderr=True, width=None if sys.stderr.isatty() else 160, highlight=False).print(table)
    return holdings


def choose(
    model: nn.Module, ranks: int, layout: Layout, demands: Demands = Demands(), measured: MeasuredRanks | None = None
) -> ModelPlacement:
    """The placement that ``layout`` gives; else the one of the candidates that fits and decodes a token in the least
    time, where that can be predicted; else the first one that saves enough memory.

    Raises:
        InvalidArgument: as of :func:`place`.
    """
    if layout.plan is not None:
        return _of_file(model, ranks, layout, demands)
    if (grid := _given_grid(ranks, layout)) is not None:
        try:
            return _placed(model, grid, layout, demands)
        except InvalidArgument as error:
            raise InvalidArgument(f"serve: {_name(grid)}: {error}") from error
    placed = None
    has_numbers = layout.rank_shares is not None and not isinstance(layout.rank_shares, str)
    if measured is not None and not has_numbers:  # which are for one way to share
        placed = _fastest(model, ranks, layout, demands, measured)
    return placed or _first(model, ranks, layout, demands)


def _fastest(
    model: nn.Module, ranks: int, layout: Layout, demands: Demands, measured: MeasuredRanks
) -> ModelPlacement | None:
    """The candidate with the least predicted time of a token, of those that fit and save memory; None: there is none.

    Of equally fast ones it is that with the fewest stages.
    """
    try:
        cost = DecodeCost(model, measured, demands.requests, demands.chunk)
    except InvalidArgument:  # no stages, and no layers to count
        return None
    sizes = [size for size in range(ranks, 0, -1) if ranks % size == 0]
    shared = [(size, 1, ranks // size) for size in sizes] + [(1, size, ranks // size) for size in sizes if size > 1]
    found: dict[str, tuple[float, ModelPlacement]] = {}
    refused: dict[str, list[str]] = {}
    for grid in sorted(shared, key=lambda grid: grid[2]):
        if grid[2] > 1 and demands.whole_layers:
            continue
        try:
            placed = _placed(model, grid, layout, demands)
            if 1 < placed.plan.ranks < ranks and not placed.plan.sharded:
                raise InvalidArgument("the ranks of a stage would hold the same weights")
            found[placed.name] = _seconds(cost.of(placed.plan, placed.stage_plan), ranks), placed
        except InvalidArgument as error:
            refused.setdefault(str(error), []).append(_name(grid))
    if not found:
        return None
    best = min(found, key=lambda name: found[name][0])
    others = [f"with {name} {_milliseconds(seconds)}" for name, (seconds, _) in found.items() if name != best]
    times = ", ".join([f"a token takes {_milliseconds(found[best][0])}", *others])
    why = [f"{', '.join(names)}: {text}" for text, names in refused.items()]
    return replace(found[best][1], reason="; ".join([times, *why]))


def _seconds(estimate: Estimate, ranks: int) -> float:
    """The predicted time of a token. Raises InvalidArgument: why this is no candidate."""
    if estimate.most > _enough(ranks):
        raise InvalidArgument(f"a rank would hold {estimate.most:.0%} of the weights")
    if estimate.needed > estimate.room:
        needed, room = size(int(estimate.needed)), size(int(estimate.room))
        raise InvalidArgument(f"a rank would need {needed} for weights and caches, and has {room}")
    if estimate.seconds is None:
        raise InvalidArgument("exchanges between such ranks are not measured")
    return estimate.seconds


def _first(model: nn.Module, ranks: int, layout: Layout, demands: Demands) -> ModelPlacement:
    """Tensor parallelism, expert parallelism or stages: the first one where the rank that holds most saves at least
    half of what an even split would save; else the one that saves most."""
    found: list[ModelPlacement] = []
    refused: list[str] = []
    for grid in ((ranks, 1, 1), (1, ranks, 1), (1, 1, ranks)):
        try:
            placed = _placed(model, grid, layout, demands)
        except InvalidArgument as error:
            refused.append(f"{_name(grid)}: {error}")
            continue
        found.append(replace(placed, reason="; ".join(refused)))
        if placed.most <= _enough(ranks):
            return found[-1]
        refused.append(f"{_name(grid)}: a rank would hold {placed.most:.0%} of the weights")
    if not found:
        raise InvalidArgument(f"serve: {ranks} ranks cannot share this model: {'; '.join(refused)}")
    return min(found, key=lambda each: each.most)


def _enough(ranks: int) -> float:
    """The largest share of the weights that a rank may hold: an even split leaves 1 / ranks of them on each, and this
    is in the middle between that and all."""
    return (1 + 1 / ranks) / 2


def _placed(model: nn.Module, grid: Grid, layout: Layout, demands: Demands) -> ModelPlacement:
    """The placement on one grid. Raises InvalidArgument."""
    tp, ep, pp = grid
    if why := _no_stages(pp, layout, demands):
        raise InvalidArgument(why)
    columns, rows = _shares(layout.rank_shares, *grid)
    plan = plan_shards(model, tp, ep, rank_shares=columns)
    if ep > 1 and not any(shard.kind == "experts" for shard in plan.sharded):
        raise InvalidArgument("the model has no experts that can be on ranks")
    return ModelPlacement(plan, plan_stages(model, pp, rank_shares=rows) if pp > 1 else None)


def _no_stages(stages: int, layout: Layout, demands: Demands) -> str:
    """Why there cannot be that many stages; "" where there can."""
    option = demands.whole_layers
    if stages == 1 or not option:
        return ""
    advice = "--tp in place of --pipeline" if layout.pipeline else "-n another number of ranks"
    return f"{option} is for ranks that share every layer, not stages; give {advice}, or leave out {option}"


def _given_grid(ranks: int, layout: Layout) -> Grid | None:
    """The grid that ``layout`` gives, or the only one; None: it gives none."""
    if layout.tp is layout.ep is None and not layout.pipeline:
        return None if ranks > 1 else (1, 1, 1)
    ep = layout.ep or 1
    tp = layout.tp or (1 if layout.pipeline else max(ranks // ep, 1))
    pp = max(ranks // (tp * ep), 1) if layout.pipeline else 1
    if tp * ep * pp != ranks:
        wrong = "cannot be equal stages of" if layout.pipeline else "are not"
        more = "" if layout.pipeline else "; with --pipeline those that are left are stages"
        raise InvalidArgument(f"serve: the {ranks} ranks {wrong} tp={tp} times ep={ep}{more}")
    return tp, ep, pp


def _shares(given: RankShares | None, tp: int, ep: int, pp: int) -> tuple[RankShares | None, RankShares | None]:
    """The shares of the tp ranks, and those of the stages; None for equal ones."""
    if given is None and Environment.read().rank_shares_memory:
        given = "memory"
    if given is None or isinstance(given, str):
        shares = resolve("serve", given, tp, ep * pp), resolve_stages("serve", given, pp)
    else:
        shares = (None, given) if tp == 1 < pp else (given, None)
    columns, rows = (each if each is None or len(set(each)) > 1 else None for each in shares)
    return columns, rows


def _of_file(model: nn.Module, ranks: int, layout: Layout, demands: Demands) -> ModelPlacement:
    if (layout.tp, layout.ep, layout.rank_shares) != (None, None, None):
        raise InvalidArgument("serve: the plan has its tp, ep and rank shares; leave out --tp, --ep and --rank-shares")
    try:
        plan = Plan.from_json(json.dumps(parse_json(Path(layout.plan or "").read_bytes())["plan"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidArgument(
            f"serve: --plan must be a file with what `mlxdist shard --json` prints: {type(error).__name__}: {error}"
        ) from error
    stages = ranks // plan.ranks if layout.pipeline else 1
    if why := _no_stages(stages, layout, demands):
        raise InvalidArgument(f"serve: {why}")
    return ModelPlacement(plan, plan_stages(model, stages) if stages > 1 else None)


def _name(grid: Grid) -> str:
    return " x ".join(f"{name}={number}" for name, number in zip(("tp", "ep", "pp"), grid) if number > 1) or "one rank"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
