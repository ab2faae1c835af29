"""Serves one model of mlx-lm, sharded over all ranks of a job, to many users: `mlxdist serve`.

mlx-lm's own server runs a loop on every rank. The ranks diverge where a decision depends on something that one rank
alone has: a request, a clock, a client that has gone, the bytes of a shard. Here rank 0 decides for all ranks:

decisions.py        what rank 0 decides before a step, as one small message: which requests begin, which end
scheduler.py        rank 0: the queue, who is admitted or preempted, who has left or is late
answer.py           rank 0: the tokens of an answer with their text; stop_words.py: where its text ends
placement.py        Layout: which rank holds what of the model, given or chosen
worker.py           BatchLimits; all ranks: carry out the message, and run a step of mlx-lm's BatchGenerator
speculation.py      drafts, which the model checks several at a time
memory.py           how many tokens of KV caches every rank has memory for
prefix_cache.py     mlx-lm's LRUPromptCache with a limit in tokens, which are the same on all ranks
quantized_cache.py  KV caches of a few bits in batches
adapters.py         the adapter of each row of a batch
snapshot.py         the prefix cache on disk, from one run to the next
sampling.py         mlx-lm's samplers, each with the random state of its request
grammar.py          structured output: which tokens may follow, by llguidance
vocabulary.py       the output layer sharded over the vocabulary, and samples from its shards
frontend.py         rank 0: makes tokens of requests
http.py             rank 0: mlx-lm's HTTP API, with limits, keys, /health and /metrics
chat.py             rank 0: a terminal in place of HTTP, `mlxdist chat`
proxy.py            in the launcher, before rank 0: stays while ranks restart; proxy_client.py: one connection of it
listener.py         where both listen; refusal.py: a request that is not served
limits.py           limits of the fields of a request
metrics.py          counters as Prometheus reads them
options.py          ServeOptions, the operator's options; loading.py: the model, with the parts that options add
server.py           Server: joins them

What is mlx-lm's stays mlx-lm's: the HTTP API, chat templates, tool parsers, BatchGenerator, caches and samplers.

Public names load on first use: the launcher's proxy needs neither MLX nor mlx-lm.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .options import ServeOptions as ServeOptions
    from .placement import Layout as Layout
    from .server import Server as Server
    from .worker import BatchLimits as BatchLimits

_MODULE_OF = {"BatchLimits": "worker", "Layout": "placement", "ServeOptions": "options", "Server": "server"}

__all__ = ["BatchLimits", "Layout", "ServeOptions", "Server"]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'mlxdist.serve' has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)
