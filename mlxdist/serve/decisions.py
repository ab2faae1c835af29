"""What rank 0 decides before a step, as bytes: one broadcast per step, of a size that all ranks have known before.

A message has FRAME bytes, or as many as the message before it announced. So prompts of any length need no second
broadcast: rank 0 announces their size, and they are in the next message. Beyond FRAME bytes a message carries only
what admitted requests bring: 4 bytes per token of the prompt and of stop words, 12 per entry of logit_bias, grammars.

Layout, little-endian: a header, the numbers of cancelled requests, the admitted requests, zeros.
"""

import struct
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from itertools import accumulate

import numpy as np
from mlx_lm.server import LogitsProcessorArguments, SamplingArguments

from mlxdist.base.errors import InvalidArgument

__all__ = [
    "FRAME",
    "MAX_ADAPTERS",
    "MAX_ADMISSIONS",
    "MAX_BIASES",
    "MAX_CANCELS",
    "MAX_GRAMMAR",
    "MAX_PROMPT",
    "MAX_STOPS",
    "MAX_STOP_TOKENS",
    "ROOM",
    "Admission",
    "Decisions",
]

FRAME = 1024  # bytes of a message that announces no other size
MAX_ADAPTERS = (1 << 16) - 1
MAX_PROMPT = 1 << 22  # tokens
MAX_STOPS = 16
MAX_STOP_TOKENS = 1024  # of all stop words of a request
MAX_BIASES = 300  # as in OpenAI's API
MAX_GRAMMAR = 1 << 17  # bytes
MAX_CANCELS = 64  # of one message
MAX_ADMISSIONS = 4  # of one message; but for what they bring, these fit into FRAME with all else
SEGMENTS = ("system", "user", "assistant")  # kinds of mlx-lm's prompt cache

_MAGIC = b"mlxS"
_HEADER = struct.Struct("<4sIIIHHB")
_REQUEST = struct.Struct("<IIQI 2dI3d dIdIdI ?H IBBHI")
_SEGMENT = struct.Struct("<BI")


