"""train.Seeds: one seed on all ranks, equal models, and random numbers that depend on step and place alone."""

import random

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mlxdist
from mlxdist import train
from mlxdist.base.errors import InvalidArgument

long = pytest.mark.long


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(3, marks=long)])
def test_seeds(run_ranks, ranks):
    first, *others = run_ranks("seeds.py", ranks, "seeds")
    assert first.startswith("Using seed: ") and "picked at random\n" in first and "Using seed: 11\n" in first
    assert "Using seed: 11, of the state that is restored" in first
    assert others == ["passed\n"] * (ranks - 1)


@pytest.mark.parametrize("check", ["seeds_on_meshes", "model_under_tp"])
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=long)])
def test_meshes(run_ranks, check, ranks):
    outputs = run_ranks("seeds.py", ranks, check)
    assert all("passed\n" in output for output in outputs)


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**62), st.integers(0, 9))
def test_a_step_has_its_numbers_whatever_was_drawn_before(seed, step, drawn):
    def draw():
        return mx.random.uniform(shape=(3,)).tolist(), np.random.rand(3).tolist(), random.random()

    one = train.Seeds(seed)
    one.set_step(step)
    expected = draw()
    other = train.Seeds()
    for _ in range(drawn):
        draw()
    other.restore(one.state)
    other.set_step(step)
    assert draw() == expected
    other.set_step(step + 1)
    assert draw() != expected


def test_models_are_those_of_a_program_that_sets_the_seed_itself(capsys):
    train.Seeds(7)
    ours = mx.random.normal((5,))
    mx.random.seed(7)
    assert mx.array_equal(ours, mx.random.normal((5,)))
    assert capsys.readouterr().out == "Using seed: 7\n"


@pytest.mark.parametrize("seed", [-1, 2**63, 1.0, "7", True])
def test_bad_seeds(seed):
    with pytest.raises(InvalidArgument, match="not an integer from 0 to 2\\*\\*63 - 1"):
        train.Seeds(seed)
    with pytest.raises(InvalidArgument, match="not an integer from 0 to 2\\*\\*63 - 1"):
        train.Seeds(7).restore({"seed": seed})


def test_bad_arguments():
    seeds = train.Seeds(7)
    for step in (-1, 1.0, None):
        with pytest.raises(InvalidArgument, match="set_step: step is .*, not an integer from 0"):
            seeds.set_step(step)
    with pytest.raises(InvalidArgument, match="the state has no seed"):
        seeds.restore({})
    with pytest.raises(InvalidArgument, match="the state is a list, not that of Seeds"):
        seeds.restore([7])
    with pytest.raises(
        InvalidArgument, match="the state has seed 9, and this training was given 7; leave the seed out"
    ):
        seeds.restore({"seed": 9})
    with pytest.raises(InvalidArgument, match="give a group or a mesh, not both"):
        train.Seeds(7, group=mlxdist.init(), mesh=mlxdist.mesh())
    assert seeds.state == {"seed": 7}
