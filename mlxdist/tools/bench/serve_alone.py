"""What the ranks of `mlxdist bench serve` compute first: prompts, and the answers of one process."""

from __future__ import annotations

import random
import string
from typing import Any

import mlx.core as mx
from mlx_lm import load, stream_generate

import mlxdist
from mlxdist.base.model_directory import model_directory

from .timing import exchange

__all__ = ["Alone"]

# Two logits that are closer than this may change places with the batch, or with the number of ranks.
_CLOSE_FLOAT32, _CLOSE = 1e-4, 0.25


class Alone:
    """Cases: "questions", one for each rank at most. Each has "name", "prompt_tokens", "answer_tokens".

    Parameters: model. The result of a question is its "prompt", the "answer" of mlx-lm on one process, and how
    many of its characters are "certain": those before the first token to which another one comes close.
    """

    def __init__(self, world: mlxdist.Group, parameters: dict[str, Any]) -> None:
        if mx.is_available(mx.gpu):  # as the servers do
            mx.set_default_device(mx.gpu)
        self.world = world
        self.model, self.tokenizer, *_ = load(str(model_directory(parameters["model"])))
        self.summary = {"device": mx.default_device().type.name}

    def __call__(self, case: dict[str, Any]) -> list[dict[str, Any]]:
        questions = case["questions"]
        own = questions[self.world.rank()] if self.world.rank() < len(questions) else None
        return exchange(own and self._answered(own), self.world)[: len(questions)]

    def _answered(self, question: dict[str, Any]) -> dict[str, Any]:
        prompt = self._prompt(question)
        answer, certain = "", None
        made = stream_generate(
            self.model, self.tokenizer, self.tokenizer.encode(prompt), max_tokens=question["answer_tokens"]
        )
        for response in made:
            close = _CLOSE_FLOAT32 if response.logprobs.dtype == mx.float32 else _CLOSE
            best = mx.topk(response.logprobs, 2)
            if certain is None and bool(mx.abs(best[0] - best[1]) < close):
                certain = len(answer)
            answer += response.text
        return {"prompt": prompt, "answer": answer, "certain": len(answer) if certain is None else certain}

    def _prompt(self, question: dict[str, Any]) -> str:
        """Random letters, so no prefix of another prompt; as many tokens but for what decoding joins."""
        generator = random.Random(question["name"])
        letters = "".join(generator.choices(string.ascii_lowercase, k=8 * question["prompt_tokens"]))
        tokens = self.tokenizer.encode(letters, add_special_tokens=False)
        return self.tokenizer.decode(tokens[: question["prompt_tokens"]])
