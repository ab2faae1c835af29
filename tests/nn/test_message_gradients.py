"""Gradients of send and recv: a chain of ranks is differentiated as in one process."""

import pytest

LONG = pytest.mark.long


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=LONG), 3, pytest.param(4, marks=LONG)])
def test_a_chain_is_differentiated_as_in_one_process(run_scenarios, ranks):
    """float32 and 16-bit, also in mx.checkpoint; the messages are counted."""
    run_scenarios("message_gradients.py", ranks, "chain")


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.long
def test_a_compiled_chain_is_differentiated_as_in_one_process(run_scenarios, ranks):
    run_scenarios("message_gradients.py", ranks, "chain", "compiled")


@pytest.mark.parametrize("scenario", [pytest.param("both_ways", marks=LONG), "other_transformations", "rejected"])
def test_messages_between_two_ranks(run_scenarios, scenario):
    run_scenarios("message_gradients.py", 2, scenario)
