"""Runs mlx-lm's commands with sharded models: every rank holds only its shard.

    mlxdist launch -n 2 -- python -m mlxdist.lm chat --model MODEL

is `python -m mlx_lm chat --model MODEL` with another ``sharded_load``: mlx-lm's own shards only models that have a
method ``shard()``, over no more ranks than there are KV heads, while the one below shards what
:func:`mlxdist.nn.load_sharded` does. `generate`, which mlx-lm computes in full on every rank, loads its model by
it, too, and rank 0 prints. `server` finds stop words in the text of an answer, as `mlxdist serve` does. All other
commands are mlx-lm's.
"""

import contextlib
import importlib
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm import cli, utils
from mlx_lm.generate import TextStateMachine

from mlxdist.base import logger
from mlxdist.base.errors import InvalidArgument
from mlxdist.base.model_directory import model_directory
from mlxdist.nn.models.load import load_sharded
from mlxdist.nn.models.split_model import ROWS_OF_A_SERVER, SplitModel
from mlxdist.nn.rank_checks import agree, agreed
from mlxdist.runtime.group.default_group import init
from mlxdist.runtime.operations.collectives import broadcast
from mlxdist.serve.stop_words import AnswerText, Piece

__all__ = ["load", "main", "sharded_load"]

_mlx_lms_sharded_load = utils.sharded_load
_SURROGATES = 0xD800  # lone ones, which no text has
_UNFINISHED = "unfinished"  # a section after which mlx-lm's handler drops the call of a tool before it


def sharded_load(
    repo: str,
    pipeline_group: mx.distributed.Group | None = None,
    tensor_group: mx.distributed.Group | None = None,
    return_config: bool = False,
    *,
    tokenizer_config: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    adapter_path: str | None = None,
    if_faster_for: int = 1,
) -> tuple[Any, ...]:
    """Loads a model's shard of this rank and its tokenizer; with ``return_config`` also its config, a dict.

    Every rank calls it. It replaces mlx-lm's function of this name and takes its arguments. mlx-lm's own function loads
    models that bring code of their own (``model_file`` in config.json).

    Args:
        repo: a directory, or the name of a model that `mlxdist pull` has fetched.
        pipeline_group: the stages that the layers are spread over (:func:`mlxdist.nn.pipeline_parallel`).
        tensor_group: split each layer over this group; ``None``: all ranks that the stages leave.
        return_config, tokenizer_config, trust_remote_code: see mlx-lm's function.
        adapter_path: a directory of mlx-lm's lora training, whose adapters are sharded with the model.
        if_faster_for: rows of a batch; layers become split blocks where these decode faster by them
            (:meth:`mlxdist.nn.SplitModel.from_model`).

    Raises:
        InvalidArgument: on every rank, as :func:`mlxdist.nn.load_sharded`; there is an adapter on a model that is left
            to mlx-lm.
    """
    group = init()
    with agreed("sharded_load", group):
        pp = 1 if pipeline_group is None else pipeline_group.size()
        tp = group.size() // pp if tensor_group is None else tensor_group.size()
        if pp * tp != group.size():
            raise InvalidArgument(
                f"sharded_load: the groups are for {pp * tp} ranks, and mlxdist has {group.size()}; start the "
                "command with `mlxdist launch`"
            )
        directory = model_directory(repo)
        config = utils.load_config(directory)
        left_to_mlx_lm = "model_file" in config
        if left_to_mlx_lm and adapter_path is not None:
            raise InvalidArgument("sharded_load: no adapter_path with a model_file in config.json")
    # mlx-lm's way and ours use different collectives, so all ranks have to take the same one.
    agree("sharded_load", group, None, {"stages": pp, "model_file in config.json": config.get("model_file")})
    tokenizer_config = tokenizer_config or {"trust_remote_code": True}
    if left_to_mlx_lm:
        groups = pipeline_group, tensor_group
        return _mlx_lms_sharded_load(
            str(directory),
            *groups,
            return_config,
            tokenizer_config=dict(tokenizer_config),
            trust_remote_code=trust_remote_code,
        )
    model, tokenizer = load_sharded(
        directory, group=group, pp=pp, adapter_path=adapter_path, tokenizer_config=tokenizer_config
    )
    split = SplitModel.from_model(model, group=group, if_faster_for=if_faster_for)
    if group.rank() == 0:
        logger.info("load", f"the model's layers are {split.described_layers}")
    return (split, tokenizer, config) if return_config else (split, tokenizer)