@dataclass(frozen=True)
class Admission:
    """A request that all ranks begin to compute.

    Attributes:
        number: of the request; they count from 0.
        prompt: tokens.
        segments: the prompt in parts, each with its kind of SEGMENTS and its number of tokens. mlx-lm's prompt cache
            keeps the end of each.
        max_tokens: the most that are generated.
        seed: of this request's samples.
        sampling, logits: as mlx-lm takes them.
        stop: stop words as tokens.
        logprobs: whether rank 0 reads log-probabilities.
        adapter: its number; 0 for none.
        grammar: of the answer, llguidance's; empty for any answer.
        generated: tokens at the end of the prompt that are its answer so far: it has been preempted.
    """

    number: int
    prompt: Sequence[int]
    segments: Sequence[tuple[str, int]]
    max_tokens: int
    seed: int
    sampling: SamplingArguments
    logits: LogitsProcessorArguments
    stop: Sequence[Sequence[int]] = ()
    logprobs: bool = False
    adapter: int = 0
    grammar: bytes = b""
    generated: int = 0

    @property
    def tokens(self) -> int:
        """Of its KV cache in the end, at most."""
        return len(self.prompt) + self.max_tokens

    @property
    def brought(self) -> int:
        """Bytes of prompt, stop words, biases and grammar, which a message has beyond FRAME."""
        tokens = len(self.prompt) + sum(map(len, self.stop))
        return 4 * tokens + 12 * len(self.logits.logit_bias or ()) + len(self.grammar)

    @property
    def size(self) -> int:
        """Bytes of :meth:`encode`."""
        return _REQUEST.size + _SEGMENT.size * len(self.segments) + 2 * len(self.stop) + self.brought

    def encode(self) -> bytes:
        bias = self.logits.logit_bias or {}
        _, *penalties = astuple(self.logits)
        lengths = [len(word) for word in self.stop]
        counts = len(self.prompt), len(self.segments), len(lengths), len(bias), len(self.grammar)
        fixed = (self.number, self.max_tokens, self.seed, self.generated, *astuple(self.sampling), *penalties)
        tokens = [*self.prompt, *(token for word in self.stop for token in word)]
        return b"".join(
            [
                _REQUEST.pack(*fixed, self.logprobs, self.adapter, *counts),
                *(_SEGMENT.pack(SEGMENTS.index(kind), length) for kind, length in self.segments),
                np.array(lengths, "<u2").tobytes(),
                np.array(tokens, "<u4").tobytes(),
                np.array(list(bias), "<u4").tobytes(),
                np.array(list(bias.values()), "<f8").tobytes(),
                self.grammar,
            ]
        )

    @classmethod
    def read(cls, reader: "_Reader") -> "Admission":
        number, most, seed, generated, *parameters, logprobs, adapter, prompt, segments, stops, biases, grammar = (
            _REQUEST.unpack(reader.take(_REQUEST.size))
        )
        parts = [_SEGMENT.unpack(reader.take(_SEGMENT.size)) for _ in range(segments)]
        lengths = reader.array("<u2", stops)
        _require(0 < prompt <= MAX_PROMPT and most > 0, "a request has no prompt, too long a one, or no tokens to make")
        _require(generated < prompt, "an answer has no prompt")
        _require(all(kind < len(SEGMENTS) and length for kind, length in parts), "a segment is none")
        _require(sum(length for _, length in parts) == prompt, "the segments are not the prompt")
        _require(stops <= MAX_STOPS and sum(lengths) <= MAX_STOP_TOKENS and all(lengths), "stop words are too long")
        _require(biases <= MAX_BIASES, "logit_bias is too long")
        _require(grammar <= MAX_GRAMMAR, "a grammar is too long")
        tokens = reader.array("<u4", prompt + sum(lengths))
        ends = list(accumulate(lengths, initial=prompt))
        bias = dict(zip(reader.array("<u4", biases), reader.array("<f8", biases)))
        values = [*parameters, *bias.values()]
        _require(bool(np.isfinite(values).all()), "a number is not finite")
        return cls(
            number,
            tokens[:prompt],
            [(SEGMENTS[kind], length) for kind, length in parts],
            most,
            seed,
            SamplingArguments(*parameters[:6]),
            LogitsProcessorArguments(bias or None, *parameters[6:]),
            [tokens[start:end] for start, end in zip(ends, ends[1:])],
            logprobs,
            adapter,
            reader.take(grammar),
            generated,
        )


@dataclass(frozen=True)
class Decisions:
    """What all ranks do in one step.

    Attributes:
        step: counts from 0, modulo 2**32.
        digest: of the tokens that rank 0 sampled in the step before.
        cancel: numbers of requests to drop, whether or not they still run.
        admit: requests to begin with.
        stop: all ranks leave the loop, and nothing else is done.
        next_size: bytes of the next message, from FRAME.
    """

    step: int
    digest: int = 0
    cancel: Sequence[int] = ()
    admit: Sequence[Admission] = ()
    stop: bool = False
    next_size: int = FRAME

    def encode(self, size: int) -> bytes:
        """A message of ``size`` bytes, in which they must fit."""
        counts = len(self.cancel), len(self.admit), self.stop
        header = _HEADER.pack(_MAGIC, self.step, self.digest, self.next_size, *counts)
        requests = [request.encode() for request in self.admit]
        message = b"".join([header, np.array(self.cancel, "<u4").tobytes(), *requests])
        assert len(message) <= size
        return message.ljust(size, b"\0")

    @classmethod
    def decode(cls, message: bytes) -> "Decisions":
        """Raises InvalidArgument: these bytes are no message, or one beyond the limits above."""
        reader = _Reader(message)
        magic, step, digest, size, cancels, admissions, stop = _HEADER.unpack(reader.take(_HEADER.size))
        _require(magic == _MAGIC and stop <= 1, "it does not begin as one")
        _require(FRAME <= size <= max_size(), "the size of the next is beyond the limits")
        _require(cancels <= MAX_CANCELS and admissions <= MAX_ADMISSIONS, "it has too many requests")
        cancel = reader.array("<u4", cancels)
        admit = [Admission.read(reader) for _ in range(admissions)]
        return cls(step, digest, cancel, admit, bool(stop), size)


ROOM = FRAME - _HEADER.size - 4 * MAX_CANCELS  # bytes for requests in a message of FRAME bytes, whatever it cancels


def max_size() -> int:
    """Bytes of the largest message."""
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
