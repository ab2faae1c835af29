"""Serves one model of mlx-lm, sharded over all ranks of a job, to many users: `mlxdist serve`.

mlx-lm's own server runs a loop on every rank. The ranks diverge where a decision depends on something that one rank
alone has: a request, a clock, a client that has gone, the bytes of a shard. Here rank 0 decides for all ranks:

In the launcher, or beside rank 0 in a thread; without MLX:

api/                requests and answers of OpenAI's and Anthropic's APIs, as types
application.py      the application of HTTP (Starlette); http_checks.py: what is checked before a body is read
http_server.py      runs it (uvicorn); http_connection.py: bounds of a connection; listener.py: where it listens
http_options.py     HttpOptions; log.py: a line for each request
rank_zero.py        the client of rank 0, which stays while ranks restart
protocol.py         between the application and rank 0; refusal.py: a request that is not served
page/               the page of the address, for browsers; cluster.py: the state of all ranks, which it shows
authenticated_stream.py  what carries it between two hosts, for both ends
metrics.py          counters and histograms as Prometheus reads them

Rank 0:

endpoint.py         the other end of the protocol; http_clients.py: HTTP as the source of requests
preparation_pool.py processes that make requests into tokens; preparation_process.py: rank 0's end of one,
                    preparation_child.py: the process, preparation.py: its work, prepared.py: the result
cluster_status.py   what rank 0 says of all ranks
tool_calls.py       calls of tools that a request asks for, and that a model has written
scheduler.py        the queue, who is admitted or preempted, who has left or is late
disaggregated_scheduler.py  schedulers of ranks that compute prompts and of ranks that generate
answer.py           the tokens of an answer with their text; stop_words.py: where its text ends
output.py           text, thoughts and calls of tools of an answer; token_bytes.py: the bytes of a token
chat.py             a terminal in place of HTTP, `mlxdist chat`

All ranks:

decisions.py        what rank 0 decides before a step, as one small message: which requests begin, which end
placement.py        Layout: which rank holds what of the model, given or chosen; decode_cost.py: by predicted times
worker.py           BatchLimits; carry out the message, and run a step of mlx-lm's BatchGenerator
disaggregation.py   Side: the ranks that share a model, where some compute prompts and others generate
disaggregated_worker.py  their steps; kv_transfers.py: what is sent between them; remote_outcome.py: results for rank 0
speculation.py      drafts, which the model checks several at a time; draft.py: the interface of what proposes them, and
                    drafts from the text; draft_model.py: those of a smaller model; mtp.py: those of a head of the model
memory.py           the memory of every rank for caches
prefix_tree.py      the prefix cache, a radix tree over tokens; cache_blocks.py: the parts of caches that it holds
prefix_disk.py      its disk tier
quantized_cache.py  KV caches of a few bits in batches
row_caches.py       values of the rows of a batch; adapters.py: the adapter of each row
sliding_windows.py  a mend of mlx-lm's batches of them
prompt_logprobs.py  log-probabilities of the tokens of prompts; token_logprobs.py: of sampled ones
sampling.py         mlx-lm's samplers, each with the random state of its request
grammar.py          structured output: which tokens may follow, by llguidance
vocabulary.py       the output layer sharded over the vocabulary, and samples from its shards
options.py          ServeOptions, the operator's options; loading.py: the model, with the parts that options add
server.py           Server: joins them

What is mlx-lm's stays mlx-lm's: chat templates, tool parsers, BatchGenerator, caches and samplers.

Public names load on first use: the application needs neither MLX nor mlx-lm.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .http_options import HttpOptions as HttpOptions
    from .options import ServeOptions as ServeOptions
    from .placement import Layout as Layout
    from .server import Server as Server
    from .worker import BatchLimits as BatchLimits

_MODULE_OF = {
    "BatchLimits": "worker",
    "HttpOptions": "http_options",
    "Layout": "placement",
    "ServeOptions": "options",
    "Server": "server",
}

__all__ = ["BatchLimits", "HttpOptions", "Layout", "ServeOptions", "Server"]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'mlxdist.serve' has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)
