"""Rank 0's decisions before a step, as bytes: one broadcast per step, of a size that all ranks know in advance.

A message has FRAME bytes, or as many as the message before it announced. So prompts of any length need no second
broadcast: rank 0 announces their size, and they are in the next message. Beyond FRAME bytes, a message carries only
data of admitted requests: 4 bytes per token of the prompt and stop token, 12 per entry of logit_bias, grammars.

Layout, little-endian: a header, the requests that end, those that are sent, the admitted requests, zeros.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from mlx_lm.server import LogitsProcessorArguments, SamplingArguments

from mlxdist.base.errors import InvalidArgument

__all__ = [
    "FRAME",
    "MAX_ADAPTERS",
    "MAX_ADMISSIONS",
    "MAX_BIASES",
    "MAX_DRAFTS",
    "MAX_ENDS",
    "MAX_GRAMMAR",
    "MAX_PROMPT",
    "MAX_SENDS",
    "MAX_STOP_TOKENS",
    "MAX_TOP_LOGPROBS",
    "ROOM",
    "Admission",
    "Decisions",
]

FRAME = 1024  # bytes of a message that announces no other size
MAX_ADAPTERS = (1 << 16) - 1
MAX_PROMPT = 1 << 22  # tokens
MAX_BIASES = 300  # as in OpenAI's API
MAX_GRAMMAR = 1 << 17  # bytes
MAX_STOP_TOKENS = 64  # of one request
MAX_TOP_LOGPROBS = 20  # as in OpenAI's API
MAX_DRAFTS = 64  # of a request in a step
MAX_ENDS = 48  # of one message
MAX_SENDS = 8  # of one message
MAX_ADMISSIONS = 4  # of one message; but for what they bring, these fit into FRAME with all else

_MAGIC = b"mlxS"
_HEADER = struct.Struct("<4sIIIIHHBBBB")
_REQUEST = struct.Struct("<IIQI 2dI3d dIdIdI ?BHI? IBHIB")
_SEGMENT = struct.Struct("<I")
_END = struct.Struct("<II")
_SEND = struct.Struct("<I")


@dataclass(frozen=True)
class Admission:
    """A request that all ranks begin to compute.

    Attributes:
        number: the number of the request; they count from 0.
        prompt: the tokens of the prompt.
        segments: the prompt in parts, each as its number of tokens, at whose ends the prefix cache keeps it.
        max_tokens: the maximum number of tokens to generate.
        seed: the seed of this request's samples.
        sampling, logits: arguments for mlx-lm's samplers and logits processors.
        logprobs: whether rank 0 reads log-probabilities.
        prompt_logprobs: the number of likely tokens that come with the log-probability of each token of the prompt;
            None without log-probabilities of the prompt.
        adapter: the number of its adapter; 0 for none.
        grammar: the grammar of the answer, in llguidance's format; empty for any answer.
        min_tokens: the number of tokens of the answer before which no token that ends it is sampled.
        ignore_eos: whether the tokenizer's tokens that end an answer do not end this one.
        stop_tokens: other tokens that end the answer.
        generated: tokens at the end of the prompt that are its answer so far: it has been preempted.
    """

    number: int
    prompt: Sequence[int]
    segments: Sequence[int]
    max_tokens: int
    seed: int
    sampling: SamplingArguments
    logits: LogitsProcessorArguments
    logprobs: bool = False
    prompt_logprobs: int | None = None
    adapter: int = 0
    grammar: bytes = b""
    generated: int = 0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_tokens: Sequence[int] = ()

    @property
    def tokens(self) -> int:
        """The maximum number of tokens in the KV cache of the request, at its end."""
        return len(self.prompt) + self.max_tokens

    @property
    def brought(self) -> int:
        """The number of bytes of the prompt, biases, grammar and stop tokens, which extend a message beyond FRAME."""
        return (
            4 * (len(self.prompt) + len(self.stop_tokens)) + 12 * len(self.logits.logit_bias or ()) + len(self.grammar)
        )

    @property
    def size(self) -> int:
        """The number of bytes that :meth:`encode` returns."""
        return _REQUEST.size + _SEGMENT.size * len(self.segments) + self.brought

    def encode(self) -> bytes:
        bias = self.logits.logit_bias or {}
        # vars() and not astuple(), which copies what is in the fields, too.
        _, *penalties = vars(self.logits).values()
        counts = len(self.prompt), len(self.segments), len(bias), len(self.grammar), len(self.stop_tokens)
        fixed = (self.number, self.max_tokens, self.seed, self.generated, *vars(self.sampling).values(), *penalties)
        scores = 0 if self.prompt_logprobs is None else 1 + self.prompt_logprobs
        others = self.logprobs, scores, self.adapter, self.min_tokens, self.ignore_eos
        return b"".join(
            [
                _REQUEST.pack(*fixed, *others, *counts),
                *map(_SEGMENT.pack, self.segments),
                np.array(self.prompt, "<u4").tobytes(),
                np.array(list(bias), "<u4").tobytes(),
                np.array(list(bias.values()), "<f8").tobytes(),
                self.grammar,
                np.array(self.stop_tokens, "<u4").tobytes(),
            ]
        )

    @classmethod
    def read(cls, reader: "_Reader") -> "Admission":
        fields = _REQUEST.unpack(reader.take(_REQUEST.size))
        (number, most, seed, generated, *parameters), others, counts = fields[:-10], fields[-10:-5], fields[-5:]
        logprobs, scores, adapter, min_tokens, ignore_eos = others
        prompt, segments, biases, grammar, stop_tokens = counts
        parts = [_SEGMENT.unpack(reader.take(_SEGMENT.size))[0] for _ in range(segments)]
        _require(0 < prompt <= MAX_PROMPT and most > 0, "a request has no prompt, too long a one, or no tokens to make")
        _require(scores <= 1 + MAX_TOP_LOGPROBS, "there are too many likely tokens")
        _require(generated < prompt, "an answer has no prompt")
        _require(all(parts), "a segment is none")
        _require(sum(parts) == prompt, "the segments are not the prompt")
        _require(biases <= MAX_BIASES, "logit_bias is too long")
        _require(grammar <= MAX_GRAMMAR, "a grammar is too long")
        _require(stop_tokens <= MAX_STOP_TOKENS, "there are too many stop tokens")
        tokens = reader.array("<u4", prompt)
        bias = dict(zip(reader.array("<u4", biases), reader.array("<f8", biases)))
        values = [*parameters, *bias.values()]
        _require(bool(np.isfinite(values).all()), "a number is not finite")
        return cls(
            number,
            tokens,
            parts,
            most,
            seed,
            SamplingArguments(*parameters[:6]),
            LogitsProcessorArguments(bias or None, *parameters[6:]),
            logprobs,
            scores - 1 if scores else None,
            adapter,
            reader.take(grammar),
            generated,
            min_tokens,
            ignore_eos,
            reader.array("<u4", stop_tokens),
        )


@dataclass(frozen=True)
class Decisions:
    """Decisions that all ranks carry out in one step.

    Attributes:
        step: counts from 0, modulo 2**32.
        digest: the digest of the tokens that rank 0 sampled in the previous step.
        end: requests that have ended or are to end, each with the tokens of its prompt and its answer that the prefix
            cache may have.
        admit: requests that begin in this step.
        stop: all ranks leave the loop, and nothing is admitted or computed.
        reports: all ranks gather their memory in use after this step.
        drafts: the maximum number of drafts of each request in this step, if there are drafts.
        next_size: bytes of the next message, from FRAME.
        send: to prefill ranks: requests whose prompts are computed, and whose caches they send to the decode ranks.
        received: to decode ranks: all of them have received the caches of requests with lower numbers.
    """

    step: int
    digest: int = 0
    end: Sequence[tuple[int, int]] = ()
    admit: Sequence[Admission] = ()
    stop: bool = False
    next_size: int = FRAME
    reports: bool = False
    drafts: int = MAX_DRAFTS
    send: Sequence[int] = ()
    received: int = 0

    def encode(self, size: int) -> bytes:
        """The decisions as a message of ``size`` bytes, which must be enough for them."""
        counts = len(self.end), len(self.admit), self.stop, self.reports, self.drafts, len(self.send)
        header = _HEADER.pack(_MAGIC, self.step, self.digest, self.next_size, self.received, *counts)
        requests = [request.encode() for request in self.admit]
        ends = (_END.pack(*each) for each in self.end)
        message = b"".join([header, *ends, *map(_SEND.pack, self.send), *requests])
        assert len(message) <= size
        return message.ljust(size, b"\0")

    @classmethod
    def decode(cls, message: bytes) -> "Decisions":
        """The decisions in a message. Raises InvalidArgument: the bytes are no message, or exceed the limits above."""
        reader = _Reader(message)
        magic, step, digest, size, received, *counts = _HEADER.unpack(reader.take(_HEADER.size))
        ends, admissions, stop, reports, drafts, sends = counts
        _require(magic == _MAGIC and stop <= 1 and reports <= 1, "it does not begin as one")
        _require(FRAME <= size <= max_size(), "the size of the next is beyond the limits")
        _require(drafts <= MAX_DRAFTS, "it has too many drafts")
        is_within = ends <= MAX_ENDS and admissions <= MAX_ADMISSIONS and sends <= MAX_SENDS
        _require(is_within, "it has too many requests")
        end = [_END.unpack(reader.take(_END.size)) for _ in range(ends)]
        send = [_SEND.unpack(reader.take(_SEND.size))[0] for _ in range(sends)]
        admit = [Admission.read(reader) for _ in range(admissions)]
        return cls(step, digest, end, admit, bool(stop), size, bool(reports), drafts, send, received)


# Bytes for requests in a message of FRAME bytes, whatever ends and is sent.
ROOM = FRAME - _HEADER.size - _END.size * MAX_ENDS - _SEND.size * MAX_SENDS


def max_size() -> int:
    """The number of bytes of the largest message."""
    return FRAME + MAX_ADMISSIONS * (4 * (MAX_PROMPT + MAX_STOP_TOKENS) + 12 * MAX_BIASES + MAX_GRAMMAR)


@dataclass
class _Reader:
    message: bytes
    at: int = field(default=0)

    def take(self, size: int) -> bytes:
        _require(self.at + size <= len(self.message), "it ends too early")
        self.at += size
        return self.message[self.at - size : self.at]

    def array(self, dtype: str, count: int) -> list:
        return np.frombuffer(self.take(np.dtype(dtype).itemsize * count), dtype).tolist()


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise InvalidArgument(f"serve: rank 0 sent no message of decisions: {problem}")
