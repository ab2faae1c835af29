"""The page of `mlxdist top --web`: the cluster view of `mlxdist serve`, for any job."""

import asyncio
import contextlib
import time
from functools import partial
from typing import Any

from starlette.applications import Starlette

from mlxdist.base.errors import InvalidArgument, ResourceError
from mlxdist.cluster.hostfile.options import HostSelection
from mlxdist.launch.restarts import beginning_of_restarts
from mlxdist.serve.application import checked
from mlxdist.serve.cluster import cluster_route, cluster_view, without_ranks
from mlxdist.serve.http_options import HttpOptions
from mlxdist.serve.http_server import WebServer
from mlxdist.serve.listener import listen
from mlxdist.serve.metrics import HttpMetrics
from mlxdist.serve.page import page_routes

from .collect import find_ranks
from .top import Watch

__all__ = ["JobPage"]

_SECONDS = 1.0  # for ranks to respond
_SEARCH_SECONDS = 2.0  # between two searches for a job that has ended: each connects to all hosts


class JobPage:
    """A page with the state of a job's ranks: a context manager.

    Where the job ends, the page says so, and looks for its restart, which has the same name with another number.

    Args:
        job: the name of the job, or its beginning; None for the only one.
        selection: the hosts to look at.
        host, port: where to listen.
        key: what clients send; empty for none.

    Attributes:
        address: the URL of the page.

    Raises:
        InvalidArgument: there is no such job, or more than one, or nothing can listen there.
        ResourceError: no host responds.
    """

    def __init__(self, job: str | None, selection: HostSelection, host: str, port: int, key: str) -> None:
        self._job, self._selection = job, selection
        self._ranks = contextlib.ExitStack()
        self._watch: Watch | None = None
        self._last: dict[str, Any] | None = None
        self._ended, self._search_at = "", 0.0  # why there is no job, and when to look for it again
        self._find()
        options = HttpOptions(host=host, port=port, api_key=key, access_log=False)
        self._server = WebServer(listen(host, port), options, partial(self._application, options))
        self.address = self._server.address

    def __enter__(self) -> "JobPage":
        self._server.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.__exit__(*exception)
        self._ranks.close()

    def _application(self, options: HttpOptions, is_loopback: bool) -> Starlette:
        pages = page_routes(has_key=bool(options.api_key), has_chat=False)
        routes = [*pages, cluster_route(lambda: asyncio.to_thread(self._read))]
        return checked(routes, options, HttpMetrics([route.path for route in routes]), is_loopback)

    def _find(self) -> None:
        ranks = self._ranks.enter_context(find_ranks(self._job, self._selection))
        self._job, self._watch = ranks.job, Watch(ranks)

    def _read(self) -> dict[str, Any]:
        """The view now; one thread at a time calls this."""
        try:
            if self._watch is None and time.monotonic() < self._search_at:
                return without_ranks(self._last, self._ended)
            if self._watch is None:
                self._search_at = time.monotonic() + _SEARCH_SECONDS
                self._find()
            assert self._watch is not None  # it is found
            view = self._watch.refresh(_SECONDS)
        except (InvalidArgument, ResourceError):  # no restart yet, or none at all
            return without_ranks(self._last, self._ended)
        if not view.ended and view.ranks:
            self._last, self._ended = cluster_view(view), ""
            return self._last
        if not view.ended:
            return without_ranks(self._last, "; ".join(["the ranks do not respond", *view.notes]))
        self._ranks.close()
        self._watch, self._job = None, beginning_of_restarts(view.job)  # restarts have numbers behind it
        self._ended = self._ended or f"job {view.job} has ended"
        return without_ranks(self._last, self._ended)
