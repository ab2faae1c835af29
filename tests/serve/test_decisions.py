"""Messages of decisions: every one is read as it was written, and no bytes do harm."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.server import LogitsProcessorArguments, SamplingArguments
from serving import PLAIN

from mlxdist import InvalidArgument
from mlxdist.serve.api import generation
from mlxdist.serve.decisions import (
    FRAME,
    MAX_ADAPTERS,
    MAX_ADMISSIONS,
    MAX_BIASES,
    MAX_ENDS,
    MAX_GRAMMAR,
    MAX_SENDS,
    MAX_STOP_TOKENS,
    MAX_TOP_LOGPROBS,
    ROOM,
    Admission,
    Decisions,
)

UINT32 = st.integers(0, 2**32 - 1)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
SAMPLING = st.builds(SamplingArguments, NUMBERS, NUMBERS, UINT32, NUMBERS, NUMBERS, NUMBERS)
BIAS = st.none() | st.dictionaries(UINT32, NUMBERS, min_size=1, max_size=5)
LOGITS = st.builds(LogitsProcessorArguments, BIAS, NUMBERS, UINT32, NUMBERS, UINT32, NUMBERS, UINT32)


@st.composite
def admissions(draw):
    parts = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    prompt = draw(st.lists(UINT32, min_size=(size := sum(parts)), max_size=size))
    most, seed = draw(st.integers(1, 2**32 - 1)), draw(st.integers(0, 2**64 - 1))
    generated = draw(st.integers(0, size - 1))
    scores = draw(st.none() | st.integers(0, MAX_TOP_LOGPROBS))
    more = draw(st.booleans()), scores, draw(st.integers(0, MAX_ADAPTERS)), draw(st.binary(max_size=9))
    ends = draw(UINT32), draw(st.booleans()), draw(st.lists(UINT32, max_size=MAX_STOP_TOKENS))
    return Admission(draw(UINT32), prompt, parts, most, seed, draw(SAMPLING), draw(LOGITS), *more, generated, *ends)


DECISIONS = st.builds(
    Decisions,
    step=UINT32,
    digest=UINT32,
    end=st.lists(st.tuples(UINT32, UINT32), max_size=MAX_ENDS),
    admit=st.lists(admissions(), max_size=MAX_ADMISSIONS),
    stop=st.booleans(),
    next_size=st.integers(FRAME, 1 << 20),
    reports=st.booleans(),
    send=st.lists(UINT32, max_size=MAX_SENDS),
    received=UINT32,
)


@settings(deadline=None, max_examples=100)
@given(DECISIONS)
def test_a_message_is_read_as_it_was_written(decisions):
    size = FRAME + sum(request.brought for request in decisions.admit)
    assert Decisions.decode(decisions.encode(size)) == decisions


@settings(deadline=None, max_examples=100)
@given(DECISIONS, st.data())
def test_damaged_messages_are_read_or_refused(decisions, data):
    message = bytearray(decisions.encode(FRAME + sum(request.brought for request in decisions.admit)))
    for _ in range(data.draw(st.integers(1, 3))):
        message[data.draw(st.integers(0, min(len(message), 300) - 1))] = data.draw(st.integers(0, 255))
    try:
        read = Decisions.decode(bytes(message[: data.draw(st.integers(0, len(message)))]))
    except InvalidArgument as error:
        assert "rank 0 sent no message of decisions" in str(error)
    else:
        assert len(read.admit) <= MAX_ADMISSIONS and len(read.end) <= MAX_ENDS


def test_the_largest_message_fits_in_what_is_announced():
    """FRAME bytes hold all but what admitted requests bring."""
    most = replace(
        PLAIN,
        segments=[1, 1, 1, 1],
        prompt=[1, 2, 3, 4],
        logits=replace(PLAIN.logits, logit_bias=dict.fromkeys(range(MAX_BIASES), 1.0)),
        grammar=b"x" * MAX_GRAMMAR,
        stop_tokens=[1] * MAX_STOP_TOKENS,
    )
    ends, sends = [(2**32 - 1, 2**32 - 1)] * MAX_ENDS, [2**32 - 1] * MAX_SENDS
    decisions = Decisions(0, end=ends, send=sends, admit=[most] * MAX_ADMISSIONS)
    message = decisions.encode(FRAME + MAX_ADMISSIONS * most.brought)
    assert len(Decisions.decode(message).admit) == MAX_ADMISSIONS
    assert len(most.encode()) == most.size and MAX_ADMISSIONS * (most.size - most.brought) <= ROOM


def test_the_api_has_the_limits_of_the_ranks():
    """It has no numpy, and numbers of its own."""
    assert (generation.MAX_BIASES, generation.MAX_STOP_TOKENS) == (MAX_BIASES, MAX_STOP_TOKENS)


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt": []},
        {"segments": [2]},
        {"segments": []},
        {"max_tokens": 0},
        {"generated": 3},
        {"logits": replace(PLAIN.logits, logit_bias=dict.fromkeys(range(MAX_BIASES + 1), 1.0))},
        {"logits": replace(PLAIN.logits, logit_bias={1: float("inf")})},
        {"grammar": b"x" * (MAX_GRAMMAR + 1)},
        {"stop_tokens": [1] * (MAX_STOP_TOKENS + 1)},
        {"sampling": replace(PLAIN.sampling, temperature=float("nan"))},
    ],
    ids=lambda wrong: str(wrong)[:40],
)
def test_requests_beyond_the_limits_are_refused(wrong):
    message = Decisions(0, admit=[replace(PLAIN, **wrong)]).encode(1 << 18)
    with pytest.raises(InvalidArgument, match="rank 0 sent no message of decisions: "):
        Decisions.decode(message)
