"""The options of `mlxdist serve`."""

import re
from dataclasses import dataclass, field
from typing import Any

from mlxdist.base.errors import InvalidArgument

from .decisions import MAX_ADAPTERS
from .http_options import HttpOptions
from .placement import Demands, Layout
from .worker import BatchLimits

__all__ = ["ServeOptions"]


@dataclass(frozen=True)
class ServeOptions:
    """The options of `mlxdist serve`.

    Attributes:
        model: a directory, or the name of a model that `mlxdist pull` has fetched.
        http: where the application of HTTP listens, and to whom it answers.
        application: the address of the launcher's application; rank 0 then listens for it alone. Empty for none.
        layout: which rank holds which shard of the model.
        prefill_ranks, decode_ranks: the ranks that compute prompts, and those that generate, each with all of the model
            among them; empty for both: all ranks do both.
        stream_weights: whether only rank 0 has the model, and sends the other ranks their shards.
        split_blocks: whether the layers are split blocks where they can be; None: where they are faster, too.
        adapters: names and directories of adapters; each request uses one of them, or none.
        adapter_path: a directory of adapters that all requests use; without ``adapters``.
        draft_model: a directory or name like ``model``, with the same tokenizer; None for none.
        shard_draft_model: whether each rank has a shard of it, instead of all of it.
        mtp: whether the model's own head for multi-token prediction drafts.
        shard_vocabulary: whether each rank computes the logits of a part of the vocabulary.
        limits: the limits of the batch.
        max_queue: requests that wait; more get 429.
        drain: seconds that requests have to end after SIGTERM.
        max_context: tokens of a prompt and its answer; None for the limit in the model's config.json.
        defaults: values for max_tokens, temp, top_p, top_k and min_p of a request, with the names of mlx_lm.server.
        kv_bits: bits of an element of the KV caches; None for the model's dtype.
        kv_group_size: elements of a head that share a scale and a bias, with ``kv_bits``.
        prompt_cache_dir: the directory of the prefix cache's disk tier; None for none.
        prompt_cache_disk: bytes that each rank may have there.
        chat_template_args: variables of the chat template.
    """

    model: str
    http: HttpOptions = HttpOptions()
    application: str = ""
    layout: Layout = Layout()
    prefill_ranks: tuple[int, ...] = ()
    decode_ranks: tuple[int, ...] = ()
    stream_weights: bool = False
    split_blocks: bool | None = None
    adapters: tuple[tuple[str, str], ...] = ()
    adapter_path: str | None = None
    draft_model: str | None = None
    shard_draft_model: bool = False
    mtp: bool = False
    shard_vocabulary: bool = False
    limits: BatchLimits = BatchLimits()
    max_queue: int = 256
    drain: float = 30.0
    max_context: int | None = None
    kv_bits: int | None = None
    kv_group_size: int = 64
    prompt_cache_dir: str | None = None
    prompt_cache_disk: int = 100_000_000_000
    defaults: dict[str, float] = field(default_factory=dict)
    chat_template_args: dict[str, Any] = field(default_factory=dict)

    @property
    def is_disaggregated(self) -> bool:
        """Whether some ranks compute prompts, and the others generate."""
        return bool(self.prefill_ranks or self.decode_ranks)

    def demands(self, limits: BatchLimits, neighbors: int | None) -> Demands:
        """The demands on the placement of ranks with these ``limits``. ``neighbors``: as of :func:`cache_memory`."""
        whole = "--mtp" if self.mtp else "--shard-vocabulary" if self.shard_vocabulary else ""
        return Demands(whole, limits.decode_concurrency, limits.prefill_step_size, neighbors)

    def check(self) -> None:
        """Checks the options. Raises InvalidArgument: some of them exclude each other."""
        names = [name for name, _ in self.adapters]
        if names and self.adapter_path is not None:
            raise InvalidArgument(
                "serve: --adapter-path is for all requests, --adapter for those that name it; give one"
            )
        if len(names) > MAX_ADAPTERS:
            raise InvalidArgument(f"serve: at most {MAX_ADAPTERS} adapters are served, not {len(names)}")
        for place, name in enumerate(names):
            if not re.fullmatch(r"\w[\w.-]{0,63}", name, re.ASCII):
                raise InvalidArgument(
                    f"serve: the name of an adapter has up to 64 letters, digits, '.', '-' and '_', unlike {name!r:.80}"
                )
            if name in names[:place]:
                raise InvalidArgument(f"serve: {name} is the name of two adapters")
        if self.is_disaggregated:
            self._check_disaggregated()

    def _check_disaggregated(self) -> None:
        if self.limits.num_draft_tokens:
            raise InvalidArgument(
                "serve: with --prefill-ranks there are no drafts; leave out --draft-model, --mtp or --prompt-lookup"
            )
        if self.stream_weights:
            raise InvalidArgument("serve: with --prefill-ranks each rank reads the files; leave out --stream-weights")
        if self.layout.plan is not None or self.layout.rank_shares is not None:
            raise InvalidArgument("serve: --plan and --rank-shares are for ranks that share one model; leave them out")
