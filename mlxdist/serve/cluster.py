"""The cluster as the page shows it: GET /cluster of `mlxdist serve`, and of `mlxdist top --web`."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mlxdist.base.errors import InvalidArgument
from mlxdist.base.validation import build
from mlxdist.runtime.diagnostics.flight_records import check_record
from mlxdist.runtime.observation.stragglers import RankState
from mlxdist.runtime.observation.view import View, Viewer
from mlxdist.runtime.rendezvous.heartbeat import PeerStatus

from .rank_zero import RankZero
from .refusal import Refusal

__all__ = ["Cluster", "cluster_route", "cluster_view", "without_ranks"]

_SECONDS = 1.0  # for which a view is that of all who ask
_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
_FACTS = (
    "rank", "host", "pid", "step", "total_steps", "bubble", "operation", "in_operation", "call_site", "elapsed",
    "waiting_on", "gbps",
)  # fmt: skip

_View = dict[str, Any]


def cluster_route(read: Callable[[], Awaitable[_View]]) -> Route:
    """The route of /cluster. However many ask, ``read`` runs once at a time, and a second after the last one at the
    earliest."""
    latest: asyncio.Task[_View] | None = None
    fresh_until = 0.0

    async def timed() -> _View:
        nonlocal fresh_until
        view = await read()
        fresh_until = time.monotonic() + _SECONDS
        return view

    async def respond(request: Request) -> Response:
        nonlocal latest
        if latest is None or (latest.done() and time.monotonic() >= fresh_until):
            latest = asyncio.ensure_future(timed())
        return JSONResponse(await asyncio.shield(latest), headers=_HEADERS)

    return Route("/cluster", respond)


def cluster_view(view: View) -> _View:
    """The view of a job as /cluster has it."""
    return {
        "time": time.time(),
        "is_ready": not view.ended,
        "reason": "the job has ended" if view.ended else "",
        "job": view.job,
        "model": "",
        "layout": "",
        "requests": None,
        "ranks": [_row(state) for state in view.ranks],
        "findings": view.findings,
        "warnings": view.warnings,
        "notes": view.notes,
    }


def without_ranks(last: _View | None, reason: str, failed: int | None = None) -> _View:
    """The view while no rank serves, with the ranks of the ``last`` one. ``failed``: the rank that failed first."""
    last = last or cluster_view(View("", [], [], [], ended=True))
    ranks = [row | {"state": "failed" if row["rank"] == failed else "down"} for row in last["ranks"]]
    empty: _View = {"time": time.time(), "is_ready": False, "reason": reason, "requests": None, "ranks": ranks}
    return last | empty | {"findings": [], "warnings": [], "notes": []}


def _row(state: RankState) -> _View:
    if state.is_gone:
        name = "failed"
    elif not state.has_responded:
        name = "silent"
    else:
        name = "straggler" if state.is_straggler else "ok"
    facts = {fact: getattr(state, fact) for fact in _FACTS}
    memory = state.memory
    facts |= {"memory": memory and memory.used, "memory_limit": memory and memory.total}
    facts |= {"mlx_memory": memory and {"active": memory.active, "peak": memory.peak}}
    return facts | {"state": name, "held": None}


class Cluster:
    """The cluster of a server. It keeps what it has last seen, for when no rank serves.

    Args:
        rank_zero: the client of rank 0, which is asked for its :class:`~mlxdist.serve.cluster_status.ClusterStatus`.
    """

    def __init__(self, rank_zero: RankZero) -> None:
        self._rank_zero, self._viewer = rank_zero, Viewer()
        self._last: _View | None = None

    async def view(self) -> _View:
        """The view now. Where no rank serves it has the reason."""
        try:
            status = (await self._rank_zero.status(cluster=True))["cluster"]
        except Refusal as refusal:
            return without_ranks(self._last, str(refusal), self._rank_zero.failed_rank)
        requests = status["requests"]
        view = cluster_view(self._observed(status["observation"]))
        if not (requests["running"] or requests["queued"]):
            view |= _idle(view)
        names = {name: status[name] for name in ("model", "layout", "requests")}
        rows = {row["rank"]: row for row in view["ranks"]}
        rows |= {each["rank"]: _held(rows.get(each["rank"]), each) for each in status["held"]}
        view |= names | {"ranks": [rows[rank] for rank in sorted(rows)]}
        self._last = view
        return view

    def _observed(self, observation: Any) -> View:
        if observation is None:
            return View("", [], [], [], ended=False)
        records, notes = {}, list(observation["notes"])
        for value in observation["records"]:
            try:
                record = check_record(value, "what a rank has sent")
            except InvalidArgument as error:
                notes.append(str(error))
                continue
            records[record.rank] = record
        members = [build(PeerStatus, member) for member in observation["members"]]
        job = next((record.job for record in records.values()), "")
        return self._viewer.view(job, records, {member.rank: member for member in members}, notes)


def _idle(view: _View) -> _View:
    """Returns what changes without requests: the others wait for rank 0's next message, and no rank is late."""
    ranks = [row | ({"state": "ok"} if row["state"] == "straggler" else {}) for row in view["ranks"]]
    return {"ranks": ranks, "findings": []}


def _held(row: _View | None, held: _View) -> _View:
    """A row with what the rank holds. Without an observation, as where no launcher has started it, there is no more."""
    row = row or _row(RankState(held["rank"], host=held["host"], has_responded=True))
    facts = {name: held[name] for name in ("layers", "bytes", "share")}
    return row | {"held": facts, "memory": held["memory"], "memory_limit": held["limit"], "host": held["host"]}
