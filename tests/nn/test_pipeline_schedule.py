"""Schedules of pipelines: complete, without deadlocks, within memory, and with the bubbles of their papers."""

import dataclasses

import pytest
import reference_1f1b as reference
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from mlxdist import InvalidArgument
from mlxdist.nn import Action, Schedule, pipeline_schedule

NAMES = ("gpipe", "1f1b", "zero_bubble")
SIZES = {"stages": st.integers(1, 9), "micro_batches": st.integers(1, 24), "virtual": st.integers(1, 4)}


@given(name=st.sampled_from(NAMES), **SIZES)
def test_every_size_is_complete_and_ends(name, stages, micro_batches, virtual):
    schedule = pipeline_schedule(name, stages, micro_batches, virtual)
    schedule.check()
    timeline = schedule.simulate()
    for rank, spans in enumerate(timeline.spans):
        assert tuple(span.action for span in spans) == schedule.actions[rank]
        assert all(one.end <= other.start for one, other in zip(spans, spans[1:]))
    # No rank is done before it has worked, and none works for longer than all of it takes.
    work = 3 * micro_batches * virtual
    assert all(timeline.busy(rank) == work for rank in range(stages))
    assert timeline.seconds <= stages * work


@given(stages=SIZES["stages"], micro_batches=SIZES["micro_batches"])
def test_1f1b_is_the_schedule_of_its_paper(stages, micro_batches):
    for rank, actions in enumerate(pipeline_schedule("1f1b", stages, micro_batches).actions):
        assert [(action.kind, action.micro_batch) for action in actions] == reference.order(stages, micro_batches, rank)


@given(name=st.sampled_from(NAMES), stages=st.integers(1, 9), rounds=st.integers(1, 4), virtual=st.integers(1, 3))
def test_bubbles_are_those_of_the_papers(name, stages, rounds, virtual):
    if name == "zero_bubble":
        virtual = 1
    micro_batches = stages * rounds
    schedule = pipeline_schedule(name, stages, micro_batches, virtual)
    if name == "zero_bubble":
        assert schedule.simulate().bubble == pytest.approx((stages - 1) / (3 * micro_batches + stages - 1))
        return
    expected = (stages - 1) / (micro_batches * virtual + stages - 1)
    in_one = schedule.simulate(input_gradient=2, weight_gradient=0)  # as theirs, whose gradients leave after all of B
    assert in_one.bubble == pytest.approx(expected)
    assert schedule.simulate().bubble <= expected + 1e-9


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("micro_batches", [4, 9])
def test_activations_that_a_rank_keeps(stages, micro_batches):
    for rank in range(stages):
        kept = {name: pipeline_schedule(name, stages, micro_batches).kept(rank) for name in NAMES}
        assert kept["gpipe"] == micro_batches
        assert kept["1f1b"] == stages - rank
        assert kept["zero_bubble"] == stages


def test_memory_that_is_too_small():
    schedule = pipeline_schedule("1f1b", 4, 8)
    schedule.check(activations=2**20, memory=4 * 2**20)
    schedule.check(activations=[2**20, 2**21, 2**20, 2**22], memory=6 * 2**20)
    with pytest.raises(InvalidArgument, match="rank 0 keeps the activations of 4 .* 4 MiB.* 3 MiB, 1 MiB less"):
        schedule.check(activations=2**20, memory=3 * 2**20)
    with pytest.raises(InvalidArgument, match="activations and memory are bytes"):
        schedule.check(activations=1, memory=[1, 2])


def test_simulation_with_slow_links_and_ranks():
    schedule = pipeline_schedule("1f1b", 2, 8)
    even = schedule.simulate()
    assert schedule.simulate(message=1).seconds > even.seconds
    slowed = schedule.simulate(speeds=[1, 0.5])
    assert slowed.busy(1) == 2 * slowed.busy(0) and slowed.idle(1) < slowed.idle(0)
    assert schedule.simulate(forward=2, input_gradient=2, weight_gradient=2).seconds == 2 * even.seconds


def changed(rank, function, **fields):
    """A schedule with other actions on one rank."""
    schedule = pipeline_schedule("1f1b", 2, 3)
    actions = list(schedule.actions)
    actions[rank] = tuple(function(list(actions[rank])))
    return dataclasses.replace(schedule, actions=tuple(actions), **fields)


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (changed(1, lambda row: row[:-1]), "rank 1 has no complete backward pass of micro-batch 2"),
        (changed(0, lambda row: [*row, row[0]]), "rank 0 has F0 after FB of the same"),
        (changed(0, lambda row: [Action("F", 7), *row]), "rank 0 has F7, a micro-batch or stage that there is not"),
        (changed(0, lambda row: [Action("F", 0, 1), *row]), "rank 0 has F0.1, a micro-batch or stage"),
        (changed(1, lambda row: [row[0], Action("W", 0), *row[1:]]), "rank 1 has W0 after F of the same"),
        (changed(0, lambda row: [row[1], row[0], *row[2:]]), "rank 0 sends to rank 1 in another order"),
        (changed(0, list, stages=3), "there are actions for 2 ranks, not 3"),
        (changed(0, list, micro_batches=0), "micro_batches must be a positive integer, not 0"),
    ],
)
def test_schedules_that_cannot_be(schedule, words):
    with pytest.raises(InvalidArgument, match=words):
        schedule.check()


def test_ranks_that_wait_for_each_other():
    """Rank 0 wants a gradient before it has sent what it is of."""
    rows = (("F0", "B0", "F1", "B1"), ("F0", "F1", "B0", "B1"))
    actions = tuple(tuple(Action(name[0], int(name[1])) for name in row) for row in rows)
    with pytest.raises(InvalidArgument, match="wait for each other: rank 0 in B0, rank 1 in F1"):
        Schedule("stuck", 2, 2, 1, actions).check()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("fast", 2, 2), "no schedule 'fast'; there are gpipe, 1f1b, zero_bubble"),
        (("1f1b", 0, 2), "stages must be a positive integer"),
        (("1f1b", 2, -1), "micro_batches must be a positive integer"),
        (("1f1b", 2, 2, 1.5), "virtual must be a positive integer"),
        (("1f1b", 10**9, 2), "stages must be from 1 to"),
    ],
)
def test_schedules_that_there_are_not(arguments, words):
    with pytest.raises(InvalidArgument, match=words):
        pipeline_schedule(*arguments)


def test_the_picture(capsys):
    schedule = pipeline_schedule("1f1b", 2, 3)
    assert str(schedule).splitlines() == [
        "1f1b: 2 stages, 3 micro-batches; bubble 18.2%",
        "rank 0  F0 F1 ...B0----F2 B1----...B2----",
        "rank 1  ...F0 B0----F1 B1----F2 B2----",
    ]
    Console(force_terminal=True, width=200).print(schedule.simulate())
    assert "\x1b[34mF0" in capsys.readouterr().out
    for wide in (pipeline_schedule("zero_bubble", 4, 64), pipeline_schedule("1f1b", 3, 16, 4)):
        lines = str(wide).splitlines()
        assert len(lines) == wide.stages + 1
        assert max(map(len, lines)) < 800