def load(
    repo: str, *, adapter_path: str | None = None, model_config: Mapping[str, Any] | None = None, **keywords: Any
) -> tuple[Any, ...]:
    """Replaces mlx-lm's function ``load`` by :func:`sharded_load`, with the arguments that `generate` gives it.

    ``repo`` and ``adapter_path`` have the meaning that they have there.

    Raises:
        InvalidArgument: see :func:`sharded_load`; or something in ``model_config`` is set.
    """
    if any((model_config or {}).values()):
        raise InvalidArgument("generate: --quantize-activations is for one rank")
    return sharded_load(repo, adapter_path=adapter_path, **keywords)


def main() -> None:
    """Runs `python -m mlxdist.lm COMMAND ...` with the arguments of `python -m mlx_lm`."""
    # The modules of commands take it from there when they are imported.
    utils.sharded_load = sharded_load
    if sys.argv[1:2] == ["server"]:
        utils.sharded_load = partial(sharded_load, if_faster_for=ROWS_OF_A_SERVER)
        _find_stop_words_in_texts()
    with _on_all_ranks() if sys.argv[1:2] == ["generate"] else contextlib.nullcontext():
        cli.main()
    mx.synchronize(importlib.import_module("mlx_lm.generate").generation_stream)  # a token is on its way for nothing


@contextlib.contextmanager
def _on_all_ranks() -> Iterator[None]:
    """A context in which `generate` chooses the same tokens on all ranks, and only rank 0 prints them."""
    group = init()
    if group.size() == 1:
        yield
        return
    vars(importlib.import_module("mlx_lm.generate"))["load"] = load  # mlx_lm.generate itself is a function
    mx.random.seed(int(broadcast(np.array([time.time_ns()]), group=group)[0]))  # --seed comes after it
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(sys.stdout if group.rank() == 0 else nothing):
        yield


def _find_stop_words_in_texts() -> None:
    """Makes mlx-lm's server end an answer before a stop word, whatever tokens that consists of."""
    server = importlib.import_module("mlx_lm.server")
    generate = server.ResponseGenerator.generate

    @wraps(generate)
    def with_stop_words(generator: Any, request: Any, arguments: Any, *others: Any, **named: Any) -> tuple[Any, Any]:
        words = arguments.stop_words
        if not words:
            return generate(generator, request, arguments, *others, **named)
        if not all(isinstance(word, str) and word for word in words):
            raise InvalidArgument("stop must be a string or a list of strings, none of them empty")
        context, responses = generate(generator, request, replace(arguments, stop_words=[]), *others, **named)
        text = AnswerText(context.text_sm, context.initial_state, words)
        sections = _HandlersSections(context.text_sm, context.initial_state)
        context.text_sm = sections.machine
        # On several ranks, mlx-lm fails to end a request that is in no batch, such as one with a seed, early.
        is_in_batch = generator._is_batchable(arguments) and not any(server._image_parts(request.messages))
        return context, _up_to_stop_word(responses, text, sections, generator._is_distributed and not is_in_batch)

    server.ResponseGenerator.generate = with_stop_words


def _up_to_stop_word(
    responses: Iterator[Any], text: AnswerText, sections: "_HandlersSections", runs_to_its_end: bool
) -> Iterator[Any]:
    """The responses with the text to show. mlx-lm hides the text of one with "stop", so the last one gets no reason."""
    for response in responses:
        for each, pieces in text.add(response, response.text, response.finish_reason is not None):
            reason = None if each.finish_reason == "stop" or text.length is not None else each.finish_reason
            shown = sections.text(pieces)
            if text.length is not None:
                shown += sections.end(text)
            yield replace(each, text=shown, finish_reason=reason)
        if text.length is not None:
            break
    if runs_to_its_end:
        for _ in responses:
            pass


class _HandlersSections:
    """The sections of an answer for mlx-lm's handler, each of which begins with one character that no text has.

    mlx-lm's machine holds text back that may be a control sequence, and its handler drops that at the end of an answer.

    Attributes:
        machine: the machine that reads these characters.
    """

    def __init__(self, machine: Any, initial: str) -> None:
        ends = {"normal", "tool", _UNFINISHED}
        names = sorted(ends.union(machine._states, *(edges for _, edges in machine._states.values())))
        self._switches = {name: chr(_SURROGATES + place) for place, name in enumerate(names)}
        self._section = initial
        edges = [(switch, name) for name, switch in self._switches.items()]
        self.machine = TextStateMachine(dict.fromkeys(names, edges))

    def text(self, pieces: Iterable[Piece]) -> str:
        """The text of ``pieces``, in which a character stands for each control sequence."""
        shown = ""
        for piece in pieces:
            self._section = piece.section or self._section
            shown += piece.text if piece.section is None else self._switches[piece.section]
        return shown

    def end(self, text: AnswerText) -> str:
        """The character after the last piece of a text that a stop word has ended: a call that it cuts off is none."""
        cuts = self._section == "tool" and not text.stops_at_control_sequence
        return self._switches[_UNFINISHED] if cuts else ""


if __name__ == "__main__":
    main()
