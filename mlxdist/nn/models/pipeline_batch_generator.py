"""Generation with a model in stages: several batches on their way, so that every stage has one to compute."""

from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxdist.base.errors import InvalidArgument
from mlxdist.nn.layout.partition import require_counts
from mlxdist.nn.rank_checks import agreed

from ..pipeline_parallel.stage import stage_of
from ..split_block.split_block import SplitBlock, ranks_of
from .cuts import cuts

__all__ = ["PipelineBatchGenerator"]

# A stream computes in order, and a batch waits in it for the last stage: another batch needs another one.
_streams: list[mx.ThreadLocalStream] = []


class PipelineBatchGenerator:
    """mlx-lm's ``BatchGenerator`` for a model of :func:`pipeline_parallel`.

    Requests are spread over as many batches as there are stages. :meth:`next` computes a step of one batch, of each in
    turn, and returns while the other batches, and the next token of this one, are still computed: while a stage
    computes one batch, its neighbors compute others. All ranks call the same methods with the same arguments, and get
    the same responses.

    Args:
        model: in stages.
        batches: how many; ``None``: as many as there are stages.
        options: of each ``mlx_lm.generate.BatchGenerator``, but for ``stream``. Limits are of one batch.

    Raises:
        InvalidArgument: the model has no stages; ``batches`` is no positive integer on one of the ranks.
        Mismatch: on all ranks: they have other ``batches`` or ``options``.
    """

    def __init__(self, model: nn.Module, *, batches: int | None = None, **options: Any) -> None:
        from mlx_lm.generate import BatchGenerator

        stage = stage_of(model)
        if stage is None:
            raise InvalidArgument(
                "PipelineBatchGenerator: the model has no stages; call pipeline_parallel(model) first"
            )
        batches = stage.stages if batches is None else batches
        # Functions, such as a sampler, are objects of each process: their names are compared.
        plain = {name: getattr(value, "__qualname__", value) for name, value in options.items()}
        with agreed("PipelineBatchGenerator", stage.group, {"batches": batches} | plain):
            require_counts("PipelineBatchGenerator", batches=batches)
        while len(_streams) < batches:
            _streams.append(mx.new_thread_local_stream(mx.default_device()))
        # The sums of ranks that share layers are in one group, whose order two streams would not keep on all of them.
        streams = _streams[:1] * batches if _shares_layers(model) else _streams[:batches]
        self._generators = [BatchGenerator(model, stream=stream, **options) for stream in streams]
        self._turn = 0
        self._inserted = 0
        self._places: dict[int, tuple[int, int]] = {}  # of a request: its batch, and its number there

    def insert(
        self, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int] | None = None, **options: Any
    ) -> list[int]:
        """Inserts requests as ``BatchGenerator.insert`` does. Returns their numbers.

        Args:
            prompts: the tokens of each.
            max_tokens: of each answer.
            options: of BatchGenerator, lists with an entry for each prompt.
        """
        return self.insert_segments([[list(prompt)] for prompt in prompts], max_tokens, **options)

    def insert_segments(
        self, segments: Sequence[Sequence[Sequence[int]]], max_tokens: Sequence[int] | None = None, **options: Any
    ) -> list[int]:
        """Inserts requests as ``BatchGenerator.insert_segments`` does: :meth:`insert` with ``segments``, lists of lists
        of tokens, in place of prompts; it stops at the end of each. ``max_tokens`` and ``options`` as there."""
        return [
            self._insert(
                prompt,
                None if max_tokens is None else [max_tokens[row]],
                {name: None if given is None else [given[row]] for name, given in options.items()},
            )
            for row, prompt in enumerate(segments)
        ]

    def next(self) -> tuple[list[Any], list[Any]]:
        """Computes a step of the next batch, in rotation. Returns responses of prompts, and of requests that generate;
        both are empty if no request is left."""
        for _ in self._generators:
            batch, self._turn = self._turn, (self._turn + 1) % len(self._generators)
            numbers = {place[1]: number for number, place in self._places.items() if place[0] == batch}
            if numbers:
                prompts, tokens = self._generators[batch].next()
                for response in (*prompts, *tokens):
                    response.uid = numbers[response.uid]
                for response in tokens:
                    if response.finish_reason is not None:
                        del self._places[response.uid]
                return prompts, tokens
        return [], []

    def next_generated(self) -> list[Any]:
        """The responses of the next step in which a token was generated; none, if no request is left."""
        while self._places:
            if tokens := self.next()[1]:
                return tokens
        return []

    def extract_cache(self, uids: Iterable[int]) -> dict[int, Any]:
        """(prompt cache, tokens) of requests, by their numbers ``uids``."""
        return self._of_each(uids, lambda generator, numbers: generator.extract_cache(numbers))

    def remove(self, uids: Iterable[int], return_prompt_caches: bool = False) -> dict[int, Any]:
        """Ends the requests ``uids``. Returns :meth:`extract_cache` of them, with ``return_prompt_caches``."""
        uids = list(uids)
        found = self._of_each(uids, lambda generator, numbers: generator.remove(numbers, return_prompt_caches))
        for uid in uids:
            self._places.pop(uid, None)
        return found

    def close(self) -> None:
        """Waits for the tokens that are computed ahead."""
        for generator in self._generators:
            mx.synchronize(generator.stream)
            generator.close()

    def _insert(self, prompt: Sequence[Sequence[int]], max_tokens: list[int] | None, options: dict[str, Any]) -> int:
        """Inserts a request into the batch with the fewest requests."""
        sizes = [0] * len(self._generators)
        for batch, _ in self._places.values():
            sizes[batch] += 1
        batch = sizes.index(min(sizes))
        (uid,) = self._generators[batch].insert_segments([list(map(list, prompt))], max_tokens, **options)
        number, self._inserted = self._inserted, self._inserted + 1
        self._places[number] = batch, uid
        return number

    def _of_each(self, uids: Iterable[int], call: Any) -> dict[int, Any]:
        """The results of ``call`` for the requests ``uids``, by their numbers: it is called once for each batch."""
        found: dict[int, Any] = {}
        uids = list(uids)
        for batch, generator in enumerate(self._generators):
            numbers = {self._places[uid][1]: uid for uid in uids if self._places.get(uid, (None,))[0] == batch}
            if numbers:
                found |= {numbers[own]: result for own, result in call(generator, list(numbers)).items()}
        return found


def _shares_layers(model: nn.Module) -> bool:
    """Whether several ranks compute each layer of this stage."""
    if blocks := [module for module in model.modules() if isinstance(module, SplitBlock)]:
        return any(ranks_of(block) > 1 for block in blocks)
    return any(group.size() > 1 for cut in cuts(model).values() for group in cut.groups)
