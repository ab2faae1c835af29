"""Group.register: large messages leave from where they lie, and never from where they lay."""

import numpy as np
import pytest

import mlxdist


def test_large_messages_are_not_copied_and_registered_once(run_scenarios):
    run_scenarios("registration.py", 2, "zero_copy")


def test_small_messages_need_no_registration(run_scenarios):
    run_scenarios("registration.py", 2, "small")


@pytest.mark.long
@pytest.mark.parametrize("registered", ["registered", pytest.param("unregistered", marks=pytest.mark.long)])
def test_memory_that_is_freed_and_mapped_again(run_scenarios, registered):
    run_scenarios("registration.py", 2, "remapped", registered)


def test_release_waits_for_the_operation_that_uses_it(run_scenarios):
    run_scenarios("registration.py", 2, "released_while_in_use")


def test_several_regions(run_scenarios):
    run_scenarios("registration.py", 2, "several")


@pytest.mark.parametrize("buffer", [[1.0], 3, np.zeros((4, 4))[:, ::2], None], ids=["list", "int", "strided", "None"])
def test_what_is_no_memory_is_rejected(buffer):
    with pytest.raises(mlxdist.InvalidArgument, match="register"):
        mlxdist.init().register(buffer)


def test_group_of_one():
    with mlxdist.init().register(np.zeros(10)) as registration:
        assert registration.nbytes == 80
    registration.release()
    assert "released" in repr(registration)
